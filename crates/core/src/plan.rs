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

/// The index of a region in [`Plan::regions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RegionId(pub usize);

/// A resolved job.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The job that it was resolved from.
    pub job: JobIdentity,
    /// All regions that the phases name.
    pub regions: Vec<Region>,
    /// The phases, in order. A phase begins when all clients of the phase before have ended.
    pub phases: Vec<Phase>,
    /// The readings to record during the run.
    pub measure: Measure,
    /// Settings that only the host knows.
    pub native: Native,
}

/// A job's name, parameters and seed: enough to make the same plan again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobIdentity {
    /// `vmtest`, or the name in the job file.
    pub name: String,
    /// The parameters as given, or the job's defaults, resolved as far as possible.
    pub params: BTreeMap<String, String>,
    /// The parameters that the machine's file sets to other values than the job's defaults. On other
    /// machines, the same command runs another job.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub machine_params: BTreeMap<String, String>,
    /// The seed of all random streams.
    pub seed: u64,
}

/// The backing of a region.
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
        /// The most bytes of it that stay in this machine's memory.
        resident_bytes: u64,
        /// The thread that serves its faults.
        #[serde(default)]
        serving: Serving,
    },
    /// A file that the machine makes, and removes afterwards.
    File {
        /// An existing directory for the file; `None` leaves the choice to the machine.
        directory: Option<String>,
        /// True if it is mapped MAP_PRIVATE, false if shared.
        private: bool,
    },
}

impl Backing {
    /// Returns true for private memory without a file, wherever its pages go.
    pub fn is_anonymous(&self) -> bool {
        matches!(self, Backing::Anon | Backing::Remote { .. })
    }

    /// Returns true for network memory.
    pub fn is_remote(&self) -> bool {
        matches!(self, Backing::Remote { .. })
    }
}

/// Advice of madvise(2).
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
    /// The name in the job file; members of a family are `name[0]`, `name[1]`, …
    pub name: String,
    /// The backing of its pages.
    pub backing: Backing,
    /// The length; machines round it up to whole pages.
    pub bytes: u64,
    /// The page size that the job asks for.
    pub page_size: PageSizeRequest,
    /// Advice that is given right after the region is mapped.
    pub advice: Vec<Advice>,
    /// True if it is mapped before the first phase, false if a map operation does it.
    pub mapped_at_start: bool,
    /// The first region of its address range. All regions of a range are mapped at one address, in turn
    /// (MAP_FIXED). `None`: the kernel chooses the address. Simulated machines always choose it.
    pub place: Option<RegionId>,
}

/// The kind of a phase's clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientKind {
    /// The main process itself.
    Main,
    /// Forked children: each with its own address space, copy-on-write.
    Processes,
    /// Threads of the main process.
    Threads,
}

/// One step of a job: clients that all do the same operations, repeated.
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// The name in the job file.
    pub name: String,
    /// The main process, children or threads.
    pub client_kind: ClientKind,
    /// The number of clients; 1 for [`ClientKind::Main`].
    pub clients: u32,
    /// The number of times that each client does the operations, unless `time` ends them first.
    pub repeat: u64,
    /// An end by the clock, checked between operations and every few thousand accesses.
    pub time: Option<Nanos>,
    /// Paced accesses a second of each client; `None` for the full speed.
    pub rate: Option<f64>,
    /// The time after which the parent wakes while clients run: it polls for ended clients and sleeps
    /// again. Each wake is two switches of a job's `switch_rate`. `None`: the parent blocks.
    pub parent_wake: Option<Nanos>,
    /// The operations, done in order, `repeat` times.
    pub ops: Vec<Op>,
}

