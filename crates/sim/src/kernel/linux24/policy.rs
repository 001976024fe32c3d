//! What the reclaim policies have in common: an allocation, an attempt and its actions.
//!
//! Invariant: a policy decides and moves pages between lists; what that costs, which locks it holds
//! and who waits for it is the kernel's business ([`super::Linux24`]).

use super::aging::{self, Aging};
use super::classzone::{self, Classzone};
use super::memory::{Grant, INACTIVE, Memory, UNLISTED};

/// A function of the kernel, as its profiler names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Function {
    /// Looks for pages of the active list that can be deactivated (2.4.9, -ac).
    RefillInactiveScan,
    /// Cleans inactive pages (2.4.9, -ac).
    PageLaunder,
    /// Looks for pages of the active list that can be deactivated (2.4.13).
    RefillInactive,
    /// Frees inactive pages (2.4.13).
    ShrinkCache,
    /// Takes pages out of page tables.
    SwapOut,
    /// Gives back memory of the kernel's own caches.
    ShrinkSlabs,
}

/// Whether an attempt is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// To be continued.
    Goes,
    /// Its targets are reached, as far as this kernel asks.
    Reached,
    /// They are not.
    Failed,
}

/// One step of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Action {
    /// Which function ran; none when the attempt is over.
    pub function: Option<Function>,
    /// Pages that it looked at.
    pub visits: u64,
    /// Pages that it sent to disk.
    pub written: u64,
    /// Frames that it freed.
    pub freed: u64,
    /// Whether the attempt is over.
    pub outcome: Outcome,
}

impl Action {
    /// A function that ran.
    pub fn of(function: Function) -> Self {
        let outcome = Outcome::Goes;
        Action { function: Some(function), visits: 0, written: 0, freed: 0, outcome }
    }

    /// The end.
    pub fn done(reached: bool) -> Self {
        let outcome = if reached { Outcome::Reached } else { Outcome::Failed };
        Action { function: None, visits: 0, written: 0, freed: 0, outcome }
    }
}

/// What an allocation got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// The frames.
    pub grant: Grant,
    /// Whether memory is so low that the daemon should look after it.
    pub wake_daemon: bool,
    /// Whether the caller must reclaim by itself for the rest.
    pub short: bool,
}

/// A reclaim policy.
#[derive(Debug, Clone)]
pub enum Policy {
    /// By page age.
    Aging(Aging),
    /// By reference bits and zone classes.
    Classzone(Classzone),
}

/// An attempt of either policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// By page age.
    Aging(aging::Attempt),
    /// For a class of zones.
    Classzone(classzone::Attempt),
}

impl Policy {
    /// Frames for `want` pages from `zones`, the first of which names the class.
    pub fn allocate(&mut self, memory: &mut Memory, want: u64, zones: &[usize]) -> Allocation {
        match self {
            Policy::Aging(policy) => policy.allocate(memory, want, zones),
            Policy::Classzone(policy) => policy.allocate(memory, want, zones),
        }
    }

    /// Frames were given back by their owner.
    pub fn freed(&mut self, pages: u64) {
        if let Policy::Aging(policy) = self {
            policy.freed(pages);
        }
    }

    /// What an allocation that found too little does by itself.
    pub fn attempt(&self, zones: &[usize]) -> Attempt {
        match self {
            Policy::Aging(_) => Attempt::Aging(aging::Attempt::default()),
            Policy::Classzone(_) => Attempt::Classzone(classzone::Attempt::new(zones[0])),
        }
    }

    /// What the daemon does when it wakes at `now`; none: nothing.
    pub fn daemon_attempt(&mut self, memory: &Memory, now: u64) -> Option<Attempt> {
        match self {
            Policy::Aging(policy) => {
                policy.tick(now);
                Some(Attempt::Aging(aging::Attempt::default()))
            }
            Policy::Classzone(policy) => policy.daemon_attempt(memory).map(Attempt::Classzone),
        }
    }

    /// The next step of an attempt, with room for so many writes at the disk.
    ///
    /// # Panics
    /// If the attempt is another policy's.
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

    /// Whether the daemon sleeps after its attempt, rather than going on at once.
    pub fn daemon_sleeps(&mut self, attempt: &Attempt, outcome: Outcome, memory: &Memory) -> bool {
        match (self, attempt) {
            (Policy::Aging(policy), _) => policy.sleeps_after(outcome == Outcome::Reached),
            (Policy::Classzone(policy), Attempt::Classzone(attempt)) => {
                policy.sleeps_after(attempt, outcome == Outcome::Reached, memory)
            }
            _ => unreachable!("attempts are made by the policy that ends them"),
        }
    }

    /// The list of new private memory: none before it has a place in swap, or the inactive one.
    pub fn new_memory_list(&self) -> usize {
        match self {
            Policy::Aging(_) => UNLISTED,
            Policy::Classzone(_) => INACTIVE,
        }
    }
}
