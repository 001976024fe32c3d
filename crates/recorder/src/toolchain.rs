//! The engines' binaries. pagetax compiles them at their first use, from sources that it contains, and
//! keeps them in a private folder for code.
//!
//! They link with the machine's own Valgrind and QEMU and fit only these, so they cannot be built with
//! pagetax. The name of a cache folder has a hash of sources, commands and linked libraries: an update
//! of any of them builds a new engine.

use pagetax_host::cache;
use pagetax_host::code_folder::{self, Candidate, FolderRefusal, NoCodeFolder};
use pagetax_host::launch::program::search_path;
use rustix::io::Errno;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

const STREAM_H: &str = include_str!("../engines/stream.h");
const FILTER_H: &str = include_str!("../engines/filter.h");
const VALGRIND_C: &str = include_str!("../engines/valgrind/pagetax.c");
const VALGRIND_ZEROS_H: &str = include_str!("../engines/valgrind/zeros.h");
const VALGRIND_GROUPS_H: &str = include_str!("../engines/valgrind/groups.h");
const VALGRIND_INSTRUMENT_H: &str = include_str!("../engines/valgrind/instrument.h");
const QEMU_C: &str = include_str!("../engines/qemu/pagetax.c");

/// An error: no engine can be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A package is not installed.
    #[error("{what} is not installed\n  hint: apt-get install {package}")]
    Missing {
        /// The program or library that is missing.
        what: String,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// The compiler failed, likely because the sources are for another version.
    #[error(
        "the recorder's {engine} engine does not compile here:\n{output}\n  hint: use the other \
         engine (--engine), or Debian 12's version of {engine}"
    )]
    Compiler {
        /// The engine that does not compile.
        engine: &'static str,
        /// The messages of the compiler.
        output: String,
    },
    /// No folder can hold the engine.
    #[error("the recorder's {0} engine cannot be built{1}")]
    NoFolder(&'static str, NoCodeFolder),
}

/// The reason why an engine is not in one folder.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// Another folder may hold it.
    #[error(transparent)]
    Folder(#[from] FolderRefusal),
    /// No folder changes this.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// The free space that the compiler needs, with its temporary files.
const BUILD_BYTES: u64 = 16 << 20;

/// Folders of Debian's valgrind package on x86-64.
const VALGRIND_INCLUDE: &str = "/usr/include/valgrind";
const VALGRIND_LIBS: &str = "/usr/lib/x86_64-linux-gnu/valgrind";
const VALGRIND_TOOLS: &str = "/usr/libexec/valgrind";
/// The name of the Valgrind tool.
pub const TOOL: &str = "pagetax";
const TOOL_FILE: &str = "pagetax-amd64-linux";
const PLUGIN_FILE: &str = "libpagetax_recorder.so";

/// Returns the folder for VALGRIND_LIB: our tool beside the package's own files.
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
    // The address of Valgrind's own tools, far from programs.
    let link = "-no-pie -static -nodefaultlibs -nostartfiles -u _start \
                -Wl,-Ttext-segment=0x58000000 -Wl,--build-id=none -Wl,-z,noexecstack \
                -Wl,--wrap=sanityCheckIRSB,--wrap=cprop_BB,--wrap=do_deadcode_BB";
    let recipe = BuildRecipe {
        engine: "valgrind",
        sources: &[
            ("stream.h", STREAM_H),
            ("filter.h", FILTER_H),
            ("valgrind/zeros.h", VALGRIND_ZEROS_H),
            ("valgrind/groups.h", VALGRIND_GROUPS_H),
            ("valgrind/instrument.h", VALGRIND_INSTRUMENT_H),
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
        cc.args(link.split_whitespace()).arg("-o").arg(tool).arg(&core);
        cc.arg(Path::new(VALGRIND_LIBS).join("libvex-amd64-linux.a")).arg("-lgcc");
        cc.arg(Path::new(VALGRIND_LIBS).join("libgcc-sup-amd64-linux.a"));
        recipe.compile(cc, folder)?;
        Ok(link_package(folder).map_err(|error| FolderRefusal::System(folder.into(), error))?)
    })
}

