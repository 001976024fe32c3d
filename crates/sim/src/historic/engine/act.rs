//! The steps of a task that has a CPU, one at a time.

use super::task::{Cursor, NextAction, Role, State, Task};
use super::{BARRIER, CLIENTS_ENDED, Clients, Engine, in_kernel};
use crate::hardware::accesses::{Accesses, TouchSite};
use crate::hardware::{Mmu, SpaceId, Stop};
use crate::historic::cx::{CpuRow, CpuTimes, Cx, Wait, WallRow};
use crate::historic::kernel::{Kernel, Step};
use crate::historic::sched::TaskId;
use crate::tally::CounterId;
use pagetax_core::machine::RunError;
use pagetax_core::plan::{ClientKind, Op, Pattern, Phase, RegionId, Touch};
use pagetax_core::replay::Replay;

const ACCESSES: CounterId = CounterId::of("access_count");
const TLB_MISSES: CounterId = CounterId::of("tlb_miss_count");

impl<'a, M: Mmu, K: Kernel<M>> Engine<'a, M, K> {
    /// Makes one step of `task`, which has `cpu`.
    pub(super) fn step(&mut self, cpu: usize, task: TaskId) -> Result<(), RunError> {
        let limit_ns = self.limit_ns(cpu, task);
        let next_action =
            std::mem::replace(&mut self.tasks[task.0].next_action, NextAction::Operation);
        match next_action {
            NextAction::Begin => self.begin(cpu, task, limit_ns),
            NextAction::MapAll(index) => self.map_all(cpu, task, index),
            NextAction::Phase(index) => self.begin_phase(cpu, task, index),
            NextAction::Fork { made } => self.fork(cpu, task, made),
            NextAction::Nap => {
                self.nap(cpu, task);
                Ok(())
            }
            NextAction::Poll => self.poll(cpu, task),
            NextAction::Join => self.join(cpu, task),
            NextAction::Operation => self.operation(cpu, task),
            NextAction::Touch(accesses) => self.touch(cpu, task, accesses, limit_ns),
            NextAction::Lock { region, chunk_bytes, done_bytes } => {
                self.lock(cpu, task, region, chunk_bytes, done_bytes)
            }
            NextAction::Exit => self.exit(cpu, task, limit_ns),
            NextAction::Thread(thread) => {
                self.tasks[task.0].next_action = next_action;
                self.call(cpu, task, limit_ns, |kernel, hw, cx| kernel.run_thread(hw, cx, thread))
            }
        }
    }

    /// Returns the time that the task may run: until its slice, its timed phase or the next event ends it.
    fn limit_ns(&self, cpu: usize, task: TaskId) -> u64 {
        let now = self.cpus[cpu].now;
        let mut end = self.cpus[cpu].slice_end.min(self.events.next_ns());
        if self.cpus.len() > 1 {
            end = end.min(now + self.parts.settings.tick_ns);
        }
        end.min(self.deadline(task)).saturating_sub(now).max(1)
    }

    /// Returns the time when the task's timed phase ends.
    fn deadline(&self, task: TaskId) -> u64 {
        let Task { next_action, cursor, .. } = &self.tasks[task.0];
        let working = matches!(
            next_action,
            NextAction::Operation | NextAction::Touch(_) | NextAction::Lock { .. }
        );
        let time = working.then(|| self.plan.phases.get(cursor.phase)?.time).flatten();
        time.map_or(u64::MAX, |time| cursor.start_ns.saturating_add(time.0))
    }

    /// Returns the time until the task's timed phase ends, which ends sleeps, too.
    fn left_ns(&self, cpu: usize, task: TaskId) -> u64 {
        self.deadline(task).saturating_sub(self.cpus[cpu].now)
    }

