//! Threads that serve their own faults, beside other uses of SIGBUS. Each test runs in a process of
//! its own, because signal actions are per process.
#![allow(unsafe_code)]

mod turns;

use pagetax_core::access::Rng;
use pagetax_core::units::Bytes;
use pagetax_remote::page::{PAGE_BYTES, PageMac};
use pagetax_remote::pager::{
    EvictionMethod, Features, PagerOptions, RemoteRegion, Serving, StoreInChild,
};
use pagetax_remote::store::embedded::EmbeddedStore;
use pagetax_remote::store::{PageStore, PutRun, RegionId};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use turns::turns;

const MIB: u64 = 1 << 20;
const PAGES: usize = 1024;
/// The exit status of a program's handler for SIGBUS: a lost page, or memory behind the end of a
/// file.
const LOST: i32 = 43;
const NO_MEMORY: i32 = 44;

/// Makes several tests of each function: with all features of this kernel, and with those of older
/// kernels.
macro_rules! on_each_kernel {
    ($($name:ident),* $(,)?) => {
        mod all_features {
            $(#[test] fn $name() { super::$name() })*
        }
        mod no_move {
            $(#[test] fn $name() { super::$name() })*
        }
        mod no_poison {
            $(#[test] fn $name() { super::$name() })*
        }
    };
}

on_each_kernel! {
    a_lost_page_is_told_to_a_handler_of_before,
    a_lost_page_is_told_to_a_handler_of_after,
    others_faults_are_told_to_the_programs_handler,
    others_faults_end_a_program_without_a_handler,
    faults_after_a_region_is_gone_are_no_more_ours,
    a_signal_that_is_sent_does_what_it_did,
    a_signal_that_is_sent_ends_a_program_without_a_handler,
    system_calls_into_missing_pages_fail,
    errno_stays_as_it_was,
    both_sides_of_a_fork_have_the_pages,
    a_child_goes_on_whatever_other_threads_asked,
    signals_come_between_faults
}

/// Returns the kernel features that the calling test may use.
fn features() -> Features {
    match std::thread::current().name() {
        Some(name) if name.starts_with("no_poison::") => Features::NoMoveNoPoison,
        Some(name) if name.starts_with("no_move::") => Features::NoMove,
        _ => Features::All,
    }
}

/// Runs the body in a process of its own. Returns how it ended, or `None` if this user may not
/// page.
fn alone(body: impl FnOnce()) -> Option<ExitStatus> {
    const CHILD: &str = "PAGETAX_TEST_IN_PLACE";
    if std::env::var_os(CHILD).is_some() {
        body();
        std::process::exit(0);
    }
    let thread = std::thread::current();
    let this_test = thread.name().expect("the name of a test");
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", this_test, "--nocapture"]).env(CHILD, "1");
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(skip) = text.lines().find(|line| line.contains("SKIP: ")) {
        println!("{skip}");
        return None;
    }
    if output.status.code() == Some(101) {
        panic!("{text}{}", String::from_utf8_lossy(&output.stderr));
    }
    Some(output.status)
}

fn embedded() -> Arc<dyn PageStore> {
    Arc::new(EmbeddedStore::new(Bytes(64 * MIB)))
}

/// Maps a region of [`PAGES`], a quarter of which is resident, and writes each page's number to it.
fn numbered(store: &Arc<dyn PageStore>) -> RemoteRegion {
    let options = PagerOptions {
        serving: Serving::InPlace,
        eviction_method: EvictionMethod::Cheapest,
        features: features(),
        ..PagerOptions::resident((PAGES * PAGE_BYTES / 4) as u64)
    };
    let mapped = RemoteRegion::map(store.clone(), (PAGES * PAGE_BYTES) as u64, options);
    let mut region = mapped.unwrap_or_else(|error| {
        println!("SKIP: {error}");
        std::process::exit(0)
    });
    for (number, page) in region.as_mut_slice().chunks_exact_mut(PAGE_BYTES).enumerate() {
        page.fill(number as u8 | 1);
    }
    region
}

fn assert_numbered(region: &RemoteRegion) {
    for (number, page) in region.as_slice().chunks_exact(PAGE_BYTES).enumerate() {
        assert!(page.iter().all(|byte| *byte == number as u8 | 1), "page {number}");
    }
}

/// Touches a page whose bytes the store has lost.
fn touch_lost_page(store: &Arc<dyn PageStore>, region: &RemoteRegion) {
    let other = [1; PAGE_BYTES];
    let run = PutRun { first: 2, pages: &other, macs: &[PageMac::of(&other)] };
    store.writer().unwrap().put(RegionId(1), &[run]).unwrap();
    MEMORY.store(region.as_ptr(), Relaxed);
    println!("{}", region.as_slice()[2 * PAGE_BYTES]);
}

/// Touches a page behind the end of a file.
fn touch_past_the_end() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(PAGE_BYTES as u64).unwrap();
    // SAFETY: a fresh mapping of a file of our own. The read after the truncation is the test: it
    // ends this process.
    unsafe {
        let (length, protection) = (PAGE_BYTES, libc::PROT_READ);
        let at =
            libc::mmap(ptr::null_mut(), length, protection, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(at, libc::MAP_FAILED);
        file.set_len(0).unwrap();
        println!("{}", at.cast::<u8>().read_volatile());
    }
}

fn set_action(signal: i32, handler: usize, flags: i32) -> libc::sigaction {
    // SAFETY: zeros are a sigaction; handlers are functions of this file, of the kind that the flags say.
    unsafe {
        let (mut action, mut before): (libc::sigaction, _) =
            (std::mem::zeroed(), std::mem::zeroed());
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        assert_eq!(libc::sigaction(signal, &action, &mut before), 0);
        before
    }
}

type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

fn address_of(handler: Handler) -> usize {
    handler as *const () as usize
}

extern "C" fn end(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let is_paged = |at: usize| {
        let start = MEMORY.load(Relaxed) as usize;
        (start..start + PAGES * PAGE_BYTES).contains(&at)
    };
    // SAFETY: the kernel, or the handler that passed the signal on, gives valid pointers. The
    // process ends at once.
    unsafe { libc::_exit(if is_paged((*info).si_addr() as usize) { LOST } else { NO_MEMORY }) }
}

static EARLIER: AtomicUsize = AtomicUsize::new(0);

/// Acts as a program's later handler: passes on every SIGBUS that it does not know, but not a lost
/// page twice. Other pages may be fetched and evicted again before the thread runs, so an address
/// may fault more than once.
extern "C" fn end_or_hand_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    static LAST: AtomicUsize = AtomicUsize::new(0);
    // SAFETY: as above; the call goes to the previous handler, which has this type.
    unsafe {
        let at = (*info).si_addr() as usize;
        if LAST.swap(at, Relaxed) == at && !MEMORY.load(Relaxed).is_null() {
            end(signal, info, context);
        }
        std::mem::transmute::<usize, Handler>(EARLIER.load(Relaxed))(signal, info, context);
    }
}

fn a_lost_page_is_told_to_a_handler_of_before() {
    let ended = alone(|| {
        set_action(libc::SIGBUS, address_of(end), libc::SA_SIGINFO);
        let store = embedded();
        touch_lost_page(&store, &numbered(&store));
    });
    let Some(status) = ended else { return };
    assert_eq!(status.code(), Some(LOST), "{status:?}");
}

fn a_lost_page_is_told_to_a_handler_of_after() {
    let ended = alone(|| {
        let store = embedded();
        let region = numbered(&store);
        let before = set_action(libc::SIGBUS, address_of(end_or_hand_on), libc::SA_SIGINFO);
        EARLIER.store(before.sa_sigaction, Relaxed);
        assert_numbered(&region);
        touch_lost_page(&store, &region);
    });
    let Some(status) = ended else { return };
    assert_eq!(status.code(), Some(LOST), "{status:?}");
}

fn others_faults_are_told_to_the_programs_handler() {
    let ended = alone(|| {
        set_action(libc::SIGBUS, address_of(end), libc::SA_SIGINFO);
        assert_numbered(&numbered(&embedded()));
        touch_past_the_end();
    });
    let Some(status) = ended else { return };
    assert_eq!(status.code(), Some(NO_MEMORY), "{status:?}");
}

fn others_faults_end_a_program_without_a_handler() {
    let ended = alone(|| {
        set_action(libc::SIGBUS, libc::SIG_DFL, 0);
        assert_numbered(&numbered(&embedded()));
        touch_past_the_end();
    });
    let Some(status) = ended else { return };
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status:?}");
}

fn faults_after_a_region_is_gone_are_no_more_ours() {
    let ended = alone(|| {
        set_action(libc::SIGBUS, address_of(end), libc::SA_SIGINFO);
        drop(numbered(&embedded()));
        assert_numbered(&numbered(&embedded()));
        touch_past_the_end();
    });
    let Some(status) = ended else { return };
    assert_eq!(status.code(), Some(NO_MEMORY), "{status:?}");
}

fn a_signal_that_is_sent_does_what_it_did() {
    let ended = alone(|| {
        set_action(libc::SIGBUS, libc::SIG_IGN, 0);
        let region = numbered(&embedded());
        // SAFETY: what it does is what is tested.
        unsafe { libc::raise(libc::SIGBUS) };
        assert_numbered(&region);
    });
    let Some(status) = ended else { return };
    assert_eq!(status.code(), Some(0), "{status:?}");
}

fn a_signal_that_is_sent_ends_a_program_without_a_handler() {
    let ended = alone(|| {
        set_action(libc::SIGBUS, libc::SIG_DFL, 0);
        let _region = numbered(&embedded());
        // SAFETY: ends this process.
        unsafe { libc::raise(libc::SIGBUS) };
    });
    let Some(status) = ended else { return };
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status:?}");
}

