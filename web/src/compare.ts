/** Compares two documents as `pagetax compare` does: crates/core/src/compare.rs. */
import type { Document } from "./documents";
import { bytes, median, nanos, ratio } from "./format";
import { ratioOfGroups } from "./statistics";
import type { Comparison, ComparisonRow, Diagnosis, Facts, Provenance, Run, Trial, Unit } from "./types";

/** The rows about elapsed time, of runs and of diagnoses. */
const TIMES = ["wall_ns", "as-is wall_ns"];

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

/** What a kind of document is called, if it can be compared. A file may hold one run or several. */
const COMPARABLE = new Map([
  ["run", "run"],
  ["runs", "run"],
  ["diagnosis", "diagnosis"],
  ["bill", "bill"],
]);
const CHOOSE =
  "Choose two runs (pagetax run --json=FILE), two diagnoses (pagetax diagnose --json=FILE), or two bills (pagetax ci --json=FILE).";

/** Returns true if documents of this kind can be compared. */
export const canCompare = (kind: string) => COMPARABLE.has(kind);

/** Says why the two cannot be compared; null if they may be. */
export function refusal(first: Document, second: Document): string | null {
  const [a, b] = [COMPARABLE.get(first.kind), COMPARABLE.get(second.kind)];
  if (!a || !b) return `A document of kind ${a ? second.kind : first.kind} is not compared. ${CHOOSE}`;
  return a === b ? null : `One is a ${a}, the other a ${b}. ${CHOOSE}`;
}

/** Compares runs or diagnoses, or says in a sentence why not. */
export function compare(first: Document, second: Document): Comparison | string {
  const compared =
    first.kind === "diagnosis"
      ? compareDiagnoses(first.data, second.data)
      : compareRuns(runsOf(first), runsOf(second));
  if (typeof compared === "string") return compared;
  const names: [string, string] = [first.name, second.name];
  return { ...compared, names, verdict: verdict(names, compared.rows) };
}

type Compared = Omit<Comparison, "names" | "verdict">;

/** Returns the row of the elapsed time. */
export const timeRow = (rows: ComparisonRow[]) => rows.find(({ id }) => TIMES.includes(id));

export const holdsOne = ({ low, high }: { low: number; high: number }) => low <= 1 && high >= 1;

/** Returns the sentence about the elapsed time, and what changes most. */
function verdict([first, second]: [string, string], rows: ComparisonRow[]): string | null {
  const time = timeRow(rows);
  if (!time) return null;
  const [before, after] = time.medians.map(nanos);
  const longer = `\`${second}\` takes ${ratio(time.ratio)} times as long as \`${first}\``;
  const sentence = !time.ratio
    ? `\`${second}\` takes ${after} and \`${first}\` ${before}; one run on a side shows no more than that`
    : holdsOne(time.ratio)
      ? `no difference in time is shown: ${longer}`
      : longer;
  const changed = rows.filter((row) => row.unit !== "ns" && change(row) > 0);
  if (changed.length === 0) return sentence;
  const most = changed.reduce((most, row) => (change(row) >= change(most) ? row : most));
  const [from, to] = most.medians.map((value) => (most.unit === "bytes" ? bytes(value) : value));
  return `${sentence}; ${most.id} changes most, from ${from} to ${to}`;
}

/** Returns how far the ratio is certainly from 1, as a logarithm; 0 if it may be 1. */
function change({ ratio, medians: [first, second] }: ComparisonRow): number {
  const size = (value: number) => Math.abs(Math.log(value));
  if (ratio) return holdsOne(ratio) ? 0 : Math.min(size(ratio.low), size(ratio.high));
  return first === 0 || second === 0 ? 0 : size(second / first);
}

const runsOf = ({ kind, data }: Document): Run[] => (kind === "run" ? [data] : data.runs);

function compareRuns(first: Run[], second: Run[]): Compared | string {
  const [a, b] = [first[0], second[0]];
  if (!a || !b) return "A document has no run. Choose another.";
  const isMixed = [first, second].some((runs) =>
    runs.some((run) => jobsDiffer(runs[0]!, run).length + parametersDiffer(runs[0]!, run).length > 0),
  );
  if (isMixed)
    return "A document has runs of several jobs or machines. Choose documents of one job and machine each.";
  const [columnsA, columnsB] = [columns(first), columns(second)];
  return {
    ...between(a.environment, b.environment, jobsDiffer(a, b)),
    parameters: parametersDiffer(a, b),
    rows: [...columnsA].flatMap(([id, column]) => row(id, column, columnsB.get(id))),
  };
}

function compareDiagnoses(first: Diagnosis, second: Diagnosis): Compared {
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
  const isSame = first.command[0] === second.command[0];
  const [reasons, parameters] = isSame ? [[], commands] : [commands, []];
  return { ...between(first.environment, second.environment, reasons), parameters, rows };
}

function between(a: Facts, b: Facts, reasons: string[]): Pick<Comparison, "incomparable" | "settings"> {
  const { memory_bytes: first } = a;
  const { memory_bytes: second } = b;
  const memory = sizesDiffer(first, second) ? [`memory_bytes: ${first} and ${second}`] : [];
  return {
    incomparable: [...reasons, ...factsDiffer(HARDWARE, a, b), ...memory],
    settings: factsDiffer(SETTINGS, a, b),
  };
}

function different(what: string, a: string, b: string): string[] {
  return a === b ? [] : [`${what}: \`${a}\` and \`${b}\``];
}

/** Describes the facts that differ. A fact that one side does not know is no difference. */
export function factsDiffer(names: string[], a: Facts, b: Facts): string[] {
  const text = (fact: unknown) => (typeof fact === "string" ? fact : JSON.stringify(fact));
  return names.flatMap((name) =>
    a[name] == null || b[name] == null ? [] : different(name, text(a[name]), text(b[name])),
  );
}

function sizesDiffer(a: unknown, b: unknown): boolean {
  return typeof a === "number" && typeof b === "number" && Math.abs(a - b) > MEMORY_SHARE * Math.max(a, b);
}

const jobsDiffer = (a: Run, b: Run) => [
  ...different("job", a.job.name, b.job.name),
  ...different("machine", a.machine.name, b.machine.name),
];

function parametersDiffer({ job: a }: Run, { job: b }: Run): string[] {
  const names = [...new Set([...Object.keys(a.params), ...Object.keys(b.params)])].sort();
  return [
    ...names.flatMap((name) => different(name, a.params[name] ?? "absent", b.params[name] ?? "absent")),
    ...different("seed", String(a.seed), String(b.seed)),
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
