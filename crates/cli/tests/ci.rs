//! `pagetax ci`: unchanged programs pass, a planted growth fails with its cause, and mistakes are placed.

use pagetax_core::bill::{Bill, Outcome};
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn ci(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.arg("ci").args(args).current_dir(folder).env("NO_COLOR", "1").stdin(Stdio::null());
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn write(folder: &Path, name: &str, text: &str) {
    std::fs::write(folder.join(name), text).unwrap();
}

fn can_record() -> bool {
    let is_here = Path::new("/usr/include/valgrind/libvex.h").exists();
    if !is_here {
        println!("SKIP: needs valgrind's headers");
    }
    is_here
}

/// Sorts lines of a program that reads them into memory first.
const SORTED: &str = "import sys; print(len(sorted(sys.stdin.read().split())))";

fn config(program: &str, limit: &str) -> String {
    let words = serde_json::to_string(&["/usr/bin/python3", "-S", "-c", program]).unwrap();
    format!(
        "[[command]]\nname = \"python\"\nrun = {words}\ninput = \"lines\"\nruns = 2\nfail-if = [{limit}]\n"
    )
}

#[test]
fn an_unchanged_command_passes_and_one_that_grew_fails_with_its_cause() {
    if !can_record() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write(
        folder,
        "lines",
        &(0..3000).map(|i| format!("{}\n", i * 7919 % 3001)).collect::<String>(),
    );
    write(folder, "pagetax.toml", &config(SORTED, ""));
    let update = ci(folder, &["--update"]);
    assert_eq!(update.status.code(), Some(0), "{}", said(&update));

    let same = ci(folder, &[]);
    assert_eq!(same.status.code(), Some(0), "{}", said(&same));
    assert!(said(&same).contains("none takes more memory"), "{}", said(&same));

    let grown = format!("spare = bytearray(3 << 20); {SORTED}");
    write(folder, "pagetax.toml", &config(&grown, "\"minor_fault_count > 1\", \"vm_tex > 1\""));
    let args = ["--json", "--markdown=a.md", "--junit=a.xml", "--github=a.txt", "--html=a.html"];
    let output = ci(folder, &args);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let bill: Bill = serde_json::from_slice(&output.stdout).unwrap();
    let find = |reading: &str| {
        let mut findings = bill.commands[0].findings.iter();
        findings.find(|one| one.reading == reading && one.outcome == Outcome::Failed).unwrap()
    };
    assert!(find("touched_4k_count").cause.as_deref().unwrap().contains("more memory"), "{bill:?}");
    assert!(find("minor_fault_count").text.contains("minor_fault_count > 1: it is"), "{bill:?}");
    for name in ["a.md", "a.xml", "a.txt"] {
        let text = std::fs::read_to_string(folder.join(name)).unwrap();
        assert!(text.contains("touched_4k_count was"), "{name}: {text}");
    }
    assert!(folder.join("a.html").exists());
}

#[test]
fn hashes_of_strings_do_not_change_the_bill() {
    if !can_record() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = "d = {str(i): i for i in range(3000)}; print(len(d))";
    write(folder.path(), "lines", "");
    write(folder.path(), "pagetax.toml", &config(program, ""));
    let accesses = || {
        let output = ci(folder.path(), &["--json"]);
        let bill: Result<Bill, _> = serde_json::from_slice(&output.stdout);
        let bill = bill.unwrap_or_else(|error| panic!("{error}: {}", said(&output)));
        bill.commands[0].readings["access_count"].value.unwrap()
    };
    let counts = [accesses(), accesses(), accesses()];
    let [low, high] = [f64::min, f64::max].map(|of| counts.into_iter().reduce(of).unwrap());
    assert!(high / low < 1.002, "{counts:?}");
}

#[test]
fn mistakes_in_the_file_are_placed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let refused = |text: Option<&str>, part: &str| {
        if let Some(text) = text {
            write(folder, "pagetax.toml", text);
        }
        let output = ci(folder, &[]);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(part), "{part}: {}", said(&output));
    };
    refused(None, "cannot read pagetax.toml");
    refused(Some("[[command]]\nname = 1"), "line 2");
    refused(Some("[[command]]\nname = \"a\"\nrun = []"), "`a` runs nothing");
    refused(Some("[[command]]\nname = \"a\"\nrun = [\"true\"]\nrnus = 3"), "unknown field `rnus`");
    let twice = "[[command]]\nname = \"a\"\nrun = [\"true\"]\n".repeat(2);
    refused(Some(&twice), "two commands are called `a`");
    refused(Some(&config("", "\"minor_fault_count\"")), "compares nothing");
    write(folder, "pagetax.toml", "[[command]]\nname = \"a\"\nrun = [\"false\"]");
    let failed = ci(folder, &[]);
    assert!(said(&failed).contains("`a` ends with exit status 1"), "{}", said(&failed));
    let unknown = ci(folder, &["b"]);
    assert!(said(&unknown).contains("no command `b`\n  hint: one of a"), "{}", said(&unknown));
}
