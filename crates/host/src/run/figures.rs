//! The resources that a phase and a run used, as readings by counter id.
//!
//! Invariant: times and faults are the workers', from getrusage. Counters of the whole machine (reclaim,
//! compaction, kernel daemons) are the difference of two snapshots.

use super::control::{ClientRow, Control, Figure};
use super::network::{Network, Traffic};
use crate::measure::budget::Totals;
use crate::pages::{Mode, PageSettings};
use crate::procfs::{ProcessMemory, Root, SystemSnapshot, process_huge_bytes, process_memory};
use crate::sys::process::Usage;
use pagetax_core::counter::Reading;
use pagetax_core::plan::{ClientKind, Op, Phase, Plan};

/// Readings by counter id.
pub type Readings = Vec<(&'static str, Reading)>;

/// A snapshot of the machine's counters and of the pagers' traffic.
struct MachineSnapshot {
    system: SystemSnapshot,
    block_read_bytes: Result<u64, String>,
    traffic: Option<Traffic>,
}

impl MachineSnapshot {
    fn read(network: Option<&Network>) -> MachineSnapshot {
        let root = Root::default();
        let io: Result<procfs_core::process::Io, String> = root.parse("/proc/self/io");
        MachineSnapshot {
            system: SystemSnapshot::read(&root),
            block_read_bytes: io.map(|io| io.read_bytes),
            traffic: network.and_then(Network::traffic),
        }
    }

    fn since(&self, before: &MachineSnapshot, wall_ns: u64) -> Readings {
        let mut readings = self.system.since(&before.system, wall_ns);
        let block_read = match (&self.block_read_bytes, &before.block_read_bytes) {
            (Ok(now), Ok(then)) => Reading::Measured(now.saturating_sub(*then)),
            (Err(why), _) | (_, Err(why)) => Reading::Missing(why.clone()),
        };
        readings.push(("block_read_bytes", block_read));
        if let (Some(now), Some(then)) = (&self.traffic, &before.traffic) {
            let own = now.since(then).readings();
            readings.retain(|(id, _)| own.iter().all(|(own, _)| own != id));
            readings.extend(own);
        }
        readings
    }
}

/// The resources that one phase used.
pub struct PhaseFigures {
    before: MachineSnapshot,
    peak_is_reset: bool,
    /// The CPU time, faults and context switches of the phase's clients.
    pub usage: Usage,
    /// All other readings, by counter id.
    pub readings: Readings,
}

impl PhaseFigures {
    /// Takes the snapshot before a phase, and resets the peak of resident memory.
    pub fn begin(network: Option<&Network>) -> PhaseFigures {
        PhaseFigures {
            peak_is_reset: std::fs::write("/proc/self/clear_refs", "5").is_ok(),
            before: MachineSnapshot::read(network),
            usage: Usage::default(),
            readings: Vec::new(),
        }
    }

    /// Takes the snapshot after the phase, and computes its readings.
    pub fn end(
        &mut self,
        control: &Control,
        phase: &Phase,
        network: Option<&Network>,
        usage: Usage,
        wall_ns: u64,
    ) {
        self.readings = MachineSnapshot::read(network).since(&self.before, wall_ns);
        self.usage = usage;
        let sum = |get: fn(ClientRow<'_>) -> u64| control.rows().map(get).sum::<u64>();
        let own = process_memory(&Root::default(), std::process::id());
        let huge = process_huge_bytes(&Root::default(), std::process::id());
        let memory = match phase.client_kind {
            ClientKind::Processes => of_processes(control, phase, &own, &huge),
            ClientKind::Main | ClientKind::Threads => self.of_threads(control, own, huge),
        };
        self.readings.extend(memory);
        self.readings.extend([
            ("access_count", Reading::Measured(sum(|row| row.access_count()))),
            ("run_queue_ns", run_queue(control)),
            ("wall_ns", Reading::Measured(wall_ns)),
        ]);
        self.readings.extend(usage_readings(usage));
    }

    fn of_threads(&self, control: &Control, own: ProcessMemory, huge: Reading) -> Readings {
        let locked = control.rows().filter_map(|row| row.figure(Figure::LockedBytesMax)).max();
        let resident = if self.peak_is_reset {
            own.resident_bytes_max
        } else {
            Reading::Missing("/proc/self/clear_refs cannot be written, so the peak is older".into())
        };
        vec![
            ("resident_bytes_max", resident),
            ("page_table_bytes_max", own.page_table_bytes),
            ("huge_page_bytes_max", huge),
            ("locked_bytes_max", Reading::Measured(locked.unwrap_or(0))),
        ]
    }

    /// Returns true if any region may get huge pages. Reading their size is slow: the kernel walks the
    /// page tables.
    pub fn may_be_huge(plan: &Plan) -> bool {
        PageSettings::host().thp() == Some(Mode::Always) || plan.asks_for_huge_pages()
    }
}

fn run_queue(control: &Control) -> Reading {
    let waits: Option<Vec<u64>> =
        control.rows().map(|row| row.figure(Figure::RunQueueNs)).collect();
    match waits {
        Some(waits) => Reading::Measured(waits.iter().sum()),
        None => Reading::Missing("/proc/self/task/TID/schedstat cannot be read".into()),
    }
}

/// Combines the figures that several processes read about themselves. Shared pages are in the figure of
/// each process. So the true value is between the largest figure and the sum.
fn of_processes(control: &Control, phase: &Phase, own: &ProcessMemory, huge: &Reading) -> Readings {
    let between = |figure: Figure, parent: &Reading, shared: bool| {
        let clients: Option<Vec<u64>> = control.rows().map(|row| row.figure(figure)).collect();
        match (clients, parent.value()) {
            (Some(clients), Some(parent)) => {
                let high = clients.iter().sum::<u64>().saturating_add(parent);
                let low = clients.iter().copied().max().unwrap_or(0).max(parent);
                Reading::Derived { value: if shared { low } else { high }, low, high }
            }
            _ => Reading::Missing("not every client read it before its end".into()),
        }
    };
    let writes = phase.ops.iter().any(|op| matches!(op, Op::Touch(t) if t.access.writes()));
    let nothing = Reading::Measured(0);
    vec![
        ("resident_bytes_max", between(Figure::ResidentBytesMax, &own.resident_bytes, !writes)),
        ("page_table_bytes_max", between(Figure::PageTableBytes, &own.page_table_bytes, false)),
        (
            "huge_page_bytes_max",
            match control.rows().any(|row| row.figure(Figure::HugeBytes).is_some()) {
                true => between(Figure::HugeBytes, huge, !writes),
                false => huge.clone(),
            },
        ),
        ("locked_bytes_max", between(Figure::LockedBytesMax, &nothing, false)),
    ]
}

fn usage_readings(usage: Usage) -> Readings {
    vec![
        ("user_ns", Reading::Measured(usage.user_ns)),
        ("kernel_ns", Reading::Measured(usage.kernel_ns)),
        ("minor_fault_count", Reading::Measured(usage.minor_fault_count)),
        ("major_fault_count", Reading::Measured(usage.major_fault_count)),
        ("context_switch_count", Reading::Measured(usage.context_switch_count)),
    ]
}

/// The resources that a whole run used: set-up, phases and unmapping.
pub struct RunFigures {
    before: MachineSnapshot,
    /// The CPU time, faults and context switches.
    pub usage: Usage,
    /// All counters, once the run has ended.
    pub readings: Readings,
    /// The time from the end of the set-up to the end of the run.
    pub wall_ns: u64,
}

/// The counters whose value for the run is the sum over its phases.
const SUMMED: [&str; 2] = ["access_count", "run_queue_ns"];
/// The counters whose value for the run is the largest of any phase.
const PEAKS: [&str; 4] =
    ["huge_page_bytes_max", "locked_bytes_max", "page_table_bytes_max", "resident_bytes_max"];

impl RunFigures {
    /// Takes the snapshot before the set-up.
    pub fn begin(network: Option<&Network>) -> RunFigures {
        RunFigures {
            before: MachineSnapshot::read(network),
            usage: Usage::default(),
            readings: Vec::new(),
            wall_ns: 0,
        }
    }

    /// Adds CPU time and faults from outside the phases.
    pub fn add_usage(&mut self, usage: Usage) {
        self.usage = self.usage.plus(usage);
    }

    /// Adds a phase's usage, sums and peaks.
    pub fn add_phase(&mut self, phase: &PhaseFigures) {
        self.add_usage(phase.usage);
        for (id, reading) in &phase.readings {
            let combine = if SUMMED.contains(id) {
                sum
            } else if PEAKS.contains(id) {
                larger
            } else {
                continue;
            };
            match self.readings.iter_mut().find(|(known, _)| known == id) {
                Some((_, so_far)) => *so_far = combine(so_far, reading),
                None => self.readings.push((id, reading.clone())),
            }
        }
    }

    /// Takes the snapshot after the run, and computes its readings.
    pub fn end(&mut self, plan: &Plan, network: Option<&Network>, wall_ns: u64, mismatch: bool) {
        self.wall_ns = wall_ns;
        self.readings.extend(MachineSnapshot::read(network).since(&self.before, wall_ns));
        self.readings.extend(usage_readings(self.usage));
        self.readings.push(("wall_ns", Reading::Measured(wall_ns)));
        if plan.has_verification() {
            self.readings.push(("mismatch_count", Reading::Measured(mismatch.into())));
        }
    }
}

impl RunFigures {
    /// Returns a reading by counter id; missing if no phase has ended.
    pub fn reading(&self, id: &str) -> Reading {
        let found = self.readings.iter().find(|(known, _)| *known == id);
        let none = || Reading::Missing("no phase of the job has ended".into());
        found.map_or_else(none, |(_, reading)| reading.clone())
    }

    /// Returns the totals that the budget divides into rows.
    pub fn totals(&self) -> Totals {
        Totals {
            wall_ns: self.wall_ns,
            user_ns: self.usage.user_ns,
            kernel_ns: self.usage.kernel_ns,
            minor_fault_count: self.usage.minor_fault_count,
            major_fault_count: self.usage.major_fault_count,
            resident_bytes_max: self.reading("resident_bytes_max"),
            huge_page_bytes_max: self.reading("huge_page_bytes_max"),
            page_table_bytes_max: self.reading("page_table_bytes_max"),
            paging: None,
        }
    }
}

fn sum(a: &Reading, b: &Reading) -> Reading {
    match (a, b) {
        (Reading::Missing(_), _) => a.clone(),
        (_, Reading::Missing(_)) => b.clone(),
        _ => Reading::Measured(a.value().unwrap_or(0) + b.value().unwrap_or(0)),
    }
}

fn larger(a: &Reading, b: &Reading) -> Reading {
    if b.value() > a.value() { b.clone() } else { a.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_part_makes_the_sum_missing_but_not_the_peak() {
        let (five, none) = (Reading::Measured(5), Reading::Missing("gone".into()));
        assert_eq!(sum(&five, &none), none);
        assert_eq!(sum(&five, &five), Reading::Measured(10));
        assert_eq!(larger(&none, &five), five);
        assert_eq!(larger(&five, &none), five);
    }
}
