//! `pagetax compare`: two reports beside each other, or a refusal.

use crate::output::{documents::Outputs, text};
use anyhow::{Context, Result, bail};
use pagetax_core::compare::{Comparable, Comparison, Row, compare};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax compare before.json after.json                 of `run --json` or `diagnose --json`
  for i in 1 2 3; do pagetax run vmtest --json; done > before.json
                                                         several runs give an interval
  pagetax compare --force here.json there.json           of different machines; labelled so";

/// Compare two reports of the same job on the same machine
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// The report to compare with: JSON, or a page of --html
    first: PathBuf,

    /// The report to compare; its values are divided by those of the first
    second: PathBuf,

    /// Compare even though jobs or machines differ, and say so
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    outputs: Outputs<Comparison>,
}

/// Runs `pagetax compare A.json B.json`.
pub fn run(args: Args) -> Result<ExitCode> {
    let comparison = compare(&read(&args.first)?, &read(&args.second)?);
    if !comparison.incomparable.is_empty() && !args.force {
        bail!(
            "these reports should not be compared; they differ in\n  {}\n  hint: compare reports \
             of the same job on the same machine, or add --force to have it labelled",
            comparison.incomparable.join("\n  ")
        );
    }
    args.outputs.print(&comparison, render)?;
    Ok(crate::exit::FINE.into())
}

fn read(path: &Path) -> Result<Comparable> {
    let documents = crate::report::read(path)?;
    let text: String = documents.into_iter().map(|document| document.text).collect();
    Comparable::parse(&text).with_context(|| path.display().to_string())
}

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
        None => "no interval: one run on a side".into(),
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

fn render(comparison: &Comparison) -> String {
    let mut out = String::new();
    if !comparison.incomparable.is_empty() {
        let style = anstyle::AnsiColor::Yellow.on_default().bold();
        let list = comparison.incomparable.join("\n  ");
        out += &format!("{style}forced:{style:#} these differ in\n  {list}\n");
    }
    for setting in &comparison.settings {
        out += &format!("setting differs: {setting}\n");
    }
    let headings = ["", "first", "second", "runs", "second ÷ first (95 %)", ""];
    out + &text::table(&headings, &[1, 2], comparison.rows.iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::small_run;

    #[test]
    fn forced_comparisons_are_labelled() {
        let mut other = small_run();
        other.machine.name = "sim:other".into();
        let documents = [small_run(), other].map(|run| Comparable::Runs(vec![run]));
        let text = render(&compare(&documents[0], &documents[1]));
        assert!(text.contains("forced:") && text.contains("sim:other"), "{text}");
    }

    #[test]
    fn several_equal_runs_show_no_difference() {
        let document = Comparable::Runs(vec![small_run(), small_run(), small_run()]);
        let text = render(&compare(&document, &document));
        let line = text.lines().find(|line| line.contains("wall_ns")).unwrap();
        assert!(line.contains("no difference shown") && line.contains("3, 3"), "{text}");
    }
}
