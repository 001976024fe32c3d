//! The program's threads: each has a timer of its CPU time, and a number while it lives.
//!
//! Timers send signal 32, which the C library keeps for the cancellation of threads: its sigprocmask, sigwait, sigfillset
//! and sigaction leave it out, so that no program blocks it, waits for it or handles it by the C library. What
//! pthread_cancel sends is handed on to the C library's own handler.

use crate::status::{Inside, Off, status};
use crate::system;
use std::arch::naked_asm;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering::*};

/// Threads with numbers at a time, as many as records can tell apart; others have no bursts.
pub const THREADS: usize = 4096;

/// SIGCANCEL of the C library.
const SIGNAL: i32 = 32;
/// Whether threads have timers.
static HAS_TIMERS: AtomicBool = AtomicBool::new(false);
/// The C library's handler of it; 0: there is none yet.
static CANCEL: AtomicUsize = AtomicUsize::new(0);
/// What handlers return to.
static RESTORER: AtomicUsize = AtomicUsize::new(0);
/// CPU time, but for tests.
static CLOCK: AtomicI32 = AtomicI32::new(libc::CLOCK_THREAD_CPUTIME_ID);
/// Who is sampled: not who was forked.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Of threads that end.
static KEY: AtomicU32 = AtomicU32::new(u32::MAX);
/// By number: a timer + 2; 0: free; 1: taken.
static TIMERS: [AtomicU32; THREADS] = [const { AtomicU32::new(0) }; THREADS];
/// By number: how many threads have had it.
static GENERATIONS: [AtomicU32; THREADS] = [const { AtomicU32::new(0) }; THREADS];

/// The value that the timer sends which stops counting copies; others send the thread's number.
const POLL: u64 = 1 << 32;

/// What comes with a signal of ours.
pub enum Sent {
    /// The thread with this number has run for long enough.
    Begin(u32),
    /// Counting copies have.
    Poll,
}

/// The generation of the thread that has a number now. What is known of a number is of no use for another one.
pub fn generation(number: u32) -> u32 {
    GENERATIONS[number as usize].load(Acquire)
}

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

/// Handles our signal; its sender's code says that it is ours.
pub type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut c_void);
static HANDLER: AtomicUsize = AtomicUsize::new(0);

/// Hands a signal on to whom it is for. Jumps there, as the C library's handler ends threads by unwinding the stack,
/// which must have no frame of ours then.
#[unsafe(naked)]
extern "C" fn entry(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    naked_asm!(
        "mov eax, [rsi + 8]", // si_code
        "cmp eax, -2",        // SI_TIMER
        "je 2f",
        "cmp eax, -1", // SI_QUEUE, of tests
        "je 2f",
        "push rdi",
        "push rsi",
        "push rdx",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "call {is_to_be_cancelled}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test al, al",
        "jz 3f",
        "mov rax, [rip + {cancel}]",
        "test rax, rax",
        "jz 3f",
        "jmp rax",
        "2: mov rax, [rip + {handler}]",
        "jmp rax",
        "3: ret",
        is_to_be_cancelled = sym is_to_be_cancelled,
        cancel = sym CANCEL,
        handler = sym HANDLER,
    )
}

/// Readies the calling thread for the C library's handler, which blocks no signal but its own; false in copies, where
/// its signal waits until the thread has left them.
extern "C" fn is_to_be_cancelled(
    info: *mut libc::siginfo_t,
    context: *const crate::area::Context,
) -> bool {
    // SAFETY: the kernel hands handlers both, a context at least as long as ours.
    let (code, mask) = unsafe { ((*info).si_code, (*context).mask) };
    if code != libc::SI_TKILL || crate::burst::leaves_soon() {
        return false;
    }
    set_mask(mask | signal_bit());
    true
}

/// Cancels the calling thread as pthread_cancel(3) has asked for, when its signals come.
pub fn cancel_again() {
    let (process, thread) = (system::process() as usize, system::thread() as usize);
    // SAFETY: touches no memory.
    unsafe { system::call(libc::SYS_tgkill, [process, thread, SIGNAL as usize, 0, 0, 0]) };
}

/// Sets the calling thread's signal mask.
fn set_mask(mask: u64) {
    let arguments = [libc::SIG_SETMASK as usize, &raw const mask as usize, 0, 8, 0, 0];
    // SAFETY: the kernel reads a word.
    unsafe { system::call(libc::SYS_rt_sigprocmask, arguments) };
}

