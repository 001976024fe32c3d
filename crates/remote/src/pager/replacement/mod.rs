//! The page-ins of replacement policies, computed from a program's own references: the pager's policy
//! beside LRU, ARC and the optimum.
//!
//! Invariant: each policy sees the same references and has the same limit of resident pages. The first
//! touch of a page costs no page-in, because such a page is zeros.
//! Sources: the optimum of Belady (1966), ARC (Megiddo, Modha, FAST 2003).

mod arc;
mod lists;
mod lru;
mod optimum;
mod pager_policy;
mod references;

pub use references::{ReferenceCollector, References};

use serde::{Deserialize, Serialize};

/// The counts of one policy at one limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyCounts {
    /// The number of accesses that had to wait for a page from the store.
    pub page_in_count: u64,
    /// The number of pages that came from the store, with readahead.
    pub fetched_count: u64,
    /// The number of changed pages that went to the store.
    pub put_count: u64,
}

/// A replacement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// The policy of `pagetax remote`: FIFO with a second chance, streams and fault-around.
    Pager,
    /// The page that was used last the longest ago leaves; one page at a time.
    Lru,
    /// Adaptive replacement: recency against frequency; one page at a time.
    Arc,
    /// The page whose next use is furthest away leaves. No policy of one page at a time has fewer page-ins.
    Optimum,
}

impl PolicyName {
    /// All policies.
    pub const ALL: [PolicyName; 4] =
        [PolicyName::Pager, PolicyName::Lru, PolicyName::Arc, PolicyName::Optimum];

    /// Returns the counts of this policy with so many resident pages.
    pub fn counts(self, references: &References, limit: usize) -> PolicyCounts {
        match self {
            PolicyName::Pager => run(pager_policy::PagerPolicy::new(references, limit), references),
            PolicyName::Lru => run(lru::Lru::new(references.pages(), limit), references),
            PolicyName::Arc => run(arc::Arc::new(references.pages(), limit), references),
            PolicyName::Optimum => optimum::counts(references, limit),
        }
    }
}

/// A policy that learns of one reference after another.
trait Policy {
    /// Notes an access to a page, which may change it.
    fn access(&mut self, page: u32, is_write: bool);
    /// Notes that the program dropped a page.
    fn unmap(&mut self, page: u32);
    /// Notes that a page is all zeros until its next access. It costs no page-in if it leaves meanwhile.
    fn zeros(&mut self, page: u32);
    /// Returns the counts so far.
    fn counts(&self) -> PolicyCounts;
}

fn run(mut policy: impl Policy, references: &References) -> PolicyCounts {
    for step in references.steps() {
        match step {
            references::Step::Access(page, is_write) => policy.access(page, is_write),
            references::Step::Unmap(page) => policy.unmap(page),
            references::Step::Zeros(page) => policy.zeros(page),
        }
    }
    policy.counts()
}

/// The state of a page that leaves and comes alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct PageUse {
    /// True once the program has touched it: then its content is here or in the store.
    is_touched: bool,
    /// True if it was changed since it last came or went.
    is_changed: bool,
    /// True if it is all zeros until its next access.
    is_zero: bool,
    /// True if it has left since its last access.
    has_left: bool,
    /// True if it was put when it left.
    was_put: bool,
}

/// The bookkeeping of policies that move one page at a time.
struct SinglePages {
    uses: Vec<PageUse>,
    counts: PolicyCounts,
}

impl SinglePages {
    fn new(pages: usize) -> SinglePages {
        SinglePages { uses: vec![PageUse::default(); pages], counts: PolicyCounts::default() }
    }

    /// Notes an access, to a resident page or not.
    fn note(&mut self, page: u32, is_write: bool, is_resident: bool) {
        let PageUse { is_touched, is_changed, .. } = self.uses[page as usize];
        if !is_resident && is_touched {
            self.counts.page_in_count += 1;
            self.counts.fetched_count += 1;
        }
        // Even a page of zeros that was only read must be known as such.
        let is_changed = is_changed || is_write;
        self.uses[page as usize] = PageUse { is_touched: true, is_changed, ..PageUse::default() };
    }

