//! The classification of kernel stacks by the kernel's work, with one table of function names.
//!
//! The innermost frame in the table decides: a fault that reclaims is reclaim, a reclaim that compresses
//! is swap. There is one exception: copying under compaction is compaction.
//!
//! Source: function names of Linux 4.18 to 6.18, /proc/kallsyms.

use crate::procfs::Root;
use std::collections::HashMap;
use std::sync::OnceLock;

/// The kernel's work on a CPU: the kernel rows of the CPU ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    /// Page faults: the row `minor_fault`.
    Fault,
    /// Zeroing and copying of pages: the row `zero_copy`.
    ZeroCopy,
    /// Reclaim of pages: the row `reclaim`.
    Reclaim,
    /// Compaction and collapse: the row `compaction`.
    Compaction,
    /// Compression and swap devices: the row `swap`.
    Swap,
    /// All other kernel work: the row `other_kernel`.
    Other,
}

/// The reason of a task's wait: the blocked rows of the wall ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wait {
    /// Reads of pages from files or memory servers: the row `page_in`.
    PageIn,
    /// Reads of pages from swap: the row `swap_in`.
    SwapIn,
    /// Reclaim, compaction and write-back throttling: the row `throttle`.
    Throttle,
    /// All other waits: the row `sleep`.
    Sleep,
}

impl Work {
    /// All kinds of work, in the order of the ledger.
    pub const ALL: [Work; 6] =
        [Work::Fault, Work::ZeroCopy, Work::Reclaim, Work::Compaction, Work::Swap, Work::Other];

    /// Returns the id of the ledger's row.
    pub fn row(self) -> &'static str {
        match self {
            Work::Fault => "minor_fault",
            Work::ZeroCopy => "zero_copy",
            Work::Reclaim => "reclaim",
            Work::Compaction => "compaction",
            Work::Swap => "swap",
            Work::Other => "other_kernel",
        }
    }
}

/// A finer distinction of work, which only the bill of a whole system makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Detail {
    /// Taking translations out of TLBs, its own CPU's and those of other CPUs.
    Shootdown,
    /// Making, copying and tearing down page tables, with the pages that they map.
    PageTable,
    /// Getting pages, and filling them.
    Allocation,
}

/// The names of functions as in [`TABLE`], each with its detail.
const DETAILS: &[(&str, Detail)] = &[
    ("flush_tlb_*", Detail::Shootdown),
    ("native_flush_tlb_*", Detail::Shootdown),
    ("arch_tlbbatch_flush", Detail::Shootdown),
    ("try_to_unmap_flush*", Detail::Shootdown),
    ("tlb_flush_mmu*", Detail::PageTable),
    ("tlb_finish_mmu", Detail::PageTable),
    ("tlb_batch_pages_flush", Detail::PageTable),
    ("__tlb_batch_free_encoded_pages", Detail::PageTable),
    ("unmap_page_range", Detail::PageTable),
    ("unmap_vmas", Detail::PageTable),
    ("unmap_region", Detail::PageTable),
    ("zap_*", Detail::PageTable),
    ("free_pgtables", Detail::PageTable),
    ("free_pgd_range", Detail::PageTable),
    ("exit_mmap", Detail::PageTable),
    ("copy_page_range", Detail::PageTable),
    ("copy_p4d_range", Detail::PageTable),
    ("copy_pte_range", Detail::PageTable),
    ("dup_mmap", Detail::PageTable),
    ("move_page_tables", Detail::PageTable),
    ("change_protection*", Detail::PageTable),
    ("pgd_alloc", Detail::PageTable),
    ("__alloc_pages*", Detail::Allocation),
    ("__alloc_frozen_pages*", Detail::Allocation),
    ("alloc_pages*", Detail::Allocation),
    ("__folio_alloc*", Detail::Allocation),
    ("folio_alloc*", Detail::Allocation),
    ("vma_alloc_folio*", Detail::Allocation),
    ("filemap_add_folio", Detail::Allocation),
    ("page_cache_ra_*", Detail::Allocation),
    ("clear_page*", Detail::Allocation),
    ("__pi_clear_page", Detail::Allocation),
    ("clear_huge_page", Detail::Allocation),
    ("clear_subpage", Detail::Allocation),
    ("folio_zero_user", Detail::Allocation),
    ("kernel_init_pages", Detail::Allocation),
    ("do_anonymous_page", Detail::Allocation),
    ("do_huge_pmd_anonymous_page", Detail::Allocation),
];

