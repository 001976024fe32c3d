//! One run of an unmodified command under one page-size mechanism, watched from outside.
//!
//! Invariants: the command gets our arguments, environment and working directory, except for the changes
//! that its recipe names. System settings change for the run alone. No process of the command outlives the
//! trial.

mod compared;
mod prepared;
mod proof;
pub mod rounds;
mod sampler;
mod server_probe;
mod service;
pub(crate) mod tree;

pub use compared::{Starts, needs_probe, occupation, trial_of};
pub use prepared::Prepared;
pub use proof::{Allocator, Evidence, took};
pub use sampler::Peak;
pub use server_probe::ServerProbe;
pub use service::{Ready, Service};

use crate::launch::Launcher;
use crate::launch::program::{Program, ProgramError};
use crate::measure::backed_memory;
use crate::measure::budget::Watch;
use crate::measure::speed_probe::SpeedProbe;
use crate::measure::stacks::Begin;
use crate::pages::{Changed, Recipe};
use crate::procfs::Root;
use crate::sys::process::{Child, Usage, process_usage};
use crate::sys::remote::Forbid;
use crate::sys::signal::asked_to_stop;
use pagetax_core::diagnosis::MemoryState;
use pagetax_core::exit::Exit;
use pagetax_core::load::LoadFigures;
use prepared::Forker;
use rustix::process::{Pid, Signal};
use rustix::thread::CpuSet;
use service::Starter;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time that processes have to end after SIGTERM before they are killed.
const GRACE: Duration = Duration::from_secs(2);
/// The longest time before a request to stop is noticed. The end of the command is noticed at once.
const STOP_POLL: Duration = Duration::from_millis(100);

/// Held for the time of a trial: settings, orphans and PR_SET_THP_DISABLE belong to the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A command to try.
#[derive(Debug, Clone, Default)]
pub struct TrialCommand {
    /// The program and its arguments.
    pub argv: Vec<OsString>,
    /// The file that each run reads from its start; /dev/null if `None`.
    pub stdin: Option<PathBuf>,
    /// The GLIBC_TUNABLES that the command would get without us.
    pub tunables: Option<String>,
    /// The most memory that a run has needed so far. As much is backed before each run. Else the time in
    /// which the hypervisor backs it would count as the command's.
    pub memory_bytes: u64,
    /// The load, if the command is a server.
    pub service: Option<Service>,
    /// True if each run shares one CPU with a probe of the machine's speed.
    pub has_probe: bool,
    /// The state of memory, which [`Prepared`] makes.
    pub state: MemoryState,
    /// The folder of the cgroup that runs enter.
    pub cgroup: Option<PathBuf>,
    /// The time in a run at which its largest process is forked.
    pub fork_at: Option<Duration>,
    /// A child of this process that runs leave alone.
    pub spared: Option<Pid>,
}

impl TrialCommand {
    /// Notes how much memory a run has needed, and the length of its load.
    pub fn learn(&mut self, finished: &Finished) {
        let own = finished.usage.resident_bytes_max;
        let most = finished.peak.map_or(own, |peak| peak.resident_bytes);
        self.memory_bytes = self.memory_bytes.max(most);
        if let Some(service) = &mut self.service {
            service.load_time = finished.load.map(|(_, took)| took);
        }
    }

    /// Returns true if memory is touched before each run.
    fn needs_backing(&self) -> bool {
        matches!(self.state, MemoryState::Fresh | MemoryState::Pressed | MemoryState::Forked)
    }

    /// Returns true if so many runs at a time leave a quarter of the available memory free.
    pub fn fits(&self, runs: usize) -> bool {
        let needed = self.memory_bytes.saturating_mul(runs as u64);
        let available = backed_memory::available_bytes(&Root::default());
        available.is_ok_and(|bytes| needed <= bytes / 4 * 3)
    }
}

/// Set in the environment of our own program if a trial runs it.
const OURS: &str = "PAGETAX_TRIAL";

/// Returns true if this process is a trial of our own program: it does nothing that another run would not do.
pub fn is_ours() -> bool {
    std::env::var_os(OURS).is_some()
}

