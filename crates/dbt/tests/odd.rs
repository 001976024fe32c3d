//! Tests of programs that make unusual use of signals and system calls, and of a panic in the engine.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{compiled, has, run};

const BURSTS: [&str; 3] = ["20000:100000", "20000:100000:20000", "1:100000:1000000000000000"];

fn same(what: &str) {
    if !has("cc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("odd.c", folder.path());
    let (natively, _) = run(&program, &[what], None, folder.path());
    assert_eq!(natively.status.code(), Some(0), "natively");
    for bursts in BURSTS {
        let (sampled, said) = run(&program, &[what], Some(bursts), folder.path());
        let [ours, theirs] = [&sampled, &natively].map(|of| String::from_utf8_lossy(&of.stdout));
        assert_eq!((sampled.status, ours), (natively.status, theirs), "{what}, {bursts}: {said}");
        assert!(!said.contains("failed"), "{what}, {bursts}: {said}");
    }
}

#[test]
fn filters_of_system_calls_kill_nobody() {
    ["prctl", "seccomp", "threads", "child"].iter().for_each(|what| same(what));
}

#[test]
fn no_signal_of_ours_is_seen() {
    ["sigwait", "signalfd", "handlers"].iter().for_each(|what| same(what));
}

#[test]
fn threads_are_cancelled() {
    same("cancel");
}

#[test]
fn the_alternative_stack_is_the_programs() {
    same("alternative");
}

/// Tests a panic at different reasons for a return from translated code.
#[test]
fn a_panic_of_the_engine_ends_no_program() {
    if !has("cc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("odd.c", folder.path());
    for bursts in ["20000:100000:0", "20000:100000:20000", "1:100000:1000000000000000"] {
        for nth in [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144] {
            let bursts = format!("{bursts}:{nth}");
            let (sampled, said) = run(&program, &["work"], Some(&bursts), folder.path());
            assert_eq!(sampled.status.code(), Some(3), "{bursts}: {said}");
            assert_eq!((&*sampled.stdout, &*sampled.stderr), (&b"worked\n"[..], &b""[..]));
            assert!(said.contains("failed: dispatch.rs:"), "{bursts}: {said}");
        }
    }
}
