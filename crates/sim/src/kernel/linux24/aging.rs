//! Reclaim by page age: Linux 2.4.9, and the -ac kernels with other rules.
//!
//! Pages go active → inactive dirty → inactive clean → free. Targets are sums over all zones and
//! marks of each zone, so one small zone whose pages cannot be freed is enough to be "short".
//! The policies are described in the 2001 thread "Google's mm problems"; no kernel text is used.

use super::memory::{ACTIVE, Grant, INACTIVE, Memory, Zone};
use super::policy::{Action, Allocation, Function};
use super::runs::Page;

/// How an unused page's age falls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decay {
    /// To half.
    Halve,
    /// By one.
    Linear,
}

/// What differs between the kernels of this family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Of ages.
    pub decay: Decay,
    /// Age of a page that becomes active.
    pub age_start: u8,
    /// Added to a page's age when it was used.
    pub age_advance: u8,
    /// Most valuable.
    pub age_max: u8,
    /// A zone has plenty of inactive pages above this share of it, in parts per million.
    pub plenty_ppm: u64,
    /// Whether pages in page tables may be deactivated.
    pub deactivates_mapped: bool,
    /// Whether one call looks at all of the inactive dirty list rather than at 1/64.
    pub launders_whole_list: bool,
    /// Whether the daemon is content with inactive pages being short while free ones are plenty.
    pub rests_when_plenty: bool,
    /// Whether the daemon goes on at once when it has failed to reach its targets (2.4.9) or sleeps
    /// up to a second in any case (with the patch).
    pub retries_on_failure: bool,
}

/// A scan looks at 1/2^6 of a list, and an attempt makes 2^6 passes.
const PRIORITY: u32 = 6;
/// Passes of one attempt.
const PASSES: u32 = 1 << PRIORITY;
/// The most pages that one call of the launderer sends to disk.
const WRITES_A_CALL: u64 = 64;
/// Memory pressure is forgotten by 1/64 a second; the target is 1/64 of it.
const PRESSURE_SHIFT: u32 = 6;

/// One attempt to reach the targets: a scan of the active list, then up to 64 passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempt {
    pass: u32,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    First,
    SwapOut,
    Refill,
    Launder,
    Slabs,
}

