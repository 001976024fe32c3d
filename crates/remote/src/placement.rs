//! Where threads run: one that answers another on the same CPU costs a third of one that has to be
//! woken on another.

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// The CPUs that a thread may run on, and the one that it keeps to for now.
#[derive(Debug)]
pub(crate) struct Placement {
    allowed: Option<CpuSet>,
    kept: Option<usize>,
}

impl Placement {
    /// Of the calling thread, which alone may use it.
    pub fn of_this_thread() -> Placement {
        Placement { allowed: sched_getaffinity(None::<Pid>).ok(), kept: None }
    }

    /// Keeps to one CPU, if it is allowed, or to none.
    pub fn keep_to(&mut self, cpu: Option<usize>) {
        let Some(allowed) = self.allowed.as_ref().filter(|_| cpu != self.kept) else { return };
        let set = match cpu {
            None => *allowed,
            Some(cpu) if cpu < CpuSet::MAX_CPU && allowed.is_set(cpu) => one(cpu),
            Some(_) => return,
        };
        self.apply(&set, cpu);
    }

    /// Keeps off one CPU, if others are allowed, or off none.
    pub fn keep_off(&mut self, cpu: Option<usize>) {
        let Some(allowed) = self.allowed.as_ref().filter(|_| cpu != self.kept) else { return };
        let mut set = *allowed;
        if let Some(cpu) = cpu.filter(|cpu| *cpu < CpuSet::MAX_CPU && allowed.count() > 1) {
            set.unset(cpu);
        }
        self.apply(&set, cpu);
    }

    fn apply(&mut self, set: &CpuSet, cpu: Option<usize>) {
        // Where it is refused, the thread runs as before; it is tried again when the CPU changes.
        let _ = sched_setaffinity(None::<Pid>, set);
        self.kept = cpu;
    }
}

fn one(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}
