//! Transparent pages between the base page and the huge page, for root: /proc/kpageflags.
//!
//! Such a page is a folio: contiguous physical pages, a head and its tails. It counts with its own size
//! if all of it is mapped in order at an address that is a multiple of its size. A part of a folio
//! translates like base pages, and so does a huge page that base entries map.
//!
//! Source: Documentation/admin-guide/mm/pagemap.rst of Linux 6.18.

use crate::procfs::Root;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The bit of an entry in /proc/PID/pagemap that marks a page in memory.
pub(crate) const PRESENT: u64 = 1 << 63;
/// The physical page number in such an entry; 0 for readers without CAP_SYS_ADMIN.
pub(crate) const FRAME: u64 = (1 << 55) - 1;
/// The bits of an entry in /proc/kpageflags.
pub(crate) const HEAD: u64 = 1 << 15;
pub(crate) const TAIL: u64 = 1 << 16;

/// The number of huge pages whose entries are read together. No folio crosses the border of a huge page.
const CHUNK_HUGE_PAGES: u64 = 16;

/// The files and sizes that identify folios.
pub struct Folios {
    flags: File,
    base_bytes: u64,
    huge_bytes: u64,
}

impl Folios {
    /// Opens /proc/kpageflags. The error shows why it cannot be read.
    pub fn open(root: &Root, base_bytes: u64, huge_bytes: u64) -> Result<Folios, String> {
        let path = "/proc/kpageflags";
        match File::open(root.path(path)) {
            Ok(flags) => Ok(Folios { flags, base_bytes, huge_bytes }),
            Err(error) => Err(format!("{path}: {error}; root could read it")),
        }
    }

    /// Calls `found` with the start, end and page size of ranges that together are `start..end`. Base
    /// entries must map all of it.
    pub fn split(
        &self,
        pagemap: &File,
        (start, end): (u64, u64),
        found: &mut impl FnMut(u64, u64, u64),
    ) -> io::Result<()> {
        let mut at = start;
        while at < end {
            let chunk = CHUNK_HUGE_PAGES * self.huge_bytes;
            let until = end.min((at / chunk + 1) * chunk);
            let frames = self.frames(pagemap, at, until)?;
            let mut index = 0;
            while index < frames.len() {
                let row = in_a_row(&frames[index..]);
                let address = at + index as u64 * self.base_bytes;
                self.split_row(address, frames[index], row, found)?;
                index += row;
            }
            at = until;
        }
        Ok(())
    }

    /// Returns true if the memory at `start`, a border of huge pages, is a whole huge page: one folio, mapped
    /// in order. The kernel may still map it by base entries.
    pub fn is_huge(&self, pagemap: &File, start: u64) -> io::Result<bool> {
        let frames = self.frames(pagemap, start, start + self.huge_bytes)?;
        let Some(first) = frames[0].filter(|_| in_a_row(&frames) == frames.len()) else {
            return Ok(false);
        };
        let flags = read_words(&self.flags, first, frames.len())?;
        Ok(flags[0] & HEAD != 0 && flags[1..].iter().all(|flags| flags & TAIL != 0))
    }

    /// Returns physical page numbers; `None` if a page is gone meanwhile or its number is hidden.
    fn frames(&self, pagemap: &File, start: u64, end: u64) -> io::Result<Vec<Option<u64>>> {
        let count = ((end - start) / self.base_bytes) as usize;
        let entries = read_words(pagemap, start / self.base_bytes, count)?;
        let frame = |entry: u64| (entry & PRESENT != 0).then_some(entry & FRAME);
        Ok(entries.into_iter().map(|entry| frame(entry).filter(|frame| *frame != 0)).collect())
    }

    /// Splits `count` pages whose physical pages are contiguous from `frame` on.
    fn split_row(
        &self,
        address: u64,
        frame: Option<u64>,
        count: usize,
        found: &mut impl FnMut(u64, u64, u64),
    ) -> io::Result<()> {
        let base = self.base_bytes;
        let Some(frame) = frame else {
            found(address, address + count as u64 * base, base);
            return Ok(());
        };
        // One more entry shows if the last folio continues. After the last page of memory there is none.
        let flags = read_words(&self.flags, frame, count + 1)?;
        let mut index = 0;
        while index < count {
            let tails = flags[index + 1..].iter().take_while(|flags| **flags & TAIL != 0).count();
            let start = address + index as u64 * base;
            let bytes = (1 + tails as u64) * base;
            let whole = flags[index] & HEAD != 0 && index + tails < count;
            let own = whole
                && bytes.is_power_of_two()
                && bytes < self.huge_bytes
                && start.is_multiple_of(bytes);
            let (pages, size) = if own { (1 + tails, bytes) } else { (1, base) };
            found(start, start + pages as u64 * base, size);
            index += pages;
        }
        Ok(())
    }
}