/// The function names, with a trailing `*` as a wildcard, each with its work on a CPU and the wait of a
/// task that sleeps in it. An entry may give only one of the two; then outer frames decide the other.
const TABLE: &[(&str, Option<Work>, Option<Wait>)] = &[
    // Zeroing and copying of pages.
    ("clear_page_erms", ZERO_COPY, None),
    ("clear_page_orig", ZERO_COPY, None),
    ("clear_page_rep", ZERO_COPY, None),
    ("clear_page", ZERO_COPY, None),
    ("__pi_clear_page", ZERO_COPY, None),
    ("clear_huge_page", ZERO_COPY, None),
    ("clear_subpage", ZERO_COPY, None),
    ("folio_zero_user", ZERO_COPY, None),
    ("kernel_init_pages", ZERO_COPY, None),
    ("copy_page", ZERO_COPY, None),
    ("__pi_copy_page", ZERO_COPY, None),
    ("copy_mc_*", ZERO_COPY, None),
    ("copy_user_highpage", ZERO_COPY, None),
    ("copy_user_huge_page", ZERO_COPY, None),
    ("copy_user_large_folio", ZERO_COPY, None),
    ("copy_subpage", ZERO_COPY, None),
    // Compression and swap devices, in both directions.
    ("zram_*", SWAP, None),
    ("zswap_*", SWAP, None),
    ("lzo*", SWAP, None),
    ("lz4_*", SWAP, None),
    ("LZ4_*", SWAP, None),
    ("zs_malloc", SWAP, None),
    ("zs_free", SWAP, None),
    ("swap_write*", SWAP, Some(Wait::Throttle)),
    ("__swap_writepage", SWAP, Some(Wait::Throttle)),
    ("folio_alloc_swap", SWAP, None),
    ("add_to_swap", SWAP, None),
    ("swap_entries_*", SWAP, None),
    ("swap_entry_*", SWAP, None),
    ("__swap_entry_*", SWAP, None),
    ("swap_free*", SWAP, None),
    ("put_swap_*", SWAP, None),
    ("swap_duplicate*", SWAP, None),
    ("__swap_duplicate", SWAP, None),
    ("swap_cache_*", SWAP, None),
    ("__swap_cache_*", SWAP, None),
    ("swapcache_*", SWAP, None),
    ("delete_from_swap_cache", SWAP, None),
    ("__delete_from_swap_cache", SWAP, None),
    // The rest of such a fault is that of any other: a page is charged and mapped.
    ("do_swap_page", None, Some(Wait::SwapIn)),
    ("swapin_readahead", SWAP, Some(Wait::SwapIn)),
    ("swap_cluster_readahead", SWAP, Some(Wait::SwapIn)),
    ("swap_read_folio*", SWAP, Some(Wait::SwapIn)),
    ("swap_readpage", SWAP, Some(Wait::SwapIn)),
    ("shmem_swapin*", SWAP, Some(Wait::SwapIn)),
    // Compaction and collapse.
    ("compact_zone*", Some(Work::Compaction), Some(Wait::Throttle)),
    ("try_to_compact_pages", Some(Work::Compaction), Some(Wait::Throttle)),
    ("__alloc_pages_direct_compact", Some(Work::Compaction), Some(Wait::Throttle)),
    ("migrate_pages*", Some(Work::Compaction), Some(Wait::Throttle)),
    ("isolate_migratepages_*", Some(Work::Compaction), None),
    ("isolate_freepages_*", Some(Work::Compaction), None),
    ("collapse_huge_page", Some(Work::Compaction), None),
    ("collapse_file", Some(Work::Compaction), None),
    ("hpage_collapse_scan_*", Some(Work::Compaction), None),
    ("madvise_collapse", Some(Work::Compaction), None),
    // Reclaim.
    ("shrink_node*", RECLAIM, Some(Wait::Throttle)),
    ("shrink_many", RECLAIM, Some(Wait::Throttle)),
    ("shrink_one", RECLAIM, Some(Wait::Throttle)),
    ("shrink_lruvec", RECLAIM, Some(Wait::Throttle)),
    ("shrink_folio_list", RECLAIM, Some(Wait::Throttle)),
    ("shrink_page_list", RECLAIM, Some(Wait::Throttle)),
    ("shrink_inactive_list", RECLAIM, Some(Wait::Throttle)),
    ("shrink_active_list", RECLAIM, Some(Wait::Throttle)),
    ("shrink_slab*", RECLAIM, Some(Wait::Throttle)),
    ("try_to_free_pages", RECLAIM, Some(Wait::Throttle)),
    ("do_try_to_free_pages", RECLAIM, Some(Wait::Throttle)),
    ("try_to_free_mem_cgroup_pages", RECLAIM, Some(Wait::Throttle)),
    ("reclaim_high*", RECLAIM, Some(Wait::Throttle)),
    ("mem_cgroup_handle_over_high", RECLAIM, Some(Wait::Throttle)),
    ("__mem_cgroup_handle_over_high", RECLAIM, Some(Wait::Throttle)),
    ("reclaim_throttle", RECLAIM, Some(Wait::Throttle)),
    ("reclaim_pages", RECLAIM, None),
    ("evict_folios", RECLAIM, Some(Wait::Throttle)),
    ("balance_dirty_pages*", None, Some(Wait::Throttle)),
    ("mem_cgroup_oom_synchronize", None, Some(Wait::Throttle)),
    // Reads of files are not minor faults, even inside one.
    ("page_cache_ra_*", OTHER, Some(Wait::PageIn)),
    ("page_cache_sync_*", OTHER, Some(Wait::PageIn)),
    ("page_cache_async_*", OTHER, Some(Wait::PageIn)),
    ("force_page_cache_*", OTHER, Some(Wait::PageIn)),
    ("read_pages", OTHER, Some(Wait::PageIn)),
    ("filemap_fault", None, Some(Wait::PageIn)),
    ("filemap_read", None, Some(Wait::PageIn)),
    ("filemap_get_pages", None, Some(Wait::PageIn)),
    ("handle_userfault", None, Some(Wait::PageIn)),
    // Faults, and the same work without an exception: mlock, MADV_POPULATE, pinned pages.
    ("asm_exc_page_fault", FAULT, None),
    ("exc_page_fault", FAULT, None),
    ("do_user_addr_fault", FAULT, None),
    ("do_page_fault", FAULT, None),
    ("do_mem_abort", FAULT, None),
    ("handle_mm_fault", FAULT, None),
    ("hugetlb_fault", FAULT, None),
    ("__get_user_pages", FAULT, None),
    ("populate_vma_page_range", FAULT, None),
    ("faultin_page_range", FAULT, None),
    ("error_entry", FAULT, None),
    ("sync_regs", FAULT, None),
    // All other entries to the kernel. An interrupt is the innermost entry of a stack: one that
    // interrupts a fault is not the fault's work.
    ("do_syscall_64", OTHER, SLEEP),
    ("entry_SYSCALL_*", OTHER, SLEEP),
    ("syscall_return_via_sysret", OTHER, None),
    ("entry_SYSRETQ_*", OTHER, None),
    ("el0_svc*", OTHER, SLEEP),
    ("invoke_syscall*", OTHER, SLEEP),
    ("ret_from_fork*", OTHER, SLEEP),
    ("asm_sysvec_*", OTHER, None),
    ("asm_common_interrupt", OTHER, None),
    ("common_interrupt_return", OTHER, None),
    ("swapgs_restore_regs_and_return_to_usermode", OTHER, None),
    ("asm_exc_*", OTHER, SLEEP),
    ("handle_softirqs", OTHER, None),
    ("__do_softirq", OTHER, None),
    ("schedule", OTHER, None),
    ("task_work_run", OTHER, None),
    ("do_exit", OTHER, None),
    ("exit_mmap", OTHER, None),
    ("x64_sys_call", OTHER, None),
];

