//! The variable LD_PRELOAD with a library of ours before those of the user.
//!
//! Source: ld.so(8). For the characters that end or change a name: `do_preload` and `_dl_dst_substitute`
//! of glibc 2.36.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The variable that names the libraries.
pub const VARIABLE: &str = "LD_PRELOAD";

/// The characters at which the dynamic loader ends a name.
const SEPARATORS: &[u8] = b" :";

/// The path of a library that the dynamic loader reads as one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preload(PathBuf);

/// The reason why a library cannot be named. The loader would skip it, and the program would run without
/// it.
#[derive(Debug, thiserror::Error)]
#[error("{why}\n  hint: {remedy}")]
pub struct PreloadError {
    /// The part of the path that is in the way.
    pub why: String,
    /// The hint: a way to change the path.
    pub remedy: String,
}

impl Preload {
    /// Checks that the loader reads `path` as one name.
    pub fn new(path: impl Into<PathBuf>) -> Result<Preload, PreloadError> {
        let path = path.into();
        let bytes = path.as_os_str().as_bytes();
        let why = if bytes.iter().any(|byte| SEPARATORS.contains(byte)) {
            "has a space or a colon"
        } else if bytes.contains(&b'$') {
            "has a `$`"
        } else if path.is_relative() {
            "is relative"
        } else {
            return Ok(Preload(path));
        };
        let path = path.display();
        Err(PreloadError {
            why: format!("{path}: the dynamic loader cannot preload a file whose path {why}"),
            remedy: "move pagetax and its libraries to another folder".into(),
        })
    }

    /// Returns the value of [`VARIABLE`] with this library before `existing`. Drops another build of the
    /// same library: two would interpose each other.
    pub fn before(&self, existing: Option<&OsStr>) -> OsString {
        let mut value = self.0.as_os_str().as_bytes().to_vec();
        let existing = existing.unwrap_or_default().as_bytes();
        let same =
            |name: &[u8]| Path::new(OsStr::from_bytes(name)).file_name() == self.0.file_name();
        let names = existing.split(|byte| SEPARATORS.contains(byte));
        for name in names.filter(|name| !name.is_empty() && !same(name)) {
            value.push(b':');
            value.extend_from_slice(name);
        }
        OsString::from_vec(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_comes_first_and_once() {
        let library = Preload::new("/opt/lib/ours.so").unwrap();
        let before =
            |existing: &str| library.before(Some(existing.as_ref())).into_string().unwrap();
        assert_eq!(library.before(None), "/opt/lib/ours.so");
        assert_eq!(before(""), "/opt/lib/ours.so");
        assert_eq!(before("a.so b.so:/c.so"), "/opt/lib/ours.so:a.so:b.so:/c.so");
        assert_eq!(before("/old/ours.so:/c.so:/opt/lib/ours.so"), "/opt/lib/ours.so:/c.so");
    }

    #[test]
    fn a_path_that_the_loader_misreads_is_refused() {
        for path in
            ["/my tools/ours.so", "/a:b/ours.so", "/a$LIB/ours.so", "lib/ours.so", "ours.so"]
        {
            let error = Preload::new(path).unwrap_err().to_string();
            assert!(error.contains(path) && error.contains("hint: move"), "{error}");
        }
    }
}
