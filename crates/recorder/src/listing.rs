//! Trapstat's listings of a simulation: each view's time cut into intervals of its own clock.

use crate::machine::View;
use crate::simulate::Simulation;
use crate::tally::{Access, Misses, Tally};
use pagetax_core::counter::Provenance;
use pagetax_core::trapstat::{Cell, Cells, Listing, Mode, Row};
use pagetax_host::procfs::CpuList;

/// Receives listings, oldest first.
pub type Sink<'a, E> = dyn FnMut(Listing) -> Result<(), E> + 'a;

/// Cuts each view's time into listings.
pub struct ListingIntervals {
    interval_ps: Option<u64>,
    count: Option<u64>,
    cpus: Option<CpuList>,
    views: Vec<Cut>,
}

/// The end of a view's last listing.
#[derive(Default)]
struct Cut {
    /// Listings sent. Fewer than intervals where the program passed several between two looks.
    listings: u64,
    intervals: u64,
    /// By lane.
    tallies: Vec<Tally>,
}

impl ListingIntervals {
    /// Starts at 0. Without an interval there is one listing a view; `count` limits them, `cpus` picks threads in
    /// the order of appearance.
    pub fn new(
        interval_ns: Option<u64>,
        count: Option<u64>,
        cpus: Option<CpuList>,
        simulation: &Simulation,
    ) -> Self {
        let views = simulation.views().iter().map(|_| Cut::default()).collect();
        ListingIntervals { interval_ps: interval_ns.map(|ns| ns * 1000), count, cpus, views }
    }

    /// Sends the listings of finished intervals: those that a view's foremost thread has passed.
    ///
    /// # Errors
    /// The sink's.
    pub fn look<E>(&mut self, simulation: &Simulation, sink: &mut Sink<'_, E>) -> Result<(), E> {
        let Some(interval_ps) = self.interval_ps else { return Ok(()) };
        for view in 0..self.views.len() {
            let clocks = simulation.lanes().iter().map(|lane| lane.cpus[view].tally.clock_ps);
            let clock_ps = clocks.max().unwrap_or(0);
            let cut = &self.views[view];
            if clock_ps >= (cut.intervals + 1) * interval_ps
                && self.count.is_none_or(|count| cut.listings < count)
            {
                self.cut(simulation, view, clock_ps / interval_ps, sink)?;
            }
        }
        Ok(())
    }

    /// Sends the last listing: the whole run without intervals, else the rest.
    ///
    /// # Errors
    /// The sink's.
    pub fn finish<E>(&mut self, simulation: &Simulation, sink: &mut Sink<'_, E>) -> Result<(), E> {
        for view in 0..self.views.len() {
            let Cut { listings, intervals, .. } = self.views[view];
            if self.count.is_none_or(|count| listings < count) && !simulation.lanes().is_empty() {
                self.cut(simulation, view, intervals + 1, sink)?;
            }
        }
        Ok(())
    }

    fn cut<E>(
        &mut self,
        simulation: &Simulation,
        view: usize,
        intervals: u64,
        sink: &mut Sink<'_, E>,
    ) -> Result<(), E> {
        let cut = &mut self.views[view];
        let now: Vec<Tally> =
            simulation.lanes().iter().map(|lane| lane.cpus[view].tally.clone()).collect();
        cut.tallies.resize(now.len(), Tally::default());
        let since: Vec<(u32, Tally)> = now
            .iter()
            .zip(&cut.tallies)
            .map(|(now, before)| now.since(before))
            .enumerate()
            .map(|(lane, tally)| (lane as u32, tally))
            .filter(|(lane, tally)| {
                tally.clock_ps > 0 && self.cpus.as_ref().is_none_or(|cpus| cpus.contains(*lane))
            })
            .collect();
        let end_ns = now.iter().map(|tally| tally.clock_ps).max().unwrap_or(0) / 1000;
        cut.tallies = now;
        (cut.listings, cut.intervals) = (cut.listings + 1, intervals);
        sink(listing(&simulation.views()[view], &since, end_ns))
    }
}

fn listing(view: &View, since: &[(u32, Tally)], end_ns: u64) -> Listing {
    let mut rows = Vec::new();
    for (cpu, tally) in since {
        for shift in &view.shifts {
            let cells = user(view, tally, *shift);
            rows.push(Row { cpu: *cpu, mode: Mode::User, page_bytes: Some(1 << shift), cells });
        }
        for shift in &view.shifts {
            let cells = Cells::default();
            rows.push(Row { cpu: *cpu, mode: Mode::Kernel, page_bytes: Some(1 << shift), cells });
        }
    }
    let elapsed_ps = since.iter().map(|(_, tally)| tally.clock_ps).max().unwrap_or(0);
    let mut notes = vec!["n/a: the recorder sees user code only".to_string()];
    if view.cpu.handler_ps().is_none() {
        notes.push("n/a: a page walker has no translation storage buffer".into());
    }
    Listing {
        title: view.name(),
        provenance: Provenance::Modeled,
        end_ns,
        elapsed_ns: elapsed_ps / 1000,
        rows,
        notes,
    }
}

fn user(view: &View, tally: &Tally, shift: u32) -> Cells {
    let clock_ps = tally.clock_ps.max(1) as f64;
    let cell = |count: u64, ps: u64| {
        Cell::known(count as f64 / (clock_ps / 1e12), ps as f64 / clock_ps * 100.0)
    };
    let tlb = |misses: Misses| cell(misses.tlb_count, misses.tlb_ps);
    let tsb = |misses: Misses| match view.cpu.handler_ps() {
        Some(_) => cell(misses.tsb_count, misses.tsb_ps),
        None => Cell::default(),
    };
    let (code, data) =
        (tally.misses(Access::Instruction, shift), tally.misses(Access::Data, shift));
    Cells { itlb: tlb(code), itsb: tsb(code), dtlb: tlb(data), dtsb: tsb(data) }
}
