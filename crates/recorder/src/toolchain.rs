//! The engines' binaries: compiled from the sources that pagetax carries, when they are first used,
//! and kept in the user's cache.
//!
//! They are not built with pagetax, as they are linked with, and fit only, the Valgrind and QEMU of
//! the machine they run on. The name of a folder in the cache has a hash of the sources, of the
//! commands and of what is linked, so that an update of any of them makes a new one.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

const STREAM_H: &str = include_str!("../engines/stream.h");
const FILTER_H: &str = include_str!("../engines/filter.h");
const VALGRIND_C: &str = include_str!("../engines/valgrind/pagetax.c");
const QEMU_C: &str = include_str!("../engines/qemu/pagetax.c");

/// Why there is no engine.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// Something is not installed.
    #[error("{what} is not installed\n  remedy: apt-get install {package}")]
    Missing {
        /// What was looked for.
        what: String,
        /// Its Debian package.
        package: &'static str,
    },
    /// The compiler does not like it: another version than the sources are for.
    #[error(
        "the recorder's {engine} engine does not compile here:\n{output}\n  remedy: use the other \
         engine (--engine), or Debian 12's version of {engine}"
    )]
    Compiler {
        /// Which.
        engine: &'static str,
        /// The compiler's word.
        output: String,
    },
    /// No place to keep it.
    #[error(
        "cannot keep the recorder's engine in {path}: {error}\n  remedy: set XDG_CACHE_HOME to a folder that you may write"
    )]
    Cache {
        /// Where.
        path: PathBuf,
        /// The system's word.
        error: io::Error,
    },
}

/// Where Debian's valgrind package has its things, on x86-64.
const VALGRIND_INCLUDE: &str = "/usr/include/valgrind";
const VALGRIND_LIBS: &str = "/usr/lib/x86_64-linux-gnu/valgrind";
const VALGRIND_TOOLS: &str = "/usr/libexec/valgrind";
/// Name of the tool.
pub const TOOL: &str = "pagetax";
const TOOL_FILE: &str = "pagetax-amd64-linux";
const PLUGIN_FILE: &str = "libpagetax_recorder.so";

/// The folder for VALGRIND_LIB: our tool beside the package's own files.
pub fn valgrind_lib() -> Result<PathBuf, BuildError> {
    let core = Path::new(VALGRIND_LIBS).join("libcoregrind-amd64-linux.a");
    if !core.exists() || !Path::new(VALGRIND_TOOLS).exists() {
        return Err(missing("valgrind", "valgrind"));
    }
    let compile = [
        "-O2 -std=gnu11 -fno-strict-aliasing -fno-builtin -fno-stack-protector -fno-pie",
        "-fomit-frame-pointer -DVGA_amd64=1 -DVGO_linux=1 -DVGP_amd64_linux=1",
        "-DVGPV_amd64_linux_vanilla=1",
    ];
    // Where Valgrind's own tools lie, far from where programs are.
    let link = "-no-pie -static -nodefaultlibs -nostartfiles -u _start \
                -Wl,-Ttext-segment=0x58000000 -Wl,--build-id=none -Wl,-z,noexecstack \
                -Wl,--wrap=sanityCheckIRSB,--wrap=cprop_BB,--wrap=do_deadcode_BB";
    let recipe = Recipe {
        engine: "valgrind",
        sources: &[
            ("stream.h", STREAM_H),
            ("filter.h", FILTER_H),
            ("valgrind/pagetax.c", VALGRIND_C),
        ],
        options: format!("{} {link}", compile.join(" ")),
        linked: core.clone(),
        result: TOOL_FILE,
    };
    recipe.cached(|folder| {
        let tool = folder.join(TOOL_FILE);
        let mut cc = compiler(&compile.join(" "));
        cc.arg("-I").arg(VALGRIND_INCLUDE).arg(folder.join("valgrind/pagetax.c"));
        cc.args(link.split_whitespace()).arg("-o").arg(tool).arg(core);
        cc.arg(Path::new(VALGRIND_LIBS).join("libvex-amd64-linux.a")).arg("-lgcc");
        cc.arg(Path::new(VALGRIND_LIBS).join("libgcc-sup-amd64-linux.a"));
        recipe.compile(cc)?;
        link_package(folder).map_err(|error| BuildError::Cache { path: folder.into(), error })
    })
}

