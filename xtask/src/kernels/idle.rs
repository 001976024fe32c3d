//! The part `idle`: `diagnose --all` on a kernel of Ubuntu, which has idle page tracking and no DAMON for
//! us.

use super::small::between;
use super::{SmallGuest, fetch};
use crate::shell;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::process::Command;

const DEFAULT_VERSION: &str = "5.15";
const LOAD_SOURCE: &str = "crates/cli/tests/live/gather.c";
const LIMIT: u32 = 900;

/// Boots the guest. Fails unless the process that reads its memory at random comes first, by idle page
/// tracking.
pub fn run(versions: &[String]) -> Result<()> {
    let pagetax = shell::pagetax()?;
    let folder = tempfile::tempdir_in("target")?;
    let gather = folder.path().join("gather");
    let mut cc = Command::new("cc");
    shell::succeed(cc.args(["-O1", "-static", LOAD_SOURCE, "-o"]).arg(&gather))?;
    let version = versions.first().map_or(DEFAULT_VERSION, String::as_str);
    let text = SmallGuest {
        kernel: &fetch::any_kernel(version)?,
        script: include_str!("idle.sh"),
        programs: &[&pagetax, &gather.to_string_lossy()],
        modules: &[],
        folders: &[],
        disks: &[],
        memory: &["-m", "1024"],
        append: "",
        limit: LIMIT,
    }
    .run()?;
    let json = between(&text, "@@ranked\n", "@@end")?;
    let ranking: Value = serde_json::from_str(json).with_context(|| json.to_string())?;
    let how = ranking["how"].as_str().context("no source")?;
    ensure!(how.contains("idle page tracking"), "{how}");
    let first = &ranking["processes"][0];
    let mib = |key: &str| first[key]["value"].as_f64().map(|bytes| bytes / 1048576.0);
    let (name, base, touched) = (&first["name"], mib("base_bytes"), mib("touched_bytes"));
    println!(
        "Linux {version}: {name} is first; MiB on base pages {base:?}, touched in 2 ms {touched:?}"
    );
    ensure!(name == "gather" && touched > Some(0.1), "the random reader is not first:\n{json}");
    Ok(())
}
