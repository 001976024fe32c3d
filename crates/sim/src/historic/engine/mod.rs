//! The engine: runs a plan's tasks on CPUs, hardware and kernel, in virtual time.
//!
//! Each CPU has its own clock, and the CPU that is furthest behind runs. It makes one step at a time (a
//! kernel call or an uninterrupted touch) until its task waits, ends or has used up its slice. Events
//! (wakes, samples, the scheduler's seconds) are due when the last CPU has reached them.
//!
//! Invariant: the same plan and model give the same steps. Nothing depends on real time, on addresses or
//! on hashing.

mod act;
mod events;
mod ledger;
mod record;
mod settings;
mod task;
#[cfg(test)]
mod tests;

pub use settings::{Caps, Settings};

use crate::hardware::{Mmu, SpaceId};
use crate::historic::cx::{
    Channel, CpuRow, CpuTimes, Cx, Failure, Latencies, RunState, Wait, WallRow,
};
use crate::historic::kernel::Kernel;
use crate::historic::sched::{Scheduler, TaskId};
use crate::tally::{CounterId, Tally};
use events::{Event, EventQueue};
use ledger::Ledgers;
use pagetax_core::access::{Rng, mix64};
use pagetax_core::machine::{RunError, Sink};
use pagetax_core::plan::Plan;
use record::Record;
use std::collections::BTreeMap;
use task::{NextAction, Role, State, Task};

const CONTEXT_SWITCHES: CounterId = CounterId::of("context_switch_count");
const DAEMON_NS: CounterId = CounterId::of("kernel_daemon_ns");
const KERNEL_NS: CounterId = CounterId::of("kernel_ns");
const RUN_QUEUE_NS: CounterId = CounterId::of("run_queue_ns");
const TRANSLATION_NS: CounterId = CounterId::of("translation_ns");
const USER_NS: CounterId = CounterId::of("user_ns");

/// Every waiting parent, and everybody at a barrier.
const CLIENTS_ENDED: Channel = Channel(Channel::ENGINE);
const BARRIER: Channel = Channel(Channel::ENGINE + 1);

const MAIN: TaskId = TaskId(0);
const SECOND_NS: u64 = 1_000_000_000;

/// A processor.
#[derive(Debug)]
struct Cpu {
    now: u64,
    task: Option<TaskId>,
    slice_end: u64,
    last_task: Option<TaskId>,
    last_space: Option<SpaceId>,
}

/// The present phase's clients.
#[derive(Debug, Default)]
struct Clients {
    /// Neither ended nor exiting.
    working: u32,
    ended: u32,
    reaped: u32,
    at_barrier: u32,
}

/// The parts of a run.
pub struct Parts<'a, M, K> {
    /// The engine's constants of the model.
    pub settings: &'a Settings,
    /// The limits that end a run early.
    pub caps: Caps,
    /// The translation hardware.
    pub hardware: M,
    /// The kernel with its paging policy.
    pub kernel: K,
    /// The policy by which ready tasks get CPUs.
    pub scheduler: Box<dyn Scheduler>,
}

/// A run.
pub struct Engine<'a, M, K> {
    parts: Parts<'a, M, K>,
    plan: &'a Plan,
    out: &'a mut dyn Sink,
    run_state: RunState,
    ledgers: Ledgers,
    record: Record,
    tasks: Vec<Task>,
    cpus: Vec<Cpu>,
    events: EventQueue,
    /// The tasks that wait, each with the number of its wait.
    waiters: BTreeMap<Channel, Vec<(TaskId, u64)>>,
    clients: Clients,
    /// Addresses of the regions, by space.
    bases: Vec<Vec<Option<u64>>>,
    steps: u64,
    /// The time when the last task ended.
    end_ns: u64,
}

