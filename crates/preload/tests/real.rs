//! Tests of the library preloaded into real programs, on the real kernel.

mod common;

use common::{preloaded, thp_can_be_advised};
use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs a command that must succeed.
pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

fn text(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

/// Compiles a C program of this folder.
fn compile(name: &str, directory: &Path) -> PathBuf {
    let program = directory.join(name);
    let source = format!("{}/tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
    run(Command::new("cc").args(["-O1", "-pthread", "-o"]).arg(&program).arg(source));
    program
}

/// Parses the resident KiB of each segment, and the part of them on huge pages.
fn segments(output: &Output) -> HashMap<String, (u64, u64)> {
    let segment = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<u64>().unwrap();
        (words[0].to_string(), (number(1), number(2)))
    };
    text(output).lines().map(segment).collect()
}

#[test]
fn heap_arena_and_stack_come_on_huge_pages() {
    if !thp_can_be_advised() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = compile("touch", directory.path());
    let deep = format!("ulimit -s 65536; exec {}", program.display());
    let filled = |variables: &[(&str, &str)]| {
        segments(&run(preloaded("/bin/sh", variables).args(["-c", &deep])))
    };
    let (plain, cured) = (filled(&[]), filled(&BOTH));
    let always = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|text| text.contains("[always]"));
    assert!(always || plain["heap"].1 == 0, "{plain:?}");
    for (name, (resident_kb, huge_kb)) in cured {
        // The stack's top was in use before the advice.
        let percent = if name == "stack" { 90 } else { 95 };
        assert!(huge_kb * 100 >= resident_kb * percent, "{name}: {huge_kb} of {resident_kb}");
    }
}

#[test]
fn the_end_of_the_heap_is_mallocs() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile("heap_end", directory.path());
    let mut command = preloaded(&program, &[("MPSSHEAP", "2M"), ("MALLOC_ARENA_MAX", "1")]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, text(&output));
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
    // Another process writes it: a child that a thread of this one starts meanwhile would keep it open for
    // writing, and it could not be executed.
    let write = "printf '#!/bin/sh\\ncat /proc/$$/comm\\n' >named && chmod 755 named";
    run(Command::new("sh").args(["-c", write]).current_dir(directory.path()));
    assert_eq!(text(&run(&mut preloaded(&script, &[("MPSSHEAP", "2M")]))), "named\n");
}

const BOTH: [(&str, &str); 2] = [("MPSSHEAP", "2M"), ("MPSSSTACK", "2M")];

/// Runs `asked`, and returns whether its heap and its stack are advised.
fn asked(command: &mut Command) -> (bool, bool) {
    let output = run(command);
    let said = text(&output);
    (said.contains("heap=1"), said.contains("stack=1"))
}

#[test]
fn wishes_are_inherited_over_exec() {
    if !thp_can_be_advised() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = compile("asked", directory.path());
    let program = program.to_str().unwrap();
    std::fs::write(directory.path().join("Makefile"), format!("all:\n\t@{program}\n")).unwrap();
    let directory = directory.path().to_str().unwrap();
    let by: [&[&str]; 4] = [
        &[program],
        &["/bin/sh", "-c", program],
        &["/usr/bin/env", "sh", "-c", program],
        &["/usr/bin/make", "-s", "-C", directory],
    ];
    for argv in by {
        if !Path::new(argv[0]).exists() {
            println!("SKIP: {} is not installed", argv[0]);
            continue;
        }
        let mut command = preloaded(argv[0], &BOTH);
        assert_eq!(asked(command.args(&argv[1..])), (true, true), "{argv:?}");
    }
}

#[test]
fn set_id_programs_are_left_alone() {
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIP: only root can make a set-id program of another user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let program = compile("asked", directory.path());
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o4755)).unwrap();
    assert_eq!(asked(preloaded(&program, &BOTH).uid(65534)), (false, false));
}

#[test]
fn what_the_user_told_malloc_stands() {
    if !thp_can_be_advised() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = compile("asked", directory.path());
    let heap = |name: &str, value: &str| {
        asked(&mut preloaded(&program, &[("MPSSHEAP", "2M"), (name, value)])).0
    };
    assert!(heap("GLIBC_TUNABLES", "glibc.malloc.arena_max=1"));
    assert!(heap("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"));
    assert!(!heap("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0"));
    assert!(!heap("GLIBC_TUNABLES", "glibc.malloc.top_pad=4096"));
    assert!(!heap("MALLOC_TRIM_THRESHOLD_", "4096"));
}

#[test]
fn an_allocation_that_fits_is_not_refused_for_our_sake() {
    // 100 MiB of address space hold 60 MiB of small chunks, but not with 64 MiB of room in addition.
    let script = "ulimit -v 100000; exec python3 -S -c 'a = [b\"x\" * 2000 for i in range(30000)]'";
    let output = preloaded("/bin/sh", &[]).args(["-c", script]).output().unwrap();
    if !output.status.success() {
        println!("SKIP: python3 is not here, or needs more: {output:?}");
        return;
    }
    run(preloaded("/bin/sh", &BOTH).args(["-c", script]));
}

