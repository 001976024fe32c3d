/** Lines to paste, with a button that copies them. */
import { button, h } from "./dom";

const SHOWN_MS = 1500;

export function copyBlock(place: string, lines: string): HTMLElement {
  const code = h("pre", { tabindex: 0 }, h("code", {}, lines));
  const copy = button(
    "Copy",
    async () => {
      copy.textContent = (await write(lines, code)) ? "Copied" : "Press Ctrl-C";
      setTimeout(() => (copy.textContent = "Copy"), SHOWN_MS);
    },
    { "aria-label": `Copy the lines for ${place}`, "aria-live": "polite" },
  );
  return h("div", { class: "copy" }, h("h3", {}, place), copy, code);
}

/** Copies, or selects the lines: a page from a file may have no clipboard. */
async function write(lines: string, code: HTMLElement): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(lines);
    return true;
  } catch {
    getSelection()?.selectAllChildren(code);
    return false;
  }
}
