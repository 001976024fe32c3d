//! Engines: what runs a program so that it writes the stream. Which one can, and its command line.

use crate::toolchain::{self, BuildError};
use object::{Architecture, Object, ObjectSection, ReadCache};
use pagetax_host::launch::installed;
use pagetax_host::launch::preload::{self, Preload};
use pagetax_host::launch::program::{Kind, Program, native, on_path};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// A Valgrind tool: fastest on real programs, one thread at a time.
    Valgrind,
    /// A plugin of QEMU's user mode: other instruction sets, threads in parallel.
    Qemu,
    /// A preloaded library that records bursts and only counts instructions in between. Code that is made at run time
    /// runs natively.
    Native,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EngineKind::Valgrind => "valgrind",
            EngineKind::Qemu => "qemu",
            EngineKind::Native => "native",
        })
    }
}

/// Why nothing can be recorded.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Would lose its rights.
    #[error(
        "`{0}` is set-id or has capabilities: under a recorder it would run without those rights\n  \
         remedy: become that user and record a copy of it without them"
    )]
    SetId(String),
    /// Nothing that an engine could run.
    #[error(
        "`{0}` is neither an ELF program nor a script\n  remedy: name the program that runs it"
    )]
    NoProgram(String),
    /// The engine's.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The native engine cannot be with this program.
    #[error("the native engine cannot: {0}\n  remedy: --engine valgrind")]
    Native(String),
    /// An instruction set that the engine does not know.
    #[error(
        "{program} is a program for {architecture:?}, which the {engine} engine does not run\n  remedy: {remedy}"
    )]
    Architecture {
        /// Its path.
        program: String,
        /// What it is for.
        architecture: Architecture,
        /// As chosen.
        engine: EngineKind,
        /// What does.
        remedy: &'static str,
    },
}

/// An engine that is ready, and why it was chosen.
#[derive(Debug, Clone)]
pub struct Engine {
    /// Which.
    pub kind: EngineKind,
    /// In a few words.
    pub why: String,
    /// Folder of the tool, or the plugin.
    binary: PathBuf,
    /// The native engine's library.
    preload: Option<Preload>,
    /// The program that runs it; none that runs natively.
    runner: &'static str,
}

/// The native engine.
const SAMPLER: &str = "libpagetax_dbt.so";

/// Runners of QEMU's user mode.
const QEMUS: &[(Architecture, &str)] = &[
    (Architecture::X86_64, "qemu-x86_64"),
    (Architecture::I386, "qemu-i386"),
    (Architecture::Aarch64, "qemu-aarch64"),
    (Architecture::Arm, "qemu-arm"),
    (Architecture::Riscv64, "qemu-riscv64"),
    (Architecture::PowerPc64, "qemu-ppc64le"),
    (Architecture::S390x, "qemu-s390x"),
];

impl Engine {
    /// Returns the engine that was asked for, or the best one for the program; builds it at first use. The native one
    /// must be asked for, as it shares the program's process, and so cannot be hidden from it altogether.
    pub fn choose(program: &Program, asked: Option<EngineKind>) -> Result<Engine, EngineError> {
        let name = || program.path.display().to_string();
        if program.has_rights() {
            return Err(EngineError::SetId(name()));
        }
        let Some(architecture) = program.architecture else {
            return Err(EngineError::NoProgram(name()));
        };
        let path = &program.path;
        match asked {
            Some(EngineKind::Valgrind) => valgrind(path, architecture, "asked for"),
            Some(EngineKind::Qemu) => qemu(path, architecture, "asked for".into()),
            Some(EngineKind::Native) => sampler(program, "asked for").map_err(EngineError::Native),
            None if architecture != native() => {
                qemu(path, architecture, format!("it runs {architecture:?} programs"))
            }
            None => valgrind(path, architecture, "fastest on real programs").or_else(|error| {
                let why = "valgrind is not at hand".into();
                qemu(path, architecture, why).map_err(|_| error)
            }),
        }
    }

    /// The command line and its environment that run `argv` and write to `stream`.
    pub fn command(&self, stream: &Path, log: &Path, argv: &[OsString], follow: bool) -> Launch {
        match self.kind {
            EngineKind::Valgrind => self.valgrind_command(stream, log, argv, follow),
            EngineKind::Qemu => self.qemu_command(stream, argv),
            EngineKind::Native => self.sampler_command(stream, argv),
        }
    }

    fn sampler_command(&self, stream: &Path, argv: &[OsString]) -> Launch {
        let mut environment = vec![("PAGETAX_SAMPLER_STREAM", stream.into())];
        environment
            .extend(self.preload.iter().map(|library| (preload::VARIABLE, library.before_ours())));
        Launch { program: argv[0].clone(), arguments: argv[1..].to_vec(), environment }
    }

