//! Paging policy: what a kernel does about faults, mappings, locks, forks and switches.
//!
//! Invariant: a kernel acts through [`Cx`] and through its hardware alone. It keeps its own books of
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

use crate::accesses::Accesses;
use crate::cx::Cx;
use crate::mmu::{Mmu, SpaceId};
use crate::tally::{CounterId, Tally};
use pagetax_core::counter::Reading;
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, Plan, Region, RegionId};
use pagetax_core::report::{Table, Warning};
use pagetax_core::units::PageSize;

/// What a kernel has to say when the run is over.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Epilogue {
    /// In old tools' words.
    pub tables: Vec<Table>,
    /// Rows of the budget's memory line: id, bytes, how.
    pub memory: Vec<(&'static str, Reading, String)>,
    /// What to know.
    pub warnings: Vec<Warning>,
}

/// Whether a call that may take many steps has come to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// To be called again, after what [`Cx::wait`] asked for.
    Again,
    /// Done.
    Finished,
}

/// A kernel on hardware `M`. Called by the engine in the order of virtual time.
pub trait Kernel<M: Mmu> {
    /// Preflight: what of a valid plan this kernel on this hardware cannot do.
    fn limits(&self, plan: &Plan) -> Vec<Unmet>;

    /// Time of a system call that finds nothing to do. An operation takes at least that long: the
    /// engine charges it where the kernel has charged nothing. At least 1.
    fn call_ns(&self) -> u64;

    /// Learns of the plan, once, before its run.
    fn prepare(&mut self, _plan: &Plan) {}

    /// The counters that this model keeps beside the engine's own (access, context switch, user,
    /// kernel, daemon, run-queue and wall). Others are not reported, rather than reported as 0.
    fn counters(&self) -> &'static [CounterId];

    /// Page sizes that ordinary memory can have, smallest first, the base page among them.
    fn page_sizes(&self, base: PageSize) -> Vec<PageSize> {
        vec![base]
    }

    /// A process begins to run: main (which has been executed) or a forked child, in its own time,
    /// before its first operation. Called until finished.
    fn begin(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId) -> Step;

    /// Maps a region and says where: a virtual address, aligned to the base page.
    fn map(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        region: &Region,
    ) -> u64;

    /// Unmaps it.
    fn unmap(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, id: RegionId);

    /// Locks `bytes` from `offset` on (one call of mlock), faulting in what is not resident. Returns
    /// how many bytes are locked; when fewer, it is called again for the rest, after the wait.
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

    /// Advice for the whole region; advice that this kernel does not know is ignored.
    fn advise(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, id: RegionId, advice: Advice);

    /// The next access faults. Afterwards it is tried again, at once or after what [`Cx::wait`] asked
    /// for. A kernel may go on and serve faults of the accesses that follow: it then advances past
    /// each access that it has served, as many as are [`Cx::affordable`]; the engine charges the user
    /// time of those. As long as [`Cx::may_go_on`], it may also touch on itself, to the next fault and
    /// the next, if it says what time that takes ([`Cx::touched`]).
    fn fault(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, accesses: &mut Accesses);

    /// `parent` has asked for a child with a copy of its space.
    fn fork(&mut self, hw: &mut M, cx: &mut Cx<'_>, parent: SpaceId, child: SpaceId);

    /// A process ends, in its own time. Called until finished; the hardware drops the space then.
    fn exit(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId) -> Step;

    /// The CPU is about to run another task than before. `space` is that task's; none for a kernel
    /// thread, and no change of space when it is the space that ran on this CPU last.
    fn switch(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: Option<SpaceId>);

    /// Names of the kernel's threads (`kswapd`). They are runnable from the start.
    fn threads(&self) -> &'static [&'static str] {
        &[]
    }

    /// A kernel thread runs: one piece of work that charges time, or waits, or both.
    fn run_thread(&mut self, _hw: &mut M, _cx: &mut Cx<'_>, _thread: usize) {}

    /// Columns of the series beside the counters' differences, for the interval that ends now: ids
    /// with their unit last.
    fn sample(&mut self, _hw: &M, _out: &mut Vec<(&'static str, u64)>) {}

    /// The run is over.
    fn epilogue(&self, hw: &M, tally: &Tally) -> Epilogue;
}
