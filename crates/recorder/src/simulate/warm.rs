//! The length of TLB warm-ups at the start of bursts. Between bursts, TLBs keep the entries of the last
//! burst's end, while the program goes on. Until these stale entries are replaced, the miss rate is too
//! low or too high. After twice as many misses as the largest TLB has entries, nearly all are replaced.
//! A set of 16 ways then had 32 fills on average, and fewer than 16 in one case of 500.
//!
//! Warm-ups are as long as the program parts with most misses need. Parts with few misses start half
//! cold. This changes the total little.

use crate::stream::SamplingStage;

/// The warm-ups of all writers.
pub struct WarmUps {
    /// The number of misses that ends a warm-up, by configuration.
    needed: Vec<u64>,
    /// Warm-ups by writer; none if it is not sampled.
    of: Vec<Option<WarmUp>>,
}

/// Counts of a writer so far: instructions, and misses by configuration.
#[derive(Debug, Clone, Default)]
pub struct WriterProgress {
    pub instructions: u64,
    pub walks: Vec<u64>,
}

/// The warm-up of one writer.
struct WarmUp {
    stage: SamplingStage,
    /// Counts at the begin of the stage.
    began: WriterProgress,
    /// The thread's instructions since its last burst.
    gap: u64,
    /// Estimated misses of the program by the warm-up length that their rate needs: [`length_of`].
    walks: [f64; LENGTHS],
    /// Instructions of the next warm-up.
    length: u32,
}

/// Instructions of the first warm-up; below, of the shortest.
const FIRST: u32 = 1_000_000;
const SHORTEST: f64 = 300e3;
/// The number of lengths; each is a quarter longer than the previous one.
const LENGTHS: usize = 40;
const LONGER: f64 = 1.25;
/// The share of all misses for which TLBs may be cold.
const TOLERANCE: f64 = 0.15;

fn length_of(nth: usize) -> f64 {
    SHORTEST * LONGER.powi(nth as i32)
}

impl WarmUps {
    /// `entries`: of the largest TLB, by config.
    pub fn new(entries: impl Iterator<Item = u64>) -> WarmUps {
        WarmUps { needed: entries.map(|entries| 2 * entries).collect(), of: Vec::new() }
    }

    pub fn enters(&mut self, writer: usize, stage: SamplingStage, gap: u64, done: WriterProgress) {
        if self.of.len() <= writer {
            self.of.resize_with(writer + 1, || None);
        }
        let warm_up = self.of[writer].get_or_insert_with(|| WarmUp {
            stage,
            began: done.clone(),
            gap: 0,
            walks: [0.0; LENGTHS],
            length: FIRST,
        });
        if (warm_up.stage, stage) == (SamplingStage::Counted, SamplingStage::Skipped) {
            warm_up.learn(&done, &self.needed);
        }
        (warm_up.stage, warm_up.began, warm_up.gap) = (stage, done, gap);
    }

    /// Instructions that a writer's next warm-up should have; 0: it has no bursts.
    pub fn length(&self, writer: usize) -> u32 {
        self.of.get(writer).and_then(Option::as_ref).map_or(0, |warm_up| warm_up.length)
    }
}

impl WarmUp {
    /// Updates the length from the counts of the burst that has ended.
    fn learn(&mut self, done: &WriterProgress, needed: &[u64]) {
        let instructions = (done.instructions - self.began.instructions).max(1) as f64;
        for ((now, before), needed) in done.walks.iter().zip(&self.began.walks).zip(needed) {
            let rate = (now - before) as f64 / instructions;
            let steps = (*needed as f64 / rate / SHORTEST).log(LONGER).ceil();
            self.walks[(steps.max(0.0) as usize).min(LENGTHS - 1)] +=
                rate * (self.gap as f64 + instructions);
        }
        let enough =
            |nth: &usize| self.cold(length_of(*nth)) <= TOLERANCE * self.walks.iter().sum::<f64>();
        self.length = length_of((0..LENGTHS).find(enough).unwrap_or(LENGTHS - 1)) as u32;
    }

    /// Returns the misses for which TLBs are cold after warm-ups of this length. Partly cold TLBs count in
    /// part.
    fn cold(&self, length: f64) -> f64 {
        let of = |(nth, walks): (usize, &f64)| walks * (1.0 - length / length_of(nth)).max(0.0);
        self.walks.iter().enumerate().map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the length after `bursts` bursts. `rate` is the misses of a TLB of 1000 entries in a
    /// million instructions, by burst.
    fn after(bursts: u64, rate: impl Fn(u64) -> u64) -> u32 {
        let mut warm_ups = WarmUps::new([1000].into_iter());
        let mut done = WriterProgress { instructions: 0, walks: vec![0] };
        for burst in 0..bursts {
            let mut goes_on = |instructions: u32| {
                done.instructions += u64::from(instructions);
                done.walks[0] += u64::from(instructions) * rate(burst) / 1_000_000;
                done.clone()
            };
            warm_ups.enters(3, SamplingStage::Skipped, 0, goes_on(0));
            let length = warm_ups.length(3);
            warm_ups.enters(3, SamplingStage::Warming, 0, goes_on(0));
            warm_ups.enters(3, SamplingStage::Counted, 50_000_000, goes_on(length));
            warm_ups.enters(3, SamplingStage::Skipped, 0, goes_on(length));
        }
        warm_ups.length(3)
    }

    #[test]
    fn warm_ups_fill_tlbs_twice_where_most_misses_are() {
        let near = |length: u32, millions: f64| {
            let ratio = f64::from(length) / 1e6 / millions;
            assert!((0.7..1.3).contains(&ratio), "{length}, should be {millions} million");
        };
        assert_eq!(WarmUps::new([1000].into_iter()).length(7), 0, "nobody's");
        near(after(1000, |_| 1000), 2.0);
        near(after(1000, |_| 100), 20.0);
        near(after(1000, |_| 100_000), 0.3);
        // Three of four bursts have a hundredth of the misses.
        near(after(1000, |burst| if burst % 4 == 0 { 1000 } else { 10 }), 2.0);
    }
}
