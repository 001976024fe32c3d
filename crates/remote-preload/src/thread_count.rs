//! The count of the program's threads. A process ends by exit(0) with its last thread, as
//! pthread_exit(3) says of main. The C library counts the pager's threads too, and would wait for
//! them for ever.

use crate::agent;
use crate::threads::{Internal, pager_threads};
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::sleep;
use std::time::Duration;

/// The number of live threads of the program, from main on.
static LIVING: AtomicUsize = AtomicUsize::new(1);

/// The rounds in which the C library calls destructors of keys (PTHREAD_DESTRUCTOR_ITERATIONS).
const ROUNDS: usize = 4;

/// The time for which a thread that has ended may still be in /proc/self/task.
const LINGERING: Duration = Duration::from_secs(1);

/// Returns a key whose destructor runs at the end of each thread that has a value for it.
fn key() -> Option<libc::pthread_key_t> {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: a function of this library, which is never unloaded.
        let result = unsafe { libc::pthread_key_create(&mut key, Some(end_of_thread)) };
        (result == 0).then_some(key)
    })
}

/// Watches for the end of the calling thread, which is counted already.
pub fn watch_this_thread() {
    set_destructor_rounds(1);
}

/// Counts a thread before it starts, and so before it can end.
pub fn count_started() {
    LIVING.fetch_add(1, SeqCst);
}

/// Undoes [`count_started`] for a thread that did not start.
pub fn count_failed_start() {
    LIVING.fetch_sub(1, SeqCst);
}

/// Resets the count in the child of a fork, which has one thread.
pub fn restart_in_child() {
    LIVING.store(1, SeqCst);
    watch_this_thread();
}

fn set_destructor_rounds(rounds: usize) {
    let Some(key) = key() else { return };
    // SAFETY: the key is ours; the value is a number, and no code dereferences it.
    unsafe { libc::pthread_setspecific(key, rounds as *const c_void) };
}

/// Runs at a thread's end. The program's own destructors must come first, so this waits for the
/// last round. There it runs first, because its key is the oldest.
unsafe extern "C" fn end_of_thread(rounds: *mut c_void) {
    match rounds as usize {
        rounds if rounds < ROUNDS => set_destructor_rounds(rounds + 1),
        _ if is_last() => {
            // SAFETY: as the C library does when its last thread ends.
            unsafe { libc::exit(0) }
        }
        _ => {}
    }
}

/// Returns true if only the pager's threads are left beside the calling one, which ends.
fn is_last() -> bool {
    LIVING.fetch_sub(1, SeqCst) == 1 && pager_threads() > 0 && is_alone()
}

/// Returns true if the kernel knows no further thread. Threads that were created past
/// pthread_create(3), as the C library creates some, keep the process alive.
fn is_alone() -> bool {
    let _internal = Internal::enter();
    // The main thread stays in the list after its end.
    let ended_main = (rustix::thread::gettid() != rustix::process::getpid()) as usize;
    let alone = move || {
        let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count);
        // Without /proc, the count decides.
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
