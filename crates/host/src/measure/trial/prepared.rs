//! States of memory that are made for trials, and put back when they are dropped.

use super::tree::ProcessTree;
use super::{TrialCommand, TrialError, system};
use crate::measure::fragmentation::{Fragments, Pattern};
use crate::pages::inject::Injector;
use crate::pages::target::{Refusal, Target};
use crate::procfs::{Fragmentation, Root, process_memory};
use pagetax_core::diagnosis::MemoryState;
use pagetax_core::units::Bytes;
use procfs_core::Meminfo;
use rustix::process::Pid;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The limit of a command under pressure, as a share of the most memory that it needed.
const PRESSED_SHARE: f64 = 0.9;
/// Less memory than this cannot be limited: the kernel itself needs some for each process.
const PRESSED_MIN: u64 = 8 << 20;
/// How long a forked child holds its memory, if the command does not end before.
const HOLD: Duration = Duration::from_secs(5);
/// How often a fork is tried.
const FORK_TRIES: usize = 5;
/// How often a cgroup is removed again while processes of it end.
const REMOVALS: usize = 50;

/// A state of memory.
#[derive(Debug)]
pub struct Prepared {
    state: MemoryState,
    fragments: Option<Fragments>,
    cgroup: Option<Cgroup>,
    /// The free blocks of 2^index base pages when it was made; empty if they cannot be read.
    pub free_blocks: Vec<u64>,
}

impl Prepared {
    /// Makes a state for a command that needs so much memory as it is.
    ///
    /// # Errors
    /// A sentence with what would make it possible.
    pub fn make(state: MemoryState, needed_bytes: u64) -> Result<Prepared, String> {
        let fragments = match state {
            MemoryState::Fragmented => Some(Fragments::make(Pattern::Held)?),
            MemoryState::Compactable => Some(Fragments::make(Pattern::Movable)?),
            _ => None,
        };
        let pressed = state == MemoryState::Pressed;
        let cgroup = pressed.then(|| limit(needed_bytes)).transpose()?;
        let free = Fragmentation::usable(&Root::default());
        let free_blocks = free.map(|free| free.free_blocks).unwrap_or_default();
        Ok(Prepared { state, fragments, cgroup, free_blocks })
    }

    /// Says how it was made, in one sentence.
    pub fn how(&self) -> String {
        match (self.state, &self.cgroup) {
            (MemoryState::Fresh, _) => "free memory is touched before each run".into(),
            (MemoryState::Found, _) => "nothing is done before a run".into(),
            (MemoryState::Fragmented, _) => {
                "no block of 2M is free: one page in each is held and cannot be moved".into()
            }
            (MemoryState::Compactable, _) => {
                "no block of 2M is free: every eighth page is in use and can be moved".into()
            }
            (MemoryState::Pressed, Some(cgroup)) => {
                format!("a memory cgroup limits each run to {}", Bytes(cgroup.limit_bytes))
            }
            (MemoryState::Pressed, None) => String::new(),
            (MemoryState::Forked, _) => format!(
                "the largest process is forked at half of the time; the child holds its memory for {} s",
                HOLD.as_secs()
            ),
        }
    }

    /// Prepares for a run of a command that takes `usual` of time.
    ///
    /// # Errors
    /// Fails if the state cannot be kept.
    pub fn before_run(
        &mut self,
        trial: &mut TrialCommand,
        usual: Duration,
    ) -> Result<(), TrialError> {
        if let Some(fragments) = &mut self.fragments {
            fragments.left().map_err(system("keep memory fragmented"))?;
            trial.spared = Some(fragments.pid());
        }
        trial.state = self.state;
        trial.cgroup = self.cgroup.as_ref().map(|cgroup| cgroup.folder.clone());
        trial.fork_at = (self.state == MemoryState::Forked).then_some(usual / 2);
        Ok(())
    }
}

/// Makes a memory cgroup with less memory than a command needs.
fn limit(needed_bytes: u64) -> Result<Cgroup, String> {
    let limit_bytes = (needed_bytes as f64 * PRESSED_SHARE) as u64;
    if limit_bytes < PRESSED_MIN {
        return Err(format!(
            "the command needs {}, too little to limit; give it more to do",
            Bytes(needed_bytes)
        ));
    }
    let meminfo: Meminfo = Root::default().parse("/proc/meminfo")?;
    if meminfo.swap_free < needed_bytes {
        return Err(format!(
            "no room to swap to: {} of swap is free, and the command needs {}; add swap, as with fallocate, \
             mkswap and swapon",
            Bytes(meminfo.swap_free),
            Bytes(needed_bytes)
        ));
    }
    Cgroup::make(limit_bytes)
}

