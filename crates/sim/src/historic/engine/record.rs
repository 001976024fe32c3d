//! The output of a run into its sink: phases, series, counters, budget.

use super::events::Event;
use super::task::State;
use super::{CONTEXT_SWITCHES, DAEMON_NS, Engine, KERNEL_NS, RUN_QUEUE_NS, USER_NS};
use crate::hardware::Mmu;
use crate::historic::kernel::Kernel;
use crate::tally::{CounterId, Tally};
use pagetax_core::budget::MemoryRow;
use pagetax_core::counter::{Provenance, Reading};

/// The counters that every model has.
const ALWAYS: [CounterId; 6] =
    [CounterId::of("access_count"), CONTEXT_SWITCHES, DAEMON_NS, KERNEL_NS, RUN_QUEUE_NS, USER_NS];
const WALL_NS: CounterId = CounterId::of("wall_ns");

/// The state at the begin of the current phase and interval.
#[derive(Debug, Default)]
pub(super) struct Record {
    phase_start_ns: u64,
    phase_tally: Tally,
    sample_tally: Tally,
    /// The number of points in the series.
    pub points: u64,
}

impl<M: Mmu, K: Kernel<M>> Engine<'_, M, K> {
    fn counters(&self) -> impl Iterator<Item = CounterId> + use<M, K> {
        let own = self.parts.kernel.counters().iter().copied();
        ALWAYS.into_iter().chain(own)
    }

    pub(super) fn begin_phase_record(&mut self, now: u64) {
        self.record.phase_start_ns = now;
        self.record.phase_tally = self.run_state.tally.clone();
    }

    pub(super) fn end_phase_record(&mut self, index: usize, now: u64) {
        let since = |counter: CounterId| {
            let value = self.run_state.tally.get(counter) - self.record.phase_tally.get(counter);
            (counter.id(), Reading::Modeled(value))
        };
        let values: Vec<_> = self.counters().filter(is_sum).map(since).collect();
        let name = &self.plan.phases[index].name;
        self.out.phase(name, self.record.phase_start_ns, now, &values);
        self.progress();
    }

    /// Writes a point of the series: the increase of each counter in the interval that ends now.
    pub(super) fn sample(&mut self, time: u64) {
        let since = |counter: CounterId| {
            let value = self.run_state.tally.get(counter) - self.record.sample_tally.get(counter);
            (counter.id(), value)
        };
        let mut values: Vec<_> = self.counters().filter(is_sum).map(since).collect();
        self.parts.kernel.sample(&self.parts.hardware, &mut values);
        self.out.sample(time, &values);
        self.record.sample_tally = self.run_state.tally.clone();
        self.record.points += 1;
        let interval = self.plan.measure.interval.map_or(0, |interval| interval.0);
        self.events.add(time + interval, Event::Sample);
    }

    /// Reports the progress: complete phases, and the accesses of the current one.
    pub(super) fn progress(&mut self) {
        let index = self.tasks[0].cursor.phase;
        let Some(phase) = self.plan.phases.get(index) else { return };
        let planned = phase.access_count();
        let done = self.run_state.tally.get(ALWAYS[0]) - self.record.phase_tally.get(ALWAYS[0]);
        let within = if planned > 0.0 { (done as f64 / planned).min(1.0) } else { 0.0 };
        self.out.progress((index as f64 + within) / self.plan.phases.len() as f64);
    }

    /// Writes the end of the run.
    pub(super) fn report(&mut self) {
        let cut_short = self.tasks[0].state != State::Ended;
        let now = self.cpus.iter().map(|cpu| cpu.now).max().unwrap_or(0);
        self.ledgers.advance(if cut_short { now } else { self.end_ns });
        let wall_ns = self.ledgers.wall_ns();
        for counter in self.counters() {
            self.out.counter(counter.id(), Reading::Modeled(self.run_state.tally.get(counter)));
        }
        self.out.counter(WALL_NS.id(), Reading::Modeled(wall_ns));
        for (kind, histogram) in self.run_state.latencies.iter() {
            self.out.latency(kind, histogram, None, Provenance::Modeled);
        }
        let kernel_report =
            self.parts.kernel.kernel_report(&self.parts.hardware, &self.run_state.tally);
        let memory = kernel_report.memory.into_iter();
        let memory = memory.map(|(id, reading, how)| MemoryRow::new(id, reading, how)).collect();
        self.out.budget(self.ledgers.budget(memory));
        kernel_report.tables.into_iter().for_each(|table| self.out.table(table));
        kernel_report.warnings.into_iter().for_each(|warning| self.out.warning(warning));
        self.out.progress(1.0);
    }
}

/// Returns true if the counter is a sum, of which differences can be taken; not a high-water mark.
fn is_sum(counter: &CounterId) -> bool {
    !counter.id().ends_with("_max")
}
