//! The experiment on processes that already run: collapse, measure, split, measure, in turn. Before that,
//! all is collapsed and split once, since base pages after a split are not as they were found.
//!
//! Invariants: only blocks that are nearly full of base pages are touched, so a process grows by a stated
//! amount at most. Each block that was collapsed is split again ([`Drop`]), also after an error. Calls cost
//! the processes at most [`STALL_SHARE`] of their progress, and half of what they have gained on huge pages.

mod progress;

pub use progress::{NoSource, Progress, ProgressSource};

use crate::measure::backed_memory;
use crate::measure::environment::is_guest;
use crate::measure::speed_probe::SpeedBursts;
use crate::measure::system::{LOOK_INTERVAL_NS, Scope, SystemWatch, cost};
use crate::pages::change::{FullBlocks, Outcome, check_collapse};
use crate::pages::pagemap::{self, PageMap, Pages, diff};
use crate::pages::target::{Refusal, Target};
use crate::procfs::{Root, StatLine};
use crate::sys::process::cpu_clock_ns;
use crate::sys::signal::asked_to_stop;
use pagetax_core::calibration::Calibration;
use pagetax_core::live_tax::{Cycle, LiveProcess, LiveTax, UNITS_MIN, Window};
use pagetax_core::report::Warning;
use pagetax_core::sequential::{Stopping, is_look};
use pagetax_core::stats::median;
use pagetax_core::units::{Bytes, PageSize};
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The share of their progress that the processes may lose while calls stall them.
const STALL_SHARE: f64 = 0.02;
/// The shortest window: shorter ones see too little of a scheduler's turns.
const WINDOW_MIN: Duration = Duration::from_millis(200);
/// The cycles that the time must have room for.
const CYCLES_MIN: u32 = 8;
/// The windows of a cycle.
const WINDOWS: u32 = 3;
/// The part of a gain that may pay for stalls.
const PAYING_SHARE: f64 = 0.5;
/// Memory is added if it grows by this factor at least: the cycles before it no longer count.
const ADDED_MIN: f64 = 1.25;
/// The share of a window that passes before it, while caches fill again.
const SETTLE_SHARE: u32 = 10;
/// The blocks of the rehearsal, which shows how long calls take.
const REHEARSED_BYTES: u64 = 64 << 20;
/// The part of the time before any change.
const BEFORE_SHARE: u32 = 5;
/// The windows of that part, if it is short; the longest one if it is long.
const BEFORE_WINDOWS: u32 = 24;
const BEFORE_WINDOW_MAX: Duration = Duration::from_millis(500);
/// The rate that the processes keep while they are watched, relative to that before. Below it windows grow.
const RATE_MIN: f64 = 0.98;
/// The factor by which they grow.
const WINDOW_GROWTH: f64 = 1.5;
/// Above this rate windows shrink: a gain makes up for more stalls than were planned.
const RATE_AMPLE: f64 = 1.02;
/// The factor by which they shrink, and the smallest one in all.
const WINDOW_SHRINKING: f64 = 0.8;
const WINDOW_FACTOR_MIN: f64 = 0.5;
/// The windows after the first split, for each one before it. The cycles have more windows like these.
const ORDER_SHARE: usize = 3;
/// How often blocks are split that a first call left alone, for instance because they were busy.
const SPLITS_MAX: usize = 5;

/// The limits of an experiment.
#[derive(Debug, Clone)]
pub struct ExperimentLimits {
    /// The time that it may take.
    pub time: Duration,
    /// The most memory that is collapsed at a time.
    pub bytes_max: u64,
}

/// A call on blocks of a process.
type BlockCall = fn(&FullBlocks, &Target) -> Result<Outcome, Refusal>;

/// A process, and its blocks.
struct Subject {
    target: Target,
    before: PageMap,
    /// All blocks that may be tried.
    all: FullBlocks,
    /// Those that are tried now.
    blocks: FullBlocks,
}

/// An experiment on some processes.
pub struct Experiment {
    subjects: Vec<Subject>,
    huge: PageSize,
    progress: Progress,
    /// True from the first collapse until all is split again.
    is_changed: bool,
    /// The median time of the calls about a block, in nanoseconds.
    block_ns: u64,
    /// A probe of the machine's speed, in a virtual machine.
    speed: Option<SpeedBursts>,
    /// The length of windows relative to the shortest that makes up for stalls by that time.
    window_factor: f64,
    begun: Instant,
    live: LiveTax,
}