/// A memory cgroup of this process. Dropping it removes it.
#[derive(Debug)]
struct Cgroup {
    folder: PathBuf,
    limit_bytes: u64,
}

impl Cgroup {
    /// Makes one of version 1 or 2, with a limit.
    fn make(limit_bytes: u64) -> Result<Cgroup, String> {
        let limits =
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        let mut why = "no controller of memory cgroups is mounted".to_string();
        for (mount, file) in limits {
            remove_left(Path::new(mount));
            let folder = Path::new(mount).join(format!("{CGROUP}{}", std::process::id()));
            if !Path::new(mount).join("cgroup.procs").exists() {
                continue;
            }
            let cgroup = match std::fs::create_dir(&folder) {
                Ok(()) => Cgroup { folder, limit_bytes },
                Err(error) => {
                    why = format!("{}: {error}", folder.display());
                    continue;
                }
            };
            match std::fs::write(cgroup.folder.join(file), limit_bytes.to_string()) {
                Ok(()) => return Ok(cgroup),
                Err(error) => why = format!("{}/{file}: {error}", cgroup.folder.display()),
            }
        }
        Err(format!("{why}; be root, on a machine with the memory controller of cgroups"))
    }
}

/// The names of our cgroups begin with this; the rest is the process that made it.
const CGROUP: &str = "pagetax-pressed-";

/// Removes the empty cgroups of processes that were killed.
fn remove_left(mount: &Path) {
    for entry in std::fs::read_dir(mount).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(CGROUP)?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // One with processes stays.
            let _ = std::fs::remove_dir(entry.path());
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for _ in 0..REMOVALS {
            match std::fs::remove_dir(&self.folder) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                _ => return,
            }
        }
    }
}

/// Words that put the command after them into a cgroup: a shell that enters it becomes the command.
pub(super) fn entering(cgroup: &Path) -> Vec<std::ffi::OsString> {
    let enter = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
    ["sh".into(), "-c".into(), enter.into(), cgroup.into()].into()
}

/// Forks the largest process of a command at a given time, and holds the child.
#[derive(Debug)]
pub(super) struct Forker {
    over: Option<Sender<()>>,
    thread: Option<JoinHandle<Result<(), String>>>,
}

impl Forker {
    pub fn start(root: Pid, at: Duration) -> Forker {
        let (over, is_over) = channel();
        let thread = std::thread::spawn(move || match is_over.recv_timeout(at) {
            Err(RecvTimeoutError::Timeout) => fork_largest(root, &is_over),
            _ => Ok(()),
        });
        Forker { over: Some(over), thread: Some(thread) }
    }

    /// Ends the child, and returns why there was none. A run that ended before its fork is no failure.
    pub fn finish(mut self) -> Result<(), String> {
        self.end()
    }

    fn end(&mut self) -> Result<(), String> {
        drop(self.over.take());
        let ended = self.thread.take().map(JoinHandle::join);
        ended
            .unwrap_or(Ok(Ok(())))
            .unwrap_or_else(|_| Err("the thread that forks has ended".into()))
    }
}

impl Drop for Forker {
    fn drop(&mut self) {
        // What it could not do matters no more.
        let _ = self.end();
    }
}

fn fork_largest(root: Pid, is_over: &Receiver<()>) -> Result<(), String> {
    let mut processes = ProcessTree::default().descendants(root);
    processes.push(root);
    let resident = |pid: &Pid| {
        let memory = process_memory(&Root::default(), pid.as_raw_nonzero().get() as u32);
        memory.resident_bytes.value().unwrap_or(0)
    };
    let largest = processes.into_iter().max_by_key(resident).unwrap_or(root);
    let pid = largest.as_raw_nonzero().get() as u32;
    let target = match Target::open(pid, false) {
        Err(Refusal::Gone | Refusal::Zombie) => return Ok(()),
        target => target.map_err(|refusal| format!("process {pid} cannot be forked: {refusal}"))?,
    };
    // One that waits for a disk does not stop at once.
    for tries_left in (0..FORK_TRIES).rev() {
        let hold = || {
            // The command ends before the time, or not.
            let _ = is_over.recv_timeout(HOLD);
        };
        let injector = Injector::open(target.pid()).map_err(io::Error::other);
        match injector.and_then(|injector| injector.fork(hold)) {
            Err(error) if target.is_alive() && tries_left == 0 => {
                return Err(format!("process {pid} cannot be forked: {error}"));
            }
            Err(_) if target.is_alive() => {}
            _ => break,
        }
    }
    Ok(())
}
