//! Surroundings in which the user's cache cannot hold the recorder's engine. It is built in the next folder
//! that can, and the program that is recorded keeps its own status.

use std::process::{Command, Output};

/// A shell script for a mount namespace of its own. Its words are pagetax, and a name of [`SURROUNDINGS`].
const SCRIPT: &str = r#"
set -eu
mount --make-rprivate /
for place in /mnt /tmp /var/cache; do mount -t tmpfs tmpfs $place; done
mkdir /mnt/home && cd /
unset XDG_CACHE_HOME XDG_RUNTIME_DIR
export HOME=/mnt/home
case $2 in
    home-unset) unset HOME ;;
    empty-environment) exec env -i "$1" misscurve --engine valgrind -- /bin/sh -c 'exit 7' ;;
    read-only) mount -t tmpfs -o ro tmpfs /mnt/home ;;
    noexec) mount -t tmpfs -o noexec tmpfs /mnt/home ;;
    full) mount -t tmpfs -o size=16k tmpfs /mnt/home ;;
    planted) mkdir -p /mnt/home/.cache/pagetax && chown 65533 /mnt/home/.cache/pagetax ;;
    nowhere) for place in /mnt/home /tmp; do mount -t tmpfs -o noexec tmpfs $place; done ;;
esac
exec "$1" misscurve --engine valgrind -- /bin/sh -c 'exit 7'
"#;
const SURROUNDINGS: [&str; 6] =
    ["home-unset", "empty-environment", "read-only", "noexec", "full", "planted"];

fn runs_here() -> bool {
    let is_here = std::path::Path::new("/usr/include/valgrind/libvex.h").exists();
    let may_mount = || {
        let script = ["--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"];
        Command::new("unshare").args(script).output().is_ok_and(|output| output.status.success())
    };
    match (rustix::process::geteuid().is_root(), is_here) {
        (true, true) if may_mount() => return true,
        (true, true) => println!("SKIP: may make no mount namespace"),
        (false, _) => println!("SKIP: needs root"),
        (_, false) => println!("SKIP: needs valgrind's headers"),
    }
    false
}

fn recorded(surrounding: &str) -> Output {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", SCRIPT, "sh", env!("CARGO_BIN_EXE_pagetax"), surrounding]);
    command.output().unwrap()
}

#[test]
fn an_engine_is_built_where_code_can_be_kept() {
    if !runs_here() {
        return;
    }
    for surrounding in SURROUNDINGS {
        let output = recorded(surrounding);
        let (text, errors) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(7), "{surrounding}: {text}{errors}");
        assert!(errors.contains("TLB") || text.contains("TLB"), "{surrounding}: {text}{errors}");
    }
}

#[test]
fn where_no_folder_can_hold_it_each_is_named_with_its_reason() {
    if !runs_here() {
        return;
    }
    let output = recorded("nowhere");
    let errors = String::from_utf8_lossy(&output.stderr);
    for part in [
        "/mnt/home/.cache/pagetax/recorder is mounted noexec",
        "/tmp/pagetax-0/recorder is",
        "hint: set XDG_CACHE_HOME",
    ] {
        assert!(errors.contains(part), "{part}: {errors}");
    }
    assert_ne!(output.status.code(), Some(7), "{errors}");
}
