//! A profile of the kernel by function, in the columns of the published one.
//!
//! The published profile comes from a sampler that only one CPU at a time answers. Its pages read
//! per second fit the disk's rate only if its total is elapsed time, not the sum over both CPUs. So
//! seconds here are CPU time divided by the number of CPUs, and "us/call" is computed from them.

use pagetax_core::counter::Provenance;
use pagetax_core::report::Table;

/// A line of the profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Line {
    /// Scan of the active list (2.4.9, -ac).
    RefillInactiveScan,
    /// Scan of the inactive dirty list (2.4.9, -ac).
    PageLaunder,
    /// Scan of the active list (2.4.13).
    RefillInactive,
    /// Scan of the inactive list (2.4.13).
    ShrinkCache,
    /// Walk of page tables for swap-out.
    SwapOut,
    /// Reclaim from the kernel's own caches.
    ShrinkSlabs,
    /// Spinning for pagemap_lru_lock.
    LockWait,
    /// Reuse of a page from the inactive clean list.
    ReclaimPage,
    /// The disk's interrupts, including the copies to high memory.
    DiskInterrupt,
    /// Allocation and mapping of pages.
    Fault,
    /// Zeroing and copying of pages.
    ZeroCopy,
    /// Removal of pages from page tables at munmap.
    Unmap,
}

const NAMES: [(Line, &str); 12] = [
    (Line::RefillInactiveScan, "refill_inactive_scan"),
    (Line::PageLaunder, "page_launder"),
    (Line::RefillInactive, "refill_inactive"),
    (Line::ShrinkCache, "shrink_cache"),
    (Line::SwapOut, "swap_out"),
    (Line::ShrinkSlabs, "kmem_cache_reap"),
    (Line::LockWait, "stext_lock"),
    (Line::ReclaimPage, "reclaim_page"),
    (Line::DiskInterrupt, "disk_interrupt"),
    (Line::Fault, "handle_mm_fault"),
    (Line::ZeroCopy, "clear_page, copy_page"),
    (Line::Unmap, "zap_page_range"),
];

/// Calls and CPU time by function.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    calls: [u64; NAMES.len()],
    ns: [u64; NAMES.len()],
}

impl Profile {
    /// Adds `calls` calls that took `ns` in total.
    pub fn add(&mut self, line: Line, calls: u64, ns: u64) {
        self.calls[line as usize] += calls;
        self.ns[line as usize] += ns;
    }

    /// Returns the CPU time of a line so far, in nanoseconds.
    pub fn ns(&self, line: Line) -> u64 {
        self.ns[line as usize]
    }

    /// Formats the table as the profiler did, by falling share of `elapsed_ns` on `cpus` CPUs.
    pub fn table(&self, elapsed_ns: u64, cpus: u64, user_ns: u64) -> Table {
        let total = (elapsed_ns * cpus).max(1);
        let idle = total.saturating_sub(self.ns.iter().sum::<u64>() + user_ns);
        let mut lines = vec![("default_idle", 0, idle), ("USER", 0, user_ns)];
        lines.extend(NAMES.map(|(line, name)| (name, self.calls[line as usize], self.ns(line))));
        lines.retain(|(_, _, ns)| *ns > 0);
        lines.sort_by_key(|(_, _, ns)| std::cmp::Reverse(*ns));
        let row = |(name, calls, ns): (&str, u64, u64)| {
            let seconds = ns as f64 / cpus as f64 / 1e9;
            let each = match calls {
                0 => String::new(),
                calls => format!("{:.2}", seconds * 1e6 / calls as f64),
            };
            let calls = if calls == 0 { String::new() } else { calls.to_string() };
            let share = format!("{:.2}", ns as f64 * 100.0 / total as f64);
            vec![share, format!("{seconds:.2}"), calls, each, name.to_string()]
        };
        Table {
            title: "kernel profile".into(),
            columns: ["% time", "self seconds", "calls", "self us/call", "name"]
                .map(Into::into)
                .into(),
            rows: lines.into_iter().map(row).collect(),
            provenance: Provenance::Modeled,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_in_the_order_of_their_lines() {
        assert!(NAMES.iter().enumerate().all(|(index, (line, _))| *line as usize == index));
    }

    #[test]
    fn shares_are_of_all_cpus_and_add_up() {
        let mut profile = Profile::default();
        profile.add(Line::PageLaunder, 100, 200_000_000);
        profile.add(Line::LockWait, 0, 100_000_000);
        let table = profile.table(1_000_000_000, 2, 20_000_000);
        let cells = |index: usize| table.rows[index].join(" ");
        assert_eq!(cells(0), "84.00 0.84   default_idle");
        assert_eq!(cells(1), "10.00 0.10 100 1000.00 page_launder");
        let sum: f64 = table.rows.iter().map(|row| row[0].parse::<f64>().unwrap()).sum();
        assert!((sum - 100.0).abs() < 0.05);
    }
}
