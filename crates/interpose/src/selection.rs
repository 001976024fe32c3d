//! The choice of malloc's and mmap's memory that gets large pages, and a log of all such memory.
//!
//! Memory is named by what survives a restart: its kind, the size class of a mapping, and its bytes in the
//! order of allocation. By default all is chosen. [`only`] restricts that to ranges, for programs that
//! allocate in the same order each time. [`log_to`] names a file that gets a line for each piece of memory:
//! `KIND CLASS OFFSET START BYTES`.

use crate::system::{self, Decimal};
use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// The kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The brk heap of glibc's malloc.
    Heap,
    /// Arenas of malloc for threads.
    Arena,
    /// Large chunks of malloc, and the program's own mappings.
    Mapping,
}

/// A range that gets large pages.
#[derive(Debug, Clone)]
pub struct Selection {
    /// The kind of memory.
    pub kind: Kind,
    /// The size class of mappings, a power of two; 0 for all.
    pub class_bytes: u64,
    /// The bytes in the order of allocation.
    pub range: Range<u64>,
}

/// The number of ranges that are kept.
pub const SELECTIONS_MAX: usize = 64;
/// The length of the log's path, in bytes, with its null.
const PATH_BYTES_MAX: usize = 512;
const CLASSES: usize = 64;

static IS_RESTRICTED: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Kind, class, start and end of each range.
static SELECTIONS: [[AtomicU64; 4]; SELECTIONS_MAX] =
    [const { [const { AtomicU64::new(0) }; 4] }; SELECTIONS_MAX];
static IS_LOGGED: AtomicBool = AtomicBool::new(false);
static PATH: [AtomicU8; PATH_BYTES_MAX] = [const { AtomicU8::new(0) }; PATH_BYTES_MAX];
/// The bytes of mappings so far, by size class.
static MAPPED: [AtomicU64; CLASSES] = [const { AtomicU64::new(0) }; CLASSES];

/// Restricts large pages to these ranges. The caller must be the process's only thread. Returns false if they
/// are too many; then the last ones are left out.
pub fn only(selections: impl Iterator<Item = Selection>) -> bool {
    IS_RESTRICTED.store(true, Relaxed);
    let mut fit = true;
    for (at, selection) in selections.enumerate() {
        let Some(words) = SELECTIONS.get(at) else {
            fit = false;
            break;
        };
        let values = [
            selection.kind as u64,
            selection.class_bytes,
            selection.range.start,
            selection.range.end,
        ];
        words.iter().zip(values).for_each(|(word, value)| word.store(value, Relaxed));
        COUNT.store(at + 1, Relaxed);
    }
    fit
}

/// Appends a line to this file for each piece of memory from now on. A path that is too long is ignored.
pub fn log_to(path: &CStr) {
    let bytes = path.to_bytes_with_nul();
    if bytes.len() <= PATH_BYTES_MAX {
        PATH.iter().zip(bytes).for_each(|(to, from)| to.store(*from, Relaxed));
        IS_LOGGED.store(true, Relaxed);
    }
}

/// Returns true if memory is logged.
pub(crate) fn is_logged() -> bool {
    IS_LOGGED.load(Relaxed)
}

/// Returns true if memory is named by its order.
pub(crate) fn is_in_order() -> bool {
    is_logged() || is_restricted()
}

/// Returns true if ranges were named.
pub(crate) fn is_restricted() -> bool {
    IS_RESTRICTED.load(Relaxed)
}

/// Advises huge pages for the chosen part of new memory: all of it, from the start of its first base page on,
/// or whole huge pages of ranges.
pub(crate) fn advise(kind: Kind, offset: usize, start: usize, bytes: usize) {
    place(kind, 0, offset as u64, start, bytes);
}

/// Advises the chosen part of a new mapping. `asked` is the length that the program asked for.
pub(crate) fn advise_mapping(asked: usize, start: usize, bytes: usize) {
    let class = asked.max(1).ilog2() as usize;
    let before = MAPPED.get(class).map_or(0, |total| total.fetch_add(bytes as u64, Relaxed));
    place(Kind::Mapping, 1 << class, before, start, bytes);
}

