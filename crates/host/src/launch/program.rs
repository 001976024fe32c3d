//! Programs as exec finds them: their path, interpreter, kind and architecture, and if they obey our
//! environment.

use memchr::memmem;
use object::elf::{FileHeader64, PF_X, PT_LOAD};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Architecture, Endianness, Object, ReadCache};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The most levels of scripts that interpret scripts, as in the kernel.
const SCRIPTS_MAX: usize = 4;

/// The shell that execvp(3) uses for a text file without a `#!` line.
const SHELL: &str = "/bin/sh";

/// The source of a program's memory allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A dynamic glibc program: obeys GLIBC_TUNABLES and LD_PRELOAD.
    DynamicGlibc,
    /// A static glibc program: obeys GLIBC_TUNABLES.
    StaticGlibc,
    /// A program with another loader, such as musl's.
    OtherLoader,
    /// A program with neither a loader nor glibc, which maps its memory itself.
    Own,
}

impl Kind {
    /// Returns a description in a few words.
    pub fn words(self) -> &'static str {
        match self {
            Kind::DynamicGlibc => "a dynamic glibc program",
            Kind::StaticGlibc => "a static glibc program",
            Kind::OtherLoader => "a program of another C library",
            Kind::Own => "a static program with its own allocator",
        }
    }
}

/// An executable file, as a command starts it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The path that execve(2) gets.
    pub path: PathBuf,
    /// The arguments that the kernel runs: the file, or interpreters and then the script.
    pub runs: Vec<OsString>,
    /// The program that runs in the end; for a script, its interpreter.
    pub binary: PathBuf,
    /// The source of the program's memory.
    pub kind: Kind,
    /// The loader that the binary names.
    pub loader: Option<PathBuf>,
    /// The architecture of its instructions; `None` if it is not an ELF file, which the kernel may still
    /// run.
    pub architecture: Option<Architecture>,
}

/// The reason why a command cannot be started, by the rules of env(1).
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The command was not found: status 127.
    #[error(
        "`{0}` was not found\n  hint: check the spelling, PATH and, for a script, its first line"
    )]
    NotFound(String),
    /// The command cannot be executed: status 126.
    #[error(
        "`{0}` cannot be run: {1}\n  hint: check that it is a program, and may be read and executed"
    )]
    NotExecutable(String, String),
    /// The kernel refuses to forbid huge pages: status 125.
    #[error("cannot forbid huge pages to `{0}`: {1}")]
    Forbid(String, #[source] io::Error),
    /// It ignores our environment, and we may not trace it: status 125.
    #[error(
        "`{0}` runs set-id or with capabilities: it ignores our environment and cannot be \
         controlled\n  hint: run it as its owner"
    )]
    SetId(String),
}

/// The reason why a library of ours cannot be preloaded into a program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{program}` {why}\n  hint: {hint}")]
pub struct NoPreload {
    /// The program that runs in the end.
    pub program: String,
    /// The obstacle, as a predicate of the program.
    pub why: String,
    /// A way around it.
    pub hint: &'static str,
}

impl Program {
    /// Finds the program that a command starts, along PATH as exec would.
    pub fn find(name: impl AsRef<OsStr>) -> Result<Program, ProgramError> {
        let name = name.as_ref();
        let path = along_path(name)?;
        let refused = |why| ProgramError::NotExecutable(name.display().to_string(), why);
        let failed = |error: io::Error| refused(error.to_string());
        let runs = runs(&path)?;
        let binary = PathBuf::from(&runs[0]);
        let elf = Elf::open(&binary).map_err(failed)?;
        let architecture = architecture_of(&binary).map_err(failed)?;
        let loader = elf.and_then(|elf| elf.loader);
        let kind = match &loader {
            Some(loader) if file_name(loader).starts_with("ld-linux") => Kind::DynamicGlibc,
            Some(_) => Kind::OtherLoader,
            None if mentions(&binary, b"glibc.malloc.hugetlb").map_err(failed)? => {
                Kind::StaticGlibc
            }
            None => Kind::Own,
        };
        Ok(Program { path, runs, binary, kind, loader, architecture })
    }

    /// Returns the command to start it under the name that the user gave.
    pub fn command(&self, name: impl AsRef<OsStr>) -> Command {
        let mut command;
        // execvp(3) does this; posix_spawn(3) does not.
        if is_bare_text(&self.path).unwrap_or(false) {
            command = Command::new(SHELL);
            command.arg(&self.path);
        } else {
            command = Command::new(&self.path);
            command.arg0(name);
        }
        command
    }

