//! Where pagetax' own files are, be it installed or just built.

use std::path::{Path, PathBuf};

/// Returns the file of this name, seen from the running program.
pub fn find(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    let mut files = places(folder).iter().map(|place| folder.join(place).join(name));
    files.find(|file| file.is_file())?.canonicalize().ok()
}

/// Returns where files of ours are. Parents are looked into only from the folders that cargo and an
/// installation make: of a program in /tmp/mine, another user could write the parent.
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
