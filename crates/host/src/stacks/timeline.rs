//! The main line of a job over time, from its tasks' switches.
//!
//! A job of many tasks has one wall clock. At each moment the job as a whole is in the first of
//! these states that any of its tasks is in: running, runnable, waiting for swap, for a page, in
//! reclaim, asleep. So the states add up to the elapsed time exactly, however many tasks and CPUs
//! there are: a parent that waits for its children does not make the job sleep, and eight clients on
//! two CPUs do not make it wait six times the elapsed time.

use super::symbols::Wait;
use std::collections::HashMap;

/// What a task is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TaskState {
    /// On a CPU.
    Running,
    /// Taken off its CPU, though it would go on.
    Runnable,
    /// Off its CPU by its own doing.
    Waiting(Wait),
    /// The same, with no stack that tells why.
    Unseen,
}

/// States by precedence; a job's state is the first that any task is in.
const STATES: [TaskState; 7] = [
    TaskState::Running,
    TaskState::Runnable,
    TaskState::Waiting(Wait::SwapIn),
    TaskState::Waiting(Wait::PageIn),
    TaskState::Waiting(Wait::Throttle),
    TaskState::Unseen,
    TaskState::Waiting(Wait::Sleep),
];
const SLEEP: usize = STATES.len() - 1;

fn rank(state: TaskState) -> usize {
    STATES.iter().position(|known| *known == state).unwrap_or(SLEEP)
}

/// How long those waits lasted whose stacks stand for others too, by [`Wait::ALL`].
#[derive(Debug, Default)]
pub struct Samples {
    open: HashMap<u32, (u64, Wait)>,
    ns: [u64; Wait::ALL.len()],
}

impl Samples {
    /// A task begins to wait.
    pub fn begin(&mut self, time_ns: u64, task: u32, wait: Wait) {
        self.open.insert(task, (time_ns, wait));
    }

    /// It runs again, if it waited.
    pub fn end(&mut self, time_ns: u64, task: u32) {
        if let Some((since_ns, wait)) = self.open.remove(&task) {
            self.ns[wait as usize] += time_ns.saturating_sub(since_ns);
        }
    }
}

/// Elapsed time in which all tasks waited, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waited {
    /// The most likely.
    pub ns: u64,
    /// What is certain.
    pub low_ns: u64,
    /// With all that might be.
    pub high_ns: u64,
}

/// Elapsed time by the job's state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MainLine {
    in_state_ns: [u64; STATES.len()],
    /// What [`TaskState::Unseen`] is divided by.
    shares_ns: [u64; Wait::ALL.len()],
}

impl MainLine {
    /// Time in a state.
    pub fn ns(&self, state: TaskState) -> u64 {
        self.in_state_ns[rank(state)]
    }

    /// Time in which all waited, the first of them for this. What no stack tells of is divided as the waits
    /// were that stand for it; without any of those it counts as sleep. All waits add up.
    pub fn waited(&self, wait: Wait) -> Waited {
        let (low_ns, unseen_ns) = (self.ns(TaskState::Waiting(wait)), self.ns(TaskState::Unseen));
        let of_unseen = |wait: Wait| {
            let all = self.shares_ns.iter().map(|ns| u128::from(*ns)).sum::<u128>().max(1);
            (u128::from(unseen_ns) * u128::from(self.shares_ns[wait as usize]) / all) as u64
        };
        let due = match wait {
            Wait::Sleep => {
                let others = Wait::ALL.iter().filter(|other| **other != Wait::Sleep);
                unseen_ns - others.map(|other| of_unseen(*other)).sum::<u64>()
            }
            _ => of_unseen(wait),
        };
        Waited { ns: low_ns + due, low_ns, high_ns: low_ns + unseen_ns }
    }

    /// Time in all of them: from the first event to the end.
    pub fn total_ns(&self) -> u64 {
        self.in_state_ns.iter().sum()
    }

