/** trapstat: TLB misses by CPU, mode and page size, and the code and memory that they belong to. */
import { treemap } from "../charts/treemap";
import { h, section } from "../dom";
import { bytes, count, fixed, MISSING } from "../format";
import { number, table, text, type Column } from "../table";
import type { ProfileLine, TrapCell, Trapstat } from "../types";
import { article, notes, title } from "./parts";

type Listing = Trapstat["listings"][number];
type Row = Listing["rows"][number];

type Cells = Pick<Row, (typeof KINDS)[number]>;

/** A line of a listing. */
interface Line {
  name: [cpu: string, mode: string, size: string];
  cells: Cells;
}

/** Stands for a number that nothing counts. Never 0. */
const UNKNOWN = "n/a";
/** More than this is no percentage that trapstat prints. */
const PERCENT_MAX = 99.9;
const KINDS = ["itlb", "itsb", "dtlb", "dtsb"] as const;

export function trapstatView({ backend, why, listings, profiles, notes: remarks }: Trapstat): HTMLElement {
  return article(
    title("trapstat", `TLB misses, by the ${backend} backend`, why),
    ...profiles.map((profile) =>
      section(
        `${profile.title}: where the misses are`,
        profileTable("function", profile.functions),
        lineTable(profile.functions),
        profileTable("memory", profile.memory),
      ),
    ),
    section("Listings", ...listings.map(listingTable)),
    notes(remarks),
  );
}

function profileTable(what: string, lines: ProfileLine[]): HTMLElement | null {
  if (lines.length === 0) return null;
  const oneDecimal = (share: number) => `${fixed(share * 100, 1)} %`;
  const areas = lines.map((line) => ({
    ...line,
    tip: `${line.name}: ${count(line.misses)} misses, ${oneDecimal(line.share)}`,
  }));
  return h(
    "figure",
    {},
    h("figcaption", {}, `Misses by ${what}: areas are shares of all misses`),
    treemap(areas),
    table(`Misses by ${what}`, lines, [
      text(what, (line) => line.name, "code"),
      number("misses", (line) => count(line.misses)),
      number("of all", (line) => oneDecimal(line.share)),
      number("of the time", (line) => oneDecimal(line.time_share)),
    ]),
  );
}

/** Makes the table of the source lines that miss most, in all functions. */
function lineTable(functions: ProfileLine[]): HTMLElement | null {
  const [worst] = functions;
  const all = worst && worst.share > 0 ? worst.misses / worst.share : 0;
  const lines = functions
    .flatMap(({ name, lines = [] }) => lines.map((line) => ({ name, ...line })))
    .sort((one, other) => other.misses - one.misses);
  if (lines.length === 0) return null;
  return table("Misses by source line, of functions with debug information", lines, [
    text("line", ({ file, line }) => `${file}:${line}`, "code"),
    number("misses", ({ misses }) => count(misses)),
    number("of all", ({ misses }) => (all > 0 ? `${fixed((misses / all) * 100, 1)} %` : MISSING)),
    text("function", ({ name }) => name, "code"),
  ]);
}

function listingTable({ title: name, provenance, rows, notes: remarks }: Listing): HTMLElement {
  const columns = KINDS.flatMap((kind): Column<Line>[] => [
    number(`${kind}-miss a second`, ({ cells }) => perSecond(cells[kind])),
    number("%tim", ({ cells }) => percentText(cells[kind].percent)),
  ]);
  const lines = rows.map((row): Line => ({
    name: [
      String(row.cpu),
      row.mode,
      row.page_bytes === null ? MISSING : bytes(row.page_bytes).toLowerCase(),
    ],
    cells: row,
  }));
  lines.push({ name: ["ttl", "", ""], cells: total(rows) });
  return h(
    "div",
    {},
    table(`${name} (${provenance})`, lines, [
      text("cpu", (line) => line.name[0]),
      text("mode", (line) => line.name[1]),
      number("size", (line) => line.name[2]),
      ...columns,
      number("%tim of all", ({ cells }) => percentText(sum(KINDS.map((kind) => cells[kind].percent)))),
    ]),
    notes(remarks),
  );
}

/** Adds the known numbers; null if none is. */
function sum(values: (number | null)[]): number | null {
  const known = values.filter((value) => value !== null);
  return known.length === 0 ? null : known.reduce((all, value) => all + value, 0);
}

/** Returns the sum of counts, and times averaged over CPUs. */
function total(rows: Row[]): Cells {
  const cpus = Math.max(new Set(rows.map(({ cpu }) => cpu)).size, 1);
  const cell = (kind: keyof Cells): TrapCell => {
    const percent = sum(rows.map((row) => row[kind].percent));
    return {
      per_s: sum(rows.map((row) => row[kind].per_s)),
      percent: percent === null ? null : percent / cpus,
    };
  };
  return { itlb: cell("itlb"), itsb: cell("itsb"), dtlb: cell("dtlb"), dtsb: cell("dtsb") };
}

const perSecond = ({ per_s }: TrapCell) => (per_s === null ? UNKNOWN : fixed(per_s, 0));
const percentText = (percent: number | null) =>
  percent === null ? UNKNOWN : fixed(Math.min(percent, PERCENT_MAX), 1);
