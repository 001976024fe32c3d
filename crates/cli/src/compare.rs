//! `pagetax compare`: reports beside each other, or a refusal.

use crate::exit;
use crate::output::{self, documents::Outputs, text};
use anyhow::{Context, Result, bail};
use pagetax_core::compare::{Comparable, Comparison, Comparisons, Row, compare};
use pagetax_core::threshold::{Judgement, RangeThreshold};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax compare before.json after.json                 of `run --json` or `diagnose --json`
  for i in 1 2 3; do pagetax run vmtest --json; done > before.json
                                                         several runs give an interval
  pagetax compare 4K.json 64K.json 2M.json --html=sizes.html
                                                         each of the others with the first
  pagetax compare old.json new.json --fail-if 'wall_ns>1.05'
                                                         exit code 1 when it is surely 5 % slower";

/// Compare reports of the same job on the same machine
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// The report to compare with: JSON, or a page of --html
    first: PathBuf,

    /// The reports to compare; their values are divided by those of the first
    #[arg(required = true, value_name = "OTHER")]
    others: Vec<PathBuf>,

    /// Compare even though jobs or machines differ, and say so
    #[arg(long)]
    force: bool,

    /// Exit with 1 when this holds for a ratio and its whole interval, as in 'wall_ns>1.05'; may be given
    /// several times
    #[arg(long, value_name = "EXPR")]
    fail_if: Vec<RangeThreshold>,

    #[command(flatten)]
    outputs: Outputs<Comparisons>,
}

/// Runs `pagetax compare A.json B.json…`.
pub fn run(args: Args) -> Result<ExitCode> {
    let name = |path: &PathBuf| path.display().to_string();
    let (name_of_first, first) = (name(&args.first), read(&args.first)?);
    let compared =
        |path: &PathBuf| Ok(compare((&name_of_first, &first), (&name(path), &read(path)?)));
    let comparisons = args.others.iter().map(compared).collect::<Result<Vec<_>>>()?;
    let comparisons = Comparisons { comparisons };
    let refused = |one: &&Comparison| !one.incomparable.is_empty() && !args.force;
    if let Some(one) = comparisons.comparisons.iter().find(refused) {
        bail!(
            "{} and {} should not be compared; they differ in\n  {}\n  hint: compare reports \
             of the same job on the same machine, or add --force to have it labelled",
            one.names[0],
            one.names[1],
            one.incomparable.join("\n  ")
        );
    }
    args.outputs.print(&comparisons, render)?;
    Ok(judge(&comparisons, &args.fail_if))
}

fn read(path: &Path) -> Result<Comparable> {
    let documents = crate::report::read(path)?;
    let text: String = documents.into_iter().map(|document| document.text).collect();
    Comparable::parse(&text).with_context(|| path.display().to_string())
}

/// Judges all comparisons; a failed threshold outweighs one that could not be judged.
fn judge(comparisons: &Comparisons, thresholds: &[RangeThreshold]) -> ExitCode {
    let mut code = exit::FINE;
    let of = |one| thresholds.iter().map(move |threshold| (one, threshold));
    for (one, threshold) in comparisons.comparisons.iter().flat_map(of) {
        match one.judge(threshold) {
            Judgement::Passed => {}
            Judgement::Failed(why) => {
                output::say(&format!("threshold failed for {}: {why}", one.names[1]));
                code = exit::THRESHOLD_FAILED;
            }
            Judgement::NotJudged(why) => {
                output::note(&format!("threshold not judged for {}: {why}", one.names[1]));
                code = if code == exit::FINE { exit::UNMET } else { code };
            }
        }
    }
    code.into()
}

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

fn render(comparisons: &Comparisons) -> String {
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
