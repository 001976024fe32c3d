/** The memory bill of commands: the verdict and what failed, then the readings of each command. */
import { axis, dot, logarithmic, strip, tick } from "../charts/strip";
import { factsDiffer } from "../compare";
import type { Document } from "../documents";
import { h, section, type Child } from "../dom";
import { count, fixed, MISSING, quantity } from "../format";
import { number, plotColumn, table, text, type Column } from "../table";
import type { Bill, BillFinding, BillReading, CommandBill } from "../types";
import { exitText } from "./diagnosis";
import { article, environmentSection, machineLine, notes, provenance, title } from "./parts";

/** Facts of a machine that change what its kernel counts for the same program. */
const COUNTED_BY = [
  "kernel",
  "base_page_bytes",
  "thp_enabled",
  "thp_enabled_by_size",
  "page_table_isolation",
];
const WORDS = { failed: "FAILED", not_judged: "not judged", better: "better" };

export function billView(bill: Bill): HTMLElement {
  return article(
    title("bill", verdict(bill), machineLine(bill.environment)),
    failures(bill),
    ...bill.commands.map((command) => commandSection(command, [])),
    environmentSection(bill.environment),
  );
}

/** Makes the view of two bills: the readings of the second, with those of the first as the baseline. */
export function billsView(first: Document, second: Document): HTMLElement {
  const [old, bill]: [Bill, Bill] = [first.data, second.data];
  const ofOld = (command: CommandBill) => old.commands.find(({ name }) => name === command.name);
  const isGone = ({ name }: CommandBill) => bill.commands.every((command) => command.name !== name);
  return article(
    title("bills", `${second.name} beside ${first.name}`, verdict(bill)),
    notes([
      ...factsDiffer(COUNTED_BY, old.environment, bill.environment).map(
        (fact) => `the baseline was counted with another ${fact}`,
      ),
      ...old.commands.filter(isGone).map(({ name }) => `${name}: in ${first.name} alone`),
    ]),
    failures(bill),
    ...bill.commands.map((command) => commandSection(command, changeColumns(ofOld(command), first.name))),
  );
}

/** Returns the sentence of the terminal. */
function verdict({ commands }: Bill): string {
  const failed = commands.filter(({ findings }) => findings.some(isFailed)).length;
  return failed === 0
    ? `${commands.length} commands: none takes more memory than it may`
    : `${failed} of ${commands.length} commands take more memory than they may`;
}

const isFailed = ({ outcome }: BillFinding) => outcome === "failed";

function failures({ commands }: Bill): HTMLElement | null {
  const items = commands.flatMap(({ name, findings }) =>
    findings.filter(isFailed).map((finding) => item(finding, `${name}: `)),
  );
  return items.length === 0
    ? null
    : h("section", { class: "verdict", "aria-label": "Failed" }, h("ul", { class: "warnings" }, ...items));
}

const item = ({ outcome, text, cause }: BillFinding, name = "") =>
  h(
    "li",
    {},
    name,
    h("strong", {}, `${WORDS[outcome]}: `),
    text,
    cause && h("p", { class: "hint" }, `cause: ${cause}`),
  );

type Row = [string, BillReading];

function commandSection(command: CommandBill, changes: Column<Row>[]): HTMLElement | null {
  const { name, command: words, exit, cpu, readings, findings } = command;
  const rows = Object.entries(readings);
  const found = (id: string) => findings.find(({ reading }) => reading === id);
  const [before, after] = [changes.slice(0, 1), changes.slice(1)];
  return section(
    name,
    h("p", { class: "detail" }, h("code", {}, words.join(" ")), `, ${exitText(exit)}`),
    table(
      `Readings of ${name}; simulated TLBs: ${cpu}`,
      rows,
      [
        text("reading", ([id]) => id),
        ...before,
        number("now", ([, reading]) => value(reading)),
        ...after,
        number("low – high", ([, reading]) => ends(reading)),
        text("", ([id]) => {
          const finding = found(id);
          return finding && h("strong", {}, WORDS[finding.outcome]);
        }),
        text("provenance", ([, reading]) => provenance(reading.provenance)),
        text("", ([, { why }]) => why, "text"),
      ],
      ([id]) => (found(id)?.outcome === "failed" ? "winner" : undefined),
    ),
    findings.length > 0 && h("ul", { class: "warnings" }, ...findings.map((finding) => item(finding))),
  );
}

/** Returns the columns of the baseline: its values, and the change since. */
function changeColumns(old: CommandBill | undefined, name: string): Column<Row>[] {
  const scale = logarithmic(0.5, 2);
  const growth = ([id, { value: now }]: Row) => {
    const was = old?.readings[id]?.value;
    return now != null && was != null && was > 0 && now !== was ? now / was : null;
  };
  const change = (row: Row) => {
    const ratio = growth(row);
    return ratio === null ? "" : `${ratio < 1 ? "" : "+"}${fixed((ratio - 1) * 100, 1)} %`;
  };
  const mark = (row: Row): Child => {
    const ratio = growth(row);
    return ratio === null ? null : strip(`${row[0]}: ${change(row)}`, tick(scale(1)), dot(scale(ratio)));
  };
  const at = (value: number, text: string) => ({ at: scale(value), text });
  return [
    number(name, ([id]) => {
      const reading = old?.readings[id];
      return reading ? value(reading) : "";
    }),
    number("change", change),
    plotColumn(axis("change", [at(0.5, "-50 %"), at(1, "0"), at(2, "+100 %")]), mark),
  ];
}

/** Formats a value as the terminal does: a share has three decimals. */
function show({ unit }: BillReading, value: number | null): string {
  if (value === null) return MISSING;
  if (unit === "count") return Number.isInteger(value) ? count(value) : fixed(value, 3);
  return quantity(unit, Math.trunc(value));
}

const value = (reading: BillReading) => show(reading, reading.value);

const ends = (reading: BillReading) =>
  reading.low === reading.high ? "" : `${show(reading, reading.low)} – ${show(reading, reading.high)}`;
