//! The C library's streams. In the child of a fork it opens the lock of each before our handler runs there,
//! when missing pages would read as zeros: so these pages must be here when the process forks.

use crate::threads::next;
use std::sync::atomic::AtomicUsize;

/// The start of a stream, which has been so since 1999: <bits/types/struct_FILE.h>.
#[repr(C)]
struct Stream {
    _flags: i32,
    _buffers: [usize; 12],
    chain: *const Stream,
    _numbers: [u64; 3],
    lock: *const u8,
}

/// The list of all streams, held: none comes or goes.
pub struct Streams {
    first: *const Stream,
}

type Call = unsafe extern "C" fn();

fn call(name: &'static std::ffi::CStr, found: &AtomicUsize) {
    let address = next(name, found);
    if address != 0 {
        // SAFETY: the C library's own function of that name takes and returns nothing.
        unsafe { std::mem::transmute::<usize, Call>(address)() };
    }
}

impl Streams {
    /// Where the C library has no such list, there is none.
    pub fn hold() -> Streams {
        static LOCK: AtomicUsize = AtomicUsize::new(0);
        static LIST: AtomicUsize = AtomicUsize::new(0);
        call(c"_IO_list_lock", &LOCK);
        let list = next(c"_IO_list_all", &LIST) as *const *const Stream;
        // SAFETY: the C library's variable of that name is a pointer to a stream, or null; see above.
        let first = if list.is_null() { std::ptr::null() } else { unsafe { list.read_volatile() } };
        Streams { first }
    }

    /// Has all of them in memory for now; where they are.
    pub fn touch(&self) -> Vec<*const u8> {
        let mut places = Vec::new();
        let mut at = self.first;
        while !at.is_null() {
            // SAFETY: the list is held, so its streams are live, and they and their locks can be read.
            let (chain, lock) = unsafe { ((&raw const (*at).chain).read_volatile(), (*at).lock) };
            // SAFETY: of a live stream.
            let end = unsafe { (&raw const (*at).lock).cast::<u8>() };
            for place in [at.cast::<u8>(), end, lock] {
                if !place.is_null() {
                    // SAFETY: as above.
                    unsafe { place.read_volatile() };
                    places.push(place);
                }
            }
            at = chain;
        }
        places
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        static UNLOCK: AtomicUsize = AtomicUsize::new(0);
        call(c"_IO_list_unlock", &UNLOCK);
    }
}