fn is_our_program(name: &OsStr) -> bool {
    let file = |path: PathBuf| std::fs::canonicalize(path).ok();
    let own = std::env::current_exe().ok().and_then(file);
    own.is_some() && Program::find(name).ok().and_then(|program| file(program.path)) == own
}

/// The files that a run writes to; /dev/null for those that are `None`.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    /// The file for standard output.
    pub stdout: Option<PathBuf>,
    /// The file for standard error.
    pub stderr: Option<PathBuf>,
}

/// The observations of one run.
#[derive(Debug, Clone)]
pub struct Finished {
    /// The exit of the command's own process.
    pub exit: Exit,
    /// The time from before the fork to that exit.
    pub wall_ns: u64,
    /// The elapsed time of a program that does nothing, run the same way just before; `None` if not measured.
    pub start_ns: Option<u64>,
    /// The mean time of the probe's piece of work during the run; `None` without a probe.
    pub probe_ns: Option<u64>,
    /// The time that all of it took: what came before the run, the run, and its evaluation.
    pub step_ns: u64,
    /// The figures of the load, and its length; none without a load.
    pub load: Option<(LoadFigures, Duration)>,
    /// The resource usage of all its processes.
    pub usage: Usage,
    /// The memory at its peak; `None` if the run ended before the first look.
    pub peak: Option<Peak>,
    /// The evidence that it got its page sizes.
    pub evidence: Evidence,
    /// The time in which its memory was touched before it, so that the hypervisor backs it.
    pub backing_ns: u64,
    /// The CPU time that watching took.
    pub watch_ns: u64,
    /// The number of processes that it left running. They were ended.
    pub left_running: usize,
    /// The number of processes that were on one list alone. The peak may lack others that were on none.
    pub brief_count: usize,
}

