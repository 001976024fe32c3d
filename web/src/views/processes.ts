/** Processes and their pages: memory maps, causes of no huge pages, changes of page sizes. */
import { axis, band, bar, linear, strip } from "../charts/strip";
import { copyBlock } from "../copy";
import { h, section } from "../dom";
import { bytes, MISSING, nanos, percent, quantity } from "../format";
import { number, plotColumn, table, text } from "../table";
import type { HugePageCauses, Mapping, PageMaps, PageSizeChange } from "../types";
import { article, figure, note, notes, title } from "./parts";
import { listTables } from "./generic";

export function pageMapsView({ maps }: PageMaps): HTMLElement {
  return article(
    ...maps.flatMap((map) => [
      title(
        "memory map",
        map.command,
        `process ${map.pid}`,
        map.folios_missing && `sizes below the huge page are unknown: ${map.folios_missing}`,
        map.unsettled && "the process changed its map while it was read",
      ),
      section("Page sizes by segment", segmentTable(map.mappings, map.base_page)),
      section("Mappings", mappingTable(map.mappings)),
    ]),
  );
}

const sizeOf = ({ start, end }: Mapping) => Number(BigInt(end) - BigInt(start));

/** Sums resident bytes by page size. */
function residentBySize(mappings: Mapping[]): Map<number, number> {
  const sizes = new Map<number, number>();
  for (const { page, resident_bytes } of mappings.flatMap(({ runs }) => runs)) {
    if (page !== null) sizes.set(page, (sizes.get(page) ?? 0) + resident_bytes);
  }
  return sizes;
}

function segmentTable(mappings: Mapping[], basePage: number): HTMLElement {
  const names = [...new Set(mappings.map(({ segment }) => segment))];
  const rows = names.map((segment) => {
    const of = mappings.filter((mapping) => mapping.segment === segment);
    const sizes = residentBySize(of);
    const resident = [...sizes.values()].reduce((sum, size) => sum + size, 0);
    return { segment, sizes, resident, mapped: of.reduce((sum, mapping) => sum + sizeOf(mapping), 0) };
  });
  const pages = [...residentBySize(mappings).keys()].sort((a, b) => a - b);
  const scale = linear(0, Math.max(1, ...rows.map(({ resident }) => resident)));
  const plot = ({ segment, sizes, resident }: (typeof rows)[number]) => {
    const base = sizes.get(basePage) ?? 0;
    return strip(
      `${segment}: ${bytes(resident - base)} of ${bytes(resident)} on large pages`,
      bar(0, scale(resident - base), "measured"),
      band(scale(resident - base), scale(resident)),
    );
  };
  return table("Resident memory: full colour is on large pages, pale on base pages", rows, [
    text("segment", ({ segment }) => segment),
    number("mapped", ({ mapped }) => bytes(mapped)),
    number("resident", ({ resident }) => bytes(resident)),
    plotColumn(axis("resident", [{ at: 0, text: "0" }]), plot),
    ...pages.map((page) =>
      number<(typeof rows)[number]>(bytes(page), ({ sizes }) => quantity("bytes", sizes.get(page) ?? 0)),
    ),
  ]);
}

function mappingTable(mappings: Mapping[]): HTMLElement {
  const rights = ({ read, write, execute, shared }: Mapping) =>
    `${read ? "r" : "-"}${write ? "w" : "-"}${execute ? "x" : "-"}${shared ? "s" : "-"}-`;
  const resident = (mapping: Mapping) =>
    [...residentBySize([mapping])].map(([page, size]) => `${bytes(size)} on ${bytes(page)}`).join(", ") ||
    MISSING;
  return table("Each mapping", mappings, [
    text("address", ({ start }) => start.toString(16).padStart(16, "0"), "code"),
    number("size", (mapping) => bytes(sizeOf(mapping))),
    text("rights", rights, "code"),
    text("resident", resident),
    number("swapped", ({ swapped_bytes }) => bytes(swapped_bytes)),
    text("segment", ({ segment }) => segment),
    text("name", ({ name }) => name || "[ anon ]", "code"),
  ]);
}

