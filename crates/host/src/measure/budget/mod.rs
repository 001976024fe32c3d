//! The budget of a real run: where its CPU time and its elapsed time went.
//!
//! [`Watch`] collects data while the job runs. [`budget`] is a pure function: it turns these data and
//! the job's exact totals into two ledgers. It serves plans in this process and commands that run as
//! children alike.
//!
//! Invariants: the totals are the kernel's own accounts, and rows only divide them. A row without a
//! source is missing, and its time is in the unexplained row.

mod cpu;
mod translation;
mod wall;

pub(in crate::measure) use cpu::{FEW_SAMPLES, FaultCosts, share_bounds};
pub use translation::Translation;

use crate::measure::stacks::{Begin, Profile, Profiler, Symbols, TaskState};
use crate::measure::tlb_events::{CountTarget, Counters, Family, has_unit};
use crate::procfs::{Root, SystemSnapshot};
use pagetax_core::budget::{Budget, Ledger, MemoryRow};
use pagetax_core::calibration::Calibration;
use pagetax_core::cause::Account;
use pagetax_core::counter::Reading;
use std::time::Instant;

/// The resources that a job used with all its threads and children, by the kernel's accounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Totals {
    /// The elapsed time, in nanoseconds.
    pub wall_ns: u64,
    /// The CPU time in user mode.
    pub user_ns: u64,
    /// The CPU time in the kernel.
    pub kernel_ns: u64,
    /// The faults served without I/O.
    pub minor_fault_count: u64,
    /// The faults that waited for I/O.
    pub major_fault_count: u64,
    /// The peak of resident bytes.
    pub resident_bytes_max: Reading,
    /// The peak of bytes on huge pages.
    pub huge_page_bytes_max: Reading,
    /// The peak of bytes of page tables.
    pub page_table_bytes_max: Reading,
    /// The figures of network memory; `None` if the job has none.
    pub paging: Option<Paging>,
}

/// The time that network memory took, by its pagers' own clocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paging {
    /// The time from a fault's report to its page, of all demand page-ins.
    pub page_in_ns_total: u64,
    /// The number of demand page-ins.
    pub demand_page_in_count: u64,
    /// True if faults of several clients may overlap, so that `page_in_ns_total` exceeds elapsed time.
    pub overlaps: bool,
    /// The CPU time of the pagers' threads, which do not belong to the job; `None` if it cannot be read.
    pub cpu_ns: Option<u64>,
}

/// The collector of a budget's data while a job runs.
#[derive(Debug)]
pub struct Watch {
    system: SystemSnapshot,
    since: Instant,
    profiler: Result<Profiler, String>,
    walks: Result<(Family, Counters), String>,
}

/// Opens this CPU's counters of page walks for a task. Errors show why there are none.
fn walk_counters(tid: u32, begin: Begin) -> Result<(Family, Counters), String> {
    let cpuinfo = Root::default().text("/proc/cpuinfo")?;
    let family = Family::of_cpu(&cpuinfo, has_unit()).map_err(|error| error.to_string())?;
    if !family.has_cycles() {
        return Err(format!("{} counts walks, not their time", family.name));
    }
    let target = match begin {
        Begin::Now => CountTarget::Processes(vec![tid]),
        Begin::AtExec => CountTarget::NextCommand,
    };
    let counters = Counters::open(&family, &target).map_err(|error| error.to_string())?;
    Ok((family, counters))
}

/// Returns true if hardware counters show translation, so that a budget needs no calibration for it.
pub fn counts_walks() -> bool {
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    walk_counters(thread, Begin::Now).is_ok()
}

impl Watch {
    /// Takes the first snapshot and reads the kernel's symbols, so that nothing slow remains when the
    /// job starts.
    pub fn new() -> Watch {
        // The profiler asks for the symbols again, and then reports the error.
        let _ = Symbols::of_this_kernel();
        Watch {
            system: SystemSnapshot::read(&Root::default()),
            since: Instant::now(),
            profiler: Err("the job was never attached to".into()),
            walks: Err("the job was never attached to".into()),
        }
    }

    /// Follows a thread by its id (a process by its pid) and all threads and children that it makes from
    /// now on. Data that the machine does not allow are missing from the budget.
    pub fn attach(&mut self, tid: u32, begin: Begin) {
        self.profiler = Profiler::start(tid, begin);
        self.walks = walk_counters(tid, begin);
    }

    /// Stops collecting, and returns the data.
    pub fn finish(self) -> Watched {
        let profile = match self.profiler {
            Ok(profiler) => profiler.finish(),
            Err(why) => Profile::missing(&why),
        };
        let wall_ns = self.since.elapsed().as_nanos() as u64;
        let now = SystemSnapshot::read(&Root::default());
        let mut counters = now.since(&self.system, wall_ns);
        counters.push((
            "run_queue_ns",
            match &profile.line {
                Ok(line) => Reading::Measured(line.ns(TaskState::Runnable)),
                Err(why) => Reading::Missing(why.clone()),
            },
        ));
        let walks = self.walks;
        let counted =
            walks.and_then(|(family, counters)| Translation::of_counts(&family, &counters.read()));
        Watched { profile, counters, counted }
    }
}