const ZERO_COPY: Option<Work> = Some(Work::ZeroCopy);
const SWAP: Option<Work> = Some(Work::Swap);
const RECLAIM: Option<Work> = Some(Work::Reclaim);
const FAULT: Option<Work> = Some(Work::Fault);
const OTHER: Option<Work> = Some(Work::Other);
const SLEEP: Option<Wait> = Some(Wait::Sleep);

/// The tables' entries for one function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Classification {
    work: Option<Work>,
    wait: Option<Wait>,
    detail: Option<Detail>,
}

/// A table prepared for many lookups: exact names in a map, else the longest prefix.
struct Names<T> {
    exact: HashMap<&'static str, T>,
    prefixes: Vec<(&'static str, T)>,
}

impl<T: Copy + Default> Names<T> {
    fn new(table: impl Iterator<Item = (&'static str, T)>) -> Names<T> {
        let (mut exact, mut prefixes) = (HashMap::new(), Vec::new());
        for (name, value) in table {
            match name.strip_suffix('*') {
                Some(prefix) => prefixes.push((prefix, value)),
                None => drop(exact.insert(name, value)),
            }
        }
        prefixes.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
        Names { exact, prefixes }
    }

    fn find(&self, name: &str) -> T {
        let by_prefix =
            || self.prefixes.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, v)| *v);
        self.exact.get(name).copied().or_else(by_prefix).unwrap_or_default()
    }
}

