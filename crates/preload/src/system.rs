//! The few system calls that are needed, without allocation.

use std::ffi::CStr;

/// errno, to be put back before main sees it.
pub fn errno() -> libc::c_int {
    // SAFETY: the location is valid for the calling thread for as long as it lives.
    unsafe { *libc::__errno_location() }
}

/// See [`errno`].
pub fn set_errno(value: libc::c_int) {
    // SAFETY: as in `errno`.
    unsafe { *libc::__errno_location() = value }
}

/// A file's bytes, mapped for reading.
pub struct MappedFile {
    address: *mut libc::c_void,
    len: usize,
}

impl MappedFile {
    /// Maps the whole file.
    pub fn open(path: &CStr) -> Result<MappedFile, ()> {
        // SAFETY: the path is a string that ends in null; the descriptor is closed below and used by
        // nobody else; `stat` is a plain structure that the kernel fills.
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

    /// What it holds.
    pub fn bytes(&self) -> &[u8] {
        if self.address == libc::MAP_FAILED {
            return &[];
        }
        // SAFETY: `open` mapped `len` bytes at `address`, and only `drop` unmaps them. (A file that is
        // cut short meanwhile is not guarded against, as in any program that maps files.)
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.len) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if self.address != libc::MAP_FAILED {
            // SAFETY: mapped by `open`, not used after.
            unsafe { libc::munmap(self.address, self.len) };
        }
    }
}

/// What the system does about transparent pages of a size, by its own setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    /// No such size.
    None,
    /// Exists, but is set to `never`.
    Never,
    /// Given where advised, or always.
    Advised,
}

/// The base page, in bytes.
pub fn base_page() -> u64 {
    // SAFETY: sysconf has no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

/// Looks a size of transparent pages up.
pub fn offer(bytes: u64) -> Offer {
    let own = setting(&[
        b"/sys/kernel/mm/transparent_hugepage/hugepages-",
        crate::log::Decimal::of(bytes >> 10).digits(),
        b"kB/enabled",
    ]);
    let all = setting(&[b"/sys/kernel/mm/transparent_hugepage/enabled"]);
    match (own, all) {
        // Kernels before 6.8 have one setting, for the one size that they know.
        (None, Some(all)) if bytes == 2 << 20 => all,
        (None, _) => Offer::None,
        (Some(Offer::None), Some(all)) => all,
        (Some(own), _) => own,
    }
}

/// Reads `always [madvise] never`; [`Offer::None`] stands for `[inherit]`.
fn setting(path: &[&[u8]]) -> Option<Offer> {
    let mut name = [0u8; 96];
    for (place, byte) in path.iter().copied().flatten().enumerate() {
        *name.get_mut(place)? = *byte;
    }
    let path = CStr::from_bytes_until_nul(&name).ok()?;
    let mut text = [0u8; 64];
    // SAFETY: the path ends in null; at most the buffer's length is read into it.
    let read = unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if fd < 0 {
            return None;
        }
        let read = libc::read(fd, text.as_mut_ptr().cast(), text.len());
        libc::close(fd);
        read
    };
    let text = text.get(..usize::try_from(read).ok()?)?;
    let open = text.iter().position(|byte| *byte == b'[')?;
    Some(match text.get(open + 1) {
        Some(b'n') => Offer::Never,
        Some(b'i') => Offer::None,
        _ => Offer::Advised,
    })
}
