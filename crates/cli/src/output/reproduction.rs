//! Published figures beside simulated ones, as tables for people and as Markdown.

use super::text;
use pagetax_sim::reproduce::published::Status;
use pagetax_sim::reproduce::{Compared, Reproduction, Row};

const HEADINGS: [&str; 8] =
    ["figure", "published", "simulated", "spread", "ratio", "tolerance", "verdict", "status"];

/// A table for each file, what is not reproducible, and the sum.
pub fn render(document: &Reproduction) -> String {
    let mut out = String::new();
    for table in &document.tables {
        out += &text::heading(&format!("{}: {}", table.name, table.title));
        out += &format!("  published in: {}\n", table.source);
        let rows = simulated(table).map(cells).collect();
        out += &text::table(&HEADINGS, &[1, 2, 3, 4, 5], rows);
        for line in remarks(table) {
            out += &format!("  {line}\n");
        }
    }
    out + &format!("\n{}\n", sum(document))
}

/// docs/validation.md.
pub fn markdown(document: &Reproduction) -> String {
    let mut out = String::from(
        "# Validation\n\n\
         Every published figure beside what the simulated machines say. Written by\n\
         `pagetax reproduce --markdown docs/validation.md`; do not edit.\n\n\
         *Calibrated*: a constant of the model was fitted to this figure. *Predicted*: it follows\n\
         from constants that were not. Tolerances are of the ratio of the simulated median to the\n\
         published figure; rows without one are reported, not asserted.\n\n",
    );
    out += &format!("{}\n", sum(document));
    for table in &document.tables {
        out += &format!("\n## {}\n\n", table.name);
        out += &format!("{}. Published in: {}.\n\n", table.title, table.source);
        out += &format!("| {} |\n", HEADINGS.join(" | "));
        out += "|---|---:|---:|---:|---:|---:|---|---|\n";
        for row in simulated(table) {
            out += &format!("| {} |\n", cells(row).join(" | "));
        }
        let remarks = remarks(table);
        if !remarks.is_empty() {
            out += "\n";
        }
        for line in remarks {
            out += &format!("- {line}\n");
        }
    }
    out
}

fn simulated(table: &Compared) -> impl Iterator<Item = &Row> {
    table.rows.iter().filter(|row| row.status != Status::NotReproducible)
}

/// What is not reproducible, and what is to be known about other rows.
fn remarks(table: &Compared) -> Vec<String> {
    let remark = |row: &Row| match row.status {
        Status::NotReproducible => format!("Not reproducible: {}: {}.", row.figure, row.why),
        _ => format!("{}: {}.", name(row), row.why),
    };
    table.rows.iter().filter(|row| !row.why.is_empty()).map(remark).collect()
}

fn name(row: &Row) -> String {
    let keys = row.key.iter().map(|(heading, key)| format!(" at {heading} {}", number(*key)));
    [row.figure.clone()].into_iter().chain(keys).collect()
}

fn cells(row: &Row) -> Vec<String> {
    let or_missing = |text: Option<String>| text.unwrap_or(text::MISSING.into());
    let status = match row.status {
        Status::Calibrated => "calibrated",
        Status::Predicted => "predicted",
        Status::NotReproducible => "not reproducible",
    };
    let verdict = match (row.tolerance, row.ok) {
        (_, false) => "MISS",
        (None, true) => "reported",
        (Some(_), true) => "ok",
    };
    let spread = row.simulated.map(|s| match (number(s.low), number(s.high)) {
        (low, high) if low == high => String::new(),
        (low, high) => format!("{low} – {high}"),
    });
    vec![
        name(row),
        number(row.published),
        or_missing(row.simulated.map(|spread| number(spread.median))),
        or_missing(spread),
        or_missing(row.ratio.map(|ratio| format!("{ratio:.3}"))),
        or_missing(row.tolerance.map(|[low, high]| format!("{low:.2} – {high:.2}"))),
        verdict.into(),
        status.into(),
    ]
}

/// Four digits that count.
fn number(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude >= 1000.0 || (value.fract() == 0.0 && magnitude < 1e15) {
        let sign = if value < 0.0 { "-" } else { "" };
        return format!("{sign}{}", text::count(magnitude.round() as u64));
    }
    let decimals = match magnitude {
        m if m >= 100.0 => 1,
        m if m >= 10.0 => 2,
        m if m >= 1.0 => 3,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

fn sum(document: &Reproduction) -> String {
    let rows = || document.tables.iter().flat_map(|table| &table.rows);
    let count = |wanted: &dyn Fn(&Row) -> bool| rows().filter(|row| wanted(row)).count();
    let simulated = count(&|row| row.status != Status::NotReproducible);
    let asserted = count(&|row| row.tolerance.is_some());
    let missed = count(&|row| !row.ok);
    let impossible = count(&|row| row.status == Status::NotReproducible);
    format!(
        "{simulated} figures simulated, {asserted} of them asserted, {missed} missed; \
         {impossible} not reproducible; medians of {} seeds.",
        document.seeds
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_sim::reproduce::Spread;
    use std::collections::BTreeMap;

    fn row(median: f64, status: Status) -> Row {
        let simulated = (status != Status::NotReproducible).then_some(Spread {
            median,
            low: median - 1.0,
            high: median + 1.0,
        });
        Row {
            key: BTreeMap::from([("virtual_mb".into(), 16.0)]),
            figure: "elapsed_s".into(),
            published: 25.9,
            simulated,
            ratio: Some(median / 25.9),
            tolerance: Some([0.94, 1.06]),
            ok: (0.94..=1.06).contains(&(median / 25.9)) || simulated.is_none(),
            status,
            why: if simulated.is_none() { "nobody knows".into() } else { String::new() },
        }
    }

    fn document() -> Reproduction {
        let rows = vec![
            row(26.0, Status::Calibrated),
            row(52.0, Status::Predicted),
            row(0.0, Status::NotReproducible),
        ];
        let (name, title, source) = ("name".into(), "a title".into(), "a report".into());
        let tables = vec![Compared { name, title, source, rows }];
        Reproduction { schema: 1, kind: "reproduction", seeds: 9, ok: false, tables }
    }

    #[test]
    fn a_miss_is_said_in_words() {
        let text = render(&document());
        let line = |status: &str| text.lines().find(|line| line.ends_with(status)).unwrap();
        assert!(line("calibrated").contains("  ok  "), "{text}");
        assert!(line("predicted").contains("MISS"), "{text}");
        assert!(text.contains("Not reproducible: elapsed_s: nobody knows."), "{text}");
        assert!(text.contains("2 figures simulated, 3 of them asserted, 1 missed"), "{text}");
    }

    #[test]
    fn markdown_has_a_line_a_figure() {
        let text = markdown(&document());
        let wanted = "| elapsed_s at virtual_mb 16 | 25.90 | 26 | 25 – 27 | 1.004 | 0.94 – 1.06 | \
                      ok | calibrated |";
        assert!(text.lines().any(|line| line == wanted), "{text}");
    }

    #[test]
    fn numbers_have_four_digits() {
        let numbers = [0.5, 3.4567, 25.9, 388.3, 1202899.0, -2.5].map(number);
        assert_eq!(numbers, ["0.5000", "3.457", "25.90", "388.3", "1 202 899", "-2.500"]);
    }
}
