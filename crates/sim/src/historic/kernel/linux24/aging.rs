//! Reclaim by page age: Linux 2.4.9, and the -ac kernels with other rules.
//!
//! Pages go active → inactive dirty → inactive clean → free. The targets are sums over all zones
//! plus marks of each zone. So one small zone with unfreeable pages is enough to be "short".
//! The linux-kernel thread of October 2001, "Google's mm problems", describes the policies; no
//! kernel text is used.

use super::groups::Kinds;
use super::memory::{ACTIVE, Grant, INACTIVE, Zone, ZonedMemory};
use super::policy::{Action, Allocation, Function};
use super::runs::ReclaimState;

/// The decay of an unused page's age.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decay {
    /// Each scan halves the age.
    Halve,
    /// Each scan lowers the age by one.
    Linear,
}

/// The rules that differ between the kernels of this family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// The decay of unused pages' ages.
    pub decay: Decay,
    /// Age of a page that becomes active.
    pub age_start: u8,
    /// Increase of a page's age if it was used since the last scan.
    pub age_advance: u8,
    /// Highest age, of the most valuable pages.
    pub age_max: u8,
    /// The share of a zone, in parts per million, above which its inactive pages are plenty.
    pub plenty_ppm: u64,
    /// True if mapped pages may be deactivated.
    pub deactivates_mapped: bool,
    /// The most passes of one attempt.
    pub passes: u32,
    /// True if one call of page_launder scans the whole inactive dirty list until free pages are no
    /// longer short. False if it scans 1/64 of the list.
    pub launders_whole_list: bool,
    /// True if kswapd tolerates a shortage of inactive pages while free pages are plenty in all
    /// zones.
    pub rests_when_plenty: bool,
    /// True if kswapd retries at once when it missed its targets (2.4.9). False if it then sleeps
    /// up to a second (with the patch).
    pub retries_on_failure: bool,
}

/// The scan priority: a scan visits 1/2^6 of a list.
const PRIORITY: u32 = 6;
/// The most pages that one call of page_launder sends to disk.
const WRITES_A_CALL: u64 = 64;
/// Memory pressure decays by 1/64 a second; the inactive target is 1/64 of it.
const PRESSURE_SHIFT: u32 = 6;

/// One attempt to reach the targets: a scan of the active list, then passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgingAttempt {
    pass: u32,
    stage: AgingStage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AgingStage {
    First,
    SwapOut,
    Refill,
    Launder,
    Slabs,
}

impl Default for AgingAttempt {
    fn default() -> Self {
        AgingAttempt { pass: 0, stage: AgingStage::First }
    }
}

/// The state of this family of kernels.
#[derive(Debug, Clone)]
pub struct Aging {
    rules: Rules,
    pressure: u64,
    decayed_at: u64,
}

impl Aging {
    /// Returns the state at boot: no memory pressure.
    pub fn new(rules: Rules) -> Self {
        Aging { rules, pressure: 0, decayed_at: 0 }
    }

    /// Decays memory pressure by 1/64, at most once a second. `now` is in nanoseconds.
    pub fn tick(&mut self, now: u64) {
        if now >= self.decayed_at + 1_000_000_000 {
            self.decayed_at = now;
            self.pressure -= self.pressure >> PRESSURE_SHIFT;
        }
    }

    /// Returns true if kswapd sleeps after an attempt.
    pub fn sleeps_after(&self, success: bool) -> bool {
        success || !self.rules.retries_on_failure
    }

    /// Allocates frames for up to `want` pages from `zones`, without reclaim. Raises memory
    /// pressure by the pages taken.
    pub fn allocate(&mut self, memory: &mut ZonedMemory, want: u64, zones: &[usize]) -> Allocation {
        let mut grant = Grant::default();
        take(memory, want, zones, &mut grant, |zone| {
            (zone.free + 1).saturating_sub(zone.marks.low)
        });
        let over = |zone: &Zone, mark: u64| zone.available().saturating_sub(mark);
        take(memory, want, zones, &mut grant, |zone| over(zone, zone.marks.high));
        take(memory, want, zones, &mut grant, |zone| over(zone, zone.marks.low));
        let wake_daemon = grant.pages() < want;
        take(memory, want, zones, &mut grant, |zone| over(zone, zone.marks.min));
        self.pressure += grant.pages() + grant.reclaimed;
        Allocation { grant, wake_daemon, short: grant.pages() < want }
    }

