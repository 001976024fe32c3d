//! What virtual memory has cost this machine since it booted, from counters that the kernel keeps anyway.
//!
//! Reads /proc once, and walks no page table. So the tables of a mapping have bounds: they are at most those
//! that the mapping can have, and at least the process's tables less those that its other mappings can have.

use crate::measure::system::{DAEMONS, Daemon, Process, ProcessTotals, Scope, daemon_ns, daemons};
use crate::procfs::{MapsLine, Root, maps, online_cpus, process_memory};
use pagetax_core::calibration::{Calibration, FaultKind};
use pagetax_core::counter::{Reading, Unit, UnitReading};
use pagetax_core::hatstat::{HatCost, HatProcess, HatStat, SharedMapping};
use std::collections::BTreeMap;
use std::ops::Range;

/// The processes and mappings that are listed.
const LISTED: usize = 10;
/// Smaller mappings have page tables of no account.
const SHARED_BYTES_MIN: u64 = 16 << 20;
/// The memory that one table of base pages maps.
const TABLE_REACH_BYTES: u64 = 2 << 20;
const TABLE_BYTES: u64 = 4096;

/// Reads the costs of this machine since it booted.
pub fn hatstat(root: &Root, calibration: Result<&Calibration, &str>) -> Result<HatStat, String> {
    let (processes, shared) = processes(root, calibration);
    Ok(HatStat {
        machine: "host".into(),
        uptime_ns: uptime_ns(root)?,
        cpu_count: online_cpus(root)?.len() as u32,
        costs: costs(root, calibration),
        processes,
        shared,
    })
}

fn uptime_ns(root: &Root) -> Result<u64, String> {
    let text = root.text("/proc/uptime")?;
    let seconds = text.split(' ').next().and_then(|word| word.parse::<f64>().ok());
    let seconds = seconds.ok_or_else(|| format!("/proc/uptime: `{text}` is no time"))?;
    Ok((seconds * 1e9) as u64)
}

/// Returns the cost of one event by calibration: the median of its kind, between the bounds of others.
fn each(
    calibration: Result<&Calibration, &str>,
    of: impl Fn(&Calibration) -> Option<(f64, f64, f64)>,
) -> Reading {
    let calibration = match calibration {
        Ok(calibration) => calibration,
        Err(why) => return Reading::Missing(why.into()),
    };
    match of(calibration) {
        Some((value, low, high)) => {
            let ns = |ns: f64| ns.max(0.0).round() as u64;
            Reading::Derived {
                value: ns(value),
                low: ns(low.min(value)),
                high: ns(high.max(value)),
            }
        }
        None => Reading::Missing("the calibration lacks this cost".into()),
    }
}

fn costs(root: &Root, calibration: Result<&Calibration, &str>) -> Vec<HatCost> {
    let events = Scope::System.totals(root, &ProcessTotals::default()).events;
    let count = |id: &str| match events.get(id) {
        Some(Ok(count)) => Reading::Measured(*count),
        Some(Err(why)) => Reading::Missing(why.clone()),
        None => Reading::Missing("not counted".into()),
    };
    let base = |c: &Calibration, kind| c.fault(kind, c.base_page_bytes);
    let base_fault = each(calibration, |c| {
        let anon = base(c, FaultKind::AnonWrite)?;
        let cached = base(c, FaultKind::FileCachedRead).unwrap_or(anon);
        let copied = base(c, FaultKind::CowWrite).unwrap_or(anon);
        Some((anon.median_ns, cached.low_ns, copied.high_ns))
    });
    let huge_fault = each(calibration, |c| {
        let huge = c.fault(FaultKind::AnonWrite, c.huge_page_bytes)?;
        Some((huge.median_ns, huge.low_ns, huge.high_ns))
    });
    let read = each(calibration, |c| {
        let read = base(c, FaultKind::FileMajorRead)?;
        Some((read.median_ns, read.low_ns, read.high_ns))
    });
    // A kernel without huge pages does not count them.
    let huge_faults = match root.has("/sys/kernel/mm/transparent_hugepage") {
        true => count("huge_fault_count"),
        false => Reading::Measured(0),
    };
    let mut costs = vec![
        HatCost::product(
            "faults on base pages",
            "cpu",
            less(count("minor_fault_count"), huge_faults),
            base_fault,
            "from a cached file's page to a copy; best: a new zeroed page",
        ),
        HatCost::product(
            "faults on huge pages",
            "cpu",
            count("huge_fault_count"),
            huge_fault,
            "new zeroed pages",
        ),
    ];
    let known = daemons(root);
    let daemon = |index: usize| daemon_cost(root, &known, index);
    costs.extend((0..DAEMONS.len()).map(daemon));
    costs.push(HatCost::product(
        "faults that read a page",
        "wall",
        count("major_fault_count"),
        read,
        "a random read of this machine's temporary files",
    ));
    let stalled = count("memory_some_ns");
    costs.push(HatCost::new(
        "stalls on memory (PSI)",
        "wall",
        Reading::Missing("the kernel counts time, not stalls".into()),
        Reading::Missing("the kernel counts time, not stalls".into()),
        stalled,
        "time in which some task waited for memory",
    ));
    costs
}