/// The closed set of operations.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// Maps a region that was not mapped at the start, or was unmapped.
    Map(RegionId),
    /// Unmaps a region.
    Unmap(RegionId),
    /// Locks a region by mlock(2), in pieces of `chunk_bytes`.
    Lock {
        /// The region to lock, from its start.
        region: RegionId,
        /// The bytes that one call locks.
        chunk_bytes: u64,
    },
    /// Unlocks a whole region by munlock(2).
    Unlock(RegionId),
    /// Advises a whole region by madvise(2).
    Advise {
        /// The region to advise, as a whole.
        region: RegionId,
        /// The advice of madvise(2).
        advice: Advice,
    },
    /// Accesses memory.
    Touch(Touch),
    /// Accesses memory as a recorded program did.
    Replay(Replay),
    /// Does nothing for a while.
    Sleep(Nanos),
    /// Waits for all clients of the phase.
    Barrier,
}

/// The kind of access at each offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Loads.
    Read,
    /// Stores the address-dependent pattern.
    Write,
    /// Loads and compares with the pattern.
    Verify,
    /// Loads, compares, and stores the same again.
    Rewrite,
}

impl Access {
    /// Returns true if it stores.
    pub fn writes(self) -> bool {
        matches!(self, Access::Write | Access::Rewrite)
    }

    /// Returns true if it loads.
    pub fn reads(self) -> bool {
        !matches!(self, Access::Write)
    }
}

/// The order of the offsets of a touch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// From the start, step by step, wrapping at the end.
    Strided {
        /// The bytes from one access to the next.
        stride_bytes: u64,
    },
    /// Uniformly random grains.
    Uniform,
    /// Zipf-distributed grains.
    Zipf {
        /// The exponent of the distribution, above 0.
        theta: f64,
    },
    /// A random cycle through all grains; each address is read from the grain before.
    PointerChase,
}

/// A stream of accesses to one region.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Touch {
    /// The region that is accessed.
    pub region: RegionId,
    /// The kind of each access: loads, stores or both.
    pub access: Access,
    /// The order of the offsets.
    pub pattern: Pattern,
    /// The number of all accesses. For a sweep: one lap, unless the job sets another number.
    pub count: u64,
    /// The bytes of each access, from its offset on: 8 for a word, a page for a whole page. A random
    /// offset is a multiple of it.
    pub grain_bytes: u64,
    /// The seed of this touch, from which [`Touch::seed_for`] derives those of clients and repeats.
    pub seed: u64,
}

/// The offsets `first, first + stride, …`: a stretch of a sweep that does not wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OffsetRun {
    /// The offset of the first access.
    pub first: u64,
    /// The bytes from one access to the next.
    pub stride: u64,
    /// The number of accesses of the run.
    pub count: u64,
}

/// A random stream of offsets, by pattern.
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
    /// Returns the seed of one client in one repeat. A pointer chase has one cycle for all clients, as
    /// its links are in memory.
    pub fn seed_for(&self, client: u32, repeat: u64) -> u64 {
        match self.pattern {
            Pattern::PointerChase => self.seed,
            _ => derive_seed(self.seed, repeat, 0, client as u64),
        }
    }

    /// Returns the laps of a sweep over a region of `region_bytes`, as runs that never wrap; none for
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

    /// Returns the random stream of one client in one repeat; `None` for sweeps.
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

/// The readings to record during a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measure {
    /// The interval of the series; `None` for no series.
    pub interval: Option<Nanos>,
    /// True for histograms of fault latency, which cost time at each fault.
    pub fault_latency: bool,
}

/// Settings that only the host knows; the simulated machines ignore them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Native {
    /// A test hook: flips one bit of the byte at this offset of the first region between its first
    /// and its second phase, so that a verifying job must notice.
    pub flip_byte_at: Option<u64>,
}

impl Phase {
    /// Returns the number of accesses that all clients plan, in all repeats together.
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
    /// Returns the region of an id.
    pub fn region(&self, id: RegionId) -> &Region {
        &self.regions[id.0]
    }

    /// Returns the seed of [`crate::access::pattern_word`] for a region. It is the same in every phase, so
    /// that one phase verifies what another wrote.
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
