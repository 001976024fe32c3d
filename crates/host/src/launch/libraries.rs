//! The libraries that pagetax loads into programs. A release build carries them and unpacks them at their
//! first use.
//!
//! Invariant: in a release build, [`find`] returns a file with the content that the build carries, unless
//! the user names a directory. Only this user, root and the owner of `/` can change that file (see
//! [`crate::cache`]). A debug build carries nothing and uses the libraries that cargo built beside it.

use super::preload::Preload;
use crate::cache;
use crate::code_folder::{self, Candidate, FolderRefusal, NoCodeFolder};
use ruzstd::decoding::StreamingDecoder;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use twox_hash::XxHash3_64;

/// The variable that names the directory of the libraries, for packagers.
pub const DIRECTORY_VARIABLE: &str = "PAGETAX_LIBRARY_DIR";

/// A library inside the program.
#[derive(Debug, Clone, Copy)]
pub struct CarriedLibrary {
    /// Its file name.
    pub name: &'static str,
    /// XXH3-64 of its content.
    pub hash: u64,
    /// The length of its content.
    pub bytes: u64,
    /// Its content, compressed by zstd.
    pub compressed: &'static [u8],
}

/// False on systems that pagetax has no libraries for.
const IS_SUPPORTED: bool =
    cfg!(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu"));

static CARRIED: OnceLock<&'static [CarriedLibrary]> = OnceLock::new();

/// The reason why a library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// The directory that the user named lacks it.
    #[error(
        "{DIRECTORY_VARIABLE}={0} has no {1}\n  hint: name the directory that has it, or unset the variable"
    )]
    Named(String, String),
    /// This system has no such libraries.
    #[error(
        "pagetax has no {0} for this system: it preloads libraries on x86-64 Linux with glibc only\n  \
         hint: use a command that needs no library; `pagetax doctor` lists what works here"
    )]
    Unsupported(String),
    /// This is a debug build, or a copy of one.
    #[error(
        "{0} is not beside pagetax, and a debug build does not carry it\n  hint: cargo build --workspace, \
         or use a release build"
    )]
    NotBuilt(String),
    /// No directory took it.
    #[error("{0} cannot be unpacked{1}")]
    Unpack(String, NoCodeFolder),
}

/// Registers the libraries that the program carries. Later calls change nothing.
pub fn carry(libraries: &'static [CarriedLibrary]) {
    let _ = CARRIED.set(libraries);
}

/// Finds a library by its file name, and unpacks it if need be.
///
/// # Errors
/// If no directory can hold it; see [`LibraryError`].
pub fn find(name: &str) -> Result<PathBuf, LibraryError> {
    if let Some(directory) = std::env::var_os(DIRECTORY_VARIABLE) {
        let path = Path::new(&directory).join(name);
        let missing = || LibraryError::Named(directory.display().to_string(), name.into());
        return path.canonicalize().ok().filter(|path| path.is_file()).ok_or_else(missing);
    }
    match CARRIED.get().into_iter().copied().flatten().find(|own| own.name == name) {
        None if !IS_SUPPORTED => Err(LibraryError::Unsupported(name.into())),
        None => beside(name).ok_or_else(|| LibraryError::NotBuilt(name.into())),
        // Other users may read an installed library, so children that change their user can load it too.
        Some(own) => match beside(name).filter(|path| own.is_installed(path)) {
            Some(path) => Ok(path),
            None => own.unpacked(code_folder::candidates()),
        },
    }
}

/// Writes all carried libraries into a directory, for packagers.
///
/// # Errors
/// If this build carries none, or the directory cannot be written.
pub fn write_all(directory: &Path) -> io::Result<()> {
    let carried = CARRIED.get().copied().unwrap_or_default();
    if carried.is_empty() {
        return Err(io::Error::other("this build carries no libraries; use a release build"));
    }
    std::fs::create_dir_all(directory)?;
    carried.iter().try_for_each(|own| own.write(directory))
}

/// Returns the path of a file beside the program, where cargo or an installation puts it.
fn beside(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    let mut files = places(folder).iter().map(|place| folder.join(place).join(name));
    files.find(|file| file.is_file())?.canonicalize().ok()
}

