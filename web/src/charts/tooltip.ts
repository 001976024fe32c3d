/** The text of an element's `data-tip`, beside the pointer. */
import { h } from "../dom";

const GAP_PX = 12;

/** Shows tips for all elements of the page. */
export function showTips(): void {
  const tip = h("div", { class: "tip", hidden: true, "aria-hidden": true });
  document.body.append(tip);
  document.addEventListener("pointermove", (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    tip.hidden = target === null;
    if (target === null) return;
    tip.textContent = target.getAttribute("data-tip");
    const left = Math.min(event.clientX + GAP_PX, innerWidth - tip.offsetWidth - GAP_PX);
    tip.style.transform = `translate(${Math.max(left, 0)}px, ${event.clientY + GAP_PX}px)`;
  });
}
