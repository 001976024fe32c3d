//! Keeps giving a process, and what it forks, the pages that were asked for: growth, and memory that
//! copy-on-write made small again.
//!
//! A sweep looks at a process only when its resident memory has changed; looking takes at most a
//! fifth of a CPU. (Collapsing takes what it takes, but each page is collapsed once.)

use super::change::{self, Outcome};
use super::target::{Refusal, Target};
use super::{PageSettings, Verdict, judge};
use crate::measure::trial::Allocator;
use crate::measure::trial::tree::{ProcessTree, resident_bytes};
use crate::pages::pagemap::{self, PageMapError};
use crate::sys::process::thread_usage;
use pagetax_core::page_size::PartSizes;
use pagetax_core::units::PageSize;
use rustix::process::Pid;
use std::collections::HashMap;
use std::time::Duration;

/// Between two sweeps, at least.
const PACE_MIN: Duration = Duration::from_millis(20);
/// And at most.
const PACE_MAX: Duration = Duration::from_millis(500);
/// The pause after a sweep ÷ the CPU time that it looked for.
const PAUSES: u32 = 4;
/// Even without growth a process is looked at again after so many sweeps, for a fork leaves its size
/// as it is.
const IDLE_SWEEPS_MAX: u32 = 8;

/// Returns the CPU time of this thread. On a busy machine, elapsed time shows little of what we take from
/// others.
fn cpu_time() -> Duration {
    let usage = thread_usage();
    Duration::from_nanos(usage.user_ns + usage.kernel_ns)
}

/// A process that is kept.
struct Kept {
    target: Target,
    resident_bytes: u64,
    idle_sweeps: u32,
    outcome: Outcome,
    /// The largest result so far.
    verdict: Option<Verdict>,
}

/// Whose pages a sweep changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// None: the sweep only looks.
    Nobodys,
    /// Processes with an allocator of their own; glibc's malloc has its tunable.
    OwnAllocators,
    /// All processes.
    Everybodys,
}

/// The sweeps over a family of processes.
pub struct Sweeper {
    advice: PartSizes,
    system: PageSettings,
    huge: PageSize,
    force: bool,
    /// The processes whose pages are changed.
    whose: Whose,
    /// True if verdicts are kept.
    verifies: bool,
    family: ProcessTree,
    kept: HashMap<Pid, Kept>,
    refused: HashMap<Pid, Refusal>,
    /// CPU time that this sweep has spent on looking.
    looked: Duration,
    gone: Vec<(Verdict, Outcome)>,
    /// The last error on a process that lived.
    unseen: Option<String>,
}

impl Sweeper {
    /// Returns a sweeper that changes pages of `whose` processes; `verifies` keeps a verdict of each of them.
    pub fn new(advice: PartSizes, force: bool, whose: Whose, verifies: bool) -> Sweeper {
        let system = PageSettings::host();
        let huge = system.pmd_size().unwrap_or(PageSize::M2);
        Sweeper {
            advice,
            system,
            huge,
            force,
            whose,
            verifies,
            family: ProcessTree::default(),
            kept: HashMap::new(),
            refused: HashMap::new(),
            looked: Duration::ZERO,
            gone: Vec::new(),
            unseen: None,
        }
    }

    /// Looks once at these processes and all their descendants. Returns the pause until the next sweep; none
    /// if no process is left.
    pub fn sweep(&mut self, roots: &[Pid]) -> Option<Duration> {
        self.looked = Duration::ZERO;
        let mut members: Vec<Pid> = roots.to_vec();
        for root in roots {
            members.extend(self.family.descendants(*root));
        }
        let mut grew = false;
        let mut alive = false;
        for pid in members {
            alive |= self.keep(pid);
            grew |= self.look(pid);
        }
        self.bury();
        let pace = if grew { PACE_MIN } else { PACE_MAX.min(PACE_MIN * 5) };
        alive.then(|| pace.max(self.looked * PAUSES))
    }

    /// Returns the verdict and the changes of each process, when it was largest.
    pub fn finish(mut self) -> Vec<(Verdict, Outcome)> {
        let kept = self.kept.drain().filter_map(|(_, kept)| Some((kept.verdict?, kept.outcome)));
        let mut all: Vec<_> = self.gone.into_iter().chain(kept).collect();
        all.sort_by_key(|(verdict, _)| verdict.pid);
        all
    }

