//! A diagnosis as text: trials, what could not be tried, the budget, warnings, and as its last line
//! the command to paste.

use super::{budget, report, text};
use pagetax_core::diagnosis::{AS_IS, BASE, Diagnosis, Skipped, Took, Trial};
use pagetax_core::stats::Ratio;
use pagetax_core::units::{Bytes, Nanos};

/// Renders the whole diagnosis.
pub fn render(diagnosis: &Diagnosis) -> String {
    let mut out = title(diagnosis);
    out += &trials(&diagnosis.trials);
    out += &skipped(&diagnosis.skipped);
    if let Some(budget) = &diagnosis.budget {
        out += &budget::render(budget);
    }
    out += &report::warnings(&diagnosis.warnings);
    out + &verdict(diagnosis)
}

fn title(diagnosis: &Diagnosis) -> String {
    let bold = anstyle::Style::new().bold();
    format!("{bold}{}{bold:#}: {}\n", diagnosis.command.join(" "), diagnosis.exit)
}

fn ratio(ratio: Option<Ratio>) -> String {
    ratio.map_or(text::MISSING.into(), |ratio| ratio.to_string())
}

fn took(took: &Took) -> String {
    match (took.bytes, took.fraction) {
        (None, _) => text::MISSING.into(),
        (Some(bytes), None) => Bytes(bytes).to_string(),
        (Some(bytes), Some(share)) => format!("{} ({:.0} %)", Bytes(bytes), share * 100.0),
    }
}

fn trials(trials: &[Trial]) -> String {
    let row = |trial: &Trial| {
        let (low, high) = (trial.runs_ns.iter().min(), trial.runs_ns.iter().max());
        let peak = trial.peak_resident_bytes;
        vec![
            trial.name.clone(),
            trial.runs_ns.len().to_string(),
            Nanos(trial.median_ns).to_string(),
            low.map(|ns| Nanos(*ns).to_string()).unwrap_or_default(),
            high.map(|ns| Nanos(*ns).to_string()).unwrap_or_default(),
            if trial.name == AS_IS { "1".into() } else { ratio(trial.speedup) },
            if trial.name == BASE { "1".into() } else { ratio(trial.speedup_over_base) },
            peak.map_or(text::MISSING.into(), |bytes| Bytes(bytes).to_string()),
            took(&trial.took),
        ]
    };
    let headings = [
        "trial",
        "runs",
        "median",
        "fastest",
        "slowest",
        "speed-up (95 %)",
        "over base (95 %)",
        "peak memory",
        "on large pages",
    ];
    let rows = trials.iter().map(row).collect();
    let mut out = text::heading("Trials") + &text::table(&headings, &[1, 2, 3, 4, 7, 8], rows);
    for trial in trials {
        if let Some(why) = &trial.took.why {
            out += &format!("  {}: {why}\n", trial.name);
        }
    }
    if trials.iter().any(|trial| trial.peak_resident_bytes.is_none()) {
        out += "  no peak memory: the runs were too short, or the machine too busy, to look often enough\n";
    }
    out
}

fn skipped(skipped: &[Skipped]) -> String {
    if skipped.is_empty() {
        return String::new();
    }
    let line = |skipped: &Skipped| {
        format!("  {}: {}\n    remedy: {}\n", skipped.name, skipped.why, skipped.remedy)
    };
    text::heading("Not tried") + &skipped.iter().map(line).collect::<String>()
}

/// Renders the reason, then the line to paste alone, so that `tail -n 1` yields it.
fn verdict(diagnosis: &Diagnosis) -> String {
    let verdict = &diagnosis.verdict;
    let heading = text::heading("Verdict");
    match &verdict.apply {
        Some(line) => format!("{heading}  {}; paste this to apply it:\n{line}\n", verdict.reason),
        None => format!("{heading}  {}\n", verdict.reason),
    }
}
