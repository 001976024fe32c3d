//! What kind of program it is that shall be recorded, before an engine stumbles over it.

use object::{Architecture, FileKind, Object};
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Why a program cannot be recorded.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// As env(1): status 127.
    #[error("`{0}` was not found; check the spelling and PATH")]
    NotFound(String),
    /// As env(1): status 126.
    #[error("`{0}` cannot be run: {1}; check that it is a program and has the execute permission")]
    NotExecutable(String, String),
    /// Would lose its rights under a recorder.
    #[error(
        "`{0}` is setuid or setgid: under a recorder it would run without those rights\n  remedy: \
         become that user and record a copy of it without the bits"
    )]
    SetId(String),
}

/// A program that can be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Its file.
    pub path: PathBuf,
    /// What its instructions are; of a script, those of its interpreter.
    pub architecture: Architecture,
    /// What the kernel runs for it, before its arguments: its file, or an interpreter and the script.
    pub runs: Vec<OsString>,
}

/// How deep scripts may interpret scripts, as in the kernel.
const SCRIPTS_MAX: u32 = 4;

impl Program {
    /// Finds a command as a shell would, and looks at it.
    pub fn find(name: &str) -> Result<Program, ProgramError> {
        let path = search(name).ok_or_else(|| ProgramError::NotFound(name.into()))?;
        let mut runs = vec![path.clone().into_os_string()];
        let architecture = architecture(&path, SCRIPTS_MAX, &mut runs)?;
        Ok(Program { path, architecture, runs })
    }
}

fn search(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(|path| path.exists());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// What the instructions of a file are; puts the interpreters of a script before it.
fn architecture(
    path: &Path,
    scripts_left: u32,
    runs: &mut Vec<OsString>,
) -> Result<Architecture, ProgramError> {
    let name = || path.display().to_string();
    let refused = |why: String| ProgramError::NotExecutable(name(), why);
    let mode = path.metadata().map_err(|error| refused(error.to_string()))?.permissions().mode();
    if !path.is_file() || mode & 0o111 == 0 {
        return Err(refused("it is no executable file".into()));
    }
    if mode & 0o6000 != 0 {
        return Err(ProgramError::SetId(name()));
    }
    let mut head = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| refused(error.to_string()))?;
    file.take(4096).read_to_end(&mut head).map_err(|error| refused(error.to_string()))?;
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = String::from_utf8_lossy(line.split(|b| *b == b'\n').next().unwrap_or(line));
        // All that follows the interpreter is one argument, as the kernel has it.
        let (interpreter, argument) =
            line.trim().split_once(char::is_whitespace).unwrap_or((line.trim(), ""));
        let argument = Some(argument.trim()).filter(|text| !text.is_empty());
        runs.splice(0..0, [interpreter].into_iter().chain(argument).map(OsString::from));
        return match scripts_left {
            0 => Err(refused("its interpreter is a script of a script of a script".into())),
            left => architecture(Path::new(interpreter), left - 1, runs),
        };
    }
    match FileKind::parse(&*head) {
        Ok(FileKind::Elf32 | FileKind::Elf64) => {}
        // Without a first line a shell runs it.
        _ if head.iter().all(|b| *b != 0) => {
            runs.insert(0, "/bin/sh".into());
            return Ok(native());
        }
        _ => return Err(refused("it is neither an ELF program nor a script".into())),
    }
    let bytes = std::fs::read(path).map_err(|error| refused(error.to_string()))?;
    let file = object::File::parse(&*bytes).map_err(|error| refused(error.to_string()))?;
    Ok(file.architecture())
}

/// Of this machine.
pub fn native() -> Architecture {
    match std::env::consts::ARCH {
        "aarch64" => Architecture::Aarch64,
        "riscv64" => Architecture::Riscv64,
        _ => Architecture::X86_64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;

    fn file(folder: &Path, name: &str, content: &[u8], mode: u32) -> String {
        let path = folder.join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().into()
    }

    #[test]
    fn programs_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let message = |name: &str| Program::find(name).unwrap_err().to_string();
        let own = std::fs::read("/proc/self/exe").unwrap();
        let setuid = file(folder.path(), "setuid", &own, 0o4755);
        assert!(message(&setuid).contains("setuid"));
        let plain = file(folder.path(), "plain", &own, 0o644);
        assert!(message(&plain).contains("execute permission"));
        let junk = file(folder.path(), "junk", &[0; 100], 0o755);
        assert!(message(&junk).contains("neither"));
        assert!(message("no-such-program-anywhere").contains("not found"));
        let program = file(folder.path(), "program", &own, 0o755);
        assert_eq!(Program::find(&program).unwrap().architecture, native());
        let script = file(folder.path(), "script", format!("#!{program} -x\n").as_bytes(), 0o755);
        let found = Program::find(&script).unwrap();
        assert_eq!(found.architecture, native());
        assert_eq!(found.runs, [program.as_str(), "-x", script.as_str()]);
        let circle = folder.path().join("circle").display().to_string();
        file(folder.path(), "circle", format!("#!{circle}\n").as_bytes(), 0o755);
        assert!(message(&circle).contains("script of a script"));
    }
}