impl Experiment {
    /// Looks at the processes, and changes nothing.
    ///
    /// # Errors
    /// If a process must be left alone, or the source of progress cannot be opened.
    pub fn plan(
        targets: Vec<Target>,
        source: Option<ProgressSource>,
        limits: &ExperimentLimits,
        huge: PageSize,
    ) -> Result<Experiment, String> {
        check_collapse().map_err(|refusal| refusal.to_string())?;
        let progress = match source {
            Some(source) => Progress::open(source, &targets),
            None => Progress::best(&targets),
        }?;
        let (mut subjects, mut live) = (Vec::new(), LiveTax::default());
        let mut left_bytes = limits.bytes_max;
        for target in targets {
            let pid = target.pid().as_raw_nonzero().get() as u32;
            let before = pagemap::read(pid).map_err(|error| error.to_string())?;
            live.processes.push(LiveProcess { pid, command: before.command.clone() });
            let mut all = FullBlocks::of(&before, huge, u64::MAX);
            live.base_bytes += all.bytes();
            all.truncate(left_bytes);
            left_bytes -= all.bytes();
            subjects.push(Subject { target, before, blocks: all.clone(), all });
        }
        live.progress = progress.source.to_string();
        let mut planned = Experiment {
            subjects,
            huge,
            progress,
            is_changed: false,
            block_ns: 0,
            speed: None,
            window_factor: 1.0,
            begun: Instant::now(),
            live,
        };
        planned.choose(1.0);
        Ok(planned)
    }

    /// Returns what is planned: the memory, and the source of progress.
    pub fn planned(&self) -> &LiveTax {
        &self.live
    }

    /// Returns true if no process has to stop for a call.
    pub fn is_remote(&self) -> bool {
        self.subjects.iter().all(|subject| subject.target.is_remote())
    }

    /// Runs it until the answer is settled, the time is up, a process ends, or a signal asks to stop.
    pub fn run(
        mut self,
        limits: &ExperimentLimits,
        calibration: Result<&Calibration, &str>,
        mut progress: impl FnMut(f64),
    ) -> LiveTax {
        let pids: Vec<u32> = self.live.processes.iter().map(|process| process.pid).collect();
        // Without it the figures vary more.
        self.speed = is_guest(&Root::default())
            .then(|| SpeedBursts::start(move || busy_cpu(&pids)).ok())
            .flatten();
        // The memory of the probe is filled by now.
        self.begun = Instant::now();
        let done = self.observe(limits.time / BEFORE_SHARE, calibration).and_then(|()| {
            let is_idle = self.live.before.unit_count == 0 || self.live.before.cpu_ns == 0;
            if is_idle || self.live.tried_bytes == 0 {
                return Ok(());
            }
            self.cycles(limits.time, &mut progress)
        });
        if let Err(why) = done {
            // A process that has ended makes whatever comes next fail.
            let why = self.ended().unwrap_or(why);
            let remedy = "the figures are those until then";
            let warning = Warning { id: "ended_early".into(), text: why, remedy: remedy.into() };
            self.live.warnings.push(warning);
        }
        if let Some(speed) = self.speed.take() {
            speed.finish();
        }
        self.restore();
        self.live.elapsed_ns = self.begun.elapsed().as_nanos() as u64;
        self.live.judge();
        std::mem::take(&mut self.live)
    }

    /// Looks at costs and progress before any change.
    fn observe(
        &mut self,
        length: Duration,
        calibration: Result<&Calibration, &str>,
    ) -> Result<(), String> {
        let pids = self.live.processes.iter().map(|process| process.pid).collect();
        let mut watch = SystemWatch::start(Scope::Processes(pids))?;
        let short = (length / BEFORE_WINDOWS).clamp(WINDOW_MIN, BEFORE_WINDOW_MAX);
        let count = (length.as_nanos() / short.as_nanos()).max(1);
        let windows: Result<Vec<Window>, String> =
            (0..count).map(|_| self.window(short, || watch.look())).collect();
        let windows = windows?;
        self.live.before = Window::whole(&windows);
        let of_each = (self.live.before.unit_count / windows.len() as u64).max(1);
        let together = windows.chunks(UNITS_MIN.div_ceil(of_each) as usize);
        self.live.as_found = together.map(Window::whole).collect();
        self.live.budget = Some(cost(&watch.interval(), calibration));
        Ok(())
    }