impl Default for Attempt {
    fn default() -> Self {
        Attempt { pass: 0, stage: Stage::First }
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
    /// At boot.
    pub fn new(rules: Rules) -> Self {
        Aging { rules, pressure: 0, decayed_at: 0 }
    }

    /// Once a second the daemon forgets a part of the pressure.
    pub fn tick(&mut self, now: u64) {
        if now >= self.decayed_at + 1_000_000_000 {
            self.decayed_at = now;
            self.pressure -= self.pressure >> PRESSURE_SHIFT;
        }
    }

    /// What the daemon does after an attempt.
    pub fn sleeps_after(&self, success: bool) -> bool {
        success || !self.rules.retries_on_failure
    }

    /// Frames for `want` pages from `zones`, as many as are to be had without reclaim.
    pub fn allocate(&mut self, memory: &mut Memory, want: u64, zones: &[usize]) -> Allocation {
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

    /// Frames were given back by their owner.
    pub fn freed(&mut self, pages: u64) {
        self.pressure = self.pressure.saturating_sub(pages);
    }

    /// The next thing that `attempt` does. Swapping out is left to the caller.
    pub fn advance(&mut self, attempt: &mut Attempt, memory: &mut Memory, room: u64) -> Action {
        loop {
            let stage = attempt.stage;
            attempt.stage = match stage {
                Stage::First | Stage::Slabs => Stage::SwapOut,
                Stage::SwapOut => Stage::Refill,
                Stage::Refill => Stage::Launder,
                Stage::Launder => Stage::Slabs,
            };
            let inactive_short = self.is_inactive_short(memory);
            match stage {
                Stage::First => return self.refill(memory),
                Stage::SwapOut if !self.is_short(memory) => return Action::done(true),
                Stage::SwapOut if attempt.pass == PASSES => {
                    return Action::done(!(inactive_short && is_free_short(memory)));
                }
                Stage::SwapOut => {
                    attempt.pass += 1;
                    if inactive_short {
                        return Action::of(Function::SwapOut);
                    }
                }
                Stage::Refill if inactive_short => return self.refill(memory),
                Stage::Launder if is_free_short(memory) => return self.launder(memory, room),
                Stage::Slabs if self.is_short(memory) => return Action::of(Function::ShrinkSlabs),
                _ => {}
            }
        }
    }

    fn is_short(&self, memory: &Memory) -> bool {
        is_free_short(memory)
            || self.is_inactive_short(memory)
                && !(self.rules.rests_when_plenty && memory.zones.iter().all(is_free_or_absent))
    }

    fn is_inactive_short(&self, memory: &Memory) -> bool {
        let target = (self.pressure >> PRESSURE_SHIFT).min(memory.pages() / 4);
        memory.zones.iter().any(|zone| zone.inactive() < zone.marks.high)
            || memory.total(Zone::inactive) < memory.high + target
    }

    /// Pages that may become inactive before the zone has plenty of them; none when it has.
    fn deactivation_room(&self, zone: &Zone) -> u64 {
        let plenty = zone.size * self.rules.plenty_ppm / 1_000_000;
        (plenty + 1).saturating_sub(zone.inactive())
    }

    /// Looks at 1/64 of the active list: used pages grow older, unused ones younger; those of age 0
    /// that nobody has mapped become inactive, all others go round.
    fn refill(&mut self, memory: &mut Memory) -> Action {
        let visits = memory.listed(ACTIVE) >> PRIORITY;
        let mut left = visits;
        while let (Some(tail), true) = (memory.tail(ACTIVE), left > 0) {
            let page = tail.page;
            let room = self.deactivation_room(&memory.zones[usize::from(page.zone)]);
            let mut count = u64::from(tail.extent.len).min(left);
            let aged = self.aged(page);
            if room == 0 || (aged == page && (page.mapped && !self.rules.deactivates_mapped)) {
                memory.rotate(ACTIVE, count as u32);
            } else if aged.age == 0 && (!page.mapped || self.rules.deactivates_mapped) {
                count = count.min(room);
                memory.move_tail(tail, count as u32, INACTIVE, aged);
            } else {
                memory.move_tail(tail, count as u32, ACTIVE, aged);
            }
            left -= count;
        }
        Action { visits, ..Action::of(Function::RefillInactiveScan) }
    }

    fn aged(&self, page: Page) -> Page {
        let age = if page.referenced {
            (page.age + self.rules.age_advance).min(self.rules.age_max)
        } else {
            match self.rules.decay {
                Decay::Halve => page.age / 2,
                Decay::Linear => page.age.saturating_sub(1),
            }
        };
        Page { age, referenced: false, ..page }
    }

    /// Looks at the inactive dirty list: pages in use go back to the active list, dirty ones to disk
    /// while it has `room`, clean ones to the list of those that can be reused at once.
    fn launder(&mut self, memory: &mut Memory, room: u64) -> Action {
        let all = memory.listed(INACTIVE);
        let visits = if self.rules.launders_whole_list { all } else { all >> PRIORITY };
        let (mut left, mut writes_left) = (visits, room.min(WRITES_A_CALL));
        while let (Some(tail), true) = (memory.tail(INACTIVE), left > 0) {
            let (page, mut count) = (tail.page, u64::from(tail.extent.len).min(left));
            let zone = &memory.zones[usize::from(page.zone)];
            if page.referenced || page.mapped {
                let age = page.age.max(self.rules.age_start);
                let active = Page { age, referenced: false, ..page };
                memory.move_tail(tail, count as u32, ACTIVE, active);
            } else if zone.is_free_plenty() || (page.dirty && writes_left == 0) {
                memory.rotate(INACTIVE, count as u32);
            } else if page.dirty {
                count = count.min(writes_left);
                writes_left -= count;
                memory.move_tail(tail, count as u32, INACTIVE, Page { dirty: false, ..page });
            } else {
                count = count.min((2 * zone.marks.high + 1).saturating_sub(zone.available()));
                memory.move_tail(tail, count as u32, Memory::clean_list(page.zone), page);
            }
            left -= count;
        }
        let written = room.min(WRITES_A_CALL) - writes_left;
        Action { visits, written, ..Action::of(Function::PageLaunder) }
    }
}

fn is_free_or_absent(zone: &Zone) -> bool {
    zone.size == 0 || zone.is_free_plenty()
}

fn is_free_short(memory: &Memory) -> bool {
    memory.zones.iter().any(|zone| zone.available() < zone.marks.low)
        || memory.total(Zone::available) < memory.high
}

/// Takes what `spare` says of each zone, in order, until `want` pages are granted.
fn take(
    memory: &mut Memory,
    want: u64,
    zones: &[usize],
    grant: &mut Grant,
    spare: impl Fn(&Zone) -> u64,
) {
    for zone in zones {
        let missing = want - grant.pages();
        let count = spare(&memory.zones[*zone]).min(missing);
        if count > 0 {
            memory.grant(*zone, count, grant);
        }
    }
}
