//! The columns of `pagetax top`, and which of them a terminal has room for.

use super::model::{TopModel, TopRow};
use crate::output::system_stat::{COLUMNS, number};
use crate::output::text::MISSING;
use pagetax_core::top::TopFigures;

/// An order of the rows.
pub struct Sort {
    /// Its name on the command line.
    pub id: &'static str,
    /// The value that is sorted by, the largest first.
    pub value: fn(&TopFigures) -> Option<f64>,
}

const fn sort(id: &'static str, value: fn(&TopFigures) -> Option<f64>) -> Sort {
    Sort { id, value }
}

/// All orders, in that of the keys `<` and `>`.
pub const SORTS: &[Sort] = &[
    sort("vm", |figures| figures.vm_cpu_ns.map(|ns| ns as f64)),
    sort("cpu", |figures| figures.cpu_ns.map(|ns| ns as f64)),
    sort("walk", |figures| figures.walk_ns.map(|ns| ns as f64)),
    sort("wait", |figures| figures.wait_ns.map(|ns| ns as f64)),
    sort("minor", |figures| figures.minor_fault_count.map(|count| count as f64)),
    sort("major", |figures| figures.major_fault_count.map(|count| count as f64)),
    sort("rss", |figures| figures.resident_bytes.map(|bytes| bytes as f64)),
    sort("tables", |figures| figures.page_table_bytes.map(|bytes| bytes as f64)),
    sort("heat", |_| None),
    sort("pid", |_| None),
    sort("name", |_| None),
];

/// Returns the order among rows that are equal otherwise: by faults.
pub fn activity(row: &TopRow<'_>) -> Option<f64> {
    row.figures.minor_fault_count.map(|count| count as f64)
}

/// A column: its heading, the order that it shows, its width with the space before it, and its cell.
pub struct TopColumn {
    heading: &'static str,
    sort: &'static str,
    width: usize,
    cell: fn(&TopModel, &TopRow<'_>) -> String,
}

/// The columns of numbers that stand before the name. Those with the lowest rank stay on narrow terminals.
const NUMBERS: &[(u8, TopColumn)] = &[
    (0, TopColumn { heading: "PID", sort: "pid", width: 8, cell: pid }),
    (2, TopColumn { heading: "CPU%", sort: "cpu", width: 5, cell: cpu }),
    (1, TopColumn { heading: "VM", sort: "vm", width: 5, cell: vm }),
    (9, TopColumn { heading: "low–high", sort: "", width: 10, cell: bounds }),
    (7, TopColumn { heading: "n", sort: "", width: 4, cell: samples }),
    (4, TopColumn { heading: "main", sort: "", width: 6, cell: main_cause }),
    (9, TopColumn { heading: "walk", sort: "walk", width: 5, cell: walk }),
    (5, TopColumn { heading: "wait", sort: "wait", width: 5, cell: wait }),
    (3, TopColumn { heading: "flt/s", sort: "minor", width: 6, cell: minor }),
    (6, TopColumn { heading: "maj/s", sort: "major", width: 6, cell: major }),
    (4, TopColumn { heading: "RSS", sort: "rss", width: 6, cell: resident }),
    (4, TopColumn { heading: "tabl", sort: "tables", width: 5, cell: tables }),
];

/// The columns that fit a width.
pub struct Layout {
    numbers: Vec<&'static TopColumn>,
    heat: usize,
    name: usize,
    cgroup: usize,
}

impl Layout {
    /// Chooses the columns. A single page has no heat: it is one interval.
    pub fn of(width: usize, has_heat: bool) -> Layout {
        let (mut most, name_min) = (9, 8);
        let taken = |most: u8| {
            NUMBERS.iter().filter(|(rank, _)| *rank <= most).map(|(_, c)| c.width).sum::<usize>()
        };
        // The bounds do not take the place of heat.
        let heat_of = |most: u8| if most == 9 && has_heat { 11 } else { 0 };
        while most > 0 && taken(most) + heat_of(most) + 1 + name_min > width {
            most -= 1;
        }
        let mut left = width.saturating_sub(taken(most) + 1 + name_min);
        let mut take = |wanted: usize, least: usize| {
            let given = if left >= least { left.min(wanted) } else { 0 };
            left -= given;
            given
        };
        let heat = if has_heat { take(11, 6) } else { 0 };
        let name = name_min + take(7, 0);
        let heat = heat + if heat == 11 { take(20, 0) } else { 0 };
        let cgroup = take(40, 12);
        let numbers = NUMBERS.iter().filter(|(rank, _)| *rank <= most).map(|(_, c)| c).collect();
        Layout { numbers, heat, name, cgroup }
    }