impl<'a, M: Mmu, K: Kernel<M>> Engine<'a, M, K> {
    /// Runs `plan` from a machine that has just been started; `out` holds what was seen, whatever the
    /// end.
    ///
    /// # Errors
    /// Operations that fail, and runs that come to their cap.
    pub fn run(
        parts: Parts<'a, M, K>,
        plan: &'a Plan,
        out: &'a mut dyn Sink,
    ) -> Result<(), RunError> {
        let cpu = || Cpu { now: 0, task: None, slice_end: 0, last_task: None, last_space: None };
        let rng = Rng::new(mix64(plan.job.seed));
        let mut engine = Engine {
            cpus: (0..parts.settings.cpus).map(|_| cpu()).collect(),
            parts,
            plan,
            out,
            run_state: RunState { tally: Tally::new(), latencies: Latencies::default(), rng },
            ledgers: Ledgers::default(),
            record: Record::default(),
            tasks: Vec::new(),
            events: EventQueue::default(),
            waiters: BTreeMap::new(),
            clients: Clients::default(),
            bases: vec![vec![None; plan.regions.len()]],
            steps: 0,
            end_ns: 0,
        };
        engine.start();
        let end = engine.simulate();
        engine.report();
        end
    }

    fn start(&mut self) {
        self.add_task(Role::Main, Some(SpaceId(0)), NextAction::Begin, 0);
        for thread in 0..self.parts.kernel.threads().len() {
            self.add_task(Role::Kernel(thread), None, NextAction::Thread(thread), 0);
        }
        if self.parts.scheduler.has_seconds() {
            self.events.add(SECOND_NS, Event::Second);
        }
        if let Some(interval) = self.plan.measure.interval.filter(|interval| interval.0 > 0) {
            self.events.add(interval.0, Event::Sample);
        }
    }

    fn simulate(&mut self) -> Result<(), RunError> {
        loop {
            let cpu = self.cpu_behind();
            let now = self.cpus[cpu].now;
            self.deliver(now);
            if self.tasks[MAIN.0].state == State::Ended {
                return Ok(());
            }
            self.check_caps(now)?;
            match self.cpus[cpu].task {
                Some(task) if now < self.cpus[cpu].slice_end => self.step(cpu, task)?,
                Some(task) => {
                    self.cpus[cpu].task = None;
                    self.make_ready(task, now, false);
                }
                None => self.dispatch(cpu)?,
            }
        }
    }

    /// Returns the CPU whose clock is furthest behind; of equals, one that is busy.
    fn cpu_behind(&self) -> usize {
        if self.cpus.len() == 1 {
            return 0;
        }
        let key = |i: &usize| (self.cpus[*i].now, self.cpus[*i].task.is_none());
        (0..self.cpus.len()).min_by_key(key).expect("a machine has a CPU")
    }

    fn check_caps(&mut self, now: u64) -> Result<(), RunError> {
        self.steps += 1;
        if self.steps.is_multiple_of(PROGRESS_STEPS) {
            self.progress();
        }
        if now > self.parts.caps.wall_ns {
            let seconds = self.parts.caps.wall_ns / SECOND_NS;
            return Err(RunError::Capped(format!("{seconds} s of virtual time")));
        }
        if self.record.points > self.parts.caps.points {
            let (points, seconds) = (self.parts.caps.points, now as f64 / 1e9);
            return Err(RunError::Capped(format!(
                "{points} points of the series, at {seconds:.1} s of virtual time; give a longer \
                 --interval"
            )));
        }
        if self.steps > self.parts.caps.steps {
            let (steps, seconds) = (self.parts.caps.steps, now as f64 / 1e9);
            let text =
                format!("{steps} steps of the simulation, at {seconds:.1} s of virtual time");
            return Err(RunError::Capped(text));
        }
        Ok(())
    }

    /// Handles all events that are due at `now`.
    fn deliver(&mut self, now: u64) {
        while let Some((time, event)) = self.events.due(now) {
            self.ledgers.advance(time);
            match event {
                Event::Wake { task, wait_number } => self.wake(task, wait_number, time),
                Event::Second => {
                    let load = self.tasks.iter().filter(|task| is_runnable(task)).count();
                    self.parts.scheduler.second(load as u64);
                    self.events.add(time + SECOND_NS, Event::Second);
                }
                Event::Sample => self.sample(time),
            }
        }
        self.ledgers.advance(now);
    }

