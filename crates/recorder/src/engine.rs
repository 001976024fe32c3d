//! Engines run a program so that it writes the stream. This module chooses one and builds its command
//! line.

use crate::toolchain::{self, BuildError};
use object::{Architecture, Object, ObjectSection, ReadCache};
use pagetax_host::launch::Launcher;
use pagetax_host::launch::libraries;
use pagetax_host::launch::preload::Preload;
use pagetax_host::launch::program::{NoPreload, Program, native, on_path};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// A kind of engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// A Valgrind tool: fastest on real programs, runs one thread at a time.
    Valgrind,
    /// A plugin of QEMU's user mode: other instruction sets, parallel threads.
    Qemu,
    /// A preloaded library that records bursts and counts instructions between them. JIT-compiled code
    /// runs unrecorded.
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

/// An error: the program cannot be recorded.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The program has privileges that it would lose under an engine.
    #[error(
        "`{0}` is set-id or has capabilities: under a recorder it would run without those rights\n  \
         hint: become that user and record a copy of it without them"
    )]
    SetId(String),
    /// The file is neither an ELF program nor a script.
    #[error("`{0}` is neither an ELF program nor a script\n  hint: name the program that runs it")]
    NoProgram(String),
    /// The engine cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The native engine does not support this program.
    #[error("the native engine cannot run this: {0}\n  hint: --engine valgrind")]
    Native(String),
    /// The engine does not support the program's instruction set.
    #[error(
        "{program} is a program for {architecture:?}, which the {engine} engine does not run\n  hint: {remedy}"
    )]
    Architecture {
        /// The path of the program to record.
        program: String,
        /// The program's instruction set.
        architecture: Architecture,
        /// The engine that was chosen.
        engine: EngineKind,
        /// A command that would help.
        remedy: &'static str,
    },
}

/// An engine that is ready to run, and the reason for its choice.
#[derive(Debug, Clone)]
pub struct Engine {
    /// The kind of engine that was chosen.
    pub kind: EngineKind,
    /// The reason for the choice, in a few words.
    pub why: String,
    /// The folder of the tool, or the plugin.
    binary: PathBuf,
    preload: Option<Preload>,
    /// The program that runs it; empty for the native engine.
    runner: &'static str,
}

const SAMPLER: &str = "libpagetax_dbt.so";

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
    /// Returns the requested engine, or the best one for the program, and builds it at first use. The
    /// native engine must be requested: it shares the program's process, so the program can notice it.
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
                let why = "valgrind is not installed".into();
                qemu(path, architecture, why).map_err(|_| error)
            }),
        }
    }

    /// Prepares the command that runs `argv` under this engine, which writes to `stream`.
    pub fn launcher(&self, stream: &Path, log: &Path, argv: &[OsString], follow: bool) -> Launcher {
        match self.kind {
            EngineKind::Valgrind => self.valgrind_command(stream, log, argv, follow),
            EngineKind::Qemu => self.qemu_command(stream, argv),
            EngineKind::Native => self.sampler_command(stream, argv),
        }
    }

    fn sampler_command(&self, stream: &Path, argv: &[OsString]) -> Launcher {
        let mut launcher = Launcher::new(&argv[0]);
        launcher.command.args(&argv[1..]).env("PAGETAX_SAMPLER_STREAM", stream);
        if let Some(library) = &self.preload {
            launcher.preload(library);
        }
        launcher
    }

    fn valgrind_command(
        &self,
        stream: &Path,
        log: &Path,
        argv: &[OsString],
        follow: bool,
    ) -> Launcher {
        let mut options = vec![
            joined("--tool=", toolchain::TOOL),
            joined("--stream=", stream),
            joined("--log-file=", log),
            "-q".into(),
            "--command-line-only=yes".into(),
            // Features of Valgrind that take time and that the recorder does not need.
            "--vgdb=no".into(),
            "--read-var-info=no".into(),
            "--run-libc-freeres=no".into(),
            "--run-cxx-freeres=no".into(),
            "--fair-sched=try".into(),
            // Blocks that continue behind jumps would hold the same code several times. They cost
            // translation time and cache.
            "--vex-guest-chase=no".into(),
        ];
        options.push(if follow { "--trace-children=yes" } else { "--trace-children=no" }.into());
        options.push("--".into());
        options.extend_from_slice(argv);
        let mut launcher = Launcher::new(self.runner);
        launcher.command.args(options).env("VALGRIND_LIB", &self.binary);
        launcher
    }

    fn qemu_command(&self, stream: &Path, argv: &[OsString]) -> Launcher {
        let mut plugin = OsString::from("file=");
        plugin.push(escaped(&self.binary));
        plugin.push(",stream=");
        plugin.push(escaped(stream));
        let mut options: Vec<OsString> = vec!["-plugin".into(), plugin];
        match Program::find(&argv[0]) {
            // QEMU does not search PATH and does not run scripts.
            Ok(program) => options.extend(program.runs),
            Err(_) => options.push(argv[0].clone()),
        }
        let mut launcher = Launcher::new(self.runner);
        launcher.command.args(options).args(&argv[1..]);
        launcher
    }
}

fn joined(option: &str, value: impl AsRef<std::ffi::OsStr>) -> OsString {
    let mut text = OsString::from(option);
    text.push(value);
    text
}

/// Doubles commas: QEMU ends an option's value at a single one.
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

/// Returns the native engine, or the reason that it cannot run the program.
fn sampler(program: &Program, why: &str) -> Result<Engine, String> {
    if native() != Architecture::X86_64 {
        return Err("it supports x86-64 only".into());
    }
    program
        .takes_preload()
        .map_err(|NoPreload { program, why, .. }| format!("`{program}` {why}"))?;
    for file in program.files() {
        if let Some(what) = unsupported(&file) {
            return Err(format!("{} {what}", file.display()));
        }
    }
    let binary = libraries::find(SAMPLER).map_err(|error| error.to_string())?;
    let preload = Some(Preload::new(&binary).map_err(|error| error.to_string())?);
    Ok(Engine { kind: EngineKind::Native, why: why.into(), binary, preload, runner: "" })
}

/// Returns a feature of a file that the native engine does not support. The kernel restarts code at
/// addresses in rseq(2) tables, which does not work from the code cache. Go programs create threads and
/// handle signals without the C library.
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
            remedy: "record it on a machine of its own architecture",
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
