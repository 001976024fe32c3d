/** Miss curves: TLB misses by entries and page size, the reach of TLBs, the working set. */
import { heatmap } from "../charts/heatmap";
import { lineChart } from "../charts/lines";
import { folded, section } from "../dom";
import { bytes, count, fixed, MISSING, quantity } from "../format";
import { number, table, text } from "../table";
import type { KnownTlb, MissCurves } from "../types";
import { article, title } from "./parts";

type Curve = MissCurves["curves"][number];

export function missCurveView(document: MissCurves): HTMLElement {
  const { of, side, access_count, thread_count, curves, interval_access_count } = document;
  const accesses = side === "code" ? "instruction fetches" : "loads and stores";
  const percent = curves[0]?.reach.percent;
  return article(
    title(
      "miss curve",
      of,
      `${count(access_count)} ${accesses}, ${thread_count} threads`,
      "TLBs that are fully associative, LRU: modeled",
    ),
    section(
      "TLB misses by entries and page size",
      curves.length > 0 && curveChart(document),
      folded("Table: counts of misses", () => countTable(document)),
    ),
    document.heatmap &&
      section("Page changes by time and address", heatmap("Page changes", document.heatmap)),
    section(
      `TLB reach for ${percent ?? MISSING} % of accesses`,
      table("The fewest entries that find the translation", curves, [
        number("pages", nameOf),
        number("entries", ({ reach }) =>
          reach.entries === null ? "none: first touches miss more" : count(reach.entries),
        ),
        number("reach", ({ reach, page_bytes }) =>
          reach.entries === null ? MISSING : bytes(reach.entries * page_bytes),
        ),
        number("pages touched", ({ page_count }) => count(page_count)),
      ]),
    ),
    knownSection(document),
    section(
      `Working set, in intervals of ${count(interval_access_count)} accesses`,
      workingSetChart(curves),
      table("The least, the median and the most of all intervals", curves, [
        number("pages", nameOf),
        ...(["least", "median", "most"] as const).map((head) =>
          number<Curve>(head, (curve) => workingSet(curve)[head]),
        ),
      ]),
    ),
  );
}

const nameOf = ({ is_exact, page_bytes }: Curve) => `${is_exact ? "" : "≈"}${bytes(page_bytes)}`;

/** Formats a share of accesses to three digits: `12.3`, `0.0004`. */
function percentText(percent: number): string {
  if (percent === 0) return "0";
  return fixed(percent, percent >= 10 ? 1 : Math.min(Math.max(2 - Math.floor(Math.log10(percent)), 2), 7));
}

/** Makes the table of the TLBs that are marked on the chart, and of those for other pages. */
function knownSection({ known_tlbs = [], access_count }: MissCurves): HTMLElement | null {
  const share = ({ tlb_miss_count }: KnownTlb) =>
    access_count > 0 ? percentText((tlb_miss_count * 100) / access_count) : MISSING;
  return section(
    "Second-level TLBs of known CPUs",
    known_tlbs.length > 0 &&
      table("Misses if they were fully associative", known_tlbs, [
        text("CPU", ({ cpu }) => cpu),
        number("pages", ({ page_bytes }) => bytes(page_bytes)),
        number("entries", ({ entries }) => count(entries)),
        number("reach", ({ entries, page_bytes }) => bytes(entries * page_bytes)),
        number("misses", ({ tlb_miss_count }) => count(tlb_miss_count)),
        number("% of accesses", share),
        text("source", ({ source }) => source, "text"),
      ]),
  );
}

/** Returns a mark for each number of entries that known CPUs have for the first curve's pages. */
function knownMarks({ curves, known_tlbs = [] }: MissCurves): { line: number; x: number; text: string }[] {
  const own = known_tlbs.filter(({ page_bytes }) => page_bytes === curves[0]?.page_bytes);
  const sizes = [...new Set(own.map(({ entries }) => entries))];
  const names = (size: number) => own.filter(({ entries }) => entries === size).map(({ cpu }) => cpu);
  return sizes.map((x) => ({ line: 0, x, text: `${count(x)}: ${names(x).join(", ")}` }));
}

function curveChart(document: MissCurves): HTMLElement {
  const { curves, access_count } = document;
  const entries = curves[0]!.misses.map((point) => point.entries);
  const percentAt = (curve: Curve) =>
    entries.map((_, row) => {
      const point = curve.misses[row];
      return point && access_count > 0 ? (point.tlb_miss_count * 100) / access_count : null;
    });
  return lineChart({
    title: "Misses, % of accesses",
    x: { label: "TLB entries", values: entries, show: count, logBase: 2 },
    lines: curves.map((curve) => ({
      label: `${nameOf(curve)} pages`,
      values: percentAt(curve),
      show: percentText,
    })),
    yLogBase: 10,
    notes: [...curves.flatMap(reachMark), ...knownMarks(document)],
  });
}

function reachMark({ reach, page_bytes }: Curve, line: number): { line: number; x: number; text: string }[] {
  if (reach.entries === null) return [];
  const text = `${reach.percent} % at ${count(reach.entries)} × ${bytes(page_bytes)}`;
  return [{ line, x: reach.entries, text }];
}

function countTable({ curves }: MissCurves): HTMLElement {
  const points = curves[0]?.misses ?? [];
  const columns = curves.map((curve) =>
    number<number>(nameOf(curve), (row) => quantity("count", curve.misses[row]?.tlb_miss_count)),
  );
  return table(
    "TLB misses",
    points.map((_, row) => row),
    [number("entries", (row) => count(points[row]!.entries)), ...columns],
  );
}

function workingSetChart(curves: Curve[]): HTMLElement | null {
  const intervals = curves[0]?.working_set_page_counts ?? [];
  if (intervals.length < 2) return null;
  return lineChart({
    title: "Working set of each interval",
    x: { label: "interval", values: intervals.map((_, nth) => nth + 1), show: count },
    lines: curves.map((curve) => ({
      label: `${nameOf(curve)} pages`,
      values: curve.working_set_page_counts.map((pages) => pages * curve.page_bytes),
      show: bytes,
    })),
    yLogBase: 2,
  });
}

function workingSet({
  working_set_page_counts,
  page_bytes,
}: Curve): Record<"least" | "median" | "most", string> {
  const sorted = Float64Array.from(working_set_page_counts).sort();
  const at = (pages: number | undefined) => (pages === undefined ? MISSING : bytes(pages * page_bytes));
  return { least: at(sorted[0]), median: at(sorted[sorted.length >> 1]), most: at(sorted.at(-1)) };
}
