//! The program's threads, counted: a process ends by exit(0) when its last thread does, as pthread_exit(3) says of
//! main. The C library counts the pager's threads, too, and would wait for them for ever.

use crate::agent;
use crate::threads::{Internal, pager_threads};
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::sleep;
use std::time::Duration;

/// Begins with main.
static LIVING: AtomicUsize = AtomicUsize::new(1);

/// Rounds in which the C library calls destructors of keys (PTHREAD_DESTRUCTOR_ITERATIONS).
const ROUNDS: usize = 4;

/// How long a thread that has ended may still be in the kernel's list.
const LINGERING: Duration = Duration::from_secs(1);

/// Its destructor runs at the end of each thread that has a value for it.
fn key() -> Option<libc::pthread_key_t> {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: a function of this library, which is never unloaded.
        let result = unsafe { libc::pthread_key_create(&mut key, Some(end_of_thread)) };
        (result == 0).then_some(key)
    })
}

/// Has the calling thread's end be noticed. It is counted already.
pub fn notice_end() {
    set_rounds_over(1);
}

/// A thread that is about to start is counted before it can end.
pub fn count_new() {
    LIVING.fetch_add(1, SeqCst);
}

/// A thread did not start.
pub fn discount_new() {
    LIVING.fetch_sub(1, SeqCst);
}

/// In the child of a fork there is one thread.
pub fn restart_in_child() {
    LIVING.store(1, SeqCst);
    notice_end();
}

fn set_rounds_over(rounds: usize) {
    let Some(key) = key() else { return };
    // SAFETY: the key is ours; the value is a number that nobody follows.
    unsafe { libc::pthread_setspecific(key, rounds as *const c_void) };
}

/// The program's own destructors come first: this waits for the last round, in which it is the first as the oldest.
unsafe extern "C" fn end_of_thread(rounds: *mut c_void) {
    match rounds as usize {
        rounds if rounds < ROUNDS => set_rounds_over(rounds + 1),
        _ if is_last() => {
            // SAFETY: as the C library does when its last thread ends.
            unsafe { libc::exit(0) }
        }
        _ => {}
    }
}

/// Whether only the pager's threads are left beside the calling one, which ends.
fn is_last() -> bool {
    LIVING.fetch_sub(1, SeqCst) == 1 && pager_threads() > 0 && is_alone()
}

/// Threads that were made past pthread_create(3), as the C library makes some, keep the process.
fn is_alone() -> bool {
    let _internal = Internal::enter();
    // Main stays in the list after its end.
    let ended_main = (rustix::thread::gettid() != rustix::process::getpid()) as usize;
    let alone = move || {
        let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count);
        // Where there is no /proc, what was counted holds.
        threads.map_or(true, |threads| threads <= pager_threads() + 1 + ended_main)
    };
    agent::run(move || {
        let step = Duration::from_millis(1);
        let steps = LINGERING.as_millis() / step.as_millis();
        alone()
            || (0..steps).any(|_| {
                sleep(step);
                alone()
            })
    })
    .unwrap_or(false)
}
