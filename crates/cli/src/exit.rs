//! Exit codes: 0 fine, 1 a threshold failed, 2 usage or input, 3 an unmet requirement.
//!
//! Wrappers (`diagnose`) return the child's own status as a shell would: its code, or
//! 128 + signal; 125 to 127 as env(1) does. A program that is interrupted says 128 + signal too.

use pagetax_host::launch::program::ProgramError;
use pagetax_host::measure::trial::TrialError;
use std::io;
use std::process::ExitCode;

/// All went well.
pub const FINE: u8 = 0;
/// The work was done, and its result fails a threshold or a verification.
pub const THRESHOLD_FAILED: u8 = 1;
/// The command line or an input file is wrong. clap uses the same.
pub const BAD_INPUT: u8 = 2;
/// This machine lacks something that is asked for.
pub const UNMET: u8 = 3;
/// As env(1): a wrapper failed by itself.
pub const WRAPPER_FAILED: u8 = 125;
/// As env(1): the command is there but cannot be run.
pub const NOT_EXECUTABLE: u8 = 126;
/// As env(1): the command was not found.
pub const NOT_FOUND: u8 = 127;
/// 128 + SIGINT: the user has had enough.
pub const INTERRUPTED: u8 = 128 + 2;
/// 128 + SIGPIPE: the reader of our output has closed it.
pub const CLOSED_PIPE: u8 = 128 + 13;

/// Returns the exit code of env(1) for a command that cannot be started.
pub fn of_program(error: &ProgramError) -> u8 {
    match error {
        ProgramError::NotFound(_) => NOT_FOUND,
        ProgramError::NotExecutable(..) => NOT_EXECUTABLE,
        ProgramError::Forbid(..) | ProgramError::SetId(_) => WRAPPER_FAILED,
    }
}

/// Adds the exit code of env(1) for a trial that failed.
pub fn of_trial(error: TrialError) -> anyhow::Error {
    let code = match error {
        TrialError::Program(ref error) => of_program(error),
        TrialError::Interrupted => INTERRUPTED,
        TrialError::Service(_) | TrialError::State(_) => BAD_INPUT,
        TrialError::System(..) => WRAPPER_FAILED,
    };
    with(code, error)
}

/// The exit codes and their meanings, as `--help` and docs/README.md list them.
const MEANINGS: &[(&str, &str)] = &[
    ("0", "all went well; after a program that pagetax ran, its own status stands here"),
    ("1", "a threshold or a verification failed, or an undo left something as it was"),
    ("2", "the command line or an input is wrong, or there is no such process"),
    ("3", "this machine lacks what was asked for, or you may not use it"),
    ("125", "pagetax failed before it ran the program; from ppgsz, any mistake, as on Solaris"),
    ("126", "the program is there, but cannot be run"),
    ("127", "the program was not found"),
    ("128+N", "signal N ended the program or pagetax: 130 after Ctrl-C, 141 for a closed pipe"),
];

/// Lists the exit codes for `--help`. Those of pmap count processes, as on Solaris.
pub fn meanings() -> String {
    let row = |(code, meaning): &(&str, &str)| format!("\n  {code:<6} {meaning}");
    let rows: String = MEANINGS.iter().map(row).collect();
    format!("Exit codes:{rows}\npmap returns the number of processes that it could not show.")
}

/// An error that ends the process with this code rather than with [`BAD_INPUT`].
#[derive(Debug)]
pub struct WithCode {
    code: u8,
    source: anyhow::Error,
}

/// Adds the exit code that an error calls for.
pub fn with(code: u8, error: impl Into<anyhow::Error>) -> anyhow::Error {
    WithCode { code, source: error.into() }.into()
}

impl std::fmt::Display for WithCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.source.fmt(f)
    }
}

impl std::error::Error for WithCode {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.source()
    }
}

/// Returns the exit code of the process for an error.
pub fn code_of(error: &anyhow::Error) -> ExitCode {
    error.downcast_ref::<WithCode>().map_or(BAD_INPUT, |with| with.code).into()
}

/// Returns true if the reader of our output went away, which is no failure of ours.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn the_table_of_the_docs_is_this_one() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/README.md");
        let page = std::fs::read_to_string(page).unwrap();
        let rows: Vec<_> =
            page.lines().skip_while(|line| *line != "| Exit code | Meaning |").collect();
        let expected = MEANINGS.iter().map(|(code, meaning)| format!("| {code} | {meaning} |"));
        assert_eq!(rows[2..2 + MEANINGS.len()], expected.collect::<Vec<_>>());
        for code in
            [FINE, THRESHOLD_FAILED, BAD_INPUT, UNMET, WRAPPER_FAILED, NOT_EXECUTABLE, NOT_FOUND]
        {
            assert!(MEANINGS.iter().any(|(known, _)| *known == code.to_string()), "{code}");
        }
    }

    #[test]
    fn errors_carry_their_code_through_context() {
        let unmet = with(UNMET, anyhow!("no hugetlb pool").context("cannot run"));
        assert_eq!(code_of(&unmet), ExitCode::from(UNMET));
        assert_eq!(format!("{unmet:#}"), "cannot run: no hugetlb pool");
        assert_eq!(code_of(&unmet.context("job `a`")), ExitCode::from(UNMET));
        assert_eq!(code_of(&anyhow!("what?")), ExitCode::from(BAD_INPUT));
    }

    #[test]
    fn a_closed_pipe_is_found_below_context() {
        let broken = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_closed_pipe(&anyhow::Error::from(broken).context("cannot print")));
        assert!(!is_closed_pipe(&anyhow!("what?")));
    }
}