    /// Returns the headings. A star marks the column that the rows are sorted by.
    pub fn headings(&self, model: &TopModel) -> String {
        let sort = SORTS[model.sort].id;
        let mark = |heading: &str, id: &str| match id == sort {
            true => format!("*{heading}"),
            false => heading.into(),
        };
        let numbers = self.numbers.iter().map(|column| {
            let heading =
                if column.sort == "pid" && matches!(model.view, super::model::View::Cgroups) {
                    "procs"
                } else {
                    column.heading
                };
            right(&mark(heading, column.sort), column.width)
        });
        let mut line: String = numbers.collect();
        let what = if model.has_stacks() { "VM 60 s" } else { "flt 60 s" };
        if self.heat > 0 {
            line += &format!(" {}", left(&mark(what, "heat"), self.heat - 1));
        }
        line += &format!(" {}", left(&mark("name", "name"), self.name));
        if self.cgroup > 0 {
            line += &format!(" {}", left("cgroup", self.cgroup - 1));
        }
        line
    }

    /// Returns a row.
    pub fn row(&self, model: &TopModel, row: &TopRow<'_>, is_ascii: bool) -> String {
        let cells = self.numbers.iter().map(|c| right(&(c.cell)(model, row), c.width));
        let mut line: String = cells.collect();
        if self.heat > 0 {
            let heat = model.heat(&row.key, self.heat - 1);
            let strip: String = heat.into_iter().map(|part| level(part, is_ascii, model)).collect();
            line += &format!(" {}", left(&strip, self.heat - 1));
        }
        let ended = if row.has_ended { "+" } else { "" };
        line += &format!(" {}", left(&format!("{ended}{}", printable(row.name)), self.name));
        if self.cgroup > 0 {
            line += &format!(" {}", tail(&printable(row.cgroup.unwrap_or("")), self.cgroup - 1));
        }
        line
    }
}

/// Replaces control characters, which a process may have in its name.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn left(text: &str, width: usize) -> String {
    let cut: String = text.chars().take(width).collect();
    format!("{cut:<width$}")
}

fn right(text: &str, width: usize) -> String {
    let cut: String = text.chars().take(width).collect();
    format!("{cut:>width$}")
}

/// Keeps the end of a long path, which distinguishes it most.
fn tail(text: &str, width: usize) -> String {
    let length = text.chars().count();
    let cut: String = text.chars().skip(length.saturating_sub(width)).collect();
    format!("{cut:<width$}")
}

/// The least heat of each level, in milliseconds of a second. Without stacks they are hundreds of faults.
const LEVELS: [f64; 8] = [0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0];

fn level(part: Option<Option<f64>>, is_ascii: bool, model: &TopModel) -> char {
    let value = match part {
        None => return ' ',
        Some(None) => return if is_ascii { '-' } else { '–' },
        Some(Some(value)) => value,
    };
    let value = if model.has_stacks() { value } else { value / 100.0 };
    if value <= 0.0 {
        return if is_ascii { '.' } else { '·' };
    }
    let index = LEVELS.iter().rposition(|least| value >= *least).unwrap_or(0);
    let levels = if is_ascii { "12345678" } else { "▁▂▃▄▅▆▇█" };
    levels.chars().nth(index).unwrap_or(' ')
}

/// Formats a number in 4 characters at most, if it is below 10 000 units of the largest.
fn short(value: f64, base: f64) -> String {
    let units = ["", "k", "M", "G", "T"];
    let mut value = value;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        (value, unit) = (value / base, unit + 1);
    }
    match unit {
        0 => number(value),
        _ if value < 9.95 => format!("{value:.1}{}", units[unit]),
        _ => format!("{value:.0}{}", units[unit]),
    }
}

fn cell(value: Option<f64>, text: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| MISSING.into(), text)
}

/// Formats nanoseconds of the interval as milliseconds of a second.
fn ms(model: &TopModel, ns: Option<u64>) -> String {
    cell(ns.map(|ns| ns as f64 / 1e6 / model.seconds()), |ms| match ms {
        ms if ms < 9999.5 => number(ms),
        ms => short(ms, 1000.0),
    })
}

fn rate(model: &TopModel, count: Option<u64>) -> String {
    cell(count.map(|count| count as f64 / model.seconds()), |rate| short(rate, 1000.0))
}

