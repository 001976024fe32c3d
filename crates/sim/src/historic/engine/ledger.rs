//! The ledgers of virtual time.
//!
//! Invariant: CPU time is the sum of all charges. Wall time is the sum of the run's states. Both are
//! complete by construction.

use crate::historic::cx::{CpuRow, CpuTimes, WallRow};
use pagetax_core::budget::{Budget, Ledger, MemoryRow};
use pagetax_core::cause::Account;
use pagetax_core::counter::Reading;

/// Both ledgers of a run that has not ended.
#[derive(Debug, Default)]
pub(super) struct Ledgers {
    cpu: CpuTimes,
    wall: [u64; WallRow::ALL.len()],
    /// The time up to which wall time is accounted for.
    mark: u64,
    /// The time up to which some job task is known to be on a CPU.
    running_until: u64,
    /// The number of job tasks that are ready.
    ready: u64,
    /// The number of job tasks that wait, by row.
    waiting: [u64; WallRow::ALL.len()],
}

impl Ledgers {
    /// Records that a job task is on a CPU from `start_ns`, which is now, for `spent_ns`, the sum of `times`.
    pub fn ran(&mut self, start_ns: u64, spent_ns: u64, times: &CpuTimes) {
        self.running_until = self.running_until.max(start_ns + spent_ns);
        self.cpu.iter_mut().zip(times).for_each(|(sum, ns)| *sum += ns);
    }

    /// Advances to `now`, with all tasks in their current states.
    pub fn advance(&mut self, now: u64) {
        if now <= self.mark {
            return;
        }
        let running_until = self.running_until.clamp(self.mark, now);
        self.wall[WallRow::Running as usize] += running_until - self.mark;
        if running_until < now {
            self.wall[self.state_off_cpu() as usize] += now - running_until;
        }
        self.mark = now;
    }

    /// Returns the state of the run while none of its tasks is on a CPU: the first that any is in.
    fn state_off_cpu(&self) -> WallRow {
        if self.ready > 0 {
            return WallRow::RunQueue;
        }
        let waiting = WallRow::ALL.into_iter().find(|row| self.waiting[*row as usize] > 0);
        waiting.unwrap_or(WallRow::RunQueue)
    }

    pub fn ready(&mut self, more: bool) {
        self.ready = if more { self.ready + 1 } else { self.ready - 1 };
    }

    pub fn waiting(&mut self, row: WallRow, more: bool) {
        let count = &mut self.waiting[row as usize];
        *count = if more { *count + 1 } else { *count - 1 };
    }

    /// Returns the time up to which the wall ledger is complete.
    pub fn wall_ns(&self) -> u64 {
        self.mark
    }

    /// Closes the budget with this memory line.
    pub fn budget(&self, memory: Vec<MemoryRow>) -> Budget {
        let mut cpu = Ledger::new(Account::Cpu, self.cpu.iter().sum());
        for row in CpuRow::ALL {
            cpu.row(row.id(), Reading::Modeled(self.cpu[row as usize]), "charged by the model");
        }
        let mut wall = Ledger::new(Account::Wall, self.mark);
        for row in WallRow::ALL {
            wall.row(row.id(), Reading::Modeled(self.wall[row as usize]), "virtual clock");
        }
        Budget::new(cpu, wall, memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wall_time_is_in_the_first_state_that_any_task_is_in() {
        let mut ledgers = Ledgers::default();
        let mut times = CpuTimes::default();
        times[CpuRow::Compute as usize] = 10;
        ledgers.ran(0, 10, &times);
        ledgers.waiting(WallRow::Sleep, true);
        ledgers.advance(15);
        ledgers.waiting(WallRow::PageIn, true);
        ledgers.advance(18);
        ledgers.ready(true);
        ledgers.advance(20);
        let budget = ledgers.budget(Vec::new());
        let wall: Vec<_> = budget.rows(Account::Wall).iter().map(|row| row.ns.unwrap()).collect();
        assert_eq!(wall, [10, 2, 3, 0, 0, 5]);
        assert_eq!(Account::ALL.map(|account| budget.unexplained_ns(account)), [0, 0]);
        assert_eq!(Account::ALL.map(|account| budget.total_ns(account)), [10, 20]);
    }
}
