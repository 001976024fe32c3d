//! `cargo xtask kernels`: boots older and newer kernels of Debian in QEMU. There it runs the matrix of
//! commands as root and as a user, the tests of `why`, and those of the pager.
//!
//! A guest needs no disk, network or KVM. Its root is an archive in memory (`image`) of this machine's own
//! programs. `guest.sh` runs the checks and states their expected results. Nothing on this machine changes.

mod capture;
mod fetch;
mod idle;
mod image;
mod kswapd;
mod netem;
mod small;
mod snoop;
mod states;

pub use fetch::kernel;
pub use small::{Disk, SmallGuest};

use self::fetch::{KERNELS, KEYS, chosen, fetch};
use crate::skips::{self, Skip};
use crate::{book, packages};
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

const FOLDER: &str = "target/kernels";
/// Programs that this chore needs in addition to those of the tests.
const NEEDED: &[(&str, &str)] = &[
    ("/usr/bin/qemu-system-x86_64", "qemu-system-x86"),
    ("/usr/bin/cpio", "cpio"),
    ("/usr/bin/cc", "gcc"),
    ("/usr/bin/musl-gcc", "musl-tools"),
    ("/usr/bin/strip", "binutils"),
    ("/usr/bin/python3", "python3"),
    ("/usr/bin/sqlite3", "sqlite3"),
    (KEYS, "debian-archive-keyring"),
];
const MEMORY: &str = "2048";
/// The memory of a guest that runs [`ON_REQUEST`].
const MEMORY_OF_PROGRAMS: &str = "4096";
/// The parts of `guest.sh`: the matrix of commands, the plants of `why`, the tests of the pager, and
/// diagnoses of programs that need much memory.
const PARTS: [&str; 4] = ["commands", "why", "pager", ON_REQUEST];
/// The part that takes an hour, and runs on request only.
const ON_REQUEST: &str = "programs";
/// Parts with small guests of their own, that run on request only.
const SMALL: [&str; 6] = ["kswapd", "capture", "states", "snoop", "idle", "netem"];
/// The kernel that has all that the pager uses, as today's machines have: `cargo xtask test` runs the pager's
/// tests on such a machine. They run in this guest on request only.
const WITHOUT_PAGER: &str = "7.3";
/// The time limit of a guest in seconds. Emulated, its checks are an order of magnitude slower than on this
/// machine.
const LIMIT: u64 = 2000;
/// Boots of one guest. An emulated CPU of QEMU can miss that another CPU has replaced a temporary breakpoint
/// by the kernel's instruction again. The kernel then meets an unknown breakpoint, and panics. This happened
/// in 1 of 18 boots of Linux 6.12 with QEMU 7.2 during six busy loops.
const MOST_BOOTS: u32 = 4;
const LOST_WRITE_TO_CODE: &str = "Oops: int3";

/// Options of the chore.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kernels, such as 5.10; none is all: 5.10, 6.1, 6.12 and 7.3
    versions: Vec<String>,
    /// Run these parts only: commands, why, pager, programs, kswapd, capture, states, snoop, idle,
    /// netem. The last seven run on request only
    #[arg(long, value_name = "PART,…", value_delimiter = ',', value_parser = [PARTS.as_slice(), &SMALL].concat())]
    only: Vec<String>,
    /// Boot the programs of the last build, with the checks as they are now
    #[arg(long)]
    no_build: bool,
    /// Write the table of commands into docs/support.md. Kernels that are not booted keep their last results
    #[arg(long)]
    write: bool,
    /// Seconds after which a guest is ended that is not done
    #[arg(long, default_value_t = LIMIT)]
    limit: u64,
}

impl Default for Args {
    fn default() -> Args {
        Args { versions: Vec::new(), only: Vec::new(), no_build: false, write: false, limit: LIMIT }
    }
}

