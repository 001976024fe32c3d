//! A process of its own for tests that measure a whole process. The library's unit tests use it too.

use std::process::Command;

/// Runs the calling test in its own process, unless it already is there. Returns true if it ran, so that
/// the caller has nothing left to do.
///
/// Parallel tests take memory and give it back. If one of them forks, pages that were written fault
/// again, and its child inherits locks that other tests hold.
pub fn ran_alone() -> bool {
    const ALONE: &str = "PAGETAX_TEST_ALONE";
    let thread = std::thread::current();
    let this_test = thread.name().expect("the name of a test");
    // On the main thread, tests run one after the other.
    if std::env::var_os(ALONE).is_some() || this_test == "main" {
        return false;
    }
    let mut test = Command::new(std::env::current_exe().unwrap());
    let output = test.args(["--exact", this_test, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && text.contains("1 passed");
    assert!(passed, "{text}{}", String::from_utf8_lossy(&output.stderr));
    true
}
