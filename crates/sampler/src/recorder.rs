//! The C half, which writes the stream (recorder/engines/native/pagetax.c).

use crate::cache::Block;
use crate::status::{self, Status};
use crate::system;
use crate::taking::{Counts, Slow};
use std::ptr;

unsafe extern "C" {
    fn pn_table_bytes() -> u64;
    fn pn_open(memory: *mut u8, bytes: u64, pid: u32, tables: *mut u8) -> i32;
    fn pn_begin(thread: u32);
    fn pn_phase(phase: u32, gap: u64);
    fn pn_warm_up() -> u32;
    fn pn_expect_large() -> i32;
    fn pn_gone(start: u64, length: u64);
    fn pn_sides(sides: *mut Sides);
    fn pn_run(block: *const Block, frame: *const u64, fs: u64, clock: u64) -> u64;
    fn pn_took(instructions: u64, accesses: u64) -> u64;
    fn pn_close();
    fn pn_native() -> *mut Status;
}

/// What accesses are worth from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Phase {
    Skipped = 0,
    Warming = 1,
    Counted = 2,
}

/// Slots of each filter.
pub const SLOT_COUNT: u32 = 8192;

/// `struct pn_filter`: pages that TLBs hold for certain.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Filter {
    /// log2 of its pages' size; 0: there is none.
    pub page_shift: u32,
    /// Where the first slot is.
    pub slots: u32,
}

/// `struct pn_side`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Side {
    small: Filter,
    large: Filter,
}

/// Of data and of code.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Sides {
    pub data: Side,
    pub code: Side,
}

impl Side {
    /// Its filters, that of small pages first.
    pub fn filters(self) -> impl Iterator<Item = Filter> {
        [self.small, self.large].into_iter().filter(|filter| filter.page_shift != 0)
    }
}

impl Filter {
    /// The first address of the page of an address.
    pub fn page(self, address: u64) -> u64 {
        address >> self.page_shift << self.page_shift
    }

    /// Where the slot of an address is.
    pub fn slot(self, address: u64) -> u32 {
        self.slots + ((address >> self.page_shift) as u32 % SLOT_COUNT) * 16
    }
}

/// C does a block.
pub const SLOW: Slow = pn_run;

/// The stream of this process; used by the thread that is in a burst.
pub struct Recorder(());

impl Recorder {
    /// Of the consumer's memory at a path, which ends in 0; without a path, of nobody.
    pub fn open(path: Option<&[u8]>) -> Option<Recorder> {
        // SAFETY: only says how many.
        let bytes = unsafe { pn_table_bytes() } as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let tables = system::map(bytes, protection, libc::MAP_32BIT)? as *mut u8;
        let Some(path) = path else {
            // SAFETY: what is written into is its own, and the tables.
            unsafe { pn_open(ptr::null_mut(), 0, 0, tables) };
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
        let open = unsafe { pn_open(memory as *mut u8, bytes as u64, system::process(), tables) };
        if open == 0 {
            return None;
        }
        // SAFETY: in the memory that stays.
        unsafe { status::share(pn_native()) };
        Some(Recorder(()))
    }

    pub fn begin(&mut self, thread: u32) {
        // SAFETY: open, and of one caller at a time.
        unsafe { pn_begin(thread) }
    }

    /// `gap`: of one that counts, the thread's instructions since it last counted.
    pub fn phase(&mut self, phase: Phase, gap: u64) {
        // SAFETY: as above.
        unsafe { pn_phase(phase as u32, gap) }
    }

    /// Instructions that the next warm-up should have; 0: nobody knows yet.
    pub fn warm_up(&self) -> u64 {
        // SAFETY: as above.
        unsafe { pn_warm_up() }.into()
    }

    /// From now on there may be large pages; whether the filters are others now.
    pub fn expect_large(&mut self) -> bool {
        // SAFETY: as above.
        unsafe { pn_expect_large() != 0 }
    }

    /// Memory was unmapped.
    pub fn gone(&mut self, start: u64, length: u64) {
        // SAFETY: as above.
        unsafe { pn_gone(start, length) }
    }

    /// The page filters.
    pub fn sides(&self) -> Sides {
        let mut sides = Sides::default();
        // SAFETY: C writes as many.
        unsafe { pn_sides(&mut sides) };
        sides
    }

    /// Logs were taken; how many instructions that were.
    pub fn took(&mut self, counts: Counts) -> u64 {
        // SAFETY: as above.
        unsafe { pn_took(counts.instructions(), counts.accesses()) }
    }

    /// All was written; waits until it is read.
    pub fn close(&mut self) {
        // SAFETY: as above.
        unsafe { pn_close() }
    }
}
