//! libpagetax_sampler.so: records bursts of a program. It runs in copies of its code that log, and in between in copies
//! that only count its instructions:
//!
//! ```text
//!  program, natively ──timer's signal──▶ copies of its blocks, which count ──so many counted──▶ copies, which log
//!          ▲                                 │           ▲                                          │     │ full
//!          └── a call that may wait, a signal┘           └────────────── burst over ────────────────┘     ▼
//!                                                                                  pages, filtered ──▶ pagetax
//! ```
//!
//! Bursts are drawn by instructions, so that all are as likely. What a thread does natively is reckoned by its pace
//! in copies.
//!
//! `burst` begins, feeds and ends bursts, `burst::way` is a thread's way to the next one; `translate` copies code,
//! `cache` keeps it, `stubs` is the code in between, `taking` what takes the log; `calls` says which system calls may
//! be made inside, `maps` what is code at all; `threads` has the timers. The C half (recorder/engines/native) filters pages and writes the stream, as the other engines do.
//!
//! Invariants: the program's registers, flags, stack, signals and memory are at each of its own instructions
//! what they would be natively; whatever cannot be kept so ends the burst first. Nothing here uses the
//! program's heap or its errno.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

mod area;
mod burst;
mod cache;
mod calls;
mod emit;
mod faults;
mod filters;
mod heap;
mod maps;
mod recorder;
mod status;
mod stubs;
mod system;
mod taking;
mod threads;
mod translate;

use burst::{Engine, Plan, Stress};
use recorder::Recorder;
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// Where the stream goes, and what stood in LD_PRELOAD before us.
const STREAM: &[u8] = b"PAGETAX_SAMPLER_STREAM=";
/// Tests: a file for what is to be said at the end.
const LOG: &[u8] = b"PAGETAX_SAMPLER_LOG=";
/// Tests: instructions of a burst at most, nanoseconds until the next one, and instructions that are only counted
/// before each at least, with colons between them; and how often copies come back until the engine panics.
const STRESS: &[u8] = b"PAGETAX_SAMPLER_STRESS=";
const PRELOAD: &[u8] = b"LD_PRELOAD=";

/// Runs before main and before any thread of the program.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: unsafe extern "C" fn(i32, *const *const i8, *mut *mut i8) = constructor;

unsafe extern "C" fn constructor(_: i32, _: *const *const i8, variables: *mut *mut i8) {
    // SAFETY: the C library hands a constructor main's own arguments: an array that ends in null, of
    // strings that live as long as the process.
    let (stream, log, stress) =
        unsafe { (taken(variables, STREAM), taken(variables, LOG), taken(variables, STRESS)) };
    if stream.is_none() && stress.is_none() {
        return;
    }
    // SAFETY: as above.
    unsafe { forget_us(variables) };
    if !heap::reserve() {
        return;
    }
    status::catch(|| start(stream, stress.and_then(stressed)));
    if let (Some(_), Some(path)) = (stress, log) {
        LOG_PATH.store(path.as_ptr().cast_mut(), Relaxed);
    }
}

/// Begins with the main thread.
fn start(stream: Option<&CStr>, stress: Option<Stress>) {
    let (plan, clock, first_ns) = match stress {
        Some(stress) => {
            let plan = Plan {
                stress: Some(stress),
                poll_ns: 1_000_000.min(50_000 + stress.between / 100),
                ..PLAN
            };
            (plan, libc::CLOCK_MONOTONIC, stress.gap_ns)
        }
        None => (PLAN, libc::CLOCK_THREAD_CPUTIME_ID, burst::FIRST_GAP_NS),
    };
    let Some(recorder) = Recorder::open(stream.map(CStr::to_bytes_with_nul)) else { return };
    status::on();
    let started = Engine::start(recorder, plan)
        .and_then(|()| threads::start(burst::handler, clock, first_ns));
    if let Err(why) = started {
        status::off(why);
    }
}

/// Tests: where to say how bursts ended.
static LOG_PATH: AtomicPtr<i8> = AtomicPtr::new(std::ptr::null_mut());

/// Adds a line to the log.
fn say(path: &CStr, line: &str) {
    let path = path.to_bytes_with_nul();
    let Some(file) = system::open(path, libc::O_WRONLY | libc::O_APPEND) else { return };
    for text in [line, "\n"] {
        let arguments = [file, text.as_ptr() as usize, text.len(), 0, 0, 0];
        // SAFETY: the kernel reads the text. If it cannot be written there is nobody to tell.
        unsafe { system::call(libc::SYS_write, arguments) };
    }
    system::close(file);
}

/// Bursts take a seventh of the time, on the average.
const PLAN: Plan = Plan {
    warm: 1_000_000,
    warm_share: 128,
    counted_part: 4,
    share: 15,
    poll_ns: 1_000_000,
    close_ns: 100_000,
    stress: None,
};

/// `100000:50000`, `100000:50000:20000`, or `100000:50000:20000:99`
fn stressed(text: &CStr) -> Option<Stress> {
    let mut numbers = text.to_str().ok()?.split(':').map(|number| number.parse().ok());
    let (counted, gap_ns) = (numbers.next()??, numbers.next()??);
    let mut more = || numbers.next().flatten().unwrap_or(0);
    Some(Stress { counted, gap_ns, between: more(), panic_at: more() })
}

/// The value of a variable, which leaves the environment.
unsafe fn taken(variables: *mut *mut i8, name: &[u8]) -> Option<&'static CStr> {
    // SAFETY: as promised.
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

/// LD_PRELOAD is what it was before us: children are not sampled.
unsafe fn forget_us(variables: *mut *mut i8) {
    // SAFETY: as promised.
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
                taken(variables, PRELOAD);
            }
        }
    }
}

/// Runs when the program exits by itself.
#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = destructor;

extern "C" fn destructor() {
    let closed = status::catch(|| {
        // Where the kernel may refuse our calls, all was said before.
        if !status::is_closing() || status::has_failed() {
            burst::close();
        }
    });
    let path = LOG_PATH.load(Relaxed);
    if let (Some(()), false, Some(Some(report))) =
        (closed, path.is_null(), status::catch(burst::report))
    {
        // SAFETY: a string of the environment's, which stays.
        say(unsafe { CStr::from_ptr(path) }, &report);
    }
}
