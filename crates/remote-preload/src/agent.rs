//! The thread that uses files on behalf of the program's threads.
//!
//! The pager's threads share a table of descriptors of their own. So the program can neither close them nor put
//! another file under their numbers, all numbers are the program's, and its children inherit none of them. Whatever
//! takes a descriptor is therefore done here.

use crate::stderr;
use crate::threads::is_pager_thread;
use pagetax_remote::threads::{BlockedSignals, spawn};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, mpsc};

type Task = Box<dyn FnOnce() + Send>;

/// What the agent is to do.
pub type Tasks = VecDeque<Task>;

static TASKS: Mutex<Tasks> = Mutex::new(VecDeque::new());
static ARRIVED: Condvar = Condvar::new();
static IS_THERE: AtomicBool = AtomicBool::new(false);

/// Keeps all others from asking the agent, for a fork.
pub fn hold() -> MutexGuard<'static, Tasks> {
    TASKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread, with descriptors of its own: at the start of the program, and of a child.
///
/// # Errors
/// With a line for people.
pub fn start(keep_stderr: bool) -> Result<(), String> {
    // A parent's tasks are not the child's.
    hold().clear();
    IS_THERE.store(false, Release);
    let (sender, parted) = mpsc::channel();
    let work = move || {
        let _ = sender.send(stderr::part_descriptors(keep_stderr));
        drop(sender);
        serve();
    };
    spawn("pagetax-agent", work).map_err(|error| format!("cannot start a thread: {error}"))?;
    match parted.recv() {
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
        // Whoever asked learns it by a channel that closes.
        let _ = catch_unwind(AssertUnwindSafe(task));
    }
}

/// Has the agent do something, and waits for it. None if there is no agent, or it failed.
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    if is_pager_thread() {
        return Some(work());
    }
    if !IS_THERE.load(Acquire) {
        return None;
    }
    // A handler of the program's might ask the agent, too.
    let _blocked = BlockedSignals::block();
    let (sender, done) = mpsc::channel();
    hold().push_back(Box::new(move || {
        let _ = sender.send(work());
    }));
    ARRIVED.notify_one();
    done.recv().ok()
}

/// Says a line on stderr.
pub fn say(line: &str) {
    let owned = line.to_string();
    if run(move || stderr::write_line(&owned)).is_none() {
        stderr::write_line(line);
    }
}
