/** Several runs: a sweep as curves and a table, machines beside each other, and each run by itself. */
import { lineChart, logBaseFor } from "../charts/lines";
import { folded, h, section } from "../dom";
import { count, MISSING, nanos, quantity } from "../format";
import { number, table, text } from "../table";
import type { Run, Runs, Warning } from "../types";
import { article, environmentSection, title, warningsSection } from "./parts";
import { runView, seriesPlots, trust } from "./run";

export function runsView({ swept, runs }: Runs): HTMLElement {
  const first = runs[0];
  if (!first) return article(title("runs", "no run"));
  const machines = [...new Set(runs.map((run) => run.machine.name))];
  return article(
    title(
      "runs",
      first.job.name,
      `${runs.length} runs on ${machines.join(", ")}`,
      swept.length > 0 && `swept: ${swept.join(", ")}`,
    ),
    swept.length > 0 ? sweepSection(runs, swept, machines) : besideSection(runs),
    section("Counters of each run", countersTable(runs, swept)),
    section("Runs", ...runs.map((run, nth) => folded(labelOf(run, swept, nth), () => runView(run)))),
    warningsSection(uniqueWarnings(runs)),
    environmentSection(first.environment),
  );
}

/** Returns each warning once, for however many runs it was given. */
function uniqueWarnings(runs: Run[]): Warning[] {
  return [
    ...new Map(
      runs.flatMap((run) => run.warnings).map((warning) => [warning.id + warning.text, warning]),
    ).values(),
  ];
}

function labelOf(run: Run, swept: string[], nth: number): string {
  const params = swept.map((name) => `${name}=${run.job.params[name] ?? MISSING}`);
  return `${nth + 1}. ${[run.machine.name, ...params].join(" ")}: ${nanos(run.wall_ns)}`;
}

/** Makes the charts of all runs with a series, those of one kind side by side. Each has its own scales. */
function besideSection(runs: Run[]): HTMLElement | null {
  const all = runs.map((run) => ({ machine: run.machine, plots: seriesPlots(run) }));
  const drawn = all.filter(({ plots }) => plots.length > 0);
  if (drawn.length < 2) return null;
  const titles = [...new Set(drawn.flatMap(({ plots }) => plots.map((plot) => plot.title)))];
  const row = (name: string) =>
    drawn.flatMap(({ machine, plots }) =>
      plots
        .filter((plot) => plot.title === name)
        .map((plot) => lineChart({ ...plot, title: `${name}, ${machine.name}: ${trust(machine)}` })),
    );
  return section("Side by side", ...titles.map((name) => h("div", { class: "beside" }, ...row(name))));
}

/** Counts faults. Translation faults include minor and major ones, and are preferred. */
function faultsOf({ counters }: Run): number | null {
  const value = (id: string) => counters[id]?.value;
  const minor = value("minor_fault_count");
  return (
    value("translation_fault_count") ??
    (minor === undefined ? null : minor + (value("major_fault_count") ?? 0))
  );
}

function sweepSection(runs: Run[], swept: string[], machines: string[]): HTMLElement | null {
  const pointOf = (run: Run) => swept.map((name) => run.job.params[name] ?? "").join(" ");
  const points = [...new Set(runs.map(pointOf))];
  const at = (point: string, machine: string) =>
    runs.find((run) => run.machine.name === machine && pointOf(run) === point);
  const columns = machines.flatMap((machine) => [
    number<string>(machine, (point) => quantity("ns", at(point, machine)?.wall_ns)),
    number<string>("faults", (point) =>
      quantity("count", at(point, machine) && faultsOf(at(point, machine)!)),
    ),
  ]);
  const x = points.map(numberOf);
  const hasAxis =
    swept.length === 1 && points.length > 1 && x.every((value, nth) => nth === 0 || value > x[nth - 1]!);
  const curve = (name: string, of: (run: Run) => number | null, show: (value: number) => string) => {
    const lines = machines.map((machine) => {
      const values = points.map((point) => (at(point, machine) ? of(at(point, machine)!) : null));
      return { label: machine, values, show };
    });
    const all = lines.flatMap(({ values }) => values);
    if (all.every((value) => value === null)) return null;
    return lineChart({
      title: name,
      x: { label: swept[0]!, values: x, show: (value) => points[x.indexOf(value)] ?? "", isDiscrete: true },
      lines,
      yLogBase: logBaseFor(all),
    });
  };
  return section(
    "Sweep",
    hasAxis && curve("Elapsed time", (run) => run.wall_ns, nanos),
    hasAxis && curve("Faults", faultsOf, count),
    table(
      `Elapsed time and faults at each point; ${machines.map((name) => `${name}: ${trust(runs.find((run) => run.machine.name === name)!.machine)}`).join("; ")}`,
      points,
      [text(swept.join(" "), (point) => point), ...columns],
    ),
  );
}

/** Reads `20_000`, `2M` or `1.5G`; NaN for a word. */
function numberOf(value: string): number {
  const match = /^([\d_.]+)([KMGT]?)$/.exec(value);
  return match ? Number(match[1]!.replaceAll("_", "")) * 1024 ** "_KMGT".indexOf(match[2] || "_") : NaN;
}

function countersTable(runs: Run[], swept: string[]): HTMLElement {
  const ids = [...new Set(runs.flatMap(({ counters }) => Object.keys(counters)))].sort();
  const columns = runs.map((run) => {
    const params = swept.map((name) => run.job.params[name]);
    return number<string>([run.machine.name, ...params].join(" "), (id) => {
      const reading = run.counters[id];
      return reading ? quantity(reading.unit, reading.value) : MISSING;
    });
  });
  return table("Counters, a column for each run", ids, [text("counter", (id) => id), ...columns]);
}
