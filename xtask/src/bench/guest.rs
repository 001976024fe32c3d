//! A guest of 1 GB in QEMU for benches that need pressure on the whole memory. Its root is pagetax with a
//! shell, and its files are on a disk of its own.

use crate::kernels;
use crate::shell;
use anyhow::{Result, ensure};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

const VERSION: &str = "6.12";
const MEMORY_MIB: &str = "1024";
const DISK_BYTES: u64 = 4 << 30;
/// The time limit in seconds: an emulated guest is an order of magnitude slower.
pub const LIMIT: &str = "900";
/// Makes the root of the guest in the folder `$1`, of pagetax `$2`, the driver `$3`, the script `$4`, and
/// the sources of further programs.
const MAKE_ROOT: &str = r#"set -e
mkdir -p "$1/bin" "$1/tmp"
cc -O1 -static xtask/src/bench/guest_init.c -o "$1/init"
cp "$4" "$1/guest.sh"
cp "$3" "$1/virtio_blk.ko"
strip --strip-debug -o "$1/bin/pagetax" "$2"
root=$1
shift 4
for source; do
    name=${source##*/}
    cc -O1 -static "$source" -o "$root/bin/${name%.c}"
done
set -- "$root"
for name in sh cat mkdir sleep; do cp "$(readlink -f "/bin/$name")" "$1/bin/$name"; done
for program in "$1"/bin/*; do
    # A static one has none.
    for library in $(ldd "$program" 2>/dev/null | grep -o '/[^ ]*'); do
        mkdir -p "$1/${library%/*}"
        cp -L "$library" "$1/${library%/*}/"
    done
done
cd "$1"
find . | cpio --quiet -o -H newc > ../root.cpio
"#;

/// Boots the guest with a script and the sources of C programs for it. Returns what it wrote up to
/// `@@done`.
pub fn run(program: &str, script: &str, sources: &[&str]) -> Result<String> {
    let kernel = kernels::kernel(VERSION)?;
    let folder = tempfile::tempdir_in("target")?;
    let (root, disk) = (folder.path().join("root"), folder.path().join("disk"));
    let driver = kernel.with_file_name("virtio_blk.ko");
    let mut make = Command::new("sh");
    make.args(["-c", MAKE_ROOT, "sh"]).arg(&root).arg(program).arg(driver).arg(script);
    shell::succeed(make.args(sources))?;
    File::create(&disk)?.set_len(DISK_BYTES)?;
    shell::succeed(Command::new("/usr/sbin/mkfs.ext4").args(["-q", "-F"]).arg(&disk))?;
    let results = folder.path().join("results");
    boot(&kernel, folder.path(), &disk, &results)?;
    let text = String::from_utf8_lossy(&fs::read(&results)?).replace('\r', "");
    ensure!(text.contains("@@done"), "the guest did not come to its end:\n{text}");
    Ok(text)
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