    /// Returns the reason for which a process could not be looked at.
    pub fn unseen(&self) -> Option<String> {
        self.unseen.clone().or_else(|| self.refused.values().next().map(ToString::to_string))
    }

    /// Returns the reasons for which processes were left alone.
    pub fn refused(&self) -> impl Iterator<Item = (Pid, &Refusal)> {
        self.refused.iter().map(|(pid, refusal)| (*pid, refusal))
    }

    /// Starts to follow a process. Returns true if it lives.
    fn keep(&mut self, pid: Pid) -> bool {
        if let Some(kept) = self.kept.get(&pid) {
            return kept.target.is_alive();
        }
        if self.refused.contains_key(&pid) {
            return resident_bytes(pid).is_some_and(|bytes| bytes > 0);
        }
        match Target::open(pid.as_raw_nonzero().get() as u32, self.force) {
            Ok(target) => {
                let (outcome, verdict) = (Outcome::default(), None);
                let idle_sweeps = IDLE_SWEEPS_MAX;
                let kept = Kept { target, resident_bytes: 0, idle_sweeps, outcome, verdict };
                self.kept.insert(pid, kept);
                true
            }
            Err(Refusal::Gone | Refusal::Zombie) => false,
            Err(refusal) => {
                self.refused.insert(pid, refusal);
                true
            }
        }
    }

    /// Changes a process and judges it. Returns true if it has grown.
    fn look(&mut self, pid: Pid) -> bool {
        let Some(kept) = self.kept.get_mut(&pid) else { return false };
        let Some(now) = resident_bytes(pid).filter(|bytes| *bytes > 0) else { return false };
        let grew = now.abs_diff(kept.resident_bytes) >= self.huge.bytes() / 2;
        kept.idle_sweeps += 1;
        if !grew && kept.idle_sweeps < IDLE_SWEEPS_MAX {
            return false;
        }
        kept.idle_sweeps = 0;
        let changes = match self.whose {
            Whose::Nobodys => false,
            Whose::OwnAllocators => Allocator::of(pid) != Some(Allocator::Glibc),
            Whose::Everybodys => true,
        };
        kept.resident_bytes = now;
        if !changes && !self.verifies {
            return grew;
        }
        let number = pid.as_raw_nonzero().get() as u32;
        let start = cpu_time();
        let read = pagemap::read_huge(number);
        self.looked += cpu_time() - start;
        let mut map = match read {
            Ok(map) => map,
            Err(PageMapError::NoProcess(_) | PageMapError::NoMemory(_)) => return false,
            Err(error) => {
                self.unseen = Some(error.to_string());
                return false;
            }
        };
        if changes {
            // What failed before is tried again, and counts once.
            kept.outcome.failed_bytes.clear();
            match change::apply_all(&kept.target, &map, &self.advice, self.huge, self.force) {
                Ok(changed) if changed.total_bytes() > 0 => {
                    kept.outcome.add(changed);
                    match pagemap::read_huge(number) {
                        Ok(after) => map = after,
                        Err(PageMapError::NoProcess(_) | PageMapError::NoMemory(_)) => {
                            return false;
                        }
                        Err(_) => {}
                    }
                }
                Ok(changed) => kept.outcome.add(changed),
                Err(refusal) => {
                    self.refused.insert(pid, refusal);
                }
            }
        }
        kept.resident_bytes = resident_bytes(pid).unwrap_or(now);
        if !self.verifies {
            return grew;
        }
        let verdict = judge(&map, &self.advice, &kept.outcome, &self.system);
        let resident = |v: &Verdict| v.parts.iter().map(|part| part.resident_bytes).sum::<u64>();
        let larger =
            kept.verdict.as_ref().is_none_or(|known| resident(&verdict) >= resident(known));
        if larger && !verdict.command.is_empty() {
            kept.verdict = Some(verdict);
        }
        grew
    }

    /// Forgets processes that ended, except for their verdicts: the kernel uses their numbers again.
    fn bury(&mut self) {
        let dead: Vec<Pid> =
            self.kept.iter().filter(|(_, k)| !k.target.is_alive()).map(|(pid, _)| *pid).collect();
        for pid in dead {
            if let Some(kept) = self.kept.remove(&pid)
                && let Some(verdict) = kept.verdict
            {
                self.gone.push((verdict, kept.outcome));
            }
        }
    }
}
