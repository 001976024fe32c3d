//! The program's threads: each has a timer of its CPU time, and a number while it lives.

use crate::system;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering::*};

/// Threads with numbers at a time, as many as records can tell apart; others have no bursts.
pub const THREADS: usize = 4096;

/// The signal that timers send; 0: there are none.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// The signal that stops counting copies.
static POLL: AtomicI32 = AtomicI32::new(0);
/// CPU time, but for tests.
static CLOCK: AtomicI32 = AtomicI32::new(libc::CLOCK_THREAD_CPUTIME_ID);
/// Who is sampled: not who was forked.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Of threads that end.
static KEY: AtomicU32 = AtomicU32::new(u32::MAX);
/// By number: a timer + 2; 0: free; 1: taken.
static TIMERS: [AtomicU32; THREADS] = [const { AtomicU32::new(0) }; THREADS];

/// The kernel's sigevent.
#[repr(C)]
struct Event {
    value: u64,
    signal: i32,
    notify: i32,
    thread: i32,
    pad: [i32; 11],
}

/// What sigaction(2) says of a signal: its handler, flags, where that returns to, its mask.
pub fn action(signal: i32) -> [u64; 4] {
    let mut action = [0u64; 4];
    let arguments = [signal as usize, 0, &raw mut action as usize, 8, 0, 0];
    // SAFETY: the kernel writes four words.
    unsafe { system::call(libc::SYS_rt_sigaction, arguments) };
    action
}

/// Sets it.
pub fn set_action(signal: i32, action: &[u64; 4]) {
    let arguments = [signal as usize, action.as_ptr() as usize, 0, 8, 0, 0];
    // SAFETY: the kernel reads four words; the handler is the caller's matter.
    unsafe { system::call(libc::SYS_rt_sigaction, arguments) };
}

/// Whether the kernel checks return addresses.
pub fn has_shadow_stack() -> bool {
    const ARCH_SHSTK_STATUS: usize = 0x5005;
    let mut features = 0u64;
    let arguments = [ARCH_SHSTK_STATUS, &raw mut features as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes a word, or knows of no such thing.
    unsafe { system::call(libc::SYS_arch_prctl, arguments) };
    features & 1 != 0
}

/// Of the calling thread.
pub fn fs_base() -> u64 {
    const ARCH_GET_FS: usize = 0x1003;
    let mut base = 0u64;
    let arguments = [ARCH_GET_FS, &raw mut base as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes a word.
    unsafe { system::call(libc::SYS_arch_prctl, arguments) };
    base
}

/// Signals that wait for the calling thread.
pub fn waiting_signals() -> u64 {
    let mut set = 0u64;
    let arguments = [&raw mut set as usize, 8, 0, 0, 0, 0];
    // SAFETY: the kernel writes a word.
    unsafe { system::call(libc::SYS_rt_sigpending, arguments) };
    set
}

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut c_void);

/// Installs the handler of a signal that the program does not use; which one it is.
fn handle(handler: Handler, flags: i32) -> Option<i32> {
    let (from, to) = (libc::SIGRTMIN() + 8, libc::SIGRTMAX() - 3);
    let signal = (from..to).rev().find(|signal| action(*signal)[0] == 0)?;
    // SAFETY: a handler of the right kind, which interrupts no other and is interrupted by none.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | flags;
        libc::sigfillset(&mut action.sa_mask);
        (libc::sigaction(signal, &action, std::ptr::null_mut()) == 0).then_some(signal)
    }
}

/// The action of one of our own signals.
pub fn our_action() -> [u64; 4] {
    action(POLL.load(Relaxed))
}

/// The signal that stops counting copies, as a bit.
pub fn poll_bit() -> u64 {
    1 << (POLL.load(Relaxed) - 1)
}

/// Sends the calling thread a signal with this siginfo.
pub fn send(signal: isize, info: usize) {
    let (process, thread) = (system::process() as usize, system::thread() as usize);
    // SAFETY: the kernel reads a siginfo.
    unsafe {
        let arguments = [process, thread, signal as usize, info, 0, 0];
        system::call(libc::SYS_rt_tgsigqueueinfo, arguments)
    };
}

/// A timer that sends it to the calling thread.
pub struct Polls(i32);

impl Polls {
    pub fn start(after_ns: u64) -> Polls {
        let timer = new_timer(libc::CLOCK_MONOTONIC, POLL.load(Relaxed), 0).unwrap_or(-1);
        let polls = Polls(timer);
        polls.next(after_ns);
        polls
    }

    /// The next one, and no more.
    pub fn next(&self, after_ns: u64) {
        set_timer(self.0, after_ns);
    }

    pub fn end(self) {
        // SAFETY: touches no memory.
        unsafe { system::call(libc::SYS_timer_delete, [self.0 as usize, 0, 0, 0, 0, 0]) };
    }
}

/// A timer that sends a signal and a value to the calling thread.
fn new_timer(clock: i32, signal: i32, value: u64) -> Option<i32> {
    const SIGEV_THREAD_ID: i32 = 4;
    let thread = system::thread() as i32;
    let event = Event { value, signal, notify: SIGEV_THREAD_ID, thread, pad: [0; 11] };
    let mut timer = 0i32;
    let arguments = [clock as usize, &raw const event as usize, &raw mut timer as usize, 0, 0, 0];
    // SAFETY: the kernel reads an event and writes a number.
    let result = unsafe { system::call(libc::SYS_timer_create, arguments) };
    (result == 0).then_some(timer)
}

