//! The costs of a machine since its start, as text.

use super::text::{self, MISSING, heading};
use pagetax_core::counter::{Unit, UnitReading};
use pagetax_core::hatstat::{HatCost, HatStat, SharedMapping};
use pagetax_core::units::{Bytes, Nanos};

/// Renders the sum in one sentence, then the tables.
pub fn render(stat: &HatStat) -> String {
    let mut out = sentence(stat);
    out += &heading(&format!("Costs of {} since its start", stat.machine));
    let headings = ["", "events", "each", "time", "low – high", "how"];
    out += &text::table(&headings, &[1, 2, 3], stat.costs.iter().map(cost).collect());
    if !stat.processes.is_empty() {
        out += &heading("Processes with the most faults or the largest page tables");
        let rows = stat.processes.iter().map(|process| {
            vec![
                process.pid.to_string(),
                process.name.clone(),
                text::count(process.minor_fault_count),
                text::count(process.major_fault_count),
                Bytes(process.page_table_bytes).to_string(),
            ]
        });
        let headings = ["pid", "name", "minor faults", "major faults", "page tables"];
        out += &text::table(&headings, &[0, 2, 3, 4], rows.collect());
    }
    if !stat.shared.is_empty() {
        out += &heading("Shared memory with page tables in each process");
        let headings =
            ["mapping", "size", "processes", "tables", "low – high", "faults", "on huge pages"];
        out += &text::table(&headings, &[1, 2, 3, 5, 6], stat.shared.iter().map(mapping).collect());
        out += "  Huge pages need none of these tables, and one fault for 2 MiB.\n";
    }
    out
}

/// Says the sum as the report of 1990 does: so many hours of so many.
fn sentence(stat: &HatStat) -> String {
    let cpus = match stat.cpu_count {
        1 => "its CPU".into(),
        count => format!("each of its {count} CPUs"),
    };
    match stat.cpu_ns() {
        None => format!("{}: up for {}; no cost is known\n", stat.machine, hours(stat.uptime_ns)),
        Some((value, low, high)) => {
            let share = value as f64 / (stat.uptime_ns.max(1) as f64 * f64::from(stat.cpu_count));
            let [up, value, low, high] = [stat.uptime_ns, value, low, high].map(hours);
            let bounds = if low == high { String::new() } else { format!(" ({low} – {high})") };
            format!(
                "Of {up} on {cpus}, virtual memory took {value}{bounds} of CPU time: {:.1} %\n",
                share * 100.0
            )
        }
    }
}

/// Returns a time in hours, unless it is short.
fn hours(ns: u64) -> String {
    match ns as f64 / 3_600e9 {
        hours if hours >= 2.0 => format!("{hours:.1} h"),
        _ => Nanos(ns).to_string(),
    }
}

fn cell(unit: Unit, reading: &UnitReading) -> String {
    reading.value.map_or(MISSING.into(), |value| text::value(unit, value))
}

fn bounds(unit: Unit, reading: &UnitReading) -> String {
    match (reading.low, reading.high) {
        (Some(low), Some(high)) if low != high => text::range(unit, Some(low), Some(high)),
        _ => String::new(),
    }
}

fn cost(cost: &HatCost) -> Vec<String> {
    let how = cost.total_ns.why.as_ref().unwrap_or(&cost.how);
    vec![
        match cost.account.as_str() {
            "wall" => format!("{} (waiting)", cost.what),
            _ => cost.what.clone(),
        },
        cell(Unit::Count, &cost.count),
        cell(Unit::Ns, &cost.each_ns),
        cell(Unit::Ns, &cost.total_ns),
        bounds(Unit::Ns, &cost.total_ns),
        how.clone(),
    ]
}

fn mapping(mapping: &SharedMapping) -> Vec<String> {
    vec![
        mapping.name.clone(),
        Bytes(mapping.bytes).to_string(),
        mapping.process_count.to_string(),
        cell(Unit::Bytes, &mapping.page_table_bytes),
        bounds(Unit::Bytes, &mapping.page_table_bytes),
        cell(Unit::Ns, &mapping.fault_ns),
        cell(Unit::Ns, &mapping.huge_fault_ns),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::counter::Reading;

    #[test]
    fn hours_of_hours_as_in_1990() {
        let hour = 3_600_000_000_000;
        let faults = Reading::Derived { value: 280_000, low: 200_000, high: 300_000 };
        let lost = Reading::Missing("no kswapd".into());
        let stat = HatStat {
            machine: "host".into(),
            uptime_ns: 48 * hour,
            cpu_count: 1,
            costs: vec![
                HatCost::product(
                    "faults",
                    "cpu",
                    Reading::Measured(90_000_000),
                    faults,
                    "calibrated",
                ),
                HatCost::new("kswapd", "cpu", lost.clone(), lost.clone(), lost, "by schedstat"),
            ],
            processes: Vec::new(),
            shared: Vec::new(),
        };
        let text = render(&stat);
        assert!(
            text.starts_with("Of 48.0 h on its CPU, virtual memory took 7.0 h (5.0 h – 7.5 h)"),
            "{text}"
        );
        assert!(text.contains(": 14.6 %") && text.contains("no kswapd"), "{text}");
    }
}
