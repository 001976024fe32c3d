//! trapstat's listings, in the columns of the original, and what they say about the program.

use super::text;
use pagetax_core::trapstat::{Cell, Cells, Listing, Mode, TrapstatRow, size_name};
use pagetax_recorder::documents::Trapstat;
use pagetax_recorder::profile::{LineMisses, Profile, ProfileLine};

/// The sign for a number that nothing counts. Never 0.
const UNKNOWN: &str = "n/a";
/// More than this is no percentage that trapstat prints.
const PERCENT_MAX: f64 = 99.9;

/// The form of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// -t: by mode.
    Brief,
    /// -T: by page size as well.
    BySize,
    /// -P: for scripts.
    Parsable,
}

/// Renders a listing in this form.
pub fn render(listing: &Listing, form: Form) -> String {
    match form {
        Form::Brief => table(listing, &listing.by_mode(), false),
        Form::BySize => table(listing, &listing.rows, true),
        Form::Parsable => parsable(listing),
    }
}

fn table(listing: &Listing, rows: &[TrapstatRow], with_size: bool) -> String {
    let size = |text: &str| if with_size { format!(" {text:>5}") } else { String::new() };
    let mut out = format!("{} ({})\n", listing.title, listing.provenance);
    out += &format!(
        "cpu m{}| {:>9} %tim {:>9} %tim | {:>9} %tim {:>9} %tim |%tim\n",
        size("size"),
        "itlb-miss",
        "itsb-miss",
        "dtlb-miss",
        "dtsb-miss"
    );
    let rule = |c: &str| {
        let line = |n: usize| c.repeat(n);
        let plus = if c == "-" { "+" } else { c };
        let head = line(5 + size("").len());
        format!("{head}{plus}{}{plus}{}{plus}{}\n", line(31), line(31), line(4))
    };
    out += &rule("-");
    for (nth, row) in rows.iter().enumerate() {
        if with_size && nth > 0 && (rows[nth - 1].cpu, rows[nth - 1].mode) != (row.cpu, row.mode) {
            out += &rule("-");
        }
        let name = row.page_bytes.map_or(String::new(), size_name);
        out +=
            &format!("{:>3} {}{}|{}\n", row.cpu, row.mode.letter(), size(&name), cells(&row.cells));
    }
    out += &rule("=");
    out += &format!("  ttl{}|{}\n", size(""), cells(&listing.total()));
    out += &listing.notes.iter().map(|note| format!("  {note}\n")).collect::<String>();
    out
}

fn cells(cells: &Cells) -> String {
    let cell = |cell: Cell| format!(" {:>9} {}", count(cell.per_s), percent(cell.percent));
    let [itlb, itsb, dtlb, dtsb] = cells.each().map(cell);
    format!("{itlb}{itsb} |{dtlb}{dtsb} |{}", percent(cells.percent()))
}

fn count(per_s: Option<f64>) -> String {
    per_s.map_or(UNKNOWN.into(), |per_s| format!("{per_s:.0}"))
}

fn percent(percent: Option<f64>) -> String {
    percent.map_or(format!("{UNKNOWN:>4}"), |percent| format!("{:>4.1}", percent.min(PERCENT_MAX)))
}

/// Renders time, CPU, mode, page size in bytes, then each count and its time; `-` for unknown numbers.
fn parsable(listing: &Listing) -> String {
    let number = |value: Option<f64>, digits: usize| match value {
        Some(value) => format!("{value:.digits$}"),
        None => "-".into(),
    };
    let line = |row: &TrapstatRow| {
        let cells = row
            .cells
            .each()
            .map(|cell| format!(" {} {}", number(cell.per_s, 0), number(cell.percent, 1)));
        let TrapstatRow { cpu, mode, page_bytes, .. } = row;
        let (end_ns, mode) = (listing.end_ns, Mode::letter(*mode));
        format!("{end_ns} {cpu} {mode} {}{}\n", page_bytes.unwrap_or(0), cells.concat())
    };
    listing.rows.iter().map(line).collect()
}

/// Renders misses by function as folded stacks, as flame graphs read them: the configuration is the root.
pub fn folded(document: &Trapstat) -> String {
    let of = |profile: &Profile| {
        let title = frame(&profile.title);
        let line = |line: &ProfileLine| format!("{title};{} {}\n", frame(&line.name), line.misses);
        profile.functions.iter().map(line).collect::<String>()
    };
    document.profiles.iter().map(of).collect()
}

