//! docs/validation.md is what `pagetax reproduce` says now: it cannot go stale. With BLESS set in the
//! environment (`cargo xtask bless`), it is written anew.

use std::process::Command;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/validation.md");

#[test]
fn the_validation_page_is_what_reproduce_says_now() {
    let mut reproduce = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    let output = reproduce.args(["reproduce", "all", "--markdown", "-"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let now = String::from_utf8(output.stdout).unwrap();
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(PATH, &now).unwrap();
    }
    let then = std::fs::read_to_string(PATH).unwrap();
    let different = now.lines().zip(then.lines()).find(|(now, then)| now != then);
    assert!(now == then, "not {different:?}; if it is right: cargo xtask bless");
    assert!(output.status.success(), "a published figure is missed: {errors}");
}
