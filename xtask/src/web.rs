//! `cargo xtask web`: builds the page of reports from `web/` into the asset that pagetax carries, and tests
//! it in a browser. `cargo build` takes the asset as it is checked in, and needs no Node.

use crate::packages;
use crate::shell;
use crate::skips::{self, Skip};
use anyhow::{Result, bail};
use std::fs;
use std::process::Command;

const SOURCES: &str = "web";
const ASSET: &str = "crates/cli/assets/report.html";
/// The least version of Node that builds the page.
const NODE: (u32, u32) = (20, 19);
const BROWSER: [&(&str, &str); 1] = [&("/usr/bin/chromium", "chromium")];

/// Builds the page.
///
/// # Errors
/// Without Node, or if the sources have mistakes.
pub fn build() -> Result<()> {
    if let Some(reason) = missing_node() {
        bail!("{reason}");
    }
    install()?;
    make()
}

/// Builds the page, compares it with the one that is checked in, and tests it. Without Node, this is skipped.
///
/// # Errors
/// If the page is not that of its sources, or a test fails.
pub fn check() -> Result<()> {
    if let Some(reason) = missing_node() {
        return skips::report(&[Skip { test: "page of reports".into(), reason }]);
    }
    let (before, made) = (fs::read(ASSET)?, fs::metadata(ASSET)?.modified()?);
    prepare()?;
    make()?;
    if before != fs::read(ASSET)? {
        bail!("{ASSET} is not what {SOURCES} makes; run `cargo xtask web`, and commit it");
    }
    // Otherwise pagetax would be built again.
    fs::File::options().write(true).open(ASSET)?.set_modified(made)?;
    shell::succeed(in_sources("npm").arg("test"))
}

/// Provides what the page's scripts need to open it in a browser.
///
/// # Errors
/// Without Node or a browser.
pub fn prepare() -> Result<()> {
    if let Some(reason) = missing_node() {
        bail!("{reason}");
    }
    packages::provide_files(BROWSER.into_iter())?;
    install()
}

fn make() -> Result<()> {
    shell::succeed(in_sources("npm").args(["run", "--silent", "build"]))
}

fn install() -> Result<()> {
    shell::succeed(in_sources("npm").args(["ci", "--no-audit", "--no-fund", "--silent"]))
}

/// Returns a program that starts in the folder of the page's sources.
pub fn in_sources(program: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir(SOURCES);
    command
}

/// Returns what is missing to build the page.
fn missing_node() -> Option<String> {
    let version = shell::output(Command::new("node").arg("--version")).unwrap_or_default();
    match parsed(&version) {
        Some(found) if found >= NODE && shell::has("npm") => None,
        _ => Some(format!("needs Node {}.{} or newer, and npm", NODE.0, NODE.1)),
    }
}

fn parsed(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.trim().strip_prefix('v')?.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_node_are_compared_by_number() {
        assert_eq!(parsed("v20.20.2\n"), Some((20, 20)));
        assert!(parsed("v9.9.9") < Some(NODE));
        assert_eq!(parsed(""), None);
    }
}
