//! A small guest: a shell and a few programs in memory, so that nearly all of its memory is free. It runs one
//! script, whose output comes back as text.

use crate::shell;
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

/// Makes the root of the guest in the folder `$1`. Programs follow.
const MAKE_ROOT: &str = r#"set -e
mkdir -p "$1/bin" "$1/tmp"
cc -O1 -static xtask/src/kernels/small_init.c -o "$1/init"
root=$1
shift
for program; do
    file=$(readlink -f "$program") name=$root/bin/${program##*/}
    strip --strip-debug -o "$name" "$file" 2>/dev/null || cp "$file" "$name" # a script
done
for program in "$root"/bin/*; do
    for library in $(ldd "$program" 2>/dev/null | grep -o '/[^ ]*'); do
        mkdir -p "$root/${library%/*}"
        cp -L "$library" "$root/${library%/*}/"
    done
done
cd "$root"
find . | cpio --quiet -o -H newc > ../root.cpio
"#;

/// The boots of a guest whose kernel crashes before its first program. QEMU runs the CPUs of a guest in
/// threads, and the kernel changes its code while another one runs it.
const BOOTS_MAX: u32 = 3;

/// The module of QEMU's disks.
const DISK_DRIVER: &str = "virtio_blk.ko";

/// A disk of the guest.
#[derive(Debug, Clone, Copy)]
pub struct Disk<'a> {
    /// The size in bytes. The file is sparse.
    pub bytes: u64,
    /// Options of QEMU's -drive, such as a limit of its speed; may be empty.
    pub options: &'a str,
}

/// A guest before it is booted.
#[derive(Debug, Clone, Copy)]
pub struct SmallGuest<'a> {
    /// The image of its kernel. Modules are beside it.
    pub kernel: &'a Path,
    /// The script that it runs, with `PATH` to its programs.
    pub script: &'a str,
    /// The paths of its programs.
    pub programs: &'a [&'a str],
    /// The modules of the kernel that it loads, besides that of its disks.
    pub modules: &'a [&'a str],
    /// Folders that it has as well: the path here, and the one there.
    pub folders: &'a [(&'a Path, &'a str)],
    /// Its disks. The first has an empty file system of ext4 at /files.
    pub disks: &'a [Disk<'a>],
    /// Arguments of QEMU that set its memory.
    pub memory: &'a [&'a str],
    /// Words on the command line of its kernel.
    pub append: &'a str,
    /// The time limit in seconds: an emulated guest is an order of magnitude slower.
    pub limit: u32,
}

impl Default for SmallGuest<'_> {
    /// Returns a guest that has nothing yet.
    fn default() -> Self {
        SmallGuest {
            kernel: Path::new(""),
            script: "",
            programs: &[],
            modules: &[],
            folders: &[],
            disks: &[],
            memory: &[],
            append: "",
            limit: 0,
        }
    }
}

/// Returns the part of a guest's output between two marks.
pub fn between<'a>(text: &'a str, from: &str, to: &str) -> Result<&'a str> {
    let part = text.split_once(from).and_then(|(_, rest)| rest.split_once(to));
    part.map(|(part, _)| part).with_context(|| format!("the guest did not print {from}:\n{text}"))
}

impl SmallGuest<'_> {
    /// Boots the guest, and returns the output of its script.
    ///
    /// # Errors
    /// If the guest cannot be made, or the script does not print `@@done` within the limit.
    pub fn run(&self) -> Result<String> {
        let folder = tempfile::tempdir_in("target")?;
        let (root, results) = (folder.path().join("root"), folder.path().join("results"));
        fs::create_dir(&root)?;
        let script = format!(
            "export PATH=/bin HOME=/ LC_ALL=C\ncd /\n{}\necho @@done\necho o >/proc/sysrq-trigger\nsleep 60\n",
            self.script
        );
        fs::write(root.join("guest.sh"), script)?;
        let driver = if self.disks.is_empty() { None } else { Some(&DISK_DRIVER) };
        for module in self.modules.iter().chain(driver) {
            let from = self.kernel.with_file_name(module);
            fs::copy(&from, root.join(module)).with_context(|| {
                format!("{} is not there; remove its folder for another download", from.display())
            })?;
        }
        let mut make = Command::new("sh");
        make.args(["-c", MAKE_ROOT, "sh"]).arg(&root);
        make.args(["sh", "cat", "sleep", "mkdir", "mount"].map(|name| format!("/bin/{name}")));
        for (from, to) in self.folders {
            let to = root.join(to.trim_start_matches('/'));
            fs::create_dir_all(&to)?;
            let mut copy = Command::new("cp");
            shell::succeed(copy.arg("-a").arg(from.join(".")).arg(&to))?;
        }
        shell::succeed(make.args(self.programs))?;
        let limit = self.limit.to_string();
        let console = folder.path().join("console");
        let mut qemu = Command::new("timeout");
        qemu.args([&limit, "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max"]);
        qemu.args(["-smp", "2", "-display", "none", "-monitor", "none", "-no-reboot"]);
        qemu.args(["-nic", "none"]).args(self.memory);
        qemu.arg("-serial").arg(format!("file:{}", console.display()));
        qemu.arg("-serial").arg(format!("file:{}", results.display()));
        for (index, disk) in self.disks.iter().enumerate() {
            let file = folder.path().join(format!("disk{index}"));
            File::create(&file)?.set_len(disk.bytes)?;
            if index == 0 {
                shell::succeed(Command::new("/usr/sbin/mkfs.ext4").args(["-q", "-F"]).arg(&file))?;
            }
            let drive = format!("file={},format=raw,if=virtio,cache=unsafe", file.display());
            qemu.arg("-drive").arg(format!("{drive}{}", disk.options));
        }
        qemu.arg("-kernel").arg(self.kernel).arg("-initrd").arg(folder.path().join("root.cpio"));
        const APPEND: &str =
            "console=ttyS0 quiet panic=-1 transparent_hugepage=madvise mitigations=off";
        qemu.arg("-append").arg(format!("{APPEND} {}", self.append)).stdin(Stdio::null());
        let mut boots = 1;
        loop {
            let ended = shell::succeed(&mut qemu);
            let text = String::from_utf8_lossy(&fs::read(&results)?).replace('\r', "");
            let console = fs::read(&console).unwrap_or_default();
            let console = String::from_utf8_lossy(&console);
            if text.is_empty() && console.contains("Kernel panic") && boots < BOOTS_MAX {
                eprintln!(
                    "the emulated kernel crashed before its first program: it is booted again"
                );
                boots += 1;
                continue;
            }
            ended.with_context(|| format!("{text}\n{console}"))?;
            ensure!(
                text.contains("@@done"),
                "the guest did not come to its end:\n{text}\n{console}"
            );
            return Ok(text);
        }
    }
}