/// Returns the plugin for QEMU's user mode.
pub fn qemu_plugin() -> Result<PathBuf, BuildError> {
    let recipe = BuildRecipe {
        engine: "qemu",
        sources: &[("stream.h", STREAM_H), ("filter.h", FILTER_H), ("qemu/pagetax.c", QEMU_C)],
        options: "-O2 -std=gnu11 -fPIC -shared -pthread".into(),
        linked: PathBuf::new(),
        result: PLUGIN_FILE,
    };
    let folder = recipe.cached(|folder| {
        let mut cc = compiler(&recipe.options);
        cc.arg(folder.join("qemu/pagetax.c")).arg("-o").arg(folder.join(PLUGIN_FILE));
        recipe.compile(cc, folder)
    })?;
    Ok(folder.join(PLUGIN_FILE))
}

fn missing(what: &str, package: &'static str) -> BuildError {
    BuildError::Missing { what: what.into(), package }
}

fn compiler(options: &str) -> Command {
    let mut cc = Command::new("cc");
    // Without PATH, gcc does not find its linker. The messages are searched for the system's words.
    cc.args(options.split_whitespace()).env("PATH", search_path()).env("LC_ALL", "C");
    cc
}

/// Links the package's files into our folder: Valgrind looks for everything in one.
fn link_package(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(VALGRIND_TOOLS)? {
        let entry = entry?;
        std::os::unix::fs::symlink(entry.path(), folder.join(entry.file_name()))?;
    }
    Ok(())
}

/// The steps that build one engine.
struct BuildRecipe<'a> {
    engine: &'static str,
    /// Paths in the folder, and their texts.
    sources: &'a [(&'static str, &'static str)],
    /// Options of the compiler and the linker.
    options: String,
    /// A library that the engine contains.
    linked: PathBuf,
    /// The file that exists after the build.
    result: &'static str,
}

