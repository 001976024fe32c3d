//! The interface to the C half, which writes the stream (recorder/engines/native/pagetax.c).

use crate::cache::Block;
use crate::log_drain::{DrainCounts, Slow};
use crate::status::{self, Status};
use crate::system;
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

/// The use of accesses from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum StreamPhase {
    Skipped = 0,
    Warming = 1,
    Counted = 2,
}

/// The number of slots in each filter.
pub const SLOT_COUNT: u32 = 8192;

/// `struct pn_filter`: pages that TLBs certainly hold.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Filter {
    /// log2 of the filter's page size in bytes; 0: there is no filter.
    pub page_shift: u32,
    /// The address of the first slot.
    pub slots: u32,
}

/// `struct pn_side`: the filters of small and of large pages.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Side {
    small: Filter,
    large: Filter,
}

/// The filters of data and of code.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Sides {
    pub data: Side,
    pub code: Side,
}

impl Side {
    /// Returns the filters in use, that of small pages first.
    pub fn filters(self) -> impl Iterator<Item = Filter> {
        [self.small, self.large].into_iter().filter(|filter| filter.page_shift != 0)
    }
}

impl Filter {
    /// Returns the first address of the page that contains an address.
    pub fn page(self, address: u64) -> u64 {
        address >> self.page_shift << self.page_shift
    }

    /// Returns the address of the slot for an address.
    pub fn slot(self, address: u64) -> u32 {
        self.slots + ((address >> self.page_shift) as u32 % SLOT_COUNT) * 16
    }
}

/// The C function that processes a block.
pub const SLOW: Slow = pn_run;

/// The stream of this process. Only the thread in translated code uses it.
pub struct Recorder(());

impl Recorder {
    /// Opens the consumer's memory at a path, which ends in 0. Without a path, records are discarded.
    pub fn open(path: Option<&[u8]>) -> Option<Recorder> {
        // SAFETY: only returns a size.
        let bytes = unsafe { pn_table_bytes() } as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let tables = system::map(bytes, protection, libc::MAP_32BIT)? as *mut u8;
        let Some(path) = path else {
            // SAFETY: without memory it writes only to its own state and the tables.
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
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe { system::call(libc::SYS_mmap, arguments) };
        system::close(file);
        if bytes <= 0 || memory <= 0 {
            return None;
        }
        // SAFETY: memory of that many bytes, which stays mapped.
        let open = unsafe { pn_open(memory as *mut u8, bytes as u64, system::process(), tables) };
        if open == 0 {
            return None;
        }
        // SAFETY: part of the memory that stays mapped.
        unsafe { status::share(pn_native()) };
        Some(Recorder(()))
    }

    pub fn begin(&mut self, thread: u32) {
        // SAFETY: the stream is open, and only one thread at a time has the engine.
        unsafe { pn_begin(thread) }
    }

    /// Begins a phase. For [`StreamPhase::Counted`], `gap` is the thread's instructions since it last began
    /// to count.
    pub fn phase(&mut self, phase: StreamPhase, gap: u64) {
        // SAFETY: as above.
        unsafe { pn_phase(phase as u32, gap) }
    }

    /// Returns the length that the consumer wants for the next warm-up, in instructions; 0: not known yet.
    pub fn warm_up(&self) -> u64 {
        // SAFETY: as above.
        unsafe { pn_warm_up() }.into()
    }

    /// Expects huge pages from now on. Returns true if the filters have changed.
    pub fn expect_large(&mut self) -> bool {
        // SAFETY: as above.
        unsafe { pn_expect_large() != 0 }
    }

    /// Reports that memory was unmapped.
    pub fn gone(&mut self, start: u64, length: u64) {
        // SAFETY: as above.
        unsafe { pn_gone(start, length) }
    }

    /// Returns the page filters.
    pub fn sides(&self) -> Sides {
        let mut sides = Sides::default();
        // SAFETY: C writes one `Sides`.
        unsafe { pn_sides(&mut sides) };
        sides
    }

    /// Reports what the generated code has taken from logs. Returns the instructions in these logs.
    pub fn took(&mut self, counts: DrainCounts) -> u64 {
        // SAFETY: as above.
        unsafe { pn_took(counts.instructions(), counts.accesses()) }
    }

    /// Ends the stream and waits until the consumer has read it.
    pub fn close(&mut self) {
        // SAFETY: as above.
        unsafe { pn_close() }
    }
}
