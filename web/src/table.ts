import { h, type Child } from "./dom";
import { count } from "./format";

/** A column of a table: its heading and its cell in each row. */
export interface Column<R> {
  head: Child;
  cell: (row: R, index: number) => Child;
  /** Aligns right, for numbers. */
  numeric?: boolean;
  /** Names a style, such as that of plots. */
  style?: "plot" | "text" | "code";
}

/** More rows would take seconds to draw. */
const ROWS_MAX = 20_000;

/** Makes a table. The first cell of each row is its heading. */
export function table<R>(
  caption: string,
  rows: readonly R[],
  columns: Column<NoInfer<R>>[],
  rowClass?: (row: NoInfer<R>) => string | undefined,
): HTMLElement {
  if (rows.length > ROWS_MAX) {
    caption += ` (the first ${count(ROWS_MAX)} of ${count(rows.length)} rows; the JSON has all)`;
    rows = rows.slice(0, ROWS_MAX);
  }
  const style = (column: Column<R>) =>
    [column.numeric && "number", column.style].filter(Boolean).join(" ") || undefined;
  const head = columns.map((column) =>
    column.head
      ? h("th", { scope: "col", class: style(column) }, column.head)
      : h("td", { class: style(column) }),
  );
  const line = (row: R, index: number) =>
    h(
      "tr",
      { class: rowClass?.(row) },
      ...columns.map((column, nth) =>
        nth === 0
          ? h("th", { scope: "row", class: style(column) }, column.cell(row, index))
          : h("td", { class: style(column) }, column.cell(row, index)),
      ),
    );
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, ...head)),
      h("tbody", {}, ...rows.map(line)),
    ),
  );
}

/** Makes a column of text. */
export function text<R>(head: string, cell: (row: R) => Child, style?: "text" | "code"): Column<R> {
  return { head, cell, style };
}

/** Makes a column of numbers. */
export function number<R>(head: string, cell: (row: R) => string): Column<R> {
  return { head, cell, numeric: true };
}

/** Makes a column of plots under an axis. */
export function plotColumn<R>(head: HTMLElement, cell: (row: R) => Child): Column<R> {
  return { head, cell, style: "plot" };
}
