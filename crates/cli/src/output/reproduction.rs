//! Published figures beside simulated ones, as tables for people and as Markdown.

use super::text;
use pagetax_sim::historic::reproduce::published::Status;
use pagetax_sim::historic::reproduce::{Compared, Reproduction, Row, SEEDS_MIN, Verdict};

const HEADINGS: [&str; 9] =
    ["figure", "published", "simulated", "spread", "of", "ratio", "tolerance", "verdict", "status"];

/// A ratio that a tolerance of a direction reaches, and no tolerance of a figure.
const ONE_SIDED: f64 = 5.0;

/// Renders a line for each publication, the misses with their figures, and the sum.
pub fn summary(document: &Reproduction) -> String {
    let within = |table: &Compared, wanted: &dyn Fn(Status) -> bool| {
        let rows = || table.rows.iter().filter(|row| is_asserted(row) && wanted(row.status));
        let ok = rows().filter(|row| row.verdict == Verdict::Ok).count();
        format!("{ok} of {}", rows().count())
    };
    let line = |table: &Compared| {
        vec![
            table.name.clone(),
            within(table, &|status| status == Status::Calibrated),
            within(table, &|status| status == Status::Predicted),
            within(table, &|status| status == Status::Consistency),
            table.title.split(':').next().unwrap_or_default().into(),
        ]
    };
    let headings = ["report", "fitted", "predicted", "consistency", "what it is"];
    let rows = document.tables.iter().map(line).collect();
    let mut out = String::from("Figures within their tolerance\n");
    out += &text::table(&headings, &[1, 2, 3], rows);
    out += &format!("\n{}\n", sum(document));
    out + "Tables: pagetax reproduce --full, or pagetax reproduce NAME\n"
}

/// Renders a table for each file, the figures that are not reproducible, and the sum.
pub fn render(document: &Reproduction) -> String {
    let mut out = String::new();
    for table in &document.tables {
        out += &text::heading(&format!("{}: {}", table.name, table.title));
        out += &format!("  published in: {}\n", table.source);
        let rows = simulated(table).map(cells).collect();
        out += &text::table(&HEADINGS, &[1, 2, 3, 4, 5, 6], rows);
        for note in &table.notes {
            out += &format!("  {note}\n");
        }
        for line in remarks(table) {
            out += &format!("  {line}\n");
        }
    }
    out + &format!("\n{}\n", sum(document))
}

/// Renders docs/validation.md.
pub fn markdown(document: &Reproduction) -> String {
    let mut out = String::from(
        "# Validation\n\n\
         Every published figure beside what the simulated machines say. Written by\n\
         `pagetax reproduce --markdown=docs/validation.md`; do not edit.\n\n\
         *Calibrated*: a constant of the model was fitted to this figure. *Predicted*: it follows\n\
         from constants that were not. *Consistency*: the report makes the claim in words, or the\n\
         number is this project's own; such rows are checked like the others, and counted apart.\n\
         *Derived*: arithmetic of published figures, or a number taken over from the report, which\n\
         no wrong model can miss; such rows are shown only. Tolerances are of the ratio of the\n\
         simulated median to the published figure; rows without one are reported, not asserted.\n\
         *Of* is how many values the median is of, each from a seed of its own, or from the fastest\n\
         of several seeds.\n\n",
    );
    out += &format!("{}\n", sum(document));
    for table in &document.tables {
        out += &format!("\n## {}\n\n", table.name);
        out += &format!("{}. Published in: {}.\n\n", table.title, table.source);
        for note in &table.notes {
            out += &format!("{note}\n\n");
        }
        let numeric = [1, 2, 3, 4, 5, 6];
        out += &text::markdown_table(&HEADINGS, &numeric, simulated(table).map(cells).collect());
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

fn is_asserted(row: &Row) -> bool {
    matches!(row.verdict, Verdict::Ok | Verdict::Miss)
}

fn simulated(table: &Compared) -> impl Iterator<Item = &Row> {
    table.rows.iter().filter(|row| row.status != Status::NotReproducible)
}

/// Renders the figures that are not reproducible, and remarks on other rows.
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
        Status::Consistency => "consistency",
        Status::Derived => "derived",
        Status::NotReproducible => "not reproducible",
    };
    let verdict = match row.verdict {
        Verdict::Ok => "ok",
        Verdict::Miss => "MISS",
        Verdict::Reported => "reported",
        Verdict::Derived => "not compared",
        Verdict::NotReproducible => text::MISSING,
    };
    let of = match (row.value_count, row.least_of) {
        (0, _) => text::MISSING.into(),
        (count, 1) => count.to_string(),
        (count, least_of) => format!("{count} × least of {least_of}"),
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
        of,
        or_missing(row.ratio.map(|ratio| format!("{ratio:.3}"))),
        or_missing(row.tolerance.map(tolerance)),
        verdict.into(),
        status.into(),
    ]
}

/// Formats a tolerance of a ratio. A claim of direction alone has one bound: no run reaches the other.
fn tolerance([low, high]: [f64; 2]) -> String {
    match () {
        () if low >= 0.99 && high > ONE_SIDED => format!("at least {low:.2}"),
        () if low <= 0.01 => format!("at most {high:.2}"),
        () => format!("{low:.2} – {high:.2}"),
    }
}

/// Formats a number with four significant digits.
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