/// Returns a name as a frame of a stack, which ends at a semicolon or a line's end.
fn frame(name: &str) -> String {
    name.replace(';', ":").replace('\n', " ")
}

/// Renders the code and the memory that misses belong to.
pub fn profile(profile: &Profile) -> String {
    let mut out = String::new();
    for (heading, name, lines) in
        [("by function", "function", &profile.functions), ("by memory", "memory", &profile.memory)]
    {
        if lines.is_empty() {
            continue;
        }
        out += &text::heading(&format!("{}: misses {heading}", profile.title));
        let row = |line: &ProfileLine| {
            vec![
                text::count(line.misses),
                format!("{:.1} %", line.share * 100.0),
                format!("{:.1} %", line.time_share * 100.0),
                line.name.clone(),
            ]
        };
        out += &text::table(
            &["misses", "of all", "of the time", name],
            &[0, 1, 2],
            lines.iter().map(row).collect(),
        );
    }
    out + &source_lines(profile)
}

/// Renders the source lines that miss most, as many as there are functions.
fn source_lines(profile: &Profile) -> String {
    let of = |function: &ProfileLine| {
        let name = function.name.clone();
        function.lines.clone().into_iter().map(move |line| (line, name.clone()))
    };
    let mut lines: Vec<_> = profile.functions.iter().flat_map(of).collect();
    if lines.is_empty() {
        return String::new();
    }
    lines.sort_by_key(|(line, _)| std::cmp::Reverse(line.misses));
    lines.truncate(profile.functions.len());
    let row = |(line, function): (LineMisses, String)| {
        vec![text::count(line.misses), format!("{}:{}", line.file, line.line), function]
    };
    text::heading(&format!("{}: misses by source line", profile.title))
        + &text::table(&["misses", "line", "function"], &[0], lines.into_iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::counter::Provenance;

    fn listing() -> Listing {
        let known = |itlb, dtlb, percent| Cells {
            itlb: Cell::known(itlb, 0.0),
            itsb: Cell::known(0.0, 0.0),
            dtlb: Cell::known(dtlb, percent),
            dtsb: Cell::known(0.0, 0.0),
        };
        let row = |mode, page_bytes, cells| TrapstatRow {
            cpu: 0,
            mode,
            page_bytes: Some(page_bytes),
            cells,
        };
        Listing {
            title: "sim:a".into(),
            provenance: Provenance::Modeled,
            end_ns: 2_000_000_000,
            elapsed_ns: 1_000_000_000,
            rows: vec![
                row(Mode::User, 8192, known(30.0, 2_170_236.0, 46.1)),
                row(Mode::User, 4 << 20, known(0.0, 0.0, 0.0)),
                row(Mode::Kernel, 8192, Cells::default()),
            ],
            notes: vec!["k: n/a".into()],
        }
    }

    #[test]
    fn columns_are_those_of_the_original() {
        let text = render(&listing(), Form::BySize);
        let expected = "\
sim:a (modeled)
cpu m  size| itlb-miss %tim itsb-miss %tim | dtlb-miss %tim dtsb-miss %tim |%tim
-----------+-------------------------------+-------------------------------+----
  0 u    8k|        30  0.0         0  0.0 |   2170236 46.1         0  0.0 |46.1
  0 u    4m|         0  0.0         0  0.0 |         0  0.0         0  0.0 | 0.0
-----------+-------------------------------+-------------------------------+----
  0 k    8k|       n/a  n/a       n/a  n/a |       n/a  n/a       n/a  n/a | n/a
================================================================================
  ttl      |        30  0.0         0  0.0 |   2170236 46.1         0  0.0 |46.1
  k: n/a
";
        assert_eq!(text, expected);
        let brief = render(&listing(), Form::Brief);
        assert!(brief.contains("\n  0 u|        30  0.0 "), "{brief}");
    }

    #[test]
    fn scripts_get_numbers_and_dashes() {
        let text = render(&listing(), Form::Parsable);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "2000000000 0 u 8192 30 0.0 0 0.0 2170236 46.1 0 0.0");
        assert_eq!(lines[2], "2000000000 0 k 8192 - - - - - - - -");
    }
}
