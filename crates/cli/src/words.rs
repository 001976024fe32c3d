//! The words of the command line, before clap parses them.
//!
//! clap takes the words after `--` as the command that a subcommand runs. Here the `--` is added where the
//! user left it out: before the first operand that can only begin a command.

use anyhow::{Result, anyhow};
use clap::{Arg, Command};
use pagetax_core::units::Nanos;
use pagetax_recorder::trace::is_trace;
use std::ffi::OsString;
use std::path::Path;

/// Returns the words of this process's command line.
pub fn words() -> Vec<OsString> {
    std::env::args_os().collect()
}

/// Returns the command line for clap: `--` stands before the command that a subcommand is to run.
///
/// # Errors
/// A file name is a word of its own after an option that takes it after `=`, as in `--json FILE`: the file
/// would become an operand, or the command. The error shows the right spelling.
pub fn prepare(mut cli: Command, mut words: Vec<OsString>) -> Result<Vec<OsString>> {
    // Gives each subcommand the global options.
    cli.build();
    let Some(at) = subcommand_at(&words) else { return Ok(words) };
    let Some(command) = cli.find_subcommand(&words[at]) else { return Ok(words) };
    if let Some(first) = first_of_command(command, &words, at + 1)?
        && command.get_positionals().any(Arg::is_last_set)
    {
        words.insert(first, "--".into());
    }
    Ok(words)
}

/// Returns the index of the subcommand in a command line: the first word that belongs to no global option.
pub fn subcommand_at(words: &[OsString]) -> Option<usize> {
    let mut is_value = false;
    words.iter().enumerate().skip(1).find_map(|(at, word)| {
        let found = !is_value && !word.to_string_lossy().starts_with('-');
        is_value = word == "--color";
        found.then_some(at)
    })
}

/// Returns the index of the word that begins the command to run, if no `--` stands before it. The words
/// before it are pagetax's own, and their spelling is checked.
fn first_of_command(command: &Command, words: &[OsString], from: usize) -> Result<Option<usize>> {
    let positionals = || command.get_positionals();
    let wraps = positionals().any(|arg| arg.is_last_set() || arg.is_trailing_var_arg_set());
    let takes_trace = positionals().any(|arg| !arg.is_last_set() && !arg.is_trailing_var_arg_set());
    let names = positionals().filter_map(Arg::get_value_names).flatten();
    let takes_interval = names.into_iter().any(|name| name.contains("INTERVAL"));
    let (mut at, mut has_trace) = (from, false);
    while let Some(word) = words.get(at).filter(|word| *word != "--") {
        let text = word.to_string_lossy();
        at += 1;
        if let Some(option) = option_of(command, &text) {
            // Its operand is a trace, of whatever name.
            has_trace |= option.arg.get_id() == "import";
            if !option.is_complete {
                check_spelling(&text, option.arg, words.get(at))?;
                at += usize::from(!option.arg.is_require_equals_set());
            }
        } else if wraps && !text.starts_with('-') {
            has_trace |= takes_trace && is_trace_name(&text);
            let is_own = has_trace || takes_interval && is_interval(&text);
            if !is_own {
                return Ok(Some(at - 1));
            }
        }
    }
    Ok(None)
}

fn is_trace_name(word: &str) -> bool {
    word.ends_with(".ptt") || is_trace(Path::new(word))
}

fn is_interval(word: &str) -> bool {
    word.parse::<f64>().is_ok() || word.parse::<Nanos>().is_ok()
}

fn check_spelling(word: &str, option: &Arg, next: Option<&OsString>) -> Result<()> {
    let next = next.map(|next| next.to_string_lossy()).filter(|next| !next.starts_with('-'));
    let file = next.filter(|file| {
        [".json", ".html", ".csv", ".md"].iter().any(|extension| file.ends_with(extension))
    });
    match file.filter(|_| option.is_require_equals_set()) {
        None => Ok(()),
        Some(file) => Err(anyhow!(
            "`{file}` is a word of its own, not the file of {word}\n  hint: write {word}={file}"
        )),
    }
}

/// An option as a word names it.
struct NamedOption<'a> {
    arg: &'a Arg,
    /// True if it takes no value, or has it in the same word.
    is_complete: bool,
}