    /// Notes that a page is all zeros since its last access. The optimum has often evicted it by then.
    fn zeros(&mut self, page: u32) {
        let page_use = &mut self.uses[page as usize];
        page_use.is_zero = true;
        if page_use.has_left {
            self.counts.put_count -= u64::from(page_use.was_put);
            self.forget(page);
        }
    }

    /// Notes that a page leaves.
    fn evict(&mut self, page: u32) {
        let page_use = &mut self.uses[page as usize];
        if page_use.is_zero {
            return self.forget(page);
        }
        page_use.has_left = true;
        page_use.was_put = std::mem::take(&mut page_use.is_changed);
        self.counts.put_count += u64::from(page_use.was_put);
    }

    fn forget(&mut self, page: u32) {
        self.uses[page as usize] = PageUse::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::access::Rng;

    fn collect(accesses: impl IntoIterator<Item = (u64, bool)>) -> References {
        let mut collector = ReferenceCollector::new(0);
        for (page, is_write) in accesses {
            collector.follow(page, true);
            collector.access(page, is_write);
        }
        collector.finish()
    }

    fn page_ins(references: &References, limit: usize) -> [u64; 4] {
        PolicyName::ALL.map(|policy| policy.counts(references, limit).page_in_count)
    }

    #[test]
    fn the_string_of_the_textbook() {
        // Belady, Nelson, Shedler 1969: with three frames LRU has 10 misses and the optimum 7, five of them
        // first touches.
        let string = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5];
        let references = collect(string.map(|page| (page, true)));
        let of = |policy: PolicyName| policy.counts(&references, 3);
        assert_eq!(of(PolicyName::Lru).page_in_count, 5);
        assert_eq!(of(PolicyName::Optimum).page_in_count, 2);
        assert!((2..=5).contains(&of(PolicyName::Arc).page_in_count));
        assert!(of(PolicyName::Optimum).put_count <= of(PolicyName::Lru).put_count);
    }

    #[test]
    fn no_policy_of_single_pages_beats_the_optimum() {
        let mut rng = Rng::new(1966);
        for pages in [600_u64, 1_000] {
            // Half of the accesses go to a tenth of the pages.
            let mut page = || match rng.unit() < 0.5 {
                true => rng.below(pages / 10),
                false => rng.below(pages),
            };
            let accesses: Vec<(u64, bool)> =
                (0..20_000).map(|i| (page() * 40, i % 3 == 0)).collect();
            let references = collect(accesses);
            let [pager, lru, arc, optimum] = page_ins(&references, 400);
            assert!(optimum < lru && optimum < arc, "{pager} {lru} {arc} {optimum}");
            assert!(arc < lru, "frequency counts here: {arc} and {lru}");
            // Pages that lie apart have no neighbours to fetch.
            assert!(pager > optimum && pager < 2 * lru, "{pager} {lru} {arc} {optimum}");
        }
    }

    #[test]
    fn a_sweep_that_does_not_fit_is_streamed() {
        let sweeps = (0..3).flat_map(|_| 0..4_000_u64).map(|page| (page, true));
        let references = collect(sweeps);
        let [pager, lru, _, optimum] = page_ins(&references, 1_000);
        assert_eq!(lru, 8_000, "each page leaves just before its use");
        assert!(optimum < 6_500, "{optimum}");
        assert!(pager < 500, "runs of 64 pages: {pager}");
        let counts = PolicyName::Pager.counts(&references, 1_000);
        assert!(counts.fetched_count >= 6_000 && counts.put_count >= 9_000, "{counts:?}");
        assert_eq!(page_ins(&references, 8_000), [0; 4], "all of it fits");
    }

