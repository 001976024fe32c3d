//! The functions that we interpose on: the C library's, or another allocator's.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The next definition of a function, in the objects loaded after this one.
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    /// Creates an entry that is looked up at its first use: malloc is called before any constructor runs.
    pub const fn of(name: &'static CStr) -> Next {
        Next { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Returns the function's address; null if there is none.
    #[inline(always)]
    pub fn address(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if found.is_null() { self.look_up() } else { found }
    }

    #[cold]
    fn look_up(&self) -> *mut c_void {
        // SAFETY: the name ends in null. Since glibc 2.34 a successful look-up does not allocate, so it does
        // not call our malloc again.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}
