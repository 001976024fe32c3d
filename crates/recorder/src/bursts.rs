//! The bursts of a sampled recording, and an estimate of the whole program's counts for each instruction,
//! such as TLB misses. The differences between bursts give the confidence interval.
//!
//! Sources: the ratio estimator: Cochran, Sampling Techniques (1977), 2.11. The variance of samples
//! drawn along a line, by successive differences: Wolter, Introduction to Variance Estimation (1985),
//! 7.2.

use crate::stream::SamplingStage;
use pagetax_core::stats::student_t_95;
use std::collections::HashMap;

/// Counts of one burst, or of all bursts so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Burst {
    /// Instructions recorded in the burst.
    pub instructions: u64,
    /// The program's instructions that the burst represents: up to halfway to the thread's previous and
    /// next bursts. Equals `instructions` where bursts are equally likely everywhere.
    pub stands_for: u64,
    /// Counts of the consumer, such as TLB misses by machine configuration.
    pub counts: Vec<u64>,
}

#[derive(Debug)]
struct SampledWriter {
    writer: usize,
    stage: SamplingStage,
    /// Counts at the end of its last burst.
    total: Burst,
    /// The current burst's thread, its instructions since its last burst, and if this burst is its
    /// first.
    thread: u16,
    gap: u64,
    is_first: bool,
    /// The index in the list of each thread's last burst.
    last: HashMap<u16, usize>,
}

/// All bursts of a recording; empty if the recording is not sampled.
#[derive(Debug, Default)]
pub struct Bursts {
    sampled: Vec<SampledWriter>,
    list: Vec<Burst>,
}

/// An estimate of a count for each instruction, with its 95 % confidence interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateEstimate {
    /// The estimate from all bursts.
    pub value: f64,
    /// Half of the interval's width.
    pub error: f64,
}

/// An upper bound on a CPU's speed. Each element of a repeated string instruction counts as one.
const INSTRUCTIONS_PER_NS_MAX: u128 = 1000;

/// An error: the bursts represent more instructions than the CPU time allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("its bursts represent {stands_for} instructions, more than {} ms of CPU time allow", cpu_ns / 1_000_000)]
pub struct ImpossibleWeight {
    stands_for: u128,
    cpu_ns: u64,
}

/// With fewer bursts, the interval would cover too little of the variation between bursts.
const ENOUGH: usize = 10;

impl Bursts {
    /// Returns the bursts that have ended.
    pub fn list(&self) -> &[Burst] {
        &self.list
    }

    /// Returns true if the recording is a sampled one.
    pub fn is_sampled(&self) -> bool {
        !self.sampled.is_empty()
    }

    /// Returns the current stage of a writer; [`SamplingStage::Counted`] if the recording is not
    /// sampled.
    pub fn stage(&self, writer: usize) -> SamplingStage {
        let sampled = self.sampled.iter().find(|sampled| sampled.writer == writer);
        sampled.map_or(SamplingStage::Counted, |sampled| sampled.stage)
    }

    /// Begins a stage of a writer's thread. `total` is the writer's counts so far. `gap` is the thread's
    /// instructions since its last burst, or 0 where bursts are equally likely everywhere.
    pub fn enters(
        &mut self,
        (writer, thread): (usize, u16),
        stage: SamplingStage,
        (gap, is_first): (u64, bool),
        total: Burst,
    ) {
        let nth = self.sampled.iter().position(|sampled| sampled.writer == writer);
        let nth = nth.unwrap_or_else(|| {
            let (total, last) = (total.clone(), HashMap::new());
            self.sampled.push(SampledWriter { writer, stage, total, thread, gap, is_first, last });
            self.sampled.len() - 1
        });
        let sampled = &mut self.sampled[nth];
        let before = std::mem::replace(&mut sampled.stage, stage);
        let gap_before = std::mem::replace(&mut sampled.gap, gap);
        let was_first = std::mem::replace(&mut sampled.is_first, is_first);
        let counted = std::mem::replace(&mut sampled.thread, thread);
        if before == SamplingStage::Counted && stage != SamplingStage::Counted {
            let burst = total.since(&sampled.total);
            sampled.total = total;
            if burst.instructions > 0 {
                let last = sampled.last.insert(counted, self.list.len());
                // A new thread may have an old thread's number: the last burst was not its own.
                self.add(burst, gap_before, last.filter(|_| !was_first));
            }
        }
    }