/// The reason why a run has no result.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The program cannot be started.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The trial itself failed, not the command.
    #[error("cannot {0}: {1}")]
    System(&'static str, io::Error),
    /// The server or its load failed.
    #[error("{0}")]
    Service(String),
    /// The state of memory could not be kept.
    #[error("{0}")]
    State(String),
    /// SIGINT or SIGTERM arrived, and the command was ended.
    #[error("interrupted")]
    Interrupted,
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> TrialError {
    move |error| TrialError::System(what, error)
}

/// A run to start: the page sizes, and the files for what it prints.
pub type Planned<'a> = (&'a Recipe, &'a Outputs);

/// Runs the command once and watches it. Orphans of the command become children of this process. They are
/// ended with the command, as are all other children of this process. A `watch` collects for a budget from
/// the exec on.
pub fn run(
    trial: &TrialCommand,
    recipe: &Recipe,
    outputs: &Outputs,
    watch: Option<&mut Watch>,
) -> Result<Finished, TrialError> {
    let cpu = (trial.has_probe && watch.is_none()).then(rustix::thread::sched_getcpu);
    Ok(run_all(trial, &[(recipe, outputs)], cpu, watch)?.remove(0))
}

/// Does the same as [`run`] for several runs at a time, on one CPU. They share it in slices of
/// milliseconds, so that whatever slows that CPU slows all of them alike: their CPU times compare well, and
/// their elapsed times do not. No recipe may change settings of the system.
pub fn run_side_by_side(
    trial: &TrialCommand,
    planned: &[Planned<'_>],
) -> Result<Vec<Finished>, TrialError> {
    let cpu = rustix::thread::sched_getcpu();
    run_all(trial, planned, Some(cpu), None)
}

fn run_all(
    trial: &TrialCommand,
    planned: &[Planned<'_>],
    cpu: Option<usize>,
    watch: Option<&mut Watch>,
) -> Result<Vec<Finished>, TrialError> {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let settings = planned.iter().map(|(recipe, _)| Changed::apply(&recipe.settings));
    let _put_back: Vec<Changed> =
        settings.collect::<io::Result<_>>().map_err(system("change a page-size setting"))?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|e| TrialError::System("adopt orphans of the command", e.into()))?;
    // Runs differ by some bytes, and other programs take some of the memory.
    let bringing = Instant::now();
    if trial.needs_backing() {
        backed_memory::bring((trial.memory_bytes + trial.memory_bytes / 4) * planned.len() as u64);
    }
    let backing_ns = bringing.elapsed().as_nanos() as u64 / planned.len() as u64;
    let starter = trial.service.as_ref().map(|_| Starter::new());
    trial.service.as_ref().map_or(Ok(()), Service::check_free)?;
    if let Some(watch) = watch {
        // The launcher's rule for counters: the child inherits them, and exec enables them.
        watch.attach(rustix::thread::gettid().as_raw_nonzero().get() as u32, Begin::AtExec);
    }
    let mut running = Vec::new();
    let mut ended = Ok(());
    let probe = cpu.filter(|_| trial.has_probe).map(SpeedProbe::start);
    let probe = probe.transpose().map_err(system("start a thread"))?;
    for (recipe, outputs) in planned {
        match Running::start(trial, recipe, outputs, cpu) {
            Ok(started) => running.push(started),
            Err(error) => ended = ended.and(Err(error)),
        }
    }
    for (run, (_, outputs)) in running.iter_mut().zip(planned) {
        ended = ended.and_then(|()| match (&trial.service, &starter) {
            (Some(service), Some(starter)) => run.serve(service, starter, outputs),
            _ => run.wait(),
        });
    }
    let probe_ns = probe.and_then(SpeedProbe::finish);
    for run in &mut running {
        let forked = run.forker.take().map_or(Ok(()), Forker::finish);
        ended = ended.and(forked.map_err(TrialError::State));
    }
    if let Err(error) = ended {
        running.iter().for_each(|run| end_all(run.child.pid()));
        end_orphans(trial.spared);
        return Err(error);
    }
    let mut finished =
        running.into_iter().map(|run| run.finish(trial)).collect::<Result<Vec<_>, _>>()?;
    let left_running = end_orphans(trial.spared);
    for run in &mut finished {
        (run.left_running, run.backing_ns) = (left_running, backing_ns);
        run.probe_ns = probe_ns;
    }
    Ok(finished)
}

/// A run of the command.
struct Running<'a> {
    recipe: &'a Recipe,
    before: proof::System,
    /// The kernel's maximum for a child begins at our own maximum.
    own_resident_bytes: u64,
    started: Instant,
    wall_ns: u64,
    load: Option<(LoadFigures, Duration)>,
    child: Child,
    sampler: sampler::MemorySampler,
    forker: Option<Forker>,
}

impl<'a> Running<'a> {
    fn start(
        trial: &TrialCommand,
        recipe: &'a Recipe,
        outputs: &Outputs,
        cpu: Option<usize>,
    ) -> Result<Running<'a>, TrialError> {
        let before = proof::System::read();
        let own_resident_bytes = process_usage().resident_bytes_max;
        let started = Instant::now();
        let pinned = cpu.map(Pinned::to).transpose().map_err(system("choose a CPU"))?;
        let child = spawn(trial, recipe, outputs)?;
        drop(pinned);
        let sampler = sampler::MemorySampler::start(child.pid(), recipe.folio_size);
        let forker = trial.fork_at.map(|at| Forker::start(child.pid(), at));
        Ok(Running {
            recipe,
            before,
            own_resident_bytes,
            started,
            wall_ns: 0,
            load: None,
            child,
            sampler,
            forker,
        })
    }

    /// Waits until the process has ended, without reaping it, or until we are asked to stop.
    fn wait(&mut self) -> Result<(), TrialError> {
        let ended = wait(&mut self.child);
        self.wall_ns = self.started.elapsed().as_nanos() as u64;
        ended
    }

    /// Loads the server, and ends it.
    fn serve(
        &mut self,
        service: &Service,
        starter: &Starter,
        outputs: &Outputs,
    ) -> Result<(), TrialError> {
        self.load = Some(service.run(starter, self, outputs)?);
        self.wall_ns = self.started.elapsed().as_nanos() as u64;
        Ok(())
    }

    fn finish(self, trial: &TrialCommand) -> Result<Finished, TrialError> {
        let Running {
            recipe, before, own_resident_bytes, wall_ns, load, mut child, sampler, ..
        } = self;
        let seen = sampler.stop();
        let (mut exit, usage) = child.wait().map_err(system("wait for the command"))?;
        if load.is_some() {
            // We ended it.
            exit = Exit::Code(0);
        }
        let mut peak = seen.peak;
        if let Some(peak) = &mut peak {
            peak.add_kernels_own(usage.resident_bytes_max, own_resident_bytes);
        }
        Ok(Finished {
            exit,
            wall_ns,
            step_ns: wall_ns,
            start_ns: None,
            probe_ns: None,
            load,
            usage,
            peak,
            evidence: before.since(seen.allocator, proof::no_preload(recipe, &trial.argv)),
            backing_ns: 0,
            watch_ns: seen.watch_ns,
            left_running: 0,
            brief_count: seen.brief_count,
        })
    }
}