    /// Checks that its loader obeys our environment. Programs with privileges of their own do not.
    pub fn heeds_us(&self) -> Result<(), ProgramError> {
        match Rights::of(&self.binary).change_ours() {
            true => Err(ProgramError::SetId(self.path.display().to_string())),
            false => Ok(()),
        }
    }

    /// Checks that a library of ours can be preloaded into it. A file that is not ELF passes: its interpreter
    /// is unknown.
    pub fn takes_preload(&self) -> Result<(), NoPreload> {
        let refused = |why: &str, hint| {
            let program = self.binary.display().to_string();
            Err(NoPreload { program, why: why.into(), hint })
        };
        if self.heeds_us().is_err() {
            return refused(
                "runs set-id or with capabilities, so its loader ignores LD_PRELOAD",
                "run it as its owner",
            );
        }
        if let Some(other) = self.foreign_architecture() {
            let why = format!(
                "is built for {other:?}: a library for this machine cannot be loaded into it"
            );
            return refused(&why, "use a build for this machine");
        }
        match self.kind {
            _ if self.architecture.is_none() => Ok(()),
            Kind::DynamicGlibc => Ok(()),
            Kind::StaticGlibc | Kind::Own => refused(
                "is linked statically: nothing can be preloaded into it",
                "link it dynamically",
            ),
            Kind::OtherLoader => refused(
                "uses another C library than glibc: our library cannot be loaded into it",
                "use a build for glibc",
            ),
        }
    }

    /// Returns its architecture if that is not this machine's.
    pub fn foreign_architecture(&self) -> Option<Architecture> {
        self.architecture.filter(|architecture| *architecture != native())
    }

    /// Returns true if a file of it has privileges, even if they are the same as ours.
    pub fn has_rights(&self) -> bool {
        [&self.path, &self.binary].into_iter().any(|file| Rights::of(file).any())
    }

    /// Returns the binary and the libraries that its loader lists for it.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut files = vec![self.binary.clone()];
        if let (Kind::DynamicGlibc, Some(loader)) = (self.kind, &self.loader) {
            let listed = Command::new(loader).arg("--list").arg(&self.binary).output();
            let text = listed.map(|output| output.stdout).unwrap_or_default();
            files.extend(String::from_utf8_lossy(&text).lines().filter_map(library_in));
        }
        files
    }
}

/// The privileges that a file gives to any user who runs it.
struct Rights {
    user: Option<u32>,
    group: Option<u32>,
    capabilities: bool,
}

impl Rights {
    /// Reads a file's privileges; all absent if the file does not exist.
    fn of(path: &Path) -> Rights {
        let file = std::fs::metadata(path).ok();
        let bit = |bit| file.as_ref().filter(|file| file.mode() & bit != 0);
        Rights {
            user: bit(0o4000).map(|file| file.uid()),
            group: bit(0o2000).map(|file| file.gid()),
            capabilities: rustix::fs::getxattr(path, "security.capability", &mut [0u8; 64]).is_ok(),
        }
    }

    fn any(&self) -> bool {
        self.user.is_some() || self.group.is_some() || self.capabilities
    }

    /// Applies the kernel's rule for AT_SECURE. Root has all capabilities already.
    fn change_ours(&self) -> bool {
        let (user, group) = (rustix::process::getuid(), rustix::process::getgid());
        self.user.is_some_and(|id| id != user.as_raw())
            || self.group.is_some_and(|id| id != group.as_raw())
            || self.capabilities && !user.is_root()
    }
}

/// Parses a line such as `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f…)`.
fn library_in(line: &str) -> Option<PathBuf> {
    let (path, _) = line.trim().rsplit_once(" (0x")?;
    let path = path.rsplit_once("=> ").map_or(path, |(_, path)| path);
    path.starts_with('/').then(|| path.into())
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn along_path(name: &OsStr) -> Result<PathBuf, ProgramError> {
    let text = || name.display().to_string();
    let denied = |why: &str| ProgramError::NotExecutable(text(), why.into());
    let runnable = |path: &Path| {
        rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file()
    };
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match () {
            () if runnable(&path) => Ok(path),
            () if path.is_dir() => Err(denied("it is a directory")),
            () if path.exists() => Err(denied("you have no execute permission")),
            () => Err(ProgramError::NotFound(text())),
        };
    }
    let places: Vec<PathBuf> =
        std::env::split_paths(&search_path()).map(|place| place.join(name)).collect();
    match places.iter().find(|place| runnable(place)) {
        Some(found) => Ok(found.clone()),
        None if places.iter().any(|place| place.is_file()) => {
            Err(denied("you have no execute permission"))
        }
        None => Err(ProgramError::NotFound(text())),
    }
}