/// One line of `guest.sh`, as it came out.
#[derive(Debug, Default)]
struct Check {
    name: String,
    /// None while it has not ended.
    code: Option<i32>,
    /// The reason with which a command was refused, as was expected.
    refused: Option<String>,
    seconds: u64,
    output: Vec<String>,
}

impl Check {
    fn skips(&self) -> impl Iterator<Item = &String> {
        self.output.iter().filter(|line| line.contains("SKIP: "))
    }

    /// Returns the cell of the matrix.
    fn cell(&self) -> String {
        match (self.code, &self.refused) {
            (Some(0), None) => "works".into(),
            (Some(0), Some(reason)) => format!("refused: {reason}"),
            _ => self.word(),
        }
    }

    fn word(&self) -> String {
        let skipped = match self.skips().count() {
            0 => String::new(),
            1 => ", 1 skip".into(),
            count => format!(", {count} skips"),
        };
        match self.code {
            Some(0) => format!("ok, {} s{skipped}", self.seconds),
            Some(124 | 137) => format!("TOO LONG, {} s", self.seconds),
            Some(code) => format!("FAILED ({code}){skipped}"),
            None => "NOT OVER".into(),
        }
    }
}

/// A guest that has ended.
struct GuestRun {
    version: &'static str,
    /// The version that its kernel states.
    release: String,
    checks: Vec<Check>,
    /// The reason why its checks did not complete.
    stopped: Option<String>,
    took: Duration,
}

impl GuestRun {
    fn has_passed(&self) -> bool {
        let mut checks = self.checks.iter();
        self.stopped.is_none() && !self.checks.is_empty() && checks.all(|c| c.code == Some(0))
    }

    fn skips(&self) -> impl Iterator<Item = Skip> {
        let of_check = |check: &Check| {
            let test = format!("{} on Linux {}", check.name, self.version);
            let skip = |line: &String| Skip { test: test.clone(), reason: line.trim().into() };
            check.skips().map(skip).collect::<Vec<_>>()
        };
        self.checks.iter().flat_map(of_check)
    }
}

/// Boots each kernel; an error if any check fails, and on CI, if one was skipped.
pub fn run(args: &Args) -> Result<()> {
    let begun = Instant::now();
    if args.only.iter().any(|part| part == "capture") {
        return capture::run(&args.versions);
    }
    if args.only.iter().any(|part| part == "kswapd") {
        return kswapd::run(&args.versions, args.write);
    }
    if args.only.iter().any(|part| part == "idle") {
        return idle::run(&args.versions);
    }
    if args.only.iter().any(|part| part == "netem") {
        return netem::run(args.write);
    }
    if args.only.iter().any(|part| part == "snoop") {
        return snoop::run(args.write);
    }
    if args.only.iter().any(|part| part == "states") {
        return states::run(&args.versions, args.write);
    }
    let chosen = chosen(&args.versions)?;
    packages::provide_files(NEEDED.iter())?;
    if let Some((file, package)) = NEEDED.iter().find(|(file, _)| !Path::new(file).exists()) {
        let reason = format!("{file} is not here (package {package})");
        return skips::report(&[Skip { test: "kernels".into(), reason }]);
    }
    fs::create_dir_all(FOLDER)?;
    let (mut kernels, mut skips) = (Vec::new(), Vec::new());
    for (version, release) in chosen {
        match fetch(version, release) {
            Ok(kernel) => kernels.push((version, kernel)),
            Err(error) => {
                skips.push(Skip { test: format!("Linux {version}"), reason: format!("{error:#}") })
            }
        }
    }
    let outcomes = boot_all(&kernels, args)?;
    println!("{}", matrix(&outcomes));
    table(&outcomes);
    println!("{:.0} s in all", begun.elapsed().as_secs_f64());
    skips.extend(outcomes.iter().flat_map(GuestRun::skips));
    if !outcomes.iter().all(GuestRun::has_passed) {
        bail!("not all checks passed; see above, and {FOLDER}/*.results");
    }
    if args.write {
        book::write("cargo xtask kernels --write", &matrix(&with_earlier(outcomes)))?;
    }
    skips::report(&skips)
}

