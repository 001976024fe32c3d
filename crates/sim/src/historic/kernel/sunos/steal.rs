//! The policies that choose the pmeg to steal, by name.
//!
//! SunOS 4.0.3's policy is not documented. `no-context-first-rover` reproduces the published table
//! best. The others are the alternatives that it was chosen from, and stay for comparison. A policy
//! is asked only when every pmeg of the users is owned.

use super::bits::PmegSet;
use crate::hardware::SpaceId;
use crate::hardware::sun4::{PmegId, Sun4};
use pagetax_core::access::Rng;
use std::ops::Range;

/// The state that the policies use, in addition to the hardware's.
#[derive(Debug, Clone)]
pub struct Pool {
    /// Pmegs that users can have.
    pub users: Range<PmegId>,
    /// The rover's position: the last victim.
    pub hand: PmegId,
    /// Pmegs whose owners have no hardware context.
    pub contextless: PmegSet,
    /// The time when each pmeg was given to its segment, counted in allocations.
    pub given_at: Vec<u64>,
    /// The time of each pmeg's last fault, counted in faults.
    pub faulted_at: Vec<u64>,
    /// The time when each space last got a CPU, counted in context switches.
    pub ran_at: Vec<u64>,
}

type Pick = fn(&Pool, &mut Sun4, SpaceId, &mut Rng) -> PmegId;

/// A policy for stealing pmegs.
#[derive(Debug, Clone, Copy)]
pub struct StealPolicy {
    /// Picks a victim for the space that needs a pmeg.
    pub pick: Pick,
    /// True if the policy needs the hardware's record of each pmeg's use and its time.
    pub asks_for_use: bool,
}

const fn policy(pick: Pick) -> StealPolicy {
    StealPolicy { pick, asks_for_use: false }
}

const fn by_use(pick: Pick) -> StealPolicy {
    StealPolicy { pick, asks_for_use: true }
}

/// All policies by their names in machine files.
pub const POLICIES: &[(&str, StealPolicy)] = &[
    ("no-context-first-rover", policy(no_context_first_rover)),
    ("no-context-first-random", policy(no_context_first_random)),
    ("random", policy(random)),
    ("rover", policy(rover)),
    ("rover-skipping-own", policy(rover_skipping_own)),
    ("lru-process", policy(lru_process)),
    ("clock", by_use(clock)),
    ("last-fault", policy(last_fault)),
    ("exact-lru", by_use(exact_lru)),
    ("fifo", policy(fifo)),
    ("largest-owner", policy(largest_owner)),
];

/// Picks the next pmeg of an owner without a context; if all owners have one, the next pmeg.
fn no_context_first_rover(pool: &Pool, mmu: &mut Sun4, thief: SpaceId, rng: &mut Rng) -> PmegId {
    pool.contextless.next_after(pool.hand).unwrap_or_else(|| rover(pool, mmu, thief, rng))
}

fn no_context_first_random(pool: &Pool, mmu: &mut Sun4, thief: SpaceId, rng: &mut Rng) -> PmegId {
    match pool.contextless.len() as u64 {
        0 => random(pool, mmu, thief, rng),
        count => {
            let index = rng.below(count) as usize;
            pool.contextless.iter().nth(index).unwrap_or(pool.users.start)
        }
    }
}

fn random(pool: &Pool, _mmu: &mut Sun4, _thief: SpaceId, rng: &mut Rng) -> PmegId {
    pool.users.start + rng.below(pool.users.len() as u64) as PmegId
}

/// Picks the next pmeg, regardless of its owner.
fn rover(pool: &Pool, _mmu: &mut Sun4, _thief: SpaceId, _rng: &mut Rng) -> PmegId {
    round(pool).next().unwrap_or(pool.users.start)
}

/// Returns the users' pmegs in one round that starts after the hand.
fn round(pool: &Pool) -> impl Iterator<Item = PmegId> + use<> {
    let (users, count) = (pool.users.clone(), pool.users.len());
    let first = pool.hand + 1 - users.start;
    (0..count).map(move |step| users.start + (first + step) % count)
}

fn rover_skipping_own(pool: &Pool, mmu: &mut Sun4, thief: SpaceId, rng: &mut Rng) -> PmegId {
    let others = round(pool).find(|pmeg| owner(mmu, *pmeg) != Some(thief));
    others.unwrap_or_else(|| rover(pool, mmu, thief, rng))
}

fn owner(mmu: &Sun4, pmeg: PmegId) -> Option<SpaceId> {
    mmu.pmegs()[pmeg].owner.map(|(space, _)| space)
}

