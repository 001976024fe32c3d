//! libpagetax_dbt.so: records bursts of a program. In a burst the program runs in translations of its
//! code that log its accesses. Between bursts it runs in translations that only count instructions:
//!
//! ```text
//!  program, native ──timer──▶ translations that count ──burst is due──▶ translations that log
//!          ▲                           │        ▲                            │     │ log full
//!          └── blocking call, signal ──┘        └─────── burst over ─────────┘     ▼
//!                                                               pages, filtered ──▶ pagetax
//! ```
//!
//! Bursts are drawn by instructions, so that each instruction is equally likely to be in one. The
//! instructions that a thread executes natively are estimated from its pace in counting translations.
//!
//! The modules:
//! - `engine` owns the translated code of a thread: `stages` begins and ends bursts, `dispatch` decides where
//!   the program goes on, `signals` handles the timers and faults.
//! - `engine::schedule` keeps each thread's distance to its next burst.
//! - `translate` translates code, `cache` is the code cache.
//! - `stubs` has the code between translations and ours.
//! - `log_drain` drains the log.
//! - `calls` decides which system calls a burst may make, `maps` which memory is code.
//! - `engine::threads` has the timers, `engine::faults` the signals of faults.
//! - The C half (recorder/engines/native) filters pages and writes the stream, as the other engines do.
//!
//! Invariants: at each of its own instructions the program's registers, flags, stack, signals and memory are
//! what they would be natively. An instruction that would break this ends the burst first. Nothing here uses
//! the program's heap or its errno.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

mod cache;
mod calls;
mod emit;
mod engine;
mod filters;
mod heap;
mod log_drain;
mod maps;
mod recorder;
mod status;
mod stubs;
mod system;
mod thread_state;
mod translate;

use engine::{Engine, SamplingConfig, StressConfig};
use recorder::Recorder;
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// The variable with the path of the memory that the stream goes to.
const STREAM: &[u8] = b"PAGETAX_SAMPLER_STREAM=";
/// For tests: the variable with the path of a file for the summary at the end.
const LOG: &[u8] = b"PAGETAX_SAMPLER_LOG=";
/// For tests: the variable with a [`StressConfig`], as numbers with colons between them. They are the most
/// instructions of a burst, and the nanoseconds until the next one. Optional: the fewest instructions that
/// are only counted before each, and the number of returns from translated code until the engine panics.
const STRESS: &[u8] = b"PAGETAX_SAMPLER_STRESS=";
const PRELOAD: &[u8] = b"LD_PRELOAD=";

/// Calls [`constructor`] before main and before the program has a thread.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: unsafe extern "C" fn(i32, *const *const i8, *mut *mut i8) = constructor;

unsafe extern "C" fn constructor(_: i32, _: *const *const i8, variables: *mut *mut i8) {
    // SAFETY: the C library passes main's own arguments to a constructor: an array that ends in null, of
    // strings that live as long as the process.
    let (stream, log, stress) = unsafe {
        (
            take_variable(variables, STREAM),
            take_variable(variables, LOG),
            take_variable(variables, STRESS),
        )
    };
    if stream.is_none() && stress.is_none() {
        return;
    }
    // SAFETY: as above.
    unsafe { restore_preload_list(variables) };
    if !heap::reserve() {
        return;
    }
    status::catch(|| start(stream, stress.and_then(stressed)));
    if let (Some(_), Some(path)) = (stress, log) {
        LOG_PATH.store(path.as_ptr().cast_mut(), Relaxed);
    }
}

/// Starts the engine, with the main thread's timer.
fn start(stream: Option<&CStr>, stress: Option<StressConfig>) {
    let (config, clock, first_ns) = match stress {
        Some(stress) => {
            let config = SamplingConfig {
                stress: Some(stress),
                poll_ns: 1_000_000.min(50_000 + stress.between / 100),
                ..SAMPLING
            };
            (config, libc::CLOCK_MONOTONIC, stress.gap_ns)
        }
        None => (SAMPLING, libc::CLOCK_THREAD_CPUTIME_ID, engine::FIRST_GAP_NS),
    };
    let Some(recorder) = Recorder::open(stream.map(CStr::to_bytes_with_nul)) else { return };
    status::on();
    let started = Engine::start(recorder, config)
        .and_then(|()| engine::threads::start(engine::handler, clock, first_ns));
    if let Err(why) = started {
        status::off(why);
    }
}

