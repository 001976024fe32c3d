//! Where threads run: one that answers another on the same CPU costs a third of one that has to be
//! woken on another.

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// Where a thread keeps to, within what it is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// All CPUs that it is allowed.
    Anywhere,
    /// This CPU.
    On(usize),
    /// All but this CPU.
    Off(usize),
}

/// The CPUs that a thread may run on, and where it keeps to for now.
#[derive(Debug)]
pub(crate) struct Placement {
    allowed: Option<CpuSet>,
    keeps: Keep,
}

impl Placement {
    /// Of the calling thread, which alone may use it.
    pub fn of_this_thread() -> Placement {
        let allowed = sched_getaffinity(None::<Pid>).ok();
        Placement { allowed, keeps: Keep::Anywhere }
    }

    /// Keeps there from now on, unless that leaves no CPU that is allowed. Costs nothing where it keeps
    /// there already.
    pub fn keep(&mut self, keep: Keep) {
        let Some(allowed) = self.allowed.as_ref().filter(|_| keep != self.keeps) else { return };
        let is_allowed = |cpu: usize| cpu < CpuSet::MAX_CPU && allowed.is_set(cpu);
        let mut set = *allowed;
        match keep {
            Keep::Anywhere => {}
            Keep::On(cpu) if is_allowed(cpu) => set = one(cpu),
            Keep::Off(cpu) if is_allowed(cpu) && allowed.count() > 1 => set.unset(cpu),
            Keep::On(_) | Keep::Off(_) => return,
        }
        // Where it is refused, the thread runs as before.
        let _ = sched_setaffinity(None::<Pid>, &set);
        self.keeps = keep;
    }
}

fn one(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}
