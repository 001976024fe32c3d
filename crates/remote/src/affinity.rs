//! The placement of threads on CPUs. An answer from a thread on the same CPU costs a third of one
//! from a thread that must be woken on another CPU.

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// A restriction of a thread, within the CPUs that it is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CpuChoice {
    /// Any CPU that the thread is allowed.
    Anywhere,
    /// Only the CPU of this number.
    On(usize),
    /// Any CPU that it is allowed except this one.
    Off(usize),
}

/// The CPUs that a thread may run on, and its current restriction.
#[derive(Debug)]
pub(crate) struct ThreadAffinity {
    allowed: Option<CpuSet>,
    keeps: CpuChoice,
}

impl ThreadAffinity {
    /// Returns the placement of the calling thread. Only that thread may use it.
    pub fn of_this_thread() -> ThreadAffinity {
        let allowed = sched_getaffinity(None::<Pid>).ok();
        ThreadAffinity { allowed, keeps: CpuChoice::Anywhere }
    }

    /// Restricts the thread from now on, unless that leaves no CPU that is allowed. Costs nothing
    /// if the restriction stays the same.
    pub fn keep(&mut self, keep: CpuChoice) {
        let Some(allowed) = self.allowed.as_ref().filter(|_| keep != self.keeps) else { return };
        let is_allowed = |cpu: usize| cpu < CpuSet::MAX_CPU && allowed.is_set(cpu);
        let mut set = *allowed;
        match keep {
            CpuChoice::Anywhere => {}
            CpuChoice::On(cpu) if is_allowed(cpu) => set = one(cpu),
            CpuChoice::Off(cpu) if is_allowed(cpu) && allowed.count() > 1 => set.unset(cpu),
            CpuChoice::On(_) | CpuChoice::Off(_) => return,
        }
        // If the kernel refuses, the thread runs as before.
        let _ = sched_setaffinity(None::<Pid>, &set);
        self.keeps = keep;
    }
}

fn one(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}