fn system_calls_into_missing_pages_fail() {
    let ended = alone(|| {
        let region = numbered(&embedded());
        assert!(!region.serves_system_calls());
        region.evict_all();
        let page = &region.as_slice()[5 * PAGE_BYTES..6 * PAGE_BYTES];
        let mut file = tempfile::tempfile().unwrap();
        let refused = file.write_all(page).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EFAULT));
        assert_eq!(page[0], 5);
        file.write_all(page).unwrap();
    });
    let Some(status) = ended else { return };
    assert_eq!(status.code(), Some(0), "{status:?}");
}

fn errno_stays_as_it_was() {
    let ended = alone(|| {
        let region = numbered(&embedded());
        region.evict_all();
        // SAFETY: the calling thread's errno.
        let errno = unsafe { &mut *libc::__errno_location() };
        *errno = 1234;
        assert_numbered(&region);
        assert_eq!(*errno, 1234);
    });
    let Some(status) = ended else { return };
    assert_eq!(status.code(), Some(0), "{status:?}");
}

fn both_sides_of_a_fork_have_the_pages() {
    let ended = alone(|| {
        let region = numbered(&embedded());
        assert!(region.before_fork(false));
        // SAFETY: the child uses only locks and memory that glibc allows after a fork, and ends by
        // _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let right = region.restart_in_child(StoreInChild::Inherited).is_ok();
            assert_numbered(&region);
            let (counts, at) = (region.counts(), region.as_ptr());
            // SAFETY: a byte of the region, which only this thread uses.
            (0..PAGES).for_each(|page| unsafe { *at.add(page * PAGE_BYTES) = 0 });
            let paged = region.counts().fault_count > counts.fault_count + PAGES as u64 / 64;
            // SAFETY: ends at once.
            unsafe { libc::_exit(i32::from(!right || !paged)) }
        }
        region.after_fork();
        assert_numbered(&region);
        let mut status = 0;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_numbered(&region);
    });
    let Some(status) = ended else { return };
    assert_eq!(status.code(), Some(0), "{status:?}");
}