fn less(all: Reading, part: Reading) -> Reading {
    match (all, part) {
        (Reading::Measured(all), Reading::Measured(part)) => {
            Reading::Measured(all.saturating_sub(part))
        }
        (Reading::Measured(_), part) => part,
        (all, _) => all,
    }
}

fn daemon_cost(root: &Root, known: &[Daemon], index: usize) -> HatCost {
    let (name, _) = DAEMONS[index];
    let total = daemon_ns(root, known, index).map_or_else(Reading::Missing, Reading::Measured);
    let no_count = || Reading::Missing("its time is known as a whole".into());
    HatCost::new(name, "cpu", no_count(), no_count(), total, "by schedstat")
}

/// A process's mapping of shared memory, with the bounds of its page tables.
struct Part {
    key: (String, u64, String),
    range: Range<u64>,
    table_bytes: (u64, u64),
    /// The faults of the whole process.
    fault_count: u64,
}

fn processes(
    root: &Root,
    calibration: Result<&Calibration, &str>,
) -> (Vec<HatProcess>, Vec<SharedMapping>) {
    let (mut all, mut parts) = (Vec::new(), Vec::new());
    for pid in root.pids() {
        let Ok([.., minor_fault_count, major_fault_count]) = Scope::times_and_faults(root, pid)
        else {
            continue;
        };
        // A thread of the kernel has no page tables of its own.
        let Some(page_table_bytes) = process_memory(root, pid).page_table_bytes.value() else {
            continue;
        };
        let name = Process::read(root, pid).map_or_else(|| "ended".into(), |process| process.name);
        let maps = maps(root, pid).unwrap_or_default();
        parts.extend(shared_parts(&maps, page_table_bytes, minor_fault_count));
        all.push(HatProcess { pid, name, minor_fault_count, major_fault_count, page_table_bytes });
    }
    (top(all), shared(parts, calibration))
}

/// Returns the processes that are among the first by faults or by page tables.
fn top(mut all: Vec<HatProcess>) -> Vec<HatProcess> {
    all.sort_by_key(|process| std::cmp::Reverse(process.page_table_bytes));
    let of_tables: Vec<u32> = all.iter().take(LISTED).map(|process| process.pid).collect();
    all.sort_by_key(|process| {
        std::cmp::Reverse(process.minor_fault_count + process.major_fault_count)
    });
    let is_listed =
        |(rank, process): &(usize, HatProcess)| *rank < LISTED || of_tables.contains(&process.pid);
    all.into_iter().enumerate().filter(is_listed).map(|(_, process)| process).collect()
}

/// Returns the bytes of the tables that a range can have, without the top level, which VmPTE leaves out.
fn tables_of(range: &Range<u64>) -> u64 {
    // A table has 512 entries.
    let levels = [1, 1 << 9, 1 << 18].map(|tables| tables * TABLE_REACH_BYTES);
    let count = |reach: u64| range.end.div_ceil(reach) - range.start / reach;
    levels.into_iter().map(count).sum::<u64>() * TABLE_BYTES
}

