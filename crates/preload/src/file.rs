//! Files, read without allocation.

use std::ffi::CStr;

/// A file that is mapped for reading.
pub struct MappedFile {
    address: *mut libc::c_void,
    len: usize,
}

impl MappedFile {
    /// Maps the whole file for reading.
    ///
    /// # Errors
    /// `()` if the file cannot be opened or mapped, or is not a regular file.
    pub fn open(path: &CStr) -> Result<MappedFile, ()> {
        // SAFETY: the path is a string that ends in null. The descriptor is closed below and not used
        // elsewhere. `stat` is a plain structure that the kernel fills.
        unsafe {
            let fd = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOCTTY);
            if fd < 0 {
                return Err(());
            }
            let mut stat: libc::stat = std::mem::zeroed();
            let regular =
                libc::fstat(fd, &mut stat) == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFREG;
            let len = if regular { stat.st_size as usize } else { 0 };
            let mut file = MappedFile { address: libc::MAP_FAILED, len };
            if len > 0 {
                let null = std::ptr::null_mut();
                file.address = libc::mmap(null, len, libc::PROT_READ, libc::MAP_PRIVATE, fd, 0);
            }
            libc::close(fd);
            if len > 0 && file.address == libc::MAP_FAILED || !regular { Err(()) } else { Ok(file) }
        }
    }

    /// Returns the file's contents.
    pub fn bytes(&self) -> &[u8] {
        if self.address == libc::MAP_FAILED {
            return &[];
        }
        // SAFETY: `open` mapped `len` bytes at `address`, and only `drop` unmaps them. (There is no guard
        // against a file that shrinks meanwhile, as in any program that maps files.)
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.len) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if self.address != libc::MAP_FAILED {
            // SAFETY: mapped by `open`, not used after this.
            unsafe { libc::munmap(self.address, self.len) };
        }
    }
}
