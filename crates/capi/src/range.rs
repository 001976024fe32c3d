//! Advice for address ranges: checks the mappings, gives the advice, and collapses resident pages.

use crate::AdviceError;
use pagetax_host::procfs::{MapsLine, Root, maps};
use pagetax_interpose::system;

/// Returns the mappings of this process.
fn mappings() -> Result<Vec<MapsLine>, AdviceError> {
    maps(&Root::default(), std::process::id()).map_err(|_| AdviceError::NoResources)
}

/// Asks for pages of this size in a range that begins and ends at multiples of it.
pub fn advise(start: usize, bytes: usize, page_bytes: usize) -> Result<(), AdviceError> {
    let base = system::base_page() as usize;
    let unit = if page_bytes == 0 { base } else { page_bytes };
    let end = start.checked_add(bytes).ok_or(AdviceError::Invalid)?;
    if start == 0 || bytes == 0 || !start.is_multiple_of(unit) || !bytes.is_multiple_of(unit) {
        return Err(AdviceError::Invalid);
    }
    check(&mappings()?, start, end, unit)?;
    give(start, bytes, page_bytes)
}

/// Checks that the range has no holes, and that each page has one protection.
fn check(mappings: &[MapsLine], start: usize, end: usize, unit: usize) -> Result<(), AdviceError> {
    let mut at = start;
    let mut before = [0; 4];
    let addresses = |line: &MapsLine| (line.range.start as usize, line.range.end as usize);
    let mappings = mappings.iter().map(|line| (addresses(line), line.permissions));
    for ((from, to), permissions) in mappings.filter(|((from, to), _)| *to > start && *from < end) {
        if from > at {
            return Err(AdviceError::NotMapped);
        }
        // A border between protections inside a page.
        if at > start && !at.is_multiple_of(unit) && permissions != before {
            return Err(AdviceError::Invalid);
        }
        at = to;
        before = permissions;
    }
    if at < end { Err(AdviceError::NotMapped) } else { Ok(()) }
}

/// Advises the existing part of the brk heap; later growth is advised as it happens.
pub fn advise_heap_so_far(page_bytes: usize) -> Result<(), AdviceError> {
    for heap in mappings()?.iter().filter(|line| line.name == "[heap]") {
        give(
            heap.range.start as usize,
            heap.range.end as usize - heap.range.start as usize,
            page_bytes,
        )?;
    }
    Ok(())
}

fn give(start: usize, bytes: usize, page_bytes: usize) -> Result<(), AdviceError> {
    let base = system::base_page() as usize;
    let advice = match page_bytes {
        0 => return Ok(()),
        size if size == base => libc::MADV_NOHUGEPAGE,
        _ => libc::MADV_HUGEPAGE,
    };
    // SAFETY: this advice changes no contents, wherever it is given.
    if unsafe { libc::madvise(start as *mut _, bytes, advice) } != 0 {
        return Err(match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::ENOMEM) => AdviceError::NotMapped,
            Some(libc::EINVAL) => AdviceError::Invalid,
            _ => AdviceError::NoResources,
        });
    }
    if page_bytes >= 2 << 20 {
        // Collapses resident pages as far as huge pages are free; the advice holds in any case.
        // SAFETY: contents stay as they are, also while others write them.
        unsafe { libc::madvise(start as *mut _, bytes, system::MADV_COLLAPSE) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_host::procfs::maps_line;

    fn mapping(start: usize, end: usize, permissions: &str) -> MapsLine {
        maps_line(format!("{start:x}-{end:x} {permissions} 00000000 00:00 0").as_bytes()).unwrap()
    }

    #[test]
    fn holes_and_mixed_pages_are_found() {
        let maps = [
            mapping(0x1000, 0x3000, "rw-p"),
            mapping(0x3000, 0x4000, "r--p"),
            mapping(0x6000, 0x9000, "rw-p"),
        ];
        let check = |start, end, unit| check(&maps, start, end, unit);
        assert_eq!(check(0x1000, 0x3000, 0x1000), Ok(()));
        assert_eq!(check(0x1000, 0x4000, 0x1000), Ok(()), "a border between pages");
        assert_eq!(check(0x2000, 0x4000, 0x2000), Err(AdviceError::Invalid), "and within one");
        assert_eq!(check(0x3000, 0x7000, 0x1000), Err(AdviceError::NotMapped));
        assert_eq!(check(0x8000, 0xa000, 0x1000), Err(AdviceError::NotMapped));
        assert_eq!(check(0x0, 0x2000, 0x1000), Err(AdviceError::NotMapped));
    }
}
