//! The one way to start a program.
//!
//! Invariants:
//! - An error names the program as the user did, by the rules of env(1).
//! - Nothing of ours runs in the child between fork and exec. Huge pages are forbidden to ourselves for the
//!   moment of the fork, because fork and exec inherit that.
//! - Counters that begin at exec (`Begin::AtExec`, `Target::NextCommand`) are opened on the thread that calls
//!   [`Launcher::spawn`], before it. The child inherits them, and exec enables them: no start needs a stop.

use super::preload::{Preload, VARIABLE};
use super::program::{Program, ProgramError, native};
use crate::sys::process::Child;
use crate::sys::remote::{Forbid, Forbidden};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// A command that is about to be started.
#[derive(Debug)]
pub struct Launcher {
    /// The arguments, the environment and the standard streams.
    pub command: Command,
    /// The huge pages that the program must not get.
    pub forbid: Option<Forbid>,
    name: String,
}

impl Launcher {
    /// Prepares a program that exec looks for along PATH.
    pub fn new(program: impl AsRef<OsStr>) -> Launcher {
        let program = program.as_ref();
        Launcher { command: Command::new(program), forbid: None, name: shown(program) }
    }

    /// Prepares a command whose program was found before.
    pub fn found(program: &Program, argv: &[OsString]) -> Launcher {
        let mut command = program.command(&argv[0]);
        command.args(&argv[1..]);
        Launcher { command, forbid: None, name: shown(&argv[0]) }
    }

    /// Preloads a library before those of our own environment.
    pub fn preload(&mut self, library: &Preload) {
        self.command.env(VARIABLE, library.before(std::env::var_os(VARIABLE).as_deref()));
    }

    /// Starts the program as a child of this process.
    pub fn spawn(mut self) -> Result<Child, ProgramError> {
        let _forbidden = self.forbidden()?;
        self.command.spawn().map(Child::from).map_err(|error| self.refused(error))
    }

    /// Becomes the program; returns only if it cannot.
    pub fn exec(mut self) -> ProgramError {
        match self.forbidden() {
            Ok(_forbidden) => {
                let error = self.command.exec();
                self.refused(error)
            }
            Err(error) => error,
        }
    }

    fn forbidden(&self) -> Result<Option<Forbidden>, ProgramError> {
        let failed = |error| ProgramError::Forbid(self.name.clone(), error);
        self.forbid.map(Forbidden::set).transpose().map_err(failed)
    }

    fn refused(&self, error: io::Error) -> ProgramError {
        match error.kind() {
            io::ErrorKind::NotFound => ProgramError::NotFound(self.name.clone()),
            _ => ProgramError::NotExecutable(self.name.clone(), self.why_not(&error)),
        }
    }

    fn why_not(&self, error: &io::Error) -> String {
        let is_format = error.raw_os_error() == Some(libc::ENOEXEC);
        let program = is_format.then(|| Program::find(self.command.get_program()).ok()).flatten();
        match program.and_then(|program| program.foreign_architecture()) {
            Some(other) => format!("it is built for {other:?}, and this machine is {:?}", native()),
            None => error.to_string(),
        }
    }
}

fn shown(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::ran_alone;
    use pagetax_core::exit::Exit;

    #[test]
    fn huge_pages_are_forbidden_to_the_child_alone() {
        if ran_alone() {
            return;
        }
        let forbidden = |forbid| {
            let mut launcher = Launcher::new("sh");
            launcher.command.args(["-c", "grep -q 'THP_enabled:.*0' /proc/self/status"]);
            launcher.forbid = forbid;
            launcher.spawn().unwrap().wait().unwrap().0
        };
        assert_eq!(forbidden(Some(Forbid::All)), Exit::Code(0));
        assert_eq!(forbidden(None), Exit::Code(1));
    }
}
