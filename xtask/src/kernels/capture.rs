//! The part `capture`: the files that `stat`, `hatstat` and `top` read, of older kernels and of both versions
//! of cgroups, as trees for the tests of `crates/host`.

use super::small::between;
use super::{SmallGuest, fetch};
use anyhow::Result;
use std::fs;
use std::path::Path;

/// The kernels of the trees.
const VERSIONS: [&str; 4] = ["5.10", "5.15", "6.1", "6.8"];
const TREES: &str = "crates/host/tests/data/captured";
const LIMIT: u32 = 120;

/// Boots each kernel once for each version of cgroups, and writes its tree.
pub fn run(versions: &[String]) -> Result<()> {
    fs::create_dir_all(TREES)?;
    for version in
        VERSIONS.iter().filter(|v| versions.is_empty() || versions.iter().any(|w| w == *v))
    {
        let kernel = fetch::any_kernel(version)?;
        for cgroups in ["1", "2"] {
            let script = format!("version={cgroups}\n{}", include_str!("capture.sh"));
            let guest = SmallGuest {
                kernel: &kernel,
                script: &script,
                programs: &[],
                memory: &["-m", "512"],
                limit: LIMIT,
                ..SmallGuest::default()
            };
            let text = guest.run()?;
            let tree = between(&text, "@@files\n", "@@end")?;
            let path = Path::new(TREES).join(format!("linux-{version}-cgroup-v{cgroups}.txt"));
            fs::write(&path, tree)?;
            println!("wrote {}", path.display());
        }
    }
    Ok(())
}
