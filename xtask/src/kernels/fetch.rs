//! The kernels of the guests, downloaded once.

use super::FOLDER;
use crate::shell;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SECURITY_MIRROR: &str = "http://deb.debian.org/debian-security";
const MIRROR: &str = "http://deb.debian.org/debian";
pub(super) const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// The kernels, and the suites of Debian whose cloud kernels they are. Backports move on: the guest states
/// its version.
pub(super) const KERNELS: [(&str, &str); 4] = [
    ("5.10", "bullseye-security"),
    ("6.1", "bookworm-security"),
    ("6.12", "trixie-security"),
    ("7.3", "trixie-backports"),
];
/// Kernels of Ubuntu's releases for `capture`: the version, the name of the package, and its SHA-256 by the
/// list that Ubuntu signs. A release's first kernel stays on the mirrors.
const OF_UBUNTU: [(&str, &str, &str); 2] = [
    (
        "5.15",
        "linux-image-5.15.0-25-generic_5.15.0-25.25_amd64.deb",
        "ad56f8c442a54d4f5ff2dff010d00321d53e32b543f3a92f3ba4e042d20a71da",
    ),
    (
        "6.8",
        "linux-image-6.8.0-31-generic_6.8.0-31.31_amd64.deb",
        "fd2ed023c84163e62c73d3b7b613a9b004bd31e335641c23d42bd249e489fbe6",
    ),
];
const MIRROR_OF_UBUNTU: &str = "http://archive.ubuntu.com/ubuntu";
/// The modules beside a kernel.
const MODULES: [&str; 3] = ["virtio_blk.ko", "veth.ko", "sch_netem.ko"];

/// Returns the kernels of these versions in the order of the table; all if there are none.
pub(super) fn chosen(versions: &[String]) -> Result<Vec<(&'static str, &'static str)>> {
    let is_known = |version: &&String| KERNELS.iter().any(|(known, _)| known == version);
    if let Some(unknown) = versions.iter().find(|version| !is_known(version)) {
        let known = KERNELS.map(|(version, _)| version).join(", ");
        bail!("no kernel {unknown}; there are {known}");
    }
    let is_chosen = |version: &str| versions.is_empty() || versions.iter().any(|v| v == version);
    Ok(KERNELS.into_iter().filter(|(version, _)| is_chosen(version)).collect())
}

/// Finds a kernel, downloaded once: apt proves what it downloads by Debian's keys. Remove its directory for a
/// newer one.
pub(super) fn fetch(version: &str, suite: &str) -> Result<PathBuf> {
    let directory = std::path::absolute(Path::new(FOLDER).join(version))?;
    let kernel = directory.join("vmlinuz");
    if kernel.exists() {
        return Ok(kernel);
    }
    println!("downloading Linux {version} of {suite}");
    let apt = Apt::new(&directory, suite)?;
    let dependency = |package: &str, prefix: &str| -> Result<Option<String>> {
        let shown = apt.run("apt-cache", &["show", package])?;
        let depends = shown.lines().find_map(|line| line.strip_prefix("Depends: "));
        let mut packages = depends.into_iter().flat_map(|line| line.split([' ', ',']));
        Ok(packages.find(|word| word.starts_with(prefix)).map(String::from))
    };
    let image = dependency("linux-image-cloud-amd64", "linux-image-")?;
    let image = image.context("the package of the newest kernel names no kernel")?;
    // From 7.3 on, a package of its own has the kernel.
    let package = dependency(&image, "linux-binary-")?.unwrap_or(image);
    apt.run("apt-get", &["download", &package])?;
    let found = |suffix: &str, prefix: &str, at: &Path| -> Result<PathBuf> {
        let mut paths = fs::read_dir(at)?.flatten().map(|entry| entry.path());
        let is_it = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with(prefix) && name.ends_with(suffix)
        };
        paths.find(is_it).with_context(|| format!("{} has no {prefix}*{suffix}", at.display()))
    };
    let unpacked = directory.join("unpacked");
    let package = found(".deb", &package, &directory)?;
    shell::succeed(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&unpacked))?;
    let boot = unpacked.join("boot");
    let found = match boot.exists() {
        true => found("", "vmlinuz-", &boot)?,
        false => found("", "", &unpacked.join("usr/lib/modules"))?.join("vmlinuz"),
    };
    fs::rename(found, &kernel)?;
    // Only small guests need them: a kernel without them is complete for the checks.
    for module in MODULES {
        if let Err(error) = keep_module(module, &unpacked, &directory) {
            println!("-- Linux {version} without {module}: {error:#}");
        }
    }
    fs::remove_dir_all(unpacked)?;
    fs::remove_file(package)?;
    apt.remove_lists()?;
    Ok(kernel)
}