    /// Lowers memory pressure after an owner freed `pages` frames.
    pub fn freed(&mut self, pages: u64) {
        self.pressure = self.pressure.saturating_sub(pages);
    }

    /// Runs the attempt's next step and returns its action. The caller performs swap-outs and slab
    /// shrinking.
    pub fn advance(
        &mut self,
        attempt: &mut AgingAttempt,
        memory: &mut ZonedMemory,
        room: u64,
    ) -> Action {
        loop {
            let stage = attempt.stage;
            attempt.stage = match stage {
                AgingStage::First | AgingStage::Slabs => AgingStage::SwapOut,
                AgingStage::SwapOut => AgingStage::Refill,
                AgingStage::Refill => AgingStage::Launder,
                AgingStage::Launder => AgingStage::Slabs,
            };
            let inactive_short = self.is_inactive_short(memory);
            match stage {
                AgingStage::First => return self.refill(memory),
                AgingStage::SwapOut if !self.is_short(memory) => return Action::done(true),
                AgingStage::SwapOut if attempt.pass == self.rules.passes => {
                    return Action::done(!(inactive_short && is_free_short(memory)));
                }
                AgingStage::SwapOut => {
                    attempt.pass += 1;
                    if inactive_short {
                        return Action::of(Function::SwapOut);
                    }
                }
                AgingStage::Refill if inactive_short => return self.refill(memory),
                AgingStage::Launder if is_free_short(memory) => return self.launder(memory, room),
                AgingStage::Slabs if self.is_short(memory) => {
                    return Action::of(Function::ShrinkSlabs);
                }
                _ => {}
            }
        }
    }

    fn is_short(&self, memory: &ZonedMemory) -> bool {
        is_free_short(memory)
            || self.is_inactive_short(memory)
                && !(self.rules.rests_when_plenty && memory.zones.iter().all(is_free_or_absent))
    }

    fn is_inactive_short(&self, memory: &ZonedMemory) -> bool {
        let target = (self.pressure >> PRESSURE_SHIFT).min(memory.pages() / 4);
        memory.zones.iter().any(|zone| zone.inactive() < zone.marks.high)
            || memory.total(Zone::inactive) < memory.high + target
    }

    /// Returns the number of pages that may become inactive before the zone has plenty of them.
    fn deactivation_room(&self, zone: &Zone) -> u64 {
        let plenty = zone.size * self.rules.plenty_ppm / 1_000_000;
        (plenty + 1).saturating_sub(zone.inactive())
    }

    /// Scans 1/64 of the active list: ages rise for referenced pages and fall for others. Unmapped
    /// pages of age 0 become inactive, and mapped ones if the rules allow it. All others rotate to
    /// the head.
    fn refill(&mut self, memory: &mut ZonedMemory) -> Action {
        let visits = memory.listed(ACTIVE) >> PRIORITY;
        let mut left = visits;
        let mut unchanged = self.unchanged(memory);
        loop {
            left -= memory.pass(ACTIVE, left, unchanged);
            let (Some(tail), true) = (memory.tail(ACTIVE), left > 0) else { break };
            let page = tail.page;
            let room = self.deactivation_room(&memory.zones[usize::from(page.zone)]);
            let mut count = u64::from(tail.extent.len).min(left);
            let aged = self.aged(page);
            if aged.age == 0 && (!page.mapped || self.rules.deactivates_mapped) {
                count = count.min(room);
                memory.move_tail(tail, count as u32, INACTIVE, aged);
                unchanged = self.unchanged(memory);
            } else {
                memory.move_tail(tail, count as u32, ACTIVE, aged);
            }
            left -= count;
        }
        Action { visits, ..Action::of(Function::RefillInactiveScan) }
    }