/// Counts the rows of each kind, and names those that are missed.
fn sum(document: &Reproduction) -> String {
    let rows = || document.tables.iter().flat_map(|table| &table.rows);
    let count = |wanted: &dyn Fn(&Row) -> bool| rows().filter(|row| wanted(row)).count();
    let is_missed = |row: &Row| row.verdict == Verdict::Miss;
    let is_own = |row: &Row| row.status == Status::Consistency;
    let mut out = format!(
        "{} published figures asserted, {} missed; {} checks of consistency, {} missed; {} figures \
         reported only, {} derived, {} not reproducible; {} seeds.",
        count(&|row| is_asserted(row) && row.status.is_published()),
        count(&|row| is_missed(row) && !is_own(row)),
        count(&|row| is_asserted(row) && is_own(row)),
        count(&|row| is_missed(row) && is_own(row)),
        count(&|row| row.verdict == Verdict::Reported),
        count(&|row| row.status == Status::Derived),
        count(&|row| row.status == Status::NotReproducible),
        document.seeds
    );
    if !document.asserts {
        out += &format!(
            "\nNothing is asserted: the tolerances hold for medians of at least {SEEDS_MIN} seeds."
        );
    }
    for table in &document.tables {
        for row in table.rows.iter().filter(|row| is_missed(row)) {
            let simulated = row.simulated.map(|spread| number(spread.median));
            out += &format!(
                "\n- MISS in {}: {}: published {}, simulated {}.",
                table.name,
                name(row),
                number(row.published),
                simulated.unwrap_or(text::MISSING.into())
            );
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_sim::historic::reproduce::Spread;
    use std::collections::BTreeMap;

    fn row(median: f64, status: Status) -> Row {
        let simulated = (status != Status::NotReproducible).then_some(Spread {
            median,
            low: median - 1.0,
            high: median + 1.0,
        });
        let verdict = match status {
            Status::NotReproducible => Verdict::NotReproducible,
            Status::Derived => Verdict::Derived,
            _ if (0.94..=1.06).contains(&(median / 25.9)) => Verdict::Ok,
            _ => Verdict::Miss,
        };
        Row {
            key: BTreeMap::from([("virtual_mb".into(), 16.0)]),
            figure: "elapsed_s".into(),
            published: 25.9,
            simulated,
            value_count: 3,
            least_of: 3,
            ratio: Some(median / 25.9),
            tolerance: Some([0.94, 1.06]),
            ok: verdict != Verdict::Miss,
            verdict,
            status,
            why: if simulated.is_none() { "nobody knows".into() } else { String::new() },
        }
    }

    fn document() -> Reproduction {
        let rows = vec![
            row(26.0, Status::Calibrated),
            row(52.0, Status::Predicted),
            row(53.0, Status::Consistency),
            row(25.0, Status::Derived),
            row(0.0, Status::NotReproducible),
        ];
        let (name, title, source) = ("name".into(), "a title".into(), "a report".into());
        let notes = vec!["How it was done.".into()];
        let tables = vec![Compared { name, title, source, notes, rows }];
        Reproduction { seeds: 9, asserts: true, ok: false, tables }
    }

    #[test]
    fn a_miss_is_said_in_words() {
        let text = render(&document());
        let line = |status: &str| text.lines().find(|line| line.ends_with(status)).unwrap();
        assert!(line("calibrated").contains("  ok  "), "{text}");
        assert!(line("predicted").contains("MISS"), "{text}");
        assert!(line("derived").contains("not compared"), "{text}");
        assert!(text.contains("  How it was done.\n"), "{text}");
        assert!(text.contains("Not reproducible: elapsed_s: nobody knows."), "{text}");
        let sum = "2 published figures asserted, 1 missed; 1 checks of consistency, 1 missed; \
                   0 figures reported only, 1 derived, 1 not reproducible; 9 seeds.";
        assert!(text.contains(sum), "{text}");
        assert_eq!(
            text.matches(
                "- MISS in name: elapsed_s at virtual_mb 16: published 25.90, simulated 5"
            )
            .count(),
            2,
            "{text}"
        );
    }

    #[test]
    fn a_summary_counts_by_kind_and_names_what_misses() {
        let text = summary(&document());
        let line = text.lines().find(|line| line.contains("a title")).unwrap();
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>().join(" "),
            "name 1 of 1 0 of 1 0 of 1 a title"
        );
        assert_eq!(text.matches("- MISS in name: ").count(), 2, "{text}");
        assert!(!text.contains("25 – 27"), "{text}");
    }

    #[test]
    fn tolerances_of_a_direction_have_one_bound() {
        assert_eq!(tolerance([1.0, 1000.0]), "at least 1.00");
        assert_eq!(tolerance([0.0, 22.62]), "at most 22.62");
        assert_eq!(tolerance([0.94, 1.06]), "0.94 – 1.06");
    }

    #[test]
    fn too_few_seeds_to_assert_anything_are_said() {
        let few = Reproduction { seeds: 1, asserts: false, ..document() };
        assert!(render(&few).contains("Nothing is asserted: "));
        assert!(!render(&document()).contains("Nothing is asserted"));
    }

    #[test]
    fn markdown_has_a_line_a_figure() {
        let text = markdown(&document());
        let wanted = "| elapsed_s at virtual_mb 16 | 25.90 | 26 | 25 – 27 | 3 × least of 3 | 1.004 \
                      | 0.94 – 1.06 | ok | calibrated |";
        assert!(text.lines().any(|line| line == wanted), "{text}");
    }

    #[test]
    fn numbers_have_four_digits() {
        let numbers = [0.5, 3.4567, 25.9, 388.3, 1202899.0, -2.5].map(number);
        assert_eq!(numbers, ["0.5000", "3.457", "25.90", "388.3", "1 202 899", "-2.500"]);
    }
}
