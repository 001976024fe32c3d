/**
 * The ratio of two groups of runs and its 95 % interval, as in crates/core/src/stats.rs: the same generator and
 * seed, so that the page and `pagetax compare` show the same interval.
 */
import { median } from "./format";
import type { Ratio } from "./types";

const SEED = 2004n;
const RESAMPLES = 1000;
/** With fewer pairs the bootstrap alone is too narrow, because it knows only the runs that it has. */
const FEW_PAIRS = 10;
/** Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom. */
const STUDENT_T_95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306];

/** Returns median ÷ median with its interval; null for fewer than two runs on a side, or if a median is 0. */
export function ratioOfGroups(over: number[], under: number[]): Ratio | null {
  const value = ratioOfMedians(over, under);
  if (value === null || over.length < 2 || under.length < 2) return null;
  let [low, high] = bootstrap(over, under);
  if (Math.min(over.length, under.length) < FEW_PAIRS) {
    const [lowest, highest] = student(over, under);
    [low, high] = [Math.min(low, lowest), Math.max(high, highest)];
  }
  return { value, low: Math.min(low, value), high: Math.max(high, value) };
}

function ratioOfMedians(over: number[], under: number[]): number | null {
  const [a, b] = [median(over), median(under)];
  return a && b ? a / b : null;
}

function bootstrap(over: number[], under: number[]): [number, number] {
  const ratios = resamples(over.length, under.length).flatMap(([first, second]) => {
    return (
      ratioOfMedians(
        first.map((index) => over[index]!),
        second.map((index) => under[index]!),
      ) ?? []
    );
  });
  ratios.sort((a, b) => a - b);
  const cut = Math.floor(ratios.length / 40);
  return [ratios[cut]!, ratios[ratios.length - 1 - cut]!];
}

const known = new Map<string, [number[], number[]][]>();

/** Draws indices below both lengths. They depend on the lengths alone, so that all rows share them. */
function resamples(first: number, second: number): [number[], number[]][] {
  const key = `${first} ${second}`;
  const drawn = known.get(key) ?? Array.from({ length: RESAMPLES }, splitMix(first, second));
  known.set(key, drawn);
  return drawn;
}

function splitMix(first: number, second: number): () => [number[], number[]] {
  const wrap = (value: bigint) => BigInt.asUintN(64, value);
  let state = SEED;
  const below = (bound: number) => {
    state = wrap(state + 0x9e3779b97f4a7c15n);
    let mixed = wrap((state ^ (state >> 30n)) * 0xbf58476d1ce4e5b9n);
    mixed = wrap((mixed ^ (mixed >> 27n)) * 0x94d049bb133111ebn);
    return Number(((mixed ^ (mixed >> 31n)) * BigInt(bound)) >> 64n);
  };
  const draw = (length: number) => Array.from({ length }, () => below(length));
  return () => [draw(first), draw(second)];
}

/** Returns Welch's interval of the logarithms. */
function student(over: number[], under: number[]): [number, number] {
  const freedom = Math.min(over.length, under.length) - 1;
  const t = STUDENT_T_95[freedom - 1]!;
  const [a, b] = [meanAndVariance(over), meanAndVariance(under)];
  const reach = t * Math.sqrt(a.variance / over.length + b.variance / under.length);
  return [Math.exp(a.mean - b.mean - reach), Math.exp(a.mean - b.mean + reach)];
}

function meanAndVariance(values: number[]): { mean: number; variance: number } {
  const logarithms = values.map(Math.log);
  const mean = logarithms.reduce((sum, value) => sum + value, 0) / values.length;
  const squares = logarithms.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { mean, variance: squares / (values.length - 1) };
}