    fn wake(&mut self, task: TaskId, wait_number: u64, time: u64) {
        let State::Waiting { row, since } = self.tasks[task.0].state else { return };
        if self.tasks[task.0].wait_number != wait_number {
            return;
        }
        if since > time {
            // It has not yet fallen asleep: woken by a CPU that is behind its own.
            self.events.add(since, Event::Wake { task, wait_number });
            return;
        }
        if self.tasks[task.0].is_job() {
            self.ledgers.waiting(row, false);
        }
        self.make_ready(task, time, true);
        self.preempt_for(task, time);
    }

    /// Takes a CPU for a woken task if none is idle and the scheduler says so.
    fn preempt_for(&mut self, woken: TaskId, now: u64) {
        if self.cpus.iter().any(|cpu| cpu.task.is_none()) {
            return;
        }
        let scheduler = &self.parts.scheduler;
        let loses = |cpu: &&mut Cpu| cpu.task.is_some_and(|task| scheduler.preempts(woken, task));
        if let Some(cpu) = self.cpus.iter_mut().find(loses) {
            cpu.slice_end = cpu.slice_end.min(now);
        }
    }

    fn make_ready(&mut self, task: TaskId, now: u64, woken: bool) {
        self.tasks[task.0].state = State::Ready { since: now };
        if self.tasks[task.0].is_job() {
            self.ledgers.ready(true);
        }
        self.parts.scheduler.ready(task, woken);
    }

    fn add_task(&mut self, role: Role, space: Option<SpaceId>, next_action: NextAction, now: u64) {
        let task = TaskId(self.tasks.len());
        self.tasks.push(Task::new(role, space, next_action, now));
        self.make_ready(task, now, false);
    }

    /// Gives an idle CPU a task, or lets it idle until something happens.
    fn dispatch(&mut self, cpu: usize) -> Result<(), RunError> {
        let Some(task) = self.parts.scheduler.pick() else { return self.idle(cpu) };
        let mut now = self.cpus[cpu].now;
        if let State::Ready { since } = self.tasks[task.0].state {
            // It may come from a CPU that is ahead: it cannot run before it was there.
            now = now.max(since);
            self.cpus[cpu].now = now;
            if self.tasks[task.0].is_job() {
                self.run_state.tally.add(RUN_QUEUE_NS, now - since);
                self.ledgers.ready(false);
            }
        }
        self.tasks[task.0].state = State::Running;
        self.cpus[cpu].task = Some(task);
        self.cpus[cpu].slice_end = self.parts.scheduler.slice_end(task, now).max(now + 1);
        if self.cpus[cpu].last_task.replace(task) != Some(task) {
            self.switch(cpu, task)?;
        }
        Ok(())
    }

    fn switch(&mut self, cpu: usize, task: TaskId) -> Result<(), RunError> {
        self.run_state.tally.add(CONTEXT_SWITCHES, 1);
        let space = self.tasks[task.0].space;
        self.call(cpu, task, 0, |kernel, hw, cx| kernel.switch(hw, cx, space))?;
        if let Some(space) = space
            && self.cpus[cpu].last_space.replace(space) != Some(space)
        {
            self.parts.hardware.switch(cpu, space);
        }
        Ok(())
    }

    fn idle(&mut self, cpu: usize) -> Result<(), RunError> {
        let busy = self.cpus.iter().filter(|other| other.task.is_some()).map(|other| other.now);
        let next = busy.min().unwrap_or(u64::MAX).min(self.events.next_ns());
        if next == u64::MAX {
            return Err(RunError::Op {
                op: "waiting".into(),
                why: "every task waits for another".into(),
                remedy: "remove a barrier that not all clients come to".into(),
            });
        }
        self.cpus[cpu].now = next;
        Ok(())
    }

