//! The C library's list of streams. In the child of a fork, the C library resets the lock of each
//! stream before our handler runs there.

use crate::threads::next;
use std::ffi::CStr;
use std::sync::atomic::AtomicUsize;

/// The first fields of a stream, unchanged since 1999: <bits/types/struct_FILE.h>.
#[repr(C)]
struct FileStream {
    _flags: i32,
    _buffers: [usize; 12],
    chain: *const FileStream,
    _numbers: [u64; 3],
    lock: *const u8,
}

/// The locked list of all streams: none is opened or closed. The lock is recursive, so fork(3) may
/// take it again.
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
    /// Locks the list. If the C library has no such list, it is empty.
    pub fn lock() -> Streams {
        static LOCK: AtomicUsize = AtomicUsize::new(0);
        static LIST: AtomicUsize = AtomicUsize::new(0);
        // Look it up now: in the child, a thread of the parent may hold the loader's lock.
        next(c"_IO_list_resetlock", &RESET);
        call(c"_IO_list_lock", &LOCK);
        let list = next(c"_IO_list_all", &LIST) as *const *const FileStream;
        // SAFETY: the C library's variable of that name is a pointer to a stream, or null; see above.
        let first = if list.is_null() { std::ptr::null() } else { unsafe { list.read_volatile() } };
        Streams { first }
    }

    /// Returns the addresses of the streams and of their locks. Reading them makes their pages
    /// resident.
    pub fn addresses(&self) -> Vec<usize> {
        let mut addresses = Vec::new();
        let mut at = self.first;
        while !at.is_null() {
            // SAFETY: the list is locked, so its streams are live.
            let (chain, lock) = unsafe { ((&raw const (*at).chain).read_volatile(), (*at).lock) };
            // SAFETY: a field of a live stream.
            let end = unsafe { (&raw const (*at).lock).cast::<u8>() };
            addresses.extend([at as usize, end as usize, lock as usize]);
            at = chain;
        }
        addresses
    }

    /// Unlocks the list in the child of a fork, which has only the thread that forked. The C
    /// library has reset the lock already, so it must not be decremented again. After a fork past
    /// the C library it has not.
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
