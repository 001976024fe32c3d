//! Programs that a library of ours cannot be loaded into, and surroundings in which it cannot be found: the
//! command still runs, and its user reads the one true reason.

mod pages;

use pages::{compiled, installed, ppgsz, stderr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const PAGETAX: &str = env!("CARGO_BIN_EXE_pagetax");
const SIZES: [&str; 2] = ["-o", "heap=2M,stack=2M"];
const OTHER_REASONS: [&str; 5] =
    ["linked statically", "another C library", "is built for", "set-id", "libpagetax_preload.so"];

/// Asserts that the output has this reason, and none of the others.
fn assert_reason(output: &Output, reason: &str) {
    let errors = stderr(output);
    assert!(errors.contains(reason) && errors.contains("hint:"), "no `{reason}`: {errors}");
    for other in OTHER_REASONS.iter().filter(|other| **other != reason) {
        assert!(!errors.contains(other), "`{other}` beside `{reason}`: {errors}");
    }
}

fn ran(args: &[&str], program: &str) -> Output {
    ppgsz(&SIZES).arg(program).args(args).output().unwrap()
}

/// Returns a copy of a program with the architecture of another machine in its header.
fn foreign(program: &str, folder: &Path) -> PathBuf {
    let mut file = std::fs::read(program).unwrap();
    const E_MACHINE: usize = 18;
    const AARCH64: [u8; 2] = [183, 0];
    file[E_MACHINE..E_MACHINE + 2].copy_from_slice(&AARCH64);
    let path = folder.join("foreign");
    std::fs::write(&path, file).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path
}

#[test]
fn static_and_musl_programs_run_and_the_note_says_what_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled(folder.path(), "exits", &["-static"]);
    let output = ran(&["7"], &program);
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    assert_reason(&output, "linked statically");
    if !installed("musl-gcc") {
        return;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ppgsz/exits.c");
    let program = folder.path().join("musl");
    let built = Command::new("musl-gcc").arg(source).arg("-o").arg(&program).status();
    assert!(built.unwrap().success());
    let output = ran(&["7"], program.to_str().unwrap());
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    assert_reason(&output, "another C library");
}

#[test]
fn a_foreign_program_is_named_as_such() {
    if Path::new("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists() {
        return println!("SKIP: QEMU runs such programs here");
    }
    let folder = tempfile::tempdir().unwrap();
    let program = foreign("/bin/true", folder.path());
    let program = program.to_str().unwrap();
    let output = ran(&[], program);
    assert_eq!(output.status.code(), Some(126), "{}", stderr(&output));
    assert_reason(&output, "is built for");
    let output = Command::new(PAGETAX).args(["diagnose", "--", program]).output().unwrap();
    assert_eq!(output.status.code(), Some(126), "{}", stderr(&output));
    assert!(stderr(&output).contains("is built for Aarch64"), "{}", stderr(&output));
}

#[test]
fn trials_of_a_set_id_program_are_skipped_for_that_reason() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIP: needs root");
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let copy = |from: &str, mode| {
        let place = folder.path().join(Path::new(from).file_name().unwrap());
        std::fs::copy(from, &place).unwrap();
        std::fs::set_permissions(&place, PermissionsExt::from_mode(mode)).unwrap();
        place
    };
    let (own, set_id) = (copy(PAGETAX, 0o755), copy("/bin/true", 0o4755));
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(own);
    command.args(["diagnose", "--json", "--runs", "1", "--pages", "4K,2M", "--"]).arg(set_id);
    let output = command.current_dir("/").output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)));
    let skipped = report["skipped"].as_array().unwrap();
    let thp = skipped.iter().find(|one| one["name"] == "thp-2M").unwrap();
    assert!(thp["why"].as_str().unwrap().contains("set-id"), "{thp}");
}

#[test]
fn a_trial_says_what_program_cannot_have_our_library_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let mut programs = vec![(compiled(folder.path(), "exits", &["-static"]), "linked statically")];
    if installed("musl-gcc") {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ppgsz/exits.c");
        let musl = folder.path().join("musl");
        let built = Command::new("musl-gcc").arg(source).arg("-o").arg(&musl).status();
        assert!(built.unwrap().success());
        programs.push((musl.to_str().unwrap().into(), "another C library"));
    }
    for (program, reason) in programs {
        let mut command = Command::new(PAGETAX);
        command.args(["diagnose", "--json", "--runs", "2", "--pages", "stack=2M", "--"]);
        // Long enough to be looked at.
        let script = format!("{program} 0 closed wait");
        let output = command.args(script.split(' ')).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)));
        let trials = report["trials"].as_array().unwrap();
        let stack = trials.iter().find(|trial| trial["name"] == "stack-2M").unwrap();
        let why = stack["took"]["why"].as_str().unwrap_or_default();
        assert!(why.contains(reason), "{program}: {stack}");
        for other in OTHER_REASONS.iter().filter(|other| **other != reason) {
            assert!(!why.contains(other), "{program}: {stack}");
        }
    }
}

#[test]
fn a_command_runs_without_our_library_and_reads_why() {
    let empty = tempfile::tempdir().unwrap();
    let mut command = ppgsz(&SIZES);
    command.args(["sh", "-c", "exit 7"]).env("PAGETAX_LIBRARY_DIR", empty.path());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    let errors = stderr(&output);
    let reason = format!("{} has no libpagetax_preload.so", empty.path().display());
    assert!(errors.contains(&reason) && errors.contains("hint: name the directory"), "{errors}");
    assert_eq!(errors.matches(&reason).count(), 1, "{errors}");
}

#[test]
fn other_preloads_an_empty_environment_and_closed_descriptors_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo $LD_PRELOAD; exec 0<&- 1>&- 2>&-; exit 7";
    let mut command = ppgsz(&SIZES);
    let output = command.args(["/bin/sh", "-c", script]).env("LD_PRELOAD", "libm.so.6").output();
    let output = output.unwrap();
    assert_eq!((output.status.code(), &*stderr(&output)), (Some(7), ""));
    let preloads = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(preloads.ends_with("/libpagetax_preload.so:libm.so.6"), "{preloads}");

    let mut command = ppgsz(&SIZES);
    let output = command.args(["/bin/sh", "-c", "exit 7"]).env_clear().output().unwrap();
    assert_eq!((output.status.code(), &*stderr(&output)), (Some(7), ""));

    let program = compiled(folder.path(), "exits", &[]);
    let output = ran(&["7", "closed"], &program);
    assert_eq!((output.status.code(), &*stderr(&output)), (Some(7), ""));
}

#[test]
fn a_container_without_ptrace_changes_neither_the_command_nor_its_status() {
    let folder = tempfile::tempdir().unwrap();
    let denies = compiled(folder.path(), "denies", &[]);
    let plain = compiled(folder.path(), "exits", &[]);
    let fixed = folder.path().join("static");
    std::fs::create_dir(&fixed).unwrap();
    let fixed = compiled(&fixed, "exits", &["-static"]);
    for program in [plain, fixed] {
        let mut command = Command::new(&denies);
        let output = command.args([PAGETAX, "ppgsz"]).args(SIZES).args([&program, "7"]).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(7), "{program}: {}", stderr(&output));
    }
}
