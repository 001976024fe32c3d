//! The interface of the reclaim policies: allocations, attempts and their actions.
//!
//! Invariant: a policy makes decisions and moves pages between lists. Costs, locks and waiting are
//! up to the kernel ([`super::Linux24`]).

use super::aging::{self, Aging};
use super::classzone::{self, Classzone};
use super::memory::{Grant, INACTIVE, UNLISTED, ZonedMemory};

/// A function of the kernel, as its profiler names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Function {
    /// The scan of the active list for pages to deactivate (2.4.9, -ac).
    RefillInactiveScan,
    /// The scan that cleans inactive pages (2.4.9, -ac).
    PageLaunder,
    /// The scan of the active list for pages to deactivate (2.4.13).
    RefillInactive,
    /// The scan that frees inactive pages (2.4.13).
    ShrinkCache,
    /// The walk that unmaps pages from page tables.
    SwapOut,
    /// The reclaim of memory from the kernel's own caches.
    ShrinkSlabs,
}

/// The state of an attempt after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReclaimStep {
    /// The attempt needs further steps.
    Goes,
    /// The attempt has reached its targets, as far as this kernel requires them.
    Reached,
    /// The attempt has ended without reaching its targets.
    Failed,
}

/// One step of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Action {
    /// The function that ran, or None if the attempt is over.
    pub function: Option<Function>,
    /// Pages that the function visited.
    pub visits: u64,
    /// Pages that the function sent to disk.
    pub written: u64,
    /// Frames that the function freed.
    pub freed: u64,
    /// The state of the attempt after this step.
    pub outcome: ReclaimStep,
}

impl Action {
    /// Returns the action of a function that ran; the attempt continues.
    pub fn of(function: Function) -> Self {
        let outcome = ReclaimStep::Goes;
        Action { function: Some(function), visits: 0, written: 0, freed: 0, outcome }
    }

    /// Returns the action that ends an attempt.
    pub fn done(reached: bool) -> Self {
        let outcome = if reached { ReclaimStep::Reached } else { ReclaimStep::Failed };
        Action { function: None, visits: 0, written: 0, freed: 0, outcome }
    }
}

/// The result of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// The frames that were allocated.
    pub grant: Grant,
    /// True if memory is so low that kswapd should run.
    pub wake_daemon: bool,
    /// True if the caller got fewer frames than it asked for and must reclaim directly.
    pub short: bool,
}

/// A reclaim policy.
#[derive(Debug, Clone)]
pub enum ReclaimPolicy {
    /// Reclaim by page age (2.4.9, -ac).
    Aging(Aging),
    /// Reclaim by reference bits and zone classes (2.4.13).
    Classzone(Classzone),
}

/// An attempt of either policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReclaimAttempt {
    /// An attempt of the policy with page ages.
    Aging(aging::AgingAttempt),
    /// An attempt for a class of zones.
    Classzone(classzone::ClasszoneAttempt),
}

impl ReclaimPolicy {
    /// Allocates frames for up to `want` pages from `zones`; the first zone names the class.
    pub fn allocate(&mut self, memory: &mut ZonedMemory, want: u64, zones: &[usize]) -> Allocation {
        match self {
            ReclaimPolicy::Aging(policy) => policy.allocate(memory, want, zones),
            ReclaimPolicy::Classzone(policy) => policy.allocate(memory, want, zones),
        }
    }

    /// Notes that an owner freed `pages` frames.
    pub fn freed(&mut self, pages: u64) {
        if let ReclaimPolicy::Aging(policy) = self {
            policy.freed(pages);
        }
    }

    /// Returns an attempt at direct reclaim for `zones`.
    pub fn attempt(&self, zones: &[usize]) -> ReclaimAttempt {
        match self {
            ReclaimPolicy::Aging(_) => ReclaimAttempt::Aging(aging::AgingAttempt::default()),
            ReclaimPolicy::Classzone(_) => {
                ReclaimAttempt::Classzone(classzone::ClasszoneAttempt::new(zones[0]))
            }
        }
    }

    /// Returns kswapd's attempt when it wakes at `now`, or None if there is nothing to do.
    pub fn daemon_attempt(&mut self, memory: &ZonedMemory, now: u64) -> Option<ReclaimAttempt> {
        match self {
            ReclaimPolicy::Aging(policy) => {
                policy.tick(now);
                Some(ReclaimAttempt::Aging(aging::AgingAttempt::default()))
            }
            ReclaimPolicy::Classzone(policy) => {
                policy.daemon_attempt(memory).map(ReclaimAttempt::Classzone)
            }
        }
    }

    /// Runs the next step of an attempt. `room` is the number of pages that the disk's queue can
    /// take.
    ///
    /// # Panics
    /// Panics if the attempt is another policy's.
    pub fn advance(
        &mut self,
        attempt: &mut ReclaimAttempt,
        memory: &mut ZonedMemory,
        room: u64,
    ) -> Action {
        match (self, attempt) {
            (ReclaimPolicy::Aging(policy), ReclaimAttempt::Aging(attempt)) => {
                policy.advance(attempt, memory, room)
            }
            (ReclaimPolicy::Classzone(policy), ReclaimAttempt::Classzone(attempt)) => {
                policy.advance(attempt, memory, room)
            }
            _ => unreachable!("attempts are made by the policy that advances them"),
        }
    }

    /// Returns true if kswapd sleeps after its attempt, rather than continue at once.
    pub fn daemon_sleeps(
        &mut self,
        attempt: &ReclaimAttempt,
        outcome: ReclaimStep,
        memory: &ZonedMemory,
    ) -> bool {
        match (self, attempt) {
            (ReclaimPolicy::Aging(policy), _) => {
                policy.sleeps_after(outcome == ReclaimStep::Reached)
            }
            (ReclaimPolicy::Classzone(policy), ReclaimAttempt::Classzone(attempt)) => {
                policy.sleeps_after(attempt, outcome == ReclaimStep::Reached, memory)
            }
            _ => unreachable!("attempts are made by the policy that ends them"),
        }
    }

    /// Returns the list of new private memory. With page ages, it is on no kernel list until it has
    /// a place in swap.
    pub fn new_memory_list(&self) -> usize {
        match self {
            ReclaimPolicy::Aging(_) => UNLISTED,
            ReclaimPolicy::Classzone(_) => INACTIVE,
        }
    }
}