/// Returns the large mappings that a process shares with others: of files and of shared memory, unless its
/// writes are its own.
fn shared_parts(lines: &[MapsLine], page_table_bytes: u64, fault_count: u64) -> Vec<Part> {
    let all: u64 = lines.iter().map(|line| tables_of(&line.range)).sum();
    let is_shared = |line: &&MapsLine| {
        let private_write = line.permissions[1] == b'w' && line.permissions[3] == b'p';
        line.inode != 0 && !private_write && line.range.end - line.range.start >= SHARED_BYTES_MIN
    };
    let part = |line: &MapsLine| {
        let own = tables_of(&line.range);
        let high = own.min(page_table_bytes);
        let low = page_table_bytes.saturating_sub(all - own).min(high);
        let key = (line.device.clone(), line.inode, line.name.clone());
        Part { key, range: line.range.clone(), table_bytes: (low, high), fault_count }
    };
    lines.iter().filter(is_shared).map(part).collect()
}

fn shared(parts: Vec<Part>, calibration: Result<&Calibration, &str>) -> Vec<SharedMapping> {
    let mut by_key: BTreeMap<_, Vec<Part>> = BTreeMap::new();
    for part in parts {
        by_key.entry(part.key.clone()).or_default().push(part);
    }
    let of_many = by_key.into_values().filter(|parts| parts.len() > 1);
    let mut shared: Vec<SharedMapping> =
        of_many.map(|parts| mapping(&parts, calibration)).collect();
    shared.sort_by_key(|mapping| std::cmp::Reverse(mapping.page_table_bytes.high));
    shared.truncate(LISTED);
    shared
}

fn mapping(parts: &[Part], calibration: Result<&Calibration, &str>) -> SharedMapping {
    let sum = |of: fn(&Part) -> u64| parts.iter().map(of).sum::<u64>();
    let (low, high) = (sum(|part| part.table_bytes.0), sum(|part| part.table_bytes.1));
    let value = low.midpoint(high);
    let tables = Reading::Derived { value, low, high };
    let fault_ns = each(calibration, |c| fault_ns(parts, c));
    let huge_count = |table_bytes: u64| table_bytes / TABLE_BYTES;
    let huge_fault_ns = times(
        (huge_count(value), huge_count(low), huge_count(high)),
        &each(calibration, |c| {
            let fault = c.fault(FaultKind::ZeroRead, c.base_page_bytes)?;
            let most = c.fault(FaultKind::AnonWrite, c.base_page_bytes).unwrap_or(fault);
            Some((fault.median_ns, fault.low_ns, most.high_ns))
        }),
    );
    let first = &parts[0];
    SharedMapping {
        name: first.key.2.clone(),
        bytes: first.range.end - first.range.start,
        process_count: parts.len() as u64,
        page_table_bytes: UnitReading::new(Unit::Bytes, tables.clone()),
        saved_bytes: UnitReading::new(Unit::Bytes, tables),
        fault_ns: UnitReading::new(Unit::Ns, fault_ns),
        huge_fault_ns: UnitReading::new(Unit::Ns, huge_fault_ns),
    }
}

/// Returns the time of the faults that filled the page tables: its value and its bounds.
///
/// Each entry of a table is a page. A read maps up to 16 pages of the page cache at a time; a write maps one,
/// and takes at most as long as one that also zeroes it. A process has written to as many pages at most as it
/// had faults.
fn fault_ns(parts: &[Part], calibration: &Calibration) -> Option<(f64, f64, f64)> {
    let fault = |kind| calibration.fault(kind, calibration.base_page_bytes);
    let around = fault(FaultKind::FileCachedRead)?;
    let alone = fault(FaultKind::ZeroRead).unwrap_or(around);
    let write = fault(FaultKind::AnonWrite).unwrap_or(alone);
    let pages = |table_bytes: u64| table_bytes / 8;
    let (mut value, mut least, mut most) = (0.0, 0.0, 0.0);
    for Part { table_bytes: (low, high), fault_count, .. } in parts {
        let likely = pages(low.midpoint(*high));
        let each_ns = if *fault_count < likely { around.median_ns } else { alone.median_ns };
        let written = pages(*high).min(*fault_count);
        value += likely as f64 * each_ns;
        least += pages(*low) as f64 * around.low_ns;
        most += written as f64 * write.high_ns;
        most += (pages(*high) - written) as f64 * around.high_ns;
    }
    Some((value, least, most))
}

