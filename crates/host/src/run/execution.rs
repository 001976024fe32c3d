//! A whole run: sets up, starts each phase's workers, watches them, and reports the results.
//!
//! Invariant: the supervisor thread only sleeps, samples and reports. A phase's usage is that of its
//! workers. If it forks, the supervisor's cost of forking is added.

use super::control::{Control, Failure};
use super::failure::{died, op_error, refusal, region_error, short_of_memory};
use super::figures::{PhaseFigures, RunFigures};
use super::memory::Memory;
use super::network::Network;
use super::pace::Halt;
use super::watch::Watcher;
use super::worker::{Worker, WorkerResult};
use crate::measure::budget::Watch;
use crate::measure::stacks::Begin;
use crate::procfs::Root;
use crate::run::guard::{Limits, Room};
use crate::sys::process::{self, Child, Usage, thread_usage};
use crate::sys::signal::asked_to_stop;
use pagetax_core::exit::Exit;
use pagetax_core::machine::{RunError, Sink};
use pagetax_core::plan::{ClientKind, Op, Pattern, Phase, Plan};
use std::time::{Duration, Instant};

/// The longest time between two checks of signals and reports of progress.
const TICK: Duration = Duration::from_millis(100);

/// The longest sleep of the parent. A longer `parent_wake` is cut to this, so that signals are noticed.
const PARENT_SLEEP_MAX: Duration = Duration::from_secs(1);

/// A run that is under way.
pub struct Execution<'a> {
    plan: &'a Plan,
    /// The free-memory limits; `None` on the null machine.
    limits: Option<Limits>,
    memory: Option<Memory>,
    network: Option<Network>,
    short_of_memory: bool,
    memory_seen: Instant,
    begun: Instant,
    /// The collector of data for the budget; `None` on the null machine.
    watch: Option<Watch>,
    watcher: Watcher<'a>,
    figures: RunFigures,
}

