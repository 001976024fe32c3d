//! Trapstat's listings of a simulation: cuts each configuration's time into intervals of its own clock.

use crate::config::MachineConfig;
use crate::counters::{CpuCounters, Misses, Side};
use crate::simulate::Simulation;
use pagetax_core::counter::Provenance;
use pagetax_core::trapstat::{Cell, Cells, Listing, Mode, TrapstatRow};
use pagetax_host::procfs::CpuList;

/// Receives listings, oldest first.
pub type Sink<'a, E> = dyn FnMut(Listing) -> Result<(), E> + 'a;

/// The listings of a simulation, interval by interval.
pub struct ListingIntervals {
    interval_ps: Option<u64>,
    count: Option<u64>,
    cpus: Option<CpuList>,
    configs: Vec<Cut>,
}

/// The end of a configuration's last listing.
#[derive(Default)]
struct Cut {
    /// Listings sent. Fewer than intervals if the program passed several between two checks.
    listings: u64,
    intervals: u64,
    /// The counters of each simulated thread.
    counters: Vec<CpuCounters>,
}

impl ListingIntervals {
    /// Begins at time 0. Without an interval, each configuration has one listing. `count` limits the
    /// listings. `cpus` selects threads in the order of appearance.
    pub fn new(
        interval_ns: Option<u64>,
        count: Option<u64>,
        cpus: Option<CpuList>,
        simulation: &Simulation,
    ) -> Self {
        let configs = simulation.configs().iter().map(|_| Cut::default()).collect();
        ListingIntervals { interval_ps: interval_ns.map(|ns| ns * 1000), count, cpus, configs }
    }

    /// Sends the listings of finished intervals: those that a configuration's foremost thread has
    /// passed.
    ///
    /// # Errors
    /// The sink failed.
    pub fn look<E>(&mut self, simulation: &Simulation, sink: &mut Sink<'_, E>) -> Result<(), E> {
        let Some(interval_ps) = self.interval_ps else { return Ok(()) };
        for config in 0..self.configs.len() {
            let clocks =
                simulation.threads().iter().map(|thread| thread.cpus[config].counters.clock_ps);
            let clock_ps = clocks.max().unwrap_or(0);
            let cut = &self.configs[config];
            if clock_ps >= (cut.intervals + 1) * interval_ps
                && self.count.is_none_or(|count| cut.listings < count)
            {
                self.cut(simulation, config, clock_ps / interval_ps, sink)?;
            }
        }
        Ok(())
    }

    /// Sends the last listing: the rest, or the whole run if there are no intervals.
    ///
    /// # Errors
    /// The sink failed.
    pub fn finish<E>(&mut self, simulation: &Simulation, sink: &mut Sink<'_, E>) -> Result<(), E> {
        for config in 0..self.configs.len() {
            let Cut { listings, intervals, .. } = self.configs[config];
            if self.count.is_none_or(|count| listings < count) && !simulation.threads().is_empty() {
                self.cut(simulation, config, intervals + 1, sink)?;
            }
        }
        Ok(())
    }

    fn cut<E>(
        &mut self,
        simulation: &Simulation,
        config: usize,
        intervals: u64,
        sink: &mut Sink<'_, E>,
    ) -> Result<(), E> {
        let cut = &mut self.configs[config];
        let now: Vec<CpuCounters> = simulation
            .threads()
            .iter()
            .map(|thread| thread.cpus[config].counters.clone())
            .collect();
        cut.counters.resize(now.len(), CpuCounters::default());
        let since: Vec<(u32, CpuCounters)> = now
            .iter()
            .zip(&cut.counters)
            .map(|(now, before)| now.since(before))
            .enumerate()
            .map(|(thread, counters)| (thread as u32, counters))
            .filter(|(thread, counters)| {
                counters.clock_ps > 0
                    && self.cpus.as_ref().is_none_or(|cpus| cpus.contains(*thread))
            })
            .collect();
        let end_ns = now.iter().map(|counters| counters.clock_ps).max().unwrap_or(0) / 1000;
        cut.counters = now;
        (cut.listings, cut.intervals) = (cut.listings + 1, intervals);
        sink(listing(&simulation.configs()[config], &since, end_ns))
    }
}

fn listing(config: &MachineConfig, since: &[(u32, CpuCounters)], end_ns: u64) -> Listing {
    let mut rows = Vec::new();
    for (cpu, counters) in since {
        for shift in &config.shifts {
            let cells = user(config, counters, *shift);
            rows.push(TrapstatRow {
                cpu: *cpu,
                mode: Mode::User,
                page_bytes: Some(1 << shift),
                cells,
            });
        }
        for shift in &config.shifts {
            let cells = Cells::default();
            rows.push(TrapstatRow {
                cpu: *cpu,
                mode: Mode::Kernel,
                page_bytes: Some(1 << shift),
                cells,
            });
        }
    }
    let elapsed_ps = since.iter().map(|(_, counters)| counters.clock_ps).max().unwrap_or(0);
    let mut notes = vec!["n/a: the recorder sees user code only".to_string()];
    if config.cpu.handler_ps().is_none() {
        notes.push("n/a: a page walker has no translation storage buffer".into());
    }
    Listing {
        title: config.name(),
        provenance: Provenance::Modeled,
        end_ns,
        elapsed_ns: elapsed_ps / 1000,
        rows,
        notes,
    }
}

fn user(config: &MachineConfig, counters: &CpuCounters, shift: u32) -> Cells {
    let clock_ps = counters.clock_ps.max(1) as f64;
    let cell = |count: u64, ps: u64| {
        Cell::known(count as f64 / (clock_ps / 1e12), ps as f64 / clock_ps * 100.0)
    };
    let tlb = |misses: Misses| cell(misses.tlb_count, misses.tlb_ps);
    let tsb = |misses: Misses| match config.cpu.handler_ps() {
        Some(_) => cell(misses.tsb_count, misses.tsb_ps),
        None => Cell::default(),
    };
    let (code, data) = (counters.misses(Side::Code, shift), counters.misses(Side::Data, shift));
    Cells { itlb: tlb(code), itsb: tsb(code), dtlb: tlb(data), dtsb: tsb(data) }
}