/// Returns the places where our files may be. Parents are searched only from the folders that cargo and
/// an installation make. For a program in /tmp/mine, another user could write to the parent.
fn places(folder: &Path) -> &'static [&'static str] {
    match folder.file_name().and_then(|name| name.to_str()) {
        Some("deps" | "examples") => &["", ".."],
        Some("bin") => &["", "deps", "../lib/pagetax"],
        _ => &["", "deps"],
    }
}

impl CarriedLibrary {
    /// Returns true if the file has this content, and no other user can change that.
    fn is_installed(&self, path: &Path) -> bool {
        cache::check_installed(path).is_ok() && self.is_in(path)
    }

    /// Returns true if the file has this content.
    fn is_in(&self, path: &Path) -> bool {
        std::fs::read(path).is_ok_and(|content| XxHash3_64::oneshot(&content) == self.hash)
    }

    /// Unpacks it into the first directory that can hold it, if none has it yet.
    fn unpacked(
        &self,
        directories: impl IntoIterator<Item = Candidate>,
    ) -> Result<PathBuf, LibraryError> {
        let name = Path::new("libraries").join(format!("{:016x}", self.hash));
        code_folder::first_filled(directories, &name, self.bytes, |directory| {
            self.unpack(directory)
        })
        .map_err(|error| LibraryError::Unpack(self.name.into(), error))
    }

    fn unpack(&self, directory: &Path) -> Result<PathBuf, FolderRefusal> {
        let path = directory.join(self.name);
        Preload::new(&path)?;
        if cache::check_file(&path).is_err() || !self.is_in(&path) {
            self.write(directory)
                .map_err(|error| FolderRefusal::System(directory.into(), error))?;
            cache::check_file(&path)?;
        }
        Ok(path)
    }

