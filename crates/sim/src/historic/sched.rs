//! Schedulers: they choose the ready task that gets a CPU, and its time slice.
//!
//! Invariant: a scheduler sees only the numbers of tasks, and times in nanoseconds. Equal tasks are served
//! in order of arrival, so that runs are repeatable.

use crate::model::{Model, ModelError};
use std::collections::VecDeque;

/// A task: a process, a thread, or a kernel thread. Numbered in the order of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TaskId(pub usize);

/// A scheduling policy.
pub trait Scheduler {
    /// Adds a task that can run and waits for a CPU; `woken` if it slept until now.
    fn ready(&mut self, task: TaskId, woken: bool);

    /// Takes the task that runs next.
    fn pick(&mut self) -> Option<TaskId>;

    /// Returns the latest time at which the CPU that `task` gets at `now` chooses again.
    fn slice_end(&self, task: TaskId, now: u64) -> u64;

    /// Notes that the task has used `ns` of CPU.
    fn ran(&mut self, _task: TaskId, _ns: u64) {}

    /// Returns true if the woken task takes the CPU of the running one at once.
    fn preempts(&self, woken: TaskId, running: TaskId) -> bool;

    /// Updates priorities after each second, with the number of tasks that are ready or running. The engine
    /// calls it only if [`Scheduler::has_seconds`].
    fn second(&mut self, _load: u64) {}

    /// Returns true if the scheduler needs an event each second.
    fn has_seconds(&self) -> bool {
        false
    }
}

/// Returns the scheduler that `machine.scheduler` names.
pub fn scheduler(model: &Model) -> Result<Box<dyn Scheduler>, ModelError> {
    #[derive(Clone, Copy)]
    enum SchedulerKind {
        Feedback,
        RoundRobin,
        Fair,
    }
    let known = [
        ("4.3bsd-feedback", SchedulerKind::Feedback),
        ("round-robin", SchedulerKind::RoundRobin),
        ("fair", SchedulerKind::Fair),
    ];
    let policy = model.word("machine", "scheduler", &known)?;
    let quantum_ns = model.ns("machine", "quantum")?;
    if quantum_ns == 0 {
        return Err(model.error("machine", "quantum", "is zero", "write a time, such as 100 ms"));
    }
    Ok(match policy {
        SchedulerKind::Feedback => {
            Box::new(Feedback::new(quantum_ns, model.ns("machine", "tick")?.max(1)))
        }
        SchedulerKind::RoundRobin => Box::new(RoundRobin { quantum_ns, queue: VecDeque::new() }),
        SchedulerKind::Fair => Box::new(Fair { quantum_ns, ran_ns: Vec::new(), queue: Vec::new() }),
    })
}

/// Round robin with a quantum. A woken task queues like the others.
#[derive(Debug)]
struct RoundRobin {
    quantum_ns: u64,
    queue: VecDeque<TaskId>,
}

impl Scheduler for RoundRobin {
    fn ready(&mut self, task: TaskId, _woken: bool) {
        self.queue.push_back(task);
    }

    fn pick(&mut self) -> Option<TaskId> {
        self.queue.pop_front()
    }

    fn slice_end(&self, _task: TaskId, now: u64) -> u64 {
        now + self.quantum_ns
    }

    fn preempts(&self, _woken: TaskId, _running: TaskId) -> bool {
        false
    }
}

/// Multilevel feedback of 4.3BSD: 32 queues by recent CPU use, which decays each second. Tasks of the
/// first queue take turns at fixed points of time. A sleeper returns with its kernel priority, ahead of all
/// tasks that compute. Source: Leffler et al., The Design and Implementation of the 4.3BSD UNIX Operating
/// System, 1989, section 4.4.
#[derive(Debug)]
struct Feedback {
    quantum_ns: u64,
    tick_ns: u64,
    queues: [VecDeque<TaskId>; QUEUES],
    /// The queues that are not empty, one bit each.
    filled: u32,
    recent_ns: Vec<u64>,
}

const QUEUES: usize = 32;
/// The priority of a task without recent CPU use (PUSER).
const BASE_PRIORITY: u64 = 50;
const PRIORITY_MAX: u64 = 127;
/// The queue of tasks that return from a sleep in the kernel (PSLEP, 40).
const WOKEN_QUEUE: usize = 10;
const RECENT_TICKS_MAX: u64 = 255;

impl Feedback {
    fn new(quantum_ns: u64, tick_ns: u64) -> Self {
        let (queues, recent_ns) = Default::default();
        Feedback { quantum_ns, tick_ns, queues, filled: 0, recent_ns }
    }

    fn queue(&self, task: TaskId) -> usize {
        let recent_ticks = self.recent_ns.get(task.0).copied().unwrap_or(0) / self.tick_ns;
        let priority = (BASE_PRIORITY + recent_ticks / 4).min(PRIORITY_MAX);
        (priority as usize * QUEUES) / (PRIORITY_MAX as usize + 1)
    }
}