fn a_child_goes_on_whatever_other_threads_asked() {
    let ended = alone(|| {
        let region = numbered(&embedded());
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Relaxed) && region.can_fork() {
                        std::hint::spin_loop();
                    }
                });
            }
            // Threads that start and end hold locks of Rust's standard library.
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    std::thread::spawn(|| ()).join().unwrap();
                }
            });
            let failed = (0..100).map(|_| fork_and_restart(&region)).find(|status| *status != 0);
            done.store(true, Relaxed);
            assert_eq!(failed, None);
        });
    });
    let Some(status) = ended else { return };
    assert_eq!(status.code(), Some(0), "{status:?}");
}

/// Forks, and restarts the pager in the child. Returns the child's status; SIGALRM ends a child
/// that hangs.
fn fork_and_restart(region: &RemoteRegion) -> i32 {
    assert!(region.before_fork(false));
    // SAFETY: the child uses only locks and memory that glibc allows after a fork, and ends by
    // _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(10) };
        let right =
            region.is_store_inherited() && region.restart_in_child(StoreInChild::Inherited).is_ok();
        // SAFETY: ends at once.
        unsafe { libc::_exit(i32::from(!right)) }
    }
    region.after_fork();
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status
}

static MEMORY: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static ALARMS: AtomicU64 = AtomicU64::new(0);

