//! The words of all tables: quantities with their unit, readings with their provenance.

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, Width, presets};
use pagetax_core::counter::{Unit, UnitReading};
use pagetax_core::units::{Bytes, Nanos};

/// The sign for a missing number. Never 0.
pub const MISSING: &str = "–";

/// Text is not wrapped into less.
const LAST_COLUMN_MIN: u16 = 14;

/// Formats a number in its unit: `1.44 µs`, `408M`, `65 536`.
pub fn value(unit: Unit, value: u64) -> String {
    match unit {
        Unit::Ns => Nanos(value).to_string(),
        Unit::Bytes => Bytes(value).to_string(),
        Unit::Count => count(value),
    }
}

/// Formats digits in groups of three. A space separates them: comma and point differ between countries.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(" ")
}

/// Formats the reading's number, or [`MISSING`].
pub fn reading(reading: &UnitReading) -> String {
    reading.value.map_or(MISSING.into(), |v| value(reading.unit, v))
}

/// Formats `low – high`, if they differ.
pub fn range(unit: Unit, low: Option<u64>, high: Option<u64>) -> String {
    match (low, high) {
        (Some(low), Some(high)) if low != high => {
            format!("{} – {}", value(unit, low), value(unit, high))
        }
        _ => String::new(),
    }
}

/// Formats a difference of times, with its sign.
pub fn signed_ns(ns: i64) -> String {
    let sign = if ns < 0 { "-" } else { "" };
    format!("{sign}{}", Nanos(ns.unsigned_abs()))
}

/// Renders an indented table without lines. Columns of numbers are right-aligned. If a terminal is too
/// narrow, text in the last column goes on in the next line.
pub fn table(headings: &[&str], numeric: &[usize], rows: Vec<Vec<String>>) -> String {
    table_within(terminal_columns(), headings, numeric, rows)
}

/// Renders a table of Markdown. Columns of numbers are right-aligned.
pub fn markdown_table(headings: &[&str], numeric: &[usize], rows: Vec<Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let rule = |column| if numeric.contains(&column) { "---:" } else { "---" };
    let rules: Vec<&str> = (0..headings.len()).map(rule).collect();
    let escaped = |cell: &String| cell.replace('|', "\\|").replace('\n', " ");
    let rows = rows.iter().map(|row| line(&row.iter().map(escaped).collect::<Vec<_>>()));
    format!("| {} |\n|{}|\n{}", headings.join(" | "), rules.join("|"), rows.collect::<String>())
}

/// Returns the width of the terminal that the output goes to, if there is one.
pub fn terminal_columns() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    let size = size.or_else(|_| rustix::termios::tcgetwinsize(std::io::stderr()));
    size.ok().map(|size| size.ws_col).filter(|columns| *columns > 0)
}

fn table_within(
    columns: Option<u16>,
    headings: &[&str],
    numeric: &[usize],
    rows: Vec<Vec<String>>,
) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    if headings.iter().any(|heading| !heading.is_empty()) {
        table.set_header(headings.to_vec());
    }
    table.add_rows(rows);
    if let Some(room) = columns.and_then(|columns| room_of_last(&table, columns)) {
        let constraint = ColumnConstraint::UpperBoundary(Width::Fixed(room));
        table.set_content_arrangement(ContentArrangement::Dynamic);
        // Wide enough for all others as they are.
        table.set_width(u16::MAX);
        table.column_iter_mut().last().map(|column| column.set_constraint(constraint));
    }
    for column in numeric {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines = table.lines().map(|line| format!(" {}\n", line.trim_end()));
    lines.collect()
}

/// Returns the width of the last column beside all others, with its padding; none if that is too little.
fn room_of_last(table: &Table, columns: u16) -> Option<u16> {
    let widths = table.column_max_content_widths();
    let (_, others) = widths.split_last()?;
    // Two for the padding of each column, and our indent.
    let taken: u16 = others.iter().map(|width| width + 2).sum::<u16>() + 1;
    columns.checked_sub(taken).filter(|room| *room >= LAST_COLUMN_MIN)
}

/// Renders a section's heading.
pub fn heading(text: &str) -> String {
    let bold = anstyle::Style::new().bold();
    format!("\n{bold}{text}{bold:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::counter::Reading;

    #[test]
    fn numbers_are_grouped_and_have_units() {
        assert_eq!(count(0), "0");
        assert_eq!(count(1_234_567), "1 234 567");
        assert_eq!(value(Unit::Bytes, 2 << 20), "2M");
        assert_eq!(signed_ns(-1_440), "-1.44 µs");
    }

    #[test]
    fn missing_never_looks_like_zero() {
        let missing = UnitReading::new(Unit::Ns, Reading::Missing("no PMU".into()));
        assert_eq!(reading(&missing), MISSING);
    }

    #[test]
    fn tables_align_numbers_to_the_right() {
        let rows = vec![vec!["a".into(), "1".into()], vec!["b".into(), "100".into()]];
        let text = table_within(None, &["id", "value"], &[1], rows);
        assert_eq!(text, "  id  value\n  a       1\n  b     100\n");
    }

    #[test]
    fn a_terminal_is_not_left_on_the_right() {
        let what = "a machine whose description needs more than one line. ".repeat(3);
        let row = ["sim:machine", "12", &what].map(String::from);
        let lines = |columns| {
            let text = table_within(columns, &["name", "n", "what"], &[1], vec![row.to_vec()]);
            text.lines().map(|line| line.chars().count()).collect::<Vec<_>>()
        };
        assert_eq!(lines(None).len(), 2);
        let narrow = lines(Some(80));
        assert!(narrow.len() > 3 && narrow.iter().all(|width| *width <= 80), "{narrow:?}");
        assert_eq!(lines(Some(20)).len(), 2, "too narrow for columns");
    }
}