impl Scheduler for Feedback {
    fn ready(&mut self, task: TaskId, woken: bool) {
        let queue = if woken { WOKEN_QUEUE } else { self.queue(task) };
        self.queues[queue].push_back(task);
        self.filled |= 1 << queue;
    }

    fn pick(&mut self) -> Option<TaskId> {
        let first = self.filled.trailing_zeros();
        let queue = self.queues.get_mut(first as usize)?;
        let task = queue.pop_front();
        if queue.is_empty() {
            self.filled &= !(1 << first);
        }
        task
    }

    fn slice_end(&self, _task: TaskId, now: u64) -> u64 {
        (now / self.quantum_ns + 1) * self.quantum_ns
    }

    fn ran(&mut self, task: TaskId, ns: u64) {
        if self.recent_ns.len() <= task.0 {
            self.recent_ns.resize(task.0 + 1, 0);
        }
        let recent_ns = &mut self.recent_ns[task.0];
        *recent_ns = (*recent_ns + ns).min(RECENT_TICKS_MAX * self.tick_ns);
    }

    fn preempts(&self, _woken: TaskId, _running: TaskId) -> bool {
        true
    }

    fn second(&mut self, load: u64) {
        for recent_ns in &mut self.recent_ns {
            *recent_ns = *recent_ns * 2 * load / (2 * load + 1);
        }
        let computing = self.queues.iter_mut().skip(WOKEN_QUEUE + 1);
        let waiting: Vec<_> = computing.flat_map(std::mem::take).collect();
        self.filled &= (2 << WOKEN_QUEUE) - 1;
        waiting.into_iter().for_each(|task| self.ready(task, false));
    }

    fn has_seconds(&self) -> bool {
        true
    }
}

/// The task with the least CPU time first, as in current kernels. A woken task starts level with it, and
/// preempts a task that is a quantum ahead.
#[derive(Debug)]
struct Fair {
    quantum_ns: u64,
    ran_ns: Vec<u64>,
    queue: Vec<TaskId>,
}

impl Fair {
    fn ran_ns(&self, task: TaskId) -> u64 {
        self.ran_ns.get(task.0).copied().unwrap_or(0)
    }
}

impl Scheduler for Fair {
    fn ready(&mut self, task: TaskId, _woken: bool) {
        let least_ns = self.queue.iter().map(|other| self.ran_ns(*other)).min();
        if self.ran_ns.len() <= task.0 {
            self.ran_ns.resize(task.0 + 1, 0);
        }
        let floor_ns = least_ns.unwrap_or(0).saturating_sub(self.quantum_ns);
        self.ran_ns[task.0] = self.ran_ns[task.0].max(floor_ns);
        self.queue.push(task);
    }

    fn pick(&mut self) -> Option<TaskId> {
        let index = (0..self.queue.len()).min_by_key(|i| (self.ran_ns(self.queue[*i]), *i))?;
        Some(self.queue.remove(index))
    }

    fn slice_end(&self, _task: TaskId, now: u64) -> u64 {
        now + self.quantum_ns
    }

    fn ran(&mut self, task: TaskId, ns: u64) {
        self.ran_ns[task.0] += ns;
    }

    fn preempts(&self, woken: TaskId, running: TaskId) -> bool {
        self.ran_ns(woken) + self.quantum_ns <= self.ran_ns(running)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn those_who_computed_less_go_first() {
        let mut feedback = Feedback::new(100 * MS, 10 * MS);
        feedback.ran(TaskId(0), 400 * MS);
        (0..3).for_each(|task| feedback.ready(TaskId(task), false));
        let order: Vec<_> = std::iter::from_fn(|| feedback.pick()).map(|task| task.0).collect();
        assert_eq!(order, [1, 2, 0]);
    }

    #[test]
    fn recent_use_is_forgotten() {
        let mut feedback = Feedback::new(100 * MS, 10 * MS);
        feedback.ran(TaskId(0), 10_000 * MS);
        feedback.ready(TaskId(0), false);
        let busy = feedback.queue(TaskId(0));
        (0..10).for_each(|_| feedback.second(1));
        assert!(feedback.queue(TaskId(0)) < busy);
        assert_eq!(feedback.pick(), Some(TaskId(0)));
        assert_eq!(feedback.slice_end(TaskId(0), 250 * MS), 300 * MS);
    }

    #[test]
    fn fair_shares_are_equal() {
        let mut fair = Fair { quantum_ns: 3 * MS, ran_ns: Vec::new(), queue: Vec::new() };
        (0..3).for_each(|task| fair.ready(TaskId(task), false));
        for _ in 0..300 {
            let task = fair.pick().unwrap();
            fair.ran(task, if task.0 == 0 { 6 * MS } else { 3 * MS });
            fair.ready(task, false);
        }
        let (least, most) = (fair.ran_ns.iter().min(), fair.ran_ns.iter().max());
        assert!(most.unwrap() - least.unwrap() <= 6 * MS);
        assert!(fair.preempts(TaskId(3), TaskId(0)) && !fair.preempts(TaskId(0), TaskId(1)));
    }
}
