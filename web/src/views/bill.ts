/** The memory bill of commands: the verdict and what failed, then the readings of each command. */
import { dot, ratioAxis, strip, tick } from "../charts/strip";
import { factsDiffer } from "../compare";
import type { Document } from "../documents";
import { h, section } from "../dom";
import { count, fixed, MISSING, quantity } from "../format";
import { number, plotColumn, table, text, type Column } from "../table";
import type { Bill, BillFinding, BillReading, CommandBill, Unit } from "../types";
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
    ...bill.commands.map((command) => commandSection(command)),
    environmentSection(bill.environment),
  );
}

/** Makes the view of two bills: the readings of the second, with those of the first as the baseline. */
export function billsView(first: Document, second: Document): HTMLElement {
  const [old, bill]: [Bill, Bill] = [first.data, second.data];
  const find = ({ commands }: Bill, wanted: string) => commands.find(({ name }) => name === wanted);
  const alone = (of: Bill, other: Bill, file: string) =>
    of.commands.filter(({ name }) => !find(other, name)).map(({ name }) => `${name}: in ${file} alone`);
  return article(
    title("bills", `${second.name} beside ${first.name}`, `${second.name}: ${verdict(bill)}`),
    notes([
      ...factsDiffer(COUNTED_BY, old.environment, bill.environment).map(
        (fact) => `the baseline was counted with another ${fact}`,
      ),
      ...alone(old, bill, first.name),
      ...alone(bill, old, second.name),
    ]),
    failures(bill),
    ...bill.commands.map((command) =>
      commandSection(command, { name: first.name, old: find(old, command.name) }),
    ),
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

function commandSection(command: CommandBill, baseline?: { name: string; old?: CommandBill }) {
  const { name, command: words, exit, cpu, readings, findings } = command;
  const rows = Object.entries(readings);
  const found = (id: string) => findings.find(({ reading }) => reading === id);
  const changes = changeColumns(rows, baseline?.old?.readings ?? {});
  return section(
    name,
    h("p", { class: "detail" }, h("code", {}, words.join(" ")), `, ${exitText(exit)}`),
    table(
      `Readings of ${name}; simulated TLBs: ${cpu}`,
      rows,
      [
        text("reading", ([id]) => id),
        ...(baseline ? valueColumns(baseline.name, ([id]) => baseline.old?.readings[id]) : []),
        ...valueColumns("now", ([, reading]) => reading),
        ...(baseline ? changes : []),
        text("finding", ([id]) => {
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

const valueColumns = (head: string, of: (row: Row) => BillReading | undefined): Column<Row>[] => [
  number(head, (row) => value(of(row))),
  number("low – high", (row) => ends(of(row))),
];

/** Returns the columns of the change since the baseline. */
function changeColumns(rows: Row[], old: CommandBill["readings"]): Column<Row>[] {
  const growth = ([id, { value: now }]: Row) => {
    const was = old[id]?.value;
    return now != null && was != null && was > 0 && now !== was ? now / was : null;
  };
  const change = (row: Row) => {
    const ratio = growth(row);
    return ratio === null ? "" : `${ratio < 1 ? "" : "+"}${fixed((ratio - 1) * 100, 1)} %`;
  };
  const { scale, head } = ratioAxis(rows.map((row) => growth(row) || 1));
  const mark = (row: Row) => {
    const ratio = growth(row);
    return ratio === null ? null : strip(`${row[0]}: ${change(row)}`, tick(scale(1)), dot(scale(ratio)));
  };
  return [number("change", change), plotColumn(head, mark)];
}

/** Formats a value as the terminal does: a share has three decimals. */
function show(unit: Unit, value: number): string {
  if (unit === "count") return Number.isInteger(value) ? count(value) : fixed(value, 3);
  return quantity(unit, Math.trunc(value));
}

/** Formats a reading; one that the baseline does not have is empty. */
function value(reading: BillReading | undefined): string {
  if (!reading) return "";
  return reading.value == null ? MISSING : show(reading.unit, reading.value);
}

function ends(reading: BillReading | undefined): string {
  const { unit, low, high } = reading ?? {};
  return !unit || low == null || high == null || low === high
    ? ""
    : `${show(unit, low)} – ${show(unit, high)}`;
}
