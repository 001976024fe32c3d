//! Tests that sequences of instructions have the same results in a burst as natively: registers, flags,
//! stack, memory.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{COUNTED_ON_REQUEST, ON_REQUEST, has, run};
use std::path::Path;
use std::process::Command;

#[test]
fn instructions_do_the_same_in_a_burst() {
    if !has("cc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sequences.c");
    let program = folder.path().join("sequences");
    let mut cc = Command::new("cc");
    // At a fixed address, as the program prints addresses.
    cc.args(["-O1", "-fno-pie", "-no-pie"]).arg(source).arg("-o").arg(&program);
    assert!(cc.status().unwrap().success());
    let program = program.to_str().unwrap();
    let (natively, _) = run(program, &[], None, folder.path());
    let (in_bursts, said) = run(program, &[], Some(ON_REQUEST), folder.path());
    assert_eq!(in_bursts.status.code(), Some(0), "{said}");
    let (counted, said_counted) = run(program, &[], Some(COUNTED_ON_REQUEST), folder.path());
    assert_eq!(counted.status.code(), Some(0), "{said_counted}");
    let [natively, in_bursts, counted] =
        [natively, in_bursts, counted].map(|output| String::from_utf8(output.stdout).unwrap());
    for (natively, sampled) in [(&natively, in_bursts), (&natively, counted)] {
        for (natively, sampled) in natively.lines().zip(sampled.lines()) {
            assert_eq!(sampled, natively);
        }
        assert_eq!(sampled.len(), natively.len());
    }
    // Both kinds of translations count the same, except for blocks in which an instruction faults.
    let instructions = |said: &str, what: &str| -> i64 {
        let rest = said.split(what).nth(1).unwrap();
        rest.split([',', '\n']).next().unwrap().trim().parse().unwrap()
    };
    let logged = instructions(&said, "instructions in bursts: ");
    let counted = instructions(&said_counted, "counted between them: ");
    assert!(logged > 10_000 && (counted - logged).abs() <= 15 * 64, "{logged} and {counted}");
    // All sequences but two run in a burst to their end; those two have an instruction that the program
    // executes natively. With the memory unreadable, 15 sequences fault in a burst, and four do not touch it.
    let count = |what: &str| -> usize {
        let before = said.split(what).next().unwrap();
        before.rsplit([' ', ',']).find(|word| !word.is_empty()).unwrap().parse().unwrap()
    };
    assert_eq!(
        (count(" at a system call"), count(" at an instruction")),
        (18 * 16 + 4, 15),
        "{said}"
    );
}
