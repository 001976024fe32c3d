/** Miss curves: TLB misses by entries and page size, the reach of TLBs, the working set. */
import { heatmap } from "../charts/heatmap";
import { lineChart } from "../charts/lines";
import { folded, section } from "../dom";
import { bytes, count, fixed, MISSING, quantity } from "../format";
import { number, table } from "../table";
import type { MissCurves } from "../types";
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

function curveChart({ curves, access_count }: MissCurves): HTMLElement {
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
    notes: curves.flatMap(({ reach, page_bytes }, line) =>
      reach.entries === null
        ? []
        : [
            {
              line,
              x: reach.entries,
              text: `${reach.percent} % at ${count(reach.entries)} × ${bytes(page_bytes)}`,
            },
          ],
    ),
  });
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
