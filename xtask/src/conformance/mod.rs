//! `cargo xtask conformance`: other people's programs and test suites, run natively and under each wrapper
//! of pagetax. Every line that differs from native runs is a failure unless `limits.txt` names it.
//!
//! Results are kept in target/conformance, one for each suite, locale and way, so that a long run can be made
//! in parts; `--write` puts all of them into docs/support.md.

mod suites;
mod table;
mod verdict;
mod ways;

use crate::at_end::AtEnd;
use crate::{packages, shell};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use suites::{SUITES, Suite};
use verdict::{Verdicts, differences};
use ways::{Servers, Way};

const FOLDER: &str = "target/conformance";
const LOCALES: [&str; 3] = ["C", "C.UTF-8", GERMAN];
const GERMAN: &str = "de_DE.UTF-8";
const LIMITS: &str = include_str!("limits.txt");
/// Runs of each way before a line that changed counts as a difference.
const RUNS: usize = 3;

/// Options of the chore.
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Suites to run; none runs all
    suites: Vec<String>,
    /// The quick suites only, in C.UTF-8: what the gate runs
    #[arg(long)]
    sample: bool,
    /// Ways to run them, beside the native one
    #[arg(long, value_delimiter = ',')]
    ways: Vec<String>,
    /// Locales to run the suites in
    #[arg(long, value_delimiter = ',')]
    locales: Vec<String>,
    /// Put all results that target/conformance holds into docs/support.md
    #[arg(long)]
    write: bool,
}

impl Args {
    /// Returns the options of the gate.
    pub fn sample() -> Args {
        Args { sample: true, ..Args::default() }
    }
}

/// A run of one suite in one locale under one wrapper, with its native run.
struct WrappedRun {
    key: String,
    entry: Value,
    unexpected: Vec<String>,
}

/// Runs the requested suites.
///
/// # Errors
/// Fails if a result differs and no limit names it.
pub fn run(args: &Args) -> Result<()> {
    let plan = Selection::of(args)?;
    packages::provide_files(plan.suites.iter().flat_map(|suite| suite.needs))?;
    shell::cargo(&["build", "--quiet", "--release", "--workspace", "--exclude", "xtask"])?;
    let bench = Workspace::set_up()?;
    if plan.locales.iter().any(|locale| locale == GERMAN) {
        bench.make_german()?;
    }
    let (mut skipped, mut unexpected) = (0, Vec::new());
    for suite in &plan.suites {
        if let Some((file, package)) =
            suite.needs.iter().find(|(file, _)| !Path::new(file).exists())
        {
            println!("SKIP: {}: {file} is not here (package {package})", suite.name);
            skipped += 1;
            continue;
        }
        for locale in plan.locales_of(suite) {
            for outcome in bench.compare(suite, locale, &plan.ways)? {
                table::keep(Path::new(FOLDER), &outcome.key, &outcome.entry)?;
                unexpected.extend(outcome.unexpected);
            }
        }
    }
    if args.write {
        table::write(Path::new(FOLDER))?;
    }
    println!("{skipped} suites skipped");
    if !unexpected.is_empty() {
        bail!("{} differences that no limit names:\n{}", unexpected.len(), unexpected.join("\n"));
    }
    Ok(())
}

/// The requested runs.
struct Selection {
    suites: Vec<&'static Suite>,
    ways: Vec<Way>,
    locales: Vec<String>,
    in_each_locale: bool,
}

impl Selection {
    fn of(args: &Args) -> Result<Selection> {
        let named = |suite: &&Suite| args.suites.iter().any(|name| name == suite.name);
        let wanted = |suite: &&Suite| match (args.suites.is_empty(), args.sample) {
            (false, _) => named(suite),
            (true, true) => suite.is_quick,
            // The whole of stress-ng's classes holds the sample of them.
            (true, false) => suite.name != "stress-ng sample",
        };
        if let Some(name) = args.suites.iter().find(|name| SUITES.iter().all(|s| s.name != **name))
        {
            let known: Vec<_> = SUITES.iter().map(|suite| suite.name).collect();
            bail!("no suite is called `{name}`; there are {}", known.join(", "));
        }
        let parse = |name: &String| {
            let way = Way::ALL.into_iter().find(|way| way.name() == *name);
            way.with_context(|| format!("no way is called `{name}`"))
        };
        let mut ways: Vec<Way> = args.ways.iter().map(parse).collect::<Result<_>>()?;
        if ways.is_empty() {
            ways = Way::ALL.to_vec();
        }
        ways.retain(|way| *way != Way::Native);
        let mut locales = args.locales.clone();
        if locales.is_empty() {
            locales =
                if args.sample { vec!["C.UTF-8".into()] } else { LOCALES.map(String::from).into() };
        }
        let in_each_locale = !args.locales.is_empty() || args.sample;
        Ok(Selection {
            suites: SUITES.iter().filter(wanted).collect(),
            ways,
            locales,
            in_each_locale,
        })
    }