    fn phase_of(&self, task: TaskId) -> &'a Phase {
        &self.plan.phases[self.tasks[task.0].cursor.phase]
    }

    fn space_of(&self, task: TaskId) -> SpaceId {
        self.tasks[task.0].space.expect("a job's task has a space")
    }

    /// Makes the task sleep until a tick, as its plan asks.
    fn sleep(&mut self, cpu: usize, task: TaskId, ns: u64) {
        let end = self.parts.settings.sleep_end(self.cpus[cpu].now, ns);
        self.suspend(cpu, task, Wait::Until(end), WallRow::Sleep);
    }

    fn begin(&mut self, cpu: usize, task: TaskId, limit_ns: u64) -> Result<(), RunError> {
        let space = self.space_of(task);
        let step = self.call(cpu, task, limit_ns, |kernel, hw, cx| kernel.begin(hw, cx, space))?;
        self.tasks[task.0].next_action = match (step, self.tasks[task.0].role) {
            (Step::Again, _) => NextAction::Begin,
            (Step::Finished, Role::Main) => NextAction::MapAll(0),
            (Step::Finished, _) => NextAction::Operation,
        };
        Ok(())
    }

    fn map_all(&mut self, cpu: usize, task: TaskId, index: usize) -> Result<(), RunError> {
        let Some(region) = self.plan.regions.get(index) else {
            self.tasks[task.0].next_action = NextAction::Phase(0);
            return Ok(());
        };
        self.tasks[task.0].next_action = NextAction::MapAll(index + 1);
        if region.mapped_at_start { self.map(cpu, task, RegionId(index)) } else { Ok(()) }
    }

    fn map(&mut self, cpu: usize, task: TaskId, id: RegionId) -> Result<(), RunError> {
        let (space, region) = (self.space_of(task), self.plan.region(id));
        let base =
            self.call(cpu, task, 0, |kernel, hw, cx| kernel.map(hw, cx, space, id, region))?;
        self.bases[space.0][id.0] = Some(base);
        for advice in &region.advice {
            self.call(cpu, task, 0, |kernel, hw, cx| kernel.advise(hw, cx, space, id, *advice))?;
        }
        Ok(())
    }

    fn begin_phase(&mut self, cpu: usize, task: TaskId, index: usize) -> Result<(), RunError> {
        let now = self.cpus[cpu].now;
        let Some(phase) = self.plan.phases.get(index) else {
            self.tasks[task.0].next_action = NextAction::Exit;
            return Ok(());
        };
        self.begin_phase_record(now);
        self.clients = Clients::default();
        self.tasks[task.0].cursor = Cursor { phase: index, start_ns: now, ..Cursor::default() };
        self.tasks[task.0].next_action = match phase.client_kind {
            ClientKind::Main => {
                self.clients.working = 1;
                NextAction::Operation
            }
            ClientKind::Processes | ClientKind::Threads => NextAction::Fork { made: 0 },
        };
        Ok(())
    }

    fn end_phase(&mut self, cpu: usize, task: TaskId) {
        let index = self.tasks[task.0].cursor.phase;
        self.end_phase_record(index, self.cpus[cpu].now);
        self.tasks[task.0].next_action = NextAction::Phase(index + 1);
    }

    /// Makes the main task fork the next client, or wait for the clients.
    fn fork(&mut self, cpu: usize, task: TaskId, made: u32) -> Result<(), RunError> {
        let phase = self.phase_of(task);
        if made == phase.clients {
            let nap = phase.parent_wake.is_some();
            self.tasks[task.0].next_action = if nap { NextAction::Nap } else { NextAction::Join };
            return Ok(());
        }
        self.tasks[task.0].next_action = NextAction::Fork { made: made + 1 };
        let (parent, process) = (self.space_of(task), phase.client_kind == ClientKind::Processes);
        let (space, next_action) = if process {
            let child = SpaceId(self.bases.len());
            self.bases.push(self.bases[parent.0].clone());
            self.call(cpu, task, 0, |kernel, hw, cx| kernel.fork(hw, cx, parent, child))?;
            (child, NextAction::Begin)
        } else {
            (parent, NextAction::Operation)
        };
        let (phase, now) = (self.tasks[task.0].cursor.phase, self.cpus[cpu].now);
        self.add_task(Role::Client { number: made, process }, Some(space), next_action, now);
        if let Some(client) = self.tasks.last_mut() {
            client.cursor.phase = phase;
        }
        self.clients.working += 1;
        Ok(())
    }

    /// Makes the main task sleep between two polls.
    fn nap(&mut self, cpu: usize, task: TaskId) {
        let wake_ns = self.phase_of(task).parent_wake.map_or(0, |wake| wake.0);
        self.sleep(cpu, task, wake_ns);
        self.tasks[task.0].next_action = NextAction::Poll;
    }

    /// Makes the main task, which has woken, reap one ended client: one wait3(2) for each poll.
    fn poll(&mut self, cpu: usize, task: TaskId) -> Result<(), RunError> {
        if self.clients.reaped < self.clients.ended {
            self.clients.reaped += 1;
        }
        if self.clients.reaped == self.phase_of(task).clients {
            self.end_phase(cpu, task);
        } else {
            self.nap(cpu, task);
        }
        Ok(())
    }

    fn join(&mut self, cpu: usize, task: TaskId) -> Result<(), RunError> {
        if self.clients.ended == self.phase_of(task).clients {
            self.end_phase(cpu, task);
        } else {
            self.tasks[task.0].next_action = NextAction::Join;
            self.suspend(cpu, task, Wait::On(CLIENTS_ENDED), WallRow::Sleep);
        }
        Ok(())
    }

    /// Returns the cursor's next operation, or the end of the client's work.
    fn operation(&mut self, cpu: usize, task: TaskId) -> Result<(), RunError> {
        let plan = self.plan;
        self.charge_at_least_a_call(cpu, task);
        let cursor = self.tasks[task.0].cursor;
        let phase = &plan.phases[cursor.phase];
        let late = self.cpus[cpu].now >= self.deadline(task);
        if cursor.repeat >= phase.repeat || phase.ops.is_empty() || late {
            return self.end_work(cpu, task);
        }
        let Some(op) = phase.ops.get(cursor.op) else {
            let cursor = &mut self.tasks[task.0].cursor;
            (cursor.op, cursor.repeat) = (0, cursor.repeat + 1);
            return Ok(());
        };
        let is_access = matches!(op, Op::Touch(_) | Op::Replay(_));
        let cursor = &mut self.tasks[task.0].cursor;
        cursor.op += 1;
        cursor.begun_ns = (!is_access).then_some(self.cpus[cpu].now);
        let space = self.space_of(task);
        match op {
            Op::Map(id) => self.map(cpu, task, *id),
            Op::Unmap(id) => {
                self.bases[space.0][id.0] = None;
                self.call(cpu, task, 0, |kernel, hw, cx| kernel.unmap(hw, cx, space, *id))
            }
            Op::Lock { region, chunk_bytes } => {
                self.tasks[task.0].next_action =
                    NextAction::Lock { region: *region, chunk_bytes: *chunk_bytes, done_bytes: 0 };
                Ok(())
            }
            Op::Unlock(id) => {
                self.call(cpu, task, 0, |kernel, hw, cx| kernel.unlock(hw, cx, space, *id))
            }
            Op::Advise { region, advice } => self.call(cpu, task, 0, |kernel, hw, cx| {
                kernel.advise(hw, cx, space, *region, *advice)
            }),
            Op::Touch(touch) => self.begin_touch(task, phase, touch),
            Op::Replay(replay) => self.begin_replay(task, replay),
            Op::Sleep(time) => {
                self.sleep(cpu, task, time.0.min(self.left_ns(cpu, task)));
                Ok(())
            }
            Op::Barrier => {
                self.barrier(cpu, task);
                Ok(())
            }
        }
    }

    /// Charges a system call for an operation that has taken no time. A timed phase of operations that take
    /// no time would never end.
    fn charge_at_least_a_call(&mut self, cpu: usize, task: TaskId) {
        let begun_ns = self.tasks[task.0].cursor.begun_ns.take();
        if begun_ns == Some(self.cpus[cpu].now) {
            let mut spent = CpuTimes::default();
            spent[CpuRow::OtherKernel as usize] = self.parts.kernel.call_ns().max(1);
            self.charge(cpu, task, &spent);
        }
    }

    /// Returns the address of a region to touch.
    fn base_of(&self, task: TaskId, id: RegionId) -> Result<u64, RunError> {
        self.bases[self.space_of(task).0][id.0].ok_or_else(|| RunError::Op {
            op: format!("touch of `{}`", self.plan.region(id).name),
            why: "the region is not mapped".into(),
            remedy: "map it before, in the same or an earlier phase".into(),
        })
    }

    fn begin_replay(&mut self, task: TaskId, replay: &Replay) -> Result<(), RunError> {
        let base = self.base_of(task, replay.region)?;
        let entry = &mut self.tasks[task.0];
        let (changes, totals) = (replay.changes(entry.client()), replay.totals(entry.client()));
        let user_ps = self.parts.settings.replay_ps(&totals);
        entry.piece_carry = 0;
        let accesses = Accesses::replayed(changes, totals, base, user_ps);
        entry.next_action = NextAction::Touch(Box::new(accesses));
        Ok(())
    }

    fn begin_touch(&mut self, task: TaskId, phase: &Phase, touch: &Touch) -> Result<(), RunError> {
        let (region, base) = (self.plan.region(touch.region), self.base_of(task, touch.region)?);
        let entry = &mut self.tasks[task.0];
        let page_bytes = self.parts.settings.page.bytes();
        let (client, repeat) = (entry.client(), entry.cursor.repeat);
        let place = TouchSite { base, bytes: region.bytes, page_bytes, client, repeat };
        let mut touch = touch.clone();
        // Repeated whole laps are one long sweep, which hardware handles in one call.
        let lap = Touch { count: u64::MAX, ..touch.clone() }.runs(region.bytes).next();
        if let (Pattern::Strided { .. }, [_], Some(lap)) = (touch.pattern, &phase.ops[..], lap)
            && touch.count.is_multiple_of(lap.count)
        {
            touch.count = touch.count.saturating_mul(phase.repeat - entry.cursor.repeat);
            entry.cursor.repeat = phase.repeat;
        }
        entry.piece_carry = 0;
        let cost_ps = self.parts.settings.access_ps(&touch);
        entry.next_action = NextAction::Touch(Box::new(Accesses::new(&touch, place, cost_ps)));
        Ok(())
    }

    /// Touches until done, out of time, or waiting for a page.
    fn touch(
        &mut self,
        cpu: usize,
        task: TaskId,
        mut accesses: Box<Accesses>,
        limit_ns: u64,
    ) -> Result<(), RunError> {
        if accesses.is_done() || self.cpus[cpu].now >= self.deadline(task) {
            return Ok(());
        }
        if !self.pace(cpu, task, &mut accesses) {
            self.tasks[task.0].next_action = NextAction::Touch(accesses);
            return Ok(());
        }
        // If no other task can need the CPU before `end`, this step serves consecutive faults.
        let end = self.cpus[cpu].now + limit_ns;
        let phase = self.phase_of(task);
        let alone = self.cpus.len() == 1 && phase.rate.is_none();
        let going_on = alone && phase.time.is_none();
        loop {
            let limit_ns = end.saturating_sub(self.cpus[cpu].now).max(1);
            let faulted = self.touch_or_fault(cpu, task, &mut accesses, limit_ns, going_on)?;
            let end = end.min(self.events.next_ns());
            let on = self.cpus[cpu].task.is_some() && self.cpus[cpu].now < end;
            if !(faulted && alone && on) || accesses.is_done() {
                break;
            }
            self.check_caps(self.cpus[cpu].now)?;
        }
        self.tasks[task.0].next_action = NextAction::Touch(accesses);
        Ok(())
    }

    /// Touches until done, out of time, or at a fault. The kernel then serves the fault, and further ones if
    /// `going_on`. Returns true if there was a fault.
    fn touch_or_fault(
        &mut self,
        cpu: usize,
        task: TaskId,
        accesses: &mut Accesses,
        limit_ns: u64,
        going_on: bool,
    ) -> Result<bool, RunError> {
        let (space, before) = (self.space_of(task), accesses.remaining());
        let limit_ps = limit_ns.saturating_mul(1000);
        let touched = self.parts.hardware.touch(cpu, space, accesses, limit_ps);
        self.charge_touches(cpu, task, before, accesses, touched.translation_ps);
        self.run_state.tally.add(TLB_MISSES, self.parts.hardware.take_tlb_misses());
        if touched.stop != Stop::Fault {
            return Ok(false);
        }
        let end = self.cpus[cpu].slice_end.min(self.events.next_ns());
        let (now, before) = (self.cpus[cpu].now, accesses.remaining());
        let limit_ns = end.saturating_sub(now);
        let mut cx = Cx::new(now, limit_ns, cpu, &mut self.run_state);
        if going_on {
            cx = cx.going_on(self.tasks[task.0].user_carry_ps);
        }
        let fault = |kernel: &mut K, hw: &mut M, cx: &mut Cx<'_>| {
            kernel.fault(hw, cx, space, accesses);
        };
        let ((), end) = in_kernel(&mut self.parts, cx, fault);
        let wait = self.after_call(cpu, task, end);
        self.charge_touches(cpu, task, before, accesses, 0);
        if let Some((wait, row)) = wait? {
            self.suspend(cpu, task, wait, row);
        }
        Ok(true)
    }

    /// Charges the page touches since `before` touches were left.
    fn charge_touches(
        &mut self,
        cpu: usize,
        task: TaskId,
        before: u64,
        accesses: &Accesses,
        translation_ps: u64,
    ) {
        let count = before - accesses.remaining();
        if count == 0 && translation_ps == 0 {
            return;
        }
        let entry = &mut self.tasks[task.0];
        let whole;
        (whole, entry.piece_carry) = accesses.accesses_in(count, entry.piece_carry);
        entry.cursor.accesses += whole;
        self.run_state.tally.add(ACCESSES, whole);
        let user_ps = entry.user_carry_ps + count * accesses.cost_ps;
        let translation_ps = entry.translation_carry_ps + translation_ps;
        entry.user_carry_ps = user_ps % 1000;
        entry.translation_carry_ps = translation_ps % 1000;
        let mut spent = CpuTimes::default();
        spent[CpuRow::Compute as usize] = user_ps / 1000;
        spent[CpuRow::Translation as usize] = translation_ps / 1000;
        self.charge(cpu, task, &spent);
    }

    /// Paces a phase with a rate: allows the accesses that are due, or sleeps until some are. Returns true if
    /// accesses are allowed.
    fn pace(&mut self, cpu: usize, task: TaskId, accesses: &mut Accesses) -> bool {
        let Some(rate) = self.phase_of(task).rate else { return true };
        let cursor = self.tasks[task.0].cursor;
        let elapsed_ns = self.cpus[cpu].now - cursor.start_ns;
        let due = ((elapsed_ns as f64 * rate / 1e9) as u64).saturating_add(1);
        if due > cursor.accesses {
            accesses.allow((due - cursor.accesses).saturating_mul(accesses.pieces()));
            return true;
        }
        let next_ns = (cursor.accesses as f64 / rate * 1e9).ceil() as u64;
        let wait_ns = next_ns.saturating_sub(elapsed_ns).min(self.left_ns(cpu, task));
        self.sleep(cpu, task, wait_ns.max(1));
        false
    }

    fn lock(
        &mut self,
        cpu: usize,
        task: TaskId,
        id: RegionId,
        chunk_bytes: u64,
        done_bytes: u64,
    ) -> Result<(), RunError> {
        let (space, bytes) = (self.space_of(task), self.plan.region(id).bytes);
        if done_bytes >= bytes || self.cpus[cpu].now >= self.deadline(task) {
            return Ok(());
        }
        // The rest of the current call: chunks begin at multiples of their size.
        let chunk_bytes = chunk_bytes.max(1);
        let call_bytes = (chunk_bytes - done_bytes % chunk_bytes).min(bytes - done_bytes);
        let locked = self.call(cpu, task, 0, |kernel, hw, cx| {
            kernel.lock(hw, cx, space, id, done_bytes, call_bytes)
        })?;
        let done_bytes = done_bytes + locked.min(call_bytes);
        self.tasks[task.0].next_action = NextAction::Lock { region: id, chunk_bytes, done_bytes };
        Ok(())
    }

    fn barrier(&mut self, cpu: usize, task: TaskId) {
        self.clients.at_barrier += 1;
        if self.clients.at_barrier >= self.clients.working {
            self.clients.at_barrier = 0;
            self.wake_all(BARRIER, self.cpus[cpu].now);
        } else {
            self.suspend(cpu, task, Wait::On(BARRIER), WallRow::Sleep);
        }
    }

    /// Ends the client: it has no more operations.
    fn end_work(&mut self, cpu: usize, task: TaskId) -> Result<(), RunError> {
        let now = self.cpus[cpu].now;
        self.clients.working -= 1;
        if self.clients.working > 0 && self.clients.at_barrier >= self.clients.working {
            self.clients.at_barrier = 0;
            self.wake_all(BARRIER, now);
        }
        match self.tasks[task.0].role {
            Role::Main => self.end_phase(cpu, task),
            Role::Client { process: true, .. } => self.tasks[task.0].next_action = NextAction::Exit,
            Role::Client { process: false, .. } => self.end_task(cpu, task),
            Role::Kernel(_) => unreachable!("kernel threads have no operations"),
        }
        Ok(())
    }

    fn exit(&mut self, cpu: usize, task: TaskId, limit_ns: u64) -> Result<(), RunError> {
        let space = self.space_of(task);
        match self.call(cpu, task, limit_ns, |kernel, hw, cx| kernel.exit(hw, cx, space))? {
            Step::Again => self.tasks[task.0].next_action = NextAction::Exit,
            Step::Finished => {
                self.parts.hardware.drop_space(space);
                self.end_task(cpu, task);
            }
        }
        Ok(())
    }

    fn end_task(&mut self, cpu: usize, task: TaskId) {
        self.tasks[task.0].state = State::Ended;
        self.cpus[cpu].task = None;
        self.end_ns = self.cpus[cpu].now;
        if matches!(self.tasks[task.0].role, Role::Client { .. }) {
            self.clients.ended += 1;
            if self.clients.working == 0 {
                self.wake_all(CLIENTS_ENDED, self.cpus[cpu].now);
            }
        }
    }

    /// Describes the task's current operation, for messages.
    pub(super) fn describe(&self, task: TaskId) -> String {
        let entry = &self.tasks[task.0];
        let phase = self.plan.phases.get(entry.cursor.phase).map_or("", |phase| &phase.name);
        let what = match &entry.next_action {
            NextAction::Begin => "start of a process",
            NextAction::MapAll(_) => "mapping",
            NextAction::Fork { .. } => "fork",
            NextAction::Touch(_) => "touch",
            NextAction::Lock { .. } => "lock",
            NextAction::Exit => "exit",
            _ => "operation",
        };
        format!("{what} in phase `{phase}`")
    }
}
