//! Paging policy: how a kernel handles faults, mappings, locks, forks and context switches.
//!
//! Invariant: a kernel acts through [`Cx`] and its hardware alone. It keeps its own records of
//! spaces, mappings and page frames, and owns its backing store.

pub mod anon;
pub mod buddy;
pub mod linux24;
pub mod pager;
mod preflight;
pub mod replacement;
pub mod solaris;
pub mod solaris_tools;
pub mod sunos;
pub mod thp;

use crate::hardware::accesses::Accesses;
use crate::hardware::{Mmu, SpaceId};
use crate::historic::cx::Cx;
use crate::tally::{CounterId, Tally};
use pagetax_core::counter::Reading;
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, Plan, Region, RegionId};
use pagetax_core::report::{Table, Warning};
use pagetax_core::units::PageSize;

/// A kernel's results at the end of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KernelReport {
    /// Tables in the format of the period's tools.
    pub tables: Vec<Table>,
    /// Rows of the budget's memory line: id, bytes, method.
    pub memory: Vec<(&'static str, Reading, String)>,
    /// The warnings for the report.
    pub warnings: Vec<Warning>,
}

/// The progress of a call that may take many steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The engine calls again, after the wait that [`Cx::wait`] asked for.
    Again,
    /// The call is complete.
    Finished,
}

/// A paging policy on hardware `M`. The engine calls it in order of virtual time.
pub trait Kernel<M: Mmu> {
    /// Returns the demands of a valid plan that this kernel on this hardware cannot meet
    /// (preflight).
    fn unmet_requirements(&self, plan: &Plan) -> Vec<Unmet>;

    /// Returns the nanoseconds of a system call that finds nothing to do; at least 1. The engine
    /// charges them if the kernel has charged nothing, so that every operation takes time.
    fn call_ns(&self) -> u64;

    /// Learns the plan, once, before its run.
    fn prepare(&mut self, _plan: &Plan) {}

    /// Returns the counters that this model keeps, in addition to the engine's own. The engine
    /// counts accesses, context switches, and user, kernel, daemon, run-queue and wall time. Other
    /// counters are left out of the report rather than reported as 0.
    fn counters(&self) -> &'static [CounterId];

    /// Returns the page sizes of ordinary memory, smallest first, including the base page.
    fn page_sizes(&self, base: PageSize) -> Vec<PageSize> {
        vec![base]
    }

    /// Starts a process in its own time, before its first operation: main (already executed) or a
    /// forked child. The engine calls it until it is finished.
    fn begin(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId) -> Step;

    /// Maps a region and returns its virtual address, aligned to the base page.
    fn map(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        region: &Region,
    ) -> u64;

    /// Unmaps a region and frees its pages.
    fn unmap(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, id: RegionId);

    /// Locks `bytes` from `offset` on (one call of mlock) and faults in pages that are not
    /// resident. Returns the number of bytes locked. If that is fewer, the engine calls again for
    /// the rest, after the wait.
    fn lock(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        offset: u64,
        bytes: u64,
    ) -> u64;

    /// Unlocks the whole region.
    fn unlock(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, id: RegionId);

    /// Takes advice for the whole region, and ignores advice that it does not know.
    fn advise(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, id: RegionId, advice: Advice);

    /// Serves the fault of the next access. The engine then retries the access, at once or after
    /// the wait that [`Cx::wait`] asked for.
    ///
    /// A kernel may go on and serve the faults of the accesses that follow. It then advances past
    /// each access that it has served, at most [`Cx::affordable`] of them, and the engine charges
    /// their user time. While [`Cx::may_go_on`] is true, it may also touch pages itself up to the
    /// next fault. It then reports the time of those touches ([`Cx::touched`]).
    fn fault(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, accesses: &mut Accesses);

    /// Forks: `child` gets a copy of `parent`'s space.
    fn fork(&mut self, hw: &mut M, cx: &mut Cx<'_>, parent: SpaceId, child: SpaceId);

    /// Ends a process in its own time. The engine calls it until it is finished; then the hardware
    /// drops the space.
    fn exit(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId) -> Step;

    /// Prepares a CPU for another task. `space` is the task's space, or None for a kernel thread.
    /// The space does not change if it also ran last on this CPU.
    fn switch(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: Option<SpaceId>);

    /// Returns the names of the kernel's threads (`kswapd`). They are runnable from the start.
    fn threads(&self) -> &'static [&'static str] {
        &[]
    }

    /// Runs one piece of a kernel thread's work, which charges time, or waits, or both.
    fn run_thread(&mut self, _hw: &mut M, _cx: &mut Cx<'_>, _thread: usize) {}

    /// Adds columns to the series for the interval that ends now, in addition to the counters'
    /// differences. A column's id ends with its unit.
    fn sample(&mut self, _hw: &M, _out: &mut Vec<(&'static str, u64)>) {}

    /// Returns the tables, memory rows and warnings at the end of the run.
    fn kernel_report(&self, hw: &M, tally: &Tally) -> KernelReport;
}
