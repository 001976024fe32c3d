//! docs/validation.md is what `pagetax reproduce` says now: it cannot go stale. With BLESS set in the
//! environment (`cargo xtask bless`), it is written anew. A figure that is missed is in it, and the
//! command exits with 1.

use std::process::Command;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/validation.md");

#[test]
fn the_validation_page_is_what_reproduce_says_now() {
    let mut reproduce = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    let output = reproduce.args(["reproduce", "all", "--markdown"]).output().unwrap();
    let now = String::from_utf8(output.stdout).unwrap();
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(PATH, &now).unwrap();
    }
    let then = std::fs::read_to_string(PATH).unwrap();
    let different = now.lines().zip(then.lines()).find(|(now, then)| now != then);
    assert!(now == then, "not {different:?}; if it is right: cargo xtask bless");
    let code = if then.contains("\n- MISS in ") { 1 } else { 0 };
    assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn one_seed_asserts_nothing_and_says_so() {
    let mut reproduce = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    let output = reproduce.args(["reproduce", "sun-4", "--seeds", "1"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("Nothing is asserted: ") && !text.contains("MISS"), "{text}");
}

fn pagetax(args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    let output = command.args(args).env("NO_COLOR", "1").output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_table_says_when_its_columns_are_not_the_same_job() {
    let machines = ["--on", "null,sim:alpha-nms"];
    let text = pagetax(&[&["run", "mmap3", "--set", "size=1M,random=9"], &machines[..]].concat());
    assert!(
        text.contains("not the same job") && text.contains("machine files of alpha-nms"),
        "{text}"
    );
    let line = text.lines().find(|line| line.trim_start().starts_with("backing")).unwrap();
    assert_eq!(line.split_whitespace().collect::<Vec<_>>(), ["backing", "anon", "remote"]);
    let json = ["run", "mmap3", "--set", "size=1M,random=9", "--on", "sim:alpha-nms", "--json"];
    let run: serde_json::Value = serde_json::from_str(&pagetax(&json)).unwrap();
    assert_eq!(run["job"]["machine_params"]["backing"], "remote");
    assert!(run["job"]["machine_params"]["size"].is_null(), "the user set it");
}

#[test]
fn a_simulated_client_keeps_to_the_memory_that_it_is_given() {
    let resident = |set: &str| {
        let json = ["run", "mmap3", "--set", set, "--on", "sim:alpha-nms", "--json"];
        let run: serde_json::Value = serde_json::from_str(&pagetax(&json)).unwrap();
        run["counters"]["resident_bytes_max"]["value"].as_u64().unwrap()
    };
    assert_eq!(resident("size=4M,random=9"), 4 << 20);
    assert_eq!(resident("size=4M,random=9,resident=1M"), 1 << 20);
}

#[test]
fn a_changed_machine_file_is_not_called_checked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mine.toml");
    let built_in = concat!(env!("CARGO_MANIFEST_DIR"), "/../../machines/sparcstation-1.toml");
    std::fs::copy(built_in, &path).unwrap();
    let run = |on: &str| pagetax(&["run", "vmtest", "--set", "size=2M,loops=9", "--on", on]);
    let mine = run(&format!("sim:{}", path.display()));
    assert!(mine.contains("(modeled, not checked against published figures)"), "{mine}");
    let own = run("sim:sparcstation-1");
    assert!(own.contains("(modeled, checked against published figures of this job)"), "{own}");
}
