//! The state of a job over time, from its tasks' switches.
//!
//! A job of many tasks has one wall clock. At each moment the job is in the first of these states that
//! any task is in: running, runnable, waiting for swap, waiting for a page, in reclaim, asleep. So the
//! states add up to exactly the elapsed time, for any number of tasks and CPUs. A parent that waits for
//! its children does not make the job sleep. Eight clients on two CPUs do not make it wait six times the
//! elapsed time.

use super::symbols::Wait;
use std::collections::HashMap;

/// The state of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TaskState {
    /// The task is on a CPU.
    Running,
    /// Preempted: off its CPU, but runnable.
    Runnable,
    /// Off its CPU because it waits.
    Waiting(Wait),
}

/// The states by precedence; a job is in the first that any of its tasks is in.
const STATES: [TaskState; 6] = [
    TaskState::Running,
    TaskState::Runnable,
    TaskState::Waiting(Wait::SwapIn),
    TaskState::Waiting(Wait::PageIn),
    TaskState::Waiting(Wait::Throttle),
    TaskState::Waiting(Wait::Sleep),
];
const SLEEP: usize = STATES.len() - 1;

fn rank(state: TaskState) -> usize {
    STATES.iter().position(|known| *known == state).unwrap_or(SLEEP)
}

/// The elapsed time by the job's state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MainLine {
    in_state_ns: [u64; STATES.len()],
}

impl MainLine {
    /// Returns the time in a state.
    pub fn ns(&self, state: TaskState) -> u64 {
        self.in_state_ns[rank(state)]
    }

    /// Returns the time in all states: from the first event to the end.
    pub fn total_ns(&self) -> u64 {
        self.in_state_ns.iter().sum()
    }

    /// Returns the time in which no task was running or runnable.
    pub fn waiting_ns(&self) -> u64 {
        self.in_state_ns[2..].iter().sum()
    }
}

/// The states of all tasks after the last event.
#[derive(Debug, Default)]
pub struct Timeline {
    tasks: HashMap<u32, usize>,
    tasks_in: [u32; STATES.len()],
    since_ns: Option<u64>,
    line: MainLine,
}

impl Timeline {
    /// Sets a task's state. Events come in the order of time; a late event counts as now.
    pub fn enter(&mut self, time_ns: u64, task: u32, state: TaskState) {
        self.advance(time_ns);
        let state = rank(state);
        if let Some(before) = self.tasks.insert(task, state) {
            self.tasks_in[before] -= 1;
        }
        self.tasks_in[state] += 1;
    }

    /// Removes a task that ended.
    pub fn exit(&mut self, time_ns: u64, task: u32) {
        self.advance(time_ns);
        if let Some(before) = self.tasks.remove(&task) {
            self.tasks_in[before] -= 1;
        }
    }

    /// Returns true if the task has entered a state and not ended.
    pub fn knows(&self, task: u32) -> bool {
        self.tasks.contains_key(&task)
    }

    /// Returns the main line up to `end_ns`; `None` if there was no event.
    pub fn finish(mut self, end_ns: u64) -> Option<MainLine> {
        self.since_ns?;
        self.advance(end_ns);
        Some(self.line)
    }

    fn advance(&mut self, time_ns: u64) {
        let since_ns = *self.since_ns.get_or_insert(time_ns);
        let state = self.tasks_in.iter().position(|tasks| *tasks > 0);
        // Without tasks, no time counts: the last task has ended.
        if let Some(state) = state {
            self.line.in_state_ns[state] += time_ns.saturating_sub(since_ns);
        }
        self.since_ns = Some(since_ns.max(time_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TaskState::*;
    use proptest::prelude::*;

    #[test]
    fn a_parent_that_waits_does_not_make_the_job_sleep() {
        let mut line = Timeline::default();
        line.enter(100, 1, Running);
        line.enter(110, 2, Running);
        line.enter(120, 1, Waiting(Wait::Sleep));
        line.enter(150, 2, Runnable);
        line.enter(155, 2, Running);
        line.exit(200, 2);
        line.enter(203, 1, Running);
        line.exit(210, 1);
        let line = line.finish(220).unwrap();
        assert_eq!(line.ns(Running), 20 + 30 + 45 + 7);
        assert_eq!(line.ns(Runnable), 5);
        assert_eq!(line.ns(Waiting(Wait::Sleep)), 3);
        assert_eq!(line.total_ns(), 110);
    }

    #[test]
    fn a_page_outranks_sleep() {
        let mut line = Timeline::default();
        line.enter(0, 1, Waiting(Wait::Sleep));
        line.enter(10, 2, Waiting(Wait::PageIn));
        line.enter(30, 2, Waiting(Wait::SwapIn));
        line.enter(60, 2, Waiting(Wait::Throttle));
        let line = line.finish(70).unwrap();
        assert_eq!(line.ns(Waiting(Wait::Sleep)), 10);
        assert_eq!(line.ns(Waiting(Wait::PageIn)), 20);
        assert_eq!(line.ns(Waiting(Wait::SwapIn)), 30);
        assert_eq!(line.ns(Waiting(Wait::Throttle)), 10);
        assert_eq!(line.waiting_ns(), 70);
        assert!(Timeline::default().finish(5).is_none());
    }

    proptest! {
        #[test]
        fn states_add_up_to_the_elapsed_time(
            events in proptest::collection::vec((0u64..1000, 0u32..8, 0usize..6), 1..200),
        ) {
            let (mut line, mut now) = (Timeline::default(), 7);
            for (step, task, state) in events {
                now += step;
                line.enter(now, task, STATES[state]);
            }
            let first = line.since_ns.unwrap() - line.line.total_ns();
            let line = line.finish(now + 50).unwrap();
            prop_assert_eq!(line.total_ns(), now + 50 - first);
        }
    }
}
