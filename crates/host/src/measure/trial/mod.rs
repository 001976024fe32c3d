//! One run of an unmodified command under one page-size mechanism, watched from outside.
//!
//! Invariants: the command gets its arguments, environment and working directory as they are, but
//! for what its recipe names; system settings are changed for the run alone; no
//! process of the command outlives the trial.

mod proof;
pub mod rounds;
mod sampler;
pub(crate) mod tree;

pub use proof::{Allocator, Evidence, took};
pub use sampler::Peak;

use crate::launch::Launcher;
use crate::launch::program::ProgramError;
use crate::measure::backed_memory;
use crate::measure::budget::Watch;
use crate::measure::stacks::Begin;
use crate::pages::{Changed, Recipe};
use crate::sys::process::{Child, Usage, process_usage};
use crate::sys::remote::Forbid;
use crate::sys::signal::asked_to_stop;
use pagetax_core::exit::Exit;
use rustix::process::{Pid, Signal};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long processes have to end after a friendly signal before they are killed.
const GRACE: Duration = Duration::from_secs(2);
/// How often a wish to stop is looked for while a command runs; its end is noticed at once.
const STOP_POLL: Duration = Duration::from_millis(100);

/// Settings, orphans and PR_SET_THP_DISABLE are the whole process's, so trials take turns.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A command to try.
#[derive(Debug, Clone)]
pub struct TrialCommand {
    /// The program and its arguments.
    pub argv: Vec<OsString>,
    /// Read by each run from its start; none is /dev/null.
    pub stdin: Option<PathBuf>,
    /// GLIBC_TUNABLES as the command would get it without us.
    pub tunables: Option<String>,
    /// What it is known to need of memory: free memory has to be at hand before each run, or else what the
    /// hypervisor takes to bring it back counts as the command's.
    pub memory_bytes: u64,
}

impl TrialCommand {
    /// Learns how much memory a run has needed.
    pub fn learn(&mut self, finished: &Finished) {
        let own = finished.usage.resident_bytes_max;
        let most = finished.peak.map_or(own, |peak| peak.resident_bytes);
        self.memory_bytes = self.memory_bytes.max(most);
    }
}

/// Where a run writes to; none is /dev/null.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    /// Standard output.
    pub stdout: Option<PathBuf>,
    /// Standard error.
    pub stderr: Option<PathBuf>,
}

/// What was seen of one run.
#[derive(Debug, Clone)]
pub struct Finished {
    /// How it ended.
    pub exit: Exit,
    /// From before the fork to the end of the command's own process.
    pub wall_ns: u64,
    /// Of all its processes.
    pub usage: Usage,
    /// Memory at its peak; none if the run was over before it could be looked at.
    pub peak: Option<Peak>,
    /// What the proof of its page sizes rests on.
    pub evidence: Evidence,
    /// CPU time that watching took.
    pub watch_ns: u64,
    /// Processes that it left running, ended by us.
    pub left_running: usize,
    /// Processes that came and went within two looks: the peak may lack others of their kind.
    pub brief_count: usize,
}