/// Both tables.
struct Index {
    works: Names<(Option<Work>, Option<Wait>)>,
    details: Names<Option<Detail>>,
}

impl Index {
    fn new() -> Index {
        let works = TABLE.iter().map(|(name, work, wait)| (*name, (*work, *wait)));
        let details = DETAILS.iter().map(|(name, detail)| (*name, Some(*detail)));
        Index { works: Names::new(works), details: Names::new(details) }
    }

    /// Looks up a name without the suffixes that compilers append: `.constprop.0`, `.isra.0`, `.part.0`,
    /// `.cold`.
    fn classify(&self, name: &str) -> Classification {
        let name = name.split('.').next().unwrap_or(name);
        let (work, wait) = self.works.find(name);
        Classification { work, wait, detail: self.details.find(name) }
    }
}

/// The running kernel's functions by address, each with its entry in the table.
#[derive(Debug)]
pub struct Symbols {
    /// The start address of each function, or run of functions with one verdict; sorted.
    starts: Vec<(u64, Classification)>,
}

/// The first marker: values in a call chain from here on are markers (`PERF_CONTEXT_KERNEL`, …), not
/// addresses.
const FIRST_MARKER: u64 = -4095i64 as u64;

static OF_THIS_KERNEL: OnceLock<Result<Symbols, String>> = OnceLock::new();

impl Symbols {
    /// Returns the running kernel's symbols. The first call takes about 20 ms, so make it before a
    /// measurement. Functions of modules that are loaded later stay unknown.
    pub fn of_this_kernel() -> Result<&'static Symbols, String> {
        OF_THIS_KERNEL
            .get_or_init(|| Symbols::read(&Root::default()))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Reads /proc/kallsyms; errors if it hides its addresses.
    pub fn read(root: &Root) -> Result<Symbols, String> {
        let text = root.text("/proc/kallsyms")?;
        let index = Index::new();
        let mut starts: Vec<(u64, Classification)> = Vec::new();
        for line in text.lines() {
            let mut words = line.split(' ');
            let (Some(address), Some(kind), Some(name)) =
                (words.next(), words.next(), words.next())
            else {
                continue;
            };
            // Only functions count.
            if !matches!(kind, "t" | "T" | "w" | "W") {
                continue;
            }
            let address = u64::from_str_radix(address, 16)
                .map_err(|_| format!("/proc/kallsyms: `{line}` has no address"))?;
            let name = name.split('\t').next().unwrap_or(name);
            starts.push((address, index.classify(name)));
        }
        if starts.iter().all(|(address, _)| *address == 0) {
            return Err("/proc/kallsyms hides its addresses \
                        (root, or sysctl kernel.kptr_restrict=0, shows them)"
                .into());
        }
        // Of several names at one address, the one in the table must stay: sort it first.
        starts.sort_by_key(|(address, verdict)| (*address, *verdict == Classification::default()));
        starts.dedup_by_key(|(address, _)| *address);
        starts.dedup_by_key(|(_, verdict)| *verdict);
        Ok(Symbols { starts })
    }

