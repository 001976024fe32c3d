/** Any document as tables: for kinds that need no chart, and for kinds that this page does not know. */
import { section } from "../dom";
import { table, type Column } from "../table";
import type { Facts } from "../types";
import { article, environmentSection, factValue, provenance, title, warningsSection } from "./parts";

/** Keys that every document has, or that have a section of their own. */
const APART = new Set(["schema", "kind", "environment"]);
/** Longer texts are wrapped. */
const CHARS_MAX = 50;

export function genericView(data: Facts, kind: string, name: string): HTMLElement {
  const entries = Object.entries(data).filter(([key]) => !APART.has(key));
  return article(
    title(kind, name),
    factsTable(
      "Values",
      entries.filter(([, value]) => !isNested(value)),
    ),
    ...entries.map(([key, value]) => isNested(value) && nested(key, value)),
    environmentSection(data["environment"] as Facts | undefined),
  );
}

const isNested = (value: unknown): value is object => typeof value === "object" && value !== null;
const isList = (value: unknown): value is Facts[] =>
  Array.isArray(value) && value.length > 0 && value.every(isNested);

function nested(key: string, value: object): HTMLElement | null {
  const heading = key.replaceAll("_", " ");
  if (key === "warnings" && isList(value)) return warningsSection(value as never);
  if (isList(value)) return section(heading, ...listTables(heading, value));
  if (Array.isArray(value)) return value.length === 0 ? null : section(heading, listOfValues(heading, value));
  return section(
    heading,
    factsTable(
      heading,
      Object.entries(value).flatMap(([name, inner]) => flatten(name, inner)),
    ),
  );
}

function listOfValues(heading: string, values: unknown[]): HTMLElement {
  return table(heading, values, [
    { head: "nth", cell: (_, index) => String(index), numeric: true },
    { head: heading, cell: (value) => factValue(heading, value) },
  ]);
}

/** Makes a table of a list of objects. A list inside a row is a table of its own, under the name of the row. */
export function listTables(caption: string, rows: Facts[]): HTMLElement[] {
  const flat = rows.map((row) =>
    Object.fromEntries(
      Object.entries(row)
        .filter(([, value]) => !isList(value))
        .flatMap(([key, value]) => flatten(key, value)),
    ),
  );
  const keys = [...new Set(flat.flatMap(Object.keys))];
  const isNumber = (key: string) => flat.every((row) => row[key] == null || typeof row[key] === "number");
  const columns = keys.map((key): Column<Facts> => ({
    head: key,
    numeric: isNumber(key),
    style: flat.some((row) => String(row[key] ?? "").length > CHARS_MAX) ? "text" : undefined,
    cell: (row) => cellOf(key, row[key]),
  }));
  const inner = rows.flatMap((row, index) =>
    Object.entries(row)
      .filter(([, value]) => isList(value))
      .flatMap(([key, value]) =>
        listTables(`${nameOf(row, `${caption} ${index}`)}: ${key}`, value as Facts[]),
      ),
  );
  return [...(keys.length > 0 ? [table(caption, flat, columns)] : []), ...inner];
}

const nameOf = (row: Facts, otherwise: string) =>
  String(row["name"] ?? row["title"] ?? row["command"] ?? row["pid"] ?? otherwise);

function cellOf(key: string, value: unknown): HTMLElement | string {
  const isProvenance = key === "provenance" && typeof value === "string";
  return isProvenance ? provenance(value as never) : factValue(key, value);
}

function factsTable(caption: string, entries: [string, unknown][]): HTMLElement | null {
  return entries.length === 0
    ? null
    : table(caption, entries, [
        { head: "name", cell: ([name]) => name, style: "code" },
        { head: "value", cell: ([name, value]) => cellOf(name, value), style: "text" },
      ]);
}

/** Returns the cells of a value: one for a list of plain values, and one for each value of an object. */
function flatten(name: string, value: unknown): [string, unknown][] {
  if (!isNested(value)) return [[name, value]];
  if (Array.isArray(value))
    return [[name, value.map((inner) => (isNested(inner) ? "…" : factValue(name, inner))).join(", ")]];
  return Object.entries(value).flatMap(([key, inner]) => flatten(`${name}.${key}`, inner));
}
