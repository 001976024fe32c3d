//! The command line as a whole: which subcommands there are, and who runs them.

use crate::output::{self, Color, Messages};
use crate::{
    build, calibrate, ci, compare, diagnose, doctor, exit, explain, hatstat, jobs, machines,
    manual, misscurve, pagesize, pmap, ppgsz, record, remote, report, reproduce, run, serve,
    servers, stat, top, trapstat, whatif, why, words,
};
use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax diagnose -- sort big.txt       which page size makes sort faster, and by how much?
  pagetax ppgsz -o heap=2M ./server      start a command on large pages
  pagetax why 1234                       why does a process have no huge pages?
  pagetax trapstat -T -- ./server        which TLB misses does it take, and which code pays?
  pagetax run tlb-gather                 run a built-in job on this machine";

/// The groups of the main help. A subcommand that users should find is in exactly one.
const GROUPS: &[(&str, &[&str])] = &[
    ("Look at a program", &["diagnose", "trapstat", "whatif", "misscurve", "pmap", "why"]),
    ("Look at the system", &["stat", "top", "hatstat", "explain"]),
    ("Change it", &["ppgsz", "build", "remote"]),
    (
        "Record and replay",
        &["record", "run", "compare", "report", "ci", "jobs", "machines", "reproduce"],
    ),
    ("Memory servers", &["serve", "servers"]),
    ("Setup", &["doctor", "calibrate", "pagesize", "completions", "man"]),
];

/// Shows what virtual memory costs a program, and how to stop paying
#[derive(Debug, Parser)]
#[command(name = "pagetax", version, before_help = EXAMPLES, after_help = exit::meanings())]
pub struct Cli {
    #[command(flatten)]
    pub messages: Messages,

    #[command(subcommand)]
    pub command: Command,
}

/// Returns the whole command line. clap cannot group subcommands, so the main help has a template.
pub fn command() -> clap::Command {
    let command = Cli::command();
    let header = *clap::builder::styling::Styles::styled().get_header();
    let row = |name: &&str| {
        let about = command.find_subcommand(name).and_then(clap::Command::get_about);
        format!("  {name:<12} {}\n", about.map(ToString::to_string).unwrap_or_default())
    };
    let groups: String = GROUPS
        .iter()
        .map(|(title, names)| {
            format!("{header}{title}:{header:#}\n{}\n", names.iter().map(row).collect::<String>())
        })
        .collect();
    let template = format!(
        "{{name}}: {{about-with-newline}}\n{{before-help}}{{usage-heading}} {{usage}}\n\n{groups}\
         `pagetax help COMMAND` explains one of them. The -- before a program may be left out.\n\n{header}Options:{header:#}\n{{options}}\
         {{after-help}}"
    );
    command.help_template(template)
}

/// Parses a command line.
pub fn parse(words: Vec<OsString>) -> Result<Cli, clap::Error> {
    Cli::from_arg_matches(&command().try_get_matches_from(words)?)
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Diagnose(diagnose::Args),
    #[command(visible_alias = "apply")]
    Ppgsz(ppgsz::Args),
    Run(run::Args),
    Compare(compare::Args),
    Report(report::Args),
    Ci(ci::Args),
    Doctor(doctor::Args),
    Calibrate(calibrate::Args),
    Jobs(jobs::Args),
    Machines(machines::Args),
    Reproduce(reproduce::Args),
    Trapstat(trapstat::Args),
    Record(record::Args),
    Misscurve(misscurve::Args),
    Whatif(whatif::Args),
    Remote(remote::Args),
    Pmap(pmap::Args),
    Why(why::Args),
    Pagesize(pagesize::Args),
    Build(build::Args),
    Serve(serve::Args),
    Servers(servers::Args),
    Stat(stat::Args),
    Top(top::Args),
    Hatstat(hatstat::Args),
    Explain(explain::Args),
    Man(manual::ManArgs),
    #[command(hide = true)]
    Libraries(manual::LibrariesArgs),
    Completions(manual::CompletionsArgs),
}

impl Command {
    /// Runs the chosen subcommand.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Command::Diagnose(args) => diagnose::run(args),
            Command::Ppgsz(args) => ppgsz::run(args),
            Command::Compare(args) => compare::run(args),
            Command::Report(args) => report::run(args),
            Command::Ci(args) => ci::run(args),
            Command::Run(args) => run::run(args),
            Command::Doctor(args) => doctor::run(args),
            Command::Calibrate(args) => calibrate::run(args),
            Command::Jobs(args) => jobs::run(args),
            Command::Machines(args) => machines::run(args),
            Command::Reproduce(args) => reproduce::run(args),
            Command::Trapstat(args) => trapstat::run(args),
            Command::Record(args) => record::run(args),
            Command::Misscurve(args) => misscurve::run(args),
            Command::Whatif(args) => whatif::run(args),
            Command::Remote(args) => remote::run(args),
            Command::Pmap(args) => pmap::run(args),
            Command::Why(args) => why::run(args),
            Command::Pagesize(args) => pagesize::run(args),
            Command::Build(args) => build::run(args),
            Command::Serve(args) => serve::run(args),
            Command::Servers(args) => servers::run(args),
            Command::Stat(args) => stat::run(args),
            Command::Top(args) => top::run(args),
            Command::Hatstat(args) => hatstat::run(args),
            Command::Explain(args) => explain::run(args),
            Command::Man(args) => manual::man(args),
            Command::Libraries(args) => manual::libraries(args),
            Command::Completions(args) => manual::completions(args),
        }
    }
}

