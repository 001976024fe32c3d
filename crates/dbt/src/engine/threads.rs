//! The program's threads. Each has a timer of its CPU time, and a number while it lives.
//!
//! Timers send signal 32, which the C library reserves for the cancellation of threads. Its sigprocmask,
//! sigwait, sigfillset and sigaction leave the signal out. So no program blocks it, waits for it or handles
//! it through the C library. A signal that pthread_cancel sends goes to the C library's own handler.

use crate::status::{Inside, OffReason, status};
use crate::system;
use std::arch::naked_asm;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering::*};

/// The most threads that have numbers at a time, as many as records can tell apart. Others have no bursts.
pub const THREADS: usize = 4096;

/// The C library's SIGCANCEL.
const SIGNAL: i32 = 32;
/// True while threads have timers.
static HAS_TIMERS: AtomicBool = AtomicBool::new(false);
/// The address of the C library's handler of [`SIGNAL`]; 0: not installed yet.
static CANCEL: AtomicUsize = AtomicUsize::new(0);
/// The address that handlers return to.
static RESTORER: AtomicUsize = AtomicUsize::new(0);
/// The clock of timers: CPU time, except in tests.
static CLOCK: AtomicI32 = AtomicI32::new(libc::CLOCK_THREAD_CPUTIME_ID);
/// The id of the sampled process. A forked child has another one.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// The key of thread-specific data whose destructor is [`ended`].
static KEY: AtomicU32 = AtomicU32::new(u32::MAX);
/// Timers by thread number: a timer's id + 2; 0: the number is free; 1: it is taken.
static TIMERS: [AtomicU32; THREADS] = [const { AtomicU32::new(0) }; THREADS];
/// Generations by thread number: how many threads have had the number.
static GENERATIONS: [AtomicU32; THREADS] = [const { AtomicU32::new(0) }; THREADS];

/// The value that the poll timer sends. Other timers send their thread's number.
const POLL: u64 = 1 << 32;

/// The meaning of a signal from our timers.
pub enum Sent {
    /// A burst, or counting, begins: the native time of the thread with this number is over.
    Begin(u32),
    /// The counter of counting translations is due to be read.
    Poll,
}

/// Returns the generation of the thread that has a number now. State of another generation is stale.
pub fn generation(number: u32) -> u32 {
    GENERATIONS[number as usize].load(Acquire)
}

/// The kernel's struct sigevent.
#[repr(C)]
struct Event {
    value: u64,
    signal: i32,
    notify: i32,
    thread: i32,
    pad: [i32; 11],
}

/// Returns a signal's kernel_sigaction: its handler, flags, restorer and mask.
pub fn action(signal: i32) -> [u64; 4] {
    let mut action = [0u64; 4];
    let arguments = [signal as usize, 0, &raw mut action as usize, 8, 0, 0];
    // SAFETY: the kernel writes four words.
    unsafe { system::call(libc::SYS_rt_sigaction, arguments) };
    action
}

/// Sets a signal's kernel_sigaction.
pub fn set_action(signal: i32, action: &[u64; 4]) {
    let arguments = [signal as usize, action.as_ptr() as usize, 0, 8, 0, 0];
    // SAFETY: the kernel reads four words. The caller answers for the handler.
    unsafe { system::call(libc::SYS_rt_sigaction, arguments) };
}