    /// Collapses and splits some blocks, and notes the time of the calls. Then does so with all for which
    /// it may stall the processes so long, and looks at their progress.
    fn put_in_order(&mut self, time: Duration) -> Result<(), String> {
        let share = (REHEARSED_BYTES as f64 / self.live.tried_bytes as f64).min(1.0);
        self.choose(share);
        let (collapsed, split) = self.collapse_and_split()?;
        // The median: a few blocks are slow.
        let ns = |outcome: &Outcome| median(&outcome.blocks_ns).unwrap_or(0);
        self.block_ns = (ns(&collapsed) + ns(&split)).max(1);
        let affordable = time.as_nanos() as f64 * STALL_SHARE / self.block_ns as f64;
        let all_bytes: u64 = self.subjects.iter().map(|s| s.all.bytes()).sum();
        let share = affordable * self.huge.bytes() as f64 / all_bytes as f64;
        for subject in &mut self.subjects {
            subject.all = subject.all.share(share.min(1.0));
        }
        self.choose(1.0);
        self.collapse_and_split()?;
        for window in self.live.as_found.clone().iter().step_by(ORDER_SHARE) {
            let length = Duration::from_nanos(window.wall_ns);
            let window = self.window(length, || {})?;
            self.live.in_order.push(window);
        }
        Ok(())
    }

    /// Collapses and splits the chosen blocks.
    fn collapse_and_split(&mut self) -> Result<(Outcome, Outcome), String> {
        self.is_changed = true;
        backed_memory::bring(self.chosen_bytes());
        let outcomes = (self.call(FullBlocks::collapse)?, self.call(FullBlocks::split)?);
        let blocks = self.subjects.iter().map(|subject| &subject.blocks);
        self.split(&blocks.collect::<Vec<_>>());
        Ok(outcomes)
    }

    /// Chooses this share of all blocks.
    fn choose(&mut self, share: f64) {
        for subject in &mut self.subjects {
            subject.blocks = subject.all.share(share);
        }
        self.live.tried_bytes = self.chosen_bytes();
        self.live.growth_bytes = self.subjects.iter().map(|s| s.blocks.growth_bytes()).sum();
    }

    fn chosen_bytes(&self) -> u64 {
        self.subjects.iter().map(|subject| subject.blocks.bytes()).sum()
    }

    /// Chooses the memory of the next cycle, and returns the length of its windows. Two things make up for
    /// stalls: the part of their progress that the processes may lose, and half of their gain so far.
    fn plan_cycle(&mut self, time: Duration) -> Duration {
        let gains = self.live.cycles_with(self.chosen_bytes()).filter_map(Cycle::gain);
        let gains: Vec<f64> = gains.collect();
        let gain = gains.iter().sum::<f64>() / gains.len().max(1) as f64;
        // For each nanosecond of a window.
        let made_up = f64::from(WINDOWS) * STALL_SHARE + gain.max(0.0) * PAYING_SHARE;
        let longest = time / (WINDOWS * CYCLES_MIN);
        let room = longest.as_nanos() as f64 * made_up / self.block_ns as f64;
        let block_bytes = self.huge.bytes() as f64;
        let blocks = |bytes: u64| bytes as f64 / block_bytes;
        let all = blocks(self.subjects.iter().map(|s| s.all.bytes()).sum());
        let is_first = self.live.cycles.is_empty();
        if is_first || room.min(all) >= ADDED_MIN * blocks(self.chosen_bytes()) {
            self.choose(room / all);
        }
        let stall_ns = self.block_ns as f64 * blocks(self.chosen_bytes());
        let for_stalls = Duration::from_nanos((stall_ns / made_up) as u64);
        let for_units = Duration::from_secs_f64(UNITS_MIN as f64 / self.live.before.rate());
        WINDOW_MIN.max(for_stalls.mul_f64(self.window_factor)).max(for_units).min(longest)
    }

