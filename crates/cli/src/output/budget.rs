//! The budget as text: two ledgers with bars, and the memory line.
//!
//! A bar is solid up to the row's low bound and shaded up to its high one, so that it says without
//! colour how sure the row is.

use super::text::{self, MISSING};
use pagetax_core::budget::{Budget, TimeRow};
use pagetax_core::cause::Account;
use pagetax_core::counter::Unit;

const BAR_CELLS: f64 = 24.0;
/// Narrower terminals have no room for bars.
const COLUMNS_WITH_BARS: u16 = 120;
/// The reason of the row above.
const DITTO: &str = "″";

/// One of a budget's two ledgers, as renderers want it.
pub struct LedgerView<'a> {
    /// The ledger's account: CPU time or elapsed time.
    pub account: Account,
    title: &'static str,
    rows: &'a [TimeRow],
    total_ns: u64,
    unexplained_ns: i64,
}

impl<'a> LedgerView<'a> {
    /// Returns the CPU ledger and the wall ledger.
    pub fn both(budget: &'a Budget) -> [LedgerView<'a>; 2] {
        let view = |account, title| LedgerView {
            account,
            title,
            rows: budget.rows(account),
            total_ns: budget.total_ns(account),
            unexplained_ns: budget.unexplained_ns(account),
        };
        [view(Account::Cpu, "CPU time"), view(Account::Wall, "Wall time")]
    }

    /// Returns a row's share of the total, or that of `unexplained`; none if the row is absent.
    pub fn share(&self, id: &str) -> Option<String> {
        let ns = match id {
            "unexplained" => self.unexplained_ns as f64,
            _ => self.rows.iter().find(|row| row.id == id)?.ns? as f64,
        };
        Some(share(ns, self.total_ns))
    }
}

/// Renders the tax, both ledgers and the memory line.
pub fn render(budget: &Budget) -> String {
    let mut out = tax(budget).map_or_else(String::new, |line| format!("\n{line}\n"));
    out += &LedgerView::both(budget).map(|view| ledger(&view) + &absent(&view)).concat();
    if !budget.memory().is_empty() {
        let rows = budget.memory().iter().map(|row| {
            let bytes = row.bytes.map_or(MISSING.into(), |b| text::value(Unit::Bytes, b));
            vec![row.id.clone(), bytes, row.provenance.to_string(), row.how.clone()]
        });
        out += &text::heading("Memory");
        out += &text::table(&["", "bytes", "provenance", "how"], &[1], rows.collect());
    }
    out
}

/// Renders both ledgers of a system, a cgroup or running processes.
pub fn of_system(budget: &Budget) -> String {
    let [cpu, wall] = LedgerView::both(budget);
    let cpu = LedgerView { title: "CPU time of all tasks", ..cpu };
    ledger(&cpu) + &ledger(&LedgerView { title: "Waits of all tasks for memory", ..wall })
}

/// Renders the tax in one line. Waiting stands beside it. None if the report was written without it.
pub fn tax(budget: &Budget) -> Option<String> {
    let tax = budget.vm_tax()?;
    let percent = |share: f64| format!("{:.0}", share * 100.0);
    let why = tax.why.as_deref().unwrap_or_default();
    let taken = match (tax.value, tax.low, tax.high) {
        (Some(value), Some(low), Some(high)) => {
            let (value, low, high) = (percent(value), percent(low), percent(high));
            let bounds = match low == high {
                true => String::new(),
                false => format!(" ({low}–{high} %)"),
            };
            format!("Virtual memory takes {value} % of its CPU time{bounds}")
        }
        (Some(value), ..) => {
            format!(
                "Virtual memory takes at least {} % of its CPU time, without {why}",
                percent(value)
            )
        }
        (None, ..) => format!("The CPU time that virtual memory takes is not known: {why}"),
    };
    let waits =
        budget.waiting().filter(|share| *share >= 0.005).map_or_else(String::new, |share| {
            format!("; waiting for memory takes {} % of its elapsed time", percent(share))
        });
    Some(taken + &waits)
}

fn ledger(view: &LedgerView) -> String {
    let LedgerView { title, rows, total_ns, unexplained_ns, .. } = *view;
    let mut cells: Vec<Vec<String>> = rows.iter().map(|row| time_row(row, total_ns)).collect();
    for at in
        (1..rows.len()).filter(|at| rows[*at].how.len() > 1 && rows[*at].how == rows[at - 1].how)
    {
        cells[at][6] = DITTO.into();
    }
    cells.push(vec![
        "unexplained".into(),
        text::signed_ns(unexplained_ns),
        share(unexplained_ns as f64, total_ns),
        bar(None, u64::try_from(unexplained_ns).ok(), total_ns),
        String::new(),
        "derived".into(),
        "total less the rows above".into(),
    ]);
    let total = text::value(Unit::Ns, total_ns);
    let out = text::heading(&format!("{title} {total}"));
    let mut headings = vec!["", "time", "share", "", "low – high", "provenance", "how"];
    if text::terminal_columns().is_some_and(|columns| columns < COLUMNS_WITH_BARS) {
        headings.remove(3);
        cells.iter_mut().for_each(|row| drop(row.remove(3)));
    }
    out + &text::table(&headings, &[1, 2], cells)
}

