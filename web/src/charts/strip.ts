/**
 * Marks on one horizontal line, for a cell of a table. The row beside it has the same numbers as text, so
 * that a strip is hidden from screen readers.
 */
import { h, s } from "../dom";
import { nanos } from "../format";
import type { Provenance } from "../types";

/** Maps a value to 0 (left) … 1 (right). */
export type Scale = (value: number) => number;

const clamp = (share: number) => Math.min(Math.max(share, 0), 1);
const at = (share: number) => `${(clamp(share) * 100).toFixed(3)}%`;

/** Makes a linear scale. */
export function linear(low: number, high: number): Scale {
  return high > low ? (value) => (value - low) / (high - low) : () => 0.5;
}

/** Makes a logarithmic scale. Values of 0 and below lie beyond its start. */
export function logarithmic(low: number, high: number): Scale {
  const scale = linear(Math.log(low), Math.log(high));
  return (value) => (value > 0 ? scale(Math.log(value)) : -1);
}

/** Makes a bar. Its pattern shows the provenance. */
export function bar(from: number, to: number, provenance: Provenance): SVGElement {
  const width = clamp(to) - clamp(from);
  return s("rect", { class: `bar ${provenance}`, x: at(from), width: at(width), y: "25%", height: "50%" });
}

/** Makes a range, such as a tolerance, behind other marks. */
export function band(from: number, to: number): SVGElement {
  return s("rect", { class: "band", x: at(from), width: at(clamp(to) - clamp(from)), y: 0, height: "100%" });
}

/** Makes the line of an interval, with its ends. */
export function whisker(low: number, high: number): SVGElement {
  const end = (share: number) => s("line", { x1: at(share), x2: at(share), y1: "30%", y2: "70%" });
  return s(
    "g",
    { class: "whisker" },
    s("line", { x1: at(low), x2: at(high), y1: "50%", y2: "50%" }),
    end(low),
    end(high),
  );
}

/** Makes a dot: an estimate or a median. It is open if its value lies beyond the axis. */
export function dot(share: number, style = share === clamp(share) ? "" : "open"): SVGElement {
  return s("circle", { class: `dot ${style}`, cx: at(share), cy: "50%", r: 4 });
}

/** Makes a vertical line across the strip. */
export function tick(share: number, style = ""): SVGElement {
  return s("line", { class: `tick ${style}`, x1: at(share), x2: at(share), y1: 0, y2: "100%" });
}

/** Makes a column of a histogram, with the text that shows when a pointer is on it. */
export function column(from: number, to: number, height: number, tip: string): SVGElement {
  const [y, part] = [1 - height, height].map((share) => `${(share * 100).toFixed(2)}%`);
  return s("rect", {
    class: "column",
    x: at(from),
    width: at(clamp(to) - clamp(from)),
    y: y!,
    height: part!,
    "data-tip": tip,
  });
}

/** Makes a small dot for each value as one path: 1,000 elements for each of 100 trials would take seconds. */
export function cloud(shares: number[]): SVGElement {
  // Rows of dots, so that equal values do not hide each other.
  const path = shares
    .map((share, nth) => `M${(clamp(share) * 1000).toFixed(1)} ${3 + ((nth * 3) % 5)}h0`)
    .join("");
  return s(
    "svg",
    { viewBox: "0 0 1000 10", preserveAspectRatio: "none" },
    s("path", { class: "cloud", d: path }),
  );
}

/** Makes a histogram, whose columns have their own texts. */
export function histogram(...columns: SVGElement[]): HTMLElement {
  return h("span", { class: "strip histogram", "aria-hidden": true }, s("svg", {}, ...columns));
}

/** Makes a strip with the text that shows when a pointer is on it. */
export function strip(tip: string, ...marks: (SVGElement | null)[]): HTMLElement {
  const shown = marks.filter((mark) => mark !== null);
  return h("span", { class: "strip", "data-tip": tip, "aria-hidden": true }, s("svg", {}, ...shown));
}

/** Returns at most so many powers of ten of an axis of times. */
export function decades(scale: Scale, most = 4): { at: number; text: string }[] {
  const inside = Array.from({ length: 12 }, (_, power) => 10 ** power).filter(
    (ns) => scale(ns) > 0 && scale(ns) < 1,
  );
  const marks = inside.filter((_, nth) => nth % Math.ceil(inside.length / most) === 0);
  return marks.map((ns) => ({ at: scale(ns), text: nanos(ns).replace(/\.0+/, "") }));
}

/** Makes the heading of a column of strips: labels at their places. */
export function axis(label: string, marks: { at: number; text: string }[]): HTMLElement {
  const anchor = (share: number) => (share < 0.1 ? "start" : share > 0.9 ? "end" : "middle");
  const text = (mark: { at: number; text: string }) =>
    s("text", { x: at(mark.at), y: "75%", "text-anchor": anchor(mark.at) }, mark.text);
  return h(
    "span",
    {},
    h("span", { class: "visually-hidden" }, label),
    h("span", { class: "strip axis", "aria-hidden": true }, s("svg", {}, ...marks.map(text))),
  );
}

/** Makes the axis of ratios and its scale. It is as long as the ratios need, and 1 is in its middle. */
export function ratioAxis(ratios: number[]): { scale: Scale; head: HTMLElement } {
  const isWithin = (end: number) => ratios.every((ratio) => ratio < end && ratio * end > 1);
  const end = [2, 4, 16, 64, 256].find(isWithin) ?? 1024;
  const scale = logarithmic(1 / end, end);
  const head = axis("ratio", [
    { at: 0, text: `÷${end}` },
    { at: 0.5, text: "1×" },
    { at: 1, text: `${end}×` },
  ]);
  return { scale, head };
}

/** Makes the patterns of bars, once for the page: modeled is hatched, derived is dotted, measured is solid. */
export function patterns(): SVGElement {
  const pattern = (id: string, mark: SVGElement) =>
    s("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse" }, mark);
  return s(
    "svg",
    { class: "patterns", "aria-hidden": true },
    pattern("modeled", s("path", { class: "pattern", d: "M-1 1l2-2M0 5l5-5M4 6l2-2" })),
    pattern("derived", s("circle", { class: "pattern", cx: 2.5, cy: 2.5, r: 0.9 })),
  );
}