    fn cycles(&mut self, time: Duration, progress: &mut impl FnMut(f64)) -> Result<(), String> {
        let begun = self.begun;
        let (from, units) = (Instant::now(), self.progress.units()?);
        self.put_in_order(time)?;
        let of_cycles = time.saturating_sub(begun.elapsed());
        let mut longest = Duration::ZERO;
        while !asked_to_stop() && begun.elapsed() + longest < time {
            let cycle_begun = Instant::now();
            let window = self.plan_cycle(of_cycles);
            let cycle = self.cycle(window)?;
            self.live.cycles.push(cycle);
            let seen = self.progress.units()?.saturating_sub(units);
            let rate = seen as f64 / from.elapsed().as_secs_f64() / self.live.before.rate();
            self.live.throughput = Some(rate);
            if rate < RATE_MIN {
                self.window_factor *= WINDOW_GROWTH;
            } else if rate > RATE_AMPLE {
                self.window_factor = (self.window_factor * WINDOW_SHRINKING).max(WINDOW_FACTOR_MIN);
            }
            self.live.compare(Stopping::Sequential);
            longest = longest.max(cycle_begun.elapsed());
            progress((begun.elapsed().as_secs_f64() / time.as_secs_f64()).min(1.0));
            let counted = self.live.cycles_with(self.chosen_bytes()).count();
            if is_look(counted) {
                self.note_decision();
                if self.live.is_settled() {
                    return Ok(());
                }
            }
        }
        self.live.compare(Stopping::TimeUp);
        self.note_decision();
        Ok(())
    }

    /// Keeps the time of the first look at which the answer was clear.
    fn note_decision(&mut self) {
        if self.live.is_clear() && self.live.decided_ns.is_none() {
            self.live.decided_ns = Some(self.begun.elapsed().as_nanos() as u64);
        }
    }

    fn cycle(&mut self, window: Duration) -> Result<Cycle, String> {
        self.call(FullBlocks::pretend)?;
        let unchanged = self.settled_window(window)?;
        let tried_bytes = self.chosen_bytes();
        self.is_changed = true;
        // Else the processes would wait while the hypervisor backs the huge pages.
        backed_memory::bring(tried_bytes);
        let outcome = self.call(FullBlocks::collapse)?;
        if self.live.cycles_with(tried_bytes).next().is_none() {
            self.live.failed_bytes = outcome.failed_bytes.values().sum();
        }
        let huge = self.settled_window(window)?;
        self.call(FullBlocks::split)?;
        let split = self.settled_window(window)?;
        Ok(Cycle { tried_bytes, unchanged, huge, split })
    }

    /// Makes calls on all blocks.
    fn call(&mut self, call: BlockCall) -> Result<Outcome, String> {
        let all = self.subjects.iter().map(|subject| &subject.blocks);
        let outcome = self.each(&all.collect::<Vec<_>>(), call)?;
        self.note(&outcome);
        Ok(outcome)
    }

    /// Makes calls on these blocks of each process.
    fn each(&self, blocks: &[impl Borrow<FullBlocks>], call: BlockCall) -> Result<Outcome, String> {
        let mut whole = Outcome::default();
        for (subject, blocks) in self.subjects.iter().zip(blocks) {
            let outcome = call(blocks.borrow(), &subject.target);
            let named = |refusal: Refusal| format!("process {}: {refusal}", subject.before.pid);
            whole.add(outcome.map_err(named)?);
        }
        Ok(whole)
    }

    /// Splits these blocks, again where a page was busy.
    fn split(&self, blocks: &[impl Borrow<FullBlocks>]) -> Outcome {
        let mut whole = Outcome::default();
        for _ in 0..SPLITS_MAX {
            // A process that has ended has nothing to be split.
            whole.add(self.each(blocks, FullBlocks::split).unwrap_or_default());
            let is_left = |(subject, blocks): (&Subject, &FullBlocks)| {
                let now = pagemap::read_huge(subject.before.pid);
                now.is_ok_and(|now| blocks.bytes_on_huge_pages(&now) > 0)
            };
            if !self.subjects.iter().zip(blocks.iter().map(Borrow::borrow)).any(is_left) {
                break;
            }
        }
        whole
    }

    fn note(&mut self, outcome: &Outcome) {
        let live = &mut self.live;
        live.stop_count += outcome.stops.all.len() as u64;
        let longest = outcome.stops.longest().map_or(0, |stop| stop.wall_ns);
        live.stop_ns_max = live.stop_ns_max.max(longest);
        let longest = outcome.blocks_ns.iter().copied().max().unwrap_or(0);
        live.block_ns_max = live.block_ns_max.max(longest);
    }