    /// Makes a kernel call for `task` and applies its result.
    fn call<R>(
        &mut self,
        cpu: usize,
        task: TaskId,
        limit_ns: u64,
        f: impl FnOnce(&mut K, &mut M, &mut Cx<'_>) -> R,
    ) -> Result<R, RunError> {
        let cx = Cx::new(self.cpus[cpu].now, limit_ns, cpu, &mut self.run_state);
        let (result, end) = in_kernel(&mut self.parts, cx, f);
        if let Some((wait, row)) = self.after_call(cpu, task, end)? {
            self.suspend(cpu, task, wait, row);
        }
        Ok(result)
    }

    /// Applies the result of a kernel call by `task`; what it waits for is left to the caller.
    fn after_call(
        &mut self,
        cpu: usize,
        task: TaskId,
        end: CallEnd,
    ) -> Result<Option<(Wait, WallRow)>, RunError> {
        let CallEnd { spent, wait, woken, failure } = end;
        self.charge(cpu, task, &spent);
        for channel in woken {
            self.wake_all(channel, self.cpus[cpu].now);
        }
        if let Some(failure) = failure {
            let op = self.describe(task);
            let Failure { why, remedy } = *failure;
            return Err(RunError::Op { op, why, remedy });
        }
        Ok(wait)
    }

    fn charge(&mut self, cpu: usize, task: TaskId, spent: &CpuTimes) {
        let spent_ns: u64 = spent.iter().sum();
        if spent_ns == 0 {
            return;
        }
        let start = self.cpus[cpu].now;
        self.cpus[cpu].now += spent_ns;
        self.parts.scheduler.ran(task, spent_ns);
        let tally = &mut self.run_state.tally;
        if !self.tasks[task.0].is_job() {
            tally.add(DAEMON_NS, spent_ns);
            return;
        }
        let user_ns = spent[CpuRow::Compute as usize] + spent[CpuRow::Translation as usize];
        tally.add(USER_NS, user_ns);
        tally.add(KERNEL_NS, spent_ns - user_ns);
        tally.add(TRANSLATION_NS, spent[CpuRow::Translation as usize]);
        self.ledgers.ran(start, spent_ns, spent);
    }

    /// Takes the CPU from `task`, which waits from now on.
    fn suspend(&mut self, cpu: usize, task: TaskId, wait: Wait, row: WallRow) {
        let now = self.cpus[cpu].now;
        self.cpus[cpu].task = None;
        let entry = &mut self.tasks[task.0];
        entry.state = State::Waiting { row, since: now };
        entry.wait_number += 1;
        let wait_number = entry.wait_number;
        if entry.is_job() {
            self.ledgers.waiting(row, true);
        }
        if let Wait::Until(time) | Wait::OnUntil(_, time) = wait {
            self.events.add(time.max(now), Event::Wake { task, wait_number });
        }
        if let Wait::On(channel) | Wait::OnUntil(channel, _) = wait {
            self.waiters.entry(channel).or_default().push((task, wait_number));
        }
    }

    fn wake_all(&mut self, channel: Channel, time: u64) {
        for (task, wait_number) in self.waiters.remove(&channel).unwrap_or_default() {
            self.events.add(time, Event::Wake { task, wait_number });
        }
    }
}

/// The result of a kernel call that the engine applies.
struct CallEnd {
    spent: CpuTimes,
    wait: Option<(Wait, WallRow)>,
    woken: Vec<Channel>,
    failure: Option<Box<Failure>>,
}

fn in_kernel<M: Mmu, K: Kernel<M>, R>(
    parts: &mut Parts<'_, M, K>,
    mut cx: Cx<'_>,
    f: impl FnOnce(&mut K, &mut M, &mut Cx<'_>) -> R,
) -> (R, CallEnd) {
    let result = f(&mut parts.kernel, &mut parts.hardware, &mut cx);
    let Cx { spent, wait, woken, failure, .. } = cx;
    (result, CallEnd { spent, wait, woken, failure })
}

/// How often progress is reported.
const PROGRESS_STEPS: u64 = 1 << 14;

fn is_runnable(task: &Task) -> bool {
    matches!(task.state, State::Ready { .. } | State::Running)
}