/// The tools of apt with one suite of Debian, whose lists they keep in a folder.
struct Apt {
    directory: PathBuf,
    settings: Vec<String>,
    failed: String,
}

impl Apt {
    /// Reads the lists of a suite.
    fn new(directory: &Path, suite: &str) -> Result<Apt> {
        let (variable, mirror) = match suite.ends_with("-security") {
            true => ("DEBIAN_SECURITY_MIRROR", SECURITY_MIRROR),
            false => ("DEBIAN_MIRROR", MIRROR),
        };
        let mirror = std::env::var(variable).unwrap_or(mirror.into());
        for part in ["lists/partial", "cache/archives/partial", "unpacked"] {
            fs::create_dir_all(directory.join(part))?;
        }
        let list = directory.join("sources.list");
        fs::write(&list, format!("deb [signed-by={KEYS}] {mirror} {suite} main\n"))?;
        let at = |path: &str| directory.join(path).display().to_string();
        let settings = vec![
            format!("Dir::Etc::sourcelist={}", list.display()),
            "Dir::Etc::sourceparts=/dev/null".into(),
            format!("Dir::State::lists={}", at("lists")),
            format!("Dir::Cache={}", at("cache")),
            "APT::Update::Error-Mode=any".into(),
            "APT::Sandbox::User=root".into(),
        ];
        let failed = format!(
            "cannot download packages of {suite} from {mirror} (another: {variable}=URL); kernels that are in \
             {FOLDER} need no network"
        );
        let apt = Apt { directory: directory.into(), settings, failed };
        apt.run("apt-get", &["update"])?;
        Ok(apt)
    }

    fn run(&self, program: &str, words: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        command.current_dir(&self.directory).arg("-q");
        command.args(self.settings.iter().flat_map(|setting| ["-o", setting.as_str()]));
        command.args(words);
        shell::output(&mut command).with_context(|| self.failed.clone())
    }

    fn remove_lists(self) -> Result<()> {
        fs::remove_dir_all(self.directory.join("lists"))?;
        Ok(fs::remove_dir_all(self.directory.join("cache"))?)
    }
}

/// Returns the release that a kernel states in its image, as `uname -r` prints it.
///
/// Source: `kernel_version` in the kernel's documentation of the boot protocol of x86.
pub fn release(kernel: &Path) -> Result<String> {
    let image = fs::read(kernel)?;
    let offset = image.get(0x20e..0x210).context("a short image")?.try_into()?;
    let text =
        image.get(usize::from(u16::from_le_bytes(offset)) + 0x200..).context("no release")?;
    let words = text.split(|byte| byte.is_ascii_whitespace() || *byte == 0).next();
    Ok(String::from_utf8_lossy(words.context("no release")?).into_owned())
}