    fn valgrind_command(
        &self,
        stream: &Path,
        log: &Path,
        argv: &[OsString],
        follow: bool,
    ) -> Launch {
        let mut options = vec![
            joined("--tool=", toolchain::TOOL),
            joined("--stream=", stream),
            joined("--log-file=", log),
            "-q".into(),
            "--command-line-only=yes".into(),
            // Nothing of these is of use here, and each takes time.
            "--vgdb=no".into(),
            "--read-var-info=no".into(),
            "--run-libc-freeres=no".into(),
            "--run-cxx-freeres=no".into(),
            "--fair-sched=try".into(),
            // Blocks that go on behind jumps hold the same code several times: more to translate, and to run
            // from caches.
            "--vex-guest-chase=no".into(),
        ];
        options.push(if follow { "--trace-children=yes" } else { "--trace-children=no" }.into());
        options.push("--".into());
        options.extend_from_slice(argv);
        let environment = vec![("VALGRIND_LIB", self.binary.clone().into_os_string())];
        Launch { program: self.runner.into(), arguments: options, environment }
    }

    fn qemu_command(&self, stream: &Path, argv: &[OsString]) -> Launch {
        let mut plugin = OsString::from("file=");
        plugin.push(escaped(&self.binary));
        plugin.push(",stream=");
        plugin.push(escaped(stream));
        let mut options: Vec<OsString> = vec!["-plugin".into(), plugin];
        match Program::find(&argv[0]) {
            // QEMU neither looks in PATH nor runs scripts.
            Ok(program) => options.extend(program.runs),
            Err(_) => options.push(argv[0].clone()),
        }
        options.extend_from_slice(&argv[1..]);
        Launch { program: self.runner.into(), arguments: options, environment: Vec::new() }
    }
}

/// What to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The runner.
    pub program: OsString,
    /// Its arguments, the program's own last.
    pub arguments: Vec<OsString>,
    /// On top of ours.
    pub environment: Vec<(&'static str, OsString)>,
}

fn joined(option: &str, value: impl AsRef<std::ffi::OsStr>) -> OsString {
    let mut text = OsString::from(option);
    text.push(value);
    text
}

/// Doubles commas, at which QEMU would else end the value of an option.
fn escaped(path: &Path) -> OsString {
    let bytes = path.as_os_str().as_bytes();
    let double = |byte: &u8| std::iter::repeat_n(*byte, if *byte == b',' { 2 } else { 1 });
    OsString::from_vec(bytes.iter().flat_map(double).collect())
}

fn valgrind(program: &Path, architecture: Architecture, why: &str) -> Result<Engine, EngineError> {
    if architecture != Architecture::X86_64 || native() != Architecture::X86_64 {
        return Err(EngineError::Architecture {
            program: program.display().to_string(),
            architecture,
            engine: EngineKind::Valgrind,
            remedy: "use --engine qemu (apt-get install qemu-user)",
        });
    }
    if !on_path("valgrind") {
        return Err(missing("valgrind", "valgrind").into());
    }
    let binary = toolchain::valgrind_lib()?;
    Ok(Engine {
        kind: EngineKind::Valgrind,
        why: why.into(),
        binary,
        preload: None,
        runner: "valgrind",
    })
}

/// The native engine, or why it cannot.
fn sampler(program: &Program, why: &str) -> Result<Engine, String> {
    let name = program.binary.display();
    if program.architecture != Some(Architecture::X86_64) || native() != Architecture::X86_64 {
        return Err("it is for x86-64".into());
    }
    if program.kind != Kind::DynamicGlibc {
        return Err(format!("{name} is not linked dynamically with glibc"));
    }
    for file in program.files() {
        if let Some(what) = unsupported(&file) {
            return Err(format!("{} {what}", file.display()));
        }
    }
    let binary = installed::find(SAMPLER).ok_or_else(|| {
        format!("{SAMPLER} is not beside pagetax (cargo build --release -p pagetax-dbt)")
    })?;
    let preload = Some(Preload::new(&binary).map_err(|error| error.to_string())?);
    Ok(Engine { kind: EngineKind::Native, why: why.into(), binary, preload, runner: "" })
}

/// Returns what a file has that the native engine does not support. The kernel may have to restart code (rseq(2)),
/// and does not know copies of it. Go programs make threads and handle all signals without the C library.
fn unsupported(file: &Path) -> Option<&'static str> {
    let file = std::fs::File::open(file).ok()?;
    let cache = ReadCache::new(file);
    let file = object::File::parse(&cache).ok()?;
    file.sections().find_map(|section| match section.name().unwrap_or_default() {
        name if name.starts_with("__rseq_cs") => Some("has restartable sequences"),
        ".go.buildinfo" | ".note.go.buildid" => Some("is made by Go"),
        _ => None,
    })
}

fn qemu(program: &Path, architecture: Architecture, why: String) -> Result<Engine, EngineError> {
    let runner = QEMUS.iter().find(|(of, _)| *of == architecture);
    let Some((_, runner)) = runner else {
        return Err(EngineError::Architecture {
            program: program.display().to_string(),
            architecture,
            engine: EngineKind::Qemu,
            remedy: "record it on a machine of its own kind",
        });
    };
    if !on_path(runner) {
        return Err(missing(runner, "qemu-user").into());
    }
    let binary = toolchain::qemu_plugin()?;
    Ok(Engine { kind: EngineKind::Qemu, why, binary, preload: None, runner })
}

fn missing(what: &str, package: &'static str) -> BuildError {
    BuildError::Missing { what: what.into(), package }
}
