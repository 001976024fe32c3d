/**
 * Numbers as the terminal prints them: crates/core/src/units.rs, crates/core/src/stats.rs and
 * crates/cli/src/output/text.rs.
 */
import type { Ratio, Unit } from "./types";

/** Stands for a missing number. Never 0. */
export const MISSING = "–";

/** Formats with so many decimals. Ties go to the even digit, as in Rust; `toFixed` rounds them up. */
export function fixed(value: number, decimals: number): string {
  const scaled = Math.abs(value) * 10 ** decimals;
  const floor = Math.floor(scaled);
  const isNearTie = Math.abs(scaled - floor - 0.5) < 1e-9;
  if (isNearTie && floor % 2 === 0 && /^50*$/.test(value.toFixed(decimals + 60).slice(-60))) {
    return (Math.sign(value) * (floor / 10 ** decimals)).toFixed(decimals);
  }
  return value.toFixed(decimals);
}

/** Formats digits in groups of three: `65 536`. */
export function count(value: number | bigint): string {
  return String(value).replace(/\B(?=(\d{3})+$)/g, " ");
}

/** Formats a time to three digits: `1.44 µs`, `350 ms`. */
export function nanos(ns: number): string {
  const size = Math.abs(Math.trunc(ns));
  const sign = ns <= -1 ? "-" : "";
  if (size < 1e3) return `${sign}${size} ns`;
  const [divisor, unit] = size < 1e6 ? [1e3, "µs"] : size < 1e9 ? [1e6, "ms"] : [1e9, "s"];
  const value = size / divisor;
  return `${sign}${fixed(value, value < 10 ? 2 : value < 100 ? 1 : 0)} ${unit}`;
}

/** Formats a size in the largest unit that needs at most one decimal: `4K`, `1.5G`. */
export function bytes(size: number): string {
  for (const [power, unit] of [
    [40, "T"],
    [30, "G"],
    [20, "M"],
    [10, "K"],
  ] as const) {
    const value = size / 2 ** power;
    if (value >= 1) return Number.isInteger(value) ? `${value}${unit}` : `${fixed(value, 1)}${unit}`;
  }
  return `${size}B`;
}

/** Formats a number in its unit, or the sign for a missing one. */
export function quantity(unit: Unit, value: number | null | undefined): string {
  if (value == null) return MISSING;
  if (unit === "count") return count(value);
  // A large integer may be a BigInt.
  return unit === "ns" ? nanos(Number(value)) : bytes(Number(value));
}

/** Returns the unit that a name ends in: `page_in_latency_ns_min` is a time. */
export function unitOf(name: string): Unit {
  if (/_ns(_|$)/.test(name)) return "ns";
  return /(^|_)bytes(_|$)/.test(name) ? "bytes" : "count";
}

/** Formats `low – high`, if they differ. */
export function range(unit: Unit, low: number | null | undefined, high: number | null | undefined): string {
  if (low == null || high == null || low === high) return "";
  return `${quantity(unit, low)} – ${quantity(unit, high)}`;
}

/** Formats a share as whole percent: `38 %`. */
export function percent(share: number): string {
  return `${fixed(share * 100, 0)} %`;
}

/** Formats a part of a total with one decimal: `27.6 %`. */
export function shareOf(part: number, total: number): string {
  return total === 0 ? MISSING : `${fixed(Math.round((part / total) * 1000) / 10 + 0, 1)} %`;
}

/** Formats a ratio and its interval with the decimals that the interval supports: `1.45 (1.05–1.74)`. */
export function ratio(ratio: Ratio | null | undefined): string {
  if (!ratio) return MISSING;
  const decimals = ratioDecimals(ratio);
  const [value, low, high] = [ratio.value, ratio.low, ratio.high].map((number) => fixed(number, decimals));
  return `${value} (${low}–${high})`;
}

/** Returns so many decimals that a bound that is not 1 never reads as 1. */
function ratioDecimals({ low, high }: Ratio): number {
  const supported = Math.min(Math.max(Math.ceil(-Math.log10((high - low) / 2)), 1), 3);
  const readsAsOne = (decimals: number, bound: number) =>
    bound !== 1 && Math.round(bound * 10 ** decimals) === 10 ** decimals;
  for (let decimals = supported; decimals < 3; decimals++) {
    if (!readsAsOne(decimals, low) && !readsAsOne(decimals, high)) return decimals;
  }
  return 3;
}

/** Formats a number with four significant digits. */
export function significant(value: number): string {
  const size = Math.abs(value);
  if (size >= 1000 || Number.isInteger(value)) return (value < 0 ? "-" : "") + count(Math.round(size));
  return fixed(value, size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

/** Returns the median, or the mean of the middle two rounded down, as the terminal does. */
export function median(values: readonly number[]): number | undefined {
  const sorted = Float64Array.from(values).sort();
  const middle = sorted.length >> 1;
  if (sorted.length % 2 === 1) return sorted[middle];
  return sorted.length === 0 ? undefined : Math.floor((sorted[middle - 1]! + sorted[middle]!) / 2);
}
