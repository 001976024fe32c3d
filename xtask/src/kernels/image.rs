//! The root of a guest, as an archive that the kernel unpacks into memory: programs of this machine with
//! their libraries, and the programs under test.

use crate::shell;
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

const GUEST: &str = include_str!("guest.sh");
/// The guest's `cc`: hands out programs that were compiled before. A compiler would double the guest's root.
const COMPILER: &str = r#"#!/bin/sh
while [ "$1" != -o ]; do shift; done
exec cp "/programs/${2##*/}" "$2"
"#;
/// Sources of the programs that the preloaded library's tests compile.
const SOURCES: &str = "crates/remote-preload/tests";
/// The programs that the tests of `why` compile: name, compiler and its options.
const PLANTS: &[(&str, &str, &[&str])] = &[
    ("plants", "cc", &["-O1"]),
    ("plants-static", "cc", &["-O1", "-static"]),
    ("plants-musl", "musl-gcc", &["-O1", "-static"]),
];
const PLANTS_SOURCE: &str = "crates/cli/tests/why/plants.c";
/// Programs that `guest.sh` and the tests run.
const PROGRAMS: &[&str] = &[
    "bash", "cat", "chgrp", "chmod", "cmp", "cp", "date", "env", "false", "grep", "head", "id",
    "ip", "mkdir", "mount", "rm", "sed", "seq", "setpriv", "sh", "sleep", "sort", "sqlite3", "tac",
    "tail", "timeout", "true", "uname",
];
/// Tests that run there: package, kind of target, and name.
const TESTS: &[(&str, &str, &str)] = &[
    ("pagetax-remote", "--lib", ""),
    ("pagetax-remote", "--test", "pager"),
    ("pagetax-remote", "--test", "in_place"),
    ("pagetax-remote-preload", "--test", "real"),
    ("pagetax", "--test", "why"),
];
/// The library that the tests of the pager preload.
const PRELOADED: &str = "libpagetax_remote_preload.so";

/// Builds the programs under test, and writes the archive. Returns its path.
pub fn make(folder: &Path) -> Result<PathBuf> {
    shell::cargo(&["build", "--quiet", "--workspace"])?;
    let root = folder.join("root");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    let image = Image { root: std::path::absolute(root)? };
    image.skeleton()?;
    for program in PROGRAMS {
        image.program(program)?;
    }
    image.python()?;
    // A release carries its libraries.
    let pagetax = std::path::absolute(shell::pagetax()?)?;
    let mut script = format!("PAGETAX={}\n", pagetax.display());
    image.stripped(&pagetax)?;
    // The tests need the program and the library that they find beside themselves.
    let debug = std::path::absolute("target/debug")?;
    for name in ["pagetax", PRELOADED] {
        image.stripped(&debug.join(name))?;
    }
    for (package, kind, name) in TESTS {
        let path = test_binary(package, kind, name)?;
        image.stripped(&path)?;
        let variable = if name.is_empty() { "LIB" } else { &name.to_uppercase() };
        script += &format!("{variable}={}\n", path.display());
    }
    image.stripped(&debug.join("deps").join(PRELOADED))?;
    image.write("settings.sh", &script)?;
    image.compiler()?;
    image.pack(folder)
}

/// Writes the archive of the last build again, with the checks as they are now.
pub fn again(folder: &Path) -> Result<PathBuf> {
    let image = Image { root: std::path::absolute(folder.join("root"))? };
    image.write("init", GUEST)?;
    image.pack(folder)
}

/// Builds a test and finds its program.
fn test_binary(package: &str, kind: &str, name: &str) -> Result<PathBuf> {
    let mut words = vec!["test", "--quiet", "--no-run", "--message-format=json"];
    words.extend(["--package", package, kind]);
    words.extend((!name.is_empty()).then_some(name));
    let messages = shell::cargo_output(&words)?;
    let program = |line: &str| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        // The program that the test runs is listed, too.
        message["profile"]["test"].as_bool().filter(|is_test| *is_test)?;
        Some(PathBuf::from(message["executable"].as_str()?))
    };
    let found = messages.lines().filter_map(program).next_back();
    found.with_context(|| format!("cargo names no program of the tests {package} {name}"))
}

struct Image {
    root: PathBuf,
}

impl Image {
    fn skeleton(&self) -> Result<()> {
        for directory in ["proc", "sys", "dev", "tmp", "run", "root", "etc", "var/tmp", "usr"] {
            fs::create_dir_all(self.root.join(directory))?;
        }
        for directory in ["bin", "sbin", "lib", "lib64"] {
            fs::create_dir_all(self.root.join("usr").join(directory))?;
            symlink(format!("usr/{directory}"), self.root.join(directory))?;
        }
        self.write("etc/passwd", "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")?;
        self.write("etc/group", "root:x:0:\nuser:x:1000:\n")?;
        self.write("init", GUEST)?;
        self.executable("init")
    }

