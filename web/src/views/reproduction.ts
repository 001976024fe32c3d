/** Published figures beside simulated ones: curves with tolerances, and a table of ratios. */
import { lineChart, logBaseFor } from "../charts/lines";
import { axis, band, dot, logarithmic, strip, tick, whisker } from "../charts/strip";
import { folded, h, section } from "../dom";
import { count, fixed, MISSING, significant } from "../format";
import { number, plotColumn, table, text } from "../table";
import type { Reproduction, ReproductionRow } from "../types";
import { article, note, notes, title } from "./parts";

type Table = Reproduction["tables"][number];
type Row = ReproductionRow;

/** Fewer points are no curve. */
const POINTS_MIN = 4;
/** A ratio that a tolerance of a direction reaches, and no tolerance of a figure. */
const ONE_SIDED = 5;

export function reproductionView(document: Reproduction): HTMLElement {
  const { tables, ok, asserts, seeds } = document;
  const missed = tables.flatMap(({ rows }) => rows.filter((row) => row.verdict === "miss"));
  return article(
    title(
      "reproduction",
      ok ? "Every asserted figure is within its tolerance" : `${missed.length} figures miss their tolerance`,
      sum(document),
      !asserts && `Nothing is asserted: ${seeds} seeds are too few for the tolerances.`,
    ),
    missed.length > 0 && ratioTable("Figures that miss", missed),
    section(
      "Reports",
      table("Figures within their tolerance", tables, [
        text("report", ({ name }) => name),
        ...["calibrated", "predicted", "consistency"].map((status) =>
          number<Table>(status === "calibrated" ? "fitted" : status, (of) => within(of, status)),
        ),
        text("what it is", (of) => of.title.split(":")[0], "text"),
      ]),
    ),
    ...tables.map(tableSection),
  );
}

const isAsserted = ({ verdict }: Row) => verdict === "ok" || verdict === "miss";
const isPublished = ({ status }: Row) => status === "calibrated" || status === "predicted";

function within({ rows }: Table, status: string): string {
  const asserted = rows.filter((row) => isAsserted(row) && row.status === status);
  return `${asserted.filter(({ verdict }) => verdict === "ok").length} of ${asserted.length}`;
}

function sum({ tables, seeds }: Reproduction): string {
  const rows = tables.flatMap((of) => of.rows);
  const number = (wanted: (row: Row) => boolean) => count(rows.filter(wanted).length);
  const isMissed = ({ verdict }: Row) => verdict === "miss";
  const isOwn = ({ status }: Row) => status === "consistency";
  return (
    `${number((row) => isAsserted(row) && isPublished(row))} published figures asserted, ${number((row) => isMissed(row) && !isOwn(row))} missed; ` +
    `${number((row) => isAsserted(row) && isOwn(row))} checks of consistency, ${number((row) => isMissed(row) && isOwn(row))} missed; ` +
    `${number(({ verdict }) => verdict === "reported")} figures reported only, ${number(({ status }) => status === "derived")} derived, ` +
    `${number(({ status }) => status === "not_reproducible")} not reproducible; ${count(seeds)} seeds.`
  );
}

function tableSection({ name, title, source, notes: remarks, rows }: Table): HTMLElement | null {
  const simulated = rows.filter(({ status }) => status !== "not_reproducible");
  const curves = curvesOf(simulated);
  const inCurves = new Set(curves.flat());
  const others = simulated.filter((row) => !inCurves.has(row));
  const why = rows
    .filter((row) => row.why)
    .map((row) =>
      row.status === "not_reproducible"
        ? `Not reproducible: ${row.figure}: ${row.why}.`
        : `${nameOf(row)}: ${row.why}.`,
    );
  return section(
    `${name}: ${title}`,
    note(`published in: ${source}`),
    curves.length > 0 &&
      note("Curves: the pale band is the tolerance, the darker band is low to high over the seeds."),
    curves.length > 0 && h("div", { class: "charts" }, ...curves.map(curveChart)),
    others.length > 0 &&
      ratioTable(
        "Simulated ÷ published: the band is the tolerance, an open dot lies beyond the axis",
        others,
      ),
    inCurves.size > 0 &&
      folded(`Table: the ${inCurves.size} figures of the curves`, () =>
        ratioTable("Figures of the curves", [...inCurves]),
      ),
    notes(remarks),
    why.length > 0 && folded("Remarks", () => notes(why)),
  );
}

