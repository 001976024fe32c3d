//! Page walks as CPUs count them: the events of families.toml, and the rows of trapstat made from their
//! counts.
//!
//! Invariants: if more events than counters are requested, the kernel multiplexes. Such a count is
//! scaled by time, and the listing shows it. An event that never ran is unknown, not 0. No CPU counts the
//! time of walks by page size. That time is allocated to sizes by their walks, and the listing shows it.

mod family;
pub mod ibs;
mod open;

pub use family::{Code, Family, FamilyError, cpu_identity};
pub use open::{CountError, CountTarget, Counters, has_unit, since};

use crate::sys::perf::Scaled;
use pagetax_core::counter::Provenance;
use pagetax_core::trapstat::{Cell, Cells, Listing, Mode, TrapstatRow};
use pagetax_core::units::PageSize;

/// The TLB side that an event counts, or neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Walks for loads and stores to pages of this size; `None` means all sizes.
    Data(Option<PageSize>),
    /// Walks for instruction fetches to pages of this size; `None` means all sizes.
    Instruction(Option<PageSize>),
    /// Cycles with an active walk for a load or store.
    DataCycles,
    /// Cycles with an active walk for an instruction fetch.
    InstructionCycles,
    /// All cycles, whether a walk is active or not.
    Cycles,
}

/// An event to count, and its role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    /// The role of the event's count.
    pub role: Role,
    /// The code for PERF_TYPE_RAW; `None` means the kernel's generic cycles event.
    pub code: Option<Code>,
}

/// The counts of a CPU or a task in one mode, one for each of [`Family::events`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    /// The CPU's number; 0 for a task.
    pub cpu: u32,
    /// The mode that was counted.
    pub mode: Mode,
    /// The counts in the order of the events; `None` if the event could not be opened or read.
    pub values: Vec<Option<Scaled>>,
}

impl Scaled {
    /// Returns the count scaled to the time for which the event was enabled; `None` if it never ran.
    pub fn estimate(&self) -> Option<f64> {
        let ratio = self.enabled_ns as f64 / self.running_ns as f64;
        (self.running_ns > 0).then_some(self.value as f64 * ratio)
    }
}

/// Returns the listing of an interval.
pub fn listing(family: &Family, counts: &[Counts], end_ns: u64, elapsed_ns: u64) -> Listing {
    let events = family.events();
    let sizes = family.page_sizes();
    let mut rows = Vec::new();
    for counted in counts {
        let other = counts.iter().filter(|c| c.cpu == counted.cpu);
        let cycles: Option<f64> = other.map(|c| sum(&events, c, |r| r == Role::Cycles)).sum();
        for size in &sizes {
            let cells = Cells {
                itlb: cell(&events, counted, Side::INSTRUCTION, *size, cycles, elapsed_ns),
                dtlb: cell(&events, counted, Side::DATA, *size, cycles, elapsed_ns),
                ..Cells::default()
            };
            let page_bytes = size.map(PageSize::bytes);
            rows.push(TrapstatRow { cpu: counted.cpu, mode: counted.mode, page_bytes, cells });
        }
    }
    Listing {
        title: format!("counters of {}", family.name),
        provenance: Provenance::Measured,
        end_ns,
        elapsed_ns,
        rows,
        notes: notes(family, counts),
    }
}

/// Returns the share of user cycles during which a walk was active, 0 to 1; `None` if a count is
/// unknown.
pub fn walk_share(family: &Family, counts: &[Counts]) -> Option<f64> {
    let events = family.events();
    let user = || counts.iter().filter(|counts| counts.mode == Mode::User);
    let total = |wanted: fn(Role) -> bool| -> Option<f64> {
        user().map(|counts| sum(&events, counts, wanted)).sum()
    };
    let walks = total(|role| matches!(role, Role::DataCycles | Role::InstructionCycles))?;
    let cycles = total(|role| role == Role::Cycles)?;
    (cycles > 0.0).then(|| (walks / cycles).min(1.0))
}

/// The roles of one side of the TLBs.
struct Side {
    walks: fn(Option<PageSize>) -> Role,
    cycles: Role,
}

impl Side {
    const DATA: Side = Side { walks: Role::Data, cycles: Role::DataCycles };
    const INSTRUCTION: Side = Side { walks: Role::Instruction, cycles: Role::InstructionCycles };

    fn has(&self, role: Role) -> bool {
        matches!(
            (role, self.cycles),
            (Role::Data(_), Role::DataCycles) | (Role::Instruction(_), Role::InstructionCycles)
        )
    }
}

/// Returns the sum of the estimates of all events with such a role. It is `None` if there is no such
/// event, or one is unknown.
fn sum(events: &[Counted], counts: &Counts, wanted: impl Fn(Role) -> bool) -> Option<f64> {
    let mut found = events.iter().zip(&counts.values).filter(|(e, _)| wanted(e.role)).peekable();
    found.peek()?;
    found.map(|(_, value)| value.as_ref().and_then(Scaled::estimate)).sum()
}