/// Installs the handlers of two signals that the program does not use, and begins with the calling thread.
pub fn start(handler: Handler, poll: Handler, clock: i32, first_ns: u64) -> Option<()> {
    // Comes in copies only, whose stack may be the alternative one.
    POLL.store(handle(poll, 0)?, Relaxed);
    let signal = handle(handler, libc::SA_ONSTACK)?;
    // SAFETY: a key of ours, with a function of the right type.
    unsafe {
        let mut key = 0;
        if libc::pthread_key_create(&mut key, Some(ended)) != 0 {
            return None;
        }
        KEY.store(key, Relaxed);
    }
    CLOCK.store(clock, Relaxed);
    PROCESS.store(system::process(), Relaxed);
    SIGNAL.store(signal, Release);
    add(first_ns);
    Some(())
}

/// Whether this is the process that is sampled.
pub fn is_ours() -> bool {
    PROCESS.load(Relaxed) == system::process()
}

/// The calling thread is sampled from now on.
fn add(first_ns: u64) {
    let signal = SIGNAL.load(Acquire);
    if signal == 0 || !is_ours() {
        return;
    }
    let is_free = |timer: &&AtomicU32| timer.compare_exchange(0, 1, Acquire, Relaxed).is_ok();
    let Some(place) = TIMERS.iter().find(is_free) else { return };
    let number = (place as *const AtomicU32 as usize - TIMERS.as_ptr() as usize) / 4;
    let Some(timer) = new_timer(CLOCK.load(Relaxed), signal, number as u64) else {
        return place.store(0, Release);
    };
    place.store(timer as u32 + 2, Release);
    // SAFETY: a key of ours. The value is not 0, so that `ended` is told.
    unsafe { libc::pthread_setspecific(KEY.load(Relaxed), (number + 1) as *const c_void) };
    next_burst(number as u32, first_ns);
}

/// The next burst of a thread comes after so much of its time.
pub fn next_burst(number: u32, after_ns: u64) {
    let Some(timer) = TIMERS[number as usize].load(Relaxed).checked_sub(2) else { return };
    set_timer(timer as i32, after_ns.max(1));
}

/// Once, after so much of its clock's time.
fn set_timer(timer: i32, after_ns: u64) {
    let time = [0u64, 0, after_ns / 1_000_000_000, after_ns % 1_000_000_000];
    let arguments = [timer as usize, 0, &raw const time as usize, 0, 0, 0];
    // SAFETY: the kernel reads two timespecs.
    unsafe { system::call(libc::SYS_timer_settime, arguments) };
}

/// A thread ends: it has no more bursts.
unsafe extern "C" fn ended(value: *mut c_void) {
    let place = &TIMERS[value as usize - 1];
    if let Some(timer) = place.load(Relaxed).checked_sub(2) {
        // Ends a burst, too, as no burst makes this call.
        // SAFETY: touches no memory.
        unsafe { system::call(libc::SYS_timer_delete, [timer as usize, 0, 0, 0, 0, 0]) };
    }
    place.store(0, Release);
}

type Start = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Start,
    *mut c_void,
) -> libc::c_int;

/// What a new thread is to run, from its creation until it begins.
struct Begin {
    is_taken: AtomicBool,
    start: AtomicUsize,
    argument: AtomicUsize,
}

/// Threads that were created and have not begun; there is no heap that could give memory back.
static BEGINS: [Begin; 1024] = [const {
    Begin {
        is_taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        argument: AtomicUsize::new(0),
    }
}; 1024];

impl Begin {
    /// None while there are too many.
    fn take(start: Start, argument: *mut c_void) -> Option<&'static Begin> {
        let is_free = |of: &&Begin| !of.is_taken.swap(true, Acquire);
        let of = BEGINS.iter().find(is_free)?;
        of.start.store(start as usize, Relaxed);
        of.argument.store(argument as usize, Relaxed);
        Some(of)
    }

    fn give_back(&self) {
        self.is_taken.store(false, Release);
    }
}

unsafe extern "C" fn begin(of: *mut c_void) -> *mut c_void {
    // SAFETY: `pthread_create` below handed over one of the list, which is ours until it is given back.
    let of = unsafe { &*of.cast::<Begin>() };
    // SAFETY: a function of this type was stored.
    let start = unsafe { std::mem::transmute::<usize, Start>(of.start.load(Relaxed)) };
    let argument = of.argument.load(Relaxed) as *mut c_void;
    of.give_back();
    add(20_000_000);
    // SAFETY: as the creator promised pthread_create.
    unsafe { start(argument) }
}

/// pthread_create(3), of threads that are sampled.
///
/// # Safety
/// As of pthread_create(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> libc::c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    if NEXT.load(Relaxed) == 0 {
        // SAFETY: the name ends in 0.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) };
        NEXT.store(next as usize, Relaxed);
    }
    let next = NEXT.load(Relaxed);
    if next == 0 {
        return libc::EAGAIN;
    }
    // SAFETY: the C library's own function of that name has this type.
    let create = unsafe { std::mem::transmute::<usize, Create>(next) };
    let of = if SIGNAL.load(Acquire) == 0 { None } else { Begin::take(start, argument) };
    let Some(of) = of else {
        // SAFETY: as our caller promises.
        return unsafe { create(thread, attributes, start, argument) };
    };
    // SAFETY: `begin` takes what is handed over.
    let error =
        unsafe { create(thread, attributes, begin, (of as *const Begin).cast_mut().cast()) };
    if error != 0 {
        of.give_back();
    }
    error
}
