//! Where pagetax' own files are, be it installed or just built.

use std::path::PathBuf;

/// As cargo builds, and as it is installed: `bin/pagetax` with `lib/NAME` or `lib/pagetax/NAME`.
const PLACES: [&str; 5] = ["", "deps", "..", "../lib", "../lib/pagetax"];

/// The file of this name, seen from the running program.
pub fn find(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    let mut files = PLACES.iter().map(|place| folder.join(place).join(name));
    files.find(|file| file.is_file())?.canonicalize().ok()
}
