/** Accesses by time and address, on a canvas: 10,000 cells are too many elements. */
import { folded, h } from "../dom";
import { bytes, count, nanos } from "../format";
import { number, table, text } from "../table";
import { colour, onThemeChange } from "../theme";

/** Counts in bins of time and address. Both lists have the edges of their bins, one more than there are bins. */
export interface Heatmap {
  time_ns: number[];
  address: number[];
  /** A row for each bin of addresses, a count for each bin of time. */
  counts: number[][];
}

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
    const column = Math.floor(((event.clientX - left) / width) * (map.time_ns.length - 1));
    const row = map.counts.length - 1 - Math.floor(((event.clientY - top) / height) * map.counts.length);
    canvas.dataset["tip"] = cellText(map, row, column);
  });
  const end = (edges: number[], show: (value: number) => string) =>
    `${show(edges[0]!)} to ${show(edges.at(-1)!)}`;
  return h(
    "figure",
    {},
    h("figcaption", {}, title),
    canvas,
    h(
      "p",
      { class: "note" },
      `Time ${end(map.time_ns, nanos)}, addresses ${end(map.address, hex)} upward; darker is more, on a logarithmic scale.`,
    ),
    folded(`Table: ${title}`, () => cellTable(title, map)),
  );
}

const hex = (address: number) => `0x${address.toString(16)}`;

function cellText({ time_ns, address, counts }: Heatmap, row: number, column: number): string {
  return `${nanos(time_ns[column] ?? 0)}, ${hex(address[row] ?? 0)}: ${count(counts[row]?.[column] ?? 0)}`;
}

function paint(canvas: HTMLCanvasElement, { time_ns, counts }: Heatmap): void {
  canvas.width = canvas.clientWidth * devicePixelRatio;
  canvas.height = HEIGHT_PX * devicePixelRatio;
  const context = canvas.getContext("2d")!;
  const [width, height] = [canvas.width / (time_ns.length - 1), canvas.height / counts.length];
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

function cellTable(title: string, { time_ns, address, counts }: Heatmap): HTMLElement {
  const cells = counts
    .flatMap((row, nth) => row.map((value, column) => ({ nth, column, value })))
    .filter(({ value }) => value > 0);
  return table(title, cells, [
    text("from address", ({ nth }) => hex(address[nth]!), "code"),
    number("size", ({ nth }) => bytes(address[nth + 1]! - address[nth]!)),
    number("from time", ({ column }) => nanos(time_ns[column]!)),
    number("accesses", ({ value }) => count(value)),
  ]);
}
