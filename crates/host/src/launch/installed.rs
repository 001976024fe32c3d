//! The places of pagetax' own files, installed or just built.

use std::path::{Path, PathBuf};

/// Finds the file of this name, relative to the running program; `None` if there is none.
pub fn find(name: &str) -> Option<PathBuf> {
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
        Some("bin") => &["", "deps", "../lib", "../lib/pagetax"],
        _ => &["", "deps"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_looked_into_from_known_folders_only() {
        assert!(places(Path::new("/usr/bin")).contains(&"../lib"));
        assert!(places(Path::new("/work/target/debug/deps")).contains(&".."));
        assert!(places(Path::new("/tmp/mine")).iter().all(|place| !place.contains("..")));
    }
}
