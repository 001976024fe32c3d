//! What each cause of time is, what shows it, and what cures it.

use crate::document::Document;
use serde::{Deserialize, Serialize};

/// The answer of `pagetax explain`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Explanations {
    /// The causes that were asked for.
    pub causes: Vec<Explanation>,
    /// The decision why kswapd works, if it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kswapd: Option<KswapdDecision>,
}

impl Document for Explanations {
    const KIND: &'static str = "explanations";
}

/// The explanation of a cause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Explanation {
    /// The id of the [`crate::cause::Cause`].
    pub id: String,
    /// The meaning, in a sentence.
    pub what: String,
    /// The command or the file that shows it.
    pub shown_by: String,
    /// The cures, the best first.
    pub cured_by: Vec<String>,
    /// The price of the cures.
    pub costs: String,
    /// The case in which they do not help.
    pub useless_if: String,
    /// The source, in public documentation or the kernel.
    pub source: String,
}

/// The decision why kswapd works, from two looks at the kernel's counters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KswapdDecision {
    /// The time between the two looks, in nanoseconds.
    pub elapsed_ns: u64,
    /// The share of one CPU that kswapd took, 0 to 1 for each memory node; absent if it is not visible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_share: Option<f64>,
    /// The answer, in a sentence.
    pub summary: String,
    /// The causes, the most probable first.
    pub causes: Vec<KswapdCause>,
    /// The facts that could not be read; no cause rests on them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
}

/// A cause for which kswapd works.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KswapdCause {
    /// The cause's id, in snake_case.
    pub id: String,
    /// The cause in a few words.
    pub what: String,
    /// True if the counters show it; false if they only allow it.
    pub is_certain: bool,
    /// The counters that show it, with their values.
    pub evidence: String,
    /// The cure.
    pub cure: String,
}

/// One row of the table: id, what, shown by, cures, costs, useless if, source.
type TableRow = (
    &'static str,
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static str,
    &'static str,
    &'static str,
);

