//! The page of `pagetax top` as lines of text. The screen and `--once` show the same lines.

use super::columns::{Layout, SORTS};
use super::model::{TopModel, View};
use crate::output::system_stat::{COLUMNS, WAITS, causes, number};
use crate::output::text::MISSING;
use pagetax_core::counter::UnitReading;
use pagetax_core::system_stat::{SystemInterval, huge_blocks};

/// The part of the page that a line belongs to. The screen styles lines by it, and no meaning is in style
/// alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineKind {
    Summary,
    Notice,
    Headings,
    Row,
    SelectedRow,
    Keys,
}

/// A line of the page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageLine {
    pub kind: LineKind,
    pub text: String,
}

fn line(kind: LineKind, text: impl Into<String>) -> PageLine {
    PageLine { kind, text: text.into() }
}

/// The size and the characters of a page.
#[derive(Debug, Clone, Copy)]
pub struct PageShape {
    pub width: usize,
    pub height: usize,
    /// True for a terminal that shows ASCII only. The strips of heat are digits then.
    pub is_ascii: bool,
    /// True on a screen, which marks the selected row and lists the keys.
    pub is_screen: bool,
}

const KEYS: &str = "q quit  < > sort  r reverse  c cgroups  w why  d diagnose  m map  ? help";

/// Returns the lines of a page, at most as many as it is high.
pub fn lines(model: &TopModel, shape: PageShape) -> Vec<PageLine> {
    let mut lines: Vec<PageLine> =
        summary(model).into_iter().map(|text| line(LineKind::Summary, text)).collect();
    lines.extend(notices(model).into_iter().map(|text| line(LineKind::Notice, text)));
    let mark = usize::from(shape.is_screen);
    let layout = Layout::of(shape.width.saturating_sub(mark), shape.is_screen);
    let space = " ".repeat(mark);
    lines.push(line(LineKind::Headings, format!("{space}{}", layout.headings(model))));
    let room = shape.height.saturating_sub(lines.len() + mark);
    let rows = model.rows();
    let selected = model.selected_place(&rows);
    let first = (selected + 1).saturating_sub(room);
    for (place, row) in rows.iter().enumerate().skip(first).take(room) {
        let text = layout.row(model, row, shape.is_ascii);
        lines.push(match (shape.is_screen, place == selected) {
            (false, _) => line(LineKind::Row, text),
            (true, true) => line(LineKind::SelectedRow, format!(">{text}")),
            (true, false) => line(LineKind::Row, format!(" {text}")),
        });
    }
    if shape.is_screen {
        let empty = shape.height.saturating_sub(lines.len() + 1);
        lines.extend((0..empty).map(|_| line(LineKind::Row, "")));
        let keys = model.message.as_deref().unwrap_or(KEYS);
        lines.push(line(LineKind::Keys, keys));
    }
    lines
}

/// Returns the lines of the whole system.
fn summary(model: &TopModel) -> [String; 3] {
    let system = &model.top.system;
    let cell = |ns: Option<u64>| {
        ns.map_or_else(|| MISSING.into(), |ns| number(ns as f64 / 1e6 / model.seconds()))
    };
    let row = |id: &str| cell(system.budget.row(id).and_then(|row| row.ns));
    // Without stacks or prices of faults, the sum has the daemons only.
    let has_faults = system.budget.row("minor_fault").is_some_and(|row| row.ns.is_some());
    let tax = system.readings.get("vm_cpu_ns").filter(|_| has_faults);
    let bound = |of: fn(&UnitReading) -> Option<u64>| cell(tax.and_then(of));
    let list = |columns: &[(&str, &str)]| {
        let cells = columns.iter().map(|(name, id)| format!("{name} {}", row(id)));
        cells.collect::<Vec<_>>().join("  ")
    };
    let what = match &model.view {
        View::Processes => format!("{} processes", model.top.processes.len()),
        View::Cgroups => format!("{} cgroups", model.top.cgroups.len()),
        View::Members(path) => format!("processes of {path}"),
    };
    let own = system.value("own_cpu_ns").map(|ns| ns as f64 / 1e7 / model.seconds());
    let own = own.map_or_else(|| MISSING.into(), |percent| format!("{percent:.1}"));
    let first = format!(
        "VM {} ({}–{}) of {} ms/s on {} CPUs  {what}  {} s  own {own} %",
        bound(|tax| tax.value),
        bound(|tax| tax.low),
        bound(|tax| tax.high),
        cell(system.cpu_ns()),
        model.top.cpu_count,
        (model.seconds() * 10.0).round() / 10.0,
    );
    let (own_rows, daemons) = COLUMNS.split_at(7);
    let free = match system.free_blocks.len() {
        0 => MISSING.into(),
        _ => huge_blocks(&system.free_blocks).to_string(),
    };
    let daemons = format!(
        "{}  PSI {}  free 2M blocks {free}",
        list(daemons),
        cell(system.value("memory_some_ns"))
    );
    [first, format!("{}  waits: {}", list(own_rows), list(WAITS)), daemons]
}