/// Returns PATH, or its default as under `env -i`.
pub fn search_path() -> OsString {
    std::env::var_os("PATH").unwrap_or("/usr/local/bin:/usr/bin:/bin".into())
}

/// Returns true if a program of this name is on PATH.
pub fn on_path(name: &str) -> bool {
    along_path(OsStr::new(name)).is_ok()
}

/// Returns the file, after the interpreters that it needs.
fn runs(path: &Path) -> Result<Vec<OsString>, ProgramError> {
    let refused = |why: String| ProgramError::NotExecutable(path.display().to_string(), why);
    let mut runs = vec![path.as_os_str().to_owned()];
    for _ in 0..=SCRIPTS_MAX {
        let first = PathBuf::from(&runs[0]);
        let failed = |error: io::Error| refused(error.to_string());
        let line = match interpreter_of(&first).map_err(failed)? {
            Some(line) if !Path::new(&line[0]).exists() => {
                return Err(ProgramError::NotFound(line[0].display().to_string()));
            }
            Some(line) => line,
            None if is_bare_text(&first).map_err(failed)? => vec![SHELL.into()],
            None => return Ok(runs),
        };
        runs.splice(0..0, line);
    }
    Err(refused("its interpreter is a script of a script of a script".into()))
}

/// Returns the interpreter in a script's first line. As in the kernel, all text after it is one
/// argument.
fn interpreter_of(path: &Path) -> io::Result<Option<Vec<OsString>>> {
    let head = head_of(path, 256)?;
    let Some(rest) = head.strip_prefix(b"#!") else { return Ok(None) };
    let line = rest.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
    let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
    let (interpreter, argument) = (&line[..end], line[end..].trim_ascii());
    let words = [interpreter, argument].into_iter().filter(|word| !word.is_empty());
    let words: Vec<OsString> = words.map(|word| OsStr::from_bytes(word).to_owned()).collect();
    Ok(Some(words).filter(|words| !words.is_empty()))
}

/// Returns true if a text file names no interpreter: the shell runs it.
fn is_bare_text(path: &Path) -> io::Result<bool> {
    let head = head_of(path, 4096)?;
    Ok(!head.starts_with(b"#!") && !head.contains(&0))
}

fn head_of(path: &Path, bytes: u64) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    File::open(path)?.take(bytes).read_to_end(&mut head)?;
    Ok(head)
}

/// Returns the architecture of an ELF file; `None` for any other file.
pub(crate) fn architecture_of(path: &Path) -> io::Result<Option<Architecture>> {
    let cache = ReadCache::new(File::open(path)?);
    Ok(object::File::parse(&cache).ok().map(|file| file.architecture()))
}

/// Returns the architecture of this machine.
pub fn native() -> Architecture {
    match std::env::consts::ARCH {
        "aarch64" => Architecture::Aarch64,
        "riscv64" => Architecture::Riscv64,
        _ => Architecture::X86_64,
    }
}

fn mentions(path: &Path, text: &[u8]) -> io::Result<bool> {
    Ok(memmem::find(&std::fs::read(path)?, text).is_some())
}

/// The part of an ELF file that decides about its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elf {
    /// The loader; `None` for static programs and most libraries.
    pub loader: Option<PathBuf>,
    /// The ranges of code in the file, each with the difference from its addresses.
    pub code: Vec<(Range<u64>, u64)>,
}

impl Elf {
    /// Parses a file; `None` if it is not a 64-bit ELF file, which the kernel may still run or refuse.
    pub fn open(path: &Path) -> io::Result<Option<Elf>> {
        let cache = ReadCache::new(File::open(path)?);
        Ok(Elf::parse(&cache))
    }

