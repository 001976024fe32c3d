//! The one check of a plan's validity: what every machine refuses, before anything runs.
//!
//! Invariant: the check reads the plan alone, so a plan is valid on every machine or on none. What one
//! machine cannot do is not checked here: [`crate::machine::Machine::limits`] says that.

use super::contents::{Contents, Footprint};
use super::{
    Access, Advice, Backing, ClientKind, Op, Pattern, Phase, Plan, Region, RegionId, Touch,
};
use crate::units::Bytes;

/// The least memory that a region of network memory may keep resident: its pager needs that much.
pub const REMOTE_RESIDENT_BYTES_MIN: u64 = 128 << 10;

/// The part of a plan that has a mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The whole plan.
    Plan,
    /// A region.
    Region(RegionId),
    /// A phase, by its index.
    Phase(usize),
    /// An operation, by the indices of its phase and of the operation in it.
    Operation(usize, usize),
}

/// The reason why no machine can run a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}\n  hint: {remedy}")]
pub struct Mistake {
    /// The part that has the mistake.
    pub part: Part,
    /// The mistake, with the offending value.
    pub what: String,
    /// The change that would help.
    pub remedy: String,
}

type Checked = Result<(), Mistake>;

fn mistake(part: Part, what: impl Into<String>, remedy: impl Into<String>) -> Checked {
    Err(Mistake { part, what: what.into(), remedy: remedy.into() })
}

impl Plan {
    /// Checks that the plan means the same on every machine, and that every machine can do it.
    ///
    /// # Errors
    /// Returns the first mistake.
    pub fn check(&self) -> Checked {
        self.check_hook()?;
        if self.measure.interval.is_some_and(|interval| interval.0 == 0) {
            let what = "the interval of the series is 0";
            return mistake(Part::Plan, what, "give one above 0, such as interval = \"100ms\"");
        }
        for index in 0..self.regions.len() {
            self.check_region(RegionId(index))?;
        }
        for (index, phase) in self.phases.iter().enumerate() {
            self.check_clients(index, phase)?;
            for (operation, op) in phase.ops.iter().enumerate() {
                self.check_operation(Part::Operation(index, operation), op)?;
            }
        }
        self.check_order()
    }

    fn check_hook(&self) -> Checked {
        let Some(offset) = self.native.flip_byte_at else { return Ok(()) };
        let words_end = self.regions.first().map_or(0, |region| region.bytes / 8 * 8);
        if offset < words_end {
            return Ok(());
        }
        let what = format!("flip_byte_at is {offset}; the first region's words end at {words_end}");
        mistake(Part::Plan, what, "name a byte of a whole word of the first region")
    }

    fn check_region(&self, id: RegionId) -> Checked {
        let (region, part) = (self.region(id), Part::Region(id));
        let (name, hugetlb) = (&region.name, region.page_size.hugetlb().is_some());
        if hugetlb && matches!(region.backing, Backing::File { .. }) {
            let what = format!("region `{name}` is a file, which cannot have hugetlb pages");
            return mistake(part, what, "use backing = \"anon\", \"shared\" or \"memfd\"");
        }
        for advice in &region.advice {
            check_advice(part, region, *advice)?;
        }
        let Backing::Remote { resident_bytes, .. } = region.backing else { return Ok(()) };
        if resident_bytes < REMOTE_RESIDENT_BYTES_MIN {
            let (resident, min) = (Bytes(resident_bytes), Bytes(REMOTE_RESIDENT_BYTES_MIN));
            let what = format!("of region `{name}` only {resident} may be resident");
            return mistake(part, what, format!("allow at least {min}: resident = \"{min}\""));
        }
        if hugetlb {
            let what = format!("region `{name}` is network memory, which has no hugetlb pages");
            return mistake(part, what, "leave its page_size out");
        }
        if !region.mapped_at_start || !region.advice.is_empty() {
            return only_touched(part, region);
        }
        Ok(())
    }