    fn locales_of(&self, suite: &Suite) -> impl Iterator<Item = &str> {
        let count = if suite.has_locales || self.in_each_locale { self.locales.len() } else { 1 };
        self.locales.iter().take(count).map(String::as_str)
    }
}

/// The state that all runs share.
struct Workspace {
    pagetax: String,
    folder: PathBuf,
}

impl Workspace {
    fn set_up() -> Result<Workspace> {
        fs::create_dir_all(FOLDER)?;
        let folder = fs::canonicalize(FOLDER)?;
        let pagetax = fs::canonicalize("target/release/pagetax")?;
        fs::write(folder.join("cases.py"), include_str!("cases.py"))?;
        Ok(Workspace { pagetax: pagetax.display().to_string(), folder })
    }

    /// Compiles the locale that is neither built into the C library nor installed everywhere.
    fn make_german(&self) -> Result<()> {
        packages::provide_files([("/usr/share/i18n/locales/de_DE", "locales")].iter())?;
        let locale = self.folder.join("locales").join(GERMAN);
        if locale.exists() {
            return Ok(());
        }
        fs::create_dir_all(self.folder.join("locales"))?;
        let mut localedef = Command::new("localedef");
        shell::succeed(localedef.args(["-i", "de_DE", "-f", "UTF-8"]).arg(locale))
    }

    /// Runs a suite natively and in each of the ways that it allows.
    fn compare(&self, suite: &Suite, locale: &str, ways: &[Way]) -> Result<Vec<WrappedRun>> {
        let mut native = vec![self.natively(suite, locale)?];
        let mut outcomes = Vec::new();
        for way in ways {
            let mut wrapped = vec![self.once(suite, locale, *way)?];
            while wrapped.len() < RUNS && !differences(&native, &wrapped).is_empty() {
                if native.len() == wrapped.len() {
                    native.push(self.once(suite, locale, Way::Native)?);
                }
                wrapped.push(self.once(suite, locale, *way)?);
            }
            outcomes.push(outcome(suite, locale, *way, &native, &wrapped));
        }
        Ok(outcomes)
    }

    /// Runs a suite natively until it succeeds: a suite that fails natively proves nothing about a wrapper.
    /// Suites have time limits of their own, which a loaded machine may miss once.
    fn natively(&self, suite: &Suite, locale: &str) -> Result<Verdicts> {
        for _ in 0..RUNS {
            let verdicts = self.once(suite, locale, Way::Native)?;
            if !suite.script.contains("echo exit") || verdicts.is_success() {
                return Ok(verdicts);
            }
        }
        bail!("{} fails natively in {locale}, {RUNS} times", suite.name)
    }

    fn once(&self, suite: &Suite, locale: &str, way: Way) -> Result<Verdicts> {
        let started = Instant::now();
        let directory = tempfile::Builder::new().prefix("conformance").tempdir()?;
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777))?;
        // The same name each time, as programs print where they are.
        let at = format!("/tmp/pagetax-conformance-{}", suite.name.replace(' ', "-"));
        let _ = fs::remove_file(&at);
        std::os::unix::fs::symlink(directory.path(), &at)?;
        let servers = (way == Way::Servers).then(|| Servers::start(&self.pagetax)).transpose()?;
        let tool = way.tool(&self.pagetax, &at, servers.as_ref());
        let cases = self.folder.join("cases.py").display().to_string();
        let script = suite.script.replace("TOOL", &tool).replace("CASES", &cases);
        let locales = self.folder.join("locales").display().to_string();
        let script = format!("export LOCPATH={locales}\n{}", script.replace('@', &at));
        let _device = lend_device(suite, way)?;
        let log = format!("{}-{locale}-{}.log", suite.name.replace(' ', "-"), way.name());
        let verdicts = verdict::run(&script, suite.limit_s, locale, &self.folder.join(log));
        fs::remove_file(&at)?;
        let verdicts = verdicts?;
        let kills = servers.map(Servers::end).transpose()?.unwrap_or_default();
        let seconds = started.elapsed().as_secs_f64();
        let (name, way) = (suite.name, way.name());
        println!(
            "{name}, {locale}, {way}: {} lines in {seconds:.0} s, {kills} kills",
            verdicts.count()
        );
        Ok(verdicts)
    }
}

