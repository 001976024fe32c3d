//! The user's cache, and the check that no other user can replace its content.
//!
//! Invariant: only this user, root and the owner of `/` can change the ancestors of a folder or file
//! that passes. So it stays the same between the check and its use.

use rustix::fs::{Mode, OFlags, Stat, fstat, open};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The error that neither the environment nor the user's rights name a folder.
#[derive(Debug, thiserror::Error)]
#[error(
    "neither XDG_CACHE_HOME nor HOME is set\n  hint: export XDG_CACHE_HOME=FOLDER, one of your own"
)]
pub struct NoFolder;

/// The reason why a folder or file is not used.
#[derive(Debug, thiserror::Error)]
pub enum Untrusted {
    /// Another user could change it.
    #[error(
        "{path} {why}: another user could change what this one would use\n  hint: {remedy}, or set \
         XDG_CACHE_HOME to a folder that only you can write"
    )]
    Foreign {
        /// The folder or file, without symbolic links.
        path: PathBuf,
        /// The finding, such as its owner or mode.
        why: String,
        /// The hint: a way to correct it.
        remedy: String,
    },
    /// It cannot be created or examined.
    #[error("{path}: {error}\n  hint: set XDG_CACHE_HOME to a folder that you may write")]
    System {
        /// The folder or file that failed.
        path: PathBuf,
        /// The error that the system returned.
        error: io::Error,
    },
}

/// Returns the folder `pagetax` in the user's cache, by the XDG base directory specification. For root
/// without a home, as in a cron job, the cache is /var/cache.
pub fn folder() -> Result<PathBuf, NoFolder> {
    folder_by(
        |name| std::env::var_os(name).map(PathBuf::from),
        rustix::process::geteuid().is_root(),
    )
}

fn folder_by(
    variable: impl Fn(&str) -> Option<PathBuf>,
    is_root: bool,
) -> Result<PathBuf, NoFolder> {
    let absolute = |name| variable(name).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".cache")))
        .or_else(|| is_root.then(|| "/var/cache".into()));
    Ok(cache.ok_or(NoFolder)?.join("pagetax"))
}

/// Creates a folder that only this user can enter, if it does not exist. Checks that no other user can
/// change its content, and returns its path without symbolic links.
pub fn private_folder(path: &Path) -> Result<PathBuf, Untrusted> {
    folder_of_ours(path, 0o700)
}

/// Creates and checks a folder like [`private_folder`], with another mode, for a folder that others may
/// read.
pub fn folder_of_ours(path: &Path, mode: u32) -> Result<PathBuf, Untrusted> {
    let failed = |error| Untrusted::System { path: path.into(), error };
    std::fs::DirBuilder::new().recursive(true).mode(mode).create(path).map_err(failed)?;
    let path = path.canonicalize().map_err(failed)?;
    let system = Owners::read()?;
    system.check_ancestors(&path)?;
    system.check_own(&path, OFlags::DIRECTORY)?;
    Ok(path)
}

/// Checks a file in a folder that [`private_folder`] returned.
pub fn check_file(path: &Path) -> Result<(), Untrusted> {
    Owners::read()?.check_own(path, OFlags::empty())
}

/// Checks that only this user, root and the owner of `/` can change an installed file or replace it.
pub fn check_installed(path: &Path) -> Result<(), Untrusted> {
    let system = Owners::read()?;
    system.check_ancestors(path)?;
    let status = status(path, OFlags::empty())?;
    match system.may_own(&status) {
        true => only_owner_writes(path, &status),
        false => Err(system.belongs(path, &status)),
    }
}

/// Removes all rights of others to a file or folder of ours.
pub fn make_private(path: &Path) -> io::Result<()> {
    let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let mode = file.metadata()?.permissions().mode();
    file.set_permissions(std::fs::Permissions::from_mode(mode & 0o700))
}

/// The users who may change the programs that this user runs.
struct Owners {
    user: u32,
    /// The owner of `/`, who could replace every program. It is root, except in some user namespaces.
    top: u32,
}

impl Owners {
    fn read() -> Result<Owners, Untrusted> {
        let user = rustix::process::geteuid().as_raw();
        Ok(Owners { user, top: status(Path::new("/"), OFlags::DIRECTORY)?.st_uid })
    }

    /// Checks the folders that hold `path`, from `/` on.
    fn check_ancestors(&self, path: &Path) -> Result<(), Untrusted> {
        let ancestors: Vec<&Path> = path.ancestors().skip(1).collect();
        ancestors.into_iter().rev().try_for_each(|ancestor| self.check_ancestor(ancestor))
    }

    fn may_own(&self, status: &Stat) -> bool {
        [self.user, self.top, 0].contains(&status.st_uid)
    }

    fn check_ancestor(&self, path: &Path) -> Result<(), Untrusted> {
        let status = status(path, OFlags::DIRECTORY)?;
        if !self.may_own(&status) {
            return Err(self.belongs(path, &status));
        }
        // In a sticky folder such as /tmp, users can replace only their own files.
        let is_sticky = status.st_mode & libc::S_ISVTX != 0;
        if is_sticky { Ok(()) } else { only_owner_writes(path, &status) }
    }