/// Returns the words of this process's command line, as clap shall read them. See [`words::prepare`].
pub fn words() -> Result<Vec<OsString>> {
    words::prepare(Cli::command(), words::words()).map_err(|error| {
        let code = if is_wrapper() { exit::WRAPPER_FAILED } else { exit::BAD_INPUT };
        exit::with(code, error)
    })
}

/// Returns the last value of `--color` in front of the subcommand, or after it.
fn color_of(words: &[OsString]) -> Option<Color> {
    let own = words.split(|word| word == "--").next()?;
    let mut values = own.iter().enumerate().filter_map(|(at, word)| {
        let value = match word.to_str()?.strip_prefix("--color")? {
            "" => own.get(at + 1)?.to_str()?,
            rest => rest.strip_prefix('=')?,
        };
        Color::from_str(value, false).ok()
    });
    values.next_back()
}

/// Returns true if the subcommand has the exit codes of programs that start others.
fn is_wrapper() -> bool {
    let words = words::words();
    let name = words::subcommand_at(&words).map(|at| &*words[at]);
    name.is_some_and(|name| ["ppgsz", "apply"].map(OsStr::new).contains(&name))
}

/// Prints what is wrong with a command line, or the help that it asked for. Wrappers of other
/// programs have an exit code of their own for it.
pub fn refuse(error: &clap::Error) -> ExitCode {
    // clap prints help, too, before it knows the other options.
    color_of(&words::words()).unwrap_or(Color::Auto).apply();
    match error.use_stderr() {
        true => output::say(&in_our_style(&error.render().ansi().to_string())),
        // With stdout gone there is nobody left to tell.
        false => drop(error.print()),
    }
    match (error.use_stderr(), is_wrapper()) {
        (false, _) => exit::FINE.into(),
        (true, false) => exit::BAD_INPUT.into(),
        (true, true) => exit::WRAPPER_FAILED.into(),
    }
}

/// Rewrites a message of clap: its tips are hints, and its general advice stands only where it has none.
fn in_our_style(message: &str) -> String {
    let own = message.find("For more information").map_or(message, |at| &message[..at]);
    let own = in_words_of_ranges(&own.trim_end().replace("tip:", "hint:"));
    if own.contains("hint:") { own } else { own + "\n\n  hint: --help explains the command line" }
}

/// Rewrites ranges that clap spells as Rust does, such as `0 is not in 1..=100`.
fn in_words_of_ranges(message: &str) -> String {
    let Some((before, range)) = message.split_once(" is not in ") else { return message.into() };
    let end = range.find(char::is_whitespace).unwrap_or(range.len());
    let (range, after) = range.split_at(end);
    match range.split_once("..") {
        Some((least, "")) => format!("{before} is less than {least}{after}"),
        Some((least, most)) => {
            format!("{before} is not from {least} to {}{after}", most.trim_start_matches('='))
        }
        None => message.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_begins_with_examples(command: &clap::Command) {
        let before = command.get_before_help().map(ToString::to_string).unwrap_or_default();
        assert!(before.starts_with("Examples:\n  pagetax "), "{}: {before}", command.get_name());
        command.get_subcommands().for_each(assert_begins_with_examples);
    }

    #[test]
    fn every_help_begins_with_examples() {
        let command = command();
        command.clone().debug_assert();
        assert_begins_with_examples(&command);
    }

    #[test]
    fn the_color_of_a_refused_command_line_is_the_last_one_in_front_of_the_command() {
        let color = |line: &str| color_of(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert_eq!(color("pagetax --color never jobs --color=always --bad"), Some(Color::Always));
        assert_eq!(color("pagetax diagnose --bad -- ls --color=never"), None);
        assert_eq!(color("pagetax --color nope jobs"), None);
    }

    #[test]
    fn ranges_are_words() {
        assert_eq!(
            in_words_of_ranges("x: 0 is not in 1..=100\n\nmore"),
            "x: 0 is not from 1 to 100\n\nmore"
        );
        assert_eq!(in_words_of_ranges("x: 0 is not in 1.."), "x: 0 is less than 1");
        assert_eq!(in_words_of_ranges("x is not in use"), "x is not in use");
    }

    #[test]
    fn each_subcommand_is_in_exactly_one_group_of_the_main_help() {
        let grouped = GROUPS.iter().flat_map(|(_, names)| names.iter().copied());
        let mut grouped: Vec<&str> = grouped.collect();
        let command = command();
        let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
        let mut visible: Vec<&str> = visible.map(clap::Command::get_name).collect();
        grouped.sort_unstable();
        visible.sort_unstable();
        assert_eq!(grouped, visible);
    }

    #[test]
    fn the_main_help_states_purpose_examples_and_groups_in_this_order() {
        let help = command().render_help().to_string();
        let places: Vec<usize> = ["pagetax: Shows what virtual", "Examples:\n", "Usage: pagetax"]
            .into_iter()
            .chain(GROUPS.iter().map(|(title, _)| *title))
            .chain(["Options:\n", "--color", "Exit codes:"])
            .map(|part| help.find(part).unwrap_or_else(|| panic!("no {part}: {help}")))
            .collect();
        assert!(places.is_sorted(), "{help}");
        let rows = help.lines().take_while(|line| *line != "Options:");
        rows.for_each(|row| assert!(row.chars().count() <= 100, "{row}"));
    }
}
