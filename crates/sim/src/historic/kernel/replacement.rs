//! Page replacement policies by name: each selects the page to evict when a frame is needed.
//!
//! Like a kernel, a policy sees use only through the hardware's referenced bits, when it selects a
//! victim. Invariant: a policy holds exactly the evictable frames. Pinned and free frames are not
//! in it, so a victim can always be evicted.

use pagetax_core::access::Rng;

/// The index of a page frame.
pub type FrameIndex = u32;

/// A page replacement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplacementPolicy {
    /// First in, first out: evicts the page that was loaded first.
    Fifo,
    /// FIFO, but a page that was referenced since the last scan goes to the back of the queue.
    SecondChance,
    /// Evicts the page that was last seen in use longest ago, of so many drawn at random. 1 is
    /// random replacement.
    OldestOf(usize),
}

impl ReplacementPolicy {
    /// The policies by their names in machine files.
    pub const NAMES: [(&str, ReplacementPolicy); 7] = [
        ("fifo", ReplacementPolicy::Fifo),
        ("second_chance", ReplacementPolicy::SecondChance),
        ("random", ReplacementPolicy::OldestOf(1)),
        ("oldest_of_2", ReplacementPolicy::OldestOf(2)),
        ("oldest_of_3", ReplacementPolicy::OldestOf(3)),
        ("oldest_of_4", ReplacementPolicy::OldestOf(4)),
        ("oldest_of_8", ReplacementPolicy::OldestOf(8)),
    ];
}

/// The evictable frames in the order that a policy keeps them.
#[derive(Debug, Clone)]
pub enum EvictionOrder {
    /// FIFO, with or without a second chance.
    Queue {
        /// Evictable frames, oldest first.
        queue: Queue,
        /// True if referenced frames get a second chance.
        second_chance: bool,
    },
    /// Random draws, of which the oldest frame is the victim.
    Sample(Sample),
}

impl EvictionOrder {
    /// Returns a policy without frames.
    pub fn new(policy: ReplacementPolicy) -> Self {
        let queue = |second_chance| EvictionOrder::Queue { queue: Queue::default(), second_chance };
        match policy {
            ReplacementPolicy::Fifo => queue(false),
            ReplacementPolicy::SecondChance => queue(true),
            ReplacementPolicy::OldestOf(drawn) => EvictionOrder::Sample(Sample::new(drawn)),
        }
    }

    /// Adds a frame that becomes evictable. It must not be evictable already.
    pub fn insert(&mut self, frame: FrameIndex) {
        match self {
            EvictionOrder::Queue { queue, .. } => queue.push_back(frame),
            EvictionOrder::Sample(sample) => sample.insert(frame),
        }
    }

    /// Removes an evictable frame that is now pinned or free.
    pub fn remove(&mut self, frame: FrameIndex) {
        match self {
            EvictionOrder::Queue { queue, .. } => queue.unlink(frame),
            EvictionOrder::Sample(sample) => sample.remove(frame),
        }
    }

    /// Selects and removes a victim. Returns None if no frame is evictable. `take_referenced` reads
    /// and clears the referenced bit of a frame's page.
    pub fn victim(
        &mut self,
        rng: &mut Rng,
        mut take_referenced: impl FnMut(FrameIndex) -> bool,
    ) -> Option<FrameIndex> {
        match self {
            EvictionOrder::Queue { queue, second_chance } => {
                let mut victim = queue.first()?;
                while *second_chance && take_referenced(victim) {
                    queue.unlink(victim);
                    queue.push_back(victim);
                    victim = queue.first()?;
                }
                queue.unlink(victim);
                Some(victim)
            }
            EvictionOrder::Sample(sample) => sample.victim(rng, take_referenced),
        }
    }
}

const NONE: FrameIndex = FrameIndex::MAX;

/// A doubly linked list in an array, so that any frame can leave it in constant time.
#[derive(Debug, Clone)]
pub struct Queue {
    /// (previous, next) by frame.
    links: Vec<(FrameIndex, FrameIndex)>,
    first: FrameIndex,
    last: FrameIndex,
}

impl Default for Queue {
    fn default() -> Self {
        Queue { links: Vec::new(), first: NONE, last: NONE }
    }
}

impl Queue {
    fn first(&self) -> Option<FrameIndex> {
        (self.first != NONE).then_some(self.first)
    }

    fn push_back(&mut self, frame: FrameIndex) {
        if self.links.len() <= frame as usize {
            self.links.resize(frame as usize + 1, (NONE, NONE));
        }
        self.links[frame as usize] = (self.last, NONE);
        match self.last {
            NONE => self.first = frame,
            last => self.links[last as usize].1 = frame,
        }
        self.last = frame;
    }

    fn unlink(&mut self, frame: FrameIndex) {
        let (previous, next) = self.links[frame as usize];
        match previous {
            NONE => self.first = next,
            _ => self.links[previous as usize].1 = next,
        }
        match next {
            NONE => self.last = previous,
            _ => self.links[next as usize].0 = previous,
        }
    }
}

