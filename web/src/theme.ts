/** Light and dark: the system's choice, until the reader presses the button. */
import { button, h } from "./dom";

const listeners = new Set<{ element: Element; redraw: () => void }>();
const isDarkSystem = matchMedia("(prefers-color-scheme: dark)");

const probe = h("i", { hidden: true });
const root = document.documentElement;
const isDark = () => (root.dataset["theme"] ?? (isDarkSystem.matches ? "dark" : "light")) === "dark";

/** Returns a colour of the style sheet for a canvas, which knows no variables. */
export function colour(variable: string): string {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${variable})`;
  return getComputedStyle(probe).color;
}

/** Calls `redraw` when colours change, as long as the element is on the page. */
export function onThemeChange(element: Element, redraw: () => void): void {
  listeners.add({ element, redraw });
}

function changed(): void {
  for (const listener of listeners) {
    if (listener.element.isConnected) listener.redraw();
    else listeners.delete(listener);
  }
}

/** Makes the button that switches. */
export function themeButton(): HTMLButtonElement {
  const element = button("", () => {
    root.dataset["theme"] = isDark() ? "light" : "dark";
    label();
    changed();
  });
  const label = () => (element.textContent = isDark() ? "Light" : "Dark");
  isDarkSystem.addEventListener("change", () => (label(), changed()));
  label();
  return element;
}

/** Paper is white: charts are drawn again for it. */
let onScreen: string | undefined;
addEventListener("beforeprint", () => {
  onScreen = root.dataset["theme"];
  root.dataset["theme"] = "light";
  changed();
});
addEventListener("afterprint", () => {
  if (onScreen === undefined) delete root.dataset["theme"];
  else root.dataset["theme"] = onScreen;
  changed();
});
