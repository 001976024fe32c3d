/** The causes of time and the counters, as in crates/core/src/cause.rs and counter.rs. */

/** The rows of each ledger, in the order of printing. */
export const CAUSES = {
  cpu: [
    "compute",
    "translation",
    "minor_fault",
    "zero_copy",
    "reclaim",
    "compaction",
    "swap",
    "other_kernel",
  ],
  wall: ["running", "run_queue", "page_in", "swap_in", "throttle", "sleep"],
};

const NO_TAX = new Set(["compute", "other_kernel", "running", "run_queue", "sleep"]);

/** Returns true for time that virtual memory costs. */
export const isTax = (cause: string) => !NO_TAX.has(cause);

/** What each counter counts. */
export const COUNTERS: Record<string, string> = {
  access_count: "memory accesses of the job",
  block_read_bytes: "bytes read from block devices",
  compaction_stall_count: "direct compactions, whole system",
  context_load_count: "hardware contexts loaded or stolen",
  context_switch_count: "voluntary and involuntary switches",
  cow_fault_count: "minor faults that copied a page",
  disk_read_bytes_per_s: "bytes read from disk a second",
  huge_page_bytes_max: "most bytes on huge pages at once",
  kernel_daemon_ns: "CPU time of kswapd and kcompactd, whole system",
  kernel_ns: "CPU time in the kernel",
  locked_bytes_max: "most bytes locked at once",
  major_fault_count: "faults that waited for storage",
  minor_fault_count: "faults served from memory",
  mismatch_count: "words that did not hold what was written",
  page_in_count: "base pages read from storage or servers",
  page_out_count: "base pages written to storage or servers",
  page_table_bytes_max: "most bytes of page tables at once",
  pmeg_allocation_count: "pmegs given to a segment (hatcnt word 4)",
  pmeg_reload_count: "whole pmegs loaded from the software cache",
  pmeg_steal_count: "pmegs taken from a segment (hatcnt word 5)",
  reclaim_scan_count: "base pages scanned by reclaim, whole system",
  reclaim_steal_count: "base pages reclaimed, whole system",
  resident_bytes_max: "most resident bytes at once",
  run_queue_ns: "time spent runnable but not running",
  swap_in_count: "base pages swapped in; processes on SunOS",
  swap_out_count: "base pages swapped out; processes on SunOS",
  tlb_miss_count: "accesses that no TLB level could translate",
  translation_fault_count: "faults for a missing hardware translation",
  translation_ns: "time spent translating addresses",
  user_ns: "CPU time in user mode",
  wall_ns: "elapsed time",
};
