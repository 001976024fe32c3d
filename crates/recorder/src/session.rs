//! A recording: starts a program under an engine, and hands what it writes to a consumer until it
//! ends.
//!
//! Invariants: the program has our terminal, arguments and environment (but for what the engine needs
//! to be found); its exit is handed on as it is; nothing of the recording stays behind.

use crate::engine::{Engine, EngineKind};
use crate::native;
use crate::ring::Rings;
use crate::stream::{Consumer, SideFilters};
use pagetax_core::exit::Exit;
use pagetax_host::launch::signals::StopRequest;
use pagetax_host::sys::process::Child;
use std::ffi::OsString;
use std::io;
use std::time::{Duration, Instant};

/// What to record.
pub struct Recording<'a> {
    /// Under which engine.
    pub engine: &'a Engine,
    /// The command.
    pub argv: &'a [OsString],
    /// Also its children and what they exec.
    pub follow: bool,
    /// Bursts only. The QEMU engine cannot sample, and the native one can do nothing else.
    pub sample: bool,
    /// What the engine may drop: of data, and of code.
    pub filters: (SideFilters, SideFilters),
}

/// How it went.
#[derive(Debug)]
pub struct Ended {
    /// The program's own.
    pub exit: Exit,
    /// From start to end, under the recorder.
    pub wall_ns: u64,
    /// Records that were taken.
    pub record_count: u64,
    /// Processes and threads that found no ring and went unrecorded.
    pub unrecorded_count: u32,
    /// What the engine had to say, if anything.
    pub log: String,
    /// What the native engine says of itself.
    pub native: Option<native::Status>,
}

/// The recording itself failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {0}: {1}")]
pub struct SessionError(&'static str, #[source] io::Error);

/// While nothing arrives.
const IDLE: Duration = Duration::from_micros(100);
/// How often the program's end, signals and the caller's wishes are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Runs it. `look` is called now and then, and at the end; it may print what was seen so far.
pub fn run<C: Consumer>(
    recording: &Recording<'_>,
    consumer: &mut C,
    mut look: impl FnMut(&mut C),
) -> Result<Ended, SessionError> {
    if recording.engine.kind == EngineKind::Native && !recording.sample {
        let why = "the native engine records samples only";
        return Err(SessionError("record", io::Error::new(io::ErrorKind::Unsupported, why)));
    }
    let (data, code) = recording.filters;
    let mut rings = Rings::new(data, code, recording.follow, recording.sample)
        .map_err(|error| SessionError("share memory with the recorder", error))?;
    let log = tempfile::NamedTempFile::new()
        .map_err(|error| SessionError("make a file for the recorder's messages", error))?;
    let start = Instant::now();
    let Recording { engine, argv, follow, .. } = *recording;
    let child = engine.launcher(&rings.path(), log.path(), argv, follow).spawn();
    let mut child =
        child.map_err(|error| SessionError("start the recorder", io::Error::other(error)))?;
    let (mut record_count, mut looked, mut stopping) = (0, Instant::now(), StopRequest::default());
    let waiting = |error| SessionError("wait for the program", error);
    let cpu_ns = loop {
        let count = rings.drain(consumer);
        record_count += count as u64;
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            look(consumer);
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
    look(consumer);
    Ok(Ended {
        exit,
        wall_ns,
        record_count,
        unrecorded_count: rings.unrecorded_count(),
        log: std::fs::read_to_string(log.path()).unwrap_or_default(),
        native: (recording.engine.kind == EngineKind::Native).then(|| rings.native().read(cpu_ns)),
    })
}

/// The CPU time of all threads that a child has had, to a tick of the kernel's.
fn cpu_ns(child: &Child) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", child.pid())).unwrap_or_default();
    // The name before may hold anything, spaces and parentheses too.
    let fields = text.rsplit(") ").next().unwrap_or_default().split(' ');
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    ticks * 1_000_000_000 / rustix::param::clock_ticks_per_second()
}
