//! FigureValues: what can be asked of the report of one run, as a number.
//!
//! Invariant: a figure is read from the report that any `pagetax run` would give; reproduction has no
//! other way into a simulation.

use pagetax_core::cause::Account;
use pagetax_core::report::{Latency, ReportPhase, Run};

/// A figure as written: a name, and words in parentheses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Figure {
    /// One of the names in [`Figure::of`], or a counter's id.
    pub name: String,
    /// Phases, columns and numbers.
    pub args: Vec<String>,
}

impl std::fmt::Display for Figure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.args.as_slice() {
            [] => f.write_str(&self.name),
            args => write!(f, "{}({})", self.name, args.join(", ")),
        }
    }
}

impl Figure {
    /// Returns its value in the report of a run; `ended_early` is false if the run came to its end.
    ///
    /// - `wall_s`, or of a phase `wall_s(PHASE)`; `start_s(PHASE)`, `end_s(PHASE)`
    /// - any counter's id: its value, or in a phase, as in `page_out_count(verify)`
    /// - `latency_us(KIND, min|mean|p50|p99|max)`
    /// - `rate(COLUMN, PHASE, FROM, TO)`: per second, from FROM to TO seconds after the phase begins
    /// - `mean(COLUMN, PHASE, FROM, TO)`: of the points of the series in this window
    /// - `settled_s(COLUMN, PHASE, RATE, SHARE)`: seconds into the phase after which five points of
    ///   the series together never leave RATE by more than SHARE
    /// - `first_s(COLUMN)`: when the column is first above 0
    /// - `cell(TABLE, ROW, COLUMN)`: of a table in an old tool's words; ROW is the text of cells that
    ///   follow each other in the row (`0 u 8k`), COLUMN its heading, of equal ones the last
    /// - `cpu_ns(ROW)`: a row of the budget of CPU time, as in `cpu_ns(reclaim)`
    /// - `ended_early`: 1 or 0
    ///
    /// # Errors
    /// What the report lacks.
    pub fn of(&self, run: &Run, ended_early: bool) -> Result<f64, String> {
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        match (self.name.as_str(), args.as_slice()) {
            ("ended_early", []) => Ok(f64::from(u8::from(ended_early))),
            ("wall_s", []) => Ok(seconds(run.wall_ns)),
            ("wall_s", [name]) => phase(run, name).map(|p| seconds(p.end_ns - p.start_ns)),
            ("start_s", [name]) => phase(run, name).map(|p| seconds(p.start_ns)),
            ("end_s", [name]) => phase(run, name).map(|p| seconds(p.end_ns)),
            ("latency_us", [kind, which]) => latency_us(run, kind, which),
            ("rate", [column, name, from, to]) => {
                let points = window(run, column, phase(run, name)?, number(from)?, number(to)?)?;
                Ok(mean(&points)? / seconds(run.series.interval_ns))
            }
            ("mean", [column, name, from, to]) => {
                mean(&window(run, column, phase(run, name)?, number(from)?, number(to)?)?)
            }
            ("settled_s", [column, name, rate, share]) => {
                settled_s(run, column, phase(run, name)?, number(rate)?, number(share)?)
            }
            ("first_s", [column]) => {
                let mut points = series(run, column)?.into_iter();
                let first = points.find(|(_, value)| *value > 0.0);
                first.map(|(time, _)| time).ok_or_else(|| format!("{column} is never above 0"))
            }
            ("cpu_ns", [row]) => cpu_ns(run, row),
            ("cell", [table, row, column]) => cell(run, table, row, column),
            (id, []) => counter(&run.counters, id),
            (id, [name]) => counter(&phase(run, name)?.counters, id),
            _ => Err("is no figure, or has the wrong number of words in parentheses".into()),
        }
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| format!("`{text}` is no number"))
}

fn mean(values: &[f64]) -> Result<f64, String> {
    match values {
        [] => Err("the series has no point in this window".into()),
        values => Ok(values.iter().sum::<f64>() / values.len() as f64),
    }
}

fn phase<'a>(run: &'a Run, name: &str) -> Result<&'a ReportPhase, String> {
    let phase = run.phases.iter().find(|phase| phase.name == name);
    phase.ok_or_else(|| format!("the run has no phase `{name}`, or did not end it"))
}

