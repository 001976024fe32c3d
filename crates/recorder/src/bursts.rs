//! Bursts of a sampled recording, and what they say of the whole program: misses for each instruction,
//! with the interval that the differences between bursts give.
//!
//! Source: the ratio estimator and its variance, Cochran, Sampling Techniques (1977), 2.11 and 6.4.

use crate::stream::Phase;
use crate::tally::Access;
use pagetax_core::stats::student_t_95;

/// What was counted: of one burst, or of all so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Burst {
    /// Instructions.
    pub instructions: u64,
    /// Accesses that no level could translate, by view and [`Access`].
    pub walks: Vec<[u64; 2]>,
    /// Time on the view's machine, modelled, in picoseconds, by view.
    pub clock_ps: Vec<u64>,
}

/// By what the moments of bursts were drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrawnBy {
    /// Each instruction was as likely to be in one as any other.
    Instructions,
    /// Each moment was: a slow instruction is likelier than a fast one, as the model has it.
    Time,
}

/// A process that is sampled.
#[derive(Debug)]
struct Sampled {
    writer: usize,
    phase: Phase,
    /// When its last burst ended.
    total: Burst,
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
    pub fn phase(&self, writer: usize) -> Phase {
        let sampled = self.sampled.iter().find(|sampled| sampled.writer == writer);
        sampled.map_or(Phase::Counted, |sampled| sampled.phase)
    }

    /// A writer enters a phase; `total` is what was counted of it so far.
    pub fn enters(&mut self, writer: usize, phase: Phase, total: Burst) {
        let Some(sampled) = self.sampled.iter_mut().find(|sampled| sampled.writer == writer) else {
            return self.sampled.push(Sampled { writer, phase, total });
        };
        let before = std::mem::replace(&mut sampled.phase, phase);
        if before == Phase::Counted && phase != Phase::Counted {
            let burst = total.since(&sampled.total);
            sampled.total = total;
            if burst.instructions > 0 {
                self.list.push(burst);
            }
        }
    }

    /// Misses for each instruction of a view and side; none of too few bursts. Where bursts were drawn by time,
    /// each counts for less the slower it was.
    pub fn estimate(&self, view: usize, side: Access, drawn_by: DrawnBy) -> Option<Estimate> {
        let pair = |burst: &Burst| {
            let walks = burst.walks.get(view).map_or(0, |walks| walks[side as usize]) as f64;
            let instructions = burst.instructions as f64;
            let clock_ps = burst.clock_ps.get(view).copied().unwrap_or(0).max(1) as f64;
            match drawn_by {
                DrawnBy::Instructions => (walks, instructions),
                DrawnBy::Time => {
                    let speed = instructions / clock_ps;
                    (walks * speed, instructions * speed)
                }
            }
        };
        ratio(&self.list.iter().map(pair).collect::<Vec<_>>())
    }
}

impl Burst {
    fn since(&self, before: &Burst) -> Burst {
        let old = before.walks.iter().copied().chain(std::iter::repeat([0; 2]));
        let walks = self.walks.iter().zip(old).map(|(new, old)| [new[0] - old[0], new[1] - old[1]]);
        let old = before.clock_ps.iter().copied().chain(std::iter::repeat(0));
        let clock_ps = self.clock_ps.iter().zip(old).map(|(new, old)| new - old);
        Burst {
            instructions: self.instructions - before.instructions,
            walks: walks.collect(),
            clock_ps: clock_ps.collect(),
        }
    }
}

/// Sum over sum, with the interval that the pairs' differences from it give.
fn ratio(pairs: &[(f64, f64)]) -> Option<Estimate> {
    if pairs.len() < ENOUGH {
        return None;
    }
    let count = pairs.len() as f64;
    let over: f64 = pairs.iter().map(|pair| pair.0).sum();
    let under: f64 = pairs.iter().map(|pair| pair.1).sum();
    let value = over / under;
    let squares: f64 = pairs.iter().map(|(over, under)| (over - value * under).powi(2)).sum();
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
        let total = |instructions, walks| Burst {
            instructions,
            walks: vec![[0, walks]],
            clock_ps: vec![instructions * 3],
        };
        bursts.enters(0, Phase::Skipped, total(5, 1));
        assert_eq!((bursts.phase(0), bursts.phase(1)), (Phase::Skipped, Phase::Counted));
        bursts.enters(0, Phase::Warming, total(5, 1));
        bursts.enters(0, Phase::Counted, total(5, 1));
        bursts.enters(0, Phase::Skipped, total(105, 4));
        assert_eq!(bursts.list(), [total(100, 3)]);
        let estimate = bursts.estimate(0, Access::Data, DrawnBy::Instructions);
        assert_eq!(estimate, None, "of one burst");
    }

    /// Half of the instructions never miss; the others miss at one in ten, and take three times as long: of
    /// four moments, three are in these.
    #[test]
    fn bursts_that_were_drawn_by_time_count_by_their_speed() {
        let of = |walks, clock_ps| Burst {
            instructions: 1000,
            walks: vec![[0, walks]],
            clock_ps: vec![clock_ps],
        };
        let four = || [of(100, 3_000), of(100, 3_000), of(100, 3_000), of(0, 1_000)];
        let list = (0..10).flat_map(|_| four()).collect();
        let bursts = Bursts { list, ..Bursts::default() };
        let value = |by| bursts.estimate(0, Access::Data, by).unwrap().value;
        assert!((value(DrawnBy::Time) - 0.05).abs() < 1e-9);
        assert!((value(DrawnBy::Instructions) - 0.075).abs() < 1e-9);
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