/// The plugin for QEMU's user mode.
pub fn qemu_plugin() -> Result<PathBuf, BuildError> {
    let recipe = Recipe {
        engine: "qemu",
        sources: &[("stream.h", STREAM_H), ("filter.h", FILTER_H), ("qemu/pagetax.c", QEMU_C)],
        options: "-O2 -std=gnu11 -fPIC -shared -pthread".into(),
        linked: PathBuf::new(),
        result: PLUGIN_FILE,
    };
    let folder = recipe.cached(|folder| {
        let mut cc = compiler(&recipe.options);
        cc.arg(folder.join("qemu/pagetax.c")).arg("-o").arg(folder.join(PLUGIN_FILE));
        recipe.compile(cc)
    })?;
    Ok(folder.join(PLUGIN_FILE))
}

fn missing(what: &str, package: &'static str) -> BuildError {
    BuildError::Missing { what: what.into(), package }
}

fn compiler(options: &str) -> Command {
    let mut cc = Command::new("cc");
    cc.args(options.split_whitespace());
    cc
}

/// Valgrind looks for everything in one folder.
fn link_package(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(VALGRIND_TOOLS)? {
        let entry = entry?;
        std::os::unix::fs::symlink(entry.path(), folder.join(entry.file_name()))?;
    }
    Ok(())
}

/// How one engine is made.
struct Recipe<'a> {
    engine: &'static str,
    /// Path in the folder, and text.
    sources: &'a [(&'static str, &'static str)],
    /// Of the compiler and the linker.
    options: String,
    /// A library that goes into it.
    linked: PathBuf,
    /// The file that is there when it is made.
    result: &'static str,
}

impl Recipe<'_> {
    /// The folder with the engine, made if need be.
    fn cached(
        &self,
        make: impl FnOnce(&Path) -> Result<(), BuildError>,
    ) -> Result<PathBuf, BuildError> {
        let parent = cache_folder();
        let folder = parent.join(format!("{}-{:016x}", self.engine, self.hash()));
        if folder.join(self.result).exists() {
            return Ok(folder);
        }
        let failed = |error| BuildError::Cache { path: parent.clone(), error };
        std::fs::create_dir_all(&parent).map_err(failed)?;
        let scratch = tempfile::tempdir_in(&parent).map_err(failed)?;
        for (name, text) in self.sources {
            let path = scratch.path().join(name);
            path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
            std::fs::write(path, text).map_err(failed)?;
        }
        make(scratch.path())?;
        // Somebody else may have been faster; theirs is as good.
        match std::fs::rename(scratch.path(), &folder) {
            Err(error) if !folder.join(self.result).exists() => Err(failed(error)),
            _ => Ok(folder),
        }
    }

    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.sources, &self.options).hash(&mut hasher);
        env!("CARGO_PKG_VERSION").hash(&mut hasher);
        if let Ok(linked) = std::fs::metadata(&self.linked) {
            (linked.len(), linked.modified().ok()).hash(&mut hasher);
        }
        hasher.finish()
    }

    fn compile(&self, mut cc: Command) -> Result<(), BuildError> {
        match cc.output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => {
                let output = String::from_utf8_lossy(&output.stderr).trim_end().to_string();
                Err(BuildError::Compiler { engine: self.engine, output })
            }
            Err(_) => Err(missing("a C compiler (cc)", "gcc")),
        }
    }
}

/// As the XDG base directory specification has it.
fn cache_folder() -> PathBuf {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    cache.unwrap_or_else(std::env::temp_dir).join("pagetax/recorder")
}
