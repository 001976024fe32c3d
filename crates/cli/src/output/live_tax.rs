//! The tax of running processes as text.

use super::report;
use super::text::{MISSING, heading, table};
use pagetax_core::budget::TimeRow;
use pagetax_core::cause::{Account, is_tax};
use pagetax_core::live_tax::{LiveTax, Window};
use pagetax_core::stats::Ratio;
use pagetax_core::units::{Bytes, Nanos};

/// Renders the experiment and its verdict.
pub fn render(live: &LiveTax) -> String {
    let names: Vec<_> =
        live.processes.iter().map(|p| format!("{} ({})", p.pid, p.command)).collect();
    let cycles = live.cycles.len();
    let title = format!("{}: {cycles} cycles in {}", names.join(", "), Nanos(live.elapsed_ns));
    let mut out = heading(&title) + &costs(live) + &windows(live) + &tax(live) + &effects(live);
    out += &report::warnings(&live.warnings);
    let bold = anstyle::Style::new().bold();
    out += &format!("\n{bold}Verdict: {}{bold:#}\n", live.verdict.reason);
    match &live.verdict.apply {
        Some(line) => {
            out + &format!("Apply it, until it restarts; --undo takes it back:\n{line}\n")
        }
        None => out,
    }
}

/// Renders the largest costs before any change, without translation: the experiment shows that.
fn costs(live: &LiveTax) -> String {
    let Some(interval) = &live.budget else { return String::new() };
    let tax = interval.budget.rows(Account::Cpu).iter().filter(|row| is_tax(&row.id));
    let of = |row: &TimeRow| match (row.ns, row.low_ns, row.high_ns) {
        (Some(0), ..) | (None, ..) => None,
        (Some(ns), Some(low), Some(high)) if low < high => {
            Some(format!("{} {} ({}–{})", row.id, Nanos(ns), Nanos(low), Nanos(high)))
        }
        (Some(ns), ..) => Some(format!("{} {}", row.id, Nanos(ns))),
    };
    let costs: Vec<String> = tax.filter_map(of).collect();
    let costs = if costs.is_empty() { "no cost was seen".into() } else { costs.join(", ") };
    let all =
        interval.cpu_ns().map_or_else(|| "an unknown amount".into(), |ns| Nanos(ns).to_string());
    format!("\nBefore any change, of {all} of CPU time: {costs}; translation not counted\n")
}

fn windows(live: &LiveTax) -> String {
    if live.cycles.is_empty() {
        return String::new();
    }
    let base: Vec<Window> =
        live.cycles.iter().flat_map(|cycle| [cycle.unchanged, cycle.split]).collect();
    let huge: Vec<Window> = live.cycles.iter().map(|cycle| cycle.huge).collect();
    let ratio = |ratio: Option<Ratio>| ratio.map_or(MISSING.into(), |ratio| ratio.to_string());
    let row = |name: &str, window: &Window, ratio: String| {
        let each = window.cpu_ns as f64 / window.unit_count.max(1) as f64;
        vec![
            name.to_string(),
            Nanos(window.cpu_ns).to_string(),
            if each < 1e3 { format!("{each:.3} ns") } else { Nanos(each as u64).to_string() },
            format!("{:.0}", window.rate()),
            ratio,
        ]
    };
    let rows = vec![
        row("base pages as found", &live.before, "1".into()),
        row("base pages in order", &Window::whole(&base), ratio(live.order)),
        row("huge pages", &Window::whole(&huge), ratio(live.speedup)),
        vec![
            "nothing changed".into(),
            String::new(),
            String::new(),
            String::new(),
            ratio(live.check),
        ],
    ];
    let headings = ["windows on", "CPU time", "for each unit", "units/s", "speed-up (95 %)"];
    format!("\nUnits: {}\n", live.progress) + &table(&headings, &[1, 2, 3], rows)
}

/// Renders the tax in one line.
fn tax(live: &LiveTax) -> String {
    let Some((value, low, high)) = live.tax() else { return String::new() };
    let [value, low, high] = [value, low, high].map(|share| format!("{:.0}", share * 100.0));
    let tried = match live.tried_bytes < live.base_bytes {
        true => {
            format!(", by {} of {} on base pages", Bytes(live.tried_bytes), Bytes(live.base_bytes))
        }
        false => String::new(),
    };
    format!("\nBase pages take {value} % of its CPU time ({low}–{high} %){tried}\n")
}

/// Renders what the experiment did to the processes.
fn effects(live: &LiveTax) -> String {
    if live.cycles.is_empty() {
        return String::new();
    }
    let stops = match live.stop_count {
        0 => "no thread was stopped".to_string(),
        count => format!("{count} stops, {} at most", Nanos(live.stop_ns_max)),
    };
    let rate = live.throughput.map_or(MISSING.into(), |rate| format!("{:.1} %", rate * 100.0));
    let mut out = format!(
        "While it was watched: {rate} of its rate before; {stops}; the slowest block took {}\n",
        Nanos(live.block_ns_max)
    );
    match live.changes.len() {
        0 => out += "All pages are as they were before\n",
        _ => {
            out += "Not as it was before:\n";
            live.changes.iter().for_each(|line| out += &format!("  {line}\n"));
        }
    }
    out
}
