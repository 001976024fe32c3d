//! SunOS 4.0.3 and 4.1 on a Sun-4: pages that are in memory and still fault.
//!
//! A page needs a valid entry in a pmeg, and pmegs are few. If none is free, one is stolen. It
//! loses all its entries, so that each of its pages faults again. A process also needs the page of
//! text that it runs and the page of its stack. If it steals the pmeg of one of those from itself,
//! it needs it back at once. Source: Lawrence's report of 1990 (Sun-Managers). Inferred constants
//! are marked "fitted" in the models.
//!
//! Invariant: an access and its fault are one. A fault that needs no waiting is served together
//! with its access, in time as well as in the order of accesses.

mod anchors;
pub mod bits;
mod calls;
pub mod config;
mod fault;
pub mod hat;
mod preflight;
mod report;
mod run;
pub mod steal;
#[cfg(test)]
mod tests;
pub mod vm;

use crate::hardware::SpaceId;
use crate::hardware::sun4::{PmegId, Sun4};
use crate::historic::cx::Cx;
use crate::tally::CounterId;
use config::SunOsConfig;
use hat::Hat;
use pagetax_core::units::{Bytes, PageSize};
use vm::Vm;

const TRANSLATION_FAULTS: CounterId = CounterId::of("translation_fault_count");
const MINOR_FAULTS: CounterId = CounterId::of("minor_fault_count");
const MAJOR_FAULTS: CounterId = CounterId::of("major_fault_count");
const COW_FAULTS: CounterId = CounterId::of("cow_fault_count");
const PAGE_INS: CounterId = CounterId::of("page_in_count");
const SWAP_INS: CounterId = CounterId::of("swap_in_count");
const SWAP_OUTS: CounterId = CounterId::of("swap_out_count");
const RESIDENT_MAX: CounterId = CounterId::of("resident_bytes_max");

const COUNTERS: &[CounterId] = &[
    hat::CONTEXT_LOADS,
    COW_FAULTS,
    MAJOR_FAULTS,
    MINOR_FAULTS,
    PAGE_INS,
    hat::ALLOCATIONS,
    hat::RELOADS,
    hat::STEALS,
    RESIDENT_MAX,
    SWAP_INS,
    SWAP_OUTS,
    TRANSLATION_FAULTS,
];

/// A process's state.
#[derive(Debug, Clone)]
struct Process {
    parent: Option<SpaceId>,
    children: u32,
    /// Faults of its start that are still to come, or None once it has begun.
    start_faults: Option<u64>,
    /// The version of its translations at which its text and its stack were last seen loaded.
    anchored_at: Option<u64>,
    alive: bool,
    swapped_out: bool,
}

/// The SunOS kernel: its hat layer, mappings and processes.
#[derive(Debug, Clone)]
pub struct SunOs {
    config: SunOsConfig,
    memory: Bytes,
    page: PageSize,
    hat: Hat,
    vm: Vm,
    processes: Vec<Process>,
    running: Option<SpaceId>,
}

impl SunOs {
    /// Returns a kernel that has just booted on this hardware, with `memory` for users.
    pub fn new(config: SunOsConfig, memory: Bytes, mmu: &mut Sun4) -> Self {
        mmu.note_use(config.hat.steal.asks_for_use);
        let hat = Hat::new(config.hat, config.costs, mmu);
        let (vm, processes, running) = (Vm::default(), Vec::new(), None);
        let page = mmu.geometry().page;
        SunOs { config, memory, page, hat, vm, processes, running }
    }

    fn add_process(&mut self, space: SpaceId, parent: Option<SpaceId>) {
        let image = &self.config.image;
        let start_faults = if parent.is_some() { image.child_faults } else { image.exec_faults };
        let process = Process {
            parent,
            children: 0,
            start_faults: Some(start_faults),
            anchored_at: None,
            alive: true,
            swapped_out: false,
        };
        assert_eq!(space.0, self.processes.len(), "spaces are numbered in the order of creation");
        self.processes.push(process);
        self.hat.add_space(space);
        self.vm.add_space(space);
    }

    /// Returns the segment's pmeg, shared with the parent if the model shares and both see the same
    /// pages.
    fn pmeg(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId, segment: usize) -> PmegId {
        if hw.pmeg_of(space, segment).is_none()
            && let Some(parent) = self.processes[space.0].parent
            && self.may_share(hw, space, segment)
        {
            let pmeg = self.hat.pmeg(hw, cx, parent, segment);
            self.hat.share(hw, parent, space, segment);
            return pmeg;
        }
        self.hat.pmeg(hw, cx, space, segment)
    }

    /// Returns true if parent and child see the same pages in this segment. It is false for the
    /// stack, and for the data segment, which each process writes for itself.
    fn may_share(&self, hw: &Sun4, space: SpaceId, segment: usize) -> bool {
        let ptes = i64::from(hw.geometry().ptes);
        let (stack, data) = (hw.geometry().segments - 1, 0);
        let first = |base: u64| segment as i64 * ptes - (base >> hw.geometry().page.shift()) as i64;
        self.config.hat.share
            && segment != stack
            && segment != data
            && self.vm.regions(space).all(|(id, base)| self.vm.is_common(space, id, first(base)))
    }
}
