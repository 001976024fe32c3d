//! A prediction from samples: the walks of bursts, each with the weight of the instructions that it
//! represents, and the first touches of a log of page faults. Bursts do not show first touches between them.

use crate::bursts::{Burst, Bursts};
use crate::filter::PAGE_SHIFT;
use crate::pages::{PageObserver, RecordAdapter, Thread};
use crate::places::Segment;
use crate::predict::{Faults, Predicted, Predictor, Walks};
use crate::simulate::warm::{WarmUps, WriterProgress};
use crate::stream::{Consumer, Event, RawRecord, SamplingStage, Writer};
use pagetax_core::address_pattern::AddressPart;
use pagetax_host::launch::program::Program;
use pagetax_host::measure::fault_log::LoggedFault;
use pagetax_sim::hardware::translation::Translation;
use std::collections::{HashMap, HashSet};

/// log2 of the memory that is taken as new after a page of it was touched for the first time again, in base
/// pages.
const BLOCK_SHIFT: u32 = 21 - PAGE_SHIFT;

/// A consumer of a sampled recording that predicts walks for several page sizes.
pub struct SampledPredictor {
    adapter: RecordAdapter<Predictor>,
    /// Counts by writer.
    writers: HashMap<usize, WriterCounts>,
    bursts: Bursts,
    warm_ups: WarmUps,
    size_count: usize,
}

/// Counts of a writer: accesses, and those of [`Walks`] by page size.
#[derive(Debug, Clone, Default)]
struct WriterCounts {
    /// Counts of bursts and of warm-ups.
    all: Burst,
    /// Counts of bursts.
    counted: Burst,
}

/// Adds what was counted meanwhile.
fn add(sum: &mut Burst, more: &Burst) {
    sum.instructions += more.instructions;
    sum.counts.resize(more.counts.len(), 0);
    sum.counts.iter_mut().zip(&more.counts).for_each(|(sum, more)| *sum += more);
}

/// Returns the walks of a page size; none before the first access.
fn walks_of(burst: &Burst, size: usize) -> Walks {
    let of_size = burst.counts.get(1 + size * Walks::COUNTS..);
    let of_size = of_size.and_then(|counts| counts.first_chunk());
    of_size.copied().map(Walks::from_counts).unwrap_or_default()
}

impl SampledPredictor {
    /// Creates a predictor for a CPU, page sizes (log2), which include the base page, and a program.
    pub fn new(cpu: &Translation, shifts: &[u32], program: &Program) -> Self {
        let entries = shifts.iter().map(|_| cpu.data().entries_max());
        SampledPredictor {
            adapter: RecordAdapter::new(Predictor::new(cpu, shifts), program),
            writers: HashMap::new(),
            bursts: Bursts::default(),
            warm_ups: WarmUps::new(entries),
            size_count: shifts.len(),
        }
    }

    /// Returns the bursts of the recording.
    pub fn bursts(&self) -> &Bursts {
        &self.bursts
    }

    /// Predicts for the whole program, with these faults. `seen_share` is the share of its CPU time that the
    /// bursts represent. None if there are too few bursts.
    pub fn predicted(&self, faults: Vec<Faults>, seen_share: f64) -> Option<Predicted> {
        let recorded = self.adapter.pages.instruction_count as u128;
        let instructions = self.bursts.stands_for().max(recorded) as f64 / seen_share;
        let estimate = |nth: usize| Some(self.bursts.estimate(|b| b.count(nth))?.value);
        let total = |nth: usize| Some((estimate(nth)? * instructions) as u64);
        let counts = (0..1 + self.size_count * Walks::COUNTS).map(total).collect::<Option<_>>()?;
        let totals = Burst { counts, ..Burst::default() };
        let saved_ns =
            |burst: &Burst, size: usize| walks_of(burst, 0).ns().0 - walks_of(burst, size).ns().0;
        let error_ns = |size: usize| {
            let error = self.bursts.estimate(|burst| saved_ns(burst, size))?.error;
            Some(error * instructions)
        };
        Some(Predicted {
            walks: (0..self.size_count).map(|size| walks_of(&totals, size)).collect(),
            faults,
            sampling_error_ns: (0..self.size_count).map(error_ns).collect::<Option<_>>()?,
            access_count: totals.counts[0],
        })
    }

