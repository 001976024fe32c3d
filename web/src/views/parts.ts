/** Parts that several views share: title, figures, provenance, budget, warnings, environment. */
import { CAUSES, isTax } from "../causes";
import { axis, bar, linear, strip, whisker } from "../charts/strip";
import { h, s, section, type Child } from "../dom";
import { bytes, count, MISSING, percent, quantity, range, shareOf, unitOf, nanos, fixed } from "../format";
import { number, plotColumn, table, text, type Column } from "../table";
import type { Budget, Facts, Provenance, TimeRow, VmTax, Warning } from "../types";

/** A smaller share of waiting is not worth a sentence. */
const WAITING_MIN = 0.005;

/** Makes the head of a view: what it is of, in code where it is a command. */
export function title(kind: string, name: string, ...details: Child[]): HTMLElement {
  const lines = details.filter(Boolean).map((detail) => h("p", { class: "detail" }, detail));
  return h("header", { class: "title" }, h("p", { class: "kind" }, kind), h("h1", {}, name), ...lines);
}

/** Makes a number that is read from afar, with its meaning and its interval. */
export function figure(value: string, meaning: string, interval?: Child): HTMLElement {
  return h("div", { class: "figure" }, h("strong", {}, value), h("span", {}, meaning), interval);
}

/** Makes the name of a provenance with the pattern of its bars. */
export function provenance(of: Provenance): HTMLElement {
  const pattern = s(
    "svg",
    { class: "swatch", width: 12, height: 12, "aria-hidden": true },
    s("rect", { class: `bar ${of}`, x: 1, y: 1, width: 10, height: 10 }),
  );
  return h("span", { class: "provenance" }, pattern, of);
}

/** Makes the column of provenances. */
export function provenanceColumn<R extends { provenance: Provenance }>(): Column<R> {
  return text("provenance", (row) => provenance(row.provenance));
}

/** Says what the tax is, in the words of the terminal. */
export function taxSentence(budget: Budget): string | null {
  const tax = budget.vm_tax;
  if (!tax) return null;
  const waiting = waitingShare(budget);
  return (
    taken(tax) +
    (waiting >= WAITING_MIN ? `; waiting for memory takes ${percent(waiting)} of its elapsed time` : "")
  );
}

/** Returns true if the sentence names missing rows or waiting, which the figure of the tax does not. */
export function saysMoreThanFigure(budget: Budget): boolean {
  return budget.vm_tax?.high == null || waitingShare(budget) >= WAITING_MIN;
}

function taken({ value, low, high, why }: VmTax): string {
  if (value == null) return `The CPU time that virtual memory takes is not known: ${why ?? ""}`;
  if (low == null || high == null) {
    return `Virtual memory takes at least ${percent(value)} of its CPU time, without ${why ?? ""}`;
  }
  const bounds = taxRange({ low, high });
  return `Virtual memory takes ${percent(value)} of its CPU time${bounds && ` (${bounds})`}`;
}

const taxRange = ({ low, high }: { low: number; high: number }) => {
  const [from, to] = [fixed(low * 100, 0), fixed(high * 100, 0)];
  return from === to ? "" : `${from}–${to} %`;
};

function waitingShare({ wall, wall_total_ns }: Budget): number {
  const ns = wall.filter((row) => isTax(row.id)).reduce((sum, row) => sum + (row.ns ?? 0), 0);
  return wall_total_ns > 0 ? ns / wall_total_ns : 0;
}

/** Makes the tax as a figure; a lower bound says so. */
export function taxFigure(budget: Budget): HTMLElement | null {
  const tax = budget.vm_tax;
  if (tax?.value == null) return null;
  const { value, low, high } = tax;
  if (low == null || high == null) {
    return figure(`≥ ${percent(value)}`, "of CPU time is virtual memory's: a lower bound");
  }
  const bounds = taxRange({ low, high });
  return figure(
    percent(value),
    `of CPU time is virtual memory's${bounds && ` (${bounds})`}`,
    strip(`${percent(value)}${bounds && `, ${bounds}`}`, bar(0, value, tax.provenance), whisker(low, high)),
  );
}

/** A ledger of a budget, with what the rows do not explain. */
interface Ledger {
  account: "cpu" | "wall";
  title: string;
  rows: TimeRow[];
  totalNs: number;
}

/** Makes both ledgers and the memory of a budget. */
export function budgetSection(budget: Budget): HTMLElement | null {
  const unexplained = (ns: number): TimeRow => ({
    id: "unexplained",
    ns,
    provenance: "derived",
    how: "total less the rows above",
  });
  const cpu = [...budget.cpu, unexplained(budget.cpu_unexplained_ns)];
  const wall = [...budget.wall, unexplained(budget.wall_unexplained_ns)];
  return section(
    "Budget",
    h("p", { class: "sentence" }, taxSentence(budget)),
    ledgerTable({ account: "cpu", title: "CPU time", rows: cpu, totalNs: budget.cpu_total_ns }),
    ledgerTable({ account: "wall", title: "Wall time", rows: wall, totalNs: budget.wall_total_ns }),
    budget.memory.length > 0 &&
      table("Memory", budget.memory, [
        text("memory", (row) => row.id),
        number("bytes", (row) => quantity("bytes", row.bytes)),
        provenanceColumn(),
        text("how", (row) => row.how, "text"),
      ]),
  );
}

