/** trapstat: TLB misses by CPU, mode and page size, and the code and memory that they belong to. */
import { treemap } from "../charts/treemap";
import { h, section } from "../dom";
import { bytes, count, fixed, MISSING } from "../format";
import { number, table, text, type Column } from "../table";
import type { ProfileLine, TrapCell, Trapstat } from "../types";
import { article, notes, title } from "./parts";

type Listing = Trapstat["listings"][number];
type Row = Listing["rows"][number];

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

function listingTable({ title: name, provenance, rows, notes: remarks }: Listing): HTMLElement {
  const columns = KINDS.flatMap((kind): Column<Row>[] => [
    number(`${kind}-miss a second`, (row) => perSecond(row[kind])),
    number("%tim", (row) => percentOf(row[kind])),
  ]);
  return h(
    "div",
    {},
    table(`${name} (${provenance})`, rows, [
      text("cpu", (row) => String(row.cpu)),
      text("mode", (row) => row.mode),
      number("size", (row) => (row.page_bytes === null ? MISSING : bytes(row.page_bytes).toLowerCase())),
      ...columns,
    ]),
    notes(remarks),
  );
}

const perSecond = ({ per_s }: TrapCell) => (per_s === null ? UNKNOWN : fixed(per_s, 0));
const percentOf = ({ percent }: TrapCell) =>
  percent === null ? UNKNOWN : fixed(Math.min(percent, PERCENT_MAX), 1);
