//! What the sink hears while a plan runs: progress, the series, phases, totals.

use super::control::Control;
use super::figures::{PhaseFigures, RunFigures};
use crate::budget::{Translation, Watched, budget};
use crate::calibrate::cached;
use crate::procfs::{Root, SystemSnapshot, process_memory};
use pagetax_core::counter::Reading;
use pagetax_core::machine::Sink;
use pagetax_core::plan::{ClientKind, Op, Phase, Plan};
use pagetax_core::report::Warning;
use std::time::{Duration, Instant};

/// Reports a run as it goes.
pub struct Watcher<'a> {
    out: &'a mut dyn Sink,
    begun: Instant,
    interval: Option<Duration>,
    next_sample: Option<Instant>,
    system_before: SystemSnapshot,
    phases: usize,
    phase: usize,
    phase_start_ns: u64,
    /// Accesses and faults of the phases that have ended.
    access_count: u64,
    minor_fault_count: u64,
    major_fault_count: u64,
}

impl<'a> Watcher<'a> {
    /// For this plan, whose run began then.
    pub fn new(plan: &Plan, begun: Instant, out: &'a mut dyn Sink) -> Watcher<'a> {
        let interval =
            plan.measure.interval.map(|interval| Duration::from_nanos(interval.0.max(1)));
        Watcher {
            out,
            begun,
            interval,
            next_sample: interval.map(|interval| begun + interval),
            system_before: SystemSnapshot::read(&Root::default()),
            phases: plan.phases.len().max(1),
            phase: 0,
            phase_start_ns: 0,
            access_count: 0,
            minor_fault_count: 0,
            major_fault_count: 0,
        }
    }

    /// A phase begins.
    pub fn begin_phase(&mut self, index: usize, start_ns: u64) {
        (self.phase, self.phase_start_ns) = (index, start_ns);
    }

    /// How long until the next point of the series.
    pub fn until_sample(&self) -> Duration {
        let left = |due: Instant| due.saturating_duration_since(Instant::now());
        self.next_sample.map_or(Duration::MAX, left)
    }

    /// Called often while clients work.
    pub fn look(&mut self, control: &Control, phase: &Phase) {
        if let (Some(due), Some(interval)) = (self.next_sample, self.interval)
            && Instant::now() >= due
        {
            self.sample(control, phase);
            // A late sample does not make the next ones hurry.
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

    /// One point: the job's counts since the start of the run, the machine's page traffic, and what
    /// the main process holds now (forked clients are not in it).
    fn sample(&mut self, control: &Control, phase: &Phase) {
        let (mut accesses, mut minor, mut major) =
            (self.access_count, self.minor_fault_count, self.major_fault_count);
        for row in control.rows() {
            let faults = row.faults();
            (accesses, minor, major) =
                (accesses + row.access_count(), minor + faults.0, major + faults.1);
        }
        let mut values = vec![
            ("access_count", accesses),
            ("minor_fault_count", minor),
            ("major_fault_count", major),
        ];
        let (root, time_ns) = (Root::default(), self.now_ns());
        if phase.client_kind != ClientKind::Processes {
            let own = process_memory(&root, std::process::id());
            values.extend(own.resident_bytes.value().map(|bytes| ("resident_bytes", bytes)));
            values.extend(own.locked_bytes.value().map(|bytes| ("locked_bytes", bytes)));
        }
        let system = SystemSnapshot::read(&root).since(&self.system_before, time_ns);
        let known = |(id, reading): (&'static str, Reading)| Some((id, reading.value()?));
        values.extend(system.into_iter().filter_map(known));
        self.out.sample(time_ns, &values);
    }

    /// A phase has ended.
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

    /// The run has ended.
    pub fn whole_run(&mut self, plan: &Plan, figures: &RunFigures, watched: Option<&Watched>) {
        for (id, reading) in &figures.readings {
            self.out.counter(id, reading.clone());
        }
        if let Some(watched) = watched {
            self.budget(plan, figures, watched);
        }
        // getrusage splits CPU time into user and kernel by clock ticks.
        const TICKS_NEEDED_NS: u64 = 100_000_000;
        if figures.usage.user_ns + figures.usage.kernel_ns < TICKS_NEEDED_NS {
            let text = "less than 100 ms of CPU time: its split into user and kernel is coarse";
            self.warn("short_run", text, "make the job longer (more repeats, a larger count)");
        }
    }

    fn budget(&mut self, plan: &Plan, figures: &RunFigures, watched: &Watched) {
        let calibration = cached();
        if let Err(why) = &calibration {
            self.warn("no_calibration", why, "pagetax calibrate");
        }
        let base_page_bytes = rustix::param::page_size() as u64;
        let accesses = figures.reading("access_count").value();
        let translation = Translation::of_plan(plan, base_page_bytes, accesses);
        let totals = figures.totals();
        let budget = budget(&totals, &watched.profile, &translation, calibration.as_ref().ok());
        self.out.budget(budget);
    }

    fn warn(&mut self, id: &str, text: &str, remedy: &str) {
        let (id, text, remedy) = (id.into(), text.into(), remedy.into());
        self.out.warning(Warning { id, text, remedy });
    }
}
