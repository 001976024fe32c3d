//! Constants of a Linux 2.4 machine, from its model file.

use super::aging::{Aging, Decay, Rules};
use super::classzone::Classzone;
use super::memory::Layout;
use super::policy::{Function, ReclaimPolicy};
use super::profile::Line;
use super::spaces::PAGE;
use crate::historic::store::disk::DiskCosts;
use crate::model::{Model, ModelError};

/// The costs of the kernel's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Linux24Costs {
    /// Cost of a page visited by a scan of the active list.
    pub refill_visit_ps: u64,
    /// Cost of a page visited by a scan of the inactive list.
    pub launder_visit_ps: u64,
    /// Fixed cost of a swap-out call, which walks the processes' areas.
    pub swap_out_call_ns: u64,
    /// Cost of a page-table entry visited by a swap-out call.
    pub swap_out_page_ns: u64,
    /// Cost of a call that scans the kernel's own caches.
    pub slabs_call_ns: u64,
    /// Cost of a page taken from a clean list or put on a list, with pagemap_lru_lock held.
    pub lru_page_ns: u64,
    /// Cost of a page that is allocated and mapped.
    pub fault_page_ns: u64,
    /// Cost of a page that is read: its part of an interrupt, and its copy to high memory.
    pub interrupt_page_ns: u64,
    /// Cost of a page that is zeroed or copied.
    pub zero_page_ns: u64,
    /// Cost of a page that leaves a page table.
    pub unmap_page_ns: u64,
    /// Cost of a system call, and of a wakeup.
    pub call_ns: u64,
}

impl Linux24Costs {
    fn new(model: &Model) -> Result<Self, ModelError> {
        Ok(Linux24Costs {
            refill_visit_ps: model.ps("reclaim", "refill_visit")?,
            launder_visit_ps: model.ps("reclaim", "launder_visit")?,
            swap_out_call_ns: model.ns("reclaim", "swap_out_call")?,
            swap_out_page_ns: model.ns("reclaim", "swap_out_page")?,
            slabs_call_ns: model.ns("reclaim", "slabs_call")?,
            lru_page_ns: model.ns("fault", "lru_page")?,
            fault_page_ns: model.ns("fault", "map_page")?,
            interrupt_page_ns: model.ns("fault", "interrupt_page")?,
            zero_page_ns: model.ns("fault", "zero_page")?,
            unmap_page_ns: model.ns("fault", "unmap_page")?,
            call_ns: model.ns("fault", "system_call")?,
        })
    }

    /// Returns a function's line in the profile, its cost in nanoseconds for `visits` pages, and
    /// true if it holds pagemap_lru_lock throughout.
    pub fn of(&self, function: Function, visits: u64) -> (Line, u64, bool) {
        let scan = |line, visit_ps: u64| (line, self.call_ns + visits * visit_ps / 1000, true);
        match function {
            Function::RefillInactiveScan => scan(Line::RefillInactiveScan, self.refill_visit_ps),
            Function::RefillInactive => scan(Line::RefillInactive, self.refill_visit_ps),
            Function::PageLaunder => scan(Line::PageLaunder, self.launder_visit_ps),
            Function::ShrinkCache => scan(Line::ShrinkCache, self.launder_visit_ps),
            Function::SwapOut => {
                (Line::SwapOut, self.swap_out_call_ns + visits * self.swap_out_page_ns, false)
            }
            Function::ShrinkSlabs => (Line::ShrinkSlabs, self.slabs_call_ns, false),
        }
    }
}

/// The constants of a Linux 2.4 machine.
#[derive(Debug, Clone)]
pub struct Linux24Config {
    /// The number of CPUs, by which the profile's seconds are divided.
    pub cpus: u64,
    /// Size of physical memory and its reserved parts.
    pub layout: Layout,
    /// The reclaim policy and its state.
    pub policy: ReclaimPolicy,
    /// Costs of the kernel's work.
    pub costs: Linux24Costs,
    /// The disk that holds files and swap.
    pub disk: DiskCosts,
    /// The size of swap, in pages.
    pub swap_pages: u64,
    /// The number of pages that a fault on a file reads at once.
    pub file_cluster: u32,
    /// The number of pages that a fault on swapped memory reads at once.
    pub swap_cluster: u32,
    /// The number of file pages for each page of buffer heads.
    pub pages_a_slab: u64,
    /// True if reads into high memory go through bounce pages below it.
    pub bounces: bool,
    /// True if earlier runs' files fill memory at the start.
    pub cache_full: bool,
}

impl Linux24Config {
    /// Reads the constants from a model.
    ///
    /// # Errors
    /// Returns an error if a constant is absent or out of range.
    pub fn new(model: &Model) -> Result<Self, ModelError> {
        let pages = model.bytes("machine", "memory")? / PAGE;
        let descriptors = pages * model.bytes("memory", "page_descriptor")? / PAGE;
        let layout = Layout {
            pages,
            reserved_dma: model.bytes("memory", "reserved_dma")? / PAGE,
            reserved_normal: model.bytes("memory", "reserved_normal")? / PAGE + descriptors,
        };
        Ok(Linux24Config {
            cpus: model.positive("machine", "cpus")?,
            layout,
            policy: policy(model)?,
            costs: Linux24Costs::new(model)?,
            disk: DiskCosts {
                bytes_per_s: model.positive("disk", "bytes_per_s")?,
                seek_ns: model.ns("disk", "seek")?,
                jitter_percent: model.ppm("disk", "jitter")? / 10_000,
            },
            swap_pages: model.bytes("disk", "swap")? / PAGE,
            file_cluster: model.power_of_two("disk", "file_cluster")? as u32,
            swap_cluster: model.power_of_two("disk", "swap_cluster")? as u32,
            pages_a_slab: PAGE / model.bytes("memory", "buffer_head")?.max(1),
            bounces: model.flag("memory", "bounces")?,
            cache_full: model.flag("memory", "cache_full_at_start")?,
        })
    }
}

fn policy(model: &Model) -> Result<ReclaimPolicy, ModelError> {
    // All constants are read under either policy: model files inherit those of their base.
    let classzone = model.word("reclaim", "policy", &[("aging", false), ("classzone", true)])?;
    let age = |key| model.count("reclaim", key).map(|age| age.min(255) as u8);
    let decays = [("halve", Decay::Halve), ("linear", Decay::Linear)];
    let rules = Rules {
        decay: model.word("reclaim", "age_decay", &decays)?,
        age_start: age("age_start")?,
        age_advance: age("age_advance")?,
        age_max: age("age_max")?,
        plenty_ppm: model.ppm("reclaim", "inactive_plenty")?,
        deactivates_mapped: model.flag("reclaim", "deactivates_mapped")?,
        passes: model.positive("reclaim", "passes")?.min(u64::from(u32::MAX)) as u32,
        launders_whole_list: model.flag("reclaim", "launders_whole_list")?,
        rests_when_plenty: model.flag("reclaim", "rests_when_plenty")?,
        retries_on_failure: model.flag("reclaim", "retries_on_failure")?,
    };
    Ok(if classzone {
        ReclaimPolicy::Classzone(Classzone::default())
    } else {
        ReclaimPolicy::Aging(Aging::new(rules))
    })
}
