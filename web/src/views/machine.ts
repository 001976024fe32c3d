/** The machine: what works on it (doctor), and what faults and page walks cost (calibrate). */
import { axis, bar, decades, dot, linear, logarithmic, strip, whisker } from "../charts/strip";
import { copyBlock } from "../copy";
import { section } from "../dom";
import { bytes, count, fixed, nanos, MISSING, percent } from "../format";
import { number, plotColumn, table, text } from "../table";
import type { Calibration, Examination, Spread } from "../types";
import { article, environmentSection, machineLine, notes, title } from "./parts";

const STANDINGS = { works: "works", limited: "limited", not_here: "not here" };

export function doctorView({ findings, free_memory, environment }: Examination): HTMLElement {
  const groups = Object.entries(STANDINGS).map(([id, name]) => {
    const of = findings.filter(({ standing }) => standing === id);
    return (
      of.length > 0 &&
      section(
        `${name} (${of.length})`,
        table(`Features: ${name}`, of, [
          text("feature", ({ what }) => what, "text"),
          text("detail", ({ detail }) => detail, "text"),
        ]),
        ...of.map(({ what, enable }) => enable !== undefined && copyBlock(`Enable ${what}`, enable)),
      )
    );
  });
  return article(
    title("doctor", "What this machine offers", machineLine(environment)),
    ...groups,
    free_memory && freeMemorySection(free_memory),
    environmentSection(environment),
  );
}

function freeMemorySection(free: NonNullable<Examination["free_memory"]>): HTMLElement | null {
  const rows = free.free_block_counts.map((blocks, order) => ({
    block: free.base_page_bytes * 2 ** order,
    blocks,
  }));
  const scale = linear(0, Math.max(1, ...rows.map(({ block, blocks }) => block * blocks)));
  const { compaction } = free;
  return section(
    "Free memory by size of block",
    table("Free blocks", rows, [
      number("block", ({ block }) => bytes(block)),
      number("free", ({ blocks }) => count(blocks)),
      number("in all", ({ block, blocks }) => bytes(block * blocks)),
      plotColumn(axis("in all", [{ at: 0, text: "0" }]), ({ block, blocks }) =>
        strip(`${bytes(block)}: ${bytes(block * blocks)}`, bar(0, scale(block * blocks), "measured")),
      ),
    ]),
    notes([
      `${bytes(free.free_in_huge_blocks_bytes)} of ${bytes(free.free_bytes)} free (${percent(free.free_in_huge_blocks_bytes / Math.max(free.free_bytes, 1))}) can be had as huge pages without compaction`,
      ...(compaction
        ? [
            `compaction was waited for ${count(compaction["stall_count"] ?? 0)} times and helped ${count(compaction["success_count"] ?? 0)} times; ${count(compaction["fallback_count"] ?? 0)} faults found no huge page`,
          ]
        : []),
    ]),
  );
}

const FAULTS: Record<string, string> = {
  anon_write: "first write, anonymous",
  anon_fill: "first write and filling, anonymous",
  zero_read: "first read, anonymous (zero page)",
  cow_write: "first write after fork (copy)",
  file_cached_read: "first read, file in the page cache",
  file_major_read: "first read, file on disk (elapsed)",
  unmap: "munmap, resident",
};
const WALKS: Record<string, string> = {
  dependent: "each from the last (chase)",
  independent: "known beforehand (gather)",
};

/** Formats a time to 0.1 ns below 100 ns. */
const precise = (ns: number) => (Math.abs(ns) < 100 ? `${fixed(ns, 1)} ns` : nanos(Math.round(ns)));
const spreadText = ({ low_ns, high_ns }: Spread) => `${precise(low_ns)} – ${precise(high_ns)}`;

export function calibrationView(calibration: Calibration): HTMLElement {
  const { identity, quick, took_ns, faults, walks, huge_page_bytes } = calibration;
  const reasons = faults.filter(({ why }) => why);
  const costs = faults.flatMap(({ cost }) => (cost ? [cost.low_ns, cost.high_ns] : []));
  const scale = logarithmic(Math.min(...costs) / 1.1, Math.max(...costs) * 1.1);
  const huge = bytes(huge_page_bytes);
  return article(
    title(
      "calibration",
      "What faults and page walks cost",
      machineLine(identity),
      `measured in ${nanos(took_ns)}${quick ? ", with fewer repetitions and sizes" : ""}`,
    ),
    section(
      "CPU time of a fault, for each page",
      table("Median and the middle half of repetitions", faults, [
        text("what happens", ({ kind }) => FAULTS[kind] ?? kind),
        number("page", ({ page_bytes }) => bytes(page_bytes)),
        number("median", ({ cost }) => (cost ? precise(cost.median_ns) : MISSING)),
        plotColumn(axis("median, on a logarithmic axis", decades(scale)), ({ kind, cost }) =>
          cost
            ? strip(
                `${FAULTS[kind] ?? kind}: ${precise(cost.median_ns)} (${spreadText(cost)})`,
                whisker(scale(cost.low_ns), scale(cost.high_ns)),
                dot(scale(cost.median_ns)),
              )
            : "missing",
        ),
        text("from – to", ({ cost }) => cost && spreadText(cost)),
        number("per 4K", ({ cost, page_bytes }) =>
          cost ? precise((cost.median_ns * 4096) / page_bytes) : MISSING,
        ),
      ]),
      notes(
        reasons.map(({ page_bytes, kind, why }) => `${bytes(page_bytes)} ${FAULTS[kind] ?? kind}: ${why}`),
      ),
    ),
    section(
      `CPU time of an access, base pages against ${huge} pages`,
      table("Median of repetitions", walks, [
        text("addresses", ({ pattern }) => WALKS[pattern] ?? pattern),
        number("working set", ({ working_set_bytes }) => bytes(working_set_bytes)),
        number("base", ({ base }) => precise(base.median_ns)),
        number(huge, (walk) => precise(walk.huge.median_ns)),
        number("base adds", ({ extra }) => precise(extra.median_ns)),
        text("from – to", ({ extra }) => spreadText(extra)),
      ]),
    ),
    notes([
      ...(calibration.notes ?? []).map((note) => `not measured: ${note}`),
      ...(calibration.warnings ?? []).map(
        (warning) => `in doubt: ${warning}; calibrate again when the machine is quiet`,
      ),
    ]),
  );
}
