//! A recording session: starts a program under an engine and passes its records to a consumer until the
//! program ends.
//!
//! Invariants: the program has our terminal, its own arguments, and our environment with the variables
//! that load the engine. The caller gets the program's exit status unchanged. No file stays behind.

use crate::engine::{Engine, EngineKind};
use crate::native;
use crate::ring::Rings;
use crate::stream::{Consumer, SideFilters};
use pagetax_core::exit::Exit;
use pagetax_host::launch::signals::StopRequest;
use pagetax_host::sys::process::Child;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The options of a session.
pub struct RecordOptions<'a> {
    /// The engine that runs the command.
    pub engine: &'a Engine,
    /// The command with its arguments.
    pub argv: &'a [OsString],
    /// True to record children too, and programs that they exec.
    pub follow: bool,
    /// True to record bursts only. The QEMU engine cannot; the native engine must.
    pub sample: bool,
    /// True to learn which unused pages are all zeros. Only the Valgrind engine tells them.
    pub zeros: bool,
    /// The filters of data and of code.
    pub filters: (SideFilters, SideFilters),
    /// The standard streams of the program.
    pub streams: Streams,
    /// Variables that are added to its environment.
    pub environment: &'a [(&'static str, OsString)],
}

/// The standard streams of a recorded program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Streams {
    /// Ours.
    #[default]
    Inherited,
    /// Ours, but its stdout goes to our stderr, because our stdout has another use.
    StdoutToStderr,
    /// It reads this file or nothing, and nobody sees its output.
    Apart(Option<PathBuf>),
}

impl Streams {
    fn apply(&self, command: &mut Command) -> io::Result<()> {
        match self {
            Streams::Inherited => {}
            Streams::StdoutToStderr => {
                command.stdout(io::stderr());
            }
            Streams::Apart(file) => {
                let stdin = file.as_ref().map(File::open).transpose()?;
                command.stdin(stdin.map_or_else(Stdio::null, Stdio::from));
                command.stdout(Stdio::null()).stderr(Stdio::null());
            }
        }
        Ok(())
    }
}

/// The end of a session.
#[derive(Debug)]
pub struct SessionOutcome {
    /// The exit of the recorded program.
    pub exit: Exit,
    /// The elapsed time under the recorder.
    pub wall_ns: u64,
    /// The number of records that were received.
    pub record_count: u64,
    /// The number of processes and threads that found no free ring.
    pub unrecorded_count: u32,
    /// The engine's messages; usually empty.
    pub log: String,
    /// The native engine's status.
    pub native: Option<native::Status>,
}

/// An error of the recorder, not of the program.
#[derive(Debug, thiserror::Error)]
#[error("cannot {0}: {1}")]
pub struct SessionError(&'static str, #[source] io::Error);

/// The pause if no records arrived.
const IDLE: Duration = Duration::from_micros(100);
/// The interval of checks for the program's end and for signals, and of calls of `look`.
const LOOK: Duration = Duration::from_millis(20);

/// Records a program until it ends. Calls `look` with the number of records every 20 ms and at the end, so
/// that it can print the results so far.
pub fn run<C: Consumer>(
    options: &RecordOptions<'_>,
    consumer: &mut C,
    mut look: impl FnMut(&mut C, u64),
) -> Result<SessionOutcome, SessionError> {
    if options.engine.kind == EngineKind::Native && !options.sample {
        let why = "the native engine records samples only";
        return Err(SessionError("record", io::Error::new(io::ErrorKind::Unsupported, why)));
    }
    let (data, code) = options.filters;
    let mut rings = Rings::new(data, code, options.follow, options.sample, options.zeros)
        .map_err(|error| SessionError("share memory with the recorder", error))?;
    let log = tempfile::NamedTempFile::new().map_err(|error| {
        let hint = format!("{error}\n  hint: set TMPDIR to a directory that you may write");
        SessionError("make a file for the recorder's messages", io::Error::other(hint))
    })?;
    let start = Instant::now();
    let RecordOptions { engine, argv, follow, .. } = *options;
    let mut launcher = engine.launcher(&rings.path(), log.path(), argv, follow);
    launcher.command.envs(options.environment.iter().map(|(name, value)| (name, value)));
    let streams = options.streams.apply(&mut launcher.command);
    streams.map_err(|error| SessionError("open the program's input", error))?;
    let mut child = launcher
        .spawn()
        .map_err(|error| SessionError("start the recorder", io::Error::other(error)))?;
    let (mut record_count, mut looked, mut stopping) = (0, Instant::now(), StopRequest::default());
    let waiting = |error| SessionError("wait for the program", error);
    let cpu_ns = loop {
        let count = rings.drain(consumer);
        record_count += count as u64;
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            look(consumer, record_count);
            stopping.pass_on(&child);
            if child.ends_within(Duration::ZERO).map_err(waiting)? {
                break cpu_ns(&child);
            }
        }
        if count == 0 {
            std::thread::sleep(IDLE);
        }
    };
    let (exit, _) = child.wait().map_err(waiting)?;
    let wall_ns = start.elapsed().as_nanos() as u64;
    rings.stop();
    loop {
        match rings.drain(consumer) {
            0 => break,
            count => record_count += count as u64,
        }
    }
    look(consumer, record_count);
    Ok(SessionOutcome {
        exit,
        wall_ns,
        record_count,
        unrecorded_count: rings.unrecorded_count(),
        log: std::fs::read_to_string(log.path()).unwrap_or_default(),
        native: (options.engine.kind == EngineKind::Native).then(|| rings.native().read(cpu_ns)),
    })
}

/// Returns the CPU time of all threads of a child so far, in the kernel's resolution of a tick.
fn cpu_ns(child: &Child) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", child.pid())).unwrap_or_default();
    // The command name before these fields may contain spaces and parentheses.
    let fields = text.rsplit(") ").next().unwrap_or_default().split(' ');
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    ticks * 1_000_000_000 / rustix::param::clock_ticks_per_second()
}