/// No signal comes until the thread's mask is another one.
pub fn block_signals() {
    set_mask(!0);
}

/// The signal as a bit.
pub fn signal_bit() -> u64 {
    1 << (SIGNAL - 1)
}

/// What comes with our signal.
///
/// # Safety
/// Of a siginfo that the kernel has handed to a handler of it.
pub unsafe fn sent(info: *const libc::siginfo_t) -> Option<Sent> {
    // SAFETY: as promised; of timers and of sigqueue(3) there is a value.
    match unsafe { (*info).si_value().sival_ptr as u64 } {
        POLL => Some(Sent::Poll),
        number => (number < THREADS as u64).then_some(Sent::Begin(number as u32)),
    }
}

/// The C library's code that a handler returns to.
fn restorer() -> Option<usize> {
    let signal = (libc::SIGRTMIN()..=libc::SIGRTMAX()).find(|signal| action(*signal)[0] == 0)?;
    let before = action(signal);
    // SAFETY: ignored for a moment, before there are threads.
    unsafe {
        let mut ignored: libc::sigaction = std::mem::zeroed();
        ignored.sa_sigaction = libc::SIG_IGN;
        libc::sigaction(signal, &ignored, std::ptr::null_mut());
    }
    let [_, _, restorer, _] = action(signal);
    set_action(signal, &before);
    (restorer != 0).then_some(restorer as usize)
}

const FLAGS: i32 = libc::SA_SIGINFO | libc::SA_RESTART | 0x0400_0000; // SA_RESTORER

/// Installs ours in place of the C library's, which is kept.
fn install() {
    let [handler, ..] = action(SIGNAL);
    if handler == entry as *const () as u64 {
        return;
    }
    CANCEL.store(if handler > 1 { handler as usize } else { 0 }, Release);
    set_action(SIGNAL, &our_action());
}

/// The action of our signal.
pub fn our_action() -> [u64; 4] {
    let flags = (FLAGS | libc::SA_ONSTACK) as u64;
    [entry as *const () as u64, flags, RESTORER.load(Relaxed) as u64, !0]
}

/// The C library's handler is back.
fn uninstall() {
    let theirs = CANCEL.load(Acquire) as u64;
    let restorer = RESTORER.load(Relaxed) as u64;
    // What timers have sent before may still come.
    let handler = if theirs > 1 { theirs } else { libc::SIG_IGN as u64 };
    set_action(SIGNAL, &[handler, FLAGS as u64, restorer, 0]);
}

/// Sends the calling thread a signal with this siginfo. Only the main thread may say that kill(2)
/// or tgkill(2) has sent it; for others tgkill(2) does.
pub fn send(signal: isize, info: usize) {
    let (process, thread) = (system::process() as usize, system::thread() as usize);
    // SAFETY: the kernel reads a siginfo.
    unsafe {
        let arguments = [process, thread, signal as usize, info, 0, 0];
        if system::call(libc::SYS_rt_tgsigqueueinfo, arguments) != 0 {
            system::call(libc::SYS_tgkill, [process, thread, signal as usize, 0, 0, 0]);
        }
    };
}

/// A timer that sends it to the calling thread.
pub struct Polls(i32);

