/** The documents of pagetax, as far as views read them: docs/report.md and docs/schema. */

import type { Heatmap } from "./charts/heatmap";

export type Unit = "ns" | "bytes" | "count";
export type Provenance = "measured" | "modeled" | "derived" | "missing";
export type Facts = Record<string, unknown>;

export interface Ratio {
  value: number;
  low: number;
  high: number;
}

export interface Reading {
  provenance: Provenance;
  unit: Unit;
  value?: number;
  low?: number;
  high?: number;
  why?: string;
}

export interface Warning {
  id: string;
  text: string;
  remedy: string;
}

export interface TimeRow {
  id: string;
  ns?: number | null;
  low_ns?: number | null;
  high_ns?: number | null;
  provenance: Provenance;
  how: string;
}

export interface MemoryRow {
  id: string;
  bytes?: number | null;
  provenance: Provenance;
  how: string;
}

export interface VmTax {
  value?: number | null;
  low?: number | null;
  high?: number | null;
  provenance: Provenance;
  why?: string | null;
}

export interface Budget {
  cpu: TimeRow[];
  cpu_total_ns: number;
  cpu_unexplained_ns: number;
  wall: TimeRow[];
  wall_total_ns: number;
  wall_unexplained_ns: number;
  memory: MemoryRow[];
  vm_tax?: VmTax | null;
}

export type Exit = { code: number } | { signal: number };

export interface Took {
  bytes?: number | null;
  fraction?: number | null;
  why?: string | null;
}

export interface Trial {
  name: string;
  page_bytes?: number | null;
  mechanism: string;
  runs_ns: number[];
  user_ns: number[];
  kernel_ns: number[];
  median_ns: number;
  fault_counts?: number[];
  loads?: LoadFigures[];
  peak_resident_bytes?: number | null;
  untouched_bytes?: number | null;
  speedup: Ratio | null;
  speedup_over_base: Ratio | null;
  took: Took;
  exit?: Exit;
}

/** The trials in one state of memory. */
export interface StateTrials {
  state: string;
  how?: string;
  why_not?: string | null;
  free_blocks?: number[];
  trials: Trial[];
  loser?: string | null;
  growth?: { id: string; before_ns: number; after_ns: number }[];
}

export type LoadFigure = "throughput" | "p50" | "p99" | "p999" | "less" | "more";

export interface LoadFigures {
  throughput_per_s?: number;
  p50_ns?: number;
  p99_ns?: number;
  p999_ns?: number;
}

export interface Diagnosis {
  command: string[];
  exit: Exit;
  basis?: "elapsed" | "cpu" | { load: LoadFigure };
  trials: Trial[];
  states?: StateTrials[];
  skipped: { name: string; page_bytes: number; why: string; remedy: string }[];
  verdict: {
    winner: string | null;
    reason: string;
    apply: string | null;
    systemd?: string[];
    dockerfile?: string[];
  };
  budget?: Budget | null;
  environment: Facts;
  warnings: Warning[];
}

export interface Phase {
  name: string;
  start_ns: number;
  end_ns: number;
  counters: Record<string, Reading>;
}

export interface Latency {
  count: number;
  of_count?: number | null;
  min_ns: number;
  mean_ns: number;
  p50_ns: number;
  p90_ns: number;
  p99_ns: number;
  max_ns: number;
  provenance: Provenance;
  buckets?: { up_to_ns: number; count: number }[];
}

export interface Run {
  job: {
    name: string;
    params: Record<string, string>;
    seed: number;
    machine_params?: Record<string, string>;
  };
  machine: { name: string; kind: "host" | "sim" | "null"; validated: boolean };
  wall_ns: number;
  counters: Record<string, Reading>;
  phases: Phase[];
  series: { interval_ns: number; columns: Record<string, (number | null)[]> };
  latency: Record<string, Latency>;
  budget?: Budget | null;
  tables?: { title: string; columns: string[]; rows: string[][]; provenance: Provenance }[];
  environment: Facts;
  warnings: Warning[];
}

export interface Runs {
  swept: string[];
  runs: Run[];
}

export interface ComparisonRow {
  id: string;
  unit: Unit;
  medians: [number, number];
  provenance: [Provenance, Provenance];
  run_counts: [number, number];
  ratio: Ratio | null;
}

export interface Comparison {
  incomparable: string[];
  settings: string[];
  rows: ComparisonRow[];
  names: [string, string];
  parameters: string[];
  verdict: string | null;
}

export interface Comparisons {
  comparisons: Comparison[];
}

export interface BillReading {
  unit: Unit;
  provenance: Provenance;
  value: number | null;
  low: number | null;
  high: number | null;
  why?: string;
}

export interface BillFinding {
  outcome: "failed" | "not_judged" | "better";
  reading: string;
  text: string;
  cause?: string;
}

export interface CommandBill {
  name: string;
  command: string[];
  exit: Exit;
  cpu: string;
  readings: Record<string, BillReading>;
  findings: BillFinding[];
}

export interface Bill {
  commands: CommandBill[];
  environment: Facts;
}

