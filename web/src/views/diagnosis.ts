/** A diagnosis. The first screen is the verdict: the tax, the winner, the causes, the lines to paste. */
import { isTax } from "../causes";
import { axis, cloud, dot, linear, logarithmic, strip, tick, whisker, type Scale } from "../charts/strip";
import { copyBlock } from "../copy";
import { folded, h, section } from "../dom";
import { bytes, count, fixed, median, MISSING, nanos, percent, quantity, ratio } from "../format";
import { number, plotColumn, table, text, type Column } from "../table";
import type { Diagnosis, Exit, LoadFigure, Ratio, Took, Trial } from "../types";
import {
  article,
  budgetSection,
  environmentSection,
  figure,
  machineLine,
  note,
  saysMoreThanFigure,
  taxFigure,
  taxSentence,
  timeColumns,
  title,
  warningsSection,
} from "./parts";

const AS_IS = "as-is";
/** A cause with a smaller share of the CPU time is not listed on the first screen. */
const SHARE_MIN = 0.005;
const CAUSES_MAX = 3;

export function diagnosisView(diagnosis: Diagnosis): HTMLElement {
  const { command, exit, trials, skipped, environment, warnings, budget } = diagnosis;
  const rounds = Math.max(0, ...trials.map((trial) => trial.runs_ns.length));
  return article(
    title(
      "diagnosis",
      command.join(" "),
      `${exitText(exit)}, ${rounds} rounds of ${trials.length} trials`,
      machineLine(environment),
    ),
    verdictSection(diagnosis),
    trialsSection(diagnosis),
    statesSection(diagnosis),
    skipped.length > 0 &&
      section(
        "Not tried",
        table("Trials that could not be made", skipped, [
          text("trial", (row) => row.name),
          text("why", (row) => row.why, "text"),
          text("hint", (row) => row.remedy, "text"),
        ]),
      ),
    budget && budgetSection(budget),
    warningsSection(warnings),
    environmentSection(environment),
  );
}

/** Shows each trial in each state of memory. */
function statesSection({ states = [], basis = "elapsed" }: Diagnosis): HTMLElement | false | null {
  const rows = states.flatMap((state) =>
    state.trials
      .filter((trial) => trial.name !== AS_IS)
      .map((trial) => ({ state, trial, growth: trial.name === state.loser ? (state.growth ?? []) : [] })),
  );
  const grown = (row: (typeof rows)[number]): string =>
    row.growth.map((one) => `${one.id} ${nanos(one.before_ns)} → ${nanos(one.after_ns)}`).join(", ");
  const notes = states.flatMap(({ state, how, why_not: why }) =>
    [how, why].flatMap((words) => (words ? [h("p", {}, `${state}: ${words}`)] : [])),
  );
  const speedup = (trial: Trial): string => (trial.speedup ? ratio(trial.speedup) : MISSING);
  return (
    states.length > 0 &&
    section(
      "States of memory",
      ...notes,
      table(`Trials in each state, by ${typeof basis === "string" ? basis : basis.load}`, rows, [
        text("memory", (row) => row.state.state),
        text("trial", (row) => row.trial.name),
        number("speed-up (95 %)", (row) => speedup(row.trial)),
        text("ends with", (row) => exitText(row.trial.exit ?? { code: 0 })),
        text("takes longer", grown, "text"),
      ]),
    )
  );
}

/** Formats the end of a process as a shell user knows it. */
export function exitText(exit: Exit): string {
  return "code" in exit ? `exit status ${exit.code}` : `killed by signal ${exit.signal}`;
}

function verdictSection(diagnosis: Diagnosis): HTMLElement {
  const { verdict, budget, trials } = diagnosis;
  const winner = trials.find((trial) => trial.name === verdict.winner);
  const saved = winner && savedSentence(diagnosis, winner);
  return h(
    "section",
    { class: "verdict", "aria-label": "Verdict" },
    h("p", { class: "reason" }, `Verdict: ${verdict.reason}`),
    saved && h("p", { class: "detail" }, saved),
    h(
      "div",
      { class: "figures" },
      budget && taxFigure(budget),
      winner?.speedup &&
        figure(
          `${ratio(winner.speedup).split(" ")[0]}×`,
          `as fast on ${winner.name} ${ratio(winner.speedup).replace(/^\S+ /, "")}`,
          speedupStrip(winner.speedup, speedupScale(trials)),
        ),
    ),
    budget && causesTable(diagnosis),
    verdict.apply != null && pasteLines(verdict),
  );
}