/// Returns the culprits, and the reason why times are missing.
fn notices(model: &TopModel) -> Vec<String> {
    let system: &SystemInterval = &model.top.system;
    let mut notices: Vec<String> =
        causes(system).lines().map(|text| text.trim().to_string()).collect();
    let missing = |key: &str| model.top.missing.get(key);
    match (missing("vm_cpu_ns"), missing("wait_ns")) {
        (Some(why), _) => {
            notices.push(format!("no stacks, so VM, main and wait are missing: {why}"))
        }
        (None, Some(why)) => notices.push(format!("wait is missing: {why}")),
        (None, None) => {}
    }
    notices
}

/// Returns the help of the keys and the columns.
pub fn help() -> Vec<String> {
    let orders: Vec<&str> = SORTS.iter().map(|sort| sort.id).collect();
    let text = format!(
        "\
Keys
  Up Down j k PgUp PgDn   select a process     Esc Home   back, or the first row
  < > s                   sort by another column; a star marks it
  r                       reverse the order    c          processes or cgroups
  Enter                   the processes of the selected cgroup
  w                       pagetax why PID: why has it no huge pages?
  d                       pagetax diagnose -p PID --dry-run
  m                       pagetax pmap PID: the map of its pages
  q Ctrl-C                quit

Columns, for each second of the last interval
  VM        ms of CPU time that virtual memory takes, by the share of samples
  low–high  its bounds at 95 %          n      its samples: few are uncertain
  main      the cause with most of it   wait   ms of waits for memory
  flt maj   faults without and with I/O tabl   bytes of page tables
  walk      ms of page walks, an estimate from the pages that it touches
  VM 60 s   heat of the last minute: VM and walk, the newest at the right,
            1 or ▁ below 1 ms, 8 or █ from 1000 ms; without stacks, faults
  +name     ended in the interval       – or -  missing, which is not 0
Orders: {}
Any key goes back.",
        orders.join(" ")
    );
    text.lines().map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::{model, process};
    use super::*;

    fn shape(width: usize, height: usize) -> PageShape {
        PageShape { width, height, is_ascii: false, is_screen: true }
    }

    #[test]
    fn a_page_of_thousands_of_processes_has_the_selected_one() {
        let all = (1..3000).map(|pid| process(pid, "worker", Some(u64::from(pid)), 0)).collect();
        let mut model = model(all);
        model.select(1500);
        let lines = lines(&model, shape(80, 24));
        assert_eq!(lines.len(), 24);
        let selected: Vec<_> = lines.iter().filter(|l| l.kind == LineKind::SelectedRow).collect();
        assert_eq!(selected.len(), 1);
        assert!(selected[0].text.starts_with(">    1499"), "{selected:?}");
    }

    #[test]
    fn the_reason_for_missing_times_is_on_the_page_once() {
        let mut model = model(vec![process(1, "a", None, 5), process(2, "b", None, 6)]);
        model.top.missing.insert("vm_cpu_ns".into(), "not root".into());
        let text: String =
            lines(&model, shape(80, 24)).into_iter().map(|l| l.text + "\n").collect();
        assert_eq!(text.matches("not root").count(), 1, "{text}");
    }

    #[test]
    fn the_help_fits_a_small_terminal() {
        assert!(help().len() <= 24);
        help().iter().for_each(|line| assert!(line.chars().count() <= 80, "{line}"));
    }
}