impl BuildRecipe<'_> {
    /// Returns the folder with the engine; builds it if needed.
    fn cached(&self, make: impl Fn(&Path) -> Result<(), Failure>) -> Result<PathBuf, BuildError> {
        self.cached_in(code_folder::candidates(), make)
    }

    fn cached_in(
        &self,
        candidates: impl IntoIterator<Item = Candidate>,
        make: impl Fn(&Path) -> Result<(), Failure>,
    ) -> Result<PathBuf, BuildError> {
        let fill = |parent: &Path| match self.found_or_made(parent, &make) {
            Ok(folder) => Ok(Ok(folder)),
            Err(Failure::Build(error)) => Ok(Err(error)),
            Err(Failure::Folder(refusal)) => Err(refusal),
        };
        code_folder::first_filled(candidates, Path::new("recorder"), BUILD_BYTES, fill)
            .map_err(|folders| BuildError::NoFolder(self.engine, folders))?
    }

    fn found_or_made(
        &self,
        parent: &Path,
        make: impl Fn(&Path) -> Result<(), Failure>,
    ) -> Result<PathBuf, Failure> {
        let folder = parent.join(format!("{}-{:016x}", self.engine, self.hash()));
        if !folder.exists() {
            self.make_in(parent, &folder, make)?;
        }
        cache::private_folder(&folder).map_err(FolderRefusal::from)?;
        cache::check_file(&folder.join(self.result)).map_err(FolderRefusal::from)?;
        Ok(folder)
    }

    /// Builds the engine in a temporary folder and moves it to its place when complete.
    fn make_in(
        &self,
        parent: &Path,
        folder: &Path,
        make: impl Fn(&Path) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let failed = |error| FolderRefusal::System(parent.into(), error);
        let scratch = tempfile::tempdir_in(parent).map_err(failed)?;
        for (name, text) in self.sources {
            let path = scratch.path().join(name);
            path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
            std::fs::write(path, text).map_err(failed)?;
        }
        make(scratch.path())?;
        // Compilers follow the umask, which may let the group write.
        cache::make_private(&scratch.path().join(self.result)).map_err(failed)?;
        // Another pagetax may have built the same engine first.
        match std::fs::rename(scratch.path(), folder) {
            Err(error) if !folder.exists() => Err(failed(error).into()),
            _ => Ok(()),
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

    fn compile(&self, mut cc: Command, folder: &Path) -> Result<(), Failure> {
        let Ok(output) = cc.env("TMPDIR", folder).output() else {
            return Err(missing("a C compiler (cc)", "gcc").into());
        };
        if output.status.success() {
            return Ok(());
        }
        let output = String::from_utf8_lossy(&output.stderr).trim_end().to_string();
        Err(match out_of_space(&output) {
            Some(error) => FolderRefusal::System(folder.into(), error).into(),
            None => BuildError::Compiler { engine: self.engine, output }.into(),
        })
    }
}

/// Returns the error of a full disk or quota, if the messages of a compiler contain its words.
fn out_of_space(messages: &str) -> Option<io::Error> {
    let errors = [Errno::NOSPC, Errno::DQUOT].map(io::Error::from);
    errors.into_iter().find(|error| {
        let words = error.to_string();
        words.split(" (os error").next().is_some_and(|words| messages.contains(words))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    const RECIPE: BuildRecipe<'_> = BuildRecipe {
        engine: "test",
        sources: &[("a.c", "int a;")],
        options: String::new(),
        linked: PathBuf::new(),
        result: "engine",
    };

    fn made(parent: &Path, count: &Cell<u32>) -> Result<PathBuf, BuildError> {
        RECIPE.cached_in([Ok(parent.into())], |folder| {
            count.set(count.get() + 1);
            let failed = |error| FolderRefusal::System(folder.into(), error);
            Ok(std::fs::write(folder.join("engine"), "ours").map_err(failed)?)
        })
    }

    #[test]
    fn an_engine_is_made_once() {
        let keep = tempfile::tempdir().unwrap();
        let count = Cell::new(0);
        let folder = made(keep.path(), &count).unwrap();
        assert_eq!(std::fs::read(folder.join("engine")).unwrap(), b"ours");
        assert_eq!(made(keep.path(), &count).unwrap(), folder);
        assert_eq!(count.get(), 1);
    }

    #[test]
    fn an_engine_that_others_could_have_put_there_is_not_run() {
        let keep = tempfile::tempdir().unwrap();
        let count = Cell::new(0);
        let open = keep.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        let error = made(&open, &count).unwrap_err();
        assert!(error.to_string().contains("written by others"), "{error}");

        let folder = made(keep.path(), &count).unwrap();
        std::fs::set_permissions(folder.join("engine"), Permissions::from_mode(0o777)).unwrap();
        let error = made(keep.path(), &count).unwrap_err();
        assert!(error.to_string().contains("written by others"), "{error}");
        if rustix::process::geteuid().is_root() {
            std::fs::set_permissions(folder.join("engine"), Permissions::from_mode(0o755)).unwrap();
            std::os::unix::fs::chown(folder.join("engine"), Some(65_533), None).unwrap();
            let error = made(keep.path(), &count).unwrap_err();
            assert!(error.to_string().contains("belongs to user 65533"), "{error}");
        }
    }

    #[test]
    fn a_folder_that_refuses_is_passed_over_and_a_compiler_that_fails_is_not_tried_twice() {
        let keep = tempfile::tempdir().unwrap();
        let folders = || ["first", "second"].map(|name| Ok(keep.path().join(name)));
        let full = |folder: &Path| match folder.starts_with(keep.path().join("first")) {
            true => Err(out_of_space("cc1: No space left on device").unwrap()),
            false => std::fs::write(folder.join("engine"), "ours"),
        };
        let made = RECIPE.cached_in(folders(), |folder| {
            Ok(full(folder).map_err(|error| FolderRefusal::System(folder.into(), error))?)
        });
        assert!(made.unwrap().starts_with(keep.path().join("second")));

        let (count, other) = (Cell::new(0), BuildRecipe { engine: "other", ..RECIPE });
        let error = other.cached_in(folders(), |_| {
            count.set(count.get() + 1);
            Err(BuildError::Compiler { engine: "other", output: "line 1".into() }.into())
        });
        assert!(matches!(error.unwrap_err(), BuildError::Compiler { .. }));
        assert_eq!((count.get(), out_of_space("line 1").is_none()), (1, true));
    }
}