    /// Appends a burst. Half of the gap counts for the thread's previous burst.
    fn add(&mut self, mut burst: Burst, gap: u64, last: Option<usize>) {
        burst.stands_for = burst.instructions.saturating_add(gap);
        if let Some(last) = last {
            let before = &mut self.list[last].stands_for;
            *before = before.saturating_add(gap / 2);
            burst.stands_for -= gap / 2;
        }
        self.list.push(burst);
    }

    /// Checks that the bursts represent no more instructions than this CPU time allows. A wrong weight
    /// makes all rates wrong.
    pub fn check(&self, cpu_ns: u64) -> Result<(), ImpossibleWeight> {
        let stands_for = self.stands_for();
        let is_possible = stands_for <= u128::from(cpu_ns) * INSTRUCTIONS_PER_NS_MAX;
        if is_possible { Ok(()) } else { Err(ImpossibleWeight { stands_for, cpu_ns }) }
    }

    /// Estimates a figure of bursts for each instruction. Each burst has the weight of the instructions that
    /// it represents. None if there are too few bursts.
    pub fn estimate(&self, of: impl Fn(&Burst) -> f64) -> Option<RateEstimate> {
        let pair = |burst: &Burst| {
            let weight = burst.stands_for as f64;
            (of(burst) / burst.instructions as f64 * weight, weight)
        };
        ratio(&self.list.iter().map(pair).collect::<Vec<_>>())
    }

    /// Returns the program's instructions that all bursts represent.
    pub fn stands_for(&self) -> u128 {
        self.list.iter().map(|burst| u128::from(burst.stands_for)).sum()
    }
}

impl Burst {
    /// Returns the count with this index.
    pub fn count(&self, nth: usize) -> f64 {
        self.counts.get(nth).map_or(0.0, |count| *count as f64)
    }

    /// Returns what was counted since an earlier moment.
    pub(crate) fn since(&self, before: &Burst) -> Burst {
        let old = before.counts.iter().chain(std::iter::repeat(&0));
        let counts = self.counts.iter().zip(old).map(|(new, old)| new - old);
        let instructions = self.instructions - before.instructions;
        Burst { instructions, stands_for: instructions, counts: counts.collect() }
    }
}

