/** Areas in the shares of a whole, the largest first (Bruls et al. 2000, Squarified Treemaps). */
import { s } from "../dom";

export interface Area {
  name: string;
  share: number;
  /** The values, for the pointer. */
  tip: string;
}

const WIDTH = 1000;
const HEIGHT = 200;
/** Smaller areas have no room for their name. */
const NAMED_MIN = { width: 90, height: 24 };
const CHARS_PER_PX = 1 / 7.5;

interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** Makes the map. What the areas leave of the whole stays empty. */
export function treemap(areas: Area[]): SVGElement {
  const sorted = [...areas].filter(({ share }) => share > 0).sort((a, b) => b.share - a.share);
  const placed = place(sorted, { x: 0, y: 0, width: WIDTH, height: HEIGHT });
  return s(
    "svg",
    { class: "treemap", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": true },
    s("rect", { class: "rest", width: WIDTH, height: HEIGHT }),
    ...placed.map(({ area, box }, nth) => areaMark(area, box, nth)),
  );
}

function areaMark({ name, tip }: Area, { x, y, width, height }: Box, nth: number): SVGElement {
  const chars = Math.floor((width - 12) * CHARS_PER_PX);
  const isNamed = width > NAMED_MIN.width && height > NAMED_MIN.height;
  const label = name.length > chars ? `${name.slice(0, chars - 1)}…` : name;
  return s(
    "g",
    { "data-tip": tip },
    s("rect", { class: nth % 2 === 0 ? "area" : "area other", x, y, width, height }),
    isNamed && s("text", { x: x + 6, y: y + 17 }, label),
  );
}

/** Fills the box row by row along its shorter side, each row as long as its areas become squarer. */
function place(areas: Area[], box: Box): { area: Area; box: Box }[] {
  const placed: { area: Area; box: Box }[] = [];
  const scale = WIDTH * HEIGHT;
  let rest = areas;
  while (rest.length > 0 && Math.min(box.width, box.height) > 0) {
    const side = Math.min(box.width, box.height);
    let length = 1;
    while (
      length < rest.length &&
      worst(rest.slice(0, length + 1), side, scale) <= worst(rest.slice(0, length), side, scale)
    )
      length++;
    const row = rest.slice(0, length);
    const depth = sizeOf(row, scale) / side;
    let along = 0;
    for (const area of row) {
      const extent = (area.share * scale) / depth;
      placed.push({
        area,
        box:
          box.width >= box.height
            ? { x: box.x, y: box.y + along, width: depth, height: extent }
            : { x: box.x + along, y: box.y, width: extent, height: depth },
      });
      along += extent;
    }
    box =
      box.width >= box.height
        ? { ...box, x: box.x + depth, width: box.width - depth }
        : { ...box, y: box.y + depth, height: box.height - depth };
    rest = rest.slice(length);
  }
  return placed;
}

const sizeOf = (row: Area[], scale: number) => row.reduce((sum, { share }) => sum + share * scale, 0);

/** Returns the worst ratio of the sides of a row. */
function worst(row: Area[], side: number, scale: number): number {
  const size = sizeOf(row, scale);
  const [most, least] = [row[0]!.share * scale, row.at(-1)!.share * scale];
  return Math.max((side ** 2 * most) / size ** 2, size ** 2 / (side ** 2 * least));
}