/// Why a run has no result.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The program cannot be started.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// Ours to answer for.
    #[error("cannot {0}: {1}")]
    System(&'static str, io::Error),
    /// SIGINT or SIGTERM; the command was ended.
    #[error("interrupted")]
    Interrupted,
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> TrialError {
    move |error| TrialError::System(what, error)
}

/// Runs the command once and watches it. Orphans of the command become children of this process,
/// and are ended with it, as is any other child of this process. A `watch` collects for a budget,
/// from the exec on.
pub fn run(
    trial: &TrialCommand,
    recipe: &Recipe,
    outputs: &Outputs,
    watch: Option<&mut Watch>,
) -> Result<Finished, TrialError> {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let _put_back =
        Changed::apply(&recipe.settings).map_err(system("change a page-size setting"))?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|e| TrialError::System("adopt orphans of the command", e.into()))?;
    // Runs are not alike to the byte, and others take some of it.
    backed_memory::bring(trial.memory_bytes + trial.memory_bytes / 4);
    let before = proof::System::read();
    // A child of ours begins with what we had at most, not with what we have.
    let own_resident_bytes = process_usage().resident_bytes_max;
    if let Some(watch) = watch {
        // On ourselves: the child inherits it, and for the child it begins when it calls exec.
        watch.attach(rustix::thread::gettid().as_raw_nonzero().get() as u32, Begin::AtExec);
    }
    let start = Instant::now();
    let mut child = spawn(trial, recipe, outputs)?;
    let sampler = sampler::Sampler::start(child.pid(), recipe.folio_size);
    let ended = wait(&mut child);
    let wall_ns = start.elapsed().as_nanos() as u64;
    let seen = sampler.stop();
    if let Err(error) = ended {
        end_all(child.pid());
        return Err(error);
    }
    let (exit, usage) = child.wait().map_err(system("wait for the command"))?;
    let left_running = end_orphans();
    let mut peak = seen.peak;
    if let Some(peak) = &mut peak {
        peak.add_kernels_own(usage.resident_bytes_max, own_resident_bytes);
    }
    Ok(Finished {
        exit,
        wall_ns,
        usage,
        peak,
        evidence: before.since(seen.allocator),
        watch_ns: seen.watch_ns,
        left_running,
        brief_count: seen.brief_count,
    })
}

fn spawn(trial: &TrialCommand, recipe: &Recipe, outputs: &Outputs) -> Result<Child, TrialError> {
    let wrapper = recipe.wrapper.iter().map(OsString::from);
    let mut words = wrapper.chain(trial.argv.iter().cloned());
    let mut launcher = Launcher::new(words.next().unwrap_or_default());
    let command = &mut launcher.command;
    command.args(words).args(&recipe.arguments);
    command.stdin(match &trial.stdin {
        Some(path) => File::open(path).map_err(system("open the saved standard input"))?.into(),
        None => Stdio::null(),
    });
    let output = |path: &Option<PathBuf>| match path {
        Some(path) => File::create(path).map(Stdio::from),
        None => Ok(Stdio::null()),
    };
    command.stdout(output(&outputs.stdout).map_err(system("create a file for the output"))?);
    command.stderr(output(&outputs.stderr).map_err(system("create a file for the output"))?);
    if let Some(tunables) = recipe.glibc_tunables(trial.tunables.as_deref()) {
        command.env("GLIBC_TUNABLES", tunables);
    }
    launcher.forbid = recipe.disable_thp.then_some(Forbid::All);
    Ok(launcher.spawn()?)
}

/// Waits until the process has ended, without reaping it, or until we are asked to stop.
fn wait(child: &mut Child) -> Result<(), TrialError> {
    while !child.ends_within(STOP_POLL).map_err(system("watch for the command's end"))? {
        if asked_to_stop() {
            return Err(TrialError::Interrupted);
        }
    }
    Ok(())
}

/// Ends the command and all that it started.
fn end_all(root: Pid) {
    let mut processes = tree::Family::default().descendants(root);
    processes.push(root);
    end(&processes);
}

/// Ends what the command left running, which are our children now; how many there were. Daemons
/// would take part in all later runs.
fn end_orphans() -> usize {
    let orphans = tree::Family::default().descendants(rustix::process::getpid());
    end(&orphans);
    orphans.len()
}

fn end(processes: &[Pid]) {
    let alive = |pid: &&Pid| rustix::process::test_kill_process(**pid).is_ok();
    for (signal, patience) in [(Signal::TERM, GRACE), (Signal::KILL, Duration::from_millis(200))] {
        for pid in processes {
            // It may have ended by itself in between, which is as good.
            let _ = rustix::process::kill_process(*pid, signal);
        }
        let deadline = Instant::now() + patience;
        loop {
            reap(processes);
            if processes.iter().find(alive).is_none() {
                return;
            }
            if Instant::now() > deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Takes zombies among our own children away; the others are their parents' to take.
fn reap(processes: &[Pid]) {
    for pid in processes {
        let _ = rustix::process::waitpid(Some(*pid), rustix::process::WaitOptions::NOHANG);
    }
}