function ledgerTable({ account, title, rows, totalNs }: Ledger): HTMLElement {
  const absent = CAUSES[account].filter((id) => rows.every((row) => row.id !== id));
  return h(
    "div",
    {},
    table(`${title} ${nanos(totalNs)}`, rows, timeColumns(totalNs), ({ id }) =>
      isTax(id) && id !== "unexplained" ? "tax" : undefined,
    ),
    absent.length > 0 && note(`not looked at: ${absent.join(", ")}`),
  );
}

/** Returns the columns of rows of time, as shares of a total. */
export function timeColumns(totalNs: number): Column<TimeRow>[] {
  const scale = linear(0, totalNs);
  const marks = ({ ns, low_ns, high_ns, provenance }: TimeRow) =>
    ns == null
      ? []
      : [
          bar(0, scale(ns), provenance),
          low_ns != null && high_ns != null && low_ns !== high_ns
            ? whisker(scale(low_ns), scale(high_ns))
            : null,
        ];
  const tip = (row: TimeRow) =>
    row.ns == null
      ? `${row.id}: missing: ${row.how}`
      : `${row.id}: ${nanos(row.ns)} ${range("ns", row.low_ns, row.high_ns)} ${row.provenance}`;
  return [
    text("cause", (row) => row.id),
    number("time", (row) => quantity("ns", row.ns)),
    number("share", (row) => (row.ns == null ? MISSING : shareOf(row.ns, totalNs))),
    plotColumn(
      axis(
        "share of the total",
        [0, 0.5, 1].map((at) => ({ at, text: percent(at) })),
      ),
      (row) => (row.ns == null ? "missing" : strip(tip(row), ...marks(row))),
    ),
    number("low – high", (row) => range("ns", row.low_ns, row.high_ns)),
    provenanceColumn(),
    text("how", (row) => row.how, "text"),
  ];
}

/** Makes the list of warnings with their hints. */
export function warningsSection(warnings: readonly Warning[]): HTMLElement | null {
  if (warnings.length === 0) return null;
  const item = ({ text, remedy }: Warning) =>
    h("li", {}, text, remedy && h("p", { class: "hint" }, `hint: ${remedy}`));
  return section("Warnings", h("ul", { class: "warnings" }, ...warnings.map(item)));
}

/** Makes a view of its parts. */
export function article(...parts: Child[]): HTMLElement {
  return h("article", {}, ...parts);
}

/** Makes a sentence beside a table or a chart. */
export function note(sentence: string): HTMLElement {
  return h("p", { class: "note" }, sentence);
}

/** Makes a list of sentences; null if there are none. */
export function notes(sentences: readonly string[] | undefined): HTMLElement | null {
  return sentences?.length
    ? h("ul", { class: "notes" }, ...sentences.map((sentence) => h("li", {}, sentence)))
    : null;
}

/** Makes the facts of the machine. */
export function environmentSection(facts: Facts | undefined): HTMLElement | null {
  const rows = Object.entries(facts ?? {}).flatMap(([name, value]) => flat(name, value));
  return rows.length === 0
    ? null
    : section(
        "Environment",
        table("The machine, its kernel and its settings", rows, [
          text("fact", ([name]) => name, "code"),
          text("value", ([name, value]) => factValue(name, value)),
        ]),
      );
}

function flat(name: string, value: unknown): [string, unknown][] {
  if (value === null || typeof value !== "object") return [[name, value]];
  return Object.entries(value).flatMap(([key, inner]) => flat(`${name}.${key}`, inner));
}

/** Formats a value by the unit that its name ends in. */
export function factValue(name: string, value: unknown): string {
  if (value == null) return MISSING;
  if (typeof value === "bigint") return count(value);
  if (typeof value !== "number") return String(value);
  if (/^(start|end)$/.test(name)) return `0x${value.toString(16)}`;
  if (!Number.isInteger(value)) return unitOf(name) === "ns" ? nanos(value) : fixed(value, 3);
  // A PID, a year and a size in a setting are no counts.
  if (unitOf(name) === "count")
    return /_(count|total|held)$|^(count|connections)$/.test(name) ? count(value) : String(value);
  return quantity(unitOf(name), value);
}

/** Says in one line which machine it was. */
export function machineLine(facts: Facts | undefined): string {
  const { model, cpu_model, cpu_count, memory_bytes, kernel, hypervisor } = facts ?? {};
  const parts = [
    model,
    cpu_model,
    cpu_count != null && `${cpu_count} CPUs`,
    model == null && typeof memory_bytes === "number" && bytes(memory_bytes),
    kernel != null && `Linux ${kernel}`,
    hypervisor,
  ];
  return parts.filter((part) => part != null && part !== false).join(", ");
}