/// Returns the option that a word names, if it names one. Of short options in one word it is the first that
/// takes a value, else the last.
fn option_of<'a>(command: &'a Command, word: &str) -> Option<NamedOption<'a>> {
    if let Some(long) = word.strip_prefix("--") {
        let (name, value) =
            long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value)));
        let arg = command.get_arguments().find(|arg| {
            arg.get_long() == Some(name)
                || arg.get_all_aliases().is_some_and(|all| all.contains(&name))
        })?;
        let is_complete = value.is_some() || !arg.get_action().takes_values();
        return Some(NamedOption { arg, is_complete });
    }
    let mut letters = word.strip_prefix('-')?.chars();
    let mut last = None;
    while let Some(letter) = letters.next() {
        let arg = command.get_arguments().find(|arg| {
            arg.get_short() == Some(letter)
                || arg.get_all_short_aliases().is_some_and(|all| all.contains(&letter))
        })?;
        let takes_values = arg.get_action().takes_values();
        last =
            Some(NamedOption { arg, is_complete: !takes_values || !letters.as_str().is_empty() });
        if takes_values {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(line: &str) -> Result<String, String> {
        let words = line.split(' ').map(OsString::from).collect();
        let prepared = prepare(crate::cli::command(), words).map_err(|error| error.to_string())?;
        Ok(prepared.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn a_command_needs_no_dashes_before_it() {
        for (line, whole) in [
            ("pagetax diagnose sort big.txt", "pagetax diagnose -- sort big.txt"),
            (
                "pagetax diagnose --json --html=a.html ls",
                "pagetax diagnose --json --html=a.html -- ls",
            ),
            (
                "pagetax -q diagnose --runs 3 --check jq --json f.json",
                "pagetax -q diagnose --runs 3 --check -- jq --json f.json",
            ),
            ("pagetax diagnose --color never ls -l", "pagetax diagnose --color never -- ls -l"),
            ("pagetax diagnose -q 4K", "pagetax diagnose -q -- 4K"),
            ("pagetax trapstat -T 0.5 10 make -j", "pagetax trapstat -T 0.5 10 -- make -j"),
            ("pagetax trapstat 500ms make", "pagetax trapstat 500ms -- make"),
            ("pagetax trapstat -fTc0-3 make", "pagetax trapstat -fTc0-3 -- make"),
            ("pagetax trapstat -fTc 0-3 make", "pagetax trapstat -fTc 0-3 -- make"),
            ("pagetax record -o app.ptt ./app in.ptt", "pagetax record -o app.ptt -- ./app in.ptt"),
            ("pagetax whatif --json ./app", "pagetax whatif --json -- ./app"),
            ("pagetax misscurve 7", "pagetax misscurve -- 7"),
        ] {
            assert_eq!(prepared(line).as_deref(), Ok(whole), "{line}");
        }
    }

    #[test]
    fn words_that_are_no_command_stay_as_they_are() {
        for line in [
            "pagetax",
            "pagetax -V",
            "pagetax diagnose",
            "pagetax diagnose --runs 3",
            "pagetax diagnose --json -- server.json",
            "pagetax diagnose -- jq --json out.json",
            "pagetax trapstat app.ptt 0.5 10",
            "pagetax trapstat app.ptt x",
            "pagetax trapstat -t 1 10",
            "pagetax trapstat -p 12 1 -- make",
            "pagetax record --import lackey mem.log -o app.ptt",
            "pagetax ppgsz -o heap=2M jq --json out.json",
            "pagetax ppgsz -o heap=2M -p 12",
            "pagetax remote --resident 4G sort big.txt",
            "pagetax run vmtest",
            "pagetax nonsense word",
        ] {
            assert_eq!(prepared(line).as_deref(), Ok(line));
        }
    }

    #[test]
    fn a_file_after_a_bare_option_is_refused_with_the_new_spelling() {
        for (line, spelling) in [
            ("pagetax run vmtest --json out.json", "write --json=out.json"),
            ("pagetax run --csv a.csv vmtest", "write --csv=a.csv"),
            ("pagetax compare --json a.json b.json", "write --json=a.json"),
            ("pagetax reproduce --markdown docs/v.md", "write --markdown=docs/v.md"),
            ("pagetax ppgsz -o heap=2M --json out.json ./server", "write --json=out.json"),
            ("pagetax -q --color never run vmtest --json out.json", "write --json=out.json"),
        ] {
            assert!(prepared(line).is_err_and(|why| why.contains(spelling)), "{line}");
        }
        for line in [
            "pagetax run vmtest --json",
            "pagetax run --json vmtest",
            "pagetax run vmtest --json=out.json",
            "pagetax compare a.json b.json --json",
            "pagetax pmap --json 1234",
            "pagetax pmap --json --diff a.json b.json",
        ] {
            assert_eq!(prepared(line).as_deref(), Ok(line));
        }
    }
}
