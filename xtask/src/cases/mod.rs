//! `cargo xtask cases`: the public questions of docs/cases/, asked again with real programs.
//!
//! Each page has a block with the command, its output, the versions of the programs and the machine, and, in
//! a comment, the intervals of all speed-ups. A run fails where a new interval and that of the page exclude
//! each other.

use crate::{book, packages, shell};
use anyhow::{Context, Result, bail};
use pagetax_core::diagnosis::Diagnosis;
use pagetax_core::document;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

const CASES: &str = include_str!("cases.toml");
/// The begin of the comment with the intervals.
const INTERVALS: &str = "<!-- intervals: ";

/// Asks the questions of docs/cases/ again; fails where intervals contradict those of the pages
#[derive(clap::Args)]
pub struct Args {
    /// Names of cases; none is all
    names: Vec<String>,
    /// Write the output into the pages
    #[arg(long)]
    write: bool,
}

#[derive(Deserialize)]
struct PublicQuestions {
    case: Vec<Question>,
}

/// A question, as a command.
#[derive(Deserialize)]
struct Question {
    name: String,
    packages: Vec<String>,
    /// A script that makes the files of the command.
    setup: String,
    command: String,
}

/// The interval of each speed-up, by trial and state of memory.
type Intervals = BTreeMap<String, (f64, f64)>;

/// The result of a question.
struct Answer {
    text: String,
    intervals: Intervals,
    verdict: String,
}

/// Runs the cases.
///
/// # Errors
/// Fails if a case cannot be run, or contradicts its page.
pub fn run(args: &Args) -> Result<()> {
    let all = toml::from_str::<PublicQuestions>(CASES)?.case;
    let known = || all.iter().map(|case| case.name.as_str()).collect::<Vec<_>>().join(", ");
    if let Some(name) = args.names.iter().find(|name| !all.iter().any(|case| case.name == **name)) {
        bail!("no case is called `{name}`; there are {}", known());
    }
    let root = std::env::current_dir()?;
    let mut contradicted = Vec::new();
    for case in all.iter().filter(|case| args.names.is_empty() || args.names.contains(&case.name)) {
        let block = format!("cargo xtask cases {}", case.name);
        let answer = case.ask(&root).with_context(|| case.name.clone())?;
        println!("{}: {}", case.name, answer.verdict);
        let page = book::read(&block)?.unwrap_or_default();
        let before = intervals_in(&page).unwrap_or_default();
        let lines = contradictions(&before, &answer.intervals);
        lines.iter().for_each(|line| println!("  CONTRADICTS the page: {line}"));
        if !lines.is_empty() {
            contradicted.push(case.name.clone());
            let [then, now] = [&page, &answer.text].map(|text| machine_in(text).unwrap_or("?"));
            println!("  the page: {then}\n  now: {now}");
        }
        if args.write {
            book::write(&block, &answer.text)?;
        }
    }
    match contradicted.is_empty() || args.write {
        true => Ok(()),
        false => bail!("other answers than in docs/cases: {}", contradicted.join(", ")),
    }
}

