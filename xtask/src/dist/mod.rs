//! `cargo xtask dist`: a Debian package and a tarball, and their trial in a clean root.

use crate::install::{self, Tree, VERSION};
use crate::shell;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const FOLDER: &str = "target/dist";
/// The directories of what both packages hold beside the installed tree.
const DOCUMENTS: &str = "share/doc/pagetax";
const UNIT: &str = "packaging/pagetax-serve.service";

/// The written packages.
pub struct Packages {
    debian: PathBuf,
    tarball: PathBuf,
}

/// Builds pagetax and writes both packages.
pub fn run() -> Result<Packages> {
    install::build()?;
    let folder = Path::new(FOLDER);
    // What an earlier version left must not go into a package.
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    let packages = Packages { debian: debian(folder)?, tarball: tarball(folder)? };
    for package in [&packages.debian, &packages.tarball] {
        println!("wrote {} ({} bytes)", package.display(), package.metadata()?.len());
    }
    Ok(packages)
}

/// Writes both packages, and installs, tries and removes them in a root of their own.
pub fn check() -> Result<()> {
    let packages = run()?;
    if !crate::packages::is_root()? {
        println!("SKIP: the packages are not tried; only root can make a clean root");
        return Ok(());
    }
    let mut trial = Command::new("unshare");
    trial.args(["--mount", "--propagation", "private", "sh", "xtask/src/dist/clean_root.sh"]);
    shell::succeed(trial.arg(&packages.debian).arg(&packages.tarball))
}

fn debian(folder: &Path) -> Result<PathBuf> {
    let root = folder.join("debian");
    let tree = Tree { root: root.join("usr"), prefix: "/usr".into() };
    fill(&tree)?;
    let unit = fs::read_to_string(UNIT)?.replace("/usr/local/bin/", "/usr/bin/");
    tree.write("lib/systemd/system/pagetax-serve.service", unit, 0o644)?;
    let manual = fs::read_dir(tree.root.join("share/man/man1"))?;
    let pages = manual.map(|page| Ok(page?.path())).collect::<Result<Vec<_>>>()?;
    shell::succeed(Command::new("gzip").args(["-9n"]).args(pages))?;

    let control = fs::read_to_string("packaging/debian-control.in")?;
    let control = control.replace("@version@", VERSION).replace("@depends@", &depends(&tree)?);
    let own = root.join("DEBIAN");
    fs::create_dir_all(&own)?;
    fs::write(own.join("control"), control)?;
    // The loader's cache of libpagetax.so.
    fs::write(own.join("triggers"), "activate-noawait ldconfig\n")?;
    let package = folder.join(format!("pagetax_{VERSION}_amd64.deb"));
    let mut build = Command::new("dpkg-deb");
    build.args(["--root-owner-group", "-Zxz", "--build"]).arg(&root).arg(&package);
    shell::succeed(&mut build)?;
    Ok(package)
}

fn tarball(folder: &Path) -> Result<PathBuf> {
    let name = format!("pagetax-{VERSION}-x86_64-linux-gnu");
    // It is unpacked anywhere.
    fill(&Tree { root: folder.join(&name), prefix: "${pcfiledir}/../..".into() })?;
    let package = folder.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "-czf"]).arg(&package);
    shell::succeed(tar.arg("-C").arg(folder).arg(&name))?;
    Ok(package)
}

/// Installs pagetax and its documents.
fn fill(tree: &Tree) -> Result<()> {
    tree.install()?;
    let licences = ["LICENSE-MIT", "LICENSE-APACHE"];
    for file in ["README.md", "CHANGELOG.md"].iter().chain(&licences) {
        tree.copy(Path::new(file), &format!("{DOCUMENTS}/{file}"), 0o644)?;
    }
    tree.copy(Path::new("packaging/copyright"), &format!("{DOCUMENTS}/copyright"), 0o644)?;
    Ok(())
}

/// Returns the packages whose libraries ours need, as dpkg-shlibdeps finds them.
fn depends(tree: &Tree) -> Result<String> {
    let scratch = tempfile::tempdir()?;
    let debian = scratch.path().join("debian");
    fs::create_dir(&debian)?;
    fs::write(
        debian.join("control"),
        "Source: pagetax\n\nPackage: pagetax\nArchitecture: amd64\n",
    )?;
    let root = fs::canonicalize(&tree.root)?;
    let library = root.join(format!("lib/libpagetax.so.{VERSION}"));
    let mut shlibdeps = Command::new("dpkg-shlibdeps");
    shlibdeps.arg("-O").arg(root.join("bin/pagetax")).arg(library).current_dir(scratch.path());
    let found = shell::output(&mut shlibdeps)?;
    let depends = found.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    Ok(depends.context("dpkg-shlibdeps found no libraries")?.to_string())
}