/// Picks a pmeg of the process that has not run for longest.
fn lru_process(pool: &Pool, mmu: &mut Sun4, _thief: SpaceId, _rng: &mut Rng) -> PmegId {
    let ran_at = |pmeg: &PmegId| owner(mmu, *pmeg).and_then(|space| pool.ran_at.get(space.0));
    pool.users.clone().min_by_key(ran_at).unwrap_or(pool.users.start)
}

/// Picks the next pmeg that has not been referenced since the hand last passed (second chance).
fn clock(pool: &Pool, mmu: &mut Sun4, thief: SpaceId, rng: &mut Rng) -> PmegId {
    for pmeg in round(pool) {
        if !std::mem::take(&mut mmu.pmeg_mut(pmeg).referenced) {
            return pmeg;
        }
    }
    rover(pool, mmu, thief, rng)
}

fn last_fault(pool: &Pool, _mmu: &mut Sun4, _thief: SpaceId, _rng: &mut Rng) -> PmegId {
    pool.users.clone().min_by_key(|pmeg| pool.faulted_at[*pmeg]).unwrap_or(pool.users.start)
}

fn exact_lru(pool: &Pool, mmu: &mut Sun4, _thief: SpaceId, _rng: &mut Rng) -> PmegId {
    let used_at = |pmeg: &PmegId| mmu.pmegs()[*pmeg].used_at;
    pool.users.clone().min_by_key(used_at).unwrap_or(pool.users.start)
}

/// Picks the pmeg that was given out first, as in BSD: the head of a list that is not requeued on
/// use.
fn fifo(pool: &Pool, _mmu: &mut Sun4, _thief: SpaceId, _rng: &mut Rng) -> PmegId {
    pool.users.clone().min_by_key(|pmeg| pool.given_at[*pmeg]).unwrap_or(pool.users.start)
}

/// Picks the next pmeg of the process that owns most.
fn largest_owner(pool: &Pool, mmu: &mut Sun4, _thief: SpaceId, _rng: &mut Rng) -> PmegId {
    let mut counts = vec![0usize; pool.ran_at.len()];
    for space in pool.users.clone().filter_map(|pmeg| owner(mmu, pmeg)) {
        counts[space.0] += 1;
    }
    let count = |pmeg: PmegId| owner(mmu, pmeg).map_or(0, |space| counts[space.0]);
    let most = pool.users.clone().map(count).max().unwrap_or(0);
    round(pool).find(|pmeg| count(*pmeg) == most).unwrap_or(pool.users.start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::sun4::Geometry;
    use pagetax_core::units::PageSize;

    /// Returns pmegs 2..6 for users: 2 and 3 of space 0 (with a context), 4 of space 1, 5 of space
    /// 2.
    fn pool() -> (Pool, Sun4) {
        let (page, smegs) = (PageSize::K4, None);
        let mut mmu =
            Sun4::new(Geometry { pmegs: 6, ptes: 64, page, contexts: 8, segments: 4096, smegs });
        let mut contextless = PmegSet::default();
        for (pmeg, space) in [(2, 0), (3, 0), (4, 1), (5, 2)] {
            mmu.assign_pmeg(pmeg, SpaceId(space), pmeg);
            if space > 0 {
                contextless.insert(pmeg);
            }
        }
        mmu.pmeg_mut(2).referenced = true;
        mmu.pmeg_mut(3).referenced = true;
        let pool = Pool {
            users: 2..6,
            hand: 5,
            contextless,
            given_at: vec![0, 0, 7, 5, 3, 9],
            faulted_at: vec![0, 0, 17, 15, 19, 13],
            ran_at: vec![30, 10, 20],
        };
        (pool, mmu)
    }

    fn victim(name: &str) -> PmegId {
        let (pool, mut mmu) = pool();
        let (_, policy) = POLICIES.iter().find(|(known, _)| *known == name).unwrap();
        (policy.pick)(&pool, &mut mmu, SpaceId(0), &mut Rng::new(1))
    }

    #[test]
    fn each_policy_takes_its_own_victim() {
        assert_eq!(victim("no-context-first-rover"), 4);
        assert_eq!(victim("rover"), 2);
        assert_eq!(victim("rover-skipping-own"), 4);
        assert_eq!(victim("lru-process"), 4);
        assert_eq!(victim("clock"), 4);
        assert_eq!(victim("last-fault"), 5);
        assert_eq!(victim("exact-lru"), 2);
        assert_eq!(victim("fifo"), 4);
        assert_eq!(victim("largest-owner"), 2);
        assert!([4, 5].contains(&victim("no-context-first-random")));
        assert!((2..6).contains(&victim("random")));
    }
}
