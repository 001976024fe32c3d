//! Skipped tests: a test that cannot run here prints `SKIP: reason` and returns. This module counts them;
//! `xtask/expected-skips.txt` lists those that CI may have.
//!
//! Invariant: on CI, a skip that is not listed is a failure, so no test disappears unnoticed.

use anyhow::{Result, bail};

const EXPECTED: &str = include_str!("../expected-skips.txt");

/// A test that did not run, with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skip {
    /// The test's name in libtest's output, or the name of another check.
    pub test: String,
    /// The reason: the missing requirement.
    pub reason: String,
}

/// A parser of libtest's output with `--show-output --report-time`.
#[derive(Default)]
pub struct Scanner {
    test: String,
    muted: bool,
    /// The skips that were found so far.
    pub skips: Vec<Skip>,
    /// The passed tests in the order of their ends, with their times in seconds.
    pub took: Vec<(f64, String)>,
}

impl Scanner {
    /// Takes a line of output. Returns true if people should see it.
    pub fn line(&mut self, line: &str) -> bool {
        if let Some(test) = line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" stdout ----"))
        {
            self.test = test.into();
        }
        if let Some((_, reason)) = line.split_once("SKIP: ") {
            self.skips.push(Skip { test: self.test.clone(), reason: reason.trim().into() });
        }
        match line {
            // The output of passing tests matters only for its skips.
            "successes:" => self.muted = true,
            "failures:" => self.muted = false,
            line if line.starts_with("test result:") => self.muted = false,
            _ => {}
        }
        let passed = passed(line);
        let is_shown = !self.muted && !line.trim().is_empty() && passed.is_none();
        self.took.extend(passed);
        is_shown
    }

    /// Removes and returns the slowest tests, the slowest first.
    pub fn slowest(&mut self, count: usize) -> Vec<(f64, String)> {
        self.took.sort_by(|a, b| b.0.total_cmp(&a.0));
        self.took.drain(..).take(count).collect()
    }
}

/// Parses `test NAME ... ok <1.234s>`.
fn passed(line: &str) -> Option<(f64, String)> {
    let (name, time) = line.strip_prefix("test ")?.split_once(" ... ok")?;
    let seconds = time.trim().strip_prefix('<').and_then(|time| time.strip_suffix("s>"));
    Some((seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(0.0), name.into()))
}

/// Prints all skips with their count. On CI, fails if one of them is not expected.
pub fn report(skips: &[Skip]) -> Result<()> {
    let expected = expected();
    let unexpected: Vec<_> =
        skips.iter().filter(|skip| !expected.contains(&skip.test.as_str())).collect();
    println!("\n{} skipped, {} of them unexpected on CI", skips.len(), unexpected.len());
    for skip in skips {
        let mark = if unexpected.contains(&skip) { "unexpected" } else { "expected" };
        println!("  {mark:<10}  {}: {}", skip.test, skip.reason);
    }
    if !unexpected.is_empty() && std::env::var_os("CI").is_some() {
        bail!("tests were skipped that CI should run; fix CI or xtask/expected-skips.txt");
    }
    Ok(())
}

/// Returns the names of tests, one on each line. A comment after `#` gives the reason.
fn expected() -> Vec<&'static str> {
    let names = EXPECTED.lines().map(|line| line.split('#').next().unwrap_or("").trim());
    names.filter(|name| !name.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
running 2 tests
test pmu::counts ... ok <0.125s>
test quick ... ok <0.001s>
test broken ... FAILED

successes:

---- pmu::counts stdout ----
some chatter
SKIP: no PMU here

failures:

---- broken stdout ----
assertion failed
test result: FAILED. 1 passed; 1 failed";

    #[test]
    fn skips_are_found_and_chatter_is_not_shown() {
        let mut scanner = Scanner::default();
        let shown: Vec<&str> = OUTPUT.lines().filter(|line| scanner.line(line)).collect();
        let skip = Skip { test: "pmu::counts".into(), reason: "no PMU here".into() };
        assert_eq!(scanner.skips, [skip]);
        assert!(shown.contains(&"assertion failed"));
        assert!(shown.contains(&"test broken ... FAILED"));
        assert!(!shown.contains(&"some chatter") && shown.iter().all(|line| !line.contains(" ok")));
        assert_eq!(scanner.slowest(1), [(0.125, "pmu::counts".into())]);
    }
}