/// Handles SIGALRM, and touches pages itself.
extern "C" fn alarm(_: i32) {
    let turn = ALARMS.fetch_add(1, Relaxed);
    let page = (turn as usize).wrapping_mul(389) % PAGES;
    // SAFETY: a byte of the region, which outlives the signals. Atomic, because other threads write
    // pages.
    let found = unsafe { AtomicU64::from_ptr(MEMORY.load(Relaxed).add(page * PAGE_BYTES).cast()) };
    if found.load(Relaxed) as u32 != page as u32 + 1 {
        std::process::abort();
    }
}

/// Sends SIGALRM to a thread until it is done. Each signal waits until the thread has handled the
/// last one and gone a step further. On a slow CPU, a timer would keep the thread in the handler
/// for ever.
fn send_alarms(to: libc::pthread_t, steps: &AtomicU64, is_done: &AtomicBool) {
    while !is_done.load(Relaxed) {
        let before = (ALARMS.load(Relaxed), steps.load(Relaxed));
        // SAFETY: the thread waits for this one before it ends.
        assert_eq!(unsafe { libc::pthread_kill(to, libc::SIGALRM) }, 0);
        let has_gone_on = || ALARMS.load(Relaxed) > before.0 && steps.load(Relaxed) > before.1;
        while !has_gone_on() && !is_done.load(Relaxed) {
            std::thread::sleep(Duration::from_micros(10));
        }
    }
}

fn signals_come_between_faults() {
    let ended = alone(|| {
        let mut region = numbered(&embedded());
        let word = |page: usize, round: u64| (page as u64 + 1) | (round << 32);
        for (number, page) in region.as_mut_slice().chunks_exact_mut(PAGE_BYTES).enumerate() {
            page[..8].copy_from_slice(&word(number, 0).to_le_bytes());
        }
        MEMORY.store(region.as_ptr(), Relaxed);
        set_action(libc::SIGALRM, alarm as *const () as usize, libc::SA_RESTART);
        let (steps, is_done) = (AtomicU64::new(0), AtomicBool::new(false));
        // SAFETY: asks for the calling thread.
        let this_thread = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| send_alarms(this_thread, &steps, &is_done));
            let (mut rounds, mut rng) = ([0u64; PAGES], Rng::new(1));
            let wrong = (0..turns(100_000)).find_map(|_| {
                let page = rng.below(PAGES as u64) as usize;
                let at = region.as_ptr().wrapping_add(page * PAGE_BYTES);
                // SAFETY: as in the handler.
                let at = unsafe { AtomicU64::from_ptr(at.cast()) };
                let (found, wanted) = (at.load(Relaxed), word(page, rounds[page]));
                rounds[page] += 1;
                at.store(word(page, rounds[page]), Relaxed);
                steps.fetch_add(1, Relaxed);
                (found != wanted).then_some((found, wanted))
            });
            // Otherwise a thread that panicked would leave the other waiting for ever.
            is_done.store(true, Relaxed);
            assert_eq!(wrong, None);
        });
        assert!(ALARMS.load(Relaxed) > 100, "{ALARMS:?}");
    });
    let Some(status) = ended else { return };
    assert_eq!(status.code(), Some(0), "{status:?}");
}
