/** Elements. Data enters the page only here: as text nodes and attributes, never as markup. */

export type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | undefined>;

const SVG = "http://www.w3.org/2000/svg";

const isShown = (child: Child): child is Node | string => child != null && child !== false;

function fill<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter(isShown));
  return element;
}

/** Makes an HTML element. */
export function h<T extends keyof HTMLElementTagNameMap>(
  tag: T,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[T] {
  return fill(document.createElement(tag), attributes, children);
}

/** Makes an SVG element. */
export function s(tag: string, attributes: Attributes = {}, ...children: Child[]): SVGElement {
  return fill(document.createElementNS(SVG, tag) as SVGElement, attributes, children);
}

/** Makes a button with an action. */
export function button(label: string, action: () => void, attributes: Attributes = {}): HTMLButtonElement {
  const element = h("button", { type: "button", ...attributes }, label);
  element.addEventListener("click", action);
  return element;
}

/** Makes a part of a view with its heading; null if it is empty. */
export function section(title: string, ...children: Child[]): HTMLElement | null {
  const body = children.filter(Boolean);
  return body.length === 0 ? null : h("section", {}, h("h2", {}, title), ...body);
}

/** Makes a part that is built when it is first opened: its table may have 100,000 cells. */
export function folded(title: string, build: () => Child): HTMLDetailsElement {
  const details = h("details", {}, h("summary", {}, title));
  details.addEventListener("toggle", () => details.append(...[build()].filter(isShown)), { once: true });
  return details;
}
