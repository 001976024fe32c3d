/** Lines over time or over another number: uPlot with our legend, keyboard and table. */
import uPlot from "uplot";
import { button, folded, h, s } from "../dom";
import { MISSING } from "../format";
import { number, table } from "../table";
import { onThemeChange, colour } from "../theme";

export interface Line {
  label: string;
  values: (number | null)[];
  /** Formats a value of this line, as the terminal does. */
  show: (value: number) => string;
  /** Draws points alone, or no line and no legend for the edges of a band. */
  style?: "points" | "edge";
}

export interface Band {
  /** The lines of its edges, as indices of `lines`. */
  edges: [number, number];
  style: "--band" | "--band-strong";
}

export interface Plot {
  title: string;
  x: {
    label: string;
    values: number[];
    show: (value: number) => string;
    logBase?: 2 | 10;
    isDiscrete?: boolean;
  };
  lines: Line[];
  /** Makes the y axis logarithmic: 2 for bytes, whose round numbers are powers of 2. */
  yLogBase?: 2 | 10;
  bands?: Band[];
  /** Parts of the x axis with names, such as phases. */
  parts?: { name: string; from: number; to: number }[];
  /** Points with a text, such as the reach of a TLB. */
  notes?: { line: number; x: number; text: string }[];
}

/** Beyond this ratio of the largest value to the smallest, a linear axis shows the largest alone. */
const LINEAR_MAX = 50;
const HEIGHT_PX = 240;
const CHAR_PX = 7;
const DASHES: number[][] = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [1, 4]];
const dash = (nth: number) => DASHES[nth % DASHES.length]!;
const ink = (nth: number) => `--line-${(nth % 6) + 1}`;

/** Makes the figure: heading, chart, legend with the values at the cursor, and the table of all values. */
export function lineChart(plot: Plot): HTMLElement {
  const canvas = h("div", {
    class: "chart",
    tabindex: 0,
    role: "group",
    "aria-label": `${plot.title}. Left and right arrow keys move the cursor. The table below has all values.`,
  });
  const legend = makeLegend(plot);
  const figure = h(
    "figure",
    {},
    h("figcaption", {}, plot.title),
    canvas,
    legend.element,
    folded(`Table: ${plot.title}`, () => valueTable(plot)),
  );
  whenShown(canvas, () => {
    const chart = new uPlot(options(plot, canvas.clientWidth, legend.show), data(plot), canvas);
    legend.onToggle = (nth, isShown) => chart.setSeries(nth + 1, { show: isShown });
    new ResizeObserver(() => chart.setSize({ width: canvas.clientWidth, height: HEIGHT_PX })).observe(canvas);
    onThemeChange(canvas, () => chart.redraw(false, true));
    moveByKeys(canvas, chart);
  });
  return figure;
}

/** Returns the base of a logarithmic y axis if these values need one. */
export function logBaseFor(values: (number | null)[]): 10 | undefined {
  const known = values.filter((value): value is number => value !== null && value > 0);
  return Math.max(...known) > LINEAR_MAX * Math.min(...known) ? 10 : undefined;
}

/** Draws when the element has a width: that of a hidden one is 0. */
function whenShown(element: Element, draw: () => void): void {
  const observer = new ResizeObserver(() => {
    if (element.clientWidth === 0) return;
    observer.disconnect();
    draw();
  });
  observer.observe(element);
}

const data = (plot: Plot): uPlot.AlignedData => [
  plot.x.values,
  // A logarithmic axis has no place for 0.
  ...plot.lines.map(({ values }) =>
    plot.yLogBase ? values.map((value) => (value === 0 ? null : value)) : values,
  ),
];

function options(plot: Plot, width: number, show: (index: number | null) => void): uPlot.Options {
  const axis = (logBase: number | undefined, show: (value: number) => string) => ({
    stroke: () => colour("--soft"),
    grid: {
      stroke: () => colour("--rule"),
      width: 1,
      filter: (_: uPlot, marks: number[]) => marks.map((mark) => (isRound(mark, logBase) ? mark : null)),
    },
    ticks: { show: false },
    values: (_: uPlot, marks: (number | null)[]) => marks.map((mark) => (mark === null ? "" : show(mark))),
  });
  return {
    width,
    height: HEIGHT_PX,
    legend: { show: false },
    cursor: { y: false, points: { size: 7 } },
    padding: [plot.parts ? 22 : 8, 30, 0, 0],
    scales: {
      x: { time: false, ...(plot.x.logBase ? { distr: 3, log: plot.x.logBase } : {}) },
      y: plot.yLogBase
        ? { distr: 3, log: plot.yLogBase }
        : { range: (_, _low, high) => [0, high > 0 ? high * 1.05 : 1] },
    },
    axes: [
      {
        ...axis(plot.x.logBase, plot.x.show),
        space: 70,
        size: 28,
        label: plot.x.label,
        labelSize: 16,
        labelGap: 2,
        labelFont: "12px system-ui",
        ...(plot.x.isDiscrete ? { splits: () => plot.x.values } : {}),
      },
      {
        ...axis(plot.yLogBase, plot.lines[0]!.show),
        size: (_, marks) => 14 + CHAR_PX * Math.max(4, ...(marks ?? []).map((mark) => mark.length)),
      },
    ],
    series: [{}, ...plot.lines.map(seriesOf)],
    bands: plot.bands?.map(({ edges, style }) => ({
      series: [edges[1] + 1, edges[0] + 1],
      fill: () => colour(style),
    })),
    hooks: {
      drawClear: [(chart) => drawParts(chart, plot)],
      draw: [(chart) => drawNotes(chart, plot)],
      setCursor: [(chart) => show(chart.cursor.idx ?? null)],
    },
  };
}

