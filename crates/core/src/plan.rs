//! A Plan: a job with its parameters, sizes and seed resolved. What every machine runs.
//!
//! Invariant: a plan is complete. A machine needs nothing else to know every operation of every
//! worker, in order; two machines given equal plans are asked for equal accesses.

mod contents;
mod facts;
mod validity;

pub use facts::{AccessClass, AccessKind};
pub use validity::{Mistake, Part, REMOTE_RESIDENT_BYTES_MIN};

use crate::access::{Chase, Offsets, Uniform, Zipf, derive_seed};
use crate::network_memory::Serving;
use crate::page_size::PageSizeRequest;
use crate::replay::Replay;
use crate::units::Nanos;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Index of a region in [`Plan::regions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RegionId(pub usize);

/// A resolved job.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Where it came from.
    pub job: JobIdentity,
    /// Every region that the phases name.
    pub regions: Vec<Region>,
    /// In order; a phase begins when the one before has ended for all of its clients.
    pub phases: Vec<Phase>,
    /// What to write down while it runs.
    pub measure: Measure,
    /// What only the host understands.
    pub native: Native,
}

/// A job's name, parameters and seed: enough to make the same plan again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobIdentity {
    /// `vmtest`, or the name in the job file.
    pub name: String,
    /// Each parameter as given or as the job's default, resolved as far as it goes.
    pub params: BTreeMap<String, String>,
    /// Those of the parameters that the machine's file set, where the job's default is another. On
    /// other machines the same command runs another job.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub machine_params: BTreeMap<String, String>,
    /// Of all random streams.
    pub seed: u64,
}

/// What backs a region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backing {
    /// Private anonymous memory: copy-on-write after fork.
    Anon,
    /// Shared anonymous memory: one copy for all clients.
    Shared,
    /// A memfd, mapped shared.
    Memfd,
    /// Network memory: private, paged to memory servers or another page store.
    Remote {
        /// Most bytes of it that stay in this machine's memory.
        resident_bytes: u64,
        /// Who serves faults.
        #[serde(default)]
        serving: Serving,
    },
    /// A file that the machine makes in this directory (none: its own choice) and removes after.
    File {
        /// An existing directory, or none.
        directory: Option<String>,
        /// Mapped MAP_PRIVATE rather than shared.
        private: bool,
    },
}

impl Backing {
    /// Whether it is private memory without a file, wherever its pages go.
    pub fn is_anonymous(&self) -> bool {
        matches!(self, Backing::Anon | Backing::Remote { .. })
    }

    /// Whether it is network memory.
    pub fn is_remote(&self) -> bool {
        matches!(self, Backing::Remote { .. })
    }
}

/// Advice as of madvise(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Advice {
    /// MADV_NORMAL
    Normal,
    /// MADV_RANDOM
    Random,
    /// MADV_SEQUENTIAL
    Sequential,
    /// MADV_WILLNEED
    Willneed,
    /// MADV_DONTNEED: private pages are dropped, and are zero when touched again.
    Dontneed,
    /// MADV_FREE
    Free,
    /// MADV_COLD
    Cold,
    /// MADV_PAGEOUT
    Pageout,
    /// MADV_HUGEPAGE
    Hugepage,
    /// MADV_NOHUGEPAGE
    Nohugepage,
    /// MADV_COLLAPSE
    Collapse,
    /// MADV_POPULATE_READ
    PopulateRead,
    /// MADV_POPULATE_WRITE
    PopulateWrite,
}

/// A piece of address space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// As in the job file; members of a family are `name[0]`, `name[1]`, …
    pub name: String,
    /// What is behind it.
    pub backing: Backing,
    /// Length; machines round it up to whole pages.
    pub bytes: u64,
    /// Wanted page size.
    pub page_size: PageSizeRequest,
    /// Given right after it is mapped.
    pub advice: Vec<Advice>,
    /// Mapped before the first phase (true), or by a map operation (false).
    pub mapped_at_start: bool,
}

/// What a phase's clients are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientKind {
    /// The main process does the work itself.
    Main,
    /// Forked children: each with its own address space, copy-on-write.
    Processes,
    /// Threads of the main process.
    Threads,
}

/// One step of a job: clients that all do the same operations, repeated.
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// As in the job file.
    pub name: String,
    /// Who works.
    pub client_kind: ClientKind,
    /// How many; 1 for [`ClientKind::Main`].
    pub clients: u32,
    /// How often the operations are done, unless `time` ends them first.
    pub repeat: u64,
    /// An end by the clock, looked at between operations and every few thousand accesses.
    pub time: Option<Nanos>,
    /// Accesses a second and client, paced; none: as fast as it goes.
    pub rate: Option<f64>,
    /// While clients run, the parent wakes this often, polls for ended clients and sleeps again.
    /// From `switch_rate`, switches a second: each wake is two of them. None: the parent blocks.
    pub parent_wake: Option<Nanos>,
    /// Done in order, `repeat` times.
    pub ops: Vec<Op>,
}

/// The closed set of operations.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// Map a region that was not mapped at the start, or was unmapped.
    Map(RegionId),
    /// Unmap it.
    Unmap(RegionId),
    /// mlock in pieces of `chunk_bytes`.
    Lock {
        /// What to lock.
        region: RegionId,
        /// Bytes for each call.
        chunk_bytes: u64,
    },
    /// munlock the whole.
    Unlock(RegionId),
    /// madvise the whole.
    Advise {
        /// Where.
        region: RegionId,
        /// What.
        advice: Advice,
    },
    /// Access memory.
    Touch(Touch),
    /// Access memory as a recorded program did.
    Replay(Replay),
    /// Do nothing for a while.
    Sleep(Nanos),
    /// Wait for all clients of the phase.
    Barrier,
}

/// What is done at each offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Load.
    Read,
    /// Store the address-dependent pattern.
    Write,
    /// Load and compare with the pattern.
    Verify,
    /// Load, compare, and store the same again.
    Rewrite,
}

impl Access {
    /// Whether it stores.
    pub fn writes(self) -> bool {
        matches!(self, Access::Write | Access::Rewrite)
    }

    /// Whether it loads.
    pub fn reads(self) -> bool {
        !matches!(self, Access::Write)
    }
}

/// The order of the offsets.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// From the start, step by step, wrapping at the end.
    Strided {
        /// Bytes from one access to the next.
        stride_bytes: u64,
    },
    /// Uniformly random grains.
    Uniform,
    /// Zipf-distributed grains.
    Zipf {
        /// Exponent, > 0.
        theta: f64,
    },
    /// A random cycle through all grains, each address read from the one before.
    PointerChase,
}

/// A stream of accesses to one region.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Touch {
    /// Where.
    pub region: RegionId,
    /// What.
    pub access: Access,
    /// In which order.
    pub pattern: Pattern,
    /// How many accesses in all. For a sweep: one lap, unless the job says otherwise.
    pub count: u64,
    /// Bytes of each access, from its offset on: 8 for a word, a page for a whole page. A random
    /// offset is a multiple of it.
    pub grain_bytes: u64,
    /// The seed of this touch; clients and repeats derive theirs from it by [`Touch::seed_for`].
    pub seed: u64,
}

/// The offsets `first, first + stride, …`: a stretch of a sweep that does not wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OffsetRun {
    /// Offset of the first access.
    pub first: u64,
    /// Bytes between accesses.
    pub stride: u64,
    /// How many.
    pub count: u64,
}

/// A random stream, by pattern.
#[derive(Debug, Clone)]
pub enum Random {
    /// [`Pattern::Uniform`]
    Uniform(Uniform),
    /// [`Pattern::Zipf`]
    Zipf(Zipf),
    /// [`Pattern::PointerChase`]
    Chase(Chase),
}

impl Offsets for Random {
    fn next_offset(&mut self) -> u64 {
        match self {
            Random::Uniform(s) => s.next_offset(),
            Random::Zipf(s) => s.next_offset(),
            Random::Chase(s) => s.next_offset(),
        }
    }
}

impl Touch {
    /// The seed of one client in one repeat. A pointer chase has one cycle for all of them, as its
    /// links stand in memory.
    pub fn seed_for(&self, client: u32, repeat: u64) -> u64 {
        match self.pattern {
            Pattern::PointerChase => self.seed,
            _ => derive_seed(self.seed, repeat, 0, client as u64),
        }
    }

    /// The laps of a sweep over a region of `region_bytes`, as runs that never wrap. Empty for
    /// random patterns.
    pub fn runs(&self, region_bytes: u64) -> impl Iterator<Item = OffsetRun> + use<> {
        let (stride, mut left) = match self.pattern {
            Pattern::Strided { stride_bytes } => (stride_bytes.max(1), self.count),
            _ => (1, 0),
        };
        let lap = region_bytes.saturating_sub(self.grain_bytes.min(region_bytes)) / stride + 1;
        std::iter::from_fn(move || {
            let count = left.min(lap);
            left -= count;
            (count > 0).then_some(OffsetRun { first: 0, stride, count })
        })
    }

    /// The random stream of one client in one repeat; none for sweeps.
    pub fn random(&self, region_bytes: u64, client: u32, repeat: u64) -> Option<Random> {
        let (seed, grain) = (self.seed_for(client, repeat), self.grain_bytes);
        Some(match self.pattern {
            Pattern::Strided { .. } => return None,
            Pattern::Uniform => Random::Uniform(Uniform::new(seed, region_bytes, grain)),
            Pattern::Zipf { theta } => Random::Zipf(Zipf::new(seed, region_bytes, grain, theta)),
            Pattern::PointerChase => Random::Chase(Chase::new(seed, region_bytes, grain)),
        })
    }
}

/// What to write down while the plan runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measure {
    /// Of the series; none: no series.
    pub interval: Option<Nanos>,
    /// Per-fault latency histograms, at a cost for each fault.
    pub fault_latency: bool,
}

/// What only the host understands; the simulated machines ignore it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Native {
    /// Test hook: flips one bit of the byte at this offset of the first region between its first
    /// and its second phase, so that a verifying job must notice.
    pub flip_byte_at: Option<u64>,
}

impl Phase {
    /// Accesses that all clients plan for, all repeats together.
    pub fn access_count(&self) -> f64 {
        let of = |op: &Op| match op {
            Op::Touch(touch) => touch.count as f64 * f64::from(self.clients),
            Op::Replay(replay) => {
                (0..self.clients).map(|client| replay.totals(client).access_count as f64).sum()
            }
            _ => 0.0,
        };
        self.ops.iter().map(of).sum::<f64>() * self.repeat as f64
    }
}

impl Plan {
    /// The region of an id.
    pub fn region(&self, id: RegionId) -> &Region {
        &self.regions[id.0]
    }

    /// The seed of [`crate::access::pattern_word`] for a region: the same in every phase, so that
    /// one phase verifies what another wrote.
    pub fn pattern_seed(&self, id: RegionId) -> u64 {
        derive_seed(self.job.seed, u64::MAX - 1, id.0 as u64, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(pattern: Pattern, count: u64) -> Touch {
        let (region, access) = (RegionId(0), Access::Read);
        Touch { region, access, pattern, count, grain_bytes: 8, seed: 1 }
    }

    #[test]
    fn sweeps_are_laps() {
        let sweep = touch(Pattern::Strided { stride_bytes: 4096 }, 1200);
        let runs: Vec<_> = sweep.runs(512 * 4096).map(|r| r.count).collect();
        assert_eq!(runs, [512, 512, 176]);
        assert_eq!(touch(Pattern::Uniform, 5).runs(4096).count(), 0);
    }

    #[test]
    fn clients_have_their_own_streams() {
        let t = touch(Pattern::Uniform, 5);
        let first = |client, repeat| t.random(1 << 20, client, repeat).unwrap().next_offset();
        assert_eq!(first(0, 0), first(0, 0));
        assert_ne!(first(0, 0), first(1, 0));
        assert_ne!(first(0, 0), first(0, 1));
        let chase = touch(Pattern::PointerChase, 5);
        assert_eq!(chase.seed_for(0, 0), chase.seed_for(3, 9));
    }
}