/// This thread on one CPU alone, as children that it starts. Dropping it gives the thread its CPUs back.
struct Pinned(CpuSet);

impl Pinned {
    fn to(cpu: usize) -> io::Result<Pinned> {
        let before = rustix::thread::sched_getaffinity(None)?;
        let mut one = CpuSet::new();
        one.set(cpu);
        rustix::thread::sched_setaffinity(None, &one)?;
        Ok(Pinned(before))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // It was allowed before.
        let _ = rustix::thread::sched_setaffinity(None, &self.0);
    }
}

fn spawn(trial: &TrialCommand, recipe: &Recipe, outputs: &Outputs) -> Result<Child, TrialError> {
    let entering = trial.cgroup.as_deref().map(prepared::entering).unwrap_or_default();
    let wrapper = recipe.wrapper.iter().map(OsString::from);
    let mut words = entering.into_iter().chain(wrapper).chain(trial.argv.iter().cloned());
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
    command.envs(recipe.variables(trial.tunables.as_deref()));
    if trial.argv.first().is_some_and(|name| is_our_program(name)) {
        command.env(OURS, "1");
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

/// Ends the command and all its descendants.
fn end_all(root: Pid) {
    let mut processes = tree::ProcessTree::default().descendants(root);
    processes.push(root);
    end(&processes);
}

/// Ends the orphans of the command, which are our children now but for `spared`, and returns their number. A
/// daemon that went on would disturb all later runs.
fn end_orphans(spared: Option<Pid>) -> usize {
    let mut orphans = tree::ProcessTree::default().descendants(rustix::process::getpid());
    orphans.retain(|pid| Some(*pid) != spared);
    end(&orphans);
    orphans.len()
}

fn end(processes: &[Pid]) {
    let alive = |pid: &&Pid| rustix::process::test_kill_process(**pid).is_ok();
    for (signal, patience) in [(Signal::TERM, GRACE), (Signal::KILL, Duration::from_millis(200))] {
        for pid in processes {
            // The process may have ended by itself.
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

/// Reaps the zombies among our own children. Only its own parent can reap another process.
fn reap(processes: &[Pid]) {
    for pid in processes {
        let _ = rustix::process::waitpid(Some(*pid), rustix::process::WaitOptions::NOHANG);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_program_learns_that_it_is_a_trial() {
        let own = std::env::current_exe().unwrap();
        assert!(is_our_program(own.as_os_str()));
        assert!(
            !is_our_program(OsStr::new("sh")) && !is_our_program(OsStr::new("no-such-program"))
        );
        let argv = ["sh", "-c", "test -z \"$PAGETAX_TRIAL\""].map(OsString::from).to_vec();
        let command = TrialCommand { argv, ..TrialCommand::default() };
        let finished = run(&command, &Recipe::default(), &Outputs::default(), None).unwrap();
        assert_eq!(finished.exit, Exit::Code(0));
    }
}