/// Returns the number of entries, from the first on, with contiguous physical pages or none at all.
fn in_a_row(frames: &[Option<u64>]) -> usize {
    let follows = |pair: &&[Option<u64>]| match (pair[0], pair[1]) {
        (Some(one), Some(next)) => next == one + 1,
        (None, None) => true,
        _ => false,
    };
    1 + frames.windows(2).take_while(follows).count()
}

/// Reads 64-bit words from a file; words beyond its end are 0.
pub(super) fn read_words(file: &File, first: u64, count: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0u8; count * 8];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], first * 8 + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let word = |chunk: &[u8]| u64::from_ne_bytes(chunk.try_into().unwrap_or_default());
    Ok(bytes.chunks_exact(8).map(word).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const BASE: u64 = 4096;
    const HUGE: u64 = 2 << 20;

    fn words(values: impl IntoIterator<Item = u64>) -> File {
        let mut file = tempfile::tempfile().unwrap();
        for value in values {
            file.write_all(&value.to_ne_bytes()).unwrap();
        }
        file
    }

    /// Returns the ranges of `frames` mapped from address 0 on. `flags` describe the physical pages from
    /// 0 on.
    fn stretches(frames: &[u64], flags: &[u64]) -> Vec<(u64, u64)> {
        let pagemap = words(frames.iter().map(|frame| PRESENT | frame));
        let flags = words(flags.iter().copied());
        let folios = Folios { flags, base_bytes: BASE, huge_bytes: HUGE };
        let mut found = Vec::new();
        let end = frames.len() as u64 * BASE;
        let mut add = |start, end, size| found.push(((end - start) / BASE, size / BASE));
        folios.split(&pagemap, (0, end), &mut add).unwrap();
        found
    }

    #[test]
    fn whole_aligned_folios_have_their_size() {
        // Physical memory: pages 0 and 1 single, a folio of 4 at 2, page 6 single, a folio of 2 at 7.
        let flags = [0, 0, HEAD, TAIL, TAIL, TAIL, 0, HEAD, TAIL];
        assert_eq!(stretches(&[2, 3, 4, 5, 6, 1], &flags), [(4, 4), (1, 1), (1, 1)]);
        assert_eq!(stretches(&[1, 2, 3, 4, 5], &flags), [(1, 1); 5], "at an odd address");
        assert_eq!(stretches(&[3, 4, 5, 6], &flags), [(1, 1); 4], "without its head");
        assert_eq!(stretches(&[2, 3, 4], &flags), [(1, 1); 3], "without its last page");
        assert_eq!(stretches(&[7, 8], &flags), [(2, 2)], "at the end of memory");
        assert_eq!(stretches(&[3, 2, 7, 8], &flags), [(1, 1), (1, 1), (2, 2)]);
    }

    #[test]
    fn a_huge_page_by_base_entries_is_base_pages() {
        let flags: Vec<u64> = [0, HEAD].into_iter().chain(std::iter::repeat_n(TAIL, 511)).collect();
        let frames: Vec<u64> = (1..513).collect();
        assert_eq!(stretches(&frames, &flags), [(1, 1); 512]);
    }

    #[test]
    fn a_whole_folio_in_order_may_be_huge() {
        let flags: Vec<u64> = [0, HEAD].into_iter().chain(std::iter::repeat_n(TAIL, 511)).collect();
        let is_huge = |frames: Vec<u64>| {
            let pagemap = words(frames.iter().map(|frame| PRESENT | frame));
            let folios = Folios { flags: words(flags.clone()), base_bytes: BASE, huge_bytes: HUGE };
            folios.is_huge(&pagemap, 0).unwrap()
        };
        assert!(is_huge((1..513).collect()));
        assert!(!is_huge((0..512).collect()), "it begins before the folio");
        assert!(!is_huge((1..512).chain([1]).collect()), "out of order");
        assert!(!is_huge(vec![0; 512]), "hidden");
    }

    #[test]
    fn hidden_frames_are_base_pages() {
        assert_eq!(stretches(&[0, 0, 0], &[HEAD, TAIL]), [(3, 1)]);
    }
}
