//! The part `idle`: `diagnose --all` and `top` on a kernel of Ubuntu, which has idle page tracking and no
//! DAMON for us; on request on Debian's, which have DAMON.

use super::small::between;
use super::{SmallGuest, fetch};
use crate::shell;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::process::Command;

const DEFAULT_VERSION: &str = "5.15";
const LOAD_SOURCE: &str = "crates/cli/tests/live/gather.c";
const LIMIT: u32 = 900;

/// Boots the guest. Fails unless the process that reads its memory at random comes first by the pages that
/// the kernel sees touched, and has the most walks in `top`.
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
        memory: &["-m", "1024"],
        limit: LIMIT,
        ..SmallGuest::default()
    }
    .run()?;
    let json = between(&text, "@@ranked\n", "@@end")?;
    let ranking: Value = serde_json::from_str(json).with_context(|| json.to_string())?;
    let how = ranking["how"].as_str().context("no source")?;
    let source = if version == DEFAULT_VERSION { "by idle page tracking" } else { "by DAMON" };
    ensure!(how.contains(source), "{how}");
    let first = &ranking["processes"][0];
    let mib = |key: &str| first[key]["value"].as_f64().map(|bytes| bytes / 1048576.0);
    let (name, base, touched) = (&first["name"], mib("base_bytes"), mib("touched_bytes"));
    println!(
        "Linux {version}: {name} is first; MiB on base pages {base:?}, touched in 2 ms {touched:?}"
    );
    let top: Value = serde_json::from_str(between(&text, "@@top\n", "@@end of top")?)?;
    let walks = |process: &Value| process["figures"]["walk_ns"].as_u64();
    let all = top["processes"].as_array().context("no processes")?.iter();
    let hottest = all.max_by_key(|process| walks(process)).context("no process")?;
    println!("top: most walks in {}: {:?} ns", hottest["name"], walks(hottest));
    ensure!(hottest["name"] == "gather" && walks(hottest) > Some(0), "{}", top["missing"]);
    ensure!(name == "gather" && touched > Some(0.1), "the random reader is not first:\n{json}");
    Ok(())
}