/// Gives PostgreSQL's user the right to the device that paging needs, for one run.
fn lend_device(suite: &Suite, way: Way) -> Result<Option<AtEnd>> {
    const DEVICE: &str = "/dev/userfaultfd";
    if suite.name != "PostgreSQL" || !matches!(way, Way::Inside | Way::Servers) {
        return Ok(None);
    }
    let before = shell::output(Command::new("stat").args(["-c", "%a %g", DEVICE]))?;
    let (mode, group) = before.trim().split_once(' ').context("stat says something else")?;
    let back = AtEnd::run(&format!("chgrp {group} {DEVICE} && chmod {mode} {DEVICE}"))?;
    shell::succeed(Command::new("chgrp").args(["postgres", DEVICE]))?;
    shell::succeed(Command::new("chmod").args(["0660", DEVICE]))?;
    Ok(Some(back))
}

fn outcome(
    suite: &Suite,
    locale: &str,
    way: Way,
    native: &[Verdicts],
    wrapped: &[Verdicts],
) -> WrappedRun {
    let differing = differences(native, wrapped);
    let limits = limits();
    let limit_of =
        |line: &str| limits.iter().find(|limit| limit.covers(way.name(), suite.name, line));
    let unexpected: Vec<&String> =
        differing.iter().filter(|line| limit_of(line).is_none()).collect();
    let reasons: BTreeSet<&str> =
        differing.iter().filter_map(|line| Some(limit_of(line)?.reason)).collect();
    let first = &native[0];
    let entry = json!({
        "suite": suite.name, "locale": locale, "way": way.name(), "lines": first.count(),
        "failed": first.count_of("failure") + first.count_of("error"),
        "skipped": first.count_of("skipped"), "runs": wrapped.len(),
        "limits": reasons, "differences": unexpected,
    });
    for line in &unexpected {
        println!("  differs: {line}");
    }
    let place = format!("{}, {locale}, {}", suite.name, way.name());
    let unexpected = unexpected.iter().map(|line| format!("{place}: {line}")).collect();
    WrappedRun { key: place, entry, unexpected }
}

/// A difference that is known and allowed.
struct Limit {
    way: &'static str,
    suite: &'static str,
    line: &'static str,
    reason: &'static str,
}

impl Limit {
    fn covers(&self, way: &str, suite: &str, line: &str) -> bool {
        let is_line = self.line == "*" || line.starts_with(self.line);
        self.way == way && (self.suite == "*" || self.suite == suite) && is_line
    }
}

fn limits() -> Vec<Limit> {
    let lines = LIMITS.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    lines
        .map(|line| {
            let parts: Vec<_> = line.splitn(4, " | ").collect();
            let [way, suite, line, reason] = parts[..] else { panic!("limits.txt: {line}") };
            Limit { way, suite, line, reason }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Most differences that the limits may name.
    const LIMITS_MAX: usize = 10;

    #[test]
    fn limits_are_few_and_name_what_there_is() {
        let limits = limits();
        assert!(limits.len() <= LIMITS_MAX);
        for limit in limits {
            assert!(Way::ALL.iter().any(|way| way.name() == limit.way));
            assert!(limit.suite == "*" || SUITES.iter().any(|suite| suite.name == limit.suite));
            assert!(limit.line == "*" || limit.line.starts_with(['+', '-']));
            assert!(!limit.reason.trim().is_empty());
        }
    }

    #[test]
    fn suites_have_names_of_their_own_and_a_program_to_wrap() {
        for (at, suite) in SUITES.iter().enumerate() {
            assert!(SUITES[..at].iter().all(|other| other.name != suite.name));
            assert!(suite.script.contains("TOOL "), "{}", suite.name);
        }
    }
}