/** Collects curves: a figure at rising values of one key. A key that falls begins the next machine. */
function curvesOf(rows: Row[]): Row[][] {
  const open = new Map<string, Row[]>();
  const curves: Row[][] = [];
  for (const row of rows) {
    const keys = Object.keys(row.key);
    if (keys.length !== 1) continue;
    const of = `${row.figure} ${keys[0]}`;
    const curve = open.get(of);
    if (curve && keyOf(row) > keyOf(curve.at(-1)!)) curve.push(row);
    else curves.push(open.set(of, [row]).get(of)!);
  }
  return curves.filter((curve) => curve.length >= POINTS_MIN);
}

const keyOf = (row: Row) => Object.values(row.key)[0]!;

function curveChart(rows: Row[]): HTMLElement {
  const bound = (nth: 0 | 1) =>
    rows.map(({ published, tolerance }) => (tolerance ? published * tolerance[nth] : null));
  const simulated = (key: "median" | "low" | "high") => rows.map((row) => row.simulated?.[key] ?? null);
  const published = rows.map((row) => row.published);
  const line = (label: string, values: (number | null)[], style?: "points" | "edge") => ({
    label,
    values,
    style,
    show: significant,
  });
  return lineChart({
    title: `${rows[0]!.figure}, ${rows[0]!.status}`,
    x: { label: Object.keys(rows[0]!.key)[0]!, values: rows.map(keyOf), show: significant },
    lines: [
      line("simulated", simulated("median")),
      line("published", published, "points"),
      line("tolerance from", bound(0), "edge"),
      line("tolerance to", bound(1), "edge"),
      line("simulated from", simulated("low"), "edge"),
      line("simulated to", simulated("high"), "edge"),
    ],
    bands: [
      { edges: [2, 3], style: "--band" },
      { edges: [4, 5], style: "--band-strong" },
    ],
    yLogBase: logBaseFor(published),
  });
}

const nameOf = ({ figure, key }: Row) =>
  figure +
  Object.entries(key)
    .map(([name, value]) => ` at ${name} ${significant(value)}`)
    .join("");

/** Formats a tolerance of a ratio. A claim of direction alone has one bound: no run reaches the other. */
function toleranceText([low, high]: [number, number]): string {
  if (low >= 0.99 && high > ONE_SIDED) return `at least ${fixed(low, 2)}`;
  return low <= 0.01 ? `at most ${fixed(high, 2)}` : `${fixed(low, 2)} – ${fixed(high, 2)}`;
}

const WORDS: Record<string, string> = { miss: "MISS", derived: "not compared", not_reproducible: MISSING };

function ratioTable(caption: string, rows: Row[]): HTMLElement {
  const scale = logarithmic(0.5, 2);
  const plot = ({ ratio, tolerance, simulated, published, figure }: Row) =>
    ratio === null
      ? null
      : strip(
          `${figure}: ${fixed(ratio, 3)}${tolerance ? `, tolerance ${toleranceText(tolerance)}` : ""}`,
          tolerance && band(scale(tolerance[0]), scale(tolerance[1])),
          tick(scale(1)),
          simulated && published !== 0
            ? whisker(scale(simulated.low / published), scale(simulated.high / published))
            : null,
          dot(scale(ratio)),
        );
  const spread = ({ simulated }: Row) => {
    if (!simulated) return MISSING;
    const [low, high] = [significant(simulated.low), significant(simulated.high)];
    return low === high ? "" : `${low} – ${high}`;
  };
  const valueCount = ({ value_count, least_of }: Row) =>
    value_count === 0
      ? MISSING
      : least_of === 1
        ? count(value_count)
        : `${value_count} × least of ${least_of}`;
  return table(caption, rows, [
    text("figure", nameOf, "text"),
    number("published", (row) => significant(row.published)),
    number("simulated", ({ simulated }) => (simulated ? significant(simulated.median) : MISSING)),
    number("spread", spread),
    number("ratio", ({ ratio }) => (ratio === null ? MISSING : fixed(ratio, 3))),
    plotColumn(
      axis(
        "ratio and tolerance",
        [0.5, 1, 2].map((value) => ({ at: scale(value), text: `${value}×` })),
      ),
      plot,
    ),
    number("tolerance", ({ tolerance }) => (tolerance ? toleranceText(tolerance) : MISSING)),
    text("verdict", ({ verdict }) => WORDS[verdict] ?? verdict),
    text("status", ({ status }) => status.replace("_", " ")),
    number("of", valueCount),
  ]);
}
