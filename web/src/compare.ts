/** Compares two documents as `pagetax compare` does: crates/core/src/compare.rs. */
import type { Document } from "./documents";
import { median } from "./format";
import { ratioOfGroups } from "./statistics";
import type { Comparison, ComparisonRow, Diagnosis, Facts, Provenance, Run, Trial, Unit } from "./types";

/** Facts that make another machine of it. */
const HARDWARE = ["cpu_model", "cpu_count", "hypervisor", "base_page_bytes"];
/** Settings that may explain a difference, but may also be what is compared. */
const SETTINGS = [
  "kernel",
  "thp_enabled",
  "thp_defrag",
  "thp_shmem_enabled",
  "thp_enabled_by_size",
  "swappiness",
  "cpu_governor",
  "page_table_isolation",
  "cgroup_memory_limit_bytes",
];
/** Memory may differ by this share: virtual machines get and give some while they run. */
const MEMORY_SHARE = 0.1;

const isRun = (kind: string) => kind === "run" || kind === "runs";

/** Returns true if documents of this kind can be compared. */
export const canCompare = (kind: string) => isRun(kind) || kind === "diagnosis";

/** Compares, or says in a sentence why not. */
export function compare(first: Document, second: Document): Comparison | string {
  const kinds = [first, second].map(({ kind }) => kind);
  const other = kinds.find((kind) => !canCompare(kind));
  if (other !== undefined) {
    return `A document of kind ${other} is not compared. Choose two runs (pagetax run --json=FILE), or two diagnoses (pagetax diagnose --json=FILE).`;
  }
  if (isRun(kinds[0]!) !== isRun(kinds[1]!)) {
    return "One is a run, the other a diagnosis. Choose two runs, or two diagnoses.";
  }
  return isRun(kinds[0]!)
    ? compareRuns(runsOf(first), runsOf(second))
    : compareDiagnoses(first.data, second.data);
}

const runsOf = ({ kind, data }: Document): Run[] => (kind === "run" ? [data] : data.runs);

function compareRuns(first: Run[], second: Run[]): Comparison | string {
  const [a, b] = [first[0], second[0]];
  if (!a || !b) return "A document has no run. Choose another.";
  const isMixed = [first, second].some((runs) => runs.some((run) => jobsDiffer(runs[0]!, run).length > 0));
  if (isMixed)
    return "A document has runs of several jobs or machines. Choose documents of one job and machine each.";
  const [columnsA, columnsB] = [columns(first), columns(second)];
  return {
    ...between(a.environment, b.environment, jobsDiffer(a, b)),
    rows: [...columnsA].flatMap(([id, column]) => row(id, column, columnsB.get(id))),
  };
}

function compareDiagnoses(first: Diagnosis, second: Diagnosis): Comparison {
  const rows = first.trials.flatMap((a) => {
    const b = second.trials.find((trial) => trial.name === a.name);
    if (!b) return [];
    const peak = (trial: Trial) =>
      measured("bytes", trial.peak_resident_bytes == null ? [] : [trial.peak_resident_bytes]);
    return [
      ...row(`${a.name} wall_ns`, measured("ns", a.runs_ns), measured("ns", b.runs_ns)),
      ...row(`${a.name} peak_resident_bytes`, peak(a), peak(b)),
    ];
  });
  const commands = different("command", first.command.join(" "), second.command.join(" "));
  return { ...between(first.environment, second.environment, commands), rows };
}

function between(a: Facts, b: Facts, reasons: string[]): Pick<Comparison, "incomparable" | "settings"> {
  const facts = (names: string[]) => names.flatMap((name) => factsDiffer(name, a[name], b[name]));
  const memory = (name: string) =>
    sizesDiffer(a[name], b[name]) ? [`${name}: ${a[name]} and ${b[name]}`] : [];
  return {
    incomparable: [...reasons, ...facts(HARDWARE), ...memory("memory_bytes")],
    settings: [...facts(SETTINGS), ...memory("memory_available_bytes")],
  };
}

function different(what: string, a: string, b: string): string[] {
  return a === b ? [] : [`${what}: \`${a}\` and \`${b}\``];
}

/** Describes a fact that differs. A fact that one side does not know is no difference. */
function factsDiffer(name: string, a: unknown, b: unknown): string[] {
  const text = (fact: unknown) => (typeof fact === "string" ? fact : JSON.stringify(fact));
  return a == null || b == null ? [] : different(name, text(a), text(b));
}

function sizesDiffer(a: unknown, b: unknown): boolean {
  return typeof a === "number" && typeof b === "number" && Math.abs(a - b) > MEMORY_SHARE * Math.max(a, b);
}

function jobsDiffer(a: Run, b: Run): string[] {
  const params = ({ job }: Run) =>
    Object.entries(job.params)
      .map(([key, value]) => `${key}=${value}`)
      .join(" ");
  return [
    ...different("job", a.job.name, b.job.name),
    ...different("parameters", params(a), params(b)),
    ...different("seed", String(a.job.seed), String(b.job.seed)),
    ...different("machine", a.machine.name, b.machine.name),
  ];
}

interface ColumnOfRuns {
  values: number[];
  unit: Unit;
  provenance: Provenance;
}

const measured = (unit: Unit, values: number[]): ColumnOfRuns => ({ values, unit, provenance: "measured" });

function columns(runs: Run[]): Map<string, ColumnOfRuns> {
  const columns = new Map<string, ColumnOfRuns>();
  for (const [id, { unit, provenance, value }] of runs.flatMap((run) => Object.entries(run.counters))) {
    const column = columns.get(id) ?? { values: [], unit, provenance };
    if (value != null) column.values.push(value);
    columns.set(id, column);
  }
  return new Map([...columns].sort(([a], [b]) => (a < b ? -1 : 1)));
}

/** Returns no row if a side has no value. */
function row(id: string, a: ColumnOfRuns, b: ColumnOfRuns | undefined): ComparisonRow[] {
  const [first, second] = [median(a.values), median(b?.values ?? [])];
  if (!b || first === undefined || second === undefined) return [];
  return [
    {
      id,
      unit: a.unit,
      medians: [first, second],
      provenance: [a.provenance, b.provenance],
      run_counts: [a.values.length, b.values.length],
      ratio: ratioOfGroups(b.values, a.values),
    },
  ];
}