/// Returns a folder with the headers of a version's kernel, downloaded once: `usr/src` and `lib/modules`.
pub fn headers(version: &str) -> Result<PathBuf> {
    let chosen = chosen(&[version.to_string()])?;
    let (version, suite) = chosen.first().context("no such kernel")?;
    let release = release(&fetch(version, suite)?)?;
    let directory = std::path::absolute(Path::new(FOLDER).join(format!("{version}-headers")))?;
    let unpacked = directory.join("unpacked");
    if directory.join("complete").exists() {
        return Ok(unpacked);
    }
    println!("downloading the headers of Linux {release}");
    let apt = Apt::new(&directory, suite)?;
    let base = release.split_once("-cloud").map_or(release.as_str(), |(base, _)| base);
    for package in [format!("linux-headers-{release}"), format!("linux-headers-{base}-common")] {
        apt.run("apt-get", &["download", &package]).with_context(|| {
            format!(
                "no headers of {release} any more? remove {FOLDER}/{version} for a newer kernel"
            )
        })?;
        let mut unpack = Command::new("sh");
        unpack.args([
            "-c",
            r#"dpkg-deb -x "$1"/"$2"_*.deb "$1/unpacked" && rm "$1"/"$2"_*.deb"#,
            "sh",
        ]);
        shell::succeed(unpack.arg(&directory).arg(&package))?;
    }
    apt.remove_lists()?;
    fs::write(directory.join("complete"), "")?;
    Ok(unpacked)
}

/// Returns the path of a kernel of Debian, or of Ubuntu, which has no modules beside it.
pub(super) fn any_kernel(version: &str) -> Result<PathBuf> {
    match OF_UBUNTU.iter().find(|(known, ..)| *known == version) {
        Some((_, package, sha256)) => fetch_of_ubuntu(version, package, sha256),
        None => kernel(version),
    }
}

fn fetch_of_ubuntu(version: &str, package: &str, sha256: &str) -> Result<PathBuf> {
    let directory = std::path::absolute(Path::new(FOLDER).join(version))?;
    let kernel = directory.join("vmlinuz");
    if kernel.exists() {
        return Ok(kernel);
    }
    let mirror = std::env::var("UBUNTU_MIRROR").unwrap_or(MIRROR_OF_UBUNTU.into());
    println!("downloading Linux {version} of {mirror}");
    fs::create_dir_all(&directory)?;
    let archive = directory.join("package.deb");
    let mut download = Command::new("/usr/lib/apt/apt-helper");
    download.arg("download-file").arg(format!("{mirror}/pool/main/l/linux-signed/{package}"));
    download.arg(&archive).arg(format!("SHA256:{sha256}"));
    shell::output(&mut download).with_context(|| {
        format!("cannot download Linux {version} from {mirror} (another: UBUNTU_MIRROR=URL)")
    })?;
    let unpacked = directory.join("unpacked");
    shell::succeed(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&unpacked))?;
    let mut images = fs::read_dir(unpacked.join("boot"))?.flatten().map(|entry| entry.path());
    let is_image = |path: &PathBuf| path.to_string_lossy().contains("/vmlinuz-");
    let image = images.find(is_image).with_context(|| format!("{package} has no kernel"))?;
    fs::rename(image, &kernel)?;
    fs::remove_dir_all(unpacked)?;
    fs::remove_file(archive)?;
    Ok(kernel)
}

/// Returns the path of a version's kernel of Debian. Its modules are beside it.
pub fn kernel(version: &str) -> Result<PathBuf> {
    let chosen = chosen(&[version.to_string()])?;
    let (version, suite) = chosen.first().context("no such kernel")?;
    fetch(version, suite)
}

/// Keeps a module of the kernel, unpacked.
fn keep_module(module: &str, unpacked: &Path, directory: &Path) -> Result<()> {
    const KEEP: &str = "packed=$(find \"$1\" -name \"$3*\") && [ -n \"$packed\" ] && \
        case $packed in *.xz) xz -dc \"$packed\" ;; *) cat \"$packed\" ;; esac > \"$2\"";
    let mut keep = Command::new("sh");
    keep.args(["-c", KEEP, "sh"]).arg(unpacked).arg(directory.join(module)).arg(module);
    shell::succeed(&mut keep)
}
