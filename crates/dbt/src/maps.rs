//! The program's memory that is code and stays as it is: private, executable, read-only mappings of files,
//! and the kernel's vdso. All other memory may change while we use it, so its code runs natively.

use crate::system;
use std::ops::Range;

/// The room for /proc/self/maps: thousands of mappings. Mappings beyond it are ignored.
const TEXT_BYTES: usize = 2 << 20;
const REGIONS: usize = 4096;

/// A range of code and a hash of what is mapped there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Region {
    start: u64,
    end: u64,
    of: u64,
}

/// All code of the program.
pub struct Maps {
    regions: Vec<Region>,
    before: Vec<Region>,
    text: Vec<u8>,
}

impl Maps {
    pub fn new() -> Maps {
        let list = || Vec::with_capacity(REGIONS);
        Maps { regions: list(), before: list(), text: vec![0; TEXT_BYTES] }
    }

    /// Reads the mappings again. Returns false if code that was known before is no longer there, or on an
    /// error.
    pub fn look(&mut self) -> bool {
        std::mem::swap(&mut self.regions, &mut self.before);
        self.regions.clear();
        let Some(file) = system::open(b"/proc/self/maps\0", libc::O_RDONLY) else { return false };
        let length = system::read(file, &mut self.text);
        system::close(file);
        let lines = self.text[..length].split(|byte| *byte == b'\n');
        for region in lines.filter_map(region).take(REGIONS) {
            self.regions.push(region);
        }
        self.before.iter().all(|old| self.regions.contains(old))
    }

    /// Returns the code from an address on, at most 1024 bytes. None if it is not code.
    pub fn code_at(&self, pc: u64) -> Option<&'static [u8]> {
        let after = self.regions.partition_point(|region| region.start <= pc);
        let region = self.regions.get(after.checked_sub(1)?)?;
        let length = region.end.checked_sub(pc).filter(|length| *length > 0)?;
        // SAFETY: the kernel has shown it as mapped and readable. A program that unmaps code which it is
        // about to run crashes natively, too.
        Some(unsafe { std::slice::from_raw_parts(pc as *const u8, length.min(1024) as usize) })
    }

    /// Returns true if part of a range is code.
    pub fn has_code_in(&self, range: Range<u64>) -> bool {
        self.regions.iter().any(|region| region.start < range.end && range.start < region.end)
    }
}

/// Parses a line such as `7f00-7f10 r-xp 00001000 08:02 173521 /usr/lib/a.so`. Returns none unless it is
/// code.
fn region(line: &[u8]) -> Option<Region> {
    let mut words = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    let mut bounds = words.next()?.split(|byte| *byte == b'-');
    let (start, end) = (hex(bounds.next()?)?, hex(bounds.next()?)?);
    let is_code = words.next()? == b"r-xp";
    let (offset, device, inode) = (words.next()?, words.next()?, words.next()?);
    let name = words.next().unwrap_or_default();
    let is_file = name.starts_with(b"/") && !name.starts_with(b"/memfd:");
    let stays = (is_file && !line.ends_with(b" (deleted)")) || name == b"[vdso]";
    let of =
        [offset, device, inode].into_iter().flatten().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
            (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        });
    (is_code && stays).then_some(Region { start, end, of })
}

fn hex(text: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok()
}
