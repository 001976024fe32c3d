/** Two documents beside each other: the ratio of each value. */
import { axis, dot, logarithmic, strip, tick, whisker } from "../charts/strip";
import { h } from "../dom";
import { fixed, MISSING, quantity, ratio } from "../format";
import { number, plotColumn, table, text } from "../table";
import type { Comparison, ComparisonRow } from "../types";
import { article, note, notes, title } from "./parts";

export function comparisonView(
  comparison: Comparison,
  names: [string, string] = ["first", "second"],
): HTMLElement {
  return article(
    title("comparison", `${names[1]} ÷ ${names[0]}`),
    comparison.incomparable.length > 0 &&
      h(
        "div",
        { class: "refusal", role: "alert" },
        h("p", {}, "These reports should not be compared. They differ in"),
        notes(comparison.incomparable),
        h("p", { class: "hint" }, "hint: compare reports of the same job on the same machine"),
      ),
    notes(comparison.settings.map((setting) => `setting differs: ${setting}`)),
    comparison.rows.length > 0 ? comparisonTable(comparison.rows) : note("The two have no value in common."),
  );
}

const quotient = ({ medians: [first, second], ratio }: ComparisonRow) =>
  ratio?.value ?? (first === 0 ? null : second / first);

function comparisonTable(rows: ComparisonRow[]): HTMLElement {
  const scale = logarithmic(0.25, 4);
  const plot = (row: ComparisonRow) => {
    const value = quotient(row);
    if (value === null) return null;
    const interval = row.ratio && whisker(scale(row.ratio.low), scale(row.ratio.high));
    return strip(`${row.id}: ${ratioText(row)}`, tick(scale(1)), interval, dot(scale(value)));
  };
  return table(
    "Ratio of each value: second ÷ first, with 95 % intervals where both have several runs",
    rows,
    [
      text("value", (row) => row.id),
      number("first", (row) => quantity(row.unit, row.medians[0])),
      number("second", (row) => quantity(row.unit, row.medians[1])),
      text("runs", (row) => row.run_counts.join(", ")),
      text("second ÷ first (95 %)", ratioText),
      plotColumn(
        axis(
          "ratio",
          [0.25, 1, 4].map((value) => ({ at: scale(value), text: `${value}×` })),
        ),
        plot,
      ),
      text("", meaning, "text"),
    ],
  );
}

function ratioText(row: ComparisonRow): string {
  if (row.ratio) return ratio(row.ratio);
  const value = quotient(row);
  return value === null ? MISSING : fixed(value, 3);
}

function meaning({ provenance, ratio }: ComparisonRow): string {
  if (provenance[0] !== provenance[1]) return `${provenance[1]} ÷ ${provenance[0]}`;
  if (!ratio) return "no interval: one run on a side";
  if (ratio.low <= 1 && ratio.high >= 1) return "no difference shown";
  return ratio.value > 1 ? "more" : "less";
}
