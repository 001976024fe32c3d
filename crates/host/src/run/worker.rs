//! One client of a phase, which applies the operations in order, in a thread or in a forked child.

use super::control::{Control, Failure, Figure};
use super::memory::Memory;
use super::pace::{Halt, Pace};
use super::touch::{ClientRepeat, Nothing, walk};
use crate::procfs::{Root, process_huge_bytes, process_memory, schedstat};
use crate::sys::process::{Usage, thread_usage};
use pagetax_core::plan::{Op, Phase, Plan};
use std::time::{Duration, Instant};

/// The inputs of a worker.
pub struct Worker<'a> {
    /// The plan whose regions the operations name.
    pub plan: &'a Plan,
    /// The phase that the worker runs.
    pub phase: &'a Phase,
    /// The client's number in the phase, from 0.
    pub client: u32,
    /// The memory; `None` on the null machine.
    pub memory: Option<Memory>,
    /// The words shared with the supervisor and the other workers.
    pub control: &'a Control,
    /// The start of the run, for times in the report.
    pub run_begun: Instant,
}

/// The result of a worker thread.
pub struct WorkerResult {
    /// The CPU time and faults of the operations alone.
    pub usage: Usage,
    /// The memory as the operations left it.
    pub memory: Option<Memory>,
}

impl Worker<'_> {
    /// Works until the end, a failure or a stop. The usage counts from the first operation on.
    pub fn work(mut self) -> WorkerResult {
        self.control.wait_at_gate();
        let waited_before = run_queue_ns();
        let before = thread_usage();
        let halt = self.repeats();
        let usage = thread_usage().since(before);
        let row = self.control.client(self.client);
        let waited = run_queue_ns().zip(waited_before).map(|(now, then)| now.saturating_sub(then));
        row.note(Figure::RunQueueNs, waited);
        row.note(Figure::LockedBytesMax, self.memory.as_ref().map(Memory::locked_bytes_max));
        if let Err((operation, halt)) = halt {
            let address = self.address_of(operation, halt);
            self.control.fail(Failure { operation, halt, address });
        }
        WorkerResult { usage, memory: self.memory }
    }

    /// Runs all repeats. A failure comes with the index of its operation.
    fn repeats(&mut self) -> Result<(), (usize, Halt)> {
        let time = self.phase.time.map(|time| Duration::from_nanos(time.0));
        let publish_faults = self.plan.measure.interval.is_some();
        let mut pace = Pace::new(self.control, self.client, time, self.phase.rate, publish_faults);
        let mut result = Ok(());
        'repeats: for repeat in 0..self.phase.repeat {
            let turn = ClientRepeat { client: self.client, repeat };
            for (index, op) in self.phase.ops.iter().enumerate() {
                let done = pace.between_operations().and_then(|()| self.apply(op, turn, &mut pace));
                if let Err(halt) = done {
                    result = Err((index, halt));
                    break 'repeats;
                }
            }
        }
        pace.publish();
        result
    }

    fn apply(&mut self, op: &Op, turn: ClientRepeat, pace: &mut Pace<'_>) -> Result<(), Halt> {
        match (op, &mut self.memory) {
            (Op::Sleep(time), _) => pace.sleep(Duration::from_nanos(time.0)),
            (Op::Barrier, _) => pace.barrier(),
            (op, Some(memory)) => memory.apply(op, turn, pace),
            (Op::Touch(touch), None) => {
                let bytes = self.plan.region(touch.region).bytes;
                walk(touch, bytes, turn, &mut Nothing, pace)
            }
            (_, None) => Ok(()),
        }
    }

    fn address_of(&self, operation: usize, halt: Halt) -> u64 {
        let (Halt::Wrong(wrong), Some(Op::Touch(touch))) = (halt, self.phase.ops.get(operation))
        else {
            return 0;
        };
        let mapping = self.memory.as_ref().and_then(|memory| memory.mapping(touch.region));
        mapping.map_or(0, |mapping| mapping.address() + wrong.offset)
    }

    /// Runs a forked child up to its exit, and returns its exit status.
    pub fn work_as_child(self, reads_huge_bytes: bool) -> i32 {
        let (control, client, run_begun) = (self.control, self.client, self.run_begun);
        let finished = self.work();
        let end_ns = run_begun.elapsed().as_nanos() as u64;
        let (root, pid) = (Root::default(), std::process::id());
        let (memory, row) = (process_memory(&root, pid), control.client(client));
        row.note(Figure::ResidentBytesMax, memory.resident_bytes_max.value());
        row.note(Figure::PageTableBytes, memory.page_table_bytes.value());
        if reads_huge_bytes {
            row.note(Figure::HugeBytes, process_huge_bytes(&root, pid).value());
        }
        control.end(client, end_ns);
        drop(finished);
        0
    }
}

/// Returns for how long the calling thread was runnable but not running, in nanoseconds.
fn run_queue_ns() -> Option<u64> {
    let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    schedstat(&Root::default(), std::process::id(), Some(tid)).ok().map(|(_, waited)| waited)
}