/// For tests: the path of the file for the summary.
static LOG_PATH: AtomicPtr<i8> = AtomicPtr::new(std::ptr::null_mut());

/// Appends a line to a file.
fn append_line(path: &CStr, line: &str) {
    let path = path.to_bytes_with_nul();
    let Some(file) = system::open(path, libc::O_WRONLY | libc::O_APPEND) else { return };
    for text in [line, "\n"] {
        let arguments = [file, text.as_ptr() as usize, text.len(), 0, 0, 0];
        // SAFETY: the kernel reads the text. An error is ignored, as there is nobody to report it to.
        unsafe { system::call(libc::SYS_write, arguments) };
    }
    system::close(file);
}

/// The default schedule: bursts take 15% of the time on average.
const SAMPLING: SamplingConfig = SamplingConfig {
    warm: 1_000_000,
    warm_share: 128,
    counted_part: 4,
    share: 15,
    poll_ns: 1_000_000,
    close_ns: 100_000,
    stress: None,
};

/// Parses `100000:50000`, `100000:50000:20000`, or `100000:50000:20000:99`.
fn stressed(text: &CStr) -> Option<StressConfig> {
    let mut numbers = text.to_str().ok()?.split(':').map(|number| number.parse().ok());
    let (counted, gap_ns) = (numbers.next()??, numbers.next()??);
    let mut more = || numbers.next().flatten().unwrap_or(0);
    Some(StressConfig { counted, gap_ns, between: more(), panic_at: more() })
}

/// Removes a variable from the environment. Returns its value.
unsafe fn take_variable(variables: *mut *mut i8, name: &[u8]) -> Option<&'static CStr> {
    // SAFETY: the caller promises an array that ends in null, of strings that live as long as the process.
    unsafe {
        let mut at = variables;
        while !(*at).is_null() {
            let text = CStr::from_ptr(*at);
            if text.to_bytes().starts_with(name) {
                let value = CStr::from_ptr((*at).add(name.len()));
                while !(*at).is_null() {
                    *at = *at.add(1);
                    at = at.add(1);
                }
                return Some(value);
            }
            at = at.add(1);
        }
    }
    None
}

/// Restores LD_PRELOAD to its value before us, so that children are not sampled.
unsafe fn restore_preload_list(variables: *mut *mut i8) {
    // SAFETY: the caller promises an array that ends in null, of strings that live as long as the process.
    unsafe {
        let mut at = variables;
        while !(*at).is_null() && !CStr::from_ptr(*at).to_bytes().starts_with(PRELOAD) {
            at = at.add(1);
        }
        if (*at).is_null() {
            return;
        }
        let value = CStr::from_ptr((*at).add(PRELOAD.len())).to_bytes();
        match value.iter().position(|byte| *byte == b':') {
            Some(colon) => {
                let rest = value.len() - colon;
                let to = (*at).add(PRELOAD.len());
                std::ptr::copy(to.add(colon + 1), to, rest);
            }
            None => {
                take_variable(variables, PRELOAD);
            }
        }
    }
}

/// Calls [`destructor`] when the program calls exit(3) or returns from main.
#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = destructor;

extern "C" fn destructor() {
    let closed = status::catch(|| {
        // Before a seccomp filter took effect, the engine was closed: make no system call now.
        if !status::is_closing() || status::has_failed() {
            engine::close();
        }
    });
    let path = LOG_PATH.load(Relaxed);
    if let (Some(()), false, Some(Some(report))) =
        (closed, path.is_null(), status::catch(engine::report))
    {
        // SAFETY: a string of the environment, which lives as long as the process.
        append_line(unsafe { CStr::from_ptr(path) }, &report);
    }
}
