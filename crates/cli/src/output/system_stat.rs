//! The costs of a system as text: a line for each interval as vmstat has it, and the ledgers of all.

use super::budget;
use super::text::{MISSING, heading};
use pagetax_core::counter::UnitReading;
use pagetax_core::system_stat::{Culprit, SystemInterval, huge_blocks};
use pagetax_core::units::Nanos;

/// The columns of time: heading and row. They are milliseconds of each second.
pub const COLUMNS: &[(&str, &str)] = &[
    ("fault", "minor_fault"),
    ("zero", "zero_copy"),
    ("recl", "reclaim"),
    ("comp", "compaction"),
    ("swap", "swap"),
    ("table", "page_table"),
    ("shoot", "shootdown"),
    ("kswap", "background_reclaim"),
    ("kcomp", "background_compaction"),
    ("khuge", "khugepaged"),
];
/// The columns of waits.
pub const WAITS: &[(&str, &str)] = &[("in", "page_in"), ("swap", "swap_in"), ("throt", "throttle")];
/// The least time of daemons in a second, in nanoseconds, for which who caused it is said.
const CULPRIT_NS: u64 = 1_000_000;

/// Returns the two lines of headings.
pub fn headings() -> String {
    let groups = format!(
        "{:^60}{:^23}{:^20}{:^13}\n",
        "CPU, ms per second, of virtual memory", "all of it", "waits, ms/s", "2M blocks"
    );
    let names: String = COLUMNS.iter().map(|(name, _)| format!("{name:>6}")).collect();
    let waits: String = WAITS.iter().map(|(name, _)| format!("{name:>6}")).collect();
    let rest = format!(
        "{:>16}{:>7}{waits}{:>7}{:>6}{:>7}\n",
        "VM (low–high)", "of", "PSI", "free", "failed"
    );
    groups + &names + &rest
}

/// Returns the line of an interval, and who caused the time of the kernel's daemons.
pub fn line(interval: &SystemInterval) -> String {
    let of_second = |ns: f64| ns * 1e3 / interval.elapsed_ns.max(1) as f64;
    let cell = |ns: Option<u64>| ns.map_or(MISSING.into(), |ns| number(of_second(ns as f64)));
    let row = |id: &str| cell(interval.budget.row(id).and_then(|row| row.ns));
    let mut line: String = COLUMNS.iter().map(|(_, id)| format!("{:>6}", row(id))).collect();
    let tax = interval.readings.get("vm_cpu_ns");
    let bound = |of: fn(&UnitReading) -> Option<u64>| cell(tax.and_then(of));
    let sum =
        format!("{} ({}–{})", bound(|tax| tax.value), bound(|tax| tax.low), bound(|tax| tax.high));
    line += &format!("{sum:>16}{:>7}", cell(interval.cpu_ns()));
    line.extend(WAITS.iter().map(|(_, id)| format!("{:>6}", row(id))));
    line += &format!("{:>7}", cell(interval.value("memory_some_ns")));
    let free = match interval.free_blocks.len() {
        0 => MISSING.into(),
        _ => huge_blocks(&interval.free_blocks).to_string(),
    };
    let failed = interval.value("huge_fallback_count").map_or(MISSING.into(), |n| n.to_string());
    line + &format!("{free:>6}{failed:>7}\n") + &causes(interval)
}

/// Returns 3 digits of a number of milliseconds.
pub fn number(ms: f64) -> String {
    match ms {
        0.0 => "0".into(),
        ms if ms < 9.95 => format!("{ms:.1}"),
        ms => format!("{ms:.0}"),
    }
}

/// Says who caused the time of the kernel's daemons, and when memory will be in pieces.
pub fn causes(interval: &SystemInterval) -> String {
    let ns = |id: &str| interval.budget.row(id).and_then(|row| row.ns).unwrap_or(0);
    let daemons = [("kswapd", "background_reclaim"), ("kcompactd", "background_compaction")];
    let least = (CULPRIT_NS as f64 * interval.elapsed_ns as f64 / 1e9) as u64;
    let worked: Vec<_> =
        daemons.iter().filter(|(_, id)| ns(id) > least).map(|(name, _)| *name).collect();
    let mut out = String::new();
    if !worked.is_empty() && !interval.culprits.is_empty() {
        let culprits: Vec<String> = interval.culprits.iter().take(3).map(culprit).collect();
        out += &format!("  {} for {}\n", worked.join(", "), culprits.join("; "));
    }
    if let Some(seconds) = interval.compaction_in_s.filter(|seconds| *seconds < 600.0) {
        let left = Nanos((seconds * 1e9) as u64);
        out += &format!("  at this rate, faults of huge pages compact memory in {left}\n");
    }
    out
}