    /// Returns the kinds of active pages that a scan leaves unchanged. These are all pages of zones
    /// with plenty of inactive pages, and mapped pages of age 0 that are not referenced.
    fn unchanged(&self, memory: &ZonedMemory) -> Kinds {
        let plenty = memory.zones.each_ref().map(|zone| self.deactivation_room(zone) == 0);
        let stay = if self.rules.deactivates_mapped { Kinds::NONE } else { Kinds::MAPPED };
        Kinds::in_zones(plenty) | (stay & Kinds::SETTLED)
    }

    fn aged(&self, page: ReclaimState) -> ReclaimState {
        let age = if page.referenced {
            (page.age + self.rules.age_advance).min(self.rules.age_max)
        } else {
            match self.rules.decay {
                Decay::Halve => page.age / 2,
                Decay::Linear => page.age.saturating_sub(1),
            }
        };
        ReclaimState { age, referenced: false, ..page }
    }

    /// Scans the inactive dirty list. Pages in use return to the active list. Dirty pages go to
    /// disk while it has `room`. Clean pages move to the inactive clean list.
    fn launder(&mut self, memory: &mut ZonedMemory, room: u64) -> Action {
        let all = memory.listed(INACTIVE);
        let visits = if self.rules.launders_whole_list { all } else { all >> PRIORITY };
        let (mut left, mut writes_left) = (visits, room.min(WRITES_A_CALL));
        loop {
            left -= memory.pass(INACTIVE, left, without_need(memory, writes_left));
            let (Some(tail), true) = (memory.tail(INACTIVE), left > 0) else { break };
            if self.rules.launders_whole_list && !is_free_short(memory) {
                break;
            }
            let (page, mut count) = (tail.page, u64::from(tail.extent.len).min(left));
            let zone = &memory.zones[usize::from(page.zone)];
            if page.referenced || page.mapped {
                let age = page.age.max(self.rules.age_start);
                let active = ReclaimState { age, referenced: false, ..page };
                memory.move_tail(tail, count as u32, ACTIVE, active);
            } else if zone.is_free_plenty() || (page.dirty && writes_left == 0) {
                memory.rotate(INACTIVE, count as u32);
            } else if page.dirty {
                count = count.min(writes_left);
                writes_left -= count;
                memory.move_tail(
                    tail,
                    count as u32,
                    INACTIVE,
                    ReclaimState { dirty: false, ..page },
                );
            } else {
                count = count.min((2 * zone.marks.high + 1).saturating_sub(zone.available()));
                memory.move_tail(tail, count as u32, ZonedMemory::clean_list(page.zone), page);
            }
            left -= count;
        }
        let written = room.min(WRITES_A_CALL) - writes_left;
        Action { visits: visits - left, written, ..Action::of(Function::PageLaunder) }
    }
}

/// Returns the kinds of unused inactive pages that page_launder skips. These are pages of zones
/// with plenty of free pages, and dirty pages if the disk is busy.
fn without_need(memory: &ZonedMemory, writes_left: u64) -> Kinds {
    let plenty = Kinds::in_zones(memory.zones.each_ref().map(Zone::is_free_plenty));
    let busy = if writes_left == 0 { Kinds::DIRTY } else { Kinds::NONE };
    Kinds::SETTLED & !Kinds::MAPPED & (plenty | busy)
}

fn is_free_or_absent(zone: &Zone) -> bool {
    zone.size == 0 || zone.is_free_plenty()
}

fn is_free_short(memory: &ZonedMemory) -> bool {
    memory.zones.iter().any(|zone| zone.available() < zone.marks.low)
        || memory.total(Zone::available) < memory.high
}

