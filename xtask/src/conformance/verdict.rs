//! One run of a suite, and what differs between runs.

use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

/// The lines that a suite printed, counted, and how the run ended.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Verdicts {
    lines: BTreeMap<String, usize>,
}

/// Runs a script in an empty directory, its stderr into a log. A script that outlasts its limit has the
/// line `TIMEOUT`.
pub fn run(script: &str, limit_s: u64, locale: &str, log: &Path) -> Result<Verdicts> {
    // timeout(1) ends the whole group: servers that a script started included.
    let mut timeout = Command::new("timeout");
    timeout.args(["--kill-after=10", &limit_s.to_string(), "bash", "-c", script]);
    timeout.env("LC_ALL", locale).env_remove("LANG").env("TZ", "UTC");
    let stderr = File::create(log).with_context(|| format!("{}", log.display()))?;
    let output = timeout.stdin(Stdio::null()).stderr(stderr).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_late = matches!(output.status.code(), Some(124 | 137) | None);
    Ok(Verdicts::of(text.lines().chain(is_late.then_some("TIMEOUT"))))
}

impl Verdicts {
    fn of<'a>(lines: impl Iterator<Item = &'a str>) -> Verdicts {
        let mut counted = BTreeMap::new();
        for line in lines {
            *counted.entry(line.to_owned()).or_default() += 1;
        }
        Verdicts { lines: counted }
    }

    /// Returns the number of lines.
    pub fn count(&self) -> usize {
        self.lines.values().sum()
    }

    /// Returns true if programs succeeded: at least one `exit 0` line, and no other status.
    pub fn is_success(&self) -> bool {
        let mut exits = self.lines.keys().filter(|line| line.starts_with("exit ")).peekable();
        exits.peek().is_some() && exits.all(|line| line == "exit 0")
    }

    /// Counts lines with this verdict at their end.
    pub fn count_of(&self, verdict: &str) -> usize {
        let ends = |line: &str| line.rsplit(' ').next() == Some(verdict);
        self.lines.iter().filter(|(line, _)| ends(line)).map(|(_, count)| count).sum()
    }
}

/// Returns the lines of wrapped runs that no native run has, and those that all native runs have and no
/// wrapped one. Each difference is one line, with `+` or `-` before it.
///
/// A case that changes from run to run natively proves nothing about a wrapper, so it takes as many native
/// runs as wrapped ones to call something a difference.
pub fn differences(native: &[Verdicts], wrapped: &[Verdicts]) -> Vec<String> {
    let all = |runs: &[Verdicts]| -> BTreeSet<(String, usize)> {
        runs.iter().flat_map(|run| run.lines.clone()).collect()
    };
    let (natively, under) = (all(native), all(wrapped));
    let always =
        |line: &(String, usize)| native.iter().all(|run| run.lines.get(&line.0) == Some(&line.1));
    let added = under.difference(&natively).map(|(line, _)| format!("+ {line}"));
    let gone = natively.difference(&under).filter(|line| always(line));
    added.chain(gone.map(|(line, _)| format!("- {line}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(text: &str) -> Verdicts {
        Verdicts::of(text.lines())
    }

    #[test]
    fn a_changed_verdict_is_a_difference_and_a_flaky_one_is_not() {
        let native = [verdicts("a passed\nb passed"), verdicts("a passed\nb failure")];
        assert!(differences(&native, &[verdicts("a passed\nb failure")]).is_empty());
        let changed = differences(&native, &[verdicts("a failure\nb passed")]);
        assert_eq!(changed, ["+ a failure", "- a passed"]);
    }

    #[test]
    fn a_line_too_many_is_a_difference() {
        let changed = differences(&[verdicts("out 1")], &[verdicts("out 1\nout 1")]);
        assert_eq!(changed, ["+ out 1", "- out 1"]);
    }

    #[test]
    fn success_takes_a_program_that_ended_well_and_none_that_did_not() {
        assert!(verdicts("a passed\nexit 0").is_success());
        for text in ["a passed", "exit 0\nexit 1", "exit 127"] {
            assert!(!verdicts(text).is_success(), "{text}");
        }
    }

    #[test]
    fn a_script_that_hangs_is_ended_and_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let late = run("echo begun; sleep 600", 1, "C", &log).unwrap();
        assert_eq!(late, verdicts("begun\nTIMEOUT"));
        let status = run("echo a passed; echo chatter >&2", 60, "C", &log).unwrap();
        assert_eq!((status.count(), status.count_of("passed")), (1, 1));
    }
}