fn times((value, low, high): (u64, u64, u64), each: &Reading) -> Reading {
    match each {
        Reading::Derived { value: each, low: least, high: most } => {
            Reading::Derived { value: value * each, low: low * least, high: high * most }
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::budget::tests::calibration;
    use crate::procfs::{maps_line, tests::captured};

    #[test]
    fn a_captured_machine_has_costs_and_what_it_lacks_is_missing() {
        let calibration = calibration();
        let stat = hatstat(&captured(), Ok(&calibration)).unwrap();
        assert!(stat.uptime_ns > 0 && stat.cpu_ns().is_some());
        let cost = |what: &str| stat.costs.iter().find(|cost| cost.what == what).unwrap();
        let faults = cost("faults on base pages");
        assert_eq!(faults.total_ns.value, faults.count.value.map(|count| count * 1_500));
        assert!(faults.total_ns.low < faults.total_ns.value);
        assert_eq!(cost("stalls on memory (PSI)").count.value, None);
        let blind = hatstat(&captured(), Err("not calibrated")).unwrap();
        let faults = &blind.costs[0];
        assert_eq!(
            (faults.total_ns.value, faults.total_ns.why.as_deref()),
            (None, Some("not calibrated"))
        );
        assert!(hatstat(&Root::at("/nonexistent"), Err("x")).is_err());
    }

    #[test]
    fn tables_of_a_shared_mapping_lie_between_what_it_can_have_and_what_others_leave() {
        let lines: Vec<_> = [
            "7f0000000000-7f0080000000 rw-s 00000000 00:01 77   /dev/zero (deleted)",
            "555555000000-555555200000 r-xp 00000000 fe:00 5   /usr/bin/server",
            "7fff00000000-7fff00021000 rw-p 00000000 00:00 0   [stack]",
        ]
        .iter()
        .map(|text| maps_line(text.as_bytes()).unwrap())
        .collect();
        let parts = shared_parts(&lines, (4 << 20) + 12_288, 32_768);
        assert_eq!(parts.len(), 1);
        // It can have 1,024, 2 and 1 tables of the three levels; the others one of each.
        assert_eq!(parts[0].table_bytes, ((4 << 20) - 12_288, (4 << 20) + 12_288));
        let few = shared_parts(&lines, 28_672, 0);
        assert_eq!(few[0].table_bytes, (4_096, 28_672));
        let workers = |fault_count| {
            let one = || shared_parts(&lines, (4 << 20) + 12_288, fault_count);
            let many: Vec<Part> = (0..64).flat_map(|_| one()).collect();
            shared(many, Ok(&calibration())).remove(0)
        };
        let mapping = workers(32_768);
        assert_eq!((mapping.process_count, mapping.bytes), (64, 2 << 30));
        assert_eq!(mapping.page_table_bytes.value, Some(256 << 20));
        // 64 × 524,288 pages of 230 ns, and 64 × 1,024 faults of 650 ns.
        assert_eq!(mapping.fault_ns.value, Some(64 * 524_288 * 230));
        assert_eq!(mapping.huge_fault_ns.value, Some(64 * 1_024 * 650));
        // With a fault for each page they may have written to all.
        let written = workers(524_288);
        assert_eq!(written.fault_ns.value, Some(64 * 524_288 * 650));
        assert!(written.fault_ns.high >= Some(64 * 524_288 * 1_500));
        let of_one = shared(shared_parts(&lines, 4 << 20, 0), Ok(&calibration()));
        assert!(of_one.is_empty(), "of one process");
    }
}
