//! Tests of what a whole process has; of the library's own tests, too.

use std::process::Command;

/// Runs the test that asks in a process of its own, if it is not; whether it did, and nothing is left to do here.
///
/// Tests that run beside it take memory and give it back; and where one forks, pages that were written fault again,
/// and its child finds the locks as others held them.
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