impl<'a> Execution<'a> {
    /// Makes the files and maps the regions that are mapped at the start. Without `on`, there is no
    /// memory.
    pub fn set_up(
        plan: &'a Plan,
        on: Option<(Limits, Option<Network>)>,
        out: &'a mut dyn Sink,
    ) -> Result<Execution<'a>, RunError> {
        let named = |(id, error)| region_error(plan, id, error);
        let (limits, network) = on.unzip();
        let mut network = network.flatten();
        let make = |_| Memory::make(plan, network.as_mut(), &|| !asked_to_stop()).map_err(named);
        let mut memory = limits.map(make).transpose()?;
        let watch = limits.map(|_| watch_this_thread());
        let begun = Instant::now();
        let mut figures = RunFigures::begin(network.as_ref());
        let before = thread_usage();
        if let Some(memory) = &mut memory {
            memory.map_first().map_err(named)?;
        }
        figures.add_usage(thread_usage().since(before));
        Ok(Execution {
            plan,
            limits,
            memory,
            network,
            short_of_memory: false,
            memory_seen: begun,
            begun,
            watch,
            watcher: Watcher::new(plan, begun, out),
            figures,
        })
    }

    /// Runs all phases. However it ends, the sink gets all that was measured.
    pub fn run(mut self) -> Result<(), RunError> {
        let call_times = self.memory.as_ref().map(Memory::call_times);
        let mut result = Ok(());
        for (index, phase) in self.plan.phases.iter().enumerate() {
            if index == 1 {
                self.flip_byte();
            }
            result = self.phase(index, phase);
            if result.is_err() {
                break;
            }
        }
        let before = thread_usage();
        self.memory = None;
        self.figures.add_usage(thread_usage().since(before));
        let wall_ns = self.now_ns();
        let watched = self.watch.map(Watch::finish);
        let is_wrong = matches!(result, Err(RunError::Mismatch { .. }));
        let network = self.network.as_ref();
        self.figures.end(self.plan, network, wall_ns, is_wrong);
        if let Some(times) = call_times {
            self.watcher.call_times(&times);
        }
        self.watcher.whole_run(self.plan, &self.figures, network, watched.as_ref());
        result
    }

    fn now_ns(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    fn flip_byte(&self) {
        if let (Some(offset), Some(memory)) = (self.plan.native.flip_byte_at, &self.memory) {
            memory.flip_byte(offset);
        }
    }

    fn phase(&mut self, index: usize, phase: &'a Phase) -> Result<(), RunError> {
        self.lay_links(phase)?;
        let control =
            Control::new(phase.clients.max(1)).map_err(|e| refusal("a shared page", &e))?;
        let mut figures = PhaseFigures::begin(self.network.as_ref());
        let start_ns = self.now_ns();
        self.watcher.begin_phase(index, start_ns);
        let usage = match phase.client_kind {
            ClientKind::Processes => self.children(phase, &control),
            ClientKind::Main | ClientKind::Threads => Ok(self.threads(phase, &control)),
        };
        let end_ns = control.rows().filter_map(|row| row.end_ns()).max().unwrap_or(self.now_ns());
        let usage_sum = usage.as_ref().copied().unwrap_or_default();
        let network = self.network.as_ref();
        figures.end(&control, phase, network, usage_sum, end_ns - start_ns);
        self.watcher.end_phase(&control, phase, start_ns, end_ns, &figures);
        self.figures.add_phase(&figures);
        usage?;
        match control.failure() {
            Some(failure) => Err(self.describe(phase, failure)),
            None if asked_to_stop() => Err(RunError::Interrupted),
            None if self.short_of_memory => Err(short_of_memory()),
            None => Ok(()),
        }
    }

    /// Writes the links of the phase's chases, before its clock starts and once for all clients. A
    /// region that is not mapped yet gets its links later, from the worker.
    fn lay_links(&mut self, phase: &Phase) -> Result<(), RunError> {
        let Some(memory) = &mut self.memory else { return Ok(()) };
        let before = thread_usage();
        for op in &phase.ops {
            if let Op::Touch(touch) = op
                && touch.pattern == Pattern::PointerChase
                && memory.mapping(touch.region).is_some()
            {
                memory
                    .lay_links_for(touch)
                    .map_err(|e| region_error(self.plan, touch.region, e))?;
            }
        }
        self.figures.add_usage(thread_usage().since(before));
        Ok(())
    }

    fn worker<'w>(&self, phase: &'w Phase, client: u32, control: &'w Control) -> Worker<'w>
    where
        'a: 'w,
    {
        let memory = self.memory.clone();
        Worker { plan: self.plan, phase, client, memory, control, run_begun: self.begun }
    }

    /// Runs a phase in threads. Afterwards, the memory is as the first client left it.
    fn threads(&mut self, phase: &Phase, control: &Control) -> Usage {
        let workers: Vec<_> =
            (0..phase.clients.max(1)).map(|client| self.worker(phase, client, control)).collect();
        self.memory = None;
        let begun = self.begun;
        let finished: Vec<WorkerResult> = std::thread::scope(|scope| {
            let spawn = |worker: Worker<'_>| {
                let client = worker.client;
                let finished = worker.work();
                control.end(client, begun.elapsed().as_nanos() as u64);
                finished
            };
            let threads: Vec<_> =
                workers.into_iter().map(|worker| scope.spawn(move || spawn(worker))).collect();
            while !threads.iter().all(|thread| thread.is_finished())
                && control.ended() < phase.clients.max(1)
            {
                self.watch(phase, control);
            }
            let join = |thread: std::thread::ScopedJoinHandle<'_, WorkerResult>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        let usage = finished.iter().fold(Usage::default(), |sum, f| sum.plus(f.usage));
        self.memory = finished.into_iter().next().and_then(|first| first.memory);
        usage
    }

    /// Runs a phase in forked children.
    fn children(&mut self, phase: &Phase, control: &Control) -> Result<Usage, RunError> {
        let own_before = thread_usage();
        let mut children = Vec::new();
        for client in 0..phase.clients {
            let worker = self.worker(phase, client, control);
            let reads_huge_bytes = PhaseFigures::may_be_huge(self.plan);
            match process::fork(|| worker.work_as_child(reads_huge_bytes)) {
                Ok(child) => children.push(child),
                Err(error) => {
                    control.stop();
                    return Err(refusal("a fork", &error)); // dropping the children so far ends them
                }
            }
        }
        let mut used = Usage::default();
        let mut death = None;
        while !children.is_empty() {
            if control.ended() < phase.clients {
                self.watch(phase, control);
            }
            let all_ended = control.ended() >= phase.clients;
            children.retain_mut(|child| match reap(child, all_ended) {
                None => true,
                Some((exit, usage)) => {
                    used = used.plus(usage);
                    if !exit.success() {
                        control.stop();
                        death.get_or_insert(exit);
                    }
                    false
                }
            });
        }
        match death {
            Some(exit) => Err(died(exit)),
            None => Ok(used.plus(thread_usage().since(own_before))),
        }
    }

    /// Sleeps as the phase's parent does, then checks memory and signals, and reports series and
    /// progress.
    fn watch(&mut self, phase: &Phase, control: &Control) {
        match phase.parent_wake {
            Some(time) => std::thread::sleep(Duration::from_nanos(time.0).min(PARENT_SLEEP_MAX)),
            None => control.wait_for_end(control.ended(), self.watcher.until_sample().min(TICK)),
        }
        self.guard_memory();
        if asked_to_stop() || self.short_of_memory {
            control.stop();
        }
        self.watcher.look(control, phase, self.network.as_ref());
    }

    /// Checks every [`TICK`] that the machine is not short of memory.
    fn guard_memory(&mut self) {
        let Some(limits) = self.limits.filter(|_| self.memory_seen.elapsed() >= TICK) else {
            return;
        };
        self.memory_seen = Instant::now();
        let room = Room::read(&Root::default());
        self.short_of_memory |= room.is_some_and(|room| room.is_short(&limits));
    }

    fn describe(&self, phase: &Phase, failure: Failure) -> RunError {
        let op = &phase.ops[failure.operation];
        match (failure.halt, op) {
            (Halt::Wrong(wrong), Op::Touch(touch)) => RunError::Mismatch {
                region: self.plan.region(touch.region).name.clone(),
                offset: wrong.offset,
                address: failure.address,
                expected: wrong.expected,
                found: wrong.found,
            },
            (Halt::Refused(errno), op) => op_error(self.plan, op, errno),
            (Halt::Over | Halt::Wrong(_), _) => RunError::Interrupted,
        }
    }
}

/// Watches the supervisor thread and all threads and children that it makes from now on.
fn watch_this_thread() -> Watch {
    let mut watch = Watch::new();
    watch.attach(rustix::thread::gettid().as_raw_nonzero().get() as u32, Begin::Now);
    watch
}

/// Returns how a child ended, or `None` while it runs. If all clients have finished their work, waits
/// for its exit.
fn reap(child: &mut Child, all_ended: bool) -> Option<(Exit, Usage)> {
    let ended = if all_ended { child.wait().map(Some) } else { child.try_wait() };
    // A child that cannot be waited for is no longer ours, and has no status to read.
    ended.unwrap_or(Some((Exit::Code(0), Usage::default())))
}