fn pid(_: &TopModel, row: &TopRow<'_>) -> String {
    row.pid().map_or_else(|| row.process_count.to_string(), |pid| pid.to_string())
}

fn cpu(model: &TopModel, row: &TopRow<'_>) -> String {
    cell(row.figures.cpu_ns.map(|ns| ns as f64 / 1e7 / model.seconds()), number)
}

fn vm(model: &TopModel, row: &TopRow<'_>) -> String {
    ms(model, row.figures.vm_cpu_ns)
}

fn bounds(model: &TopModel, row: &TopRow<'_>) -> String {
    match (row.figures.vm_cpu_low_ns, row.figures.vm_cpu_high_ns) {
        (None, None) => MISSING.into(),
        (low, high) => format!("{}–{}", ms(model, low), ms(model, high)),
    }
}

fn walk(model: &TopModel, row: &TopRow<'_>) -> String {
    ms(model, row.figures.walk_ns)
}

fn samples(_: &TopModel, row: &TopRow<'_>) -> String {
    match row.figures.sample_count {
        None => MISSING.into(),
        Some(count @ ..1000) => count.to_string(),
        Some(count) => short(count as f64, 1000.0),
    }
}

fn main_cause(_: &TopModel, row: &TopRow<'_>) -> String {
    match row.figures.main_cause() {
        Some((id, _)) => {
            COLUMNS.iter().find(|(_, known)| *known == id).map_or(id, |(name, _)| name).into()
        }
        None if row.figures.vm_cpu_ns.is_none() => MISSING.into(),
        None => String::new(),
    }
}

fn wait(model: &TopModel, row: &TopRow<'_>) -> String {
    ms(model, row.figures.wait_ns)
}

fn minor(model: &TopModel, row: &TopRow<'_>) -> String {
    rate(model, row.figures.minor_fault_count)
}

fn major(model: &TopModel, row: &TopRow<'_>) -> String {
    rate(model, row.figures.major_fault_count)
}

fn resident(_: &TopModel, row: &TopRow<'_>) -> String {
    cell(row.figures.resident_bytes.map(|bytes| bytes as f64), |bytes| short(bytes, 1024.0))
}

fn tables(_: &TopModel, row: &TopRow<'_>) -> String {
    cell(row.figures.page_table_bytes.map(|bytes| bytes as f64), |bytes| short(bytes, 1024.0))
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::{model, process};
    use super::*;

    #[test]
    fn each_width_is_filled_and_never_exceeded() {
        let model = model(vec![process(1_234_567, "a-long-name-of-a-process", Some(400), 123_456)]);
        for width in [30, 40, 60, 80, 100, 132, 200] {
            let layout = Layout::of(width, true);
            let rows = model.rows();
            let lines = [layout.headings(&model), layout.row(&model, &rows[0], false)];
            let lengths = lines.each_ref().map(|line| line.chars().count());
            assert!(lengths[0] == lengths[1] && lengths[0] <= width, "{width}: {lines:#?}");
        }
        assert!(Layout::of(80, true).headings(&model).contains("60 s"));
        assert!(Layout::of(120, true).headings(&model).contains("low–high"));
    }

    #[test]
    fn numbers_are_short_and_few_samples_are_visible() {
        assert_eq!(short(0.0, 1000.0), "0");
        assert_eq!(short(123_456.0, 1000.0), "123k");
        assert_eq!(short(300.0 * 1_048_576.0, 1024.0), "300M");
        let model = model(vec![process(7, "a", Some(400), 10)]);
        let row = Layout::of(80, true).row(&model, &model.rows()[0], true);
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words[..6], ["7", "25", "200", "3", "zero", "0"], "{row}");
    }

    #[test]
    fn a_missing_figure_is_never_zero() {
        let mut only = process(7, "a", None, 0);
        only.figures = Default::default();
        let model = model(vec![only]);
        let row = Layout::of(120, true).row(&model, &model.rows()[0], false);
        assert!(!row.contains('0') && row.matches(MISSING).count() >= 10, "{row}");
    }

    #[test]
    fn levels_need_no_colour() {
        let model = model(Vec::new());
        let ascii = [None, Some(None), Some(Some(0.0)), Some(Some(0.5)), Some(Some(2000.0))];
        let strip: String = ascii.into_iter().map(|part| level(part, true, &model)).collect();
        assert_eq!(strip, " -.18");
    }
}