/// Evictable frames in an array, each with the time when it was loaded or last seen in use.
#[derive(Debug, Clone)]
pub struct Sample {
    /// The positions drawn for the last victim. Its length is the number of draws per victim.
    drawn: Vec<usize>,
    now: u64,
    /// Evictable frames, in no order.
    members: Vec<FrameIndex>,
    /// The time when each member was loaded or last seen in use, by position.
    since: Vec<u64>,
    /// Each frame's position among the members.
    positions: Vec<u32>,
}

impl Sample {
    fn new(drawn: usize) -> Self {
        let (members, since, positions) = (Vec::new(), Vec::new(), Vec::new());
        let drawn = vec![0; drawn];
        Sample { drawn, now: 0, members, since, positions }
    }

    fn insert(&mut self, frame: FrameIndex) {
        if self.positions.len() <= frame as usize {
            self.positions.resize(frame as usize + 1, NONE);
        }
        self.positions[frame as usize] = self.members.len() as u32;
        self.now += 1;
        self.members.push(frame);
        self.since.push(self.now);
    }

    fn remove(&mut self, frame: FrameIndex) {
        let position = self.positions[frame as usize] as usize;
        self.members.swap_remove(position);
        self.since.swap_remove(position);
        if let Some(moved) = self.members.get(position) {
            self.positions[*moved as usize] = position as u32;
        }
    }

    fn victim(
        &mut self,
        rng: &mut Rng,
        mut take_referenced: impl FnMut(FrameIndex) -> bool,
    ) -> Option<FrameIndex> {
        if self.members.is_empty() {
            return None;
        }
        let len = self.members.len() as u64;
        self.drawn.iter_mut().for_each(|position| *position = rng.below(len) as usize);
        let mut looks_left = if self.drawn.len() > 1 { self.drawn.len() } else { 0 };
        loop {
            let oldest = self.drawn.iter().copied().min_by_key(|position| self.since[*position])?;
            let frame = self.members[oldest];
            if looks_left == 0 || !take_referenced(frame) {
                self.remove(frame);
                return Some(frame);
            }
            looks_left -= 1;
            self.now += 1;
            self.since[oldest] = self.now;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use pagetax_core::access::Rng;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Returns the victims of frames 0 to 3, of which 2 is pinned and 0 is referenced.
    fn victims(policy: ReplacementPolicy) -> Vec<FrameIndex> {
        let mut replacement = EvictionOrder::new(policy);
        let mut rng = Rng::new(1);
        let mut referenced = BTreeSet::from([0]);
        (0..4).for_each(|frame| replacement.insert(frame));
        replacement.remove(2);
        std::iter::from_fn(|| replacement.victim(&mut rng, |frame| referenced.remove(&frame)))
            .collect()
    }

    #[test]
    fn each_policy_takes_its_own_victim() {
        assert_eq!(victims(ReplacementPolicy::Fifo), [0, 1, 3]);
        assert_eq!(victims(ReplacementPolicy::SecondChance), [1, 3, 0]);
        assert_eq!(victims(ReplacementPolicy::OldestOf(64)), [1, 3, 0]);
        let random: BTreeSet<_> = victims(ReplacementPolicy::OldestOf(1)).into_iter().collect();
        assert_eq!(random, BTreeSet::from([0, 1, 3]));
    }

    #[test]
    fn more_draws_come_closer_to_the_oldest() {
        let mean_age = |drawn| {
            let mut replacement = EvictionOrder::new(ReplacementPolicy::OldestOf(drawn));
            let mut rng = Rng::new(3);
            (0..1000).for_each(|frame| replacement.insert(frame));
            let victims = (0..200).map(|_| replacement.victim(&mut rng, |_| false).unwrap() as u64);
            victims.sum::<u64>() / 200
        };
        assert!(mean_age(1) > 400);
        assert!(mean_age(8) < 200 && mean_age(8) > mean_age(64));
    }

    pub(crate) fn any_policy() -> impl Strategy<Value = ReplacementPolicy> {
        let drawn = (1usize..9).prop_map(ReplacementPolicy::OldestOf);
        prop_oneof![Just(ReplacementPolicy::Fifo), Just(ReplacementPolicy::SecondChance), drawn]
    }

    proptest! {
        #[test]
        fn victims_are_the_evictable_frames(
            steps in proptest::collection::vec((0u8..3, 0u32..20, any::<u64>()), 1..200),
            policy in any_policy(),
        ) {
            let (mut replacement, mut known) = (EvictionOrder::new(policy), BTreeSet::new());
            let mut rng = Rng::new(5);
            for (step, frame, mut bits) in steps {
                match (step, known.contains(&frame)) {
                    (0, false) => { replacement.insert(frame); known.insert(frame); }
                    (1, true) => { replacement.remove(frame); known.remove(&frame); }
                    (2, _) => {
                        let take_bit = |_| { bits >>= 1; bits & 1 == 1 };
                        match replacement.victim(&mut rng, take_bit) {
                            Some(victim) => prop_assert!(known.remove(&victim)),
                            None => prop_assert!(known.is_empty()),
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}
