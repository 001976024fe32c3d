//! The engine's status in the consumer's memory, and its switch-off.
//!
//! No panic may end the program: each function that others call runs within [`catch`], which switches the
//! engine off.

use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering::*};

/// The number of reasons why bursts end ([`crate::engine::BurstEnd`]).
pub const WHYS: usize = 6;
const TEXT_BYTES: usize = 256;

/// `struct pt_native` (recorder/engines/stream.h).
#[repr(C)]
pub struct Status {
    state: AtomicU64,
    pub ends: [AtomicU64; WHYS],
    /// Instructions in bursts, and in counting translations.
    pub instructions: AtomicU64,
    pub counted: AtomicU64,
    /// The CPU time that the counted parts and their gaps cover.
    pub cpu_ns: AtomicU64,
    /// The number of threads that have no timer.
    pub unseen_threads: AtomicU64,
    text: [AtomicU8; TEXT_BYTES],
}

/// Reasons why there are no more bursts. recorder/src/native.rs reads the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum OffReason {
    NoMemory = 2,
    NoAvx = 3,
    NoTimers = 4,
    NoSignal = 5,
    Seccomp = 6,
    Failed = 7,
}
const ON: u64 = 1;

static OWN: Status = Status {
    state: AtomicU64::new(0),
    ends: [const { AtomicU64::new(0) }; WHYS],
    instructions: AtomicU64::new(0),
    counted: AtomicU64::new(0),
    cpu_ns: AtomicU64::new(0),
    unseen_threads: AtomicU64::new(0),
    text: [const { AtomicU8::new(0) }; TEXT_BYTES],
};
static STATUS: AtomicPtr<Status> = AtomicPtr::new((&raw const OWN).cast_mut());

/// True once the engine closes: no burst begins any more, and present ones end soon.
static CLOSING: AtomicBool = AtomicBool::new(false);
/// The number of threads that execute our code natively.
static INSIDE: AtomicU32 = AtomicU32::new(0);

pub fn status() -> &'static Status {
    // SAFETY: a static, or the consumer's memory, which stays mapped; all fields are atomics.
    unsafe { &*STATUS.load(Relaxed) }
}

/// Moves the status to the consumer's memory.
///
/// # Safety
/// The memory must stay mapped.
pub unsafe fn share(status: *mut Status) {
    STATUS.store(status, Relaxed);
}

/// Switches the engine on, and keeps panic messages from now on.
pub fn on() {
    std::panic::set_hook(Box::new(note));
    status().state.store(ON, Relaxed);
}

/// Switches the engine off. The first reason stays, except that [`OffReason::Failed`], which voids the
/// recording, replaces it.
pub fn off(why: OffReason) {
    CLOSING.store(true, Release);
    let state = &status().state;
    if why == OffReason::Failed {
        state.store(why as u64, Relaxed);
    } else {
        let _ = state.compare_exchange(ON, why as u64, Relaxed, Relaxed);
    }
}

pub fn has_failed() -> bool {
    status().state.load(Relaxed) == OffReason::Failed as u64
}

pub fn close_soon() {
    CLOSING.store(true, Release);
}

pub fn is_closing() -> bool {
    CLOSING.load(Relaxed)
}

/// A guard: its thread may make system calls of ours natively.
pub struct Inside(());

impl Inside {
    /// Creates a guard. Returns none once the engine is off.
    pub fn enter() -> Option<Inside> {
        INSIDE.fetch_add(1, SeqCst);
        let inside = Inside(());
        if CLOSING.load(SeqCst) { None } else { Some(inside) }
    }

    /// Returns true while a guard exists.
    pub fn is_anybody() -> bool {
        INSIDE.load(SeqCst) > 0
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, SeqCst);
    }
}

/// Runs some of our code. A panic in it switches the engine off; the result is then none.
pub fn catch<T>(work: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => Some(result),
        Err(payload) => {
            // To drop the payload could run any code.
            std::mem::forget(payload);
            off(OffReason::Failed);
            None
        }
    }
}

/// Keeps a panic's message in the status, in place of printing it into the program's output.
fn note(info: &PanicHookInfo<'_>) {
    let mut text = TextBuffer(0);
    if let Some(at) = info.location() {
        let file = at.file().rsplit('/').next().unwrap_or_default();
        let _ = std::fmt::Write::write_fmt(&mut text, format_args!("{file}:{}: ", at.line()));
    }
    let payload = info.payload();
    let said = payload.downcast_ref::<&str>().copied();
    let said = said.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let _ = std::fmt::Write::write_str(&mut text, said.unwrap_or("a panic"));
}

/// A writer to the status text: the number of bytes that it has written.
struct TextBuffer(usize);

impl std::fmt::Write for TextBuffer {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for byte in text.bytes() {
            // The last byte stays 0.
            if self.0 + 1 < TEXT_BYTES {
                status().text[self.0].store(byte, Relaxed);
                self.0 += 1;
            }
        }
        Ok(())
    }
}

/// Returns the panic's message, for tests.
pub fn text() -> String {
    let bytes: Vec<u8> = status().text.iter().map(|byte| byte.load(Relaxed)).collect();
    String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}
