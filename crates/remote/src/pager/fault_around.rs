//! What lies around a page that is fetched: whether it is to come with it.
//!
//! Most of what a page-in costs is the way to the store and back, and two threads being woken; a page more costs
//! a tenth. But each page that comes has another leave. So neighbours are fetched as long as what has just
//! left is wanted again much less than the rest of what is away, page for page. A program that uses all of its
//! pages at random wants both alike, and gets no neighbours.
//!
//! Source: that a page which returns tells by how many others left meanwhile whether it left too early is the
//! kernel's refault distance (mm/workingset.c).

use super::table::CLUSTER_PAGES;

/// What left so lately counts as just left: this part of what is here.
const JUST_LEFT: usize = 4;
/// A judgement takes so many page-ins of what has just left, if that were wanted like all that is away…
const EXPECTED: f64 = 12.0;
/// …and finds it little wanted when there are no more than these.
const FEW: u32 = 3;
/// A page-in costs as much as so many pages more.
const PAGES_PER_FAULT: usize = 16;

/// What one handler knows of it.
#[derive(Debug, Default)]
pub struct FaultAround {
    expected: f64,
    returned: u32,
    is_worth_it: bool,
}

impl FaultAround {
    /// A page is wanted that is `stored`, as are others, while some are `here`, and which no stream foretold;
    /// `dropped_since` pages were dropped after it. Returns how many are to be fetched, and it among them: a
    /// power of two, and 1 for none.
    pub fn page_in(&mut self, here: usize, stored: usize, dropped_since: usize) -> usize {
        let (stored, just_left) = (stored.max(1), here / JUST_LEFT);
        self.expected += (just_left as f64 / stored as f64).min(1.0);
        self.returned += u32::from(dropped_since < just_left);
        if self.expected >= EXPECTED {
            *self = FaultAround { is_worth_it: self.returned <= FEW, ..FaultAround::default() };
        }
        // Who is fetched must not have to leave before it is its turn.
        let in_time = PAGES_PER_FAULT.saturating_mul(here) / stored;
        match self.is_worth_it && in_time > 0 {
            true => 1 << in_time.min(CLUSTER_PAGES).ilog2(),
            false => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::access::Rng;

    const HERE: usize = 1000;
    const STORED: usize = 3000;

    #[test]
    fn pages_at_random_get_no_neighbours() {
        let (mut fault_around, mut rng) = (FaultAround::default(), Rng::new(1));
        let mut more = 0;
        for _ in 0..100_000 {
            more += fault_around.page_in(HERE, STORED, rng.below(STORED as u64) as usize) - 1;
        }
        assert!(more < 1000, "{more}");
    }

    #[test]
    fn what_leaves_for_good_makes_room_for_neighbours() {
        let mut fault_around = FaultAround::default();
        let fetched: Vec<usize> =
            (0..1000).map(|_| fault_around.page_in(HERE, STORED, STORED)).collect();
        assert_eq!((fetched[0], fetched[999]), (1, 4));
        assert_eq!(fault_around.page_in(HERE, 100, HERE), CLUSTER_PAGES);
        assert_eq!(fault_around.page_in(HERE, 1 << 20, HERE), 1);
        assert_eq!(FaultAround::default().page_in(0, 0, 0), 1);
    }
}
