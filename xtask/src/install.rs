//! `cargo xtask install`: everything under a prefix, where programs, compilers and packagers look.

use crate::shell;
use anyhow::{Context, Result};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");
const BUILT: &str = "target/release";

/// The library that users name in LD_PRELOAD. pagetax carries it, and keeps it among its own libraries.
const PRELOAD: &str = "libpagetax_preload.so";
/// The directory of each shell's completions.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "share/bash-completion/completions/pagetax"),
    ("zsh", "share/zsh/site-functions/_pagetax"),
    ("fish", "share/fish/vendor_completions.d/pagetax.fish"),
];

/// Where files go: `root` now, and `prefix` once a package is unpacked.
pub struct Tree {
    pub root: PathBuf,
    pub prefix: String,
}

/// Builds all and puts it under `destdir`/`prefix`.
pub fn run(prefix: &Path, destdir: Option<&Path>) -> Result<()> {
    let prefix = std::path::absolute(prefix)?;
    let root = match destdir {
        Some(directory) => directory.join(prefix.strip_prefix("/")?),
        None => prefix.clone(),
    };
    let prefix = prefix.to_str().context("a prefix that is no text")?.to_string();
    build()?;
    let tree = Tree { root, prefix };
    tree.install()?;
    println!("installed under {}", tree.root.display());
    Ok(())
}

/// Builds the program, which carries its libraries, and the library of the C interface.
pub fn build() -> Result<()> {
    shell::cargo(&["build", "--release", "--package", "pagetax", "--package", "pagetax-capi"])
}

impl Tree {
    /// Installs what [`build`] built.
    pub fn install(&self) -> Result<()> {
        let built = Path::new(BUILT);
        let program = self.copy(&built.join("pagetax"), "bin/pagetax", 0o755)?;
        let archive = self.copy(&built.join("libpagetax.a"), "lib/libpagetax.a", 0o644)?;
        // Rust's own library brings LLVM's bitcode, which no linker needs and which is most of it.
        let sections = ["--strip-debug", "-R", ".llvmbc", "-R", ".llvmcmd"];
        shell::succeed(Command::new("objcopy").args(sections).arg(archive))?;
        let own = self.root.join("lib/pagetax");
        shell::succeed(Command::new(&program).arg("libraries").arg(&own))?;
        symlink(Path::new("pagetax").join(PRELOAD), self.place(&format!("lib/{PRELOAD}"))?)?;
        self.shared_library(&built.join("libpagetax.so"))?;
        self.copy(Path::new("crates/capi/include/pagetax.h"), "include/pagetax.h", 0o644)?;
        self.fill_in("crates/capi/pagetax.pc.in", "lib/pkgconfig/pagetax.pc")?;
        self.manual(&program)
    }

    fn place(&self, path: &str) -> Result<PathBuf> {
        let place = self.root.join(path);
        let directory = place.parent().context("a file without a directory")?;
        let cannot = || format!("cannot make {}; name another --prefix", directory.display());
        fs::create_dir_all(directory).with_context(cannot)?;
        // What runs now keeps the file that it has.
        if place.symlink_metadata().is_ok() {
            fs::remove_file(&place)
                .with_context(|| format!("cannot replace {}", place.display()))?;
        }
        Ok(place)
    }

    pub fn write(&self, path: &str, content: impl AsRef<[u8]>, mode: u32) -> Result<PathBuf> {
        let place = self.place(path)?;
        fs::write(&place, content).with_context(|| format!("cannot write {}", place.display()))?;
        fs::set_permissions(&place, Permissions::from_mode(mode))?;
        Ok(place)
    }

    pub fn copy(&self, from: &Path, path: &str, mode: u32) -> Result<PathBuf> {
        let content = fs::read(from).with_context(|| format!("{} is not there", from.display()))?;
        self.write(path, content, mode)
    }

    /// Installs a library under its whole version, the name that programs load, and the name that linkers
    /// look for.
    fn shared_library(&self, from: &Path) -> Result<()> {
        let major = VERSION.split('.').next().unwrap_or(VERSION);
        let (whole, asked) = (format!("libpagetax.so.{VERSION}"), format!("libpagetax.so.{major}"));
        self.copy(from, &format!("lib/{whole}"), 0o755)?;
        symlink(&whole, self.place(&format!("lib/{asked}"))?)?;
        symlink(&asked, self.place("lib/libpagetax.so")?)?;
        Ok(())
    }

    /// Installs a text after replacing `@prefix@` and `@version@`.
    fn fill_in(&self, template: &str, path: &str) -> Result<()> {
        let text = fs::read_to_string(template)?;
        let text = text.replace("@prefix@", &self.prefix).replace("@version@", VERSION);
        self.write(path, text, 0o644).map(drop)
    }

    fn manual(&self, program: &Path) -> Result<()> {
        let pages = self.root.join("share/man/man1");
        fs::create_dir_all(&pages)?;
        shell::succeed(Command::new(program).arg("man").arg(&pages))?;
        for (shell, path) in COMPLETIONS {
            let script = shell::output(Command::new(program).args(["completions", shell]))?;
            self.write(path, script, 0o644)?;
        }
        Ok(())
    }
}
