//! System calls without allocation.

use std::ffi::CStr;

/// Returns errno, which a constructor must restore before main runs.
pub fn errno() -> libc::c_int {
    // SAFETY: the location is valid for the calling thread as long as it lives.
    unsafe { *libc::__errno_location() }
}

/// Sets errno of the calling thread.
pub fn set_errno(value: libc::c_int) {
    // SAFETY: as in `errno`.
    unsafe { *libc::__errno_location() = value }
}

/// Advice that collapses resident base pages into huge pages synchronously. Since Linux 6.1.
pub const MADV_COLLAPSE: libc::c_int = 25;

/// The system's setting for transparent huge pages of a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    /// The system has no pages of this size.
    None,
    /// Pages of this size exist, but are set to `never`.
    Never,
    /// Advised memory gets such pages, or all memory does.
    Advised,
}

/// Returns the size of the base page, in bytes.
pub fn base_page() -> u64 {
    // SAFETY: sysconf has no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

/// Reads the setting for transparent huge pages of `bytes` bytes.
pub fn offer(bytes: u64) -> Offer {
    let own = setting(&[
        b"/sys/kernel/mm/transparent_hugepage/hugepages-",
        Decimal::of(bytes >> 10).digits(),
        b"kB/enabled",
    ]);
    let all = setting(&[b"/sys/kernel/mm/transparent_hugepage/enabled"]);
    match (own, all) {
        // Kernels before 6.8 have one setting, for the only size that they support.
        (None, Some(all)) if bytes == 2 << 20 => all,
        (None, _) => Offer::None,
        (Some(Offer::None), Some(all)) => all,
        (Some(own), _) => own,
    }
}

/// Reads a setting such as `always [madvise] never`; returns [`Offer::None`] for `[inherit]`.
fn setting(path: &[&[u8]]) -> Option<Offer> {
    let mut name = [0u8; 96];
    for (place, byte) in path.iter().copied().flatten().enumerate() {
        *name.get_mut(place)? = *byte;
    }
    let path = CStr::from_bytes_until_nul(&name).ok()?;
    let mut text = [0u8; 64];
    // SAFETY: the path ends in null; the kernel writes at most the buffer's length.
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

/// A number in decimal, formatted without allocation.
pub struct Decimal {
    bytes: [u8; 20],
    start: usize,
}

impl Decimal {
    /// Formats `number` without allocating.
    pub fn of(mut number: u64) -> Decimal {
        let mut decimal = Decimal { bytes: [b'0'; 20], start: 20 };
        loop {
            decimal.start = decimal.start.saturating_sub(1);
            if let Some(place) = decimal.bytes.get_mut(decimal.start) {
                *place = b'0' + (number % 10) as u8;
            }
            number /= 10;
            if number == 0 {
                return decimal;
            }
        }
    }

    /// Returns the digits, as text.
    pub fn digits(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or(b"")
    }
}

#[cfg(test)]
mod tests {
    use super::Decimal;

    #[test]
    fn decimals() {
        for number in [0, 7, 10, 4096, u64::MAX] {
            assert_eq!(Decimal::of(number).digits(), number.to_string().as_bytes());
        }
    }
}