/** The second-level TLB of a CPU for pages of one size. */
export interface KnownTlb {
  cpu: string;
  page_bytes: number;
  entries: number;
  tlb_miss_count: number;
  source: string;
}

export interface MissCurves {
  of: string;
  provenance: Provenance;
  side: "code" | "data";
  access_count: number;
  thread_count: number;
  interval_access_count: number;
  heatmap?: Heatmap;
  known_tlbs?: KnownTlb[];
  curves: {
    page_bytes: number;
    is_exact: boolean;
    page_count: number;
    misses: { entries: number; tlb_miss_count: number }[];
    reach: { percent: number; entries: number | null };
    working_set_page_counts: number[];
  }[];
}

export interface ReproductionRow {
  key: Record<string, number>;
  figure: string;
  published: number;
  simulated: { median: number; low: number; high: number } | null;
  value_count: number;
  least_of: number;
  ratio: number | null;
  tolerance: [number, number] | null;
  verdict: string;
  status: string;
  why: string;
}

export interface Reproduction {
  seeds: number;
  asserts: boolean;
  ok: boolean;
  tables: { name: string; title: string; source: string; notes: string[]; rows: ReproductionRow[] }[];
}

export interface ProfileLine {
  name: string;
  misses: number;
  share: number;
  time_share: number;
  lines?: { file: string; line: number; misses: number }[];
}

export interface Trapstat {
  backend: string;
  why: string;
  listings: {
    title: string;
    provenance: Provenance;
    rows: (Record<"itlb" | "itsb" | "dtlb" | "dtsb", TrapCell> & {
      cpu: number;
      mode: string;
      page_bytes: number | null;
    })[];
    notes: string[];
  }[];
  profiles: { title: string; functions: ProfileLine[]; memory: ProfileLine[] }[];
  notes: string[];
}

export interface TrapCell {
  per_s: number | null;
  percent: number | null;
}

export interface Bounded {
  value: number;
  low: number;
  high: number;
}

export interface WalkReasons {
  chased_walk_count: number;
  other_walk_count: number;
  translation_ns: Bounded;
  base_fault_count: number;
  large_fault_count: number;
}

export interface WhatIf {
  of: string;
  access_count: number;
  base: { time_ns: number | null; why: WalkReasons; measured_fault_count: number | null };
  sizes: {
    page_bytes: number;
    why: WalkReasons;
    saved_ns: Bounded;
    saved_parts_ns: Record<string, Bounded>;
    took: Took | null;
    time_ns: Bounded | null;
    speedup: Bounded | null;
    measured_speedup: Ratio | null;
    error_percent: number | null;
  }[];
  walk_paces: { pattern: string; value: number }[];
  notes: string[];
}

export interface Spread {
  median_ns: number;
  low_ns: number;
  high_ns: number;
}

export interface Calibration {
  identity: Facts;
  quick: boolean;
  took_ns: number;
  huge_page_bytes: number;
  faults: { kind: string; page_bytes: number; cost?: Spread; why?: string }[];
  walks: { pattern: string; working_set_bytes: number; base: Spread; huge: Spread; extra: Spread }[];
  notes?: string[];
  warnings?: string[];
}

export interface Examination {
  findings: {
    id: string;
    what: string;
    standing: "works" | "limited" | "not_here";
    detail: string;
    enable?: string;
  }[];
  free_memory?: {
    base_page_bytes: number;
    free_block_counts: number[];
    free_bytes: number;
    free_in_huge_blocks_bytes: number;
    compaction?: Record<string, number> | null;
  } | null;
  environment: Facts;
}

export interface HugePageCauses {
  processes: {
    pid: number;
    command: string;
    summary: string;
    anon_bytes: number;
    huge_bytes: number;
    causes: {
      id: string;
      what: string;
      certainty: string;
      bytes: number;
      evidence: { source: string; value: string }[];
      hint: string;
    }[];
    unexplained_bytes: number;
    untouched: Reading;
    missing: { what: string; why: string }[];
  }[];
}

export interface Mapping {
  /** The kernel's addresses do not fit a double. */
  start: number | bigint;
  end: number | bigint;
  read: boolean;
  write: boolean;
  execute: boolean;
  shared: boolean;
  name: string;
  segment: string;
  swapped_bytes: number;
  runs: { start: number; end: number; page: number | null; resident_bytes: number }[];
}

export interface PageMaps {
  maps: {
    pid: number;
    command: string;
    base_page: number;
    folios_missing: string | null;
    unsettled: boolean;
    mappings: Mapping[];
  }[];
}

export interface PageSizeChange {
  asked: Record<string, string>;
  processes: {
    pid: number;
    operand: string;
    error?: string;
    verdict?: {
      command: string;
      parts: {
        part: string;
        asked: string;
        resident_bytes: number;
        resident_bytes_by_page: Record<string, number>;
        as_asked_bytes: number;
        why: { bytes: number; reason: string }[];
      }[];
    };
    changed_bytes?: number;
    stop_count?: number;
    stop_ns_max?: number;
  }[];
  files: Facts[];
}
