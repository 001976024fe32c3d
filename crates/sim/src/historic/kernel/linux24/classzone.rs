//! Reclaim by reference bits and classes of zones: Linux 2.4.13.
//!
//! All memory has two lists. An allocation has a class: a zone and all zones below. A scan passes
//! pages of other zones and mapped pages to the head, so a scan for a small class rotates the whole
//! list. After too many mapped pages, reclaim starts to swap out; locked pages stay mapped.
//! The linux-kernel thread of October 2001, "Google's mm problems", describes the policy; no kernel
//! text is used.

use super::memory::{ACTIVE, Grant, INACTIVE, Zone, ZonedMemory};
use super::policy::{Action, Allocation, Function};
use super::runs::ReclaimState;

/// The first scan priority of an attempt; the last is 1.
const PRIORITY: u64 = 6;
/// The number of pages that an attempt tries to free.
const GOAL: u64 = 32;
/// The number of mapped pages that a scan may meet for each page that it tries to free.
const MAPPED_A_GOAL: u64 = 10;

/// One attempt to free [`GOAL`] pages of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClasszoneAttempt {
    class: usize,
    priority: u64,
    goal: u64,
    stage: ClasszoneStage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClasszoneStage {
    Slabs,
    Refill,
    Shrink,
    SwapOut,
}

impl ClasszoneAttempt {
    /// Returns an attempt for the zones up to `class`.
    pub fn new(class: usize) -> Self {
        ClasszoneAttempt { class, priority: PRIORITY, goal: GOAL, stage: ClasszoneStage::Slabs }
    }
}

/// The zones that need background reclaim.
#[derive(Debug, Clone, Default)]
pub struct Classzone {
    needs_balance: [bool; 3],
}

impl Classzone {
    /// Allocates frames for up to `want` pages from `zones`, without reclaim. Each zone also keeps
    /// the marks of those before it in reserve.
    pub fn allocate(&mut self, memory: &mut ZonedMemory, want: u64, zones: &[usize]) -> Allocation {
        let mut grant = Grant::default();
        take(memory, want, zones, &mut grant, |zone| zone.marks.low);
        let wake_daemon = grant.pages() < want;
        if wake_daemon {
            self.needs_balance[zones[0]] = true;
            take(memory, want, zones, &mut grant, |zone| zone.marks.min);
        }
        Allocation { grant, wake_daemon, short: grant.pages() < want }
    }

    /// Returns an attempt for the highest zone that an allocation found low, or None if no zone is.
    pub fn daemon_attempt(&self, memory: &ZonedMemory) -> Option<ClasszoneAttempt> {
        let needy = (0..memory.zones.len()).rev().find(|zone| self.needs_balance[*zone]);
        needy.map(ClasszoneAttempt::new)
    }

    /// Returns true if kswapd sleeps after an attempt. A balanced zone needs no more attempts. A
    /// failed attempt is the zone's last until kswapd wakes again.
    pub fn sleeps_after(
        &mut self,
        attempt: &ClasszoneAttempt,
        reached: bool,
        memory: &ZonedMemory,
    ) -> bool {
        let balanced = memory.zones[..=attempt.class].iter().any(|z| z.free > z.marks.high);
        if !reached || balanced {
            self.needs_balance[attempt.class] = false;
        }
        !reached || !self.needs_balance.contains(&true)
    }

    /// Runs the attempt's next step and returns its action. The caller performs swap-outs and slab
    /// shrinking.
    pub fn advance(
        &mut self,
        attempt: &mut ClasszoneAttempt,
        memory: &mut ZonedMemory,
        room: u64,
    ) -> Action {
        if attempt.goal == 0 {
            return Action::done(true);
        }
        if attempt.priority == 0 {
            return Action::done(false);
        }
        match attempt.stage {
            ClasszoneStage::Slabs => {
                attempt.stage = ClasszoneStage::Refill;
                Action::of(Function::ShrinkSlabs)
            }
            ClasszoneStage::Refill => {
                attempt.stage = ClasszoneStage::Shrink;
                refill(memory, attempt.goal)
            }
            ClasszoneStage::Shrink => shrink(attempt, memory, room),
            ClasszoneStage::SwapOut => {
                attempt.stage = ClasszoneStage::Slabs;
                attempt.priority -= 1;
                Action::of(Function::SwapOut)
            }
        }
    }
}

/// Moves unreferenced pages from the active to the inactive list, in proportion to the lengths of
/// both.
fn refill(memory: &mut ZonedMemory, goal: u64) -> Action {
    let (active, inactive) = (memory.listed(ACTIVE), memory.listed(INACTIVE));
    let mut wanted = goal * active / ((inactive + 1) * 2);
    let (mut left, mut visits) = (active, 0);
    while let (Some(tail), true) = (memory.tail(ACTIVE), wanted > 0 && left > 0) {
        let page = ReclaimState { referenced: false, ..tail.page };
        let mut count = u64::from(tail.extent.len).min(left);
        if tail.page.referenced {
            memory.move_tail(tail, count as u32, ACTIVE, page);
        } else {
            count = count.min(wanted);
            wanted -= count;
            memory.move_tail(tail, count as u32, INACTIVE, page);
        }
        left -= count;
        visits += count;
    }
    Action { visits, ..Action::of(Function::RefillInactive) }
}