    fn parse(data: &ReadCache<File>) -> Option<Elf> {
        let header = FileHeader64::<Endianness>::parse(data).ok()?;
        let endian = header.endian().ok()?;
        let (mut loader, mut code) = (None, Vec::new());
        for program in header.program_headers(endian, data).ok()? {
            if let Ok(Some(name)) = program.interpreter(endian, data) {
                loader = Some(PathBuf::from(String::from_utf8_lossy(name).into_owned()));
            }
            if program.p_type(endian) == PT_LOAD && program.p_flags(endian).contains(PF_X) {
                let start = program.p_offset(endian);
                let end = start.checked_add(program.p_filesz(endian))?;
                code.push((start..end, program.p_vaddr(endian).wrapping_sub(start)));
            }
        }
        Some(Elf { loader, code })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn programs_are_told_apart() {
        let sh = Program::find("sh").unwrap();
        assert!(sh.path.is_absolute() && sh.loader.is_some());
        assert_eq!((sh.kind != Kind::Own, sh.architecture), (true, Some(native())));
        assert!(sh.files().len() > 1, "{:?}", sh.files());
        let own = Elf::open(Path::new("/proc/self/exe")).unwrap().unwrap();
        assert!(!own.code.is_empty());
        assert_eq!(Elf::open(Path::new("/etc/passwd")).unwrap(), None);
    }

    #[test]
    fn scripts_lead_to_their_interpreter() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("script");
        std::fs::write(&script, "#! /bin/sh -e\n").unwrap();
        let name = script.to_str().unwrap();
        assert!(matches!(Program::find(name), Err(ProgramError::NotExecutable(..))));
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        assert_eq!(Program::find(name).unwrap().binary, Path::new("/bin/sh"));
        std::fs::write(&script, "#!/no/such/shell\n").unwrap();
        assert!(matches!(Program::find(name), Err(ProgramError::NotFound(_))));
        assert!(matches!(Program::find("no-such-program"), Err(ProgramError::NotFound(_))));
        assert!(matches!(Program::find("/tmp"), Err(ProgramError::NotExecutable(..))));
    }

    fn file(folder: &Path, name: &str, content: &[u8], mode: u32) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn what_runs_a_script_is_told_as_the_kernel_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let own = std::fs::read("/proc/self/exe").unwrap();
        let program = file(folder.path(), "program", &own, 0o755);
        let line = format!("#!{} -x -y\n", program.display());
        let script = file(folder.path(), "script", line.as_bytes(), 0o755);
        let runs = Program::find(&script).unwrap().runs;
        assert_eq!(runs, [program.as_os_str(), OsStr::new("-x -y"), script.as_os_str()]);
        let bare = file(folder.path(), "bare", b"exit 7\n", 0o755);
        let found = Program::find(&bare).unwrap();
        assert_eq!(
            (&*found.runs[0], found.command("bare").status().unwrap().code()),
            (OsStr::new(SHELL), Some(7))
        );
        let circle = folder.path().join("circle");
        file(folder.path(), "circle", format!("#!{}\n", circle.display()).as_bytes(), 0o755);
        assert!(Program::find(&circle).unwrap_err().to_string().contains("script of a script"));
        let junk = file(folder.path(), "junk", &[0; 100], 0o755);
        assert_eq!(Program::find(&junk).unwrap().architecture, None);
    }

    #[test]
    fn rights_of_others_are_no_business_of_ours() {
        let folder = tempfile::tempdir().unwrap();
        let own = std::fs::read("/proc/self/exe").unwrap();
        let path = file(folder.path(), "set-id", &own, 0o4755);
        let found = Program::find(&path).unwrap();
        assert!(found.has_rights() && found.heeds_us().is_ok());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o4755)).unwrap();
            assert!(matches!(found.heeds_us(), Err(ProgramError::SetId(_))));
        }
        assert!(!Program::find("sh").unwrap().has_rights());
    }

    #[test]
    fn the_loaders_list_is_read() {
        assert_eq!(
            library_in("\tlibc.so.6 => /lib/libc.so.6 (0x00007f)"),
            Some("/lib/libc.so.6".into())
        );
        assert_eq!(library_in("\t/lib64/ld.so (0x00007f)"), Some("/lib64/ld.so".into()));
        assert_eq!(library_in("\tlinux-vdso.so.1 (0x00007f)"), None);
        assert_eq!(library_in("\tlibx.so => not found"), None);
    }
}
