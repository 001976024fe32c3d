//! The processes of a machine by their tax, as text.

use super::text::{self, MISSING, heading};
use pagetax_core::ranking::{RankedProcess, Ranking};
use pagetax_core::units::Nanos;
use std::collections::BTreeMap;

/// The processes that are listed.
const LISTED: usize = 20;

/// Renders the ranks, the reasons for missing figures, and the next step.
pub fn render(ranking: &Ranking) -> String {
    let elapsed = Nanos(ranking.elapsed_ns);
    let title = format!("Processes by what virtual memory cost them, in {elapsed} (% of a CPU)");
    let ranked = ranking.processes.iter().filter(|process| process.key_ns() > Some(0));
    let listed: Vec<&RankedProcess> = ranked.take(LISTED).collect();
    let mut out = heading(&title);
    let headings = [
        "#",
        "pid",
        "name",
        "user",
        "CPU %",
        "resident",
        "base pages",
        "touched",
        "tax %",
        "low – high",
    ];
    let rows = listed.iter().enumerate().map(|(at, process)| row(ranking, at + 1, process));
    out += &text::table(&headings, &[0, 1, 4, 5, 6, 7, 8], rows.collect());
    let rest = ranking.processes.len() - listed.len();
    if rest > 0 {
        out += &format!("  {rest} more have less, or no figures; --json lists all of them\n");
    }
    out += &reasons(&listed);
    out += &match ranking.first() {
        Some(first) => format!("next: pagetax diagnose -p {}  ({})\n", first.pid, first.name),
        None => "No process can be shown to pay for virtual memory.\n".into(),
    };
    out
}

fn percent(ranking: &Ranking, ns: u64) -> String {
    format!("{:.1}", ns as f64 * 100.0 / ranking.elapsed_ns.max(1) as f64)
}

fn row(ranking: &Ranking, rank: usize, process: &RankedProcess) -> Vec<String> {
    let percent = |ns: u64| percent(ranking, ns);
    let (tax, most) = (&process.tax_ns, &process.tax_ns_max);
    let estimate = match (tax.value, most.value) {
        (Some(ns), _) => percent(ns),
        (None, Some(ns)) => format!("≤ {}", percent(ns)),
        (None, None) => MISSING.into(),
    };
    let bounds = match (tax.low, tax.high) {
        (Some(low), Some(high)) => format!("{} – {}", percent(low), percent(high)),
        _ => String::new(),
    };
    vec![
        rank.to_string(),
        process.pid.to_string(),
        process.name.clone(),
        process.user.clone(),
        process.cpu_ns.value.map_or(MISSING.into(), percent),
        text::reading(&process.resident_bytes),
        text::reading(&process.base_bytes),
        text::reading(&process.touched_bytes),
        estimate,
        bounds,
    ]
}

/// Returns why some estimates are missing: each reason with the ranks of its processes.
fn reasons(listed: &[&RankedProcess]) -> String {
    let mut by_reason: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (at, process) in listed.iter().enumerate() {
        if let Some(why) = &process.tax_ns.why {
            let why = why.replace(&format!("/proc/{}/", process.pid), "/proc/PID/");
            by_reason.entry(why).or_default().push((at + 1).to_string());
        }
    }
    let line = |(why, ranks): (String, Vec<String>)| {
        format!("  ≤ at #{}: a bound only; {why}\n", ranks.join(", #"))
    };
    by_reason.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::document;

    #[test]
    fn the_first_estimate_is_the_next_step_and_bounds_show_as_such() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/schema/examples/ranking.json");
        let example = std::fs::read_to_string(path).unwrap();
        let mut ranking: Ranking = document::from_json(&example).unwrap();
        let text = render(&ranking);
        let first = ranking.processes[0].pid;
        assert!(text.contains(&format!("next: pagetax diagnose -p {first} ")), "{text}");
        let why = "/proc/7/clear_refs: Permission denied (os error 13)";
        ranking.processes[0].pid = 7;
        ranking.processes[0].tax_ns = pagetax_core::counter::UnitReading::new(
            pagetax_core::counter::Unit::Ns,
            pagetax_core::counter::Reading::Missing(why.into()),
        );
        let text = render(&ranking);
        assert!(text.contains('≤') && text.contains("at #1: a bound only; /proc/PID/"), "{text}");
        assert!(!text.contains("diagnose -p 7 "), "{text}");
        ranking.processes.clear();
        assert!(render(&ranking).contains("No process"), "{}", render(&ranking));
    }
}