/// Runs `asked` with an argument under a configuration. Returns whether heap and stack are advised, and the
/// messages.
fn configured(config: &str, variables: &[(&str, &str)]) -> ((bool, bool), String) {
    let directory = tempfile::tempdir().unwrap();
    let program = compile("asked", directory.path());
    let (file, errors) = (directory.path().join("mpss.conf"), directory.path().join("errors"));
    let config = config.replace("DIR", directory.path().to_str().unwrap());
    std::fs::write(&file, config).unwrap();
    let mut command = preloaded(&program, variables);
    command.arg("one argument").env("MPSSCFGFILE", &file).env("MPSSERRFILE", &errors);
    (asked(&mut command), std::fs::read_to_string(&errors).unwrap_or_default())
}

#[test]
fn the_configuration_goes_before_the_environment() {
    if !thp_can_be_advised() {
        return;
    }
    let heap = [("MPSSHEAP", "2M")];
    /// A configuration, variables, the expected advice for heap and stack, and the reason.
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], (bool, bool), &'a str);
    let cases: &[Case] = &[
        ("", &BOTH, (true, true), "no match: the environment applies"),
        ("sort:4K:4K\n", &BOTH, (true, true), "another program's line"),
        ("asked:2M:\n", &[], (true, false), "an empty field: not set"),
        ("asked::2M\n", &heap, (false, true), "an empty field cancels the environment's value"),
        ("asked:2M:2M\nasked::\n", &[], (true, true), "the first match wins"),
        ("asked::\nasked:2M:2M\n", &BOTH, (false, false), "the first match wins, if empty too"),
        ("ask*:2M:\n", &[], (true, false), "a pattern globs the basename"),
        ("DIR/as?ed:2M:\n", &[], (true, false), "with a slash in front the whole path"),
        ("/asked:2M:\n", &[], (false, false), "and not less than it"),
        ("asked one*:2M:\n", &[], (true, false), "an argument"),
        ("asked one:2M:\n", &[], (false, false), "a whole argument"),
        ("\n  \nasked:2097152:2m\n", &[], (true, true), "blank lines, sizes without unit"),
        ("asked:0:0x200000\n", &heap, (false, true), "0: as the system likes; hexadecimal"),
    ];
    for (config, variables, wanted, why) in cases {
        let (got, errors) = configured(config, variables);
        assert_eq!((got, errors.as_str()), (*wanted, ""), "{why}: {config:?}");
    }
}

#[test]
fn complaints_go_to_the_file_and_the_program_runs() {
    if !thp_can_be_advised() {
        return;
    }
    let long = "x".repeat(5000);
    let config = format!("asked\nasked:3M:\n# no comment\n{long}:2M:\nasked:2M:\n");
    let (got, errors) = configured(&config, &[]);
    assert_eq!(got, (true, false));
    let said: Vec<_> = errors.lines().filter_map(|line| line.split(", line ").nth(1)).collect();
    let no_delimiter = "missing delimiter, expected exec:heap:stack";
    assert_eq!(
        said,
        [
            format!("1: {no_delimiter}"),
            "2: invalid page size".into(),
            format!("3: {no_delimiter}"),
            "4: line too long".into()
        ]
    );
    let (got, errors) = configured("", &[("MPSSHEAP", "lots"), ("MPSSSTACK", "2M")]);
    assert_eq!(got, (false, true));
    assert!(errors.contains("MPSSHEAP=lots: invalid page size"), "{errors}");
    let (got, errors) = configured("", &[("MPSSHEAP", "8M"), ("MPSSSTACK", "1G")]);
    assert_eq!(got, (false, false));
    assert_eq!(errors.matches("invalid page size on this system").count(), 2, "{errors}");
}

#[test]
fn the_file_of_complaints_is_appended_to() {
    let directory = tempfile::tempdir().unwrap();
    let errors = directory.path().join("errors");
    let missing = [("MPSSCFGFILE", "/nonexistent"), ("MPSSERRFILE", errors.to_str().unwrap())];
    for times in 1..3 {
        run(&mut preloaded("/bin/true", &missing));
        let text = std::fs::read_to_string(&errors).unwrap();
        assert_eq!(text.matches("cannot open /nonexistent\n").count(), times, "{text}");
    }
}

#[test]
fn without_a_file_complaints_go_to_syslog() {
    let path = Path::new("/dev/log");
    let socket = match UnixDatagram::bind(path) {
        Ok(socket) => socket,
        Err(error) => {
            println!("SKIP: cannot take the place of syslogd at /dev/log: {error}");
            return;
        }
    };
    socket.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
    let mut message = [0; 1024];
    let mut complaint = |variables: &[(&str, &str)]| {
        run(&mut preloaded("/bin/true", variables));
        let len = socket.recv(&mut message);
        len.map(|len| String::from_utf8_lossy(&message[..len]).into_owned())
    };
    let plain = complaint(&[("MPSSHEAP", "3M")]);
    let unopened = complaint(&[("MPSSHEAP", "2M"), ("MPSSERRFILE", "/nonexistent/x")]);
    std::fs::remove_file(path).unwrap();
    let (plain, unopened) = (plain.unwrap(), unopened.unwrap());
    assert!(plain.starts_with("<11>libpagetax_preload["), "user.err: {plain}");
    assert!(plain.ends_with("MPSSHEAP=3M: invalid page size"), "{plain}");
    assert!(unopened.ends_with("cannot open /nonexistent/x"), "{unopened}");
}
