//! Bursts of a sampled recording, and what they say of the whole program: misses for each instruction,
//! with the interval that the differences between bursts give.
//!
//! Sources: the ratio estimator, Cochran, Sampling Techniques (1977), 2.11; the variance of samples drawn along
//! a line by successive differences, Wolter, Introduction to Variance Estimation (1985), 7.2.

use crate::counters::Side;
use crate::stream::SamplingStage;
use pagetax_core::stats::student_t_95;
use std::collections::HashMap;

/// What was counted: of one burst, or of all so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Burst {
    /// Instructions.
    pub instructions: u64,
    /// Of the program's, as many as it stands for: halfway to its thread's bursts before and after it; its own, where
    /// bursts are as likely everywhere.
    pub stands_for: u64,
    /// Accesses that no level could translate, by config and [`Side`].
    pub walks: Vec<[u64; 2]>,
}

/// A process that is sampled.
#[derive(Debug)]
struct Sampled {
    writer: usize,
    stage: SamplingStage,
    /// When its last burst ended.
    total: Burst,
    /// Of the one that it is in: the thread, instructions since that last counted, and whether it never has.
    thread: u16,
    gap: u64,
    is_first: bool,
    /// The last burst of each thread, in the list.
    last: HashMap<u16, usize>,
}

/// All bursts of a recording; none if it is not sampled.
#[derive(Debug, Default)]
pub struct Bursts {
    sampled: Vec<Sampled>,
    list: Vec<Burst>,
}

/// Misses for each instruction, with the 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Of all bursts together.
    pub value: f64,
    /// Half of the interval.
    pub error: f64,
}

/// No processor executes as many, though each element of a repeated instruction counts as one.
const INSTRUCTIONS_PER_NS_MAX: u128 = 1000;

/// Bursts that stand for more than the program can have done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("its bursts stand for {stands_for} instructions, which {} ms of CPU time do not allow", cpu_ns / 1_000_000)]
pub struct ImpossibleWeight {
    stands_for: u128,
    cpu_ns: u64,
}

/// Fewer bursts say too little of the bursts that were not seen.
const ENOUGH: usize = 10;

impl Bursts {
    /// Those that ended.
    pub fn list(&self) -> &[Burst] {
        &self.list
    }

    /// Whether the recording is a sampled one.
    pub fn is_sampled(&self) -> bool {
        !self.sampled.is_empty()
    }

    /// What accesses of a writer are worth now.
    pub fn stage(&self, writer: usize) -> SamplingStage {
        let sampled = self.sampled.iter().find(|sampled| sampled.writer == writer);
        sampled.map_or(SamplingStage::Counted, |sampled| sampled.stage)
    }

    /// A writer's thread enters a stage; `total` is what was counted of the writer so far. `gap`: instructions since
    /// the thread last counted, and whether it never has; 0: bursts are as likely everywhere.
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
            self.sampled.push(Sampled { writer, stage, total, thread, gap, is_first, last });
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
                // The burst before a thread's first one is that of another thread, which had its number.
                self.add(burst, gap_before, last.filter(|_| !was_first));
            }
        }
    }

    /// Half of the gap is the burst's before it, the last one of its thread.
    fn add(&mut self, mut burst: Burst, gap: u64, last: Option<usize>) {
        burst.stands_for = burst.instructions.saturating_add(gap);
        if let Some(last) = last {
            let before = &mut self.list[last].stands_for;
            *before = before.saturating_add(gap / 2);
            burst.stands_for -= gap / 2;
        }
        self.list.push(burst);
    }

    /// Checks that bursts stand for no more instructions than so much CPU time allows. A weight that cannot be true
    /// makes all rates wrong.
    pub fn check(&self, cpu_ns: u64) -> Result<(), ImpossibleWeight> {
        let stands_for = self.list.iter().map(|burst| u128::from(burst.stands_for)).sum();
        let is_possible = stands_for <= u128::from(cpu_ns) * INSTRUCTIONS_PER_NS_MAX;
        if is_possible { Ok(()) } else { Err(ImpossibleWeight { stands_for, cpu_ns }) }
    }

    /// Misses for each instruction of a config and side; none of too few bursts. Each burst counts for the
    /// instructions that it stands for, however long it was.
    pub fn estimate(&self, config: usize, side: Side) -> Option<Estimate> {
        let pair = |burst: &Burst| {
            let walks = burst.walks.get(config).map_or(0, |walks| walks[side as usize]) as f64;
            let weight = burst.stands_for as f64;
            (walks / burst.instructions as f64 * weight, weight)
        };
        ratio(&self.list.iter().map(pair).collect::<Vec<_>>())
    }
}

impl Burst {
    fn since(&self, before: &Burst) -> Burst {
        let old = before.walks.iter().copied().chain(std::iter::repeat([0; 2]));
        let walks = self.walks.iter().zip(old).map(|(new, old)| [new[0] - old[0], new[1] - old[1]]);
        let instructions = self.instructions - before.instructions;
        Burst { instructions, stands_for: instructions, walks: walks.collect() }
    }
}

/// Sum over sum, with the interval that differences between neighbours give: they were drawn one after the other along
/// the program, whose long phases are in the sample as often as they should be.
fn ratio(pairs: &[(f64, f64)]) -> Option<Estimate> {
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
    Some(Estimate { value, error: student_t_95(pairs.len() - 1) * deviation })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::access::Rng;

    #[test]
    fn bursts_are_what_came_between_phases() {
        let mut bursts = Bursts::default();
        let total =
            |instructions, walks| Burst { instructions, stands_for: 0, walks: vec![[0, walks]] };
        let mut enters = |stage, gap, total| bursts.enters((0, 3), stage, (gap, false), total);
        enters(SamplingStage::Skipped, 0, total(5, 1));
        enters(SamplingStage::Warming, 0, total(5, 1));
        enters(SamplingStage::Counted, 0, total(5, 1));
        enters(SamplingStage::Skipped, 0, total(105, 4));
        enters(SamplingStage::Counted, 700, total(105, 4));
        enters(SamplingStage::Skipped, 0, total(110, 5));
        // Another thread's.
        bursts.enters((0, 4), SamplingStage::Counted, (50, true), total(110, 5));
        bursts.enters((0, 4), SamplingStage::Skipped, (0, false), total(120, 5));
        // And of one that has its number after it.
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
        assert_eq!(bursts.estimate(0, Side::Data), None, "of four bursts");
        assert_eq!(bursts.check(1), Ok(()));
    }

    /// As if a clock had gone backwards.
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

    /// Half of the instructions never miss; the others miss at one in ten, and take three times as long: of
    /// four moments, three are in these, and each stands for a third of the instructions.
    #[test]
    fn bursts_count_for_what_they_stand_for() {
        let of = |instructions, stands_for, misses| Burst {
            instructions,
            stands_for,
            walks: vec![[0, misses]],
        };
        let slow = || of(1000, 100_000, 100);
        let four = || [slow(), slow(), slow(), of(5000, 300_000, 0)];
        let bursts = Bursts { list: (0..10).flat_map(|_| four()).collect(), ..Bursts::default() };
        let value = bursts.estimate(0, Side::Data).unwrap().value;
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
                    // 0.1 on the average, and up to twice that.
                    (instructions as f64 * rng.below(2001) as f64 / 10_000.0, instructions as f64)
                })
                .collect();
            let found = ratio(&pairs).unwrap();
            held += u32::from((found.value - 0.1).abs() <= found.error);
        }
        assert!((368..=396).contains(&held), "{held} of 400, should be 380");
    }
}
