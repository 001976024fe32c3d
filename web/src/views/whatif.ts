/** A prediction: the time on each page size, what is saved, and why. */
import { axis, bar, dot, linear, strip, tick, whisker } from "../charts/strip";
import { h, section } from "../dom";
import { bytes, count, fixed, MISSING, nanos, percent, quantity } from "../format";
import { number, plotColumn, table, text } from "../table";
import type { Bounded, WalkReasons, WhatIf } from "../types";
import { article, figure, note, notes, title } from "./parts";

type Size = WhatIf["sizes"][number];

const PATTERNS: Record<string, string> = { dependent: "each from the last", independent: "known beforehand" };

export function whatIfView(forecast: WhatIf): HTMLElement {
  const { of, access_count, sizes, walk_paces, notes: remarks } = forecast;
  const best = sizes.filter(({ speedup }) => speedup).sort((a, b) => b.speedup!.value - a.speedup!.value)[0];
  return article(
    title(
      "what if",
      of,
      `${count(access_count)} loads and stores; predicted from its pages and this machine's calibration`,
    ),
    best &&
      h(
        "section",
        { class: "verdict", "aria-label": "Prediction" },
        h(
          "div",
          { class: "figures" },
          figure(
            `${fixed(best.speedup!.value, 3)}×`,
            `as fast on ${bytes(best.page_bytes)} pages, predicted (${bounds(best.speedup, number3)})`,
          ),
        ),
      ),
    section("Time by page size", timeTable(forecast)),
    section("What is saved, of CPU time", savedTable(sizes)),
    section(
      "Why",
      whyTable(forecast),
      notes(
        walk_paces.map(
          ({ pattern, value }) =>
            `walks, ${PATTERNS[pattern] ?? pattern}, cost ${fixed(value, 2)} times what they did when calibrated`,
        ),
      ),
    ),
    notes(remarks),
  );
}

/** Formats a ratio. A bound that is not finite is null in JSON. */
const number3 = (value: number | null) => (value === null ? "no bound" : fixed(value, 3));
const bounds = (of: Bounded | null, show: (value: number) => string) =>
  of ? `${show(of.low)} – ${show(of.high)}` : "";

function timeTable({ base, sizes }: WhatIf): HTMLElement {
  const signed = (error: number) => `${error < 0 ? "" : "+"}${fixed(error, 1)} %`;
  const rows: (Size | null)[] = [null, ...sizes];
  return table("Time (derived, but for the time on base pages)", rows, [
    text("pages", (size) => (size ? bytes(size.page_bytes) : "4K")),
    number("time", (size) => (size ? quantity("ns", size.time_ns?.value) : quantity("ns", base.time_ns))),
    text("low – high", (size) =>
      size ? bounds(size.time_ns, nanos) : base.time_ns === null ? "" : "measured",
    ),
    number("speed-up", (size) => (size ? (size.speedup ? number3(size.speedup.value) : MISSING) : "1")),
    text("low – high", (size) => size && bounds(size.speedup, number3)),
    number("measured", (size) =>
      size?.measured_speedup ? number3(size.measured_speedup.value) : size ? MISSING : "",
    ),
    number("error", (size) =>
      size ? (size.error_percent === null ? MISSING : signed(size.error_percent)) : "",
    ),
    number("took", (size) =>
      size ? (size.took?.fraction == null ? MISSING : percent(size.took.fraction)) : "",
    ),
  ]);
}

function savedTable(sizes: Size[]): HTMLElement {
  const rows = sizes.flatMap((size) => [
    ...Object.entries(size.saved_parts_ns).map(([part, saved]) => ({
      size,
      part: part.replace("_", " "),
      saved,
    })),
    { size, part: "all", saved: size.saved_ns },
  ]);
  const all = rows.flatMap(({ saved }) => [saved.low, saved.high]);
  const [low, high] = [Math.min(0, ...all), Math.max(0, ...all)];
  const scale = linear(low, high);
  return table(
    "What is saved; a negative time is lost",
    rows,
    [
      text("pages", ({ size }) => bytes(size.page_bytes)),
      text("of", ({ part }) => part),
      number("saved", ({ saved }) => nanos(saved.value)),
      plotColumn(
        axis("saved", [
          { at: scale(0), text: "0" },
          { at: 1, text: nanos(high) },
        ]),
        ({ part, saved }) =>
          strip(
            `${part}: ${nanos(saved.value)} (${bounds(saved, nanos)})`,
            tick(scale(0)),
            bar(Math.min(scale(0), scale(saved.value)), Math.max(scale(0), scale(saved.value)), "derived"),
            whisker(scale(saved.low), scale(saved.high)),
            dot(scale(saved.value)),
          ),
      ),
      text("low – high", ({ saved }) => bounds(saved, nanos)),
    ],
    ({ part }) => (part === "all" ? "winner" : undefined),
  );
}

function whyTable({ base, sizes }: WhatIf): HTMLElement {
  const rows: { pages: string; why: WalkReasons }[] = [
    { pages: "4K", why: base.why },
    ...sizes.map(({ page_bytes, why }) => ({ pages: bytes(page_bytes), why })),
  ];
  const counted = base.measured_fault_count;
  return h(
    "div",
    {},
    table("Page walks and faults", rows, [
      text("pages", ({ pages }) => pages),
      number("chased walks", ({ why }) => count(why.chased_walk_count)),
      number("other walks", ({ why }) => count(why.other_walk_count)),
      number("translation", ({ why }) => nanos(why.translation_ns.value)),
      text("low – high", ({ why }) => bounds(why.translation_ns, nanos)),
      number("faults", ({ why }) => count(why.base_fault_count)),
      number("large", ({ why }) => count(why.large_fault_count)),
    ]),
    counted !== null && note(`a run on 4K pages had ${count(counted)} faults of all kinds`),
  );
}
