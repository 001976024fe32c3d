//! The Debian packages that tests need, in one place: installed by root, named to others.

use crate::shell;
use anyhow::Result;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// A program that tests run, and the package it comes in.
const NEEDED: &[(&str, &str)] = &[
    ("c++", "g++"),
    ("cc", "gcc"),
    ("dpkg-shlibdeps", "dpkg-dev"),
    ("gzip", "gzip"),
    ("ip", "iproute2"),
    ("kill", "procps"),
    ("make", "make"),
    ("man", "man-db"),
    ("musl-gcc", "musl-tools"),
    ("python3", "python3"),
    ("redis-server", "redis-server"),
    ("qemu-x86_64", "qemu-user"),
    ("sqlite3", "sqlite3"),
    ("valgrind", "valgrind"),
    ("xz", "xz-utils"),
];

/// Installs the packages of missing programs, if we may. Tests of missing programs skip, and print it.
pub fn provide() -> Result<()> {
    install(NEEDED.iter().filter(|(program, _)| !shell::has(program)).map(|(_, package)| *package))
}

/// Installs the packages of missing files, if we may.
pub fn provide_files(
    needed: impl Iterator<Item = &'static (&'static str, &'static str)>,
) -> Result<()> {
    install(needed.filter(|(file, _)| !Path::new(file).exists()).map(|(_, package)| *package))
}

/// Installs these packages where they are missing, if we may.
pub fn install_named(packages: &[String]) -> Result<()> {
    let is_missing = |package: &&str| {
        let mut query = Command::new("dpkg-query");
        !shell::output(query.args(["-W", "-f", "${Status}", package]))
            .is_ok_and(|status| status.ends_with(" installed"))
    };
    install(packages.iter().map(String::as_str).filter(is_missing))
}

fn install<'a>(packages: impl Iterator<Item = &'a str>) -> Result<()> {
    let missing = BTreeSet::from_iter(packages);
    if missing.is_empty() {
        return Ok(());
    }
    let missing = Vec::from_iter(missing).join(" ");
    let install = format!("apt-get install -y --no-install-recommends {missing}");
    if !is_root()? || !shell::has("apt-get") {
        println!("some tests will skip; as root, install what they need: {install}");
        return Ok(());
    }
    println!("installing {missing}");
    let script = format!("apt-get update -qq && {install}");
    let quiet = Command::new("sh")
        .args(["-c", &script])
        .env("DEBIAN_FRONTEND", "noninteractive")
        .output()?;
    if !quiet.status.success() {
        println!("{}", String::from_utf8_lossy(&quiet.stderr));
        println!("some tests will skip, as this failed: {script}");
    }
    Ok(())
}

/// Returns true if this is root.
pub fn is_root() -> Result<bool> {
    Ok(shell::output(Command::new("id").arg("-u"))?.trim() == "0")
}
