//! The library preloaded into real programs, on the real kernel.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Built beside this test, as a crate type of the library under test.
fn library() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let library = here.parent().unwrap().join("libpagetax_preload.so");
    assert!(library.exists(), "{} is not built", library.display());
    library
}

fn preloaded(program: impl AsRef<Path>, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program.as_ref());
    for name in ["GLIBC_TUNABLES", "MPSSHEAP", "MPSSSTACK", "MPSSCFGFILE", "MPSSERRFILE"] {
        command.env_remove(name);
    }
    command.env("LD_PRELOAD", library()).envs(variables.iter().copied());
    command
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

fn text(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

/// Compiles the C program of this folder.
fn touch(directory: &Path) -> PathBuf {
    let program = directory.join("touch");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/touch.c");
    let mut cc = Command::new("cc");
    run(cc.args(["-O1", "-pthread", "-o"]).arg(&program).arg(source));
    program
}

/// Resident KiB of each segment, and how many of them are on huge pages.
fn segments(output: &Output) -> HashMap<String, (u64, u64)> {
    let segment = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<u64>().unwrap();
        (words[0].to_string(), (number(1), number(2)))
    };
    text(output).lines().map(segment).collect()
}

fn thp_can_be_advised() -> bool {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let advised = std::fs::read_to_string(path).is_ok_and(|text| !text.contains("[never]"));
    if !advised {
        println!("SKIP: transparent huge pages are switched off ({path})");
    }
    advised
}

#[test]
fn heap_arena_and_stack_come_on_huge_pages() {
    if !thp_can_be_advised() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = touch(directory.path());
    let plain = segments(&run(&mut preloaded(&program, &[])));
    let cured =
        segments(&run(&mut preloaded(&program, &[("MPSSHEAP", "2M"), ("MPSSSTACK", "2M")])));
    let always = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|text| text.contains("[always]"));
    assert!(always || plain["heap"].1 == 0, "{plain:?}");
    for (name, (resident_kb, huge_kb)) in cured {
        // A segment begins and ends where it likes; what lies between is on 2 MiB pages.
        let ends_kb = resident_kb - huge_kb;
        assert!(ends_kb <= 2 * 2048 && huge_kb > ends_kb / 2, "{name}: {huge_kb} of {resident_kb}");
    }
}

#[test]
fn the_program_does_what_it_would_have() {
    let variables = [("MPSSHEAP", "2M"), ("MPSSSTACK", "2M")];
    let script = "echo $0 $1; cat /proc/$$/comm; ls /proc/self/fd; env | grep PAGETAX; exit 7";
    let plain = preloaded("/bin/sh", &[]).args(["-c", script, "a", "b c"]).output().unwrap();
    let wrapped =
        preloaded("/bin/sh", &variables).args(["-c", script, "a", "b c"]).output().unwrap();
    assert_eq!(text(&plain), text(&wrapped));
    assert_eq!((wrapped.status.code(), wrapped.stderr), (Some(7), plain.stderr));
}

#[test]
fn a_script_keeps_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("named");
    std::fs::write(&script, "#!/bin/sh\ncat /proc/$$/comm\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(text(&run(&mut preloaded(&script, &[("MPSSHEAP", "2M")]))), "named\n");
}

#[test]
fn wishes_are_inherited_over_exec() {
    let variables = [("MPSSHEAP", "2M")];
    for shell in ["sh -c 'env'", "env sh -c env"] {
        let output = run(preloaded("/bin/sh", &variables).args(["-c", shell]));
        let tunables: Vec<_> =
            text(&output).lines().filter(|line| line.starts_with("GLIBC_TUNABLES=")).collect();
        assert_eq!(tunables, ["GLIBC_TUNABLES=glibc.malloc.hugetlb=1"], "{shell}");
    }
}

#[test]
fn tunables_of_the_user_stand() {
    let own = ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1");
    let output = run(&mut preloaded("/usr/bin/env", &[own, ("MPSSHEAP", "2M")]));
    assert!(
        text(&output).contains("GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1\n")
    );
    let own = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0");
    let output = run(&mut preloaded("/usr/bin/env", &[own, ("MPSSHEAP", "2M")]));
    assert!(text(&output).contains("GLIBC_TUNABLES=glibc.malloc.hugetlb=0\n"));
}

/// Runs `env` under a configuration; returns whether the heap was asked for, and the complaints.
fn configured(config: &str, heap: Option<&str>) -> (bool, String) {
    let directory = tempfile::tempdir().unwrap();
    let (file, errors) = (directory.path().join("mpss.conf"), directory.path().join("errors"));
    std::fs::write(&file, config).unwrap();
    let mut command = preloaded("/usr/bin/env", &[]);
    command.env("MPSSCFGFILE", &file).env("MPSSERRFILE", &errors);
    heap.map(|heap| command.env("MPSSHEAP", heap));
    let asked = text(&run(&mut command)).contains("GLIBC_TUNABLES");
    (asked, std::fs::read_to_string(&errors).unwrap_or_default())
}

#[test]
fn the_configuration_goes_before_the_environment() {
    assert!(configured("env:2M:\n", None).0);
    assert!(configured("/usr/bin/e*:2M:\n", None).0);
    assert!(!configured("env::\n", Some("2M")).0, "an empty field cancels");
    assert!(configured("sort::\n", Some("2M")).0, "no match: the environment applies");
    assert!(!configured("env::\nenv:2M:\n", None).0, "the first match wins");
    assert!(!configured("env x:2M:\n", None).0, "no such argument");
}

#[test]
fn complaints_go_to_the_file_and_the_program_runs() {
    let (asked, errors) = configured("env\nenv:3M:\nenv:2M:\n", None);
    assert!(asked);
    assert!(errors.contains("line 1: missing delimiter"), "{errors}");
    assert!(errors.contains("line 2: invalid page size"), "{errors}");
    let (asked, errors) = configured("", Some("lots"));
    assert!(!asked && errors.contains("MPSSHEAP=lots: invalid page size"), "{errors}");
    let directory = tempfile::tempdir().unwrap();
    let errors = directory.path().join("errors");
    let missing = [("MPSSCFGFILE", "/nonexistent"), ("MPSSERRFILE", errors.to_str().unwrap())];
    run(&mut preloaded("/bin/true", &missing));
    assert!(std::fs::read_to_string(&errors).unwrap().contains("cannot open /nonexistent"));
    run(&mut preloaded("/bin/true", &[("MPSSHEAP", "3M"), ("MPSSERRFILE", "/nonexistent/x")]));
}
