/** Documents beside each other: the verdict on the elapsed time, and the ratio of each value. */
import { dot, ratioAxis, strip, tick, whisker } from "../charts/strip";
import { holdsOne, timeRow } from "../compare";
import { h, section, type Child } from "../dom";
import { count, fixed, MISSING, nanos, quantity, ratio } from "../format";
import { number, plotColumn, table, text, type Column } from "../table";
import type { Comparison, Comparisons, ComparisonRow } from "../types";
import { article, figure, note, notes, title } from "./parts";

export function comparisonView(comparison: Comparison): HTMLElement {
  const { parameters, rows } = comparison;
  const quotient = quotientOf(comparison);
  const time = timeRow(rows);
  return article(
    parameters?.length > 0
      ? title("comparison", parameters.join(", "), quotient)
      : title("comparison", quotient),
    h(
      "section",
      { class: "verdict", "aria-label": "Verdict" },
      reasons(comparison),
      verdictLine(comparison),
      time && h("div", { class: "figures" }, timeFigure(time)),
      settingsNote(comparison),
    ),
    section("Values", ratioTable(comparison)),
  );
}

/** Makes the strips of all elapsed times, then each comparison as a section. */
export function comparisonsView({ comparisons }: Comparisons): HTMLElement {
  const times = comparisons.flatMap(({ rows }) => timeRow(rows) ?? []);
  const strips = ratioStrips(times);
  const first = comparisons[0]?.names[0] ?? "";
  const time = (one: Comparison) => timeRow(one.rows);
  const cell = (of: (row: ComparisonRow) => Child) => (one: Comparison) => {
    const row = time(one);
    return row ? of(row) : MISSING;
  };
  return article(
    title("comparisons", `${count(comparisons.length)} reports ÷ ${first}`),
    table(
      `Elapsed time of each report ÷ ${first}${times[0] ? `, ${nanos(times[0].medians[0])}` : ""}`,
      comparisons,
      [
        text("report", ({ names }) => names[1]),
        text("differs in", ({ parameters }) => parameters.join(", ")),
        number("elapsed", (one) => quantity("ns", time(one)?.medians[1])),
        text("ratio (95 %)", cell(ratioText)),
        plotColumn(strips.head, cell(strips.mark)),
        text("", cell(meaning), "text"),
      ],
    ),
    ...comparisons.map((one) => {
      const quotient = quotientOf(one);
      const heading = one.parameters.join(", ");
      return section(
        heading || quotient,
        heading && h("p", { class: "detail" }, quotient),
        reasons(one),
        verdictLine(one),
        settingsNote(one),
        ratioTable(one),
      );
    }),
  );
}

/** Older documents have no names. */
const quotientOf = ({ names }: Comparison) => `${names?.[1] || "second"} ÷ ${names?.[0] || "first"}`;

const verdictLine = ({ verdict }: Comparison) =>
  verdict ? h("p", { class: "reason" }, `Verdict: ${verdict}`) : null;

function timeFigure(row: ComparisonRow): HTMLElement | null {
  if (quotient(row) === null) return null;
  const [value, interval] = ratioText(row).split(/ (?=\()/);
  const { mark } = ratioStrips([row]);
  return figure(`${value}×`, `the elapsed time ${interval ?? `(${meaning(row)})`}`, mark(row));
}

const reasons = ({ incomparable }: Comparison) =>
  incomparable.length > 0 &&
  h(
    "div",
    { class: "refusal", role: "alert" },
    h("p", {}, "These reports should not be compared. They differ in"),
    notes(incomparable),
    h("p", { class: "hint" }, "hint: compare reports of the same job on the same machine"),
  );

const settingsNote = ({ settings }: Comparison) =>
  notes(settings.map((setting) => `setting differs: ${setting}`));

const quotient = ({ medians: [first, second], ratio }: ComparisonRow) =>
  ratio?.value ?? (first === 0 ? null : second / first);

/** Makes the strips of ratios and their axis. */
function ratioStrips(rows: ComparisonRow[]) {
  const { scale, head } = ratioAxis(
    rows.flatMap((row) => (row.ratio ? [row.ratio.low, row.ratio.high] : quotient(row) || 1)),
  );
  const mark = (row: ComparisonRow) => {
    const value = quotient(row);
    if (value === null) return null;
    const interval = row.ratio && whisker(scale(row.ratio.low), scale(row.ratio.high));
    return strip(`${row.id}: ${ratioText(row)}`, tick(scale(1)), interval, dot(scale(value)));
  };
  return { head, mark };
}

function ratioTable(comparison: Comparison): HTMLElement {
  const { rows } = comparison;
  if (rows.length === 0) return note("The two have no value in common.");
  const strips = ratioStrips(rows);
  const time = timeRow(rows);
  const columns: Column<ComparisonRow>[] = [
    text("value", (row) => row.id),
    number("first", (row) => quantity(row.unit, row.medians[0])),
    number("second", (row) => quantity(row.unit, row.medians[1])),
    text("runs", (row) => row.run_counts.join(", ")),
    text("second ÷ first (95 %)", ratioText),
    plotColumn(strips.head, strips.mark),
    text("", meaning, "text"),
  ];
  return table(
    `Ratio of each value: ${quotientOf(comparison)}, with 95 % intervals where both have several runs`,
    rows,
    columns,
    (row) => (row === time ? "winner" : undefined),
  );
}

function ratioText(row: ComparisonRow): string {
  if (row.ratio) return ratio(row.ratio);
  const value = quotient(row);
  return value === null ? MISSING : fixed(value, 3);
}

function meaning({ provenance, ratio, run_counts }: ComparisonRow): string {
  if (provenance[0] !== provenance[1]) return `${provenance[1]} ÷ ${provenance[0]}`;
  if (!ratio) return run_counts.includes(1) ? "no interval: one run on a side" : "no interval: a median of 0";
  if (holdsOne(ratio)) return "no difference shown";
  return ratio.value > 1 ? "more" : "less";
}
