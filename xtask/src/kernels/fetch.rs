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
/// The module beside a kernel.
pub(super) const DRIVER: &str = "virtio_blk.ko";

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
    let (variable, mirror) = match suite.ends_with("-security") {
        true => ("DEBIAN_SECURITY_MIRROR", SECURITY_MIRROR),
        false => ("DEBIAN_MIRROR", MIRROR),
    };
    let mirror = std::env::var(variable).unwrap_or(mirror.into());
    let failed = || {
        format!(
            "cannot download Linux {version} from {mirror} (another: {variable}=URL); kernels that are in {FOLDER} \
             need no network"
        )
    };
    println!("downloading Linux {version} of {suite}");
    for part in ["lists/partial", "cache/archives/partial", "unpacked"] {
        fs::create_dir_all(directory.join(part))?;
    }
    let list = directory.join("sources.list");
    fs::write(&list, format!("deb [signed-by={KEYS}] {mirror} {suite} main\n"))?;
    let apt = |program: &str, words: &[&str]| {
        let at = |path: &str| directory.join(path).display().to_string();
        let settings = [
            format!("Dir::Etc::sourcelist={}", list.display()),
            "Dir::Etc::sourceparts=/dev/null".into(),
            format!("Dir::State::lists={}", at("lists")),
            format!("Dir::Cache={}", at("cache")),
            "APT::Update::Error-Mode=any".into(),
            "APT::Sandbox::User=root".into(),
        ];
        let mut command = Command::new(program);
        command.current_dir(&directory).arg("-q");
        command.args(settings.iter().flat_map(|setting| ["-o", setting.as_str()]));
        command.args(words);
        shell::output(&mut command).with_context(failed)
    };
    apt("apt-get", &["update"])?;
    let dependency = |package: &str, prefix: &str| -> Result<Option<String>> {
        let shown = apt("apt-cache", &["show", package])?;
        let depends = shown.lines().find_map(|line| line.strip_prefix("Depends: "));
        let mut packages = depends.into_iter().flat_map(|line| line.split([' ', ',']));
        Ok(packages.find(|word| word.starts_with(prefix)).map(String::from))
    };
    let image = dependency("linux-image-cloud-amd64", "linux-image-")?;
    let image = image.context("the package of the newest kernel names no kernel")?;
    // From 7.3 on, a package of its own has the kernel.
    let package = dependency(&image, "linux-binary-")?.unwrap_or(image);
    apt("apt-get", &["download", &package])?;
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
    // Only `bench reclaim guest` needs it: a kernel without it is complete for the checks.
    if let Err(error) = keep_driver(&unpacked, &directory) {
        println!("-- Linux {version} without {DRIVER}: {error:#}");
    }
    for path in [unpacked, package, directory.join("lists"), directory.join("cache")] {
        if path.is_dir() { fs::remove_dir_all(&path)? } else { fs::remove_file(&path)? }
    }
    Ok(kernel)
}

/// Returns the path of a kernel of Debian or of Ubuntu, which has no driver of disks beside it.
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

/// Returns the path of a version's kernel. The driver of QEMU's disks is beside it, as `virtio_blk.ko`.
pub fn kernel(version: &str) -> Result<PathBuf> {
    let chosen = chosen(&[version.to_string()])?;
    let (version, suite) = chosen.first().context("no such kernel")?;
    let kernel = fetch(version, suite)?;
    if !kernel.with_file_name(DRIVER).exists() {
        bail!("{FOLDER}/{version} has no {DRIVER}; remove that folder, and it is downloaded again");
    }
    Ok(kernel)
}

/// Keeps the driver of QEMU's disks, which the cloud kernels have as a module, unpacked.
fn keep_driver(unpacked: &Path, directory: &Path) -> Result<()> {
    const KEEP: &str = "packed=$(find \"$1\" -name 'virtio_blk.ko*') && [ -n \"$packed\" ] && \
        case $packed in *.xz) xz -dc \"$packed\" ;; *) cat \"$packed\" ;; esac > \"$2\"";
    let mut keep = Command::new("sh");
    keep.args(["-c", KEEP, "sh"]).arg(unpacked).arg(directory.join(DRIVER));
    shell::succeed(&mut keep)
}
