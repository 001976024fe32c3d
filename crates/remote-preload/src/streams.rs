//! The C library's list of streams. In the child of a fork it opens the lock of each stream before our handler runs
//! there.

use crate::threads::next;
use std::ffi::CStr;
use std::sync::atomic::AtomicUsize;

/// The start of a stream, which has been so since 1999: <bits/types/struct_FILE.h>.
#[repr(C)]
struct FileStream {
    _flags: i32,
    _buffers: [usize; 12],
    chain: *const FileStream,
    _numbers: [u64; 3],
    lock: *const u8,
}

/// The list of all streams, held: none comes or goes. The lock is recursive, so fork(3) may take it once more.
pub struct Streams {
    first: *const FileStream,
}

type Call = unsafe extern "C" fn();

static UNLOCK: AtomicUsize = AtomicUsize::new(0);
static RESET: AtomicUsize = AtomicUsize::new(0);

fn call(name: &'static CStr, found: &AtomicUsize) {
    let address = next(name, found);
    if address != 0 {
        // SAFETY: the C library's own function of that name takes and returns nothing.
        unsafe { std::mem::transmute::<usize, Call>(address)() };
    }
}

impl Streams {
    /// Takes the list. Where the C library has none, there are no streams in it.
    pub fn hold() -> Streams {
        static LOCK: AtomicUsize = AtomicUsize::new(0);
        static LIST: AtomicUsize = AtomicUsize::new(0);
        // Looked up now, as a thread of the parent's may hold the loader's lock in the child.
        next(c"_IO_list_resetlock", &RESET);
        call(c"_IO_list_lock", &LOCK);
        let list = next(c"_IO_list_all", &LIST) as *const *const FileStream;
        // SAFETY: the C library's variable of that name is a pointer to a stream, or null; see above.
        let first = if list.is_null() { std::ptr::null() } else { unsafe { list.read_volatile() } };
        Streams { first }
    }

    /// Returns where the streams and their locks are. Reads them, and so has their memory brought back.
    pub fn places(&self) -> Vec<usize> {
        let mut places = Vec::new();
        let mut at = self.first;
        while !at.is_null() {
            // SAFETY: the list is held, so its streams are live.
            let (chain, lock) = unsafe { ((&raw const (*at).chain).read_volatile(), (*at).lock) };
            // SAFETY: of a live stream.
            let end = unsafe { (&raw const (*at).lock).cast::<u8>() };
            places.extend([at as usize, end as usize, lock as usize]);
            at = chain;
        }
        places
    }

    /// Opens the list in the child of a fork, where only the thread that forked is left. The C library has opened it
    /// there already, so it must not be counted down once more; not so if the process was forked past it.
    pub fn open_in_child(self) {
        call(c"_IO_list_resetlock", &RESET);
        std::mem::forget(self);
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        call(c"_IO_list_unlock", &UNLOCK);
    }
}