    fn pack(&self, folder: &Path) -> Result<PathBuf> {
        let archive = std::path::absolute(folder.join("root.cpio"))?;
        let pack =
            format!("find . -print0 | cpio --null --quiet -o -H newc > '{}'", archive.display());
        shell::succeed(Command::new("sh").args(["-c", &pack]).current_dir(&self.root))?;
        Ok(archive)
    }

    fn write(&self, path: &str, text: &str) -> Result<()> {
        Ok(fs::write(self.root.join(path), text)?)
    }

    /// Returns the path of a file in the guest: the same place, with links between directories resolved.
    fn place(&self, path: &Path) -> Result<PathBuf> {
        let directory = path.parent().context("a file is in a directory")?.canonicalize()?;
        let inside = self.root.join(directory.strip_prefix("/")?);
        fs::create_dir_all(&inside)?;
        Ok(inside.join(path.file_name().context("a file has a name")?))
    }

    /// Adds a file and the libraries that it is linked with.
    fn file(&self, path: &Path) -> Result<()> {
        fs::copy(path, self.place(path)?).with_context(|| format!("{}", path.display()))?;
        self.libraries_of(path)
    }

    fn libraries_of(&self, path: &Path) -> Result<()> {
        let listed = Command::new("ldd").arg(path).output()?;
        let text = String::from_utf8_lossy(&listed.stdout).into_owned();
        for library in text.split_whitespace().filter(|word| word.starts_with('/')) {
            let (library, place) = (Path::new(library), self.place(Path::new(library))?);
            if library != path && !place.exists() {
                fs::copy(library, place)?;
            }
        }
        Ok(())
    }

    /// Adds a program of Debian's, not another one of that name earlier on the PATH.
    fn program(&self, name: &str) -> Result<()> {
        let directories = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"];
        let mut paths = directories.iter().map(|directory| Path::new(directory).join(name));
        match paths.find(|path| path.exists()) {
            Some(path) => self.file(&path),
            None => bail!("this machine has no {name}"),
        }
    }

    /// Adds Python with its own modules, except for large unused ones.
    fn python(&self) -> Result<()> {
        let python = Path::new("/usr/bin/python3");
        self.file(python)?;
        let ask = "import sysconfig; print(sysconfig.get_path('stdlib'))";
        let modules = shell::output(Command::new(python).args(["-c", ask]))?;
        self.tree(Path::new(modules.trim()))
    }

    fn tree(&self, directory: &Path) -> Result<()> {
        const LEFT_OUT: [&str; 7] =
            ["test", "dist-packages", "idlelib", "tkinter", "ensurepip", "lib2to3", "pydoc_data"];
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or(OsStr::new("")).to_string_lossy().into_owned();
            match path.is_dir() {
                true if LEFT_OUT.contains(&&*name) || name.starts_with("config-") => {}
                true => self.tree(&path)?,
                false if path.exists() => drop(fs::copy(&path, self.place(&path)?)?),
                // A link to what is not installed.
                false => {}
            }
        }
        Ok(())
    }

    /// Adds a compiler driver that returns what this machine's compiler made earlier.
    fn compiler(&self) -> Result<()> {
        let programs = self.root.join("programs");
        fs::create_dir(&programs)?;
        for entry in fs::read_dir(SOURCES)? {
            let source = entry?.path();
            if source.extension() == Some(OsStr::new("c")) {
                let program = programs.join(source.file_stem().context("a source has a name")?);
                let mut cc = Command::new("cc");
                cc.args(["-O1", "-pthread"]).arg(&source).arg("-o").arg(&program).arg("-lutil");
                shell::succeed(&mut cc)?;
                self.libraries_of(&program)?;
            }
        }
        for (name, compiler, options) in PLANTS {
            let mut cc = Command::new(compiler);
            cc.args(*options).arg(PLANTS_SOURCE).arg("-o").arg(programs.join(name));
            shell::succeed(&mut cc)?;
        }
        for compiler in ["usr/bin/cc", "usr/bin/musl-gcc"] {
            self.write(compiler, COMPILER)?;
            self.executable(compiler)?;
        }
        Ok(())
    }

    fn executable(&self, path: &str) -> Result<()> {
        Ok(fs::set_permissions(self.root.join(path), fs::Permissions::from_mode(0o755))?)
    }

    /// Adds a program of this build, without debugging information.
    fn stripped(&self, path: &Path) -> Result<()> {
        let place = self.place(path)?;
        shell::succeed(Command::new("strip").arg("--strip-debug").arg("-o").arg(&place).arg(path))?;
        self.libraries_of(path)
    }
}
