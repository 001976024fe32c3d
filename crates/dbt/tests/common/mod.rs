//! Helpers of the tests: the library, and programs under it.
#![allow(dead_code, reason = "each test uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A schedule in which the program itself begins bursts, of any length (tests/sequences.c).
pub const ON_REQUEST: &str = "1000000000000000000:1000000000000000000";

/// The same schedule, with all instructions only counted.
pub const COUNTED_ON_REQUEST: &str = "1000000000000000000:1000000000000000000:1000000000000000000";

/// Returns the path of the library that cargo has built.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors()
        .map(|folder| folder.join("libpagetax_dbt.so"))
        .find(|file| file.is_file())
        .expect("built with the tests")
}

/// Runs a command in a folder, with bursts (`LENGTH:GAP`) or without. Returns its output and the sampler's
/// summary.
pub fn run(program: &str, words: &[&str], bursts: Option<&str>, folder: &Path) -> (Output, String) {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new(program);
    command.args(words).current_dir(folder).env("LC_ALL", "C");
    if let Some(bursts) = bursts {
        command.env("LD_PRELOAD", library()).env("PAGETAX_SAMPLER_STRESS", bursts);
        command.env("PAGETAX_SAMPLER_LOG", log.path());
    }
    let output = command.output().unwrap();
    (output, std::fs::read_to_string(log.path()).unwrap())
}

/// Returns true if a program is on PATH; prints a line if not.
pub fn has(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = name.starts_with('/') && Path::new(name).is_file()
        || std::env::split_paths(&path).any(|folder| folder.join(name).is_file());
    if !found {
        println!("SKIP: not installed: {name}");
    }
    found
}

/// Compiles a source file of this folder with cc. Returns the program's path.
pub fn compiled(source: &str, folder: &Path) -> String {
    let program = folder.join(Path::new(source).with_extension(""));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-pthread"]).arg(source).arg("-o").arg(&program);
    assert!(cc.status().unwrap().success());
    program.to_str().unwrap().into()
}