    fn check_clients(&self, index: usize, phase: &Phase) -> Checked {
        if phase.client_kind == ClientKind::Processes && self.network_region().is_some() {
            let what =
                format!("phase `{}` forks, and children do not get network memory", phase.name);
            return mistake(Part::Phase(index), what, "use client_kind = \"threads\"");
        }
        Ok(())
    }

    fn check_operation(&self, part: Part, op: &Op) -> Checked {
        if let Some(id) = region_of(op) {
            let region = self.region(id);
            let is_access = matches!(op, Op::Touch(_) | Op::Replay(_));
            if region.backing.is_remote() && !is_access {
                return only_touched(part, region);
            }
        }
        match op {
            Op::Touch(touch) => check_touch(part, self.region(touch.region), touch),
            Op::Advise { region, advice } => check_advice(part, self.region(*region), *advice),
            _ => Ok(()),
        }
    }

    fn check_order(&self) -> Checked {
        let mut walk = Walk {
            plan: self,
            chased: self.regions_touched(|t| t.pattern == Pattern::PointerChase),
            state: self.first_state(),
        };
        for (index, phase) in self.phases.iter().enumerate() {
            walk.phase(index, phase)?;
        }
        Ok(())
    }

    /// Returns, for each region, true if a touch with this property touches it.
    fn regions_touched(&self, is_such: impl Fn(&Touch) -> bool) -> Vec<bool> {
        let mut found = vec![false; self.regions.len()];
        touches(&self.phases).filter(|t| is_such(t)).for_each(|t| found[t.region.0] = true);
        found
    }

    fn first_state(&self) -> Vec<State> {
        let state = |(index, region): (usize, &Region)| {
            let filled = self.is_file_filled(RegionId(index));
            let mapped = if region.mapped_at_start { Mapped::Yes } else { Mapped::No };
            let mut contents = Contents::default();
            if filled {
                contents.add(Footprint::whole(region.bytes));
            }
            State { mapped, may_be_locked: false, contents }
        };
        self.regions.iter().enumerate().map(state).collect()
    }
}

fn touches<'a>(phases: impl IntoIterator<Item = &'a Phase>) -> impl Iterator<Item = &'a Touch> {
    phases.into_iter().flat_map(|phase| &phase.ops).filter_map(|op| match op {
        Op::Touch(touch) => Some(touch),
        _ => None,
    })
}

fn region_of(op: &Op) -> Option<RegionId> {
    match op {
        Op::Map(id) | Op::Unmap(id) | Op::Unlock(id) => Some(*id),
        Op::Lock { region, .. } | Op::Advise { region, .. } => Some(*region),
        Op::Touch(touch) => Some(touch.region),
        Op::Replay(replay) => Some(replay.region),
        Op::Sleep(_) | Op::Barrier => None,
    }
}

fn only_touched(part: Part, region: &Region) -> Checked {
    let what = format!(
        "region `{}` is network memory: it is only touched, from start to end",
        region.name
    );
    mistake(part, what, "leave out mapping, locking and advice, or use another backing")
}

fn check_touch(part: Part, region: &Region, touch: &Touch) -> Checked {
    let (name, bytes, grain) = (&region.name, region.bytes, touch.grain_bytes);
    if grain == 0 || !grain.is_multiple_of(8) || grain > bytes {
        let what =
            format!("region `{name}` has {bytes} bytes and is touched by grains of {grain} bytes");
        return mistake(part, what, "use a multiple of 8 bytes within the region");
    }
    if let Pattern::Strided { stride_bytes } = touch.pattern
        && (stride_bytes == 0 || !stride_bytes.is_multiple_of(8))
    {
        let what = format!("region `{name}` is touched every {stride_bytes} bytes");
        return mistake(part, what, "use a stride of a multiple of 8 bytes");
    }
    if touch.pattern == Pattern::PointerChase && touch.access != Access::Read {
        let what = format!("the pointer chase of region `{name}` does not read");
        return mistake(part, what, "use access = \"read\": the links are what memory holds");
    }
    Ok(())
}