/// Guests at a time. The checks of a guest follow each other, and mostly use one CPU.
const AT_A_TIME: usize = 2;

/// Boots all guests, in the order of `kernels`. Returns their results in this order.
fn boot_all(kernels: &[(&'static str, PathBuf)], args: &Args) -> Result<Vec<GuestRun>> {
    if kernels.is_empty() {
        return Ok(Vec::new());
    }
    let folder = Path::new(FOLDER);
    let image = if args.no_build { image::again(folder)? } else { image::make(folder)? };
    println!("booting {} guests; their checks: {FOLDER}/*.results", kernels.len());
    let queue = Mutex::new(kernels.iter().enumerate());
    let next = || queue.lock().expect("no guest panics").next();
    let run = || -> Result<Vec<(usize, GuestRun)>> {
        let mut outcomes = Vec::new();
        while let Some((number, (version, kernel))) = next() {
            let outcome = boot(version, kernel, &image, args)?;
            println!("-- Linux {version}: over after {:.0} s", outcome.took.as_secs_f64());
            tell(&outcome);
            outcomes.push((number, outcome));
        }
        Ok(outcomes)
    };
    let mut outcomes = Vec::new();
    thread::scope(|scope| -> Result<()> {
        let lanes: Vec<_> = (0..AT_A_TIME).map(|_| scope.spawn(run)).collect();
        for lane in lanes {
            outcomes.extend(lane.join().expect("no guest panics")?);
        }
        Ok(())
    })?;
    outcomes.sort_by_key(|(number, _)| *number);
    Ok(outcomes.into_iter().map(|(_, outcome)| outcome).collect())
}

/// A guest; it ends with us.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        // One that has ended is not there to be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots a kernel and waits for the end of its checks; again, if the emulator's fault ended the guest.
fn boot(version: &'static str, kernel: &Path, image: &Path, args: &Args) -> Result<GuestRun> {
    let console = format!("{FOLDER}/{version}.console");
    for _ in 1..MOST_BOOTS {
        let outcome = boot_once(version, kernel, image, args)?;
        let is_emulators = outcome.stopped.is_some()
            && String::from_utf8_lossy(&fs::read(&console)?).contains(LOST_WRITE_TO_CODE);
        if !is_emulators {
            return Ok(outcome);
        }
        println!("-- Linux {version}: QEMU lost a write to the kernel's code; booting again");
    }
    boot_once(version, kernel, image, args)
}

fn boot_once(version: &'static str, kernel: &Path, image: &Path, args: &Args) -> Result<GuestRun> {
    let limit = Duration::from_secs(args.limit);
    let is_left_out =
        |part: &&str| *part == ON_REQUEST || (version == WITHOUT_PAGER && *part == "pager");
    let parts: Vec<&str> = match args.only.is_empty() {
        true => PARTS.into_iter().filter(|part| !is_left_out(part)).collect(),
        false => args.only.iter().map(String::as_str).collect(),
    };
    let memory = if parts.contains(&ON_REQUEST) { MEMORY_OF_PROGRAMS } else { MEMORY };
    let parts = parts.join(",");
    let begun = Instant::now();
    let console = format!("{FOLDER}/{version}.console");
    let results = format!("{FOLDER}/{version}.results");
    for path in [&console, &results] {
        File::create(path)?;
    }
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", memory]);
    qemu.args(["-display", "none", "-monitor", "none", "-no-reboot", "-nic", "none"]);
    qemu.args(["-serial", &format!("file:{console}"), "-serial", &format!("file:{results}")]);
    qemu.arg("-kernel").arg(kernel).arg("-initrd").arg(image);
    const APPEND: &str =
        "console=ttyS0 quiet panic=-1 transparent_hugepage=madvise mitigations=off pagetax.parts=";
    qemu.arg("-append").arg(format!("{APPEND}{parts}"));
    let mut guest = Guest(qemu.stdin(Stdio::null()).spawn().context("cannot start QEMU")?);
    let mut stopped = None;
    while guest.0.try_wait()?.is_none() {
        if begun.elapsed() > limit {
            stopped = Some(format!("ended after {} s (--limit)", limit.as_secs()));
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    drop(guest);
    let (release, checks, is_done) = results_of(version)?;
    let ended = || {
        let text = String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
        format!("the guest ended by itself; the end of {console}:\n{}", end_of(text.lines()))
    };
    let stopped = stopped.or_else(|| (!is_done).then(ended));
    Ok(GuestRun { version, release, checks, stopped, took: begun.elapsed() })
}

/// Reads the last results of a guest: the version that its kernel states, its checks, and true if it reached
/// their end.
fn results_of(version: &str) -> Result<(String, Vec<Check>, bool)> {
    let path = format!("{FOLDER}/{version}.results");
    let text = String::from_utf8_lossy(&fs::read(&path).with_context(|| path)?).into_owned();
    let release = text.lines().find_map(|line| line.strip_prefix("@@kernel "));
    let release = release.map_or(version, |release| release.trim()).to_string();
    let (checks, is_done) = checks_of(&text);
    Ok((release, checks, is_done))
}

/// Adds the last results of the kernels that were not booted, if they passed.
fn with_earlier(booted: Vec<GuestRun>) -> Vec<GuestRun> {
    let mut booted: Vec<Option<GuestRun>> = booted.into_iter().map(Some).collect();
    let run = |(version, _): (&'static str, &str)| {
        let is_it =
            |run: &&mut Option<GuestRun>| run.as_ref().is_some_and(|run| run.version == version);
        if let Some(run) = booted.iter_mut().find(is_it) {
            return run.take();
        }
        let earlier = results_of(version).ok().map(|(release, checks, is_done)| {
            let stopped = (!is_done).then(String::new);
            GuestRun { version, release, checks, stopped, took: Duration::ZERO }
        });
        let passed = earlier.filter(GuestRun::has_passed);
        if passed.is_none() {
            println!("-- Linux {version} has no column: no earlier results that passed");
        }
        passed
    };
    KERNELS.into_iter().filter_map(run).collect()
}

/// Parses the output of a guest: its checks, and true if it reached their end.
fn checks_of(text: &str) -> (Vec<Check>, bool) {
    let (mut checks, mut is_done): (Vec<Check>, bool) = (Vec::new(), false);
    for line in text.lines().map(|line| line.trim_end_matches('\r')) {
        let words: Vec<&str> = line.split(' ').collect();
        let after = |mark: &str| line.strip_prefix(mark).map(String::from);
        if let Some(name) = after("@@begin ") {
            checks.push(Check { name, ..Check::default() });
            continue;
        }
        if let (Some(reason), Some(check)) = (after("@@refused "), checks.last_mut()) {
            check.refused = Some(reason);
            continue;
        }
        match words[..] {
            ["@@end", code, seconds] => {
                if let Some(check) = checks.last_mut() {
                    check.code = code.parse().ok();
                    check.seconds = seconds.parse().unwrap_or(0);
                }
            }
            ["@@done"] => is_done = true,
            _ => checks.last_mut().into_iter().for_each(|check| check.output.push(line.into())),
        }
    }
    (checks, is_done)
}

/// Prints what failed, with the end of what it printed.
fn tell(outcome: &GuestRun) {
    let version = outcome.version;
    for check in outcome.checks.iter().filter(|check| check.code != Some(0)) {
        println!("-- Linux {version}, {}: {}", check.name, check.word());
        println!("{}", end_of(check.output.iter().map(String::as_str)));
    }
    if let Some(why) = &outcome.stopped {
        println!("-- Linux {version}: {why}");
    }
}

fn end_of<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    const LINES: usize = 40;
    let lines: Vec<String> = lines.map(|line| format!("   {line}")).collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// Returns the matrix of commands as a table: command, and root and user for each kernel.
fn matrix(outcomes: &[GuestRun]) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for (command, _) in
        outcomes.iter().flat_map(|outcome| &outcome.checks).filter_map(|check| split(&check.name))
    {
        if !rows.iter().any(|row| row[0] == command) {
            let cell = |outcome: &GuestRun, rights: &str| {
                let mut checks = outcome.checks.iter();
                let found = checks.find(|check| split(&check.name) == Some((command, rights)));
                found.map_or("not reached".into(), Check::cell)
            };
            let cells = outcomes
                .iter()
                .flat_map(|outcome| ["root", "user"].map(|rights| cell(outcome, rights)));
            rows.push(std::iter::once(command.to_string()).chain(cells).collect());
        }
    }
    let version = |outcome: &GuestRun| {
        let release = outcome.release.split(['-', '+']).next().unwrap_or_default();
        [format!("{release}, root"), format!("{release}, user")]
    };
    let headings: Vec<String> =
        std::iter::once("Command".into()).chain(outcomes.iter().flat_map(version)).collect();
    book::table(&headings.iter().map(String::as_str).collect::<Vec<_>>(), &rows)
}

/// Splits the name of a cell of the matrix into command and rights.
fn split(name: &str) -> Option<(&str, &str)> {
    name.rsplit_once('/').filter(|(_, rights)| ["root", "user"].contains(rights))
}

fn table(outcomes: &[GuestRun]) {
    let mut names: Vec<&str> = Vec::new();
    for check in outcomes.iter().flat_map(|outcome| &outcome.checks) {
        if !names.contains(&check.name.as_str()) {
            names.push(&check.name);
        }
    }
    let row = |first: &str, cells: Vec<String>| println!("| {first} | {} |", cells.join(" | "));
    row("Check", outcomes.iter().map(|outcome| format!("Linux {}", outcome.version)).collect());
    row("---", outcomes.iter().map(|_| "---".into()).collect());
    for name in names {
        let cell = |outcome: &GuestRun| {
            let found = outcome.checks.iter().find(|check| check.name == name);
            let none = if outcome.stopped.is_none() { "lacks it" } else { "NOT REACHED" };
            found.map_or(none.into(), Check::word)
        };
        row(name, outcomes.iter().map(cell).collect());
    }
    let took = |outcome: &GuestRun| format!("{:.0} s", outcome.took.as_secs_f64());
    row("in all", outcomes.iter().map(took).collect());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_stops_short_has_not_passed() {
        let text = "boot\r\n@@begin one\r\nSKIP: why\r\n@@end 0 3\r\n@@begin two\r\nhere\r\n";
        let (checks, is_done) = checks_of(text);
        let words: Vec<String> = checks.iter().map(Check::word).collect();
        assert_eq!(words, ["ok, 3 s, 1 skip", "NOT OVER"]);
        assert_eq!((is_done, &checks[1].output[..]), (false, &["here".to_string()][..]));
        let (checks, is_done) = checks_of("@@begin one\n@@end 124 60\n@@done\n");
        assert_eq!((checks[0].word(), is_done), ("TOO LONG, 60 s".into(), true));
    }

    #[test]
    fn the_matrix_has_a_row_for_each_command_and_a_column_for_each_right() {
        let text = "@@begin why -p/root\n@@end 0 1\n@@begin why -p/user\n@@refused Linux 6.1\n@@end 0 1\n\
                    @@begin pager\n@@end 0 1\n@@done\n";
        let run = GuestRun {
            version: "5.10",
            release: "5.10.3-1-cloud".into(),
            checks: checks_of(text).0,
            stopped: None,
            took: Duration::ZERO,
        };
        let expected = "| Command | 5.10.3, root | 5.10.3, user |\n|---|---|---|\n\
                        | why -p | works | refused: Linux 6.1 |\n";
        assert_eq!(matrix(&[run]), expected);
    }
}
