//! The causes of time: one table that budgets, thresholds and renderers share.
//!
//! Invariant: no cause stands in two accounts, and docs/report.md lists each one.

use crate::counter::Unit;

/// The two accounts of time, which are never mixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Account {
    /// Time on processors: user and kernel time of the whole job.
    Cpu,
    /// Elapsed time of the job's main line, on a CPU or waiting.
    Wall,
}

impl Account {
    /// Both accounts, in the order of printing.
    pub const ALL: [Account; 2] = [Account::Cpu, Account::Wall];

    /// Returns its name in ids, such as the `cpu` of `cpu_swap_ns`.
    pub fn id(self) -> &'static str {
        match self {
            Account::Cpu => "cpu",
            Account::Wall => "wall",
        }
    }

    /// Returns its causes, in the order of printing.
    pub fn causes(self) -> impl Iterator<Item = &'static Cause> + Clone {
        CAUSES.iter().filter(move |cause| cause.account == self)
    }

    /// Returns those causes of the account that the budget of every job has, in the order of the table.
    pub fn causes_of_jobs(self) -> impl Iterator<Item = &'static Cause> {
        self.causes().filter(|cause| cause.scope == Scope::Every)
    }
}

/// The budgets that have a cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// All budgets.
    Every,
    /// Those of jobs on network memory.
    Network,
    /// Those of a whole system, whose daemons and page tables have rows of their own.
    System,
}

/// A cause of time: a row of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    /// The id of its rows in reports.
    pub id: &'static str,
    /// The account that its time belongs to.
    pub account: Account,
    /// True for time that virtual memory costs. The job's own work, other kernel work and waits that have
    /// nothing to do with memory are not part of the tax.
    pub is_tax: bool,
    /// The budgets that have the row.
    pub scope: Scope,
    /// The unit: nanoseconds, bytes or a count.
    pub unit: Unit,
    /// The meaning, in a few words.
    pub meaning: &'static str,
}

const fn cause(account: Account, is_tax: bool, id: &'static str, meaning: &'static str) -> Cause {
    Cause { id, account, is_tax, scope: Scope::Every, unit: Unit::Ns, meaning }
}

const fn on_cpu(is_tax: bool, id: &'static str, meaning: &'static str) -> Cause {
    cause(Account::Cpu, is_tax, id, meaning)
}

const fn of_system(id: &'static str, meaning: &'static str) -> Cause {
    Cause { scope: Scope::System, ..on_cpu(true, id, meaning) }
}

const fn elapsed(is_tax: bool, id: &'static str, meaning: &'static str) -> Cause {
    cause(Account::Wall, is_tax, id, meaning)
}

/// All causes, those of CPU time first, in the order of printing.
pub const CAUSES: &[Cause] = &[
    on_cpu(false, "compute", "user time that is not translation"),
    on_cpu(true, "translation", "page walks and TLB refills"),
    on_cpu(true, "minor_fault", "faults served from memory, without zeroing and copying"),
    on_cpu(true, "zero_copy", "zeroing new pages and copying shared ones"),
    on_cpu(true, "reclaim", "scanning and freeing pages, on the job's own CPU time"),
    on_cpu(true, "compaction", "moving pages to make huge ones"),
    on_cpu(true, "swap", "compressing, writing and reading swapped or remote pages"),
    of_system("page_table", "making, copying and tearing down page tables"),
    of_system("shootdown", "taking translations out of the TLBs of other CPUs"),
    of_system("background_reclaim", "kswapd, with what it swaps"),
    of_system("background_compaction", "kcompactd"),
    of_system("khugepaged", "khugepaged, which collapses pages to huge ones"),
    on_cpu(false, "other_kernel", "the rest of the kernel's work for the job"),
    elapsed(false, "running", "on a CPU"),
    elapsed(false, "run_queue", "runnable, but another task had the CPU"),
    elapsed(true, "page_in", "blocked on pages from files or servers"),
    elapsed(true, "swap_in", "blocked on pages from swap"),
    elapsed(true, "throttle", "blocked in reclaim"),
    elapsed(false, "sleep", "asleep by its own wish"),
    Cause {
        scope: Scope::Network,
        ..elapsed(true, "remote_page_in", "blocked on pages from a page store")
    },
];

/// Returns the cause of that id.
pub fn find(id: &str) -> Option<&'static Cause> {
    CAUSES.iter().find(|cause| cause.id == id)
}

/// Returns true if the cause of that id is a part of the tax.
pub fn is_tax(id: &str) -> bool {
    find(id).is_some_and(|cause| cause.is_tax)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_tax_is_what_memory_costs() {
        let ids = |account: Account, is_tax| {
            let causes = account.causes().filter(move |cause| cause.is_tax == is_tax);
            causes.map(|cause| cause.id).collect::<Vec<_>>()
        };
        assert_eq!(ids(Account::Cpu, false), ["compute", "other_kernel"]);
        assert_eq!(ids(Account::Wall, false), ["running", "run_queue", "sleep"]);
        assert_eq!(ids(Account::Cpu, true).len() + ids(Account::Wall, true).len(), 15);
        let distinct: BTreeSet<_> = CAUSES.iter().map(|cause| cause.id).collect();
        assert_eq!(distinct.len(), CAUSES.len());
    }

    #[test]
    fn the_documentation_lists_each_cause_in_its_account() {
        let text = include_str!("../../../docs/report.md");
        for (account, heading) in [(Account::Cpu, "| CPU row |"), (Account::Wall, "| Wall row |")] {
            let table = text.split(heading).nth(1).expect(heading);
            let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
            let listed: BTreeSet<_> = rows.filter_map(|row| row.split('`').nth(1)).collect();
            assert_eq!(listed, account.causes().map(|cause| cause.id).collect(), "{heading}");
        }
    }
}
