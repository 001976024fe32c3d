//! The agent: the thread that uses files on behalf of the program's threads.
//!
//! The pager's threads have a descriptor table of their own. So the program can neither close their
//! descriptors nor reuse the numbers, it can use all numbers itself, and its children inherit none
//! of the pager's files. Everything that needs a descriptor therefore runs here.

use crate::stderr;
use crate::threads::is_pager_thread;
use pagetax_remote::threads::{BlockedSignals, spawn};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, mpsc};

type Task = Box<dyn FnOnce() + Send>;

/// The queue of the agent's work.
pub type Tasks = VecDeque<Task>;

static TASKS: Mutex<Tasks> = Mutex::new(VecDeque::new());
static ARRIVED: Condvar = Condvar::new();
static IS_THERE: AtomicBool = AtomicBool::new(false);

/// Locks the queue, so that no thread asks the agent during a fork.
pub fn hold() -> MutexGuard<'static, Tasks> {
    TASKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread, with descriptors of its own: when the program starts, and in each forked
/// child.
///
/// # Errors
/// A line for the user.
pub fn start(keep_stderr: bool) -> Result<(), String> {
    // The child must not run tasks of its parent.
    hold().clear();
    IS_THERE.store(false, Release);
    let (sender, unshared) = mpsc::channel();
    let work = move || {
        let _ = sender.send(stderr::unshare_descriptors(keep_stderr));
        drop(sender);
        serve();
    };
    spawn("pagetax-agent", work).map_err(|error| format!("cannot start a thread: {error}"))?;
    match unshared.recv() {
        Ok(Ok(())) => IS_THERE.store(true, Release),
        Ok(Err(errno)) => {
            return Err(format!(
                "close_range: {errno}; paging needs a table of descriptors of its own: check the sandbox"
            ));
        }
        Err(_) => return Err("the agent thread ended".into()),
    }
    Ok(())
}

fn serve() {
    loop {
        let mut tasks = hold();
        let task = loop {
            match tasks.pop_front() {
                Some(task) => break task,
                None => tasks = ARRIVED.wait(tasks).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(tasks);
        // The closed channel reports a panic to the thread that asked.
        let _ = catch_unwind(AssertUnwindSafe(task));
    }
}

/// Runs `work` on the agent and waits for it. Returns `None` if there is no agent, or if it failed.
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    if is_pager_thread() {
        return Some(work());
    }
    if !IS_THERE.load(Acquire) {
        return None;
    }
    // A signal handler of the program might ask the agent, too, and wait for this thread.
    let _blocked = BlockedSignals::block();
    let (sender, done) = mpsc::channel();
    hold().push_back(Box::new(move || {
        let _ = sender.send(work());
    }));
    ARRIVED.notify_one();
    done.recv().ok()
}

/// Writes a line to stderr, through the agent if there is one.
pub fn log(line: &str) {
    let owned = line.to_string();
    if run(move || stderr::write_line(&owned)).is_none() {
        stderr::write_line(line);
    }
}