function causesTable({ budget, warnings }: Diagnosis): HTMLElement | null {
  if (!budget) return null;
  const rows = budget.cpu.filter((row) => isTax(row.id) && (row.ns ?? 0) > budget.cpu_total_ns * SHARE_MIN);
  rows.sort((a, b) => b.ns! - a.ns!);
  const missing = budget.cpu.filter((row) => isTax(row.id) && row.ns == null);
  const disagrees = warnings.find((warning) => warning.id === "tax_disagrees");
  return h(
    "div",
    {},
    saysMoreThanFigure(budget) && h("p", { class: "sentence" }, taxSentence(budget)),
    rows.length + missing.length > 0 &&
      table(
        "The largest causes, low to high",
        [...rows.slice(0, CAUSES_MAX), ...missing],
        timeColumns(budget.cpu_total_ns),
      ),
    disagrees && note(disagrees.text),
  );
}

function pasteLines({ apply, systemd, dockerfile }: Diagnosis["verdict"]): HTMLElement {
  const blocks: [string, string[]][] = [
    ["Shell", [apply!]],
    ["systemd", systemd ?? []],
    ["Dockerfile", dockerfile ?? []],
  ];
  const shown = blocks.filter(([, lines]) => lines.length > 0);
  return h(
    "div",
    { class: "paste" },
    h("h2", {}, "Apply it"),
    ...shown.map(([place, lines]) => copyBlock(place, lines.join("\n"))),
  );
}

/** Says which time the winner saves, and of what, in the words of the terminal. */
function savedSentence(diagnosis: Diagnosis, winner: Trial): string | null {
  const asIs = diagnosis.trials.find((trial) => trial.name === AS_IS);
  if (!asIs || loadFigure(diagnosis.basis)) return null;
  const [now, then] = [medianTime(diagnosis, asIs), medianTime(diagnosis, winner)];
  if (then > now) return null;
  const less = (of: (trial: Trial) => number[]) =>
    Math.max(0, (median(of(asIs)) ?? 0) - (median(of(winner)) ?? 0));
  const [user, kernel] = [less((trial) => trial.user_ns), less((trial) => trial.kernel_ns)];
  if (user === 0 && kernel === 0) return `${nanos(now - then)} saved`;
  const [before, after] = [median(asIs.fault_counts ?? []), median(winner.fault_counts ?? [])];
  const faults =
    before !== undefined && after !== undefined && after < before
      ? `fewer page faults (${count(before)} → ${count(after)})`
      : "less work in the kernel";
  const walks = "fewer page walks";
  const parts = user > kernel ? [walks, faults] : [faults, walks];
  const of = kernel === 0 ? walks : user === 0 ? faults : parts.join(", then ");
  return `${nanos(now - then)} of ${nanos(now)} saved: ${of}`;
}

const loadFigure = (basis: Diagnosis["basis"]) => (typeof basis === "object" ? basis.load : undefined);

/** The figure that trials are compared by, as a time: of a throughput, the time of a request. */
function times({ basis }: Diagnosis, trial: Trial): number[] {
  if (basis === "cpu") return trial.user_ns.map((user, run) => user + (trial.kernel_ns[run] ?? 0));
  const loads = trial.loads ?? [];
  switch (loadFigure(basis)) {
    case "throughput":
      return loads.map((load) => 1e9 / (load.throughput_per_s ?? NaN));
    case "p50":
      return loads.map((load) => load.p50_ns ?? NaN);
    case "p99":
      return loads.map((load) => load.p99_ns ?? NaN);
    case "p999":
      return loads.map((load) => load.p999_ns ?? NaN);
    default:
      return trial.runs_ns;
  }
}

const HEADINGS: Partial<Record<LoadFigure, string>> = {
  throughput: "time per request",
  p50: "p50",
  p99: "p99",
  p999: "p99.9",
};

function timeHeading(basis: Diagnosis["basis"]): string {
  const figure = loadFigure(basis);
  return basis === "cpu" ? "CPU time" : ((figure && HEADINGS[figure]) ?? "time");
}

const medianTime = (diagnosis: Diagnosis, trial: Trial) =>
  diagnosis.basis ? (median(times(diagnosis, trial)) ?? 0) : trial.median_ns;

function speedupScale(trials: Trial[]): Scale {
  const bounds = trials.flatMap(({ speedup }) => (speedup ? [speedup.low, speedup.high] : []));
  // An interval of two runs reaches far beyond the axis; its whisker then ends at the edge.
  return logarithmic(
    Math.max(Math.min(0.9, ...bounds), 0.25) / 1.05,
    Math.min(Math.max(1.1, ...bounds), 4) * 1.05,
  );
}

const speedupStrip = (speedup: Ratio, scale: Scale) =>
  strip(
    ratio(speedup),
    tick(scale(1)),
    whisker(scale(speedup.low), scale(speedup.high)),
    dot(scale(speedup.value)),
  );