/// Returns the ratio of sums. The interval comes from differences between neighbours: bursts are drawn
/// along the program, so its long phases are in the sample in proportion.
fn ratio(pairs: &[(f64, f64)]) -> Option<RateEstimate> {
    if pairs.len() < ENOUGH {
        return None;
    }
    let count = pairs.len() as f64;
    let over: f64 = pairs.iter().map(|pair| pair.0).sum();
    let under: f64 = pairs.iter().map(|pair| pair.1).sum();
    let value = over / under;
    let residual = |pair: &(f64, f64)| pair.0 - value * pair.1;
    let difference = |two: &[(f64, f64)]| residual(&two[1]) - residual(&two[0]);
    let squares: f64 = pairs.windows(2).map(|two| difference(two).powi(2) / 2.0).sum();
    let deviation = (squares / (count - 1.0) / count).sqrt() / (under / count);
    Some(RateEstimate { value, error: student_t_95(pairs.len() - 1) * deviation })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::access::Rng;

    #[test]
    fn bursts_are_what_came_between_phases() {
        let mut bursts = Bursts::default();
        let total =
            |instructions, walks| Burst { instructions, stands_for: 0, counts: vec![walks] };
        let mut enters = |stage, gap, total| bursts.enters((0, 3), stage, (gap, false), total);
        enters(SamplingStage::Skipped, 0, total(5, 1));
        enters(SamplingStage::Warming, 0, total(5, 1));
        enters(SamplingStage::Counted, 0, total(5, 1));
        enters(SamplingStage::Skipped, 0, total(105, 4));
        enters(SamplingStage::Counted, 700, total(105, 4));
        enters(SamplingStage::Skipped, 0, total(110, 5));
        // A burst of another thread.
        bursts.enters((0, 4), SamplingStage::Counted, (50, true), total(110, 5));
        bursts.enters((0, 4), SamplingStage::Skipped, (0, false), total(120, 5));
        // A burst of a new thread with the same number.
        bursts.enters((0, 4), SamplingStage::Counted, (90, true), total(120, 5));
        bursts.enters((0, 4), SamplingStage::Skipped, (0, false), total(130, 6));
        assert_eq!(
            (bursts.stage(0), bursts.stage(1)),
            (SamplingStage::Skipped, SamplingStage::Counted)
        );
        let burst =
            |instructions, stands_for, walks| Burst { stands_for, ..total(instructions, walks) };
        let list = [burst(100, 450, 3), burst(5, 355, 1), burst(10, 60, 0), burst(10, 100, 1)];
        assert_eq!(bursts.list(), list);
        assert_eq!(bursts.estimate(|burst| burst.count(0)), None, "of four bursts");
        assert_eq!(bursts.check(1), Ok(()));
    }

    /// Gives a gap as a clock that runs backwards would.
    #[test]
    fn a_weight_that_cannot_be_true_is_an_error() {
        let mut bursts = Bursts::default();
        let total = |instructions| Burst { instructions, ..Burst::default() };
        let long = (0u64.wrapping_sub(100_000_000) & !(1 << 63), false);
        bursts.enters((0, 0), SamplingStage::Counted, (1000, true), total(0));
        bursts.enters((0, 0), SamplingStage::Skipped, (0, false), total(100));
        assert_eq!(bursts.check(1_000_000_000), Ok(()));
        bursts.enters((0, 0), SamplingStage::Counted, long, total(100));
        bursts.enters((0, 0), SamplingStage::Skipped, (0, false), total(200));
        let error = bursts.check(1_000_000_000).unwrap_err();
        assert!(error.to_string().contains("1000 ms"), "{error}");
    }

    /// Samples a program. Half of its instructions never miss. The others miss at one in ten, and take
    /// three times as long. Of four moments, three fall into them, and each represents a third of the
    /// instructions.
    #[test]
    fn bursts_count_for_what_they_stand_for() {
        let of = |instructions, stands_for, misses| Burst {
            instructions,
            stands_for,
            counts: vec![misses],
        };
        let slow = || of(1000, 100_000, 100);
        let four = || [slow(), slow(), slow(), of(5000, 300_000, 0)];
        let bursts = Bursts { list: (0..10).flat_map(|_| four()).collect(), ..Bursts::default() };
        let value = bursts.estimate(|burst| burst.count(0)).unwrap().value;
        assert!((value - 0.05).abs() < 1e-9);
    }

    #[test]
    fn intervals_hold_the_truth_as_often_as_they_say() {
        let mut rng = Rng::new(7);
        let mut held = 0;
        for _ in 0..400 {
            let pairs: Vec<_> = (0..30)
                .map(|_| {
                    let instructions = 900 + rng.below(200);
                    // 0.1 on average, and up to twice that.
                    (instructions as f64 * rng.below(2001) as f64 / 10_000.0, instructions as f64)
                })
                .collect();
            let found = ratio(&pairs).unwrap();
            held += u32::from((found.value - 0.1).abs() <= found.error);
        }
        assert!((368..=396).contains(&held), "{held} of 400, should be 380");
    }
}
