//! The C half, which writes the stream (recorder/engines/native/pagetax.c).

use crate::area::SLOTS;
use crate::cache::Block;
use crate::system;
use std::ptr;

unsafe extern "C" {
    fn pn_open(memory: *mut u8, bytes: u64, pid: u32) -> i32;
    fn pn_begin(thread: u32);
    fn pn_phase(phase: u32, stands_for: u64);
    fn pn_is_warm() -> i32;
    fn pn_gone(start: u64, length: u64);
    fn pn_take(blocks: *const Block, first: *const [u64; SLOTS], count: u64, fs: u64) -> u64;
    fn pn_close();
}

/// What accesses are worth from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Phase {
    Skipped = 0,
    Warming = 1,
    Counted = 2,
}

/// The stream of this process; used by the thread that is in a burst.
pub struct Recorder(());

impl Recorder {
    /// Of the consumer's memory at a path, which ends in 0; without a path, of nobody.
    pub fn open(path: Option<&[u8]>) -> Option<Recorder> {
        let Some(path) = path else {
            // SAFETY: what is written into is its own.
            unsafe { pn_open(ptr::null_mut(), 0, 0) };
            return Some(Recorder(()));
        };
        let file = system::open(path, libc::O_RDWR)?;
        let bytes = {
            let arguments = [file, 0, libc::SEEK_END as usize, 0, 0, 0];
            // SAFETY: touches no memory.
            unsafe { system::call(libc::SYS_lseek, arguments) }
        };
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
        let arguments = [0, bytes as usize, protection, libc::MAP_SHARED as usize, file, 0];
        // SAFETY: a new mapping at a place of the kernel's choice.
        let memory = unsafe { system::call(libc::SYS_mmap, arguments) };
        system::close(file);
        if bytes <= 0 || memory <= 0 {
            return None;
        }
        // SAFETY: memory of that many bytes, which stays.
        let open = unsafe { pn_open(memory as *mut u8, bytes as u64, system::process()) };
        (open != 0).then_some(Recorder(()))
    }

    pub fn begin(&mut self, thread: u32) {
        // SAFETY: open, and of one caller at a time.
        unsafe { pn_begin(thread) }
    }

    /// `stands_for`: of how many instructions these that count were drawn; 0: not known.
    pub fn phase(&mut self, phase: Phase, stands_for: u64) {
        // SAFETY: as above.
        unsafe { pn_phase(phase as u32, stands_for) }
    }

    /// Whether the consumer has seen enough since [`Phase::Warming`].
    pub fn is_warm(&self) -> bool {
        // SAFETY: as above.
        unsafe { pn_is_warm() != 0 }
    }

    /// Memory was unmapped.
    pub fn gone(&mut self, start: u64, length: u64) {
        // SAFETY: as above.
        unsafe { pn_gone(start, length) }
    }

    /// Takes the frames of a log, the last ones first; how many instructions they stand for.
    pub fn take(&mut self, blocks: &[Block], log: &[[u64; SLOTS]], fs: u64) -> u64 {
        let Some(first) = log.last() else { return 0 };
        // SAFETY: frames name blocks of the list, and these their accesses; C goes down from the last
        // frame by as many as there are.
        unsafe { pn_take(blocks.as_ptr(), first, log.len() as u64, fs) }
    }

    /// All was written; waits until it is read.
    pub fn close(&mut self) {
        // SAFETY: as above.
        unsafe { pn_close() }
    }
}