/// Frees pages of the class from the tail of the inactive list. After too many mapped pages it
/// stops, and the next step is a swap-out.
fn shrink(attempt: &mut ClasszoneAttempt, memory: &mut ZonedMemory, room: u64) -> Action {
    let most = memory.listed(INACTIVE) / attempt.priority;
    let (mut left, mut mapped_left, mut writes_left) = (most, attempt.goal * MAPPED_A_GOAL, room);
    let before = attempt.goal;
    while let (Some(tail), true) = (memory.tail(INACTIVE), attempt.goal > 0 && left > 0) {
        let (page, mut count) = (tail.page, u64::from(tail.extent.len).min(left));
        if usize::from(page.zone) > attempt.class || (page.dirty && writes_left == 0) {
            memory.rotate(INACTIVE, count as u32);
        } else if page.mapped {
            count = count.min(mapped_left);
            mapped_left -= count;
            memory.rotate(INACTIVE, count as u32);
        } else if page.dirty {
            count = count.min(writes_left);
            writes_left -= count;
            memory.move_tail(tail, count as u32, INACTIVE, ReclaimState { dirty: false, ..page });
        } else {
            count = count.min(attempt.goal);
            attempt.goal -= count;
            memory.release_tail(tail, count as u32);
        }
        left -= count;
        if mapped_left == 0 {
            break;
        }
    }
    attempt.stage = if mapped_left == 0 { ClasszoneStage::SwapOut } else { ClasszoneStage::Slabs };
    attempt.priority -= u64::from(mapped_left > 0);
    Action {
        visits: most - left,
        written: room - writes_left,
        freed: before - attempt.goal,
        ..Action::of(Function::ShrinkCache)
    }
}

/// Takes free frames of each zone above the sum of its `mark` and those of all zones before it.
fn take(
    memory: &mut ZonedMemory,
    want: u64,
    zones: &[usize],
    grant: &mut Grant,
    mark: impl Fn(&Zone) -> u64,
) {
    let mut reserve = 1;
    for index in zones {
        let zone = &memory.zones[*index];
        reserve += mark(zone);
        let count = zone.free.saturating_sub(reserve).min(want - grant.pages());
        memory.grant(*index, count, grant);
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::Layout;
    use super::super::policy::ReclaimStep;
    use super::super::runs::{Extent, ObjectId};
    use super::*;

    /// Returns 2 GB of memory with `count` pages like `tail` at the tail of the inactive list, then
    /// unused ones.
    fn memory(tail: ReclaimState, count: u64) -> ZonedMemory {
        let layout = Layout { pages: 524_288, reserved_dma: 1000, reserved_normal: 12_000 };
        let mut memory = ZonedMemory::new(layout);
        for (object, page, count) in [(0, tail, count), (1, ReclaimState::default(), 50_000)] {
            let mut grant = Grant::default();
            memory.grant(2, count, &mut grant);
            let extent = Extent { object: ObjectId(object), first: 0, len: count as u32 };
            memory.place(&mut grant, extent, INACTIVE, page);
        }
        memory
    }

    fn attempt(class: usize, memory: &mut ZonedMemory) -> ReclaimStep {
        let (mut policy, mut attempt) = (Classzone::default(), ClasszoneAttempt::new(class));
        loop {
            let action = policy.advance(&mut attempt, memory, 64);
            if action.outcome != ReclaimStep::Goes {
                return action.outcome;
            }
        }
    }

    #[test]
    fn unused_pages_at_the_tail_are_freed() {
        let mut memory = memory(ReclaimState::default(), 100_000);
        let free = memory.zones[2].free;
        assert_eq!(attempt(2, &mut memory), ReclaimStep::Reached);
        assert_eq!(memory.zones[2].free, free + GOAL);
    }

    #[test]
    fn locked_pages_at_the_tail_stop_it_though_others_could_be_freed() {
        let locked = ReclaimState { mapped: true, touched: true, ..ReclaimState::default() };
        let mut memory = memory(locked, 100_000);
        let free = memory.zones[2].free;
        assert_eq!(attempt(2, &mut memory), ReclaimStep::Failed);
        assert_eq!(memory.zones[2].free, free);
        let turned = PRIORITY * GOAL * MAPPED_A_GOAL;
        assert_eq!(memory.tail(INACTIVE).unwrap().extent.first as u64, turned);
    }

    #[test]
    fn a_scan_for_a_lower_class_turns_the_list_around() {
        let mut memory = memory(ReclaimState::default(), 100_000);
        assert_eq!(attempt(1, &mut memory), ReclaimStep::Failed);
        assert_ne!(memory.tail(INACTIVE).unwrap().extent.first, 0);
    }
}
