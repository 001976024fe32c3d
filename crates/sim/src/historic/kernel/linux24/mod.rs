//! Linux 2.4: reclaim as in 2.4.9 (with and without the patch that lets kswapd sleep), 2.4.13 and
//! the -ac kernels, over zones, a page cache and swap.
//!
//! | file | contents |
//! |---|---|
//! | `runs` | page frames in runs, on circular lists |
//! | `groups` | groups of runs, which a scan can pass in one step |
//! | `index` | lookup of the run that holds a page |
//! | `memory` | zones, watermarks, and the pages on each list |
//! | `aging`, `classzone` | the two families of policies; `policy`: the interface that they share |
//! | `spaces` | mappings, and the layers that their pages come from |
//! | `reclaim` | background and direct reclaim with costs and locks; swap-out |
//! | `paging` | page faults, reads from files and swap; `low`: memory below 896 MiB for reads |
//! | `calls` | the kernel's entry points |
//! | `profile`, `costs` | functions and constants |
//!
//! Not modelled: fragments of slabs, and allocations of more than one contiguous page. A request
//! for several pages takes them all from one zone (assumed). kswapd's endless scanning depends on
//! that assumption. Page by page, the DMA zone drains so slowly that kswapd comes to rest after
//! half a minute. In the published job, 2.4.13's lists stay in the order of use. So its livelock
//! does not occur here, although its cause does (a test in `classzone`).
//!
//! Source: Daniel Phillips, "Google's mm problems", linux-kernel, 31 October 2001, and the public
//! descriptions of these kernels' reclaim. No kernel text is used.

mod aging;
mod calls;
mod classzone;
mod costs;
mod groups;
mod index;
mod low;
mod memory;
mod paging;
mod policy;
mod profile;
mod reclaim;
mod runs;
mod spaces;

#[cfg(test)]
mod tests;

pub use costs::{Linux24Config, Linux24Costs};

use crate::hardware::SpaceId;
use crate::historic::cx::{Channel, CpuRow, Cx};
use crate::historic::store::disk::Disk;
use crate::tally::CounterId;
use low::Bounces;
use memory::{ACTIVE, Grant, INACTIVE, ZonedMemory};
use policy::ReclaimAttempt;
use profile::{Line, Profile};
use runs::{Extent, ReclaimState};
use spaces::{ObjectKind, ProcessSpaces};

/// The channel that kswapd sleeps on.
const KSWAPD: Channel = Channel(0);

const MINOR_FAULTS: CounterId = CounterId::of("minor_fault_count");
const MAJOR_FAULTS: CounterId = CounterId::of("major_fault_count");
const COW_FAULTS: CounterId = CounterId::of("cow_fault_count");
const PAGE_INS: CounterId = CounterId::of("page_in_count");
const PAGE_OUTS: CounterId = CounterId::of("page_out_count");
const SWAP_INS: CounterId = CounterId::of("swap_in_count");
const SWAP_OUTS: CounterId = CounterId::of("swap_out_count");
const SCANS: CounterId = CounterId::of("reclaim_scan_count");
const STEALS: CounterId = CounterId::of("reclaim_steal_count");
const READ_BYTES: CounterId = CounterId::of("block_read_bytes");
const LOCKED_BYTES: CounterId = CounterId::of("locked_bytes_max");
const RESIDENT_BYTES: CounterId = CounterId::of("resident_bytes_max");

/// The direct reclaim of a process that found no free page.
#[derive(Debug, Clone, Copy, Default)]
struct Direct {
    attempt: Option<ReclaimAttempt>,
    /// The number of consecutive attempts after which there was still no page.
    fruitless: u32,
}

/// A Linux 2.4 kernel with its memory and its disk.
#[derive(Debug, Clone)]
pub struct Linux24 {
    config: Linux24Config,
    memory: ZonedMemory,
    spaces: ProcessSpaces,
    disk: Disk,
    profile: Profile,
    /// The time when pagemap_lru_lock is free again.
    lock_free_at: u64,
    /// kswapd's current attempt, or None while it sleeps.
    daemon: Option<ReclaimAttempt>,
    daemon_ns: u64,
    daemon_ns_sampled: u64,
    /// The direct reclaim of each space.
    direct: Vec<Direct>,
    /// The number of pages that hold buffer heads.
    slab_pages: u64,
    bounces: Bounces,
    swap_left: u64,
    /// The latest time at which the kernel worked; the profile ends there.
    worked_at: u64,
}

impl Linux24 {
    /// Returns the kernel at the start of a job, with a full page cache if [`Linux24Config::cache_full`].
    pub fn new(config: Linux24Config) -> Self {
        let mut kernel = Linux24 {
            memory: ZonedMemory::new(config.layout),
            spaces: ProcessSpaces::default(),
            disk: Disk::new(config.disk),
            profile: Profile::default(),
            lock_free_at: 0,
            daemon: None,
            daemon_ns: 0,
            daemon_ns_sampled: 0,
            direct: Vec::new(),
            slab_pages: 0,
            bounces: Bounces::default(),
            swap_left: config.swap_pages,
            worked_at: 0,
            config,
        };
        if kernel.config.cache_full {
            kernel.fill_cache();
        }
        kernel
    }

    /// Fills memory with unmapped pages of a file, as after an earlier run: a third inactive, the
    /// rest active.
    fn fill_cache(&mut self) {
        let object = self.spaces.create(ObjectKind::File);
        let mut first = 0;
        for zone in 0..self.memory.zones.len() {
            let (free, low) = (self.memory.zones[zone].free, self.memory.zones[zone].marks.low);
            let used = free.saturating_sub(low);
            let page = ReclaimState { touched: true, ..ReclaimState::default() };
            for (list, count) in [(INACTIVE, used / 3), (ACTIVE, used - used / 3)] {
                let mut grant = Grant::default();
                self.memory.grant(zone, count, &mut grant);
                let extent = Extent { object, first, len: count as u32 };
                self.memory.place(&mut grant, extent, list, page);
                first += count as u32;
            }
        }
    }

    /// Charges CPU time of a kernel function to the budget and the profile.
    fn work(&mut self, cx: &mut Cx<'_>, row: CpuRow, line: Line, calls: u64, ns: u64) {
        cx.charge(row, ns);
        self.profile.add(line, calls, ns);
        self.worked_at = self.worked_at.max(cx.now());
    }

    /// Charges CPU time of a kernel function that holds pagemap_lru_lock, and the spinning for the
    /// lock before it.
    fn hold(&mut self, cx: &mut Cx<'_>, row: CpuRow, line: Line, calls: u64, ns: u64) {
        let spin = self.lock_free_at.saturating_sub(cx.now());
        self.work(cx, CpuRow::Reclaim, Line::LockWait, 0, spin);
        self.work(cx, row, line, calls, ns);
        self.lock_free_at = cx.now();
    }

    fn direct_mut(&mut self, space: usize) -> &mut Direct {
        if self.direct.len() <= space {
            self.direct.resize_with(space + 1, Direct::default);
        }
        &mut self.direct[space]
    }
}
