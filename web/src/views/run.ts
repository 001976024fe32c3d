/** A run: its tax, its series with phases, latency, budget, counters and the tables of old tools. */
import { COUNTERS } from "../causes";
import { lineChart, type Plot } from "../charts/lines";
import {
  axis,
  band,
  column,
  decades,
  dot,
  histogram,
  logarithmic,
  strip,
  tick,
  whisker,
  type Scale,
} from "../charts/strip";
import { folded, h, section } from "../dom";
import { count, MISSING, nanos, quantity, range, unitOf } from "../format";
import { number, plotColumn, table, text, type Column } from "../table";
import type { Latency, Phase, Reading, Run } from "../types";
import {
  article,
  budgetSection,
  environmentSection,
  figure,
  machineLine,
  note,
  provenance,
  taxFigure,
  title,
  warningsSection,
} from "./parts";

export function runView(run: Run): HTMLElement {
  const { job, machine, budget } = run;
  const params = (of: Record<string, string> = {}) =>
    Object.entries(of)
      .map(([key, value]) => `${key}=${value}`)
      .join(" ");
  const ofMachine = params(job.machine_params);
  const faults =
    (run.counters["minor_fault_count"]?.value ?? 0) + (run.counters["major_fault_count"]?.value ?? 0);
  return article(
    title(
      "run",
      `${job.name} on ${machine.name}`,
      `${params(job.params)} seed=${job.seed}`,
      ofMachine && `set by the machine's file, not the job's defaults: ${ofMachine}`,
      trust(machine),
      machineLine(run.environment),
    ),
    h(
      "section",
      { class: "verdict", "aria-label": "Result" },
      h(
        "div",
        { class: "figures" },
        budget && taxFigure(budget),
        figure(nanos(run.wall_ns), "elapsed"),
        figure(count(faults), "page faults"),
      ),
    ),
    seriesSection(run),
    latencySection(run),
    phasesSection(run.phases),
    budget && budgetSection(budget),
    countersSection(run.counters),
    ...(run.tables ?? []).map(oldTable),
    warningsSection(run.warnings),
    environmentSection(run.environment),
  );
}

/** Describes the trust in a machine's numbers. */
export function trust({ kind, validated }: Run["machine"]): string {
  if (kind === "host") return "measured";
  if (kind === "null") return "measured; the harness alone, no memory is touched";
  return validated
    ? "modeled, checked against published figures of this job"
    : "modeled, not checked against published figures";
}

/** The charts of a series: the columns that each draws. */
const CHARTS: { title: string; columns: RegExp; yLogBase?: 10 }[] = [
  { title: "Faults", columns: /fault_count$|^(zero_fill|rescue)_count$/ },
  { title: "Paging", columns: /^(page|swap|demand_page)_(in|out)_count$/ },
  { title: "Reclaim", columns: /^(reclaim|compaction)_.*_count$/ },
  { title: "Page-in latency", columns: /^page_in_latency_ns_/, yLogBase: 10 },
  { title: "Fault latency", columns: /^fault_latency_ns_/, yLogBase: 10 },
  { title: "CPU time", columns: /^(user|kernel|kernel_daemon|run_queue)_ns$/ },
  { title: "Memory", columns: /bytes/ },
  { title: "Accesses", columns: /^access_count$/ },
];

const isMoving = (values: (number | null)[] | undefined) =>
  values?.some((value) => value !== null && value !== 0) ?? false;

function seriesSection(run: Run): HTMLElement | null {
  const { time_ns: time, ...columns } = run.series.columns;
  if (!time?.length) return null;
  const still = Object.keys(columns).filter((name) => !isMoving(columns[name]));
  const isMissing = (name: string) => columns[name]!.every((value) => value === null);
  const missing = still.filter(isMissing).map((name) => `${name}: missing`);
  const zero = still.filter((name) => !isMissing(name)).map((name) => `${name}: 0`);
  return section(
    `Series, in intervals of ${nanos(run.series.interval_ns)}`,
    ...seriesPlots(run).map((plot) => lineChart(plot)),
    still.length > 0 && note(`Throughout the run, ${[...zero, ...missing].join(", ")}`),
  );
}

/** Returns the charts of a run's series, without columns that are 0 or missing all the time. */
export function seriesPlots({ series, phases }: Run): Plot[] {
  const { time_ns: time, ...columns } = series.columns;
  if (!time?.length) return [];
  const others = (name: string) => CHARTS.every((chart) => !chart.columns.test(name));
  const all = [...CHARTS, { title: "Others", columns: others }];
  return all.flatMap(({ columns: wanted, ...chart }) => {
    const isWanted = (name: string) => (typeof wanted === "function" ? wanted(name) : wanted.test(name));
    const drawn = Object.keys(columns).filter((name) => isWanted(name) && isMoving(columns[name]));
    if (drawn.length === 0) return [];
    const line = (name: string) => ({
      label: name,
      values: columns[name]!,
      show: (value: number) => quantity(unitOf(name), value),
    });
    return [
      {
        ...chart,
        x: { label: "time", values: time as number[], show: nanos },
        lines: drawn.map(line),
        parts: phases.map(({ name, start_ns, end_ns }) => ({ name, from: start_ns, to: end_ns })),
      },
    ];
  });
}

