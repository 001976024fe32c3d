//! Comparisons as text and as Markdown.

use super::text;
use pagetax_core::compare::{Comparison, Comparisons, Row};

const HEADINGS: [&str; 6] = ["", "first", "second", "runs", "second ÷ first (95 %)", ""];

fn row(row: &Row) -> Vec<String> {
    let ratio = match row.ratio {
        Some(ratio) => ratio.to_string(),
        None if row.medians[0] == 0 => text::MISSING.into(),
        None => format!("{:.3}", row.medians[1] as f64 / row.medians[0] as f64),
    };
    let meaning = match row.ratio {
        _ if row.provenance[0] != row.provenance[1] => {
            format!("{} ÷ {}", row.provenance[1], row.provenance[0])
        }
        None if row.run_counts.contains(&1) => "no interval: one run on a side".into(),
        None => "no interval: a median of 0".into(),
        Some(ratio) if ratio.holds_one() => "no difference shown".into(),
        Some(ratio) if ratio.value > 1.0 => "more".into(),
        Some(_) => "less".into(),
    };
    vec![
        row.id.clone(),
        text::value(row.unit, row.medians[0]),
        text::value(row.unit, row.medians[1]),
        format!("{}, {}", row.run_counts[0], row.run_counts[1]),
        ratio,
        meaning,
    ]
}

/// Renders a table for each comparison, with its verdict below.
pub fn render(comparisons: &Comparisons) -> String {
    comparisons.comparisons.iter().map(render_one).collect::<Vec<_>>().join("\n")
}

fn render_one(comparison: &Comparison) -> String {
    let bold = anstyle::Style::new().bold();
    let [first, second] = &comparison.names;
    let mut out = format!("{bold}{second} ÷ {first}{bold:#}\n");
    for parameter in &comparison.parameters {
        out += &format!("  {parameter}\n");
    }
    if !comparison.incomparable.is_empty() {
        let style = anstyle::AnsiColor::Yellow.on_default().bold();
        let list = comparison.incomparable.join("\n  ");
        out += &format!("{style}forced:{style:#} these differ in\n  {list}\n");
    }
    for setting in &comparison.settings {
        out += &format!("setting differs: {setting}\n");
    }
    let rows = comparison.rows.iter().map(row).collect();
    out += &text::table(&HEADINGS, &[1, 2], rows);
    match &comparison.verdict {
        Some(verdict) => out + &format!("\n{bold}Verdict:{bold:#} {verdict}\n"),
        None => out,
    }
}

/// Renders comparisons as Markdown.
pub fn markdown(comparisons: &Comparisons) -> String {
    comparisons.comparisons.iter().map(markdown_of_one).collect::<Vec<_>>().join("\n")
}

fn markdown_of_one(comparison: &Comparison) -> String {
    let Comparison { names: [first, second], parameters, incomparable, settings, .. } = comparison;
    let mut out = format!("### {second} ÷ {first}\n\n");
    out += &comparison.verdict.as_ref().map_or(String::new(), |verdict| format!("{verdict}\n\n"));
    for line in parameters.iter().chain(incomparable).chain(settings) {
        out += &format!("- {line}\n");
    }
    out + "\n"
        + &text::markdown_table(&HEADINGS, &[1, 2], comparison.rows.iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::small_run;
    use pagetax_core::compare::Comparable;
    use pagetax_core::compare::compare;

    #[test]
    fn forced_comparisons_are_labelled() {
        let mut other = small_run();
        other.machine.name = "sim:other".into();
        let documents = [small_run(), other].map(|run| Comparable::Runs(vec![run]));
        let text = render_one(&compare(("a", &documents[0]), ("b", &documents[1])));
        assert!(text.contains("forced:") && text.contains("sim:other"), "{text}");
    }

    #[test]
    fn several_equal_runs_show_no_difference() {
        let document = Comparable::Runs(vec![small_run(), small_run(), small_run()]);
        let comparison = compare(("a", &document), ("b", &document));
        let text = render_one(&comparison);
        let line = text.lines().find(|line| line.contains("wall_ns")).unwrap();
        assert!(line.contains("no difference shown") && line.contains("3, 3"), "{text}");
        let markdown = markdown_of_one(&comparison);
        assert!(markdown.starts_with("### b ÷ a\n\nno difference in time is shown"), "{markdown}");
        assert!(markdown.contains("| wall_ns | "), "{markdown}");
    }
}
