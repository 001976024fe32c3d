//! The reports of a run to its sink: progress, the series, phases, totals.

use super::call_times::CallTimes;
use super::control::Control;
use super::figures::{PhaseFigures, RunFigures};
use super::network::{Network, Traffic};
use crate::measure::budget::{Paging, Totals, Translation, Watched, budget};
use crate::measure::calibrate::cached;
use crate::procfs::{Root, SystemSnapshot, process_memory};
use pagetax_core::counter::{Provenance, Reading};
use pagetax_core::diagnosis::queued;
use pagetax_core::machine::Sink;
use pagetax_core::network_memory::PagerCounts;
use pagetax_core::plan::{ClientKind, Op, Phase, Plan};
use pagetax_core::report::Warning;
use std::time::{Duration, Instant};

/// The counters at the last point of the series; the next point holds the differences from them.
struct SeriesPoint {
    time_ns: u64,
    system: SystemSnapshot,
    traffic: Option<Traffic>,
    /// The accesses, minor faults and major faults.
    job: [u64; 3],
}

/// The reporter of a run that is under way.
pub struct Watcher<'a> {
    out: &'a mut dyn Sink,
    begun: Instant,
    interval: Option<Duration>,
    next_sample: Option<Instant>,
    sampled: SeriesPoint,
    phases: usize,
    phase: usize,
    phase_start_ns: u64,
    /// The accesses of the phases that have ended.
    access_count: u64,
    minor_fault_count: u64,
    major_fault_count: u64,
}