function trialsSection(diagnosis: Diagnosis): HTMLElement | null {
  const { trials, verdict, basis } = diagnosis;
  const why = trials.filter(({ took }) => took.why);
  const time = timeHeading(basis);
  return section(
    "Trials",
    table(
      `Trials: each dot is a run, the line is the median; speed-ups have 95 % intervals`,
      trials,
      trialColumns(diagnosis, time),
      (trial) => (trial.name === verdict.winner ? "winner" : undefined),
    ),
    why.length > 0 &&
      h("ul", { class: "notes" }, ...why.map(({ name, took }) => h("li", {}, `${name}: ${took.why}`))),
    trials.some((trial) => trial.peak_resident_bytes == null) &&
      note("no peak memory: the runs were too short, or the machine too busy, to look often enough"),
    folded("Table: spread and mechanism of each trial", () => spreadTable(trials)),
    folded("Table: each run", () => runsTable(trials)),
  );
}

function trialColumns(diagnosis: Diagnosis, time: string): Column<Trial>[] {
  const { trials, verdict } = diagnosis;
  const all = trials.map((trial) => times(diagnosis, trial));
  let most = 0;
  for (const runs of all) for (const ns of runs) most = Math.max(most, ns);
  const scale = linear(0, most * 1.02);
  const speedups = speedupScale(trials);
  const runs = (trial: Trial) => {
    const ns = times(diagnosis, trial);
    const middle = medianTime(diagnosis, trial);
    return strip(
      `${trial.name}: median ${nanos(middle)} of ${count(ns.length)} runs`,
      cloud(ns.map(scale)),
      tick(scale(middle), "median"),
    );
  };
  const ends = [0.5, 1, 2].filter((value) => speedups(value) > 0 && speedups(value) < 1);
  return [
    text("trial", (trial) => (trial.name === verdict.winner ? `${trial.name} ◀` : trial.name)),
    number(time, (trial) => nanos(medianTime(diagnosis, trial))),
    plotColumn(
      axis("each run", [
        { at: 0, text: "0" },
        { at: 1, text: nanos(most) },
      ]),
      runs,
    ),
    text("speed-up (95 %)", (trial) => (trial.name === AS_IS ? "1" : ratio(trial.speedup))),
    plotColumn(
      axis(
        "speed-up and its interval",
        ends.map((value) => ({ at: speedups(value), text: `${value}×` })),
      ),
      (trial) => (trial.speedup ? speedupStrip(trial.speedup, speedups) : null),
    ),
    number("memory", (trial) => quantity("bytes", trial.peak_resident_bytes)),
    number("untouched", (trial) => quantity("bytes", trial.untouched_bytes)),
    number("large pages", (trial) => tookText(trial.took)),
    number("page faults", (trial) => quantity("count", median(trial.fault_counts ?? []))),
  ];
}

/** Formats the memory that was on large pages. */
export function tookText({ bytes: size, fraction }: Took): string {
  if (size == null) return MISSING;
  return fraction == null ? bytes(size) : `${bytes(size)} (${percent(fraction)})`;
}

function spreadTable(trials: Trial[]): HTMLElement {
  const sorted = (trial: Trial) => Float64Array.from(trial.runs_ns).sort();
  return table("Elapsed time of each trial", trials, [
    text("trial", (trial) => trial.name),
    number("runs", (trial) => count(trial.runs_ns.length)),
    number("median", (trial) => nanos(trial.median_ns)),
    number("fastest", (trial) => quantity("ns", sorted(trial)[0])),
    number("slowest", (trial) => quantity("ns", sorted(trial).at(-1))),
    text("over base (95 %)", (trial) => (trial.name === "base" ? "1" : ratio(trial.speedup_over_base))),
    text("mechanism", (trial) => trial.mechanism, "text"),
  ]);
}

function runsTable(trials: Trial[]): HTMLElement {
  const rows = trials.flatMap((trial) => trial.runs_ns.map((_, run) => ({ trial, run })));
  const cell = (values: number[] | undefined, run: number) => quantity("ns", values?.[run]);
  return table("Each run", rows, [
    text("trial", ({ trial }) => trial.name),
    number("run", ({ run }) => fixed(run + 1, 0)),
    number("time", ({ trial, run }) => cell(trial.runs_ns, run)),
    number("user", ({ trial, run }) => cell(trial.user_ns, run)),
    number("kernel", ({ trial, run }) => cell(trial.kernel_ns, run)),
    number("page faults", ({ trial, run }) => quantity("count", trial.fault_counts?.[run])),
  ]);
}