impl Polls {
    pub fn start(after_ns: u64) -> Polls {
        let polls = Polls(new_timer(libc::CLOCK_MONOTONIC, POLL).unwrap_or(-1));
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

/// A timer that sends our signal with a value to the calling thread.
fn new_timer(clock: i32, value: u64) -> Option<i32> {
    const SIGEV_THREAD_ID: i32 = 4;
    let thread = system::thread() as i32;
    let event = Event { value, signal: SIGNAL, notify: SIGEV_THREAD_ID, thread, pad: [0; 11] };
    let mut timer = 0i32;
    let arguments = [clock as usize, &raw const event as usize, &raw mut timer as usize, 0, 0, 0];
    // SAFETY: the kernel reads an event and writes a number.
    let result = unsafe { system::call(libc::SYS_timer_create, arguments) };
    (result == 0).then_some(timer)
}

/// Installs the handler, and begins with the calling thread.
pub fn start(handler: Handler, clock: i32, first_ns: u64) -> Result<(), Off> {
    if libc::SIGRTMIN() <= SIGNAL {
        return Err(Off::NoSignal);
    }
    RESTORER.store(restorer().ok_or(Off::NoSignal)?, Relaxed);
    HANDLER.store(handler as *const () as usize, Release);
    install();
    // SAFETY: a key of ours, with a function of the right type; a function that touches atomics only.
    unsafe {
        let mut key = 0;
        if libc::pthread_key_create(&mut key, Some(ended)) != 0
            || libc::pthread_atfork(None, None, Some(forked)) != 0
        {
            return Err(Off::NoTimers);
        }
        KEY.store(key, Relaxed);
    }
    CLOCK.store(clock, Relaxed);
    PROCESS.store(system::process(), Relaxed);
    HAS_TIMERS.store(true, Release);
    add(first_ns);
    match TIMERS[0].load(Relaxed) {
        0 => Err(Off::NoTimers),
        _ => Ok(()),
    }
}

/// A forked child is not sampled, and makes no system call of ours.
extern "C" fn forked() {
    HAS_TIMERS.store(false, Relaxed);
    crate::status::close_soon();
}

/// Ends all timers, and gives the signal back: the kernel may not let us call it any more.
pub fn stop() {
    HAS_TIMERS.store(false, Release);
    for timer in TIMERS.iter().filter_map(|timer| timer.load(Relaxed).checked_sub(2)) {
        // SAFETY: touches no memory. Whatever thread it is of.
        unsafe { system::call(libc::SYS_timer_delete, [timer as usize, 0, 0, 0, 0, 0]) };
    }
    uninstall();
}

/// Whether this is the process that is sampled.
pub fn is_ours() -> bool {
    PROCESS.load(Relaxed) == system::process()
}

/// The calling thread is sampled from now on.
fn add(first_ns: u64) {
    let inside = Inside::enter();
    if inside.is_none() || !HAS_TIMERS.load(Acquire) || !is_ours() {
        return;
    }
    let is_free = |timer: &AtomicU32| timer.compare_exchange(0, 1, Acquire, Relaxed).is_ok();
    let unseen = || _ = status().unseen_threads.fetch_add(1, Relaxed);
    let Some(number) = TIMERS.iter().position(is_free) else { return unseen() };
    GENERATIONS[number].fetch_add(1, Release);
    let Some(timer) = new_timer(CLOCK.load(Relaxed), number as u64) else {
        TIMERS[number].store(0, Release);
        return unseen();
    };
    TIMERS[number].store(timer as u32 + 2, Release);
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
    let Some(place) = (value as usize).checked_sub(1).and_then(|number| TIMERS.get(number)) else {
        return;
    };
    let inside = Inside::enter();
    if let (Some(timer), Some(_)) = (place.load(Relaxed).checked_sub(2), &inside) {
        // Ends a burst, too, as no burst makes this call.
        // SAFETY: touches no memory.
        unsafe { system::call(libc::SYS_timer_delete, [timer as usize, 0, 0, 0, 0, 0]) };
    }
    place.store(0, Release);
}

// A thread may end by unwinding its stack, with our frames in it.
type Start = unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Start,
    *mut c_void,
) -> libc::c_int;
type Cancel = unsafe extern "C-unwind" fn(libc::pthread_t) -> libc::c_int;

/// The function of a name, which ends in 0, that is behind ours; 0: there is none.
pub fn next(kept: &AtomicUsize, name: &std::ffi::CStr) -> usize {
    if kept.load(Relaxed) == 0 {
        // SAFETY: the name ends in 0.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        kept.store(next as usize, Relaxed);
    }
    kept.load(Relaxed)
}

/// pthread_cancel(3), whose first call installs the C library's handler of our signal.
///
/// # Safety
/// As of pthread_cancel(3).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pthread_cancel(thread: libc::pthread_t) -> libc::c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = next(&NEXT, c"pthread_cancel");
    if next == 0 {
        return libc::ENOSYS;
    }
    // SAFETY: the C library's own function of that name has this type.
    let error = unsafe { std::mem::transmute::<usize, Cancel>(next)(thread) };
    if HAS_TIMERS.load(Acquire) && is_ours() && action(SIGNAL)[0] != our_action()[0] {
        install();
        // What timers have sent meanwhile is lost, and each sends once.
        (0..THREADS as u32).for_each(|number| next_burst(number, 1_000_000));
    }
    error
}

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

unsafe extern "C-unwind" fn begin(of: *mut c_void) -> *mut c_void {
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
    let next = next(&NEXT, c"pthread_create");
    if next == 0 {
        return libc::EAGAIN;
    }
    // SAFETY: the C library's own function of that name has this type.
    let create = unsafe { std::mem::transmute::<usize, Create>(next) };
    let of = if HAS_TIMERS.load(Acquire) { Begin::take(start, argument) } else { None };
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