impl Question {
    fn ask(&self, root: &Path) -> Result<Answer> {
        packages::install_named(&self.packages)?;
        let folder = tempfile::tempdir()?;
        let sh = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-ec", script]).current_dir(folder.path()).stdin(Stdio::null());
            command
        };
        let setup = self.setup.replace("ROOT", &root.display().to_string());
        shell::succeed(&mut sh(&setup)).context("its files cannot be made")?;
        let json = folder.path().join("diagnosis.json");
        // It runs in another folder.
        let pagetax = root.join(shell::pagetax()?).display().to_string();
        let called = format!("'{pagetax}' diagnose --json='{}'", json.display());
        let command = self.command.trim().replacen("pagetax diagnose", &called, 1);
        let said = sh(&command).env("NO_COLOR", "1").output()?;
        let error = || String::from_utf8_lossy(&said.stderr).into_owned();
        let diagnosis: Diagnosis =
            document::from_json(&fs::read_to_string(&json).with_context(error)?)?;
        let intervals = intervals_of(&diagnosis);
        let output = String::from_utf8_lossy(&said.stdout).replace(&pagetax, "pagetax");
        let output = output.replace(&folder.path().display().to_string(), "/srv");
        let text = format!(
            "```console\n$ {}\n{}\n```\n\n{}, {}.\n\n{INTERVALS}{} -->",
            self.command.trim(),
            output.trim(),
            book::machine()?,
            self.versions()?,
            serde_json::to_string(&intervals)?
        );
        Ok(Answer { text, intervals, verdict: diagnosis.verdict.reason })
    }

    /// Returns the packages with their versions.
    fn versions(&self) -> Result<String> {
        let mut query = Command::new("dpkg-query");
        query.args(["-W", "-f", "${Package} ${Version}\n"]).args(&self.packages);
        Ok(shell::output(&mut query)?.lines().collect::<Vec<_>>().join(", "))
    }
}

fn intervals_of(diagnosis: &Diagnosis) -> Intervals {
    let fresh = diagnosis.trials.iter().map(|trial| (trial.name.clone(), trial));
    let states = diagnosis.states.iter().flat_map(|state| {
        let named = |name: &str| format!("{name} ({})", state.state.name());
        state.trials.iter().map(move |trial| (named(&trial.name), trial))
    });
    let hundredth = |value: f64| (value * 100.0).round() / 100.0;
    let interval = |(name, trial): (String, &pagetax_core::diagnosis::Trial)| {
        trial.speedup.map(|ratio| (name, (hundredth(ratio.low), hundredth(ratio.high))))
    };
    fresh.chain(states).filter_map(interval).collect()
}

/// Returns the intervals in a block of a page.
fn intervals_in(block: &str) -> Option<Intervals> {
    let json = block.split_once(INTERVALS)?.1.split_once(" -->")?.0;
    serde_json::from_str(json).ok()
}

/// Returns the line of a block that names the machine and the packages.
fn machine_in(block: &str) -> Option<&str> {
    block.split_once(INTERVALS)?.0.trim_end().lines().next_back()
}

/// Returns a line for each pair of intervals that have no value in common.
fn contradictions(before: &Intervals, now: &Intervals) -> Vec<String> {
    let pair = |(name, (low, high)): (&String, &(f64, f64))| {
        let (old_low, old_high) = before.get(name)?;
        let is_apart = low > old_high || high < old_low;
        is_apart.then(|| format!("{name} is {low} to {high}, and was {old_low} to {old_high}"))
    };
    now.iter().filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_page_with_its_block() {
        for case in toml::from_str::<PublicQuestions>(CASES).unwrap().case {
            let page = fs::read_to_string(format!("../docs/cases/{}.md", case.name)).unwrap();
            let block = format!("<!-- begin: cargo xtask cases {} -->", case.name);
            assert!(page.contains(&block), "{}", case.name);
            assert!(case.command.contains("pagetax diagnose"), "{}", case.name);
        }
    }

    #[test]
    fn intervals_contradict_if_they_have_nothing_in_common() {
        let block = r#"text <!-- intervals: {"base":[0.9,1.1],"thp-2M":[1.2,1.3]} --> more"#;
        let before = intervals_in(block).unwrap();
        assert_eq!(
            machine_in("```\n\nXeon, perl 5.\n\n<!-- intervals: {} -->"),
            Some("Xeon, perl 5.")
        );
        let of = |low, high| Intervals::from([("thp-2M".into(), (low, high))]);
        assert!(contradictions(&before, &of(1.25, 1.5)).is_empty());
        assert_eq!(contradictions(&before, &of(1.0, 1.1)).len(), 1);
        assert!(contradictions(&Intervals::new(), &of(1.0, 1.1)).is_empty(), "a first run");
    }
}
