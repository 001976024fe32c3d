//! The decoding of records of perf rings.
//!
//! Source: perf_event_open(2), "MMAP layout". Samples have the fields IP, TID, TIME, CALLCHAIN, in that
//! order. Other records end in TID, TIME.

use super::symbols::{Symbols, Wait, Work};
use crate::sys::perf::{self, PerfRecord};

/// The event that wrote a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingSource {
    /// The cpu-clock event, with stacks and task records.
    Clock,
    /// The context-switches event, with stacks.
    Switch,
    /// A dummy event, for the task records alone.
    Records,
}

/// A decoded record: an event of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskRecord {
    /// The time by CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// The id of the task's thread.
    pub tid: u32,
    /// The event, with its details.
    pub what: TaskEvent,
}

/// An event of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskEvent {
    /// The task made a new task.
    Fork {
        /// The thread id of the new task.
        child: u32,
    },
    /// The task executed another program, or changed its name.
    Exec,
    /// The timer found the task on a CPU.
    Clock {
        /// True if the task was in user mode.
        user: bool,
        /// The work in the kernel, if the stack identifies it.
        work: Option<Work>,
    },
    /// The task may leave its CPU for this wait; if it is preempted instead, the wait does not count.
    SwitchStack(Wait),
    /// The task left its CPU.
    SwitchedOut {
        /// True if the task was still runnable.
        preempted: bool,
    },
    /// The task got a CPU.
    SwitchedIn,
    /// The task ended for good.
    Exit,
}

impl TaskEvent {
    /// Returns the order among records of the same time: causes first.
    pub fn rank(self) -> u8 {
        match self {
            TaskEvent::Fork { .. } => 0,
            TaskEvent::Exec => 1,
            TaskEvent::Clock { .. } => 2,
            TaskEvent::SwitchStack(_) => 3,
            TaskEvent::SwitchedOut { .. } => 4,
            TaskEvent::SwitchedIn => 5,
            TaskEvent::Exit => 6,
        }
    }
}

fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

/// Returns the number of records that found no room in a ring; `None` if the record does not report a
/// loss.
pub fn lost(record: &PerfRecord<'_>) -> Option<u64> {
    (record.kind == perf::RECORD_LOST).then(|| record.words.get(1).copied().unwrap_or(0))
}

/// Decodes a record; `None` for kinds that do not matter and for truncated records.
pub fn decode(
    source: RingSource,
    record: &PerfRecord<'_>,
    symbols: Option<&Symbols>,
) -> Option<TaskRecord> {
    if record.kind == perf::RECORD_SAMPLE {
        return decode_sample(source, record, symbols?);
    }
    let [.., task, time_ns] = *record.words else { return None };
    let (own, preempted) = (high(task), record.misc & perf::MISC_SWITCH_OUT_PREEMPT != 0);
    let (tid, what) = match record.kind {
        perf::RECORD_SWITCH if record.misc & perf::MISC_SWITCH_OUT != 0 => {
            (own, TaskEvent::SwitchedOut { preempted })
        }
        perf::RECORD_SWITCH => (own, TaskEvent::SwitchedIn),
        perf::RECORD_COMM => (own, TaskEvent::Exec),
        // The words are pid and ppid, tid and ptid, time.
        perf::RECORD_FORK => (own, TaskEvent::Fork { child: *record.words.get(1)? as u32 }),
        perf::RECORD_EXIT => (*record.words.get(1)? as u32, TaskEvent::Exit),
        _ => return None,
    };
    Some(TaskRecord { time_ns, tid, what })
}

fn decode_sample(
    source: RingSource,
    record: &PerfRecord<'_>,
    symbols: &Symbols,
) -> Option<TaskRecord> {
    let [ip, task, time_ns, frames, ref rest @ ..] = *record.words else { return None };
    let stack = rest.get(..frames as usize)?;
    let what = match source {
        RingSource::Switch => TaskEvent::SwitchStack(symbols.wait(stack)),
        RingSource::Clock | RingSource::Records => {
            let user = record.misc & perf::MISC_CPUMODE_MASK == perf::MISC_USER;
            // Where the kernel cannot unwind, it leaves out the chain; the instruction address remains.
            let work = symbols.work(stack).or_else(|| symbols.work(&[ip]));
            TaskEvent::Clock { user, work: work.filter(|_| !user) }
        }
    };
    Some(TaskRecord { time_ns, tid: high(task), what })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procfs::tests::captured;

    fn record(kind: u32, misc: u16, words: &[u64]) -> PerfRecord<'_> {
        PerfRecord { kind, misc, words }
    }

    const TASK: u64 = 7 << 32 | 5;

    #[test]
    fn switches_and_tasks() {
        let decode = |r: &PerfRecord<'_>| decode(RingSource::Clock, r, None);
        let out = perf::MISC_SWITCH_OUT;
        let seen = |what| Some(TaskRecord { time_ns: 99, tid: 7, what });
        assert_eq!(
            decode(&record(perf::RECORD_SWITCH, 0, &[TASK, 99])),
            seen(TaskEvent::SwitchedIn)
        );
        assert_eq!(
            decode(&record(perf::RECORD_SWITCH, out, &[TASK, 99])),
            seen(TaskEvent::SwitchedOut { preempted: false })
        );
        let preempt = out | perf::MISC_SWITCH_OUT_PREEMPT;
        assert_eq!(
            decode(&record(perf::RECORD_SWITCH, preempt, &[TASK, 99])),
            seen(TaskEvent::SwitchedOut { preempted: true })
        );
        let fork = [8, (7 << 32) | 8, 98, TASK, 99];
        assert_eq!(
            decode(&record(perf::RECORD_FORK, 0, &fork)),
            seen(TaskEvent::Fork { child: 8 })
        );
        assert_eq!(decode(&record(perf::RECORD_FORK, 0, &[])), None);
        assert_eq!(lost(&record(perf::RECORD_LOST, 0, &[1, 12, TASK, 99])), Some(12));
    }

    #[test]
    fn samples_are_classified_or_dropped_when_cut() {
        let symbols = Symbols::read(&captured()).unwrap();
        let zero = 0xffffffff821e86a4;
        let words = [zero, TASK, 99, 2, -128i64 as u64, zero];
        let sample = record(perf::RECORD_SAMPLE, perf::MISC_KERNEL, &words);
        let work = Some(Work::ZeroCopy);
        assert_eq!(
            decode(RingSource::Clock, &sample, Some(&symbols)),
            Some(TaskRecord { time_ns: 99, tid: 7, what: TaskEvent::Clock { user: false, work } })
        );
        let cut = record(perf::RECORD_SAMPLE, perf::MISC_KERNEL, &words[..5]);
        assert_eq!(decode(RingSource::Clock, &cut, Some(&symbols)), None);
        let user = record(perf::RECORD_SAMPLE, perf::MISC_USER, &[0x1000, TASK, 99, 0]);
        assert_eq!(
            decode(RingSource::Clock, &user, Some(&symbols)).map(|seen| seen.what),
            Some(TaskEvent::Clock { user: true, work: None })
        );
    }
}
