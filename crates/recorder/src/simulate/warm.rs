//! When TLBs are warm at a burst's beginning. They have what they held at the last burst's end; meanwhile the
//! program went on without them. After twice as many walks as the largest has entries, nearly all of that has
//! left it: a set of 16 ways was filled 32 times on the average, and by fewer than 16 pages one time in 500.

use crate::stream::Phase;

/// Warm-ups of all writers.
pub struct WarmUps {
    /// Walks that one takes, by view.
    needed: Vec<u64>,
    /// By writer, if it is sampled.
    of: Vec<Option<WarmUp>>,
}

/// Of a writer.
#[derive(Default)]
struct WarmUp {
    /// Begun so far.
    number: u32,
    /// Walks before the last one, by view.
    before: Vec<u64>,
}

impl WarmUps {
    /// `entries`: of the largest TLB, by view.
    pub fn new(entries: impl Iterator<Item = u64>) -> WarmUps {
        WarmUps { needed: entries.map(|entries| 2 * entries).collect(), of: Vec::new() }
    }

    /// A writer enters a phase, having walked so often.
    pub fn enters(&mut self, writer: usize, phase: Phase, walks: Vec<u64>) {
        if phase != Phase::Warming {
            return;
        }
        if self.of.len() <= writer {
            self.of.resize_with(writer + 1, || None);
        }
        let warm_up = self.of[writer].get_or_insert_default();
        warm_up.number += 1;
        warm_up.before = walks;
    }

    /// The number of a writer's warm-up, from 1 on, if its TLBs are warm; else 0.
    pub fn warmed(&self, writer: usize, walks: impl FnOnce() -> Vec<u64>) -> u32 {
        let Some(Some(warm_up)) = self.of.get(writer) else { return 0 };
        let walked = walks().into_iter().zip(&warm_up.before).map(|(now, before)| now - before);
        let is_warm = walked.zip(&self.needed).all(|(walked, needed)| walked >= *needed);
        if is_warm { warm_up.number } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_views_must_have_walked_enough_since_the_warm_up_began() {
        let mut warm_ups = WarmUps::new([10, 1].into_iter());
        assert_eq!(warm_ups.warmed(3, || vec![100, 100]), 0, "not sampled");
        warm_ups.enters(3, Phase::Skipped, vec![0, 0]);
        assert_eq!(warm_ups.warmed(3, || vec![100, 100]), 0, "none begun");
        for (number, before) in [(1, 0), (2, 50)] {
            warm_ups.enters(3, Phase::Warming, vec![before, before]);
            assert_eq!(warm_ups.warmed(3, || vec![before + 19, before + 9]), 0);
            assert_eq!(warm_ups.warmed(3, || vec![before + 20, before + 1]), 0);
            assert_eq!(warm_ups.warmed(3, || vec![before + 20, before + 2]), number);
        }
        assert_eq!(warm_ups.warmed(0, || vec![100, 100]), 0, "another writer");
    }
}