const TABLE: &[TableRow] = &[
    (
        "translation",
        "The CPU walks page tables, as the TLB has no entry for a page.",
        "pagetax trapstat -T -- COMMAND; pagetax diagnose -- COMMAND",
        &["huge pages for the memory that is touched at random: pagetax ppgsz -o heap=2M COMMAND"],
        "memory that is not touched is backed, too, and a first touch zeroes 2 MiB",
        "the program walks memory in order, or all of it fits the TLB",
        "Intel SDM 3A 4.10; Linux, admin-guide/mm/transhuge",
    ),
    (
        "minor_fault",
        "The kernel maps a page at its first touch. Each touch of a new page costs an exception.",
        "pagetax stat 1; pagetax diagnose -- COMMAND (page faults)",
        &[
            "huge pages: one fault for 512 pages",
            "keep memory: GLIBC_TUNABLES=glibc.malloc.trim_threshold, a pool of the program's own",
            "MADV_POPULATE_WRITE before the work that must not wait",
        ],
        "kept memory is not free for others",
        "each page is touched once in the program's life",
        "madvise(2); Linux, admin-guide/mm/concepts",
    ),
    (
        "zero_copy",
        "The kernel zeroes new pages, and copies those that a fork shares.",
        "pagetax stat 1; pagetax diagnose -- COMMAND",
        &[
            "reuse memory in place of new one",
            "vfork or posix_spawn in place of fork",
            "smaller huge pages after a fork",
        ],
        "less memory goes back to the system",
        "the program needs the memory zeroed anyway",
        "fork(2); Linux, mm/memory.c, do_wp_page",
    ),
    (
        "reclaim",
        "A task that needs memory frees pages itself, as there is none free, or its cgroup is full.",
        "pagetax stat 1 (direct_scan_count); /proc/pressure/memory",
        &[
            "more memory, or a higher limit of the cgroup",
            "memory.high below memory.max, so that it begins early",
            "sysctl vm.watermark_scale_factor=100: kswapd begins earlier",
        ],
        "memory that others could have",
        "the working set is larger than the memory: then it must go elsewhere (pagetax remote)",
        "Linux, admin-guide/sysctl/vm; admin-guide/cgroup-v2",
    ),
    (
        "compaction",
        "A task moves pages to make a free block for a huge page.",
        "pagetax stat 1 (free 2M blocks); /proc/vmstat compact_stall",
        &[
            "echo defer+madvise > /sys/kernel/mm/transparent_hugepage/defrag",
            "sysctl vm.compaction_proactiveness=50",
            "a pool of huge pages at boot: hugepages=N",
        ],
        "huge pages come later; a pool is lost to all else",
        "memory is full of pages that do not move (pinned, kernel)",
        "Linux, admin-guide/mm/transhuge; admin-guide/sysctl/vm",
    ),
    (
        "swap",
        "Pages are compressed, written and read, as there is too little memory.",
        "pagetax stat 1; /proc/vmstat pswpin, pswpout",
        &["more memory", "zram or zswap before a disk", "pagetax remote -- COMMAND"],
        "compression takes CPU time",
        "pages that are read again at once: then the working set does not fit",
        "Linux, admin-guide/blockdev/zram; admin-guide/mm/zswap",
    ),
    (
        "page_table",
        "Page tables are made, copied by fork and torn down at exit and munmap, with the pages they map.",
        "pagetax stat 1; pagetax hatstat (page tables of shared memory)",
        &[
            "huge pages: no tables of base pages",
            "vfork or posix_spawn in place of fork",
            "threads in place of processes over shared memory",
        ],
        "a crash of one thread ends all",
        "little memory is mapped",
        "fork(2); Linux, mm/memory.c, copy_page_range",
    ),
    (
        "shootdown",
        "A CPU interrupts others to take translations out of their TLBs.",
        "pagetax stat 1; /proc/interrupts, line TLB",
        &[
            "fewer munmap, mprotect and MADV_DONTNEED in processes with many threads",
            "a higher trim threshold or decay time of the allocator",
            "sysctl kernel.numa_balancing=0 where memory is bound by hand",
        ],
        "memory stays with the process",
        "the process has one thread",
        "Linux, arch/x86/mm/tlb.c",
    ),
    (
        "background_reclaim",
        "kswapd frees pages so that tasks find some.",
        "pagetax explain kswapd; pagetax stat 1",
        &["see pagetax explain kswapd, which looks at this machine"],
        "as the cause",
        "it takes a few percent of a CPU: that is its work",
        "Linux, mm/vmscan.c, balance_pgdat",
    ),
    (
        "background_compaction",
        "kcompactd moves pages to make free blocks before a task needs them.",
        "pagetax stat 1; /proc/vmstat compact_daemon_wake",
        &[
            "sysctl vm.compaction_proactiveness=0",
            "fewer requests for huge pages: madvise in place of always",
        ],
        "tasks compact by themselves when they need a block",
        "it takes a few percent of a CPU",
        "Linux, admin-guide/sysctl/vm",
    ),
    (
        "khugepaged",
        "khugepaged collapses base pages to huge ones, which copies them.",
        "pagetax stat 1 (collapse_count); /sys/kernel/mm/transparent_hugepage/khugepaged/",
        &[
            "raise khugepaged/scan_sleep_millisecs",
            "let faults take huge pages at once: ppgsz -o heap=2M",
        ],
        "memory gets its huge pages later",
        "it has nothing to collapse",
        "Linux, admin-guide/mm/transhuge",
    ),
    (
        "page_in",
        "A task waits for a page of a file, or of a memory server.",
        "pagetax stat 1; pagetax diagnose -- COMMAND (major faults)",
        &[
            "memory for the page cache",
            "readahead: MADV_WILLNEED, blockdev --setra",
            "a faster disk",
        ],
        "memory",
        "each page is read once",
        "madvise(2); readahead(2)",
    ),
    (
        "swap_in",
        "A task waits for a page from swap.",
        "pagetax stat 1; /proc/pressure/memory",
        &["more memory", "zram in place of a disk", "lock what must not wait: mlock, memory.min"],
        "locked memory is not there for others",
        "the working set does not fit",
        "Linux, admin-guide/cgroup-v2",
    ),
    (
        "throttle",
        "A task is held back in reclaim, until pages are written or freed.",
        "pagetax stat 1; /proc/pressure/memory; /proc/vmstat nr_dirty",
        &[
            "sysctl vm.dirty_background_ratio=2: writes begin earlier",
            "a limit that leaves room for dirty pages",
        ],
        "more and smaller writes",
        "the disk is the limit: then write less",
        "Linux, admin-guide/sysctl/vm; mm/vmscan.c, reclaim_throttle",
    ),
];

impl From<&TableRow> for Explanation {
    fn from(row: &TableRow) -> Explanation {
        let (id, what, shown_by, cures, costs, useless_if, source) = row;
        Explanation {
            id: id.to_string(),
            what: what.to_string(),
            shown_by: shown_by.to_string(),
            cured_by: cures.iter().map(ToString::to_string).collect(),
            costs: costs.to_string(),
            useless_if: useless_if.to_string(),
            source: source.to_string(),
        }
    }
}

/// Returns the explanations of all causes that are a tax, in the order of the table of causes.
pub fn all() -> impl Iterator<Item = Explanation> {
    TABLE.iter().map(Explanation::from)
}

/// Returns the explanation of a cause.
pub fn find(id: &str) -> Option<Explanation> {
    all().find(|explanation| explanation.id == id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cause::{CAUSES, Scope};

    #[test]
    fn each_cause_that_is_a_tax_is_explained_and_no_other() {
        let taxes = CAUSES.iter().filter(|cause| cause.is_tax && cause.scope != Scope::Network);
        let ids: Vec<_> = all().map(|explanation| explanation.id).collect();
        assert_eq!(ids, taxes.map(|cause| cause.id).collect::<Vec<_>>());
        for explanation in all() {
            assert!(!explanation.cured_by.is_empty() && explanation.what.ends_with('.'));
        }
        assert!(find("minor_fault").is_some() && find("compute").is_none());
    }
}