    fn classify(&self, address: u64) -> Classification {
        let after = self.starts.partition_point(|(start, _)| *start <= address);
        after.checked_sub(1).map(|index| self.starts[index].1).unwrap_or_default()
    }

    fn classifications<'a>(
        &'a self,
        stack: &'a [u64],
    ) -> impl Iterator<Item = Classification> + 'a {
        let frames = stack.iter().filter(|address| **address < FIRST_MARKER);
        frames.map(|address| self.classify(*address))
    }

    /// Returns a CPU's work from its stack, innermost frame first; `None` if no frame decides.
    pub fn work(&self, stack: &[u64]) -> Option<Work> {
        decide(self.classifications(stack).filter_map(|frame| frame.work))
    }

    /// Returns the wait that a task is about to begin, from its stack, innermost frame first.
    pub fn wait(&self, stack: &[u64]) -> Wait {
        self.classifications(stack).find_map(|frame| frame.wait).unwrap_or(Wait::Sleep)
    }

    /// Returns the detail of the innermost frame that has one, and whether any frame is an allocation's.
    pub fn detail(&self, stack: &[u64]) -> (Option<Detail>, bool) {
        let details = || self.classifications(stack).filter_map(|frame| frame.detail);
        (details().next(), details().any(|detail| detail == Detail::Allocation))
    }
}

/// Returns the work of a stack from the works of its known frames, innermost first.
fn decide(mut works: impl Iterator<Item = Work>) -> Option<Work> {
    match (works.next()?, works.next()) {
        (Work::ZeroCopy, Some(Work::Compaction)) => Some(Work::Compaction),
        (innermost, _) => Some(innermost),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stacks as `perf script` prints them, captured on Linux 6.18: the expected row on the first line,
    /// then the functions, innermost first.
    const CAPTURED: &str = include_str!("../../../tests/data/stacks-6.18.txt");

    #[test]
    fn captured_stacks_fall_into_their_rows() {
        let index = Index::new();
        let mut seen = Vec::new();
        for block in CAPTURED.split("\n\n") {
            let mut lines = block.trim().lines();
            let Some(expected) = lines.next() else { continue };
            let verdicts: Vec<_> = lines.map(|name| index.classify(name.trim())).collect();
            let found = match expected.split_once("wait ") {
                Some((_, _)) => {
                    let wait = verdicts.iter().find_map(|frame| frame.wait).unwrap_or(Wait::Sleep);
                    format!("wait {wait:?}")
                }
                None => {
                    let work = decide(verdicts.iter().filter_map(|frame| frame.work));
                    work.map_or("unknown", Work::row).to_string()
                }
            };
            assert_eq!(found, expected, "{block}");
            seen.push(expected);
        }
        for row in Work::ALL.map(Work::row) {
            assert!(seen.contains(&row), "no captured stack of {row}");
        }
    }

    #[test]
    fn each_name_stands_once() {
        let works = TABLE.iter().map(|(name, ..)| *name).collect();
        let details = DETAILS.iter().map(|(name, _)| *name).collect();
        for mut names in [works, details] as [Vec<&str>; 2] {
            names.sort();
            assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        }
    }

    #[test]
    fn addresses_find_their_function() {
        let root = crate::procfs::tests::captured();
        let symbols = Symbols::read(&root).unwrap();
        let (zero, fault, marker) = (0xffffffff821e86a0, 0xffffffff81000c60, -128i64 as u64);
        assert_eq!(symbols.work(&[marker, zero + 8, fault + 3]), Some(Work::ZeroCopy));
        assert_eq!(symbols.work(&[0xffffffff8158a8e0, fault + 3]), Some(Work::Fault));
        assert_eq!(symbols.work(&[marker, 0x1000]), None);
        assert_eq!(symbols.wait(&[0xffffffff815ea260]), Wait::SwapIn);
        assert_eq!(symbols.wait(&[marker]), Wait::Sleep);
    }

    #[test]
    fn hidden_addresses_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let hidden = "0000000000000000 T _stext\n0000000000000000 T clear_page_erms\n";
        std::fs::write(folder.path().join("proc/kallsyms"), hidden).unwrap();
        let why = Symbols::read(&Root::at(folder.path())).unwrap_err();
        assert!(why.contains("kptr_restrict"), "{why}");
    }
}
