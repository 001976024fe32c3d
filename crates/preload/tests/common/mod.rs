//! Helpers of the tests on real programs.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the path of the library, which cargo builds into the folder of the tests.
pub fn library() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let library = here.parent().unwrap().join("libpagetax_preload.so");
    assert!(library.exists(), "{} is not built", library.display());
    library
}

/// Returns a command with the library preloaded, and with these variables only.
pub fn preloaded(program: impl AsRef<Path>, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program.as_ref());
    for name in ["GLIBC_TUNABLES", "MPSSHEAP", "MPSSSTACK", "MPSSCFGFILE", "MPSSERRFILE"] {
        command.env_remove(name);
    }
    command.env("LD_PRELOAD", library()).envs(variables.iter().copied());
    command
}

/// Returns true if advice has an effect here; prints a line if not.
pub fn thp_can_be_advised() -> bool {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let advised = std::fs::read_to_string(path).is_ok_and(|text| !text.contains("[never]"));
    if !advised {
        println!("SKIP: transparent huge pages are switched off ({path})");
    }
    advised
}