fn cell(
    events: &[Counted],
    counts: &Counts,
    side: Side,
    size: Option<PageSize>,
    cycles: Option<f64>,
    elapsed_ns: u64,
) -> Cell {
    let Some(walks) = sum(events, counts, |role| role == (side.walks)(size)) else {
        return Cell::default();
    };
    let all = sum(events, counts, |role| side.has(role));
    let walk_cycles = sum(events, counts, |role| role == side.cycles);
    let percent = match (walk_cycles, all, cycles) {
        (Some(walk_cycles), Some(all), Some(cycles)) if cycles > 0.0 => {
            // Without walks, there is nothing to allocate.
            let part = if all > 0.0 { walks / all } else { 0.0 };
            Some(walk_cycles * part / cycles * 100.0)
        }
        _ => None,
    };
    Cell { per_s: Some(walks / (elapsed_ns.max(1) as f64 / 1e9)), percent }
}

fn notes(family: &Family, counts: &[Counts]) -> Vec<String> {
    let mut notes = vec!["itsb, dtsb n/a: a page walker has no translation storage buffer".into()];
    if family.has_cycles() {
        notes.push(
            "%tim: cycles with a walk under way, allocated to page sizes by completed walks".into(),
        );
    } else {
        notes.push("%tim n/a: this CPU has no event for the cycles of walks".into());
    }
    notes.extend(family.note.clone());
    let values = counts.iter().flat_map(|counts| counts.values.iter().flatten());
    let share = |v: &Scaled| v.running_ns as f64 / v.enabled_ns.max(1) as f64;
    let shares = values.filter(|v| v.enabled_ns > 0).map(share);
    let least = shares.fold(1.0, f64::min);
    if least < 0.999 {
        notes.push(format!(
            "counters were shared: counts are scaled up, the least from {:.0} % of the time",
            least * 100.0
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses the output of `perf stat -x, -A`: CPU, count, unit, event, running time, share of the
    /// time.
    fn parse(family: &Family, text: &str) -> Vec<Counts> {
        let events = family.events();
        let mut all: Vec<Counts> = Vec::new();
        for line in text.lines().filter(|line| line.starts_with("CPU")) {
            let words: Vec<&str> = line.split(',').collect();
            let cpu = words[0][3..].parse().unwrap();
            let (name, mode) = words[3].split_once(':').unwrap();
            let mode = if mode == "u" { Mode::User } else { Mode::Kernel };
            let code = name.strip_prefix('r').map(|hex| u64::from_str_radix(hex, 16).unwrap());
            let nth = events.iter().position(|e| e.code.map(|c| c.0) == code);
            let nth = nth.unwrap_or_else(|| panic!("{}: {line}", family.name));
            let value = words[1].parse().ok().map(|value| {
                let running_ns: u64 = words[4].parse().unwrap();
                let share: f64 = words[5].parse().unwrap();
                Scaled { value, running_ns, enabled_ns: (running_ns as f64 / share * 100.0) as u64 }
            });
            let at = all.iter().position(|c| (c.cpu, c.mode) == (cpu, mode)).unwrap_or_else(|| {
                all.push(Counts { cpu, mode, values: vec![None; events.len()] });
                all.len() - 1
            });
            all[at].values[nth] = value;
        }
        all
    }

    fn listed(data: &str, cpuinfo: &str) -> Listing {
        let family = Family::find(&cpu_identity(cpuinfo)).unwrap();
        listing(&family, &parse(&family, data), 1_000_000_000, 1_000_000_000)
    }

    const INTEL: &str = "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\n";
    const AMD: &str = "vendor_id : AuthenticAMD\ncpu family : 25\nmodel : 1\n";
    const ARM: &str = "CPU implementer : 0x41\nCPU part : 0xd0c\n";

    #[test]
    fn intel_walks_by_size_with_their_cycles_allocated() {
        let listing = listed(include_str!("../../../tests/data/tlb-events/intel.csv"), INTEL);
        let row = |mode, bytes| {
            let found = listing.rows.iter().find(|r| (r.mode, r.page_bytes) == (mode, Some(bytes)));
            found.unwrap().cells
        };
        let user = row(Mode::User, 4096);
        // Loads and stores, the stores scaled from half of the time: 3,000,000 + 2 × 500,000.
        assert_eq!(user.dtlb.per_s, Some(4_000_000.0));
        // 800M of 2000M + 500M cycles, four fifths of the walks.
        assert!((user.dtlb.percent.unwrap() - 800.0 / 2500.0 * 0.8 * 100.0).abs() < 0.01);
        assert_eq!(row(Mode::User, 2 << 20).dtlb.per_s, Some(1_000_000.0));
        assert_eq!(row(Mode::User, 1 << 30).itlb, Cell::default(), "no such event");
        assert_eq!(user.itsb, Cell::default());
        assert_eq!(row(Mode::Kernel, 4096).dtlb, Cell::default(), "never ran: unknown, not 0");
        assert!(
            listing.notes.iter().any(|n| n.contains("from 50 % of the time")),
            "{:?}",
            listing.notes
        );
    }

    #[test]
    fn amd_counts_walks_and_knows_no_time() {
        let listing = listed(include_str!("../../../tests/data/tlb-events/amd.csv"), AMD);
        let sizes: Vec<_> = listing.rows.iter().filter_map(|row| row.page_bytes).collect();
        assert_eq!(sizes, [4096, 16384, 2 << 20, 1 << 30]);
        let total = listing.total();
        assert_eq!(total.dtlb, Cell { per_s: Some(1_234_560.0), percent: None });
        assert_eq!(total.itlb.per_s, Some(4_321.0));
        assert_eq!(total.percent(), None);
    }

    #[test]
    fn arm_knows_no_sizes() {
        let listing = listed(include_str!("../../../tests/data/tlb-events/arm.csv"), ARM);
        assert_eq!(listing.rows.len(), 1);
        assert_eq!(listing.rows[0].page_bytes, None);
        assert_eq!(listing.total().dtlb.per_s, Some(777_000.0));
    }

    /// Parses counts of real machines, of one CPU in user mode:
    /// tests/data/tlb-events/captured/README.md. A count that was not published is unknown.
    fn captured(family: &Family, text: &str, elapsed_ns: u64) -> Counts {
        let events = family.events();
        let mut values = vec![None; events.len()];
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let code = words[1].strip_prefix('r').map(|hex| u64::from_str_radix(hex, 16).unwrap());
            let nth = events.iter().position(|event| event.code.map(|code| code.0) == code);
            let (printed, share): (f64, f64) =
                (words[0].parse().unwrap(), words[2].parse().unwrap());
            // The raw counter, before it was scaled.
            values[nth.unwrap()] = Some(Scaled {
                value: (printed * share / 100.0).round() as u64,
                enabled_ns: elapsed_ns,
                running_ns: (elapsed_ns as f64 * share / 100.0) as u64,
            });
        }
        Counts { cpu: 0, mode: Mode::User, values }
    }

    #[test]
    fn walk_cycles_of_a_real_intel_are_their_share() {
        let intel = "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 85\n";
        let family = Family::find(&cpu_identity(intel)).unwrap();
        let text = include_str!("../../../tests/data/tlb-events/captured/intel-skylake.txt");
        let counts = captured(&family, text, 129_017_929_724);
        let events = family.events();
        let sum = |role| sum(&events, &counts, |r| r == role).unwrap();
        let walking = sum(Role::DataCycles);
        assert!((walking / 13_135_321_609.0 - 1.0).abs() < 1e-6, "{walking}");
        assert!((walking / sum(Role::Cycles) - 0.030_768).abs() < 1e-6);
        // The cycles of instruction fetches were not published, so the whole share is unknown, not
        // smaller.
        assert_eq!(walk_share(&family, &[counts]), None);
    }

    #[test]
    fn walks_of_a_real_neoverse_and_a_real_zen_are_scaled_and_have_no_time() {
        let arm =
            Family::find(&cpu_identity("CPU implementer : 0x41\nCPU part : 0xd49\n")).unwrap();
        let text = include_str!("../../../tests/data/tlb-events/captured/arm-neoverse-n2.txt");
        let ns = 515_904_553;
        let listing = super::listing(&arm, &[captured(&arm, text, ns)], ns, ns);
        let near = |cell: Cell, walks: f64| {
            let per_s = cell.per_s.unwrap();
            assert!((per_s * ns as f64 / 1e9 / walks - 1.0).abs() < 0.005, "{per_s}");
            assert_eq!(cell.percent, None);
        };
        near(listing.total().dtlb, 468.0);
        near(listing.total().itlb, 310.0);
        let shared = listing.notes.iter().any(|note| note.contains("from 42 % of the time"));
        assert!(shared, "{:?}", listing.notes);
        let zen = "vendor_id : AuthenticAMD\ncpu family : 26\nmodel : 8\n";
        let zen = Family::find(&cpu_identity(zen)).unwrap();
        let text = include_str!("../../../tests/data/tlb-events/captured/amd-zen5-user.txt");
        let listing = super::listing(&zen, &[captured(&zen, text, ns)], ns, ns);
        let cell = |bytes| {
            let row = listing.rows.iter().find(|row| row.page_bytes == Some(bytes));
            row.unwrap().cells.dtlb
        };
        near(cell(4096), 1_300_000.0);
        near(cell(2 << 20), 16_000.0);
        assert_eq!(cell(1 << 30), Cell::default(), "not published: unknown");
        near(listing.total().dtlb, 1_310_000.0);
    }
}