    /// Time in which no task ran or could have.
    pub fn waiting_ns(&self) -> u64 {
        self.in_state_ns[2..].iter().sum()
    }
}

/// The states of all tasks, as of the last event.
#[derive(Debug, Default)]
pub struct Timeline {
    tasks: HashMap<u32, usize>,
    tasks_in: [u32; STATES.len()],
    since_ns: Option<u64>,
    line: MainLine,
}

impl Timeline {
    /// A task enters a state. Events come in the order of time; one that is late counts as now.
    pub fn enter(&mut self, time_ns: u64, task: u32, state: TaskState) {
        self.advance(time_ns);
        let state = rank(state);
        if let Some(before) = self.tasks.insert(task, state) {
            self.tasks_in[before] -= 1;
        }
        self.tasks_in[state] += 1;
    }

    /// A task ends.
    pub fn exit(&mut self, time_ns: u64, task: u32) {
        self.advance(time_ns);
        if let Some(before) = self.tasks.remove(&task) {
            self.tasks_in[before] -= 1;
        }
    }

    /// Whether the task is known.
    pub fn knows(&self, task: u32) -> bool {
        self.tasks.contains_key(&task)
    }

    /// The main line up to `end_ns`; none if nothing ever happened.
    pub fn finish(mut self, end_ns: u64, samples: &Samples) -> Option<MainLine> {
        self.since_ns?;
        self.advance(end_ns);
        Some(MainLine { shares_ns: samples.ns, ..self.line })
    }

    fn advance(&mut self, time_ns: u64) {
        let since_ns = *self.since_ns.get_or_insert(time_ns);
        let state = self.tasks_in.iter().position(|tasks| *tasks > 0);
        // Without tasks nothing is due to the job: the last one is gone.
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
        let line = line.finish(220, &Samples::default()).unwrap();
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
        let line = line.finish(70, &Samples::default()).unwrap();
        assert_eq!(line.ns(Waiting(Wait::Sleep)), 10);
        assert_eq!(line.ns(Waiting(Wait::PageIn)), 20);
        assert_eq!(line.ns(Waiting(Wait::SwapIn)), 30);
        assert_eq!(line.ns(Waiting(Wait::Throttle)), 10);
        assert_eq!(line.waiting_ns(), 70);
        assert!(Timeline::default().finish(5, &Samples::default()).is_none());
    }

    #[test]
    fn what_was_not_seen_is_due_to_the_waits_that_stand_for_it() {
        let (mut line, mut samples) = (Timeline::default(), Samples::default());
        line.enter(0, 1, Waiting(Wait::PageIn));
        line.enter(10, 1, Unseen);
        let waited = |line: MainLine| [Wait::PageIn, Wait::Sleep].map(|wait| line.waited(wait));
        let of = |ns, low_ns, high_ns| Waited { ns, low_ns, high_ns };
        samples.begin(10, 1, Wait::PageIn);
        samples.end(40, 1);
        samples.end(50, 1);
        samples.begin(50, 2, Wait::Sleep);
        samples.end(60, 2);
        let seen = line.finish(111, &samples).unwrap();
        assert_eq!(waited(seen), [of(10 + 75, 10, 111), of(26, 0, 101)]);
        assert_eq!(seen.waited(Wait::SwapIn), of(0, 0, 101));
        assert_eq!(waited(MainLine { shares_ns: [0; 4], ..seen })[1].ns, 101);
    }

    proptest! {
        #[test]
        fn states_add_up_to_the_elapsed_time(
            events in proptest::collection::vec((0u64..1000, 0u32..8, 0usize..7), 1..200),
        ) {
            let (mut line, mut now) = (Timeline::default(), 7);
            for (step, task, state) in events {
                now += step;
                line.enter(now, task, STATES[state]);
            }
            let first = line.since_ns.unwrap() - line.line.total_ns();
            let line = line.finish(now + 50, &Samples::default()).unwrap();
            prop_assert_eq!(line.total_ns(), now + 50 - first);
        }
    }
}
