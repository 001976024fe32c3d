//! A private folder for code that pagetax unpacks or compiles. It is the first of a few that can hold the
//! code.
//!
//! Invariant: only this user, root and the owner of `/` can change such a folder (see [`crate::cache`]), and
//! the kernel lets a program map code from it.

use crate::cache::{self, NoFolder, Untrusted};
use crate::launch::preload::PreloadError;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The reason why one folder cannot hold code.
#[derive(Debug, thiserror::Error)]
pub enum FolderRefusal {
    /// The environment names no cache.
    #[error("neither XDG_CACHE_HOME nor HOME is set")]
    NoFolder(#[from] NoFolder),
    /// Another user could change it, or it cannot be made.
    #[error("{}", first_line(.0))]
    Untrusted(#[from] Untrusted),
    /// The dynamic loader would read its path as several.
    #[error("{}", first_line(.0))]
    Loader(#[from] PreloadError),
    /// The kernel refuses to map code from it.
    #[error("{0} is mounted noexec")]
    NoExec(PathBuf),
    /// It cannot be written or read.
    #[error("{0}: {1}")]
    System(PathBuf, io::Error),
}

/// The error that no folder can hold some code: the reason of each, and the hint. It follows a subject and a
/// predicate, such as "libours.so cannot be unpacked".
#[derive(Debug)]
pub struct NoCodeFolder {
    /// The refusal of each folder that was tried.
    pub refusals: Vec<FolderRefusal>,
    /// The free space that the code needs.
    pub bytes: u64,
}

impl std::error::Error for NoCodeFolder {}

impl fmt::Display for NoCodeFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.refusals.iter().try_for_each(|refusal| write!(f, "\n  {refusal}"))?;
        write!(
            f,
            "\n  hint: set XDG_CACHE_HOME to a directory of yours on a file system with {} MB free and \
             without noexec",
            self.bytes.div_ceil(1 << 20)
        )
    }
}

fn first_line(error: &impl ToString) -> String {
    error.to_string().lines().next().unwrap_or_default().into()
}

/// A folder to try, or the reason why there is none.
pub type Candidate = Result<PathBuf, FolderRefusal>;

/// Returns the folders to try, best first. The last two serve users without a home, and homes that are
/// read-only, full or mounted noexec.
pub fn candidates() -> Vec<Candidate> {
    let user = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|path| path.is_absolute()).map(|path| Ok(path.join("pagetax")));
    let temporary = Path::new("/tmp").join(format!("pagetax-{user}"));
    let cache = cache::folder().map_err(FolderRefusal::from);
    [Some(cache), runtime, Some(Ok(temporary))].into_iter().flatten().collect()
}

/// Calls `fill` with the folder `name` inside one candidate after another, until one can hold the code.
///
/// # Errors
/// If no folder can hold it. `bytes` is the free space that it needs.
pub fn first_filled<T>(
    candidates: impl IntoIterator<Item = Candidate>,
    name: &Path,
    bytes: u64,
    mut fill: impl FnMut(&Path) -> Result<T, FolderRefusal>,
) -> Result<T, NoCodeFolder> {
    let mut refusals = Vec::new();
    for candidate in candidates {
        match candidate.and_then(|candidate| fill(&checked(&candidate.join(name))?)) {
            Ok(found) => return Ok(found),
            Err(refusal) => refusals.push(refusal),
        }
    }
    Err(NoCodeFolder { refusals, bytes })
}

/// Creates a folder if need be, and checks its owner, its mode and its mount.
fn checked(path: &Path) -> Result<PathBuf, FolderRefusal> {
    let folder = cache::private_folder(path)?;
    match rustix::fs::statvfs(&folder) {
        Ok(mount) if mount.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC) => {
            Err(FolderRefusal::NoExec(folder))
        }
        Ok(_) => Ok(folder),
        Err(error) => Err(FolderRefusal::System(folder, error.into())),
    }
}
