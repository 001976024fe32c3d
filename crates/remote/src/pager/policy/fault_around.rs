//! Fault-around: the number of neighbours to fetch with a page.
//!
//! A page-in costs a round trip to the store and two wake-ups; it costs as much as 16 more pages of the
//! same request. But each fetched page evicts another. So neighbours are fetched while recently evicted
//! pages are refaulted much less often, page for page, than other stored pages. A program that uses all its
//! pages at random refaults both equally, and gets no neighbours.
//!
//! Source: the kernel's refault distance (mm/workingset.c): the number of evictions since a page's own
//! shows if it was evicted too early.

use super::super::table::CLUSTER_PAGES;

/// The fraction (1/4) of the resident pages within which an eviction is recent.
const RECENT_FRACTION: usize = 4;
/// The expected refaults of recently evicted pages that one decision takes, if all stored pages
/// were equally likely…
const REFAULTS_EXPECTED_MIN: f64 = 12.0;
/// …and the most actual refaults with which neighbours are fetched.
const REFAULTS_MAX: u32 = 3;
/// The number of pages whose transfer costs as much as the request itself.
const PAGES_PER_FAULT: usize = 16;

/// The refault statistics of one handler.
#[derive(Debug, Default)]
pub struct FaultAround {
    expected: f64,
    returned: u32,
    is_worth_it: bool,
}

impl FaultAround {
    /// Records a page-in that no stream predicted, and returns the number of pages to fetch: a power of
    /// two, 1 for no neighbours. `here` and `stored` are numbers of pages; `dropped_since` is the page's
    /// refault distance.
    pub fn page_in(&mut self, here: usize, stored: usize, dropped_since: usize) -> usize {
        let (stored, recent) = (stored.max(1), here / RECENT_FRACTION);
        self.expected += (recent as f64 / stored as f64).min(1.0);
        self.returned += u32::from(dropped_since < recent);
        if self.expected >= REFAULTS_EXPECTED_MIN {
            *self = FaultAround {
                is_worth_it: self.returned <= REFAULTS_MAX,
                ..FaultAround::default()
            };
        }
        // A neighbour must not be evicted again before the program reaches it.
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