/// Takes up to `want` pages, zone by zone, from zones where `spare` returns more than 0. A zone is
/// asked once per request. So a request overruns a mark by less than its own pages.
fn take(
    memory: &mut ZonedMemory,
    want: u64,
    zones: &[usize],
    grant: &mut Grant,
    spare: impl Fn(&Zone) -> u64,
) {
    for index in zones {
        let zone = &memory.zones[*index];
        let count = zone.available().saturating_sub(zone.marks.min / 2).min(want - grant.pages());
        if spare(zone) > 0 && count > 0 {
            memory.grant(*index, count, grant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::Layout;
    use super::super::policy::ReclaimStep;
    use super::super::runs::{Extent, ObjectId};
    use super::*;

    const RULES: Rules = Rules {
        decay: Decay::Halve,
        age_start: 2,
        age_advance: 3,
        age_max: 64,
        plenty_ppm: 333_333,
        deactivates_mapped: false,
        passes: 64,
        launders_whole_list: false,
        rests_when_plenty: false,
        retries_on_failure: true,
    };

    /// Returns 2 GB of memory that one file on `list` fills down to the min marks.
    fn full(list: usize, page: ReclaimState) -> ZonedMemory {
        let layout = Layout { pages: 524_288, reserved_dma: 1000, reserved_normal: 12_000 };
        let mut memory = ZonedMemory::new(layout);
        let mut first = 0;
        for zone in 0..3 {
            let mut grant = Grant::default();
            let count = memory.zones[zone].free - memory.zones[zone].marks.min;
            memory.grant(zone, count, &mut grant);
            let extent = Extent { object: ObjectId(0), first, len: count as u32 };
            memory.place(&mut grant, extent, list, page);
            first += count as u32;
        }
        memory
    }

    /// Runs an attempt to its end. Returns the outcome and the number of pages visited.
    fn attempt(policy: &mut Aging, memory: &mut ZonedMemory) -> (ReclaimStep, u64) {
        let (mut attempt, mut visits) = (AgingAttempt::default(), 0);
        loop {
            let action = policy.advance(&mut attempt, memory, 64);
            visits += action.visits;
            if action.outcome != ReclaimStep::Goes {
                return (action.outcome, visits);
            }
        }
    }

    #[test]
    fn pages_that_nobody_uses_are_freed_in_a_few_passes() {
        let mut memory = full(INACTIVE, ReclaimState::default());
        let (outcome, visits) = attempt(&mut Aging::new(RULES), &mut memory);
        assert_eq!(outcome, ReclaimStep::Reached);
        assert!(visits < 524_288 && memory.total(Zone::available) >= memory.high);
    }

    #[test]
    fn locked_pages_cost_a_lap_of_the_active_list_for_nothing() {
        let locked = ReclaimState { mapped: true, touched: true, ..ReclaimState::default() };
        let mut memory = full(ACTIVE, locked);
        let before = memory.total(Zone::available);
        let (outcome, visits) = attempt(&mut Aging::new(RULES), &mut memory);
        assert_eq!((outcome, memory.total(Zone::available)), (ReclaimStep::Failed, before));
        let lap = memory.listed(ACTIVE);
        assert!((lap - lap / 64..=lap + lap / 32).contains(&visits), "{visits} of {lap}");
    }

    #[test]
    fn mapped_inactive_pages_become_active_and_ages_fall() {
        let locked = ReclaimState { mapped: true, touched: true, ..ReclaimState::default() };
        let mut memory = full(INACTIVE, locked);
        let mut policy = Aging::new(RULES);
        attempt(&mut policy, &mut memory);
        assert_eq!(memory.listed(INACTIVE) + memory.listed(ACTIVE), 524_288 - 13_000 - 638);
        assert!(memory.listed(ACTIVE) > memory.listed(INACTIVE));
        assert_eq!(policy.aged(ReclaimState { age: 5, ..locked }).age, 2);
        assert_eq!(policy.aged(ReclaimState { age: 63, referenced: true, ..locked }).age, 64);
    }
}