/// Refuses advice that madvise(2) never takes for such memory.
fn check_advice(part: Part, region: &Region, advice: Advice) -> Checked {
    let name = &region.name;
    if advice == Advice::Free && !region.backing.is_anonymous() {
        let what = format!("advice `free` of region `{name}`, which is not private memory");
        return mistake(part, what, "use backing = \"anon\", or advice = \"dontneed\"");
    }
    let reclaims = matches!(advice, Advice::Free | Advice::Cold | Advice::Pageout);
    if region.page_size.hugetlb().is_some() && (reclaims || advice == Advice::Collapse) {
        let what = format!("advice of region `{name}`, whose hugetlb pages are never reclaimed");
        return mistake(part, what, "leave the advice out, or ask for another page_size");
    }
    Ok(())
}

/// The state of a region's mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mapped {
    Yes,
    No,
    /// One or the other, depending on when a phase ended.
    Perhaps,
}

/// The certain facts about a region at one point of the plan.
#[derive(Debug, Clone, PartialEq)]
struct State {
    mapped: Mapped,
    may_be_locked: bool,
    /// The words that certainly hold the pattern.
    contents: Contents,
}

impl State {
    /// Keeps the facts that hold in both states.
    fn meet(&mut self, other: &State) {
        if self.mapped != other.mapped {
            self.mapped = Mapped::Perhaps;
        }
        self.may_be_locked |= other.may_be_locked;
        self.contents.meet(&other.contents);
    }
}

/// A walk over the operations of a plan in order.
struct Walk<'a> {
    plan: &'a Plan,
    /// The regions whose words are the links of a chase.
    chased: Vec<bool>,
    state: Vec<State>,
}