function latencySection({ latency }: Run): HTMLElement | null {
  const rows = Object.entries(latency);
  if (rows.length === 0) return null;
  const all = rows.flatMap(([, { min_ns, max_ns }]) => [Math.max(min_ns, 1), Math.max(max_ns, 1)]);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const scale = logarithmic(low / 1.1, high * 1.1);
  const marks = decades(scale);
  const plot = ([kind, times]: [string, Latency]) =>
    strip(
      `${kind}: p50 ${nanos(times.p50_ns)}, p90 ${nanos(times.p90_ns)}, p99 ${nanos(times.p99_ns)}`,
      ...marks.map(({ at }) => tick(at, "faint")),
      whisker(scale(times.min_ns), scale(times.max_ns)),
      band(scale(times.p50_ns), scale(times.p99_ns)),
      tick(scale(times.p90_ns), "median"),
      dot(scale(times.p50_ns)),
      dot(scale(times.mean_ns), "open"),
    );
  const time = (head: string, of: (latency: Latency) => number) =>
    number<[string, Latency]>(head, ([, times]) => nanos(of(times)));
  return section(
    "Latency of faults",
    table(
      "Latency by kind of fault: line from min to max, box from p50 to p99 with p90, dot p50, circle mean",
      rows,
      [
        text("kind", ([kind]) => kind),
        number("count", ([, { count: seen, of_count }]) =>
          of_count != null && of_count > seen ? `${count(seen)} of ${count(of_count)}` : count(seen),
        ),
        plotColumn(axis("min to max, p50, p90, p99, mean", marks), plot),
        time("min", (times) => times.min_ns),
        time("mean", (times) => times.mean_ns),
        time("p50", (times) => times.p50_ns),
        time("p90", (times) => times.p90_ns),
        time("p99", (times) => times.p99_ns),
        time("max", (times) => times.max_ns),
        text("provenance", ([, times]) => provenance(times.provenance)),
      ],
    ),
    ...histograms(rows, scale, marks),
  );
}

/** The ratio of a bucket's ends: four buckets in each doubling. */
const BUCKET_RATIO = 2 ** (1 / 4);

/** Makes the histograms of all kinds over one axis, and the table of their buckets. */
function histograms(
  latencies: [string, Latency][],
  scale: Scale,
  marks: { at: number; text: string }[],
): HTMLElement[] {
  const rows = latencies.filter(([, { buckets }]) => buckets?.length);
  if (rows.length === 0) return [];
  const plot = ([kind, { buckets = [] }]: [string, Latency]) => {
    const most = Math.max(...buckets.map((bucket) => bucket.count));
    return histogram(
      ...buckets.map(({ up_to_ns, count: faults }) =>
        column(
          scale(up_to_ns / BUCKET_RATIO),
          scale(up_to_ns),
          faults / most,
          `${kind}: ${count(faults)} faults of at most ${nanos(up_to_ns)}`,
        ),
      ),
    );
  };
  const buckets = rows.flatMap(([kind, latency]) =>
    (latency.buckets ?? []).map((bucket) => ({ kind, ...bucket })),
  );
  return [
    table("Histogram of latencies, each from 0 to its most frequent", rows, [
      text("kind", ([kind]) => kind),
      plotColumn(axis("number of faults by latency", marks), plot),
      number("most frequent", ([, { buckets: of = [] }]) => count(Math.max(...of.map((one) => one.count)))),
    ]),
    folded("Table: histogram of latencies", () =>
      table("Faults by latency", buckets, [
        text("kind", ({ kind }) => kind),
        number("up to", ({ up_to_ns }) => nanos(up_to_ns)),
        number("faults", ({ count: faults }) => count(faults)),
      ]),
    ),
  ];
}

const reading = (of: Reading | undefined) => (of ? quantity(of.unit, of.value) : MISSING);

function phasesSection(phases: Phase[]): HTMLElement | null {
  if (phases.length === 0) return null;
  const hasMoved = (id: string) => phases.some(({ counters }) => counters[id] && counters[id].value !== 0);
  const ids = [...new Set(phases.flatMap(({ counters }) => Object.keys(counters)))]
    .sort()
    .filter((id) => id !== "wall_ns" && hasMoved(id));
  const rows: [string, (phase: Phase) => string][] = [
    ["start", (phase) => nanos(phase.start_ns)],
    ["length", (phase) => nanos(Math.max(0, phase.end_ns - phase.start_ns))],
    ...ids.map((id): [string, (phase: Phase) => string] => [id, ({ counters }) => reading(counters[id])]),
  ];
  const columns = phases.map((phase): Column<(typeof rows)[number]> =>
    number(phase.name, ([, cell]) => cell(phase)),
  );
  return section(
    "Phases",
    table("Counters of each phase", rows, [text("counter", ([id]) => id), ...columns]),
  );
}

function countersSection(counters: Record<string, Reading>): HTMLElement | null {
  const rows = Object.entries(counters);
  const still = rows.filter(([, { value }]) => value === 0).map(([id, of]) => `${id} (${of.provenance})`);
  return rows.length === 0
    ? null
    : section(
        "Counters",
        table(
          "Counters of the whole run",
          rows.filter(([, { value }]) => value !== 0),
          [
            text("counter", ([id]) => id),
            number("value", ([, of]) => reading(of)),
            number("low – high", ([, of]) => range(of.unit, of.low, of.high)),
            text("provenance", ([, of]) => provenance(of.provenance)),
            text("meaning", ([id, { why }]) => [COUNTERS[id], why].filter(Boolean).join(": "), "text"),
          ],
        ),
        still.length > 0 && note(`0: ${still.join(", ")}`),
      );
}

function oldTable({
  title: name,
  columns,
  rows,
  provenance: of,
}: NonNullable<Run["tables"]>[number]): HTMLElement | null {
  const isNumber = (nth: number) => rows.every((row) => row[nth] === undefined || /\d/.test(row[nth]!));
  return section(
    `${name} (${of})`,
    table(
      name,
      rows,
      columns.map((head, nth) => ({ head, numeric: isNumber(nth), cell: (row: string[]) => row[nth] ?? "" })),
    ),
  );
}