    fn settled_window(&self, length: Duration) -> Result<Window, String> {
        std::thread::sleep(length / SETTLE_SHARE);
        self.window(length, || {})
    }

    /// Measures progress and CPU time for so long, or until a signal asks to stop.
    fn window(&self, length: Duration, mut look: impl FnMut()) -> Result<Window, String> {
        let begun = Instant::now();
        let (units, cpu_ns) = (self.progress.units()?, self.cpu_ns()?);
        let bursts = self.speed.as_ref().map(SpeedBursts::counts);
        while let Some(left) = length.checked_sub(begun.elapsed()).filter(|_| !asked_to_stop()) {
            std::thread::sleep(left.min(Duration::from_nanos(LOOK_INTERVAL_NS)));
            look();
        }
        let medians = self.speed.as_ref().zip(bursts).map(|(speed, n)| speed.medians_ns(n));
        let [probe_ns, far_probe_ns] = medians.unwrap_or_default();
        Ok(Window {
            cpu_ns: self.cpu_ns()?.saturating_sub(cpu_ns),
            unit_count: self.progress.units()?.saturating_sub(units),
            wall_ns: begun.elapsed().as_nanos() as u64,
            begin_ns: (begun - self.begun).as_nanos() as u64,
            probe_ns,
            far_probe_ns,
        })
    }

    fn cpu_ns(&self) -> Result<u64, String> {
        let each = self.subjects.iter().map(|subject| match subject.target.is_alive() {
            true => cpu_clock_ns(subject.before.pid).map_err(|error| error.to_string()),
            false => Err("it has ended".into()),
        });
        each.sum()
    }

    /// Names a process that has ended; none if all go on.
    fn ended(&self) -> Option<String> {
        let ended = self.subjects.iter().find(|subject| !subject.target.is_alive())?;
        Some(format!("process {} has ended", ended.before.pid))
    }

    /// Splits what is still collapsed, and lists what is not as it was.
    fn restore(&mut self) {
        if std::mem::replace(&mut self.is_changed, false) {
            let all = self.subjects.iter().map(|subject| &subject.blocks);
            let outcome = self.split(&all.collect::<Vec<_>>());
            self.note(&outcome);
        }
        for subject in &self.subjects {
            let Ok(after) = pagemap::read(subject.before.pid) else { continue };
            let changes = diff(&subject.before, &after);
            let mut kinds: BTreeMap<(Pages, Pages), (usize, u64)> = BTreeMap::new();
            for change in changes.iter().filter(|c| subject.all.touch(&(c.start.0..c.end.0))) {
                let (count, bytes) = kinds.entry((change.before, change.after)).or_default();
                (*count, *bytes) = (*count + 1, *bytes + change.end.0 - change.start.0);
            }
            self.live.changes.extend(kinds.into_iter().map(|((before, after), (count, bytes))| {
                let pid = subject.before.pid;
                format!("{pid}: {} in {count} ranges: {before} before, now {after}", Bytes(bytes))
            }));
        }
    }
}

/// Returns the CPU of the thread that has used most CPU time, of the first threads of each process.
fn busy_cpu(pids: &[u32]) -> Option<usize> {
    const THREADS_MAX: usize = 64;
    let root = Root::default();
    let of_process = |pid: &u32| -> Vec<(u64, u64)> {
        let threads = root.names(&format!("/proc/{pid}/task"));
        let cpu_of = |tid: &String| {
            let line = root.text(&format!("/proc/{pid}/task/{tid}/stat")).ok()?;
            let [user, kernel, cpu] = StatLine::parse(&line)?.numbers([14, 15, 39])?;
            Some((user + kernel, cpu))
        };
        threads.iter().take(THREADS_MAX).filter_map(cpu_of).collect()
    };
    let (_, cpu) = pids.iter().flat_map(of_process).max()?;
    usize::try_from(cpu).ok()
}

impl Drop for Experiment {
    fn drop(&mut self) {
        if self.is_changed {
            let all = self.subjects.iter().map(|subject| &subject.blocks);
            self.split(&all.collect::<Vec<_>>());
        }
    }
}