    // The room that the pager keeps free is memory that the program lacks.
    #[test]
    fn a_hot_set_stays_beside_new_pages() {
        // Like the tables of a database between its rows: 5,000 pages are used at random, 12,000
        // were filled once, and new ones are filled all the time.
        let mut rng = Rng::new(1979);
        let hot = |rng: &mut Rng| (100_000 + rng.below(5_000), rng.below(4) == 0);
        let filled = (0..12_000).map(|page| (page, true)).collect::<Vec<_>>();
        let used = (0..400_000).map(|turn| match turn % 200 {
            0 => (50_000 + turn / 200, true),
            _ => hot(&mut rng),
        });
        let references = collect(filled.into_iter().chain(used));
        let [pager, lru, ..] = page_ins(&references, 6_400);
        // 376 while the clock of a block's refaults was the number of evictions, which come in batches.
        assert!(lru == 0 && pager < 300, "{pager} {lru}");
    }

    #[test]
    fn a_working_set_that_nearly_fills_the_memory_stays() {
        let mut rng = Rng::new(1990);
        let accesses: Vec<(u64, bool)> = (0..100_000).map(|_| (rng.below(4_400), false)).collect();
        let [pager, lru, ..] = page_ins(&collect(accesses), 5_120);
        assert_eq!(lru, 0);
        assert!(pager < 1_000, "{pager} page-ins of 4,400 pages with room for 5,120");
    }

    #[test]
    fn dropped_pages_come_back_as_zeros() {
        let mut collector = ReferenceCollector::new(0);
        (0..1_000).for_each(|page| collector.follow(page, true));
        for _ in 0..5 {
            (0..1_000).for_each(|page| collector.access(page, true));
            collector.access(5_000, true);
            collector.unmap(0..1_000);
        }
        assert_eq!(page_ins(&collector.finish(), 300), [0; 4]);
    }

    #[test]
    fn pages_of_zeros_cost_no_page_in() {
        let mut collector = ReferenceCollector::new(ReferenceCollector::WINDOW);
        (0..2_000).for_each(|page| collector.follow(page, true));
        let sweep = |collector: &mut ReferenceCollector, holds_zeros: bool| {
            for page in 0..2_000 {
                collector.access(page, true);
                if holds_zeros && page >= 100 {
                    collector.zeros(page - 100);
                }
            }
        };
        // The last 100 pages of a sweep stay unknown.
        (0..3).for_each(|_| sweep(&mut collector, true));
        let [_, lru, arc, optimum] = page_ins(&collector.finish(), 400);
        assert!(lru <= 200 && arc <= 200 && optimum <= lru, "{lru} {arc} {optimum}");
        let mut collector = ReferenceCollector::new(ReferenceCollector::WINDOW);
        (0..2_000).for_each(|page| collector.follow(page, true));
        [true, false, false].into_iter().for_each(|holds| sweep(&mut collector, holds));
        let references = collector.finish();
        let [pager, lru, ..] = page_ins(&references, 400);
        assert!(
            (2_000..=2_200).contains(&lru),
            "only the third sweep reads what the second wrote: {lru}"
        );
        assert!((2_000 / 64..lru / 10).contains(&pager), "in runs of up to 64 pages: {pager}");
    }

    #[test]
    fn a_page_of_zeros_can_be_dropped() {
        use references::Step::{Access, Unmap, Zeros};
        let mut collector = ReferenceCollector::new(ReferenceCollector::WINDOW);
        collector.follow(7, true);
        collector.access(7, true);
        collector.zeros(7);
        collector.unmap(0..10);
        collector.access(7, false);
        let steps: Vec<_> = collector.finish().steps().collect();
        assert_eq!(steps, [Access(0, true), Zeros(0), Unmap(0), Access(0, false)]);
    }

    #[test]
    fn repeated_accesses_may_be_left_out() {
        let mut rng = Rng::new(3);
        let accesses: Vec<(u64, bool)> = (0..50_000)
            .map(|i| (rng.below(300) * rng.below(4) + i / 100, rng.unit() < 0.3))
            .collect();
        let [all, some] = [0, 32].map(|window| {
            let mut collector = ReferenceCollector::new(window);
            for (page, is_write) in &accesses {
                collector.follow(*page, true);
                collector.access(*page, *is_write);
            }
            collector.finish()
        });
        assert!(some.steps().count() < all.steps().count());
        for (exact, near) in page_ins(&all, 400).into_iter().zip(page_ins(&some, 400)) {
            assert!(exact.abs_diff(near) * 50 <= exact, "{exact} and {near}");
        }
    }
}
