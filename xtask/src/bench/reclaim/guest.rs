//! The part `guest`: `mlock-cycle` under pressure on the whole memory of a guest in QEMU. Its root is the
//! program with a shell, and its files are on a disk of its own.

use super::{Outcome, ReclaimSeen, last_seconds, number, outcome};
use crate::kernels;
use crate::shell;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

const VERSION: &str = "6.12";
const MEMORY_MIB: &str = "1024";
const DISK_BYTES: u64 = 4 << 30;
/// The time limit in seconds: an emulated guest is an order of magnitude slower.
const LIMIT: &str = "900";
/// Makes the root of the guest in the folder `$1`, of the program `$2` and the driver `$3`.
const MAKE_ROOT: &str = r#"set -e
mkdir -p "$1/bin" "$1/tmp"
cc -O1 -static xtask/src/bench/reclaim/guest_init.c -o "$1/init"
cp xtask/src/bench/reclaim/guest.sh "$1/guest.sh"
cp "$3" "$1/virtio_blk.ko"
strip --strip-debug -o "$1/bin/pagetax" "$2"
for name in sh cat sleep; do cp "$(readlink -f "/bin/$name")" "$1/bin/$name"; done
for program in "$1"/bin/*; do
    for library in $(ldd "$program" | grep -o '/[^ ]*'); do
        mkdir -p "$1/${library%/*}"
        cp -L "$library" "$1/${library%/*}/"
    done
done
cd "$1"
find . | cpio --quiet -o -H newc > ../root.cpio
"#;

/// Boots the guest, and returns what its runs and `pagetax stat` beside them saw.
pub fn run(program: &str) -> Result<Outcome> {
    let kernel = kernels::kernel(VERSION)?;
    let folder = tempfile::tempdir_in("target")?;
    let (root, disk) = (folder.path().join("root"), folder.path().join("disk"));
    let driver = kernel.with_file_name("virtio_blk.ko");
    let mut make = Command::new("sh");
    make.args(["-c", MAKE_ROOT, "sh"]).arg(&root).arg(program).arg(driver);
    shell::succeed(&mut make)?;
    File::create(&disk)?.set_len(DISK_BYTES)?;
    shell::succeed(Command::new("/usr/sbin/mkfs.ext4").args(["-q", "-F"]).arg(&disk))?;
    let results = folder.path().join("results");
    boot(&kernel, folder.path(), &disk, &results)?;
    let text = String::from_utf8_lossy(&fs::read(&results)?).replace('\r', "");
    ensure!(text.contains("@@done"), "the guest did not come to its end:\n{text}");
    let seen: Vec<ReclaimSeen> = text.split("@@run ").skip(1).map(seen).collect::<Result<_>>()?;
    outcome(&seen, (format!("all loads end within {LIMIT} s"), true))
}

fn boot(kernel: &Path, folder: &Path, disk: &Path, results: &Path) -> Result<()> {
    let mut qemu = Command::new("timeout");
    qemu.args([LIMIT, "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max"]);
    qemu.args(["-smp", "2", "-m", MEMORY_MIB, "-display", "none", "-monitor", "none"]);
    qemu.args(["-no-reboot", "-nic", "none", "-serial"]);
    qemu.arg(format!("file:{}", folder.join("console").display())).arg("-serial");
    qemu.arg(format!("file:{}", results.display())).arg("-drive");
    qemu.arg(format!("file={},format=raw,if=virtio,cache=unsafe", disk.display()));
    qemu.arg("-kernel").arg(kernel).arg("-initrd").arg(folder.join("root.cpio"));
    let append = "console=ttyS0 quiet panic=-1 transparent_hugepage=madvise mitigations=off";
    qemu.args(["-append", append]).stdin(Stdio::null());
    shell::succeed(&mut qemu)
}

/// Parses the two documents of one load.
fn seen(text: &str) -> Result<ReclaimSeen> {
    let (name, rest) = text.split_once('\n').context("a load has a name")?;
    let (report, rest) = rest.split_once("@@stat ").context("no report of stat")?;
    let (_, rest) = rest.split_once('\n').context("no report of stat")?;
    let stat = rest.split("@@end").next().unwrap_or_default();
    let report: Value = serde_json::from_str(report).with_context(|| report.to_string())?;
    let stat: Value = serde_json::from_str(stat).with_context(|| stat.to_string())?;
    let intervals = stat["intervals"].as_array().context("no intervals")?;
    let wall_ns = number(&report, "/wall_ns")?;
    let series = |id: &str| -> Vec<f64> {
        let value = |one: &Value| one["readings"][id]["value"].as_f64().unwrap_or(0.0);
        last_seconds(&intervals.iter().map(value).collect::<Vec<_>>(), wall_ns)
    };
    let sum = |id: &str| series(id).iter().sum::<f64>();
    let (direct, background) = (sum("direct_scan_count"), sum("background_scan_count"));
    let share = background / (direct + background);
    Ok(ReclaimSeen {
        name: format!("{name}, guest of 1 GB"),
        report,
        stalls_ms: series("memory_some_ns").iter().map(|ns| ns / 1e6).collect(),
        background_share: share.is_finite().then_some(share),
        efficiency_range: None,
    })
}
