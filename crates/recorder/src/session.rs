//! A recording: starts a program under an engine, and hands what it writes to a consumer until it
//! ends.
//!
//! Invariants: the program has our terminal, arguments and environment (but for what the engine needs
//! to be found); its exit is handed on as it is; nothing of the recording stays behind.

use crate::engine::{Engine, EngineKind};
use crate::native;
use crate::ring::Rings;
use crate::stream::{Consumer, SideFilters};
use pagetax_host::sys::signal::asked_to_stop;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
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

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
}

impl Exit {
    fn of(status: ExitStatus) -> Exit {
        match (status.code(), status.signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, signal) => Exit::Signal(signal.unwrap_or(0)),
        }
    }

    /// As a shell reports it.
    pub fn shell_code(self) -> u8 {
        match self {
            Exit::Code(code) => code as u8,
            Exit::Signal(signal) => 128 + signal as u8,
        }
    }
}

/// The recording itself failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {0}: {1}")]
pub struct SessionError(&'static str, #[source] io::Error);

/// While nothing arrives.
const IDLE: Duration = Duration::from_micros(100);
/// How often the program's end, signals and the caller's wishes are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// From a wish to stop that did not come from a terminal to a harder one.
const PATIENCE: Duration = Duration::from_secs(5);

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
    let mut child = spawn(recording, &rings, log.path())
        .map_err(|error| SessionError("start the recorder", error))?;
    let (mut record_count, mut looked, mut stopping) = (0, Instant::now(), Stopping::default());
    let cpu_ns = loop {
        let count = rings.drain(consumer);
        record_count += count as u64;
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            look(consumer);
            stopping.pass_on(&child);
            if has_ended(&child).map_err(|e| SessionError("wait for the program", e.into()))? {
                break cpu_ns(&child);
            }
        }
        if count == 0 {
            std::thread::sleep(IDLE);
        }
    };
    let status = child.wait().map_err(|error| SessionError("wait for the program", error))?;
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
        exit: Exit::of(status),
        wall_ns,
        record_count,
        unrecorded_count: rings.unrecorded_count(),
        log: std::fs::read_to_string(log.path()).unwrap_or_default(),
        native: (recording.engine.kind == EngineKind::Native).then(|| rings.native().read(cpu_ns)),
    })
}

/// Whether a child has ended. It stays to be asked and waited for.
fn has_ended(child: &Child) -> rustix::io::Result<bool> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(Pid::from_child(child)), options)?.is_some())
}

/// The CPU time of all threads that a child has had, to a tick of the kernel's.
fn cpu_ns(child: &Child) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    // The name before may hold anything, spaces and parentheses too.
    let fields = text.rsplit(") ").next().unwrap_or_default().split(' ');
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    ticks * 1_000_000_000 / rustix::param::clock_ticks_per_second()
}

fn spawn(recording: &Recording<'_>, rings: &Rings, log: &Path) -> io::Result<Child> {
    let launch = recording.engine.command(&rings.path(), log, recording.argv, recording.follow);
    Command::new(launch.program).args(launch.arguments).envs(launch.environment).spawn()
}

/// Hands SIGINT and SIGTERM on to the program. A terminal sends its own to both of us.
#[derive(Default)]
struct Stopping {
    since: Option<Instant>,
    killed: bool,
}

impl Stopping {
    fn pass_on(&mut self, child: &Child) {
        if !asked_to_stop() || self.killed {
            return;
        }
        let pid = Pid::from_child(child);
        // It may have ended in between, which is as good.
        match self.since {
            None => {
                self.since = Some(Instant::now());
                if !rustix::termios::isatty(io::stderr()) {
                    let _ = kill_process(pid, Signal::INT);
                }
            }
            Some(since) if since.elapsed() > PATIENCE => {
                let _ = kill_process(pid, Signal::KILL);
                self.killed = true;
            }
            Some(_) => {}
        }
    }
}