/** Returns true if a mark has a grid line. A logarithmic axis has too many marks between its powers. */
const isRound = (mark: number, logBase: number | undefined) =>
  logBase === undefined || Number.isInteger(Math.round((Math.log(mark) / Math.log(logBase)) * 1e6) / 1e6);

function seriesOf({ style }: Line, nth: number): uPlot.Series {
  if (style === "edge") return { stroke: "transparent", points: { show: false } };
  const stroke = () => colour(ink(nth));
  if (style === "points") return { stroke, paths: () => null, points: { show: true, size: 6, fill: stroke } };
  return { stroke, width: 1.75, dash: dash(nth), spanGaps: false, points: { size: 4, fill: stroke } };
}

/** Sets the font, and the alignment that uPlot leaves in the context. */
function setFont(ctx: CanvasRenderingContext2D, px: number): void {
  ctx.font = `${px * devicePixelRatio}px system-ui`;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
}

/** Shades every second part and writes its name above. */
function drawParts({ ctx, bbox, valToPos }: uPlot, plot: Plot): void {
  plot.parts?.forEach(({ name, from, to }, nth) => {
    const left = Math.max(valToPos(from, "x", true), bbox.left);
    const width = Math.min(valToPos(to, "x", true), bbox.left + bbox.width) - left;
    if (width <= 0) return;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, 0, width, bbox.top + bbox.height);
    ctx.clip();
    ctx.fillStyle = colour(nth % 2 === 0 ? "--part" : "--paper");
    ctx.fillRect(left, bbox.top, width, bbox.height);
    ctx.fillStyle = colour("--soft");
    setFont(ctx, 12);
    ctx.fillText(name, left + 4 * devicePixelRatio, bbox.top - 7 * devicePixelRatio);
    ctx.restore();
  });
}

function drawNotes(chart: uPlot, plot: Plot): void {
  const { ctx, bbox } = chart;
  plot.notes?.forEach(({ line, x, text }, nth) => {
    const left = chart.valToPos(x, "x", true);
    if (!(left >= bbox.left && left <= bbox.left + bbox.width)) return;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour(ink(line));
    ctx.setLineDash(dash(line).map((length) => length * devicePixelRatio));
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    setFont(ctx, 11);
    ctx.fillText(text, left + 4 * devicePixelRatio, bbox.top + (14 + nth * 15) * devicePixelRatio);
    ctx.restore();
  });
}

/** Makes the list of lines. Each entry shows the value at the cursor, and hides its line when pressed. */
function makeLegend(plot: Plot) {
  const position = h("output", { class: "position" });
  const values: HTMLElement[] = [];
  const legend = {
    element: h("div", { class: "legend" }, position),
    onToggle: (_nth: number, _isShown: boolean) => {},
    show(index: number | null): void {
      position.textContent = index === null ? "" : plot.x.show(plot.x.values[index]!);
      plot.lines.forEach(({ values: all, show }, nth) => {
        const value = index === null ? undefined : all[index];
        values[nth]!.textContent = index === null ? "" : value == null ? MISSING : show(value);
      });
    },
  };
  plot.lines.forEach((line, nth) => {
    const value = h("b", {});
    values.push(value);
    if (line.style === "edge") return;
    const entry = button(
      "",
      () => {
        const isShown = entry.getAttribute("aria-pressed") !== "true";
        entry.setAttribute("aria-pressed", String(isShown));
        legend.onToggle(nth, isShown);
      },
      { "aria-pressed": "true" },
    );
    entry.append(swatch(line, nth), line.label, " ", value);
    legend.element.append(entry);
  });
  return legend;
}

function swatch({ style }: Line, nth: number): SVGElement {
  const mark =
    style === "points"
      ? s("circle", { cx: 12, cy: 6, r: 3 })
      : s("line", { x1: 0, x2: 24, y1: 6, y2: 6, "stroke-dasharray": dash(nth).join(" ") || undefined });
  return s("svg", { class: `swatch ink-${(nth % 6) + 1}`, width: 24, height: 12, "aria-hidden": true }, mark);
}

function moveByKeys(canvas: HTMLElement, chart: uPlot): void {
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const last = chart.data[0].length - 1;
    const index = Math.min(Math.max((chart.cursor.idx ?? (step > 0 ? -1 : last + 1)) + step, 0), last);
    chart.setCursor({ left: chart.valToPos(chart.data[0][index]!, "x"), top: 10 });
  });
}

function valueTable(plot: Plot): HTMLElement {
  const shown = (line: Line) => (index: number) => {
    const value = line.values[index];
    return value == null ? MISSING : line.show(value);
  };
  const columns = plot.lines.map((line) => number<number>(line.label, shown(line)));
  return table(
    plot.title,
    plot.x.values.map((_, index) => index),
    [number<number>(plot.x.label, (index) => plot.x.show(plot.x.values[index]!)), ...columns],
  );
}