    /// Returns the counts of all writers so far.
    fn now(&self) -> Burst {
        let pages = &self.adapter.pages;
        let walks = (0..self.size_count).flat_map(|size| pages.walks(size).counts());
        Burst {
            instructions: pages.instruction_count,
            counts: std::iter::once(pages.access_count).chain(walks).collect(),
            ..Burst::default()
        }
    }

    /// Takes records between two changes of the stage.
    fn take_part(&mut self, writer: Writer, records: &[RawRecord]) {
        if records.is_empty() {
            return;
        }
        let before = self.now();
        self.adapter.take(writer, records);
        let more = self.now().since(&before);
        let is_counted = self.bursts.stage(writer.number) == SamplingStage::Counted;
        let counts = self.writers.entry(writer.number).or_default();
        add(&mut counts.all, &more);
        if is_counted {
            add(&mut counts.counted, &more);
        }
    }

    fn enter(&mut self, writer: usize, thread: u16, stage: SamplingStage, gap: (u64, bool)) {
        let of_writer = self.writers.entry(writer).or_default();
        let walk_count = |size: usize| {
            let walks = walks_of(&of_writer.all, size);
            walks.dependent_count + walks.other_count
        };
        let done = WriterProgress {
            instructions: of_writer.all.instructions,
            walks: (0..self.size_count).map(walk_count).collect(),
        };
        let total = of_writer.counted.clone();
        self.bursts.enters((writer, thread), stage, gap, total);
        self.warm_ups.enters(writer, stage, gap.0, done);
    }
}

impl Consumer for SampledPredictor {
    fn take(&mut self, writer: Writer, records: &[RawRecord]) {
        let mut from = 0;
        for (at, record) in records.iter().enumerate() {
            let Some(record) = record.decode() else { continue };
            if let Event::Stage { stage, gap, is_first } = record.event {
                self.take_part(writer, &records[from..at]);
                self.enter(writer.number, record.thread, stage, (gap, is_first));
                from = at + 1;
            }
        }
        self.take_part(writer, &records[from..]);
    }

    fn warm_up(&self, writer: Writer) -> u32 {
        self.warm_ups.length(writer.number)
    }

    /// Keeps the threads, whose walks remain in the totals.
    fn ended(&mut self, _writer: Writer) {}
}

/// Returns the first touches for each page size (log2), of the faults of a run on base pages. Memory of which
/// a page faults again was returned to the kernel before.
pub fn first_touches(cpu: &Translation, shifts: &[u32], faults: &[LoggedFault]) -> Vec<Faults> {
    let mut predictor = Predictor::new(cpu, shifts);
    let mut touched = HashSet::new();
    for fault in faults {
        if touched.contains(&fault.page) {
            let block = fault.page >> BLOCK_SHIFT << BLOCK_SHIFT;
            let block = block..block + (1 << BLOCK_SHIFT);
            block.clone().for_each(|page| {
                touched.remove(&page);
            });
            predictor.gone(Thread::default(), block);
        }
        touched.insert(fault.page);
        let segment = match fault.part {
            AddressPart::Heap => Segment::Heap,
            AddressPart::Stack => Segment::Stack,
            _ => Segment::Anon,
        };
        predictor.found(0, fault.page, segment);
    }
    predictor.predicted().faults
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_sim::{hardware::configuration, models};

    #[test]
    fn memory_that_faults_again_is_new() {
        let model = models::find("x86-64-calibrated").unwrap();
        let cpu = configuration::translation(&model).unwrap();
        let fault = |page| LoggedFault { page, part: AddressPart::Mapping };
        let once = (1024..1536).map(fault);
        let faults: Vec<_> = once.clone().chain(once).collect();
        let [base, large] = first_touches(&cpu, &[12, 21], &faults)[..] else { panic!() };
        assert_eq!((base.base_count, base.large_count), (1024, 0));
        assert_eq!((large.base_count, large.large_count, large.large_filled_count), (0, 2, 2));
    }
}