fn place(kind: Kind, class: u64, offset: u64, start: usize, bytes: usize) {
    let errno = system::errno();
    if is_logged() {
        log(kind, class, offset, start, bytes);
    }
    if is_restricted() {
        for_chosen(kind, class, offset..offset + bytes as u64, |chosen| {
            let from = (start as u64 + (chosen.start - offset)).next_multiple_of(LARGE_BYTES);
            let to = (start as u64 + (chosen.end - offset)) & !(LARGE_BYTES - 1);
            if from < to {
                madvise(from as usize, (to - from) as usize);
            }
        });
    } else {
        let first = start & !(system::base_page() as usize - 1);
        madvise(first, start + bytes - first);
    }
    system::set_errno(errno);
}

/// The size of a huge page of x86-64, and of arm64 with base pages of 4 KiB.
const LARGE_BYTES: u64 = 2 << 20;

fn madvise(start: usize, bytes: usize) {
    // SAFETY: private memory of the program; the advice changes no contents. If nothing is mapped there any
    // more, the call fails.
    unsafe { libc::madvise(start as *mut c_void, bytes, libc::MADV_HUGEPAGE) };
}

/// Returns true if the huge page at this offset of the heap or an arena is chosen.
pub(crate) fn is_chosen(kind: Kind, offset: usize) -> bool {
    let first = offset as u64 & !(LARGE_BYTES - 1);
    let mut all = !is_restricted();
    for_chosen(kind, 0, first..first + LARGE_BYTES, |chosen| {
        all |= chosen == (first..first + LARGE_BYTES);
    });
    all
}

fn for_chosen(kind: Kind, class: u64, memory: Range<u64>, mut each: impl FnMut(Range<u64>)) {
    for words in SELECTIONS.iter().take(COUNT.load(Relaxed)) {
        let [of, named, start, end] = words.each_ref().map(|word| word.load(Relaxed));
        if of == kind as u64 && (named == 0 || named == class) {
            let chosen = memory.start.max(start)..memory.end.min(end);
            if chosen.start < chosen.end {
                each(chosen);
            }
        }
    }
}

/// Appends a line to the log. A failure leaves it out: there is nowhere to report it.
fn log(kind: Kind, class: u64, offset: u64, start: usize, bytes: usize) {
    let mut path = [0u8; PATH_BYTES_MAX];
    path.iter_mut().zip(&PATH).for_each(|(to, from)| *to = from.load(Relaxed));
    let mut line = [0u8; 128];
    let mut len = 0;
    let mut push = |text: &[u8]| {
        for byte in text {
            if let Some(place) = line.get_mut(len) {
                *place = *byte;
                len += 1;
            }
        }
    };
    push(match kind {
        Kind::Heap => b"heap",
        Kind::Arena => b"arena",
        Kind::Mapping => b"mapping",
    });
    for number in [class, offset, start as u64, bytes as u64] {
        push(b" ");
        push(Decimal::of(number).digits());
    }
    push(b"\n");
    // SAFETY: the path ends in null, the bytes are initialised, and the descriptor is closed here.
    unsafe {
        let fd =
            libc::open(path.as_ptr().cast(), libc::O_WRONLY | libc::O_APPEND | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, line.as_ptr().cast(), len);
            libc::close(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_choose_memory_by_kind_class_and_offset() {
        let range = |from: u64, to: u64| from << 20..to << 20;
        let heap = Selection { kind: Kind::Heap, class_bytes: 0, range: range(4, 8) };
        let mapping = Selection { kind: Kind::Mapping, class_bytes: 32 << 20, range: range(0, 40) };
        assert!(is_chosen(Kind::Heap, 0), "all memory, until ranges are named");
        let too_many = std::iter::repeat_n(heap.clone(), SELECTIONS_MAX + 1);
        assert!(!only(too_many));
        assert!(only([heap, mapping].into_iter()));
        COUNT.store(2, Relaxed);
        let chosen = [0, 4, 6, 8].map(|at: usize| is_chosen(Kind::Heap, at << 20));
        assert_eq!(chosen, [false, true, true, false]);
        assert!(!is_chosen(Kind::Arena, 4 << 20));
        let mut found = Vec::new();
        for_chosen(Kind::Mapping, 32 << 20, range(30, 60), |chosen| found.push(chosen));
        for_chosen(Kind::Mapping, 64 << 20, range(0, 60), |chosen| found.push(chosen));
        assert_eq!(found, [range(30, 40)]);
    }
}