export function hugePageCausesView({ processes }: HugePageCauses): HTMLElement {
  return article(
    ...processes.flatMap((process) => [
      title("why no huge pages", process.command, `process ${process.pid}`),
      h(
        "section",
        { class: "verdict", "aria-label": "Answer" },
        h("p", { class: "reason" }, process.summary),
        h(
          "div",
          { class: "figures" },
          figure(
            percent(process.huge_bytes / Math.max(process.anon_bytes, 1)),
            `of ${bytes(process.anon_bytes)} of anonymous memory is on huge pages`,
          ),
        ),
      ),
      causesSection(process),
      notes([
        ...(process.unexplained_bytes > 0
          ? [`${bytes(process.unexplained_bytes)} on small pages have no listed cause`]
          : []),
        ...untouchedNote(process),
        ...process.missing.map(({ what, why }) => `missing: ${what}: ${why}`),
      ]),
    ]),
  );
}

type Process = HugePageCauses["processes"][number];

function untouchedNote({ untouched: { value, low, high, why }, huge_bytes }: Process): string[] {
  const what = "never touched, but resident on huge pages";
  if (value == null) return why && huge_bytes > 0 ? [`${what}: unknown; ${why}`] : [];
  if (value === 0 && huge_bytes === 0) return [];
  return [
    `${what}: ${bytes(value)}${low != null && high != null ? ` (${bytes(low)} to ${bytes(high)})` : ""}`,
  ];
}

function causesSection({ causes, anon_bytes }: Process): HTMLElement | null {
  if (causes.length === 0) return null;
  const scale = linear(0, anon_bytes);
  return section(
    "Causes",
    table("Bytes on small pages that each cause explains", causes, [
      text("cause", ({ what }) => what, "text"),
      text("certainty", ({ certainty }) => certainty),
      number("bytes", ({ bytes: size }) => bytes(size)),
      plotColumn(
        axis("of the anonymous memory", [
          { at: 0, text: "0" },
          { at: 1, text: bytes(anon_bytes) },
        ]),
        ({ id, bytes: size, certainty }) =>
          strip(
            `${id}: ${bytes(size)}`,
            bar(0, scale(size), certainty === "certain" ? "measured" : "derived"),
          ),
      ),
      text(
        "evidence",
        ({ evidence }) => evidence.map(({ source, value }) => `${source}: ${value}`).join("; "),
        "text",
      ),
    ]),
    ...causes.map(({ what, hint }) => copyBlock(what, hint)),
  );
}

export function pageSizeChangeView({ asked, processes, files }: PageSizeChange): HTMLElement {
  return article(
    title(
      "page sizes changed",
      Object.entries(asked)
        .map(([part, size]) => `${part}=${size}`)
        .join(","),
      `${processes.length} processes`,
    ),
    ...processes.map((process) =>
      section(
        process.operand,
        process.error && h("p", { class: "refusal" }, process.error),
        process.verdict && partsTable(process.verdict.parts),
        note(
          `${quantity("bytes", process.changed_bytes)} changed from outside; stopped ${quantity("count", process.stop_count)} times${process.stop_ns_max ? `, at most ${nanos(process.stop_ns_max)}` : ""}`,
        ),
      ),
    ),
    files.length > 0 && section("Code files", ...listTables("Code files", files)),
  );
}

type Part = NonNullable<PageSizeChange["processes"][number]["verdict"]>["parts"][number];

function partsTable(parts: Part[]): HTMLElement {
  const scale = linear(0, Math.max(1, ...parts.map((part) => part.resident_bytes)));
  return table("Parts: full colour is as asked, pale is not", parts, [
    text("part", ({ part }) => part),
    text("asked", ({ asked }) => asked),
    number("resident", (part) => bytes(part.resident_bytes)),
    number("as asked", (part) => bytes(part.as_asked_bytes)),
    plotColumn(axis("resident", [{ at: 0, text: "0" }]), (part) =>
      strip(
        `${part.part}: ${bytes(part.as_asked_bytes)} of ${bytes(part.resident_bytes)}`,
        bar(0, scale(part.as_asked_bytes), "measured"),
        band(scale(part.as_asked_bytes), scale(part.resident_bytes)),
      ),
    ),
    text("on pages of", (part) =>
      Object.entries(part.resident_bytes_by_page)
        .map(([page, size]) => `${bytes(Number(page))}: ${bytes(size)}`)
        .join(", "),
    ),
    text(
      "why",
      ({ why }) => why.map(({ bytes: size, reason }) => `${bytes(size)}: ${reason}`).join("; "),
      "text",
    ),
  ]);
}