/// Names the rows that a job's ledger lacks.
fn absent(view: &LedgerView) -> String {
    let known = view.account.causes_of_jobs();
    let absent = known.map(|cause| cause.id).filter(|id| view.rows.iter().all(|r| r.id != *id));
    let absent: Vec<_> = absent.collect();
    match absent[..] {
        [] => String::new(),
        _ => format!("  not looked at: {}\n", absent.join(", ")),
    }
}

fn time_row(row: &TimeRow, total_ns: u64) -> Vec<String> {
    vec![
        row.id.clone(),
        row.ns.map_or(MISSING.into(), |ns| text::value(Unit::Ns, ns)),
        row.ns.map_or(MISSING.into(), |ns| share(ns as f64, total_ns)),
        bar(row.low_ns, row.high_ns, total_ns),
        text::range(Unit::Ns, row.low_ns, row.high_ns),
        row.provenance.to_string(),
        row.how.clone(),
    ]
}

fn share(ns: f64, total_ns: u64) -> String {
    match total_ns {
        0 => MISSING.into(),
        total => {
            let permille = (ns / total as f64 * 1000.0).round();
            format!("{:.1} %", permille / 10.0 + 0.0) // adding 0 makes -0 a 0
        }
    }
}

/// Draws a bar, solid to the low bound and shaded to the high one. A bound beyond the total fills it.
fn bar(low_ns: Option<u64>, high_ns: Option<u64>, total_ns: u64) -> String {
    let cells = |ns: u64| match total_ns {
        0 => 0,
        total => (ns.min(total) as f64 / total as f64 * BAR_CELLS).round() as usize,
    };
    let high = high_ns.map_or(0, cells);
    let low = low_ns.map_or(0, cells).min(high);
    "█".repeat(low) + &"░".repeat(high - low)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::budget::Ledger;
    use pagetax_core::counter::Reading;

    fn budget() -> Budget {
        let mut cpu = Ledger::new(Account::Cpu, 1_000_000);
        cpu.row("compute", Reading::Measured(500_000), "getrusage");
        let walks = Reading::Derived { value: 400_000, low: 250_000, high: 750_000 };
        cpu.row("translation", walks, "trials");
        cpu.row("swap", Reading::Missing("no samples".into()), "");
        let mut wall = Ledger::new(Account::Wall, 800_000);
        wall.row("running", Reading::Measured(900_000), "schedstat");
        Budget::new(cpu, wall, Vec::new())
    }

    #[test]
    fn the_tax_is_one_line_and_waiting_stands_beside_it() {
        let with = |reclaim: Reading| {
            let mut cpu = Ledger::new(Account::Cpu, 1_000);
            let walks = Reading::Derived { value: 200, low: 140, high: 290 };
            cpu.row("translation", walks, "trials");
            for id in ["minor_fault", "zero_copy", "compaction", "swap"] {
                cpu.row(id, Reading::Measured(30), "stacks");
            }
            cpu.row("reclaim", reclaim, "");
            let mut wall = Ledger::new(Account::Wall, 1_000);
            wall.row("page_in", Reading::Measured(90), "switches");
            tax(&Budget::new(cpu, wall, Vec::new())).unwrap()
        };
        assert_eq!(
            with(Reading::Measured(0)),
            "Virtual memory takes 32 % of its CPU time (26–41 %); waiting for memory takes 9 % of \
             its elapsed time"
        );
        let part = with(Reading::Missing("no samples".into()));
        let expected = "takes at least 32 % of its CPU time, without reclaim (no samples); waiting";
        assert!(part.contains(expected), "{part}");
        let ledger = |account| Ledger::new(account, 0);
        let idle = Budget::new(ledger(Account::Cpu), ledger(Account::Wall), Vec::new());
        let line = tax(&idle).unwrap();
        assert!(line.ends_with("is not known: the job took no CPU time"), "{line}");
    }

    #[test]
    fn bars_show_the_bounds() {
        assert_eq!(bar(Some(50), Some(100), 100).chars().filter(|c| *c == '█').count(), 12);
        assert_eq!(bar(Some(50), Some(100), 100).chars().count(), 24);
        assert_eq!(bar(Some(0), Some(5), 100), "░");
        assert_eq!(bar(Some(0), Some(1), 100), "");
        assert_eq!(bar(Some(7), Some(9), 0), "");
    }

    #[test]
    fn both_ledgers_show_what_is_unexplained_and_missing() {
        let out = render(&budget());
        let line = |id: &str| out.lines().find(|l| l.trim_start().starts_with(id)).unwrap();
        assert!(line("translation").contains("250 µs – 750 µs"), "{out}");
        assert!(line("swap").contains("no samples") && line("swap").contains(MISSING), "{out}");
        assert!(!line("swap").contains('0'), "{out}");
        assert!(out.contains("-100 µs"), "a negative rest is shown: {out}");
        assert!(out.contains("not looked at: minor_fault, zero_copy"), "{out}");
    }
}