impl Walk<'_> {
    fn phase(&mut self, index: usize, phase: &Phase) -> Checked {
        self.check_sharing(index, phase)?;
        let before = self.state.clone();
        if phase.client_kind == ClientKind::Processes {
            // Locks are not inherited.
            self.state.iter_mut().for_each(|state| state.may_be_locked = false);
        }
        self.interfere(phase);
        let mut ends = phase.time.map(|_| self.state.clone());
        // What an operation does to a state does not depend on it: a second pass meets all there is.
        for pass in 0..phase.repeat.min(2) {
            for (operation, op) in phase.ops.iter().enumerate() {
                self.operation(Part::Operation(index, operation), phase, pass, op)?;
                if let (Some(ends), Some(id)) = (&mut ends, region_of(op)) {
                    ends[id.0].meet(&self.state[id.0]);
                }
            }
        }
        self.state = ends.unwrap_or(std::mem::take(&mut self.state));
        if phase.client_kind == ClientKind::Processes {
            self.end_children(phase, before);
        }
        Ok(())
    }

    /// Removes the facts that other threads of the phase may undo at any time.
    fn interfere(&mut self, phase: &Phase) {
        if !shares_everything(phase) {
            return;
        }
        for op in &phase.ops {
            match op {
                Op::Advise { region, advice } if self.drops(*region, *advice) => {
                    self.state[region.0].contents.clear();
                }
                Op::Lock { region, .. } => self.state[region.0].may_be_locked = true,
                _ => {}
            }
        }
    }

    /// Ends the children: their mappings, locks and writes to private memory end with them.
    fn end_children(&mut self, phase: &Phase, before: Vec<State>) {
        let after = std::mem::replace(&mut self.state, before);
        for (index, after) in after.into_iter().enumerate() {
            let id = RegionId(index);
            let remaps = |op: &Op| matches!(op, Op::Map(other) | Op::Unmap(other) if *other == id);
            if is_common(&self.plan.region(id).backing) && !phase.ops.iter().any(remaps) {
                self.state[index].contents = after.contents;
            }
        }
    }

    fn operation(&mut self, part: Part, phase: &Phase, pass: u64, op: &Op) -> Checked {
        let Some(id) = region_of(op) else { return Ok(()) };
        let wanted = if let Op::Map(_) = op { Mapped::No } else { Mapped::Yes };
        if self.state[id.0].mapped != wanted {
            return self.out_of_order(part, id, wanted, pass);
        }
        match op {
            Op::Map(_) => {
                self.check_place(part, id)?;
                self.state[id.0].mapped = Mapped::Yes;
            }
            Op::Unmap(_) => self.unmap(id),
            Op::Lock { .. } => self.state[id.0].may_be_locked = true,
            Op::Unlock(_) => self.state[id.0].may_be_locked = locked_by_others(phase, id),
            Op::Advise { advice, .. } => return self.advise(part, id, *advice),
            Op::Touch(touch) => return self.touch(part, phase, touch),
            Op::Replay(_) | Op::Sleep(_) | Op::Barrier => {}
        }
        Ok(())
    }

    /// Refuses to map a region where another one of its address range may still be.
    fn check_place(&self, part: Part, id: RegionId) -> Checked {
        let place = self.plan.region(id).place;
        let mut regions = self.plan.regions.iter().zip(&self.state);
        let is_there = |(region, state): &(&Region, &State)| {
            place.is_some() && region.place == place && state.mapped != Mapped::No
        };
        let Some((other, _)) = regions.find(is_there) else { return Ok(()) };
        let (name, other) = (&self.plan.region(id).name, &other.name);
        let what = format!("region `{name}` is mapped at the address where `{other}` still is");
        mistake(part, what, "unmap that one first, or give the family more places")
    }

    fn out_of_order(&self, part: Part, id: RegionId, wanted: Mapped, pass: u64) -> Checked {
        let name = &self.plan.region(id).name;
        let when = if pass > 0 { ", when its phase is repeated" } else { "" };
        match (wanted, self.state[id.0].mapped) {
            (_, Mapped::Perhaps) => mistake(
                part,
                format!("an earlier phase ends by the clock and may or may not map `{name}`{when}"),
                "leave `time` out of the phase that maps or unmaps it",
            ),
            (Mapped::No, _) => mistake(
                part,
                format!("region `{name}` is mapped already{when}"),
                format!("unmap it first: {{ unmap = \"{name}\" }}"),
            ),
            _ => mistake(
                part,
                format!("region `{name}` is not mapped by then{when}"),
                format!("map it first: {{ map = \"{name}\" }}"),
            ),
        }
    }

    fn unmap(&mut self, id: RegionId) {
        // What stands in a file or memfd is there when it is mapped again.
        let stays = match self.plan.region(id).backing {
            Backing::Memfd | Backing::File { private: false, .. } => true,
            Backing::File { private: true, .. } => self.plan.is_file_filled(id),
            Backing::Anon | Backing::Shared | Backing::Remote { .. } => false,
        };
        let state = &mut self.state[id.0];
        (state.mapped, state.may_be_locked) = (Mapped::No, false);
        if !stays {
            state.contents.clear();
        }
    }

    /// Returns true if such advice may lose what was written to the region. A private file falls back to
    /// its own content, which may be the pattern as well.
    fn drops(&self, id: RegionId, advice: Advice) -> bool {
        matches!(advice, Advice::Dontneed | Advice::Free)
            && !is_common(&self.plan.region(id).backing)
            && !self.plan.is_file_filled(id)
    }

    /// Returns true if another thread of the phase may lose, at any time, what is written to the region.
    fn is_dropped_beside(&self, phase: &Phase, id: RegionId) -> bool {
        let drops = |op: &Op| match op {
            Op::Advise { region, advice } => *region == id && self.drops(id, *advice),
            _ => false,
        };
        shares_everything(phase) && phase.ops.iter().any(drops)
    }

    fn advise(&mut self, part: Part, id: RegionId, advice: Advice) -> Checked {
        let reclaims =
            matches!(advice, Advice::Dontneed | Advice::Free | Advice::Cold | Advice::Pageout);
        if reclaims && self.state[id.0].may_be_locked {
            let name = &self.plan.region(id).name;
            let what = format!("region `{name}` may be locked, and locked pages are not given up");
            return mistake(part, what, format!("unlock it first: {{ unlock = \"{name}\" }}"));
        }
        if self.drops(id, advice) {
            self.state[id.0].contents.clear();
        }
        Ok(())
    }

    fn touch(&mut self, part: Part, phase: &Phase, touch: &Touch) -> Checked {
        let region = self.plan.region(touch.region);
        let compares = matches!(touch.access, Access::Verify | Access::Rewrite);
        if compares && self.chased[touch.region.0] {
            let what = format!("region `{}` is both chased and verified", region.name);
            return mistake(part, what, "chase a region of its own: a chase lays its links in it");
        }
        let footprint = Footprint::reached(touch, region.bytes);
        let is_dropped_beside = self.is_dropped_beside(phase, touch.region);
        let state = &mut self.state[touch.region.0];
        if compares && !state.contents.cover(footprint) {
            let what = format!(
                "region `{}` is verified where no operation before it is sure to have written",
                region.name
            );
            let remedy = "write the same words first, by a whole sweep (access = \"write\") in a \
                          phase that does not end by the clock";
            return mistake(part, what, remedy);
        }
        // Which words random writes reach is not followed.
        let sweeps = matches!(touch.pattern, Pattern::Strided { .. });
        if touch.access == Access::Write && sweeps && !is_dropped_beside {
            state.contents.add(footprint);
        }
        Ok(())
    }

    /// Refuses operations that clients of one phase cannot do at once in memory that they share.
    fn check_sharing(&self, index: usize, phase: &Phase) -> Checked {
        let mut chases: Vec<Option<(u64, u64)>> = vec![None; self.plan.regions.len()];
        let mut writes = vec![false; self.plan.regions.len()];
        let mut drops = vec![false; self.plan.regions.len()];
        for op in &phase.ops {
            match op {
                Op::Touch(t) if t.access.writes() => writes[t.region.0] = true,
                Op::Advise { region, advice } => drops[region.0] |= self.drops(*region, *advice),
                _ => {}
            }
        }
        for (operation, op) in phase.ops.iter().enumerate() {
            let part = Part::Operation(index, operation);
            let Some(id) = region_of(op) else { continue };
            let name = &self.plan.region(id).name;
            match op {
                Op::Map(_) | Op::Unmap(_) if shares_everything(phase) => {
                    let what = format!(
                        "threads share one address space, and each would map or unmap `{name}`"
                    );
                    let remedy = "use client_kind = \"processes\", or map it in a phase before";
                    return mistake(part, what, remedy);
                }
                Op::Touch(t) if t.pattern == Pattern::PointerChase => {
                    let links = (t.seed, t.grain_bytes);
                    let others = chases[id.0].replace(links).is_some_and(|other| other != links);
                    let shared = self.is_shared(phase, id);
                    if writes[id.0]
                        || (shared && others)
                        || (shares_everything(phase) && drops[id.0])
                    {
                        let what = format!(
                            "the links of the chase of `{name}` are overwritten in its phase"
                        );
                        let remedy = "write, drop or chase it otherwise in a phase of its own";
                        return mistake(part, what, remedy);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns true if several clients of the phase see the same pages of a region.
    fn is_shared(&self, phase: &Phase, id: RegionId) -> bool {
        shares_everything(phase) || (phase.clients > 1 && is_common(&self.plan.region(id).backing))
    }
}

/// Returns true if the clients are threads that can disturb each other.
fn shares_everything(phase: &Phase) -> bool {
    phase.client_kind == ClientKind::Threads && phase.clients > 1
}

fn locked_by_others(phase: &Phase, id: RegionId) -> bool {
    let locks = |op: &Op| matches!(op, Op::Lock { region, .. } if *region == id);
    shares_everything(phase) && phase.ops.iter().any(locks)
}

/// Returns true if forked children write to the same pages as their parent.
fn is_common(backing: &Backing) -> bool {
    match backing {
        Backing::Shared | Backing::Memfd => true,
        Backing::File { private, .. } => !private,
        Backing::Anon | Backing::Remote { .. } => false,
    }
}