    fn check_own(&self, path: &Path, flags: OFlags) -> Result<(), Untrusted> {
        let status = status(path, flags)?;
        if status.st_uid != self.user {
            return Err(self.belongs(path, &status));
        }
        only_owner_writes(path, &status)
    }

    fn belongs(&self, path: &Path, status: &Stat) -> Untrusted {
        Untrusted::Foreign {
            path: path.into(),
            why: format!("belongs to user {}, not to {}", status.st_uid, self.user),
            // With sudo -E, root works in a user's home.
            remedy: "remove it if it should not be there, use sudo -H rather than sudo -E".into(),
        }
    }
}

/// Returns the status of the opened file, even if it is replaced right after. Symbolic links are not
/// followed.
fn status(path: &Path, flags: OFlags) -> Result<Stat, Untrusted> {
    let flags = flags | OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    open(path, flags, Mode::empty())
        .and_then(fstat)
        .map_err(|error| Untrusted::System { path: path.into(), error: error.into() })
}

fn only_owner_writes(path: &Path, status: &Stat) -> Result<(), Untrusted> {
    if status.st_mode & 0o022 == 0 && status.st_mode & libc::S_IFMT != libc::S_IFLNK {
        return Ok(());
    }
    Err(Untrusted::Foreign {
        path: path.into(),
        why: "can be written by others than its owner".into(),
        remedy: format!("chmod go-w {}", path.display()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{chown, symlink};

    /// Makes a folder that belongs to another user, in `parent` if we may.
    fn foreign(parent: &Path) -> PathBuf {
        if !rustix::process::geteuid().is_root() {
            return "/usr".into();
        }
        let path = parent.join("foreign");
        std::fs::create_dir(&path).unwrap();
        chown(&path, Some(65_533), Some(65_533)).unwrap();
        path
    }

    fn with_mode(path: PathBuf, mode: u32) -> PathBuf {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn a_new_folder_is_for_its_owner_alone() {
        let keep = tempfile::tempdir().unwrap();
        let folder = private_folder(&keep.path().join("a/b")).unwrap();
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        assert!(private_folder(&folder).is_ok());
        symlink(&folder, keep.path().join("link")).unwrap();
        assert_eq!(private_folder(&keep.path().join("link")).unwrap(), folder);
    }

    #[test]
    fn what_others_can_change_is_refused() {
        let keep = tempfile::tempdir().unwrap();
        let refused = |path: PathBuf, word: &str| {
            let error = private_folder(&path).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("hint:"), "{path:?}: {error}");
        };
        let foreign = foreign(keep.path());
        refused(foreign.clone(), "belongs to user");
        if rustix::process::geteuid().is_root() {
            refused(foreign.join("pagetax/recorder"), "belongs to user");
        }
        for mode in [0o770, 0o707] {
            let name = keep.path().join(mode.to_string());
            std::fs::create_dir(&name).unwrap();
            refused(with_mode(name.clone(), mode), "written by others");
            refused(name.join("inside"), "written by others");
        }
        let sticky = keep.path().join("sticky");
        std::fs::create_dir(&sticky).unwrap();
        refused(with_mode(sticky.clone(), 0o1777), "written by others");
        assert!(private_folder(&sticky.join("inside")).is_ok(), "as in /tmp");
    }

    #[test]
    fn a_file_is_ours_and_no_link() {
        let keep = tempfile::tempdir().unwrap();
        let file = keep.path().join("engine");
        std::fs::write(&file, "").unwrap();
        assert!(check_file(&with_mode(file.clone(), 0o755)).is_ok());
        assert!(check_file(&with_mode(file.clone(), 0o775)).is_err());
        make_private(&file).unwrap();
        assert!(check_file(&file).is_ok());
        let link = keep.path().join("link");
        symlink(&file, &link).unwrap();
        assert!(check_file(&link).is_err() && make_private(&link).is_err());
        assert!(check_file(Path::new("/nowhere")).is_err());
        if rustix::process::geteuid().is_root() {
            chown(&file, Some(65_533), None).unwrap();
        }
        let foreign =
            if rustix::process::geteuid().is_root() { &file } else { Path::new("/bin/sh") };
        assert!(check_file(foreign).is_err());
    }

    #[test]
    fn temporary_folders_are_no_cache() {
        let by = |variables: &'static [(&str, &str)], is_root| {
            let value = |name: &str| variables.iter().find(|(known, _)| *known == name);
            folder_by(|name| value(name).map(|(_, text)| text.into()), is_root)
        };
        assert_eq!(by(&[("HOME", "/h")], false).unwrap(), Path::new("/h/.cache/pagetax"));
        let both = by(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")], true).unwrap();
        assert_eq!(both, Path::new("/c/pagetax"));
        assert_eq!(by(&[], true).unwrap(), Path::new("/var/cache/pagetax"));
        for variables in [&[][..], &[("HOME", "")], &[("XDG_CACHE_HOME", "relative")]] {
            assert!(by(variables, false).unwrap_err().to_string().contains("hint: export"));
        }
    }
}