    fn content(&self) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        let decoder = StreamingDecoder::new(self.compressed).map_err(io::Error::other);
        decoder?.read_to_end(&mut content)?;
        Ok(content)
    }

    /// Writes it under a temporary name and renames it, so that no other process sees a part of it.
    fn write(&self, directory: &Path) -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        file.write_all(&self.content()?)?;
        file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
        file.as_file().sync_all()?;
        file.persist(directory.join(self.name))?;
        std::fs::File::open(directory)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::NoFolder;
    use ruzstd::encoding::CompressionLevel;
    use std::fs::Permissions;
    use std::os::unix::fs::MetadataExt;
    use std::process::Command;

    /// Returns a library with this text as its content.
    fn library(text: &'static str) -> CarriedLibrary {
        let compressed =
            ruzstd::encoding::compress_to_vec(text.as_bytes(), CompressionLevel::Fastest);
        let (hash, bytes) = (XxHash3_64::oneshot(text.as_bytes()), text.len() as u64);
        CarriedLibrary { name: "libours.so", hash, bytes, compressed: compressed.leak() }
    }

    #[test]
    fn parents_are_looked_into_from_known_folders_only() {
        assert!(places(Path::new("/usr/bin")).contains(&"../lib/pagetax"));
        assert!(places(Path::new("/work/target/debug/deps")).contains(&".."));
        assert!(places(Path::new("/tmp/mine")).iter().all(|place| !place.contains("..")));
    }

    #[test]
    fn a_library_is_unpacked_once_and_again_if_it_is_damaged() {
        let keep = tempfile::tempdir().unwrap();
        let unpack = || library("code").unpacked([Ok(keep.path().join("cache"))]).unwrap();
        let path = unpack();
        assert_eq!(std::fs::read(&path).unwrap(), b"code");
        let folder = path.parent().unwrap();
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let inode = |path: &Path| path.metadata().unwrap().ino();
        let first = inode(&path);
        assert_eq!(inode(&unpack()), first, "it is written once");
        std::fs::write(&path, "cod").unwrap();
        assert_eq!(std::fs::read(unpack()).unwrap(), b"code");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(unpack().metadata().unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn many_first_runs_at_once_see_whole_files_only() {
        let keep = tempfile::tempdir().unwrap();
        let text: &'static str = "code".repeat(1 << 18).leak();
        let library = library(text);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let path = library.unpacked([Ok(keep.path().to_path_buf())]).unwrap();
                    assert_eq!(std::fs::read(path).unwrap(), text.as_bytes());
                });
            }
        });
    }

    /// A file system in memory, mounted while this lives.
    struct Mount(PathBuf);

    impl Mount {
        /// Mounts it at a new folder. Returns `None`, with a line, if we may not.
        fn new(path: PathBuf, options: &str) -> Option<Mount> {
            std::fs::create_dir(&path).unwrap();
            let mut mount = Command::new("mount");
            mount.args(["-t", "tmpfs", "-o", options, "pagetax-test"]).arg(&path);
            if !mount.output().is_ok_and(|output| output.status.success()) {
                println!("SKIP: cannot mount a file system");
                return None;
            }
            Some(Mount(path))
        }
    }

    impl Drop for Mount {
        fn drop(&mut self) {
            assert!(Command::new("umount").arg(&self.0).status().unwrap().success());
        }
    }

    fn refused_by(library: &CarriedLibrary, directory: &Path) -> String {
        library.unpacked([Ok(directory.into())]).unwrap_err().to_string()
    }

    #[test]
    fn a_directory_that_cannot_hold_it_is_passed_over_with_its_reason() {
        let keep = tempfile::tempdir().unwrap();
        let path = |name: &str| keep.path().join(name);
        std::fs::create_dir(path("open")).unwrap();
        std::fs::set_permissions(path("open"), Permissions::from_mode(0o777)).unwrap();
        std::fs::write(path("file"), "").unwrap();
        let refused = || {
            let unusable = ["open", "file", "two words"].map(|name| Ok(path(name)));
            unusable.into_iter().chain([Err(NoFolder.into()), Ok("/proc".into())])
        };
        let found = library("code").unpacked(refused().chain([Ok(path("good"))]));
        assert!(found.unwrap().starts_with(path("good")));
        let error = library("code").unpacked(refused()).unwrap_err().to_string();
        for word in ["HOME", "written by others", "file", "a space", "/proc", "hint: set XDG_CACHE"]
        {
            assert!(error.contains(word), "{word}: {error}");
        }
    }

    #[test]
    fn a_directory_that_another_user_planted_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return println!("SKIP: needs root");
        }
        let keep = tempfile::tempdir().unwrap();
        let planted = library("code").unpacked([Ok(keep.path().into())]).unwrap();
        std::os::unix::fs::chown(&planted, Some(65_533), None).unwrap();
        std::fs::write(&planted, "evil").unwrap();
        // In a folder of ours the foreign file is replaced, a foreign folder is not used at all.
        let path = library("code").unpacked([Ok(keep.path().into())]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"code");
        assert_eq!(std::fs::metadata(&path).unwrap().uid(), 0);
        std::os::unix::fs::chown(path.parent().unwrap(), Some(65_533), None).unwrap();
        let error = refused_by(&library("code"), keep.path());
        assert!(error.contains("belongs to user 65533"), "{error}");
    }

    #[test]
    fn noexec_read_only_and_full_file_systems_are_refused() {
        let keep = tempfile::tempdir().unwrap();
        let text: &'static str = "code".repeat(1 << 18).leak();
        for (options, word) in [
            ("noexec", "is mounted noexec"),
            ("ro", "Read-only file system"),
            ("size=64k", "No space left on device"),
        ] {
            let Some(mount) = Mount::new(keep.path().join(options), options) else { return };
            let error = refused_by(&library(text), &mount.0);
            assert!(error.contains(word) && error.contains("hint: set XDG"), "{error}");
        }
    }

    #[test]
    fn only_an_installed_file_that_nobody_else_can_change_is_used() {
        let keep = tempfile::tempdir().unwrap();
        let path = keep.path().join("libours.so");
        let is_used = |content: &str, mode| {
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            library("code").is_installed(&path)
        };
        assert!(is_used("code", 0o644));
        assert!(!is_used("cod", 0o644) && !is_used("code", 0o666));
        assert!(!library("code").is_installed(&keep.path().join("absent")));
    }
}
