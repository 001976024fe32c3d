//! What kind of program a file is, as far as page sizes care: how it comes to its memory, and
//! whether it listens to the environment.

use object::elf::{FileHeader64, PF_X, PT_LOAD};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, ReadCache};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// No script is started by a script that is started by a script, and so on.
const SCRIPTS_MAX: usize = 4;

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
    /// What runs in the end: of a script, its interpreter.
    pub binary: PathBuf,
    /// How it comes to its memory.
    pub kind: Kind,
    /// The loader that it names.
    pub loader: Option<PathBuf>,
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
    #[error("`{0}` cannot be run: {1}\n  remedy: check that it is a program and may be executed")]
    NotExecutable(String, String),
    /// The environment does not reach it, nor do we.
    #[error("`{0}` runs set-id or with capabilities: it cannot be controlled\n  remedy: be root")]
    SetId(String),
}

impl Program {
    /// The program that a command starts, found along PATH as exec would.
    pub fn find(name: &str) -> Result<Program, ProgramError> {
        let path = along_path(name)?;
        let fail = |error: io::Error| ProgramError::NotExecutable(name.into(), error.to_string());
        refuse_set_id(name, &path)?;
        let mut binary = path.clone();
        for _ in 0..SCRIPTS_MAX {
            let Some(interpreter) = interpreter_of(&binary).map_err(fail)? else { break };
            if !interpreter.exists() {
                return Err(ProgramError::NotFound(interpreter.display().to_string()));
            }
            binary = interpreter;
        }
        refuse_set_id(name, &binary)?;
        let loader =
            loader_of(&binary).map_err(|why| ProgramError::NotExecutable(name.into(), why))?;
        let kind = match &loader {
            Some(loader) if file_name(loader).starts_with("ld-linux") => Kind::DynamicGlibc,
            Some(_) => Kind::OtherLoader,
            None if mentions(&binary, b"glibc.malloc.hugetlb").map_err(fail)? => Kind::StaticGlibc,
            None => Kind::Own,
        };
        Ok(Program { path, binary, kind, loader })
    }

    /// The binary and the libraries that it is loaded with, as its loader tells.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut files = vec![self.binary.clone()];
        if let (Kind::DynamicGlibc, Some(loader)) = (self.kind, &self.loader) {
            let listed =
                std::process::Command::new(loader).arg("--list").arg(&self.binary).output();
            let text = listed.map(|output| output.stdout).unwrap_or_default();
            files.extend(String::from_utf8_lossy(&text).lines().filter_map(library_in));
        }
        files
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

fn along_path(name: &str) -> Result<PathBuf, ProgramError> {
    let denied = |why: &str| ProgramError::NotExecutable(name.into(), why.into());
    let runnable = |path: &Path| {
        rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file()
    };
    if name.contains('/') {
        let path = PathBuf::from(name);
        return match () {
            () if runnable(&path) => Ok(path),
            () if path.is_dir() => Err(denied("it is a directory")),
            () if path.exists() => Err(denied("permission denied")),
            () => Err(ProgramError::NotFound(name.into())),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or("/usr/local/bin:/usr/bin:/bin".into());
    let places: Vec<PathBuf> = std::env::split_paths(&path).map(|place| place.join(name)).collect();
    match places.iter().find(|place| runnable(place)) {
        Some(found) => Ok(found.clone()),
        None if places.iter().any(|place| place.is_file()) => Err(denied("permission denied")),
        None => Err(ProgramError::NotFound(name.into())),
    }
}

/// Programs with rights of their own do not listen to our environment, and are not ours to trace.
fn refuse_set_id(name: &str, path: &Path) -> Result<(), ProgramError> {
    let root = rustix::process::geteuid().is_root();
    let Ok(file) = std::fs::metadata(path) else { return Ok(()) };
    let mode = file.permissions().mode();
    let other_user = mode & 0o4000 != 0 && file.uid() != rustix::process::geteuid().as_raw();
    let other_group = mode & 0o2000 != 0 && file.gid() != rustix::process::getegid().as_raw();
    let capable = rustix::fs::getxattr(path, "security.capability", &mut [0u8; 64]).is_ok();
    match !root && (other_user || other_group || capable) {
        true => Err(ProgramError::SetId(name.into())),
        false => Ok(()),
    }
}

/// Of a script: what its first line names.
fn interpreter_of(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut head = Vec::new();
    File::open(path)?.take(256).read_to_end(&mut head)?;
    let Some(rest) = head.strip_prefix(b"#!") else { return Ok(None) };
    let line = rest.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    Ok(line.split_whitespace().next().map(PathBuf::from))
}

/// None for a static program. A file that is no 64-bit ELF is for the kernel to refuse or to know.
fn loader_of(path: &Path) -> Result<Option<PathBuf>, String> {
    let elf = Elf::open(path).map_err(|error| error.to_string())?;
    Ok(elf.and_then(|elf| elf.loader))
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
    /// None for a file that is no 64-bit ELF file.
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

    #[test]
    fn programs_are_told_apart() {
        let sh = Program::find("sh").unwrap();
        assert!(sh.path.is_absolute() && sh.loader.is_some());
        assert_ne!(sh.kind, Kind::Own);
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
