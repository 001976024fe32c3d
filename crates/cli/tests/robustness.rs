//! Whatever stands in a job file: an answer and exit code 2, never a panic, never a run.

use std::path::Path;
use std::process::{Command, Output};

fn pagetax(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetax")).args(args).env("NO_COLOR", "1").output().unwrap()
}

fn assert_refused(path: &Path) {
    let output = pagetax(&["run", path.to_str().unwrap()]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{}: {stderr}", path.display());
    assert!(stderr.starts_with("error: "), "{}: {stderr}", path.display());
    assert!(stderr.contains("hint: "), "{}: {stderr}", path.display());
    assert!(output.stdout.is_empty());
}

#[test]
fn garbage_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("job.toml");
    let deep = format!("name = {}1{}", "[".repeat(5000), "]".repeat(5000));
    let nested = format!("name = \"n\"\n[params]\na = \"{}1\"\n", "(".repeat(5000));
    let garbage: &[&[u8]] = &[
        b"",
        b"\0\0\0\0",
        b"\xff\xfe\xfd",
        b"name = \"\\u0000\"",
        b"name = 3",
        b"[[phase]]",
        b"name = \"x\"\nphase = 3",
        b"name = \"x\"\n[[phase]]\nname = \"p\"\nops = [{ touch = \"\" }]",
        b"name = \"x\"\n[[phase]]\nname = \"p\"\nops = [{ sleep = \"1e400s\" }]",
        "name = \"x\"\n[[phase]]\nname = \"p\"\nops = [{ sleep = \"１s\" }]".as_bytes(),
        deep.as_bytes(),
        nested.as_bytes(),
    ];
    for bytes in garbage {
        std::fs::write(&path, bytes).unwrap();
        assert_refused(&path);
    }
}

/// Parses each built-in job, cut off or damaged at some places: it may succeed, but never panics.
#[test]
fn damaged_jobs_do_not_panic() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("job.toml");
    for name in ["mlock-cycle", "mmap3", "tlb-gather", "vmtest"] {
        let text = pagetax(&["jobs", name]).stdout;
        for cut in (0..text.len()).step_by(text.len() / 7) {
            let mut damaged = text.clone();
            damaged[cut] = b'"';
            for bytes in [&text[..cut], &damaged] {
                std::fs::write(&path, bytes).unwrap();
                let output = pagetax(&["jobs", path.to_str().unwrap()]);
                assert!(matches!(output.status.code(), Some(0 | 2)), "{output:?}");
            }
        }
    }
}

#[test]
fn what_is_no_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    assert_refused(directory.path());
    assert_refused(&directory.path().join("vanished.toml"));
    assert_refused(Path::new("/dev/zero"));
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_pagetax"))
        .args(["completions", "bash"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(141));
    assert!(output.stderr.is_empty(), "{output:?}");
}
