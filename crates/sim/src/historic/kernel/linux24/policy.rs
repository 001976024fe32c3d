//! The interface of the reclaim policies: allocations, attempts and their actions.
//!
//! Invariant: a policy makes decisions and moves pages between lists. Costs, locks and waiting are
//! up to the kernel ([`super::Linux24`]).

use super::aging::{self, Aging};
use super::classzone::{self, Classzone};
use super::memory::{Grant, INACTIVE, Memory, UNLISTED};

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
pub enum Outcome {
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
    pub outcome: Outcome,
}

impl Action {
    /// Returns the action of a function that ran; the attempt continues.
    pub fn of(function: Function) -> Self {
        let outcome = Outcome::Goes;
        Action { function: Some(function), visits: 0, written: 0, freed: 0, outcome }
    }

    /// Returns the action that ends an attempt.
    pub fn done(reached: bool) -> Self {
        let outcome = if reached { Outcome::Reached } else { Outcome::Failed };
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
pub enum Policy {
    /// Reclaim by page age (2.4.9, -ac).
    Aging(Aging),
    /// Reclaim by reference bits and zone classes (2.4.13).
    Classzone(Classzone),
}

/// An attempt of either policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// An attempt of the policy with page ages.
    Aging(aging::Attempt),
    /// An attempt for a class of zones.
    Classzone(classzone::Attempt),
}

impl Policy {
    /// Allocates frames for up to `want` pages from `zones`; the first zone names the class.
    pub fn allocate(&mut self, memory: &mut Memory, want: u64, zones: &[usize]) -> Allocation {
        match self {
            Policy::Aging(policy) => policy.allocate(memory, want, zones),
            Policy::Classzone(policy) => policy.allocate(memory, want, zones),
        }
    }

    /// Notes that an owner freed `pages` frames.
    pub fn freed(&mut self, pages: u64) {
        if let Policy::Aging(policy) = self {
            policy.freed(pages);
        }
    }

    /// Returns an attempt at direct reclaim for `zones`.
    pub fn attempt(&self, zones: &[usize]) -> Attempt {
        match self {
            Policy::Aging(_) => Attempt::Aging(aging::Attempt::default()),
            Policy::Classzone(_) => Attempt::Classzone(classzone::Attempt::new(zones[0])),
        }
    }

    /// Returns kswapd's attempt when it wakes at `now`, or None if there is nothing to do.
    pub fn daemon_attempt(&mut self, memory: &Memory, now: u64) -> Option<Attempt> {
        match self {
            Policy::Aging(policy) => {
                policy.tick(now);
                Some(Attempt::Aging(aging::Attempt::default()))
            }
            Policy::Classzone(policy) => policy.daemon_attempt(memory).map(Attempt::Classzone),
        }
    }

    /// Runs the next step of an attempt. `room` is the number of pages that the disk's queue can
    /// take.
    ///
    /// # Panics
    /// Panics if the attempt is another policy's.
    pub fn advance(&mut self, attempt: &mut Attempt, memory: &mut Memory, room: u64) -> Action {
        match (self, attempt) {
            (Policy::Aging(policy), Attempt::Aging(attempt)) => {
                policy.advance(attempt, memory, room)
            }
            (Policy::Classzone(policy), Attempt::Classzone(attempt)) => {
                policy.advance(attempt, memory, room)
            }
            _ => unreachable!("attempts are made by the policy that advances them"),
        }
    }

    /// Returns true if kswapd sleeps after its attempt, rather than continue at once.
    pub fn daemon_sleeps(&mut self, attempt: &Attempt, outcome: Outcome, memory: &Memory) -> bool {
        match (self, attempt) {
            (Policy::Aging(policy), _) => policy.sleeps_after(outcome == Outcome::Reached),
            (Policy::Classzone(policy), Attempt::Classzone(attempt)) => {
                policy.sleeps_after(attempt, outcome == Outcome::Reached, memory)
            }
            _ => unreachable!("attempts are made by the policy that ends them"),
        }
    }

    /// Returns the list of new private memory. With page ages, it is on no kernel list until it has
    /// a place in swap.
    pub fn new_memory_list(&self) -> usize {
        match self {
            Policy::Aging(_) => UNLISTED,
            Policy::Classzone(_) => INACTIVE,
        }
    }
}