impl SeriesPoint {
    fn since(&self, before: &SeriesPoint) -> Vec<(&'static str, u64)> {
        let ids = ["access_count", "minor_fault_count", "major_fault_count"];
        let each = ids.into_iter().zip(self.job).zip(before.job);
        let mut values: Vec<_> =
            each.map(|((id, now), then)| (id, now.saturating_sub(then))).collect();
        let known = |(id, reading): (&'static str, Reading)| Some((id, reading.value()?));
        let system = self.system.since(&before.system, self.time_ns - before.time_ns);
        let system = system.into_iter().filter_map(known);
        let network = self.traffic.as_ref().map(|traffic| match &before.traffic {
            Some(before) => traffic.since(before).columns(),
            None => traffic.columns(),
        });
        let network = network.unwrap_or_default();
        let is_networks = |id: &str| network.iter().any(|(own, _)| *own == id);
        values.extend(system.filter(|(id, _)| !is_networks(id)));
        values.extend(network);
        values
    }
}

impl<'a> Watcher<'a> {
    /// Prepares to report a run of this plan that began at `begun`.
    pub fn new(plan: &Plan, begun: Instant, out: &'a mut dyn Sink) -> Watcher<'a> {
        let interval =
            plan.measure.interval.map(|interval| Duration::from_nanos(interval.0.max(1)));
        Watcher {
            out,
            begun,
            interval,
            next_sample: interval.map(|interval| begun + interval),
            sampled: SeriesPoint {
                time_ns: 0,
                system: SystemSnapshot::read(&Root::default()),
                traffic: None,
                job: [0; 3],
            },
            phases: plan.phases.len().max(1),
            phase: 0,
            phase_start_ns: 0,
            access_count: 0,
            minor_fault_count: 0,
            major_fault_count: 0,
        }
    }

    /// Records that a phase begins.
    pub fn begin_phase(&mut self, index: usize, start_ns: u64) {
        (self.phase, self.phase_start_ns) = (index, start_ns);
    }

    /// Returns the time until the next point of the series; `Duration::MAX` if the job asks for none.
    pub fn until_sample(&self) -> Duration {
        let left = |due: Instant| due.saturating_duration_since(Instant::now());
        self.next_sample.map_or(Duration::MAX, left)
    }

    /// Takes a sample if one is due, and reports the progress. Called often while clients work.
    pub fn look(&mut self, control: &Control, phase: &Phase, network: Option<&Network>) {
        if let (Some(due), Some(interval)) = (self.next_sample, self.interval)
            && Instant::now() >= due
        {
            self.sample(control, phase, network);
            // A late sample does not shorten the next interval.
            self.next_sample = Some((due + interval).max(Instant::now()));
        }
        let within = self.share_of_phase(control, phase);
        self.out.progress((self.phase as f64 + within) / self.phases as f64);
    }

    fn now_ns(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    fn share_of_phase(&self, control: &Control, phase: &Phase) -> f64 {
        let accesses: u64 = control.rows().map(|row| row.access_count()).sum();
        let planned = phase.access_count();
        let sleeps: u64 =
            phase.ops.iter().map(|op| if let Op::Sleep(t) = op { t.0 } else { 0 }).sum();
        let time = phase.time.map_or(sleeps as f64 * phase.repeat as f64, |time| time.0 as f64);
        let elapsed = (self.now_ns() - self.phase_start_ns) as f64;
        let share = |done: f64, all: f64| if all > 0.0 { done / all } else { 0.0 };
        share(accesses as f64, planned).max(share(elapsed, time)).min(1.0)
    }

    /// Reports one point: the changes in the job and the machine since the last point, and the main
    /// process's memory. Forked clients are not in that memory.
    fn sample(&mut self, control: &Control, phase: &Phase, network: Option<&Network>) {
        let mut job = [self.access_count, self.minor_fault_count, self.major_fault_count];
        for row in control.rows() {
            let (minor, major) = row.faults();
            job = [job[0] + row.access_count(), job[1] + minor, job[2] + major];
        }
        let root = Root::default();
        let now = SeriesPoint {
            time_ns: self.now_ns(),
            system: SystemSnapshot::read(&root),
            traffic: network.and_then(Network::traffic),
            job,
        };
        let mut values = now.since(&self.sampled);
        if phase.client_kind != ClientKind::Processes {
            let own = process_memory(&root, std::process::id());
            values.extend(own.resident_bytes.value().map(|bytes| ("resident_bytes", bytes)));
            values.extend(own.locked_bytes.value().map(|bytes| ("locked_bytes", bytes)));
        }
        self.out.sample(now.time_ns, &values);
        self.sampled = now;
    }

    /// Reports a phase that has ended.
    pub fn end_phase(
        &mut self,
        control: &Control,
        phase: &Phase,
        start_ns: u64,
        end_ns: u64,
        figures: &PhaseFigures,
    ) {
        self.access_count += control.rows().map(|row| row.access_count()).sum::<u64>();
        self.minor_fault_count += figures.usage.minor_fault_count;
        self.major_fault_count += figures.usage.major_fault_count;
        self.out.phase(&phase.name, start_ns, end_ns, &figures.readings);
        self.out.progress((self.phase + 1) as f64 / self.phases as f64);
    }

    /// Reports the times of system calls.
    pub fn call_times(&mut self, times: &CallTimes) {
        times.report(self.out);
    }

    /// Reports a run that has ended: its counters, budget, latencies and warnings.
    pub fn whole_run(
        &mut self,
        plan: &Plan,
        figures: &RunFigures,
        network: Option<&Network>,
        watched: Option<&Watched>,
    ) {
        for (id, reading) in &figures.readings {
            self.out.counter(id, reading.clone());
        }
        if let Some(watched) = watched {
            self.budget(plan, figures, network, watched);
        }
        if let Some(network) = network
            && let Some(traffic) = network.traffic()
        {
            self.out.latency("page_in", &traffic.latency(), None, Provenance::Measured);
            network.table().into_iter().for_each(|table| self.out.table(table));
        }
        // getrusage splits CPU time into user and kernel by clock ticks, so few ticks give a coarse
        // split.
        const TICKS_NEEDED_NS: u64 = 100_000_000;
        if figures.usage.user_ns + figures.usage.kernel_ns < TICKS_NEEDED_NS {
            let text = "less than 100 ms of CPU time: its split into user and kernel is coarse";
            self.warn("short_run", text, "make the job longer (more repeats, a larger count)");
        }
    }

    fn budget(
        &mut self,
        plan: &Plan,
        figures: &RunFigures,
        network: Option<&Network>,
        watched: &Watched,
    ) {
        let calibration = cached();
        if let Err(why) = &calibration {
            self.warn("no_calibration", why, "pagetax calibrate");
        }
        let base_page_bytes = rustix::param::page_size() as u64;
        let accesses = figures.reading("access_count").value();
        let modelled = Translation::Accesses(plan.access_classes(base_page_bytes, accesses));
        let translation = Translation::best(watched.counted.clone().into_iter().chain([modelled]));
        let paging = network.and_then(|network| {
            let PagerCounts { page_in_ns_total, demand_page_in_count, .. } =
                network.traffic()?.counts;
            let overlaps = plan.phases.iter().any(|phase| phase.clients > 1);
            Some(Paging {
                page_in_ns_total,
                demand_page_in_count,
                overlaps,
                cpu_ns: network.cpu_ns(),
            })
        });
        let totals = Totals { paging, ..figures.totals() };
        let calibration = calibration.as_ref().ok();
        let budget = budget(&totals, &watched.profile, &translation, calibration);
        if let Some(waited) = queued(&budget) {
            let text = format!("the job waited {waited}");
            self.warn("busy_machine", &text, "stop it; elapsed times have its share in them");
        }
        self.out.budget(budget);
    }

    fn warn(&mut self, id: &str, text: &str, remedy: &str) {
        let (id, text, remedy) = (id.into(), text.into(), remedy.into());
        self.out.warning(Warning { id, text, remedy });
    }
}
