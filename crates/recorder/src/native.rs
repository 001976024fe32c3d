//! The native engine's status. It lies in memory that outlives the program, so that it survives signals,
//! _exit(2) and exec.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

/// The number of reasons for which bursts end, in `struct pt_native`.
const WHYS: usize = 6;
const TEXT_BYTES: usize = 256;

/// The layout of `struct pt_native`, which the engine writes.
#[repr(C)]
pub struct Shared {
    state: AtomicU64,
    ends: [AtomicU64; WHYS],
    instructions: AtomicU64,
    counted: AtomicU64,
    cpu_ns: AtomicU64,
    unseen_threads: AtomicU64,
    text: [AtomicU8; TEXT_BYTES],
}

impl Default for Shared {
    fn default() -> Shared {
        Shared {
            state: AtomicU64::new(0),
            ends: [const { AtomicU64::new(0) }; WHYS],
            instructions: AtomicU64::new(0),
            counted: AtomicU64::new(0),
            cpu_ns: AtomicU64::new(0),
            unseen_threads: AtomicU64::new(0),
            text: [const { AtomicU8::new(0) }; TEXT_BYTES],
        }
    }
}

/// The engine's state: on, or why it is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The library was not loaded, or could not reach the recorder.
    NotStarted,
    /// It sampled the program to its end.
    On,
    /// The kernel gives no memory below 2 GiB that is written and executed.
    NoMemory,
    /// The processor has no AVX.
    NoAvx,
    /// The kernel has no per-thread timers.
    NoTimers,
    /// The C library does not reserve signal 32.
    NoSignal,
    /// The program installed a system call filter.
    Seccomp,
    /// The engine found an internal error.
    Failed,
}

impl State {
    fn of(word: u64) -> State {
        match word {
            0 => State::NotStarted,
            1 => State::On,
            2 => State::NoMemory,
            3 => State::NoAvx,
            4 => State::NoTimers,
            5 => State::NoSignal,
            6 => State::Seccomp,
            _ => State::Failed,
        }
    }

    /// Returns why the recording stopped, if it did.
    fn why_off(self) -> Option<&'static str> {
        match self {
            State::On => None,
            State::NotStarted => Some("the program did not load its library"),
            State::NoMemory => {
                Some("the kernel gave it no memory below 2 GiB that is both written and executed")
            }
            State::NoAvx => Some("this processor has no AVX"),
            State::NoTimers => Some("the kernel has no per-thread timers"),
            State::NoSignal => Some("the C library reserves no signal for its timers"),
            State::Seccomp => Some("the program installed a system call filter (seccomp)"),
            State::Failed => Some("it found an internal error"),
        }
    }
}

/// A copy of the engine's status, taken when the program ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The engine's state at the end.
    pub state: State,
    /// Bursts by how they ended: complete, system call, code, signal, fault. The last did not begin.
    ends: [u64; WHYS],
    /// The instructions that ran in bursts.
    instructions: u64,
    /// Instructions counted between bursts.
    counted: u64,
    /// CPU time that bursts represent.
    pub seen_ns: u64,
    /// The program's total CPU time.
    pub cpu_ns: u64,
    unseen_threads: u64,
    /// The location of an internal error.
    text: String,
}

impl Shared {
    /// Reads the status of a program that used this much CPU time.
    pub fn read(&self, cpu_ns: u64) -> Status {
        let text: Vec<u8> = self.text.iter().map(|byte| byte.load(Relaxed)).collect();
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        Status {
            state: State::of(self.state.load(Relaxed)),
            ends: self.ends.each_ref().map(|count| count.load(Relaxed)),
            instructions: self.instructions.load(Relaxed),
            counted: self.counted.load(Relaxed),
            seen_ns: self.cpu_ns.load(Relaxed),
            cpu_ns,
            unseen_threads: self.unseen_threads.load(Relaxed),
            text: String::from_utf8_lossy(text).into_owned(),
        }
    }
}

impl Status {
    /// Returns the error that makes the recording invalid, if there is one.
    pub fn failure(&self) -> Option<String> {
        (self.state == State::Failed).then(|| {
            format!(
                "the recording failed: {}; the program went on unrecorded, and its figures are invalid",
                self.text
            )
        })
    }

    /// Returns the status in lines of text.
    pub fn report(&self) -> Vec<String> {
        let [done, call, code, signal, fault, _] = self.ends;
        let mut lines = vec![format!(
            "bursts represent {} of {} ms of CPU time; {done} are complete; ended early: {call} at a system call \
             that may block or changes code, {code} at JIT-compiled or untranslatable code, {signal} for a \
             signal, {fault} at an instruction that faults; instructions in bursts: {}, counted between them: {}",
            self.seen_ns / 1_000_000,
            self.cpu_ns / 1_000_000,
            self.instructions,
            self.counted,
        )];
        lines.extend(self.state.why_off().map(|why| {
            format!("the native engine stopped: {why}; the rest of the program was not recorded")
        }));
        if self.unseen_threads > 0 {
            lines.push(format!("{} threads had no timer and no bursts", self.unseen_threads));
        }
        if code * 4 > done && done > 0 {
            lines.push(
                "much of the program is not in the sample: use --engine valgrind, which records all of it".into(),
            );
        }
        lines.extend(self.why_none().map(|why| format!("no bursts: {why}")));
        lines
    }

    /// Returns why there are no bursts, if there are none.
    fn why_none(&self) -> Option<String> {
        let [done, call, code, signal, fault, handler] = self.ends;
        if done > 0 || self.state != State::On {
            return None;
        }
        let why = match () {
            () if handler > 0 => "the program handles SIGSYS, or its threads have a shadow stack",
            () if code > call + signal + fault => "the program compiles its code at run time",
            () if call + signal + fault > 0 => "all ended early, as above",
            () if self.cpu_ns < 50_000_000 => "the program used too little CPU time",
            () => {
                "no thread used enough CPU time, or the threads that did were made by clone(2), block signal 32, or \
                 belong to a program started by exec"
            }
        };
        Some(why.into())
    }
}

/// The size in stream.h.
const _: () = assert!(size_of::<Shared>() == 8 * (5 + WHYS) + TEXT_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bursts_have_a_reason() {
        let shared = Shared::default();
        let said = |shared: &Shared, cpu_ns| shared.read(cpu_ns).report().join("\n");
        assert!(said(&shared, 9_000_000_000).contains("did not load its library"));
        shared.state.store(1, Relaxed);
        assert!(said(&shared, 1_000_000).contains("too little CPU time"));
        assert!(said(&shared, 9_000_000_000).contains("used enough CPU time"));
        shared.ends[2].store(9, Relaxed);
        assert!(said(&shared, 9_000_000_000).contains("at run time"));
        shared.ends[5].store(1, Relaxed);
        assert!(said(&shared, 9_000_000_000).contains("SIGSYS"));
        shared.ends[0].store(1, Relaxed);
        assert!(!said(&shared, 9_000_000_000).contains("no bursts"));
        assert_eq!(shared.read(0).failure(), None);
        shared.state.store(7, Relaxed);
        shared.text.iter().zip(b"way.rs:73").for_each(|(to, byte)| to.store(*byte, Relaxed));
        assert!(shared.read(0).failure().unwrap().contains("failed: way.rs:73;"));
    }
}
