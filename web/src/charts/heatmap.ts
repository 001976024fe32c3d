/** Accesses by time and address, on a canvas: 10,000 cells are too many elements. */
import { folded, h } from "../dom";
import { bytes, count } from "../format";
import { number, table, text } from "../table";
import { colour, onThemeChange } from "../theme";

/** Page changes by address and time, which is counted in accesses. Addresses that are in no row were not used. */
export interface Heatmap {
  column_access_count: number;
  row_starts: number[];
  row_ends: number[];
  /** A row for each range of addresses, a count for each column. */
  page_change_counts: number[][];
}

const columns = (map: Heatmap) => map.page_change_counts[0]?.length ?? 0;

const HEIGHT_PX = 260;
/** The palest cell that still differs from none. */
const OPACITY_MIN = 0.12;

/** Makes the figure. Darker is more, on a logarithmic scale. */
export function heatmap(title: string, map: Heatmap): HTMLElement {
  const canvas = h("canvas", {
    class: "heatmap",
    role: "img",
    "aria-label": `${title}. The table below has the counts.`,
  });
  const draw = () => paint(canvas, map);
  const observer = new ResizeObserver(() => canvas.clientWidth > 0 && draw());
  observer.observe(canvas);
  onThemeChange(canvas, draw);
  canvas.addEventListener("pointermove", (event) => {
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - left) / width) * columns(map));
    const rows = map.page_change_counts.length;
    const row = rows - 1 - Math.floor(((event.clientY - top) / height) * rows);
    canvas.dataset["tip"] = cellText(map, row, column);
  });
  return h(
    "figure",
    {},
    h("figcaption", {}, title),
    canvas,
    h(
      "p",
      { class: "note" },
      `${columns(map)} columns of ${count(map.column_access_count)} accesses; used addresses upward, from ${hex(map.row_starts[0] ?? 0)} to ${hex(map.row_ends.at(-1) ?? 0)}; darker is more, on a logarithmic scale.`,
    ),
    folded(`Table: ${title}`, () => cellTable(title, map)),
  );
}

const hex = (address: number) => `0x${address.toString(16)}`;

function cellText(map: Heatmap, row: number, column: number): string {
  const from = count(column * map.column_access_count);
  const changes = count(map.page_change_counts[row]?.[column] ?? 0);
  return `from access ${from}, ${hex(map.row_starts[row] ?? 0)}: ${changes}`;
}

function paint(canvas: HTMLCanvasElement, map: Heatmap): void {
  const counts = map.page_change_counts;
  canvas.width = canvas.clientWidth * devicePixelRatio;
  canvas.height = HEIGHT_PX * devicePixelRatio;
  const context = canvas.getContext("2d")!;
  const [width, height] = [canvas.width / columns(map), canvas.height / counts.length];
  let most = 1;
  for (const row of counts) for (const value of row) most = Math.max(most, value);
  context.fillStyle = colour("--accent");
  counts.forEach((row, nth) =>
    row.forEach((value, column) => {
      if (value === 0) return;
      context.globalAlpha = OPACITY_MIN + (1 - OPACITY_MIN) * (Math.log1p(value) / Math.log1p(most));
      // The lowest address is at the bottom. Half a pixel more hides the seams.
      context.fillRect(column * width, canvas.height - (nth + 1) * height, width + 0.5, height + 0.5);
    }),
  );
}

function cellTable(title: string, map: Heatmap): HTMLElement {
  const cells = map.page_change_counts
    .flatMap((row, nth) => row.map((value, column) => ({ nth, column, value })))
    .filter(({ value }) => value > 0);
  return table(title, cells, [
    text("from address", ({ nth }) => hex(map.row_starts[nth]!), "code"),
    number("size", ({ nth }) => bytes(map.row_ends[nth]! - map.row_starts[nth]!)),
    number("from access", ({ column }) => count(column * map.column_access_count)),
    number("page changes", ({ value }) => count(value)),
  ]);
}