/// Returns true if the calling thread has a shadow stack, which checks return addresses.
pub fn has_shadow_stack() -> bool {
    const ARCH_SHSTK_STATUS: usize = 0x5005;
    let mut features = 0u64;
    let arguments = [ARCH_SHSTK_STATUS, &raw mut features as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes a word, or returns an error.
    unsafe { system::call(libc::SYS_arch_prctl, arguments) };
    features & 1 != 0
}

/// Returns the FS base of the calling thread.
pub fn fs_base() -> u64 {
    const ARCH_GET_FS: usize = 0x1003;
    let mut base = 0u64;
    let arguments = [ARCH_GET_FS, &raw mut base as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes a word.
    unsafe { system::call(libc::SYS_arch_prctl, arguments) };
    base
}

/// Returns the signals that are pending for the calling thread.
pub fn waiting_signals() -> u64 {
    let mut set = 0u64;
    let arguments = [&raw mut set as usize, 8, 0, 0, 0, 0];
    // SAFETY: the kernel writes a word.
    unsafe { system::call(libc::SYS_rt_sigpending, arguments) };
    set
}

/// A handler of our signals only; [`entry`] tells them from others by si_code.
pub type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut c_void);
static HANDLER: AtomicUsize = AtomicUsize::new(0);

/// Dispatches [`SIGNAL`] to our handler or the C library's. It jumps to the C library's handler, which may
/// end the thread by unwinding the stack: no frame of ours may be on the stack then.
#[unsafe(naked)]
extern "C" fn entry(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    naked_asm!(
        "mov eax, [rsi + 8]", // si_code
        "cmp eax, -2",        // SI_TIMER
        "je 2f",
        "cmp eax, -1", // SI_QUEUE, in tests
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

/// Prepares the calling thread for the C library's handler, which expects only its own signal blocked.
/// Returns false in translated code: the signal is sent again when the thread has left it.
extern "C" fn is_to_be_cancelled(
    info: *mut libc::siginfo_t,
    context: *const crate::thread_state::SignalContext,
) -> bool {
    // SAFETY: the kernel passes both to handlers, the context at least as long as ours.
    let (code, mask) = unsafe { ((*info).si_code, (*context).mask) };
    if code != libc::SI_TKILL || super::leaves_soon() {
        return false;
    }
    set_mask(mask | signal_bit());
    true
}

/// Sends the calling thread the signal of pthread_cancel(3) again. It comes once signals are unblocked.
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

/// Blocks all signals of the calling thread.
pub fn block_signals() {
    set_mask(!0);
}

/// Returns the bit of [`SIGNAL`] in a signal mask.
pub fn signal_bit() -> u64 {
    1 << (SIGNAL - 1)
}

/// Returns the meaning of a signal of ours. None for an unknown value.
///
/// # Safety
/// `info` must be a siginfo that the kernel has passed to a handler of [`SIGNAL`].
pub unsafe fn sent(info: *const libc::siginfo_t) -> Option<Sent> {
    // SAFETY: the caller promises it. Signals of timers and of sigqueue(3) carry a value.
    match unsafe { (*info).si_value().sival_ptr as u64 } {
        POLL => Some(Sent::Poll),
        number => (number < THREADS as u64).then_some(Sent::Begin(number as u32)),
    }
}

/// Returns the address of the C library's restorer, the code that a handler returns to.
fn restorer() -> Option<usize> {
    let signal = (libc::SIGRTMIN()..=libc::SIGRTMAX()).find(|signal| action(*signal)[0] == 0)?;
    let before = action(signal);
    // SAFETY: the signal is ignored only briefly, before there are threads.
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

/// Installs our handler and keeps the address of the C library's.
fn install() {
    let [handler, ..] = action(SIGNAL);
    if handler == entry as *const () as u64 {
        return;
    }
    CANCEL.store(if handler > 1 { handler as usize } else { 0 }, Release);
    set_action(SIGNAL, &our_action());
}

/// Returns the action of our signal.
pub fn our_action() -> [u64; 4] {
    let flags = (FLAGS | libc::SA_ONSTACK) as u64;
    [entry as *const () as u64, flags, RESTORER.load(Relaxed) as u64, !0]
}

/// Restores the C library's handler.
fn uninstall() {
    let theirs = CANCEL.load(Acquire) as u64;
    let restorer = RESTORER.load(Relaxed) as u64;
    // Signals that timers have sent may still be pending: they must not kill the program.
    let handler = if theirs > 1 { theirs } else { libc::SIG_IGN as u64 };
    set_action(SIGNAL, &[handler, FLAGS as u64, restorer, 0]);
}

/// Sends the calling thread a signal with this siginfo. The kernel accepts a siginfo of kill(2) or tgkill(2)
/// only from the main thread. Other threads use tgkill(2).
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

/// A timer that sends [`Sent::Poll`] to the calling thread.
pub struct Polls(i32);

impl Polls {
    pub fn start(after_ns: u64) -> Polls {
        let polls = Polls(new_timer(libc::CLOCK_MONOTONIC, POLL).unwrap_or(-1));
        polls.next(after_ns);
        polls
    }

    /// Sets the timer to fire once.
    pub fn next(&self, after_ns: u64) {
        set_timer(self.0, after_ns);
    }

    pub fn end(self) {
        // SAFETY: touches no memory.
        unsafe { system::call(libc::SYS_timer_delete, [self.0 as usize, 0, 0, 0, 0, 0]) };
    }
}

/// Creates a timer that sends [`SIGNAL`] with a value to the calling thread.
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

/// Installs the handler and gives the calling thread a timer.
pub fn start(handler: Handler, clock: i32, first_ns: u64) -> Result<(), OffReason> {
    if libc::SIGRTMIN() <= SIGNAL {
        return Err(OffReason::NoSignal);
    }
    RESTORER.store(restorer().ok_or(OffReason::NoSignal)?, Relaxed);
    HANDLER.store(handler as *const () as usize, Release);
    install();
    // SAFETY: a key of ours with a destructor of the right type, and a fork handler that touches only
    // atomics.
    unsafe {
        let mut key = 0;
        if libc::pthread_key_create(&mut key, Some(ended)) != 0
            || libc::pthread_atfork(None, None, Some(forked)) != 0
        {
            return Err(OffReason::NoTimers);
        }
        KEY.store(key, Relaxed);
    }
    CLOCK.store(clock, Relaxed);
    PROCESS.store(system::process(), Relaxed);
    HAS_TIMERS.store(true, Release);
    add(first_ns);
    match TIMERS[0].load(Relaxed) {
        0 => Err(OffReason::NoTimers),
        _ => Ok(()),
    }
}

/// Switches the engine off in a forked child: the child is not sampled and makes no system call of ours.
extern "C" fn forked() {
    HAS_TIMERS.store(false, Relaxed);
    crate::status::close_soon();
}

/// Deletes all timers and restores the C library's handler, before a seccomp filter may forbid that.
pub fn stop() {
    HAS_TIMERS.store(false, Release);
    for timer in TIMERS.iter().filter_map(|timer| timer.load(Relaxed).checked_sub(2)) {
        // SAFETY: touches no memory. Any thread may delete a timer.
        unsafe { system::call(libc::SYS_timer_delete, [timer as usize, 0, 0, 0, 0, 0]) };
    }
    uninstall();
}

/// Returns true in the process that is sampled.
pub fn is_ours() -> bool {
    PROCESS.load(Relaxed) == system::process()
}

/// Gives the calling thread a number and a timer.
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
    // SAFETY: a key of ours. The value is not 0, so that the C library calls `ended`.
    unsafe { libc::pthread_setspecific(KEY.load(Relaxed), (number + 1) as *const c_void) };
    next_burst(number as u32, first_ns);
}

/// Sets a thread's timer: its native time ends after `after_ns`.
pub fn next_burst(number: u32, after_ns: u64) {
    let Some(timer) = TIMERS[number as usize].load(Relaxed).checked_sub(2) else { return };
    set_timer(timer as i32, after_ns.max(1));
}

/// Sets the timer of a thread that found the engine in use. A timer of CPU time fires at the kernel's next
/// tick at the earliest. That of elapsed time, which tests use, would fire at once, again and again.
pub fn try_again(number: u32) {
    const AGAIN_NS: u64 = 100_000;
    let is_cpu_time = CLOCK.load(Relaxed) == libc::CLOCK_THREAD_CPUTIME_ID;
    next_burst(number, if is_cpu_time { 1 } else { AGAIN_NS });
}

/// Sets a timer to fire once, after `after_ns` of its clock.
fn set_timer(timer: i32, after_ns: u64) {
    let time = [0u64, 0, after_ns / 1_000_000_000, after_ns % 1_000_000_000];
    let arguments = [timer as usize, 0, &raw const time as usize, 0, 0, 0];
    // SAFETY: the kernel reads two timespecs.
    unsafe { system::call(libc::SYS_timer_settime, arguments) };
}

/// Deletes the timer of a thread that ends, and frees its number.
unsafe extern "C" fn ended(value: *mut c_void) {
    let Some(place) = (value as usize).checked_sub(1).and_then(|number| TIMERS.get(number)) else {
        return;
    };
    let inside = Inside::enter();
    if let (Some(timer), Some(_)) = (place.load(Relaxed).checked_sub(2), &inside) {
        // timer_delete(2) also ends a burst, as no burst makes this call.
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

/// Returns the address of the next definition of a function after ours; 0 if there is none. The name ends in
/// 0.
pub fn next(kept: &AtomicUsize, name: &std::ffi::CStr) -> usize {
    if kept.load(Relaxed) == 0 {
        // SAFETY: the name ends in 0.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        kept.store(next as usize, Relaxed);
    }
    kept.load(Relaxed)
}

/// Interposes pthread_cancel(3), whose first call installs the C library's handler of our signal.
///
/// # Safety
/// The same conditions as for pthread_cancel(3).
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
        // Signals that timers have sent meanwhile are lost. A timer fires once, so set all of them again.
        (0..THREADS as u32).for_each(|number| next_burst(number, 1_000_000));
    }
    error
}

/// The start of a new thread, from its creation until it runs.
struct Begin {
    is_taken: AtomicBool,
    start: AtomicUsize,
    argument: AtomicUsize,
}

/// The starts of threads that do not run yet. They are static because our heap frees nothing.
static BEGINS: [Begin; 1024] = [const {
    Begin {
        is_taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        argument: AtomicUsize::new(0),
    }
}; 1024];

impl Begin {
    /// Takes a free entry. Returns none if all are in use.
    fn take(start: Start, argument: *mut c_void) -> Option<&'static Begin> {
        let is_free = |of: &&Begin| !of.is_taken.swap(true, Acquire);
        let of = BEGINS.iter().find(is_free)?;
        of.start.store(start as usize, Relaxed);
        of.argument.store(argument as usize, Relaxed);
        Some(of)
    }

    fn restore(&self) {
        self.is_taken.store(false, Release);
    }
}

unsafe extern "C-unwind" fn begin(of: *mut c_void) -> *mut c_void {
    // SAFETY: `pthread_create` below passed an entry of the list, which is ours until we give it back.
    let of = unsafe { &*of.cast::<Begin>() };
    // SAFETY: `take` stored a function of this type.
    let start = unsafe { std::mem::transmute::<usize, Start>(of.start.load(Relaxed)) };
    let argument = of.argument.load(Relaxed) as *mut c_void;
    of.restore();
    add(20_000_000);
    // SAFETY: the caller of pthread_create promises that `start` accepts this argument.
    unsafe { start(argument) }
}

/// Interposes pthread_create(3), so that the new thread is sampled.
///
/// # Safety
/// The same conditions as for pthread_create(3).
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
        // SAFETY: our caller promises it.
        return unsafe { create(thread, attributes, start, argument) };
    };
    // SAFETY: `begin` expects an entry of the list.
    let error =
        unsafe { create(thread, attributes, begin, (of as *const Begin).cast_mut().cast()) };
    if error != 0 {
        of.restore();
    }
    error
}