fn culprit(culprit: &Culprit) -> String {
    let percent = |share: f64| format!("{:.0}", share * 100.0);
    let cgroup =
        culprit.cgroup.as_deref().filter(|path| *path != "/").map(|path| format!(" in {path}"));
    format!(
        "{}[{}]{}: {} % of allocations ({}–{})",
        culprit.name,
        culprit.pid,
        cgroup.unwrap_or_default(),
        percent(culprit.share),
        percent(culprit.low),
        percent(culprit.high),
    )
}

/// Returns the ledgers of all intervals together.
pub fn total(interval: &SystemInterval, scope: &str) -> String {
    let title = format!("{scope}, {}", Nanos(interval.elapsed_ns));
    let ledgers = budget::of_system(&interval.budget);
    let fallback = match (interval.value("huge_fallback_count"), interval.value("huge_fallback_ns"))
    {
        (Some(count), Some(ns)) if count > 0 => {
            format!("\n{count} faults got no huge page, which costs about {}\n", Nanos(ns))
        }
        _ => String::new(),
    };
    let tax =
        interval.readings.get("vm_cpu_ns").and_then(|tax| Some((tax.value?, tax.low?, tax.high?)));
    let tax = tax.map_or_else(String::new, |(value, low, high)| {
        let all = interval.cpu_ns().map_or_else(|| MISSING.into(), |ns| Nanos(ns).to_string());
        let [value, low, high] = [value, low, high].map(Nanos);
        format!("\nVirtual memory takes {value} of {all} of CPU time ({low} – {high}), without translation\n")
    });
    heading(&title) + &tax + &ledgers + &fallback + &causes(interval)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::budget::{Budget, Ledger};
    use pagetax_core::cause::Account;
    use pagetax_core::counter::Reading;

    #[test]
    fn a_line_has_a_cell_for_each_heading_and_nothing_missing_is_zero() {
        let mut cpu = Ledger::new(Account::Cpu, 500_000_000);
        cpu.row(
            "minor_fault",
            Reading::Derived { value: 20_000_000, low: 10_000_000, high: 30_000_000 },
            "",
        );
        cpu.row("background_reclaim", Reading::Measured(5_000_000), "");
        cpu.row("khugepaged", Reading::Missing("not visible".into()), "");
        let mut interval = SystemInterval {
            elapsed_ns: 2_000_000_000,
            budget: Budget::new(cpu, Ledger::new(Account::Wall, 0), Vec::new()),
            free_blocks: vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2],
            compaction_in_s: Some(12.0),
            ..Default::default()
        };
        interval.put(
            "vm_cpu_ns",
            Reading::Derived { value: 25_000_000, low: 15_000_000, high: 35_000_000 },
        );
        interval.put("memory_some_ns", Reading::Measured(40_000_000));
        interval.culprits.push(Culprit {
            pid: 7,
            name: "hog".into(),
            cgroup: Some("/big".into()),
            share: 0.9,
            low: 0.8,
            high: 0.95,
        });
        let text = line(&interval);
        let words: Vec<&str> = text.lines().next().unwrap().split_whitespace().collect();
        let expected =
            ["10", "–", "–", "–", "–", "–", "–", "2.5", "–", "–", "12", "(7.5–18)", "250"];
        assert_eq!(words[..13], expected.map(|word| if word == "–" { MISSING } else { word }));
        assert_eq!(words[13..], [MISSING, MISSING, MISSING, "20", "5", MISSING]);
        assert!(text.contains("kswapd for hog[7] in /big: 90 % of allocations (80–95)"), "{text}");
        assert!(text.contains("compact memory in 12"), "{text}");
        let width = |line: &str| line.chars().count();
        let lines: Vec<String> = (headings() + &text).lines().map(str::to_string).collect();
        assert_eq!(width(&lines[1]), width(&lines[2]));
    }
}