fn counter(counters: &pagetax_core::counter::Counters, id: &str) -> Result<f64, String> {
    let value = counters.get(id).and_then(|reading| reading.value);
    value.map(|value| value as f64).ok_or_else(|| format!("the machine does not count {id}"))
}

fn cpu_ns(run: &Run, id: &str) -> Result<f64, String> {
    let rows = run.budget.as_ref().map_or(&[][..], |budget| budget.rows(Account::Cpu));
    let ns = rows.iter().find(|row| row.id == id).and_then(|row| row.ns);
    ns.map(|ns| ns as f64).ok_or_else(|| format!("the budget of CPU time has no row {id}"))
}

fn latency_us(run: &Run, kind: &str, which: &str) -> Result<f64, String> {
    let latency = run.latency.get(kind).ok_or_else(|| format!("no latency of {kind} was seen"))?;
    let Latency { min_ns, mean_ns, p50_ns, p99_ns, max_ns, .. } = latency;
    let known =
        [("min", min_ns), ("mean", mean_ns), ("p50", p50_ns), ("p99", p99_ns), ("max", max_ns)];
    let found = known.iter().find(|(name, _)| *name == which);
    found.map(|(_, ns)| **ns as f64 / 1e3).ok_or_else(|| format!("`{which}` is no such statistic"))
}

/// Returns the time in seconds at the end of each interval, and the column's value; absent is 0.
fn series(run: &Run, column: &str) -> Result<Vec<(f64, f64)>, String> {
    let columns = &run.series.columns;
    let times = columns.get("time_ns").ok_or("the run has no series; give it an interval")?;
    let values = columns.get(column).ok_or_else(|| format!("the series has no {column}"))?;
    let point = |(time, value): (&Option<u64>, &Option<u64>)| {
        (seconds(time.unwrap_or(0)), value.unwrap_or(0) as f64)
    };
    Ok(times.iter().zip(values).map(point).collect())
}

/// Returns the points whose intervals lie wholly in a window of a phase.
fn window(
    run: &Run,
    column: &str,
    phase: &ReportPhase,
    from: f64,
    to: f64,
) -> Result<Vec<f64>, String> {
    let start = seconds(phase.start_ns) + from + seconds(run.series.interval_ns);
    let end = (seconds(phase.start_ns) + to).min(seconds(phase.end_ns));
    let points = series(run, column)?.into_iter();
    Ok(points.filter(|(time, _)| (start..=end).contains(time)).map(|(_, value)| value).collect())
}

fn settled_s(
    run: &Run,
    column: &str,
    phase: &ReportPhase,
    rate: f64,
    share: f64,
) -> Result<f64, String> {
    const POINTS: usize = 5;
    let interval = seconds(run.series.interval_ns);
    let rates = window(run, column, phase, 0.0, f64::INFINITY)?;
    let is_off = |points: &[f64]| {
        let mean = points.iter().sum::<f64>() / points.len() as f64 / interval;
        (mean / rate - 1.0).abs() > share
    };
    match rates.windows(POINTS).rposition(is_off) {
        None => Ok(0.0),
        Some(last) if last + POINTS == rates.len() => Err(format!("{column} does not settle")),
        Some(last) => Ok((last + 1 + POINTS / 2) as f64 * interval),
    }
}

fn cell(run: &Run, title: &str, row: &str, column: &str) -> Result<f64, String> {
    let table = run.tables.iter().find(|table| table.title == title);
    let table = table.ok_or_else(|| format!("the report has no table `{title}`"))?;
    let index = table.columns.iter().rposition(|heading| heading == column);
    let index = index.ok_or_else(|| format!("table `{title}` has no column `{column}`"))?;
    let has_row =
        |cells: &&Vec<String>| format!(" {} ", cells.join(" ")).contains(&format!(" {row} "));
    let cells = table.rows.iter().find(has_row);
    let cells = cells.ok_or_else(|| format!("table `{title}` has no row `{row}`"))?;
    let text = cells.get(index).map_or("", String::as_str);
    let digits: String =
        text.chars().take_while(|c| c.is_ascii_digit() || matches!(c, '.' | '-' | ',')).collect();
    number(&digits.replace(',', ""))
}