impl Default for Watch {
    fn default() -> Self {
        Watch::new()
    }
}

/// The data that a [`Watch`] collected.
#[derive(Debug, Clone)]
pub struct Watched {
    /// The stacks and switches of the job's tasks.
    pub profile: Profile,
    /// The counters of the whole machine while the job ran, by id, and the job's run-queue time.
    pub counters: Vec<(&'static str, Reading)>,
    /// The translation share from hardware counters; an error shows why there is none.
    pub counted: Result<Translation, String>,
}

/// Divides the totals into the rows of a CPU ledger and a wall ledger.
pub fn budget(
    totals: &Totals,
    profile: &Profile,
    translation: &Translation,
    calibration: Option<&Calibration>,
) -> Budget {
    let mut cpu = Ledger::new(Account::Cpu, totals.user_ns + totals.kernel_ns);
    cpu::user_rows(&mut cpu, totals, translation, calibration);
    cpu::kernel_rows(&mut cpu, totals, profile, calibration);
    let mut wall = Ledger::new(Account::Wall, totals.wall_ns);
    wall::rows(&mut wall, totals, profile, calibration);
    if let Some(paging) = &totals.paging {
        let count = paging.demand_page_in_count;
        let how = format!("{count} page-ins, from report to page, by the pager's clock");
        wall.split_remote_page_in(paging.page_in_ns_total, paging.overlaps, &how);
        if let Some(ns) = paging.cpu_ns {
            cpu.add_remote_paging(ns, "the pager's threads, by schedstat");
        }
    }
    let peaks = [
        ("resident", &totals.resident_bytes_max),
        ("huge", &totals.huge_page_bytes_max),
        ("page_tables", &totals.page_table_bytes_max),
    ];
    let memory = peaks.map(|(id, peak)| MemoryRow::new(id, peak.clone(), "most at once"));
    Budget::new(cpu, wall, memory.into())
}

/// Returns a derived reading. Its value and its bounds are between 0 and `most`.
pub(in crate::measure) fn derived(value: f64, low: f64, high: f64, most: u64) -> Reading {
    let ns = |ns: f64| (ns.max(0.0).round() as u64).min(most);
    Reading::Derived { value: ns(value), low: ns(low.min(value)), high: ns(high.max(value)) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::measure::stacks::{StackCounts, Timeline, Wait};
    use pagetax_core::calibration::*;
    use pagetax_core::plan::{AccessClass, AccessKind};
    use proptest::prelude::*;

    pub(super) fn totals() -> Totals {
        Totals {
            wall_ns: 1_000_000_000,
            user_ns: 600_000_000,
            kernel_ns: 300_000_000,
            minor_fault_count: 100_000,
            major_fault_count: 10,
            resident_bytes_max: Reading::Measured(400 << 20),
            huge_page_bytes_max: Reading::Measured(0),
            page_table_bytes_max: Reading::Missing("gone before it was read".into()),
            paging: None,
        }
    }

    pub(crate) fn calibration() -> Calibration {
        let spread = |median_ns: f64| Spread {
            median_ns,
            low_ns: median_ns * 0.875,
            high_ns: median_ns * 1.125,
            repetitions: 5,
        };
        let fault = |kind, page_bytes, ns| FaultCost {
            kind,
            page_bytes,
            cost: Some(spread(ns)),
            why: None,
        };
        let walk = |pattern, working_set_bytes, base, huge| WalkCost {
            pattern,
            working_set_bytes,
            base: spread(base),
            huge: spread(huge),
            extra: spread(base - huge),
        };
        Calibration {
            version: CALIBRATION_VERSION,
            identity: Identity {
                cpu_model: "Xeon".into(),
                cpu_count: 2,
                kernel: "6.18".into(),
                memory_bytes: 24 << 30,
                hypervisor: "kvm".into(),
                page_table_isolation: false,
            },
            quick: true,
            taken_unix_s: 0,
            took_ns: 0,
            base_page_bytes: 4096,
            huge_page_bytes: 2 << 20,
            faults: vec![
                fault(FaultKind::ZeroRead, 4096, 650.0),
                fault(FaultKind::AnonWrite, 4096, 1_500.0),
                fault(FaultKind::AnonWrite, 2 << 20, 243_000.0),
                fault(FaultKind::CowWrite, 4096, 2_500.0),
                fault(FaultKind::FileCachedRead, 4096, 230.0),
                fault(FaultKind::FileMajorRead, 4096, 20_000.0),
            ],
            walks: vec![
                walk(WalkPattern::Dependent, 64 << 20, 32.0, 8.0),
                walk(WalkPattern::Independent, 64 << 20, 16.0, 14.0),
            ],
            tlbs: vec![],
            base_reach: None,
            notes: vec![],
            warnings: vec![],
        }
    }

    pub(super) fn profile() -> Profile {
        let mut line = Timeline::default();
        line.enter(0, 1, TaskState::Running);
        line.enter(900_000_000, 1, TaskState::Waiting(Wait::PageIn));
        line.enter(990_000_000, 1, TaskState::Runnable);
        Profile {
            stacks: Ok(StackCounts {
                user_count: 600,
                work_counts: [120, 100, 20, 0, 0, 57],
                unknown_count: 3,
            }),
            line: Ok(line.finish(1_000_000_000).unwrap()),
            waits: Ok(()),
            lost_count: 0,
        }
    }

    #[test]
    fn stacks_and_switches_explain_nearly_all() {
        let b = budget(&totals(), &profile(), &Translation::WorkingSet(64 << 20), None);
        assert_eq!(b.unexplained_ns(Account::Cpu), 3_000_000);
        assert_eq!(b.row("minor_fault").unwrap().ns, Some(120_000_000));
        assert_eq!(b.row("translation").unwrap().ns, None);
        assert_eq!(b.unexplained_ns(Account::Wall), 0);
        let page_in = b.row("page_in").unwrap();
        assert_eq!(page_in.ns, Some(90_000_000));
        assert_eq!(b.memory()[2].bytes, None);
    }

    fn any_totals() -> impl Strategy<Value = Totals> {
        let time = || 0u64..1 << 45;
        (time(), time(), time(), 0u64..1 << 33, 0u64..1 << 20, 0u64..1 << 40).prop_map(
            |(wall_ns, user_ns, kernel_ns, minor_fault_count, major_fault_count, huge)| Totals {
                wall_ns,
                user_ns,
                kernel_ns,
                minor_fault_count,
                major_fault_count,
                huge_page_bytes_max: Reading::Measured(huge),
                ..totals()
            },
        )
    }

    fn any_profile() -> impl Strategy<Value = Profile> {
        let counts = (0u64..9999, proptest::array::uniform6(0u64..999), 0u64..99).prop_map(
            |(user_count, work_counts, unknown_count)| StackCounts {
                user_count,
                work_counts,
                unknown_count,
            },
        );
        let why = || "not allowed".to_string();
        (proptest::option::of(counts), any::<bool>(), any::<bool>()).prop_map(
            move |(stacks, line, waits)| Profile {
                stacks: stacks.ok_or_else(why),
                line: if line { profile().line } else { Err(why()) },
                waits: if waits { Ok(()) } else { Err(why()) },
                lost_count: 0,
            },
        )
    }

    fn any_translation() -> impl Strategy<Value = Translation> {
        prop_oneof![
            (0.0f64..0.3, 0.0f64..0.4, 0.0f64..0.9).prop_map(|(a, b, c)| Translation::Trial {
                share_low: a,
                share: a + b * 0.5,
                share_high: a + b * 0.5 + c
            }),
            (0u64..1 << 40).prop_map(Translation::WorkingSet),
            (0u64..1 << 40, 0u64..1 << 36).prop_map(|(count, working_set_bytes)| {
                let kind = AccessKind::Dependent;
                Translation::Accesses(vec![AccessClass { kind, working_set_bytes, count }])
            }),
            Just(Translation::Unknown("nothing is known".into())),
        ]
    }

    proptest! {
        #[test]
        fn parts_and_unexplained_are_the_total(
            totals in any_totals(),
            profile in any_profile(),
            translation in any_translation(),
            calibrated in any::<bool>(),
        ) {
            let calibration = calibrated.then(calibration);
            let b = budget(&totals, &profile, &translation, calibration.as_ref());
            let totals_ns = [totals.user_ns + totals.kernel_ns, totals.wall_ns];
            for (account, total_ns) in Account::ALL.into_iter().zip(totals_ns) {
                let rows = b.rows(account);
                let parts: i64 = rows.iter().filter_map(|row| row.ns).map(|ns| ns as i64).sum();
                prop_assert_eq!(parts + b.unexplained_ns(account), total_ns as i64);
                let causes = account.causes_of_jobs();
                let ids: Vec<_> = rows.iter().map(|row| row.id.as_str()).collect();
                prop_assert_eq!(ids, causes.map(|cause| cause.id).collect::<Vec<_>>());
            }
            // Only rounding may make the CPU rows exceed their total: half a nanosecond each.
            prop_assert!(b.unexplained_ns(Account::Cpu) >= -4, "{:?}", b);
            for row in Account::ALL.into_iter().flat_map(|account| b.rows(account)) {
                if let (Some(low), Some(ns), Some(high)) = (row.low_ns, row.ns, row.high_ns) {
                    prop_assert!(low <= ns && ns <= high, "{:?}", row);
                }
            }
        }
    }
}
