//! Programs as exec finds them: where they are, what runs them, what they are made of, and whether
//! they listen to our environment.

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

/// How deep scripts may interpret scripts, as in the kernel.
const SCRIPTS_MAX: usize = 4;

/// What execvp(3) gives a text without a first line to.
const SHELL: &str = "/bin/sh";

/// Who gives a program its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// glibc, loaded at start: obeys GLIBC_TUNABLES and LD_PRELOAD.
    DynamicGlibc,
    /// glibc inside: obeys GLIBC_TUNABLES.
    StaticGlibc,
    /// Another loader, such as musl's.
    OtherLoader,
    /// Neither a loader nor glibc: a program that maps its memory itself.
    Own,
}

impl Kind {
    /// In a few words.
    pub fn words(self) -> &'static str {
        match self {
            Kind::DynamicGlibc => "a dynamic glibc program",
            Kind::StaticGlibc => "a static glibc program",
            Kind::OtherLoader => "a program of another C library",
            Kind::Own => "a static program with its own allocator",
        }
    }
}

/// An executable file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// What exec will be given.
    pub path: PathBuf,
    /// What the kernel runs for it, before its arguments: its file, or interpreters and the script.
    pub runs: Vec<OsString>,
    /// What runs in the end: of a script, its interpreter.
    pub binary: PathBuf,
    /// How it comes to its memory.
    pub kind: Kind,
    /// The loader that it names.
    pub loader: Option<PathBuf>,
    /// Whom its instructions are for; none if it is no ELF file, which the kernel may know to run.
    pub architecture: Option<Architecture>,
}

/// Why a command cannot be started, in the terms of env(1).
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// Status 127.
    #[error(
        "`{0}` was not found\n  remedy: check the spelling, PATH and, for a script, its first line"
    )]
    NotFound(String),
    /// Status 126.
    #[error(
        "`{0}` cannot be run: {1}\n  remedy: check that it is a program, and may be read and executed"
    )]
    NotExecutable(String, String),
    /// Our environment does not reach it, and it is not ours to trace.
    #[error(
        "`{0}` runs set-id or with capabilities: it ignores our environment and cannot be \
         controlled\n  remedy: run it as its owner"
    )]
    SetId(String),
}

impl Program {
    /// The program that a command starts, found along PATH as exec would.
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

    /// Starts it under the name that the user gave it.
    pub fn command(&self, name: impl AsRef<OsStr>) -> Command {
        let mut command;
        // As execvp(3) does it; posix_spawn(3) does not.
        if is_bare_text(&self.path).unwrap_or(false) {
            command = Command::new(SHELL);
            command.arg(&self.path);
        } else {
            command = Command::new(&self.path);
            command.arg0(name);
        }
        command
    }

    /// Whether its loader listens to our environment: programs with rights of their own do not.
    pub fn heeds_us(&self) -> Result<(), ProgramError> {
        match Rights::of(&self.binary).change_ours() {
            true => Err(ProgramError::SetId(self.path.display().to_string())),
            false => Ok(()),
        }
    }

    /// Whether its file names rights, be they ours or not.
    pub fn has_rights(&self) -> bool {
        [&self.path, &self.binary].into_iter().any(|file| Rights::of(file).any())
    }

    /// The binary and the libraries that it is loaded with, as its loader tells.
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

/// The rights that a file gives to whoever runs it.
struct Rights {
    user: Option<u32>,
    group: Option<u32>,
    capabilities: bool,
}

impl Rights {
    /// None of a file that is not there.
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

    /// The kernel's rule for AT_SECURE; root has all capabilities before.
    fn change_ours(&self) -> bool {
        let (user, group) = (rustix::process::getuid(), rustix::process::getgid());
        self.user.is_some_and(|id| id != user.as_raw())
            || self.group.is_some_and(|id| id != group.as_raw())
            || self.capabilities && !user.is_root()
    }
}

/// `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f…)`
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
    let path = std::env::var_os("PATH").unwrap_or("/usr/local/bin:/usr/bin:/bin".into());
    let places: Vec<PathBuf> = std::env::split_paths(&path).map(|place| place.join(name)).collect();
    match places.iter().find(|place| runnable(place)) {
        Some(found) => Ok(found.clone()),
        None if places.iter().any(|place| place.is_file()) => {
            Err(denied("you have no execute permission"))
        }
        None => Err(ProgramError::NotFound(text())),
    }
}

/// Whether a program of this name is on PATH.
pub fn on_path(name: &str) -> bool {
    along_path(OsStr::new(name)).is_ok()
}

/// The file, after the interpreters that it needs.
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

/// Of a script: what its first line names. All that follows the interpreter is one argument, as the
/// kernel has it.
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

/// Text that names no interpreter, which is the shell's.
fn is_bare_text(path: &Path) -> io::Result<bool> {
    let head = head_of(path, 4096)?;
    Ok(!head.starts_with(b"#!") && !head.contains(&0))
}

fn head_of(path: &Path, bytes: u64) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    File::open(path)?.take(bytes).read_to_end(&mut head)?;
    Ok(head)
}

fn architecture_of(path: &Path) -> io::Result<Option<Architecture>> {
    let cache = ReadCache::new(File::open(path)?);
    Ok(object::File::parse(&cache).ok().map(|file| file.architecture()))
}

/// Of this machine.
pub fn native() -> Architecture {
    match std::env::consts::ARCH {
        "aarch64" => Architecture::Aarch64,
        "riscv64" => Architecture::Riscv64,
        _ => Architecture::X86_64,
    }
}

fn mentions(path: &Path, text: &[u8]) -> io::Result<bool> {
    let bytes = std::fs::read(path)?;
    Ok(bytes.windows(text.len()).any(|window| window == text))
}

/// What of an ELF file decides about its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elf {
    /// Its loader; none for static programs and most libraries.
    pub loader: Option<PathBuf>,
    /// Where its code is in the file, and by how much its addresses are beyond that.
    pub code: Vec<(Range<u64>, u64)>,
}

impl Elf {
    /// None for a file that is no 64-bit ELF file: that is for the kernel to refuse or to know.
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
            if program.p_type(endian) == PT_LOAD && program.p_flags(endian) & PF_X != 0 {
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
