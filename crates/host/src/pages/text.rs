//! Code on huge pages, through the page cache: the file is dropped from memory and read in again in
//! folios of the huge page's size, which programs that start afterwards map as such.
//!
//! Needs a file system with large folios (ext4 and xfs of recent kernels), and a library whose addresses and
//! places in the file agree modulo the huge page. No process may have it mapped meanwhile: pages in use stay
//! as they are. Nothing of a program is changed.

use super::pagemap;
use super::settings::PageSettings;
use crate::launch::program::Elf;
use crate::sys::mapping::{OwnedMapping, Request, Source};
use pagetax_core::units::{PageSize, VirtAddr};
use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The result for a file's code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileText {
    /// The file that the code belongs to.
    pub path: PathBuf,
    /// Code in whole huge pages.
    pub aligned_bytes: u64,
    /// The part of it that can be mapped by huge pages now.
    pub large_bytes: u64,
    /// The reason if that is not all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Brings the code of a program or a library into memory in huge pages. None if it has too little.
pub fn prepare(path: &Path) -> io::Result<Option<FileText>> {
    let huge = PageSettings::host().pmd_size().unwrap_or(PageSize::M2);
    let Some(elf) = Elf::open(path)? else { return Ok(None) };
    let (fits, apart): (Vec<_>, Vec<_>) = elf
        .code
        .iter()
        .map(|(range, beyond)| (whole(range, huge), beyond))
        .filter(|(range, _)| !range.is_empty())
        .partition(|(_, beyond)| beyond.is_multiple_of(huge.bytes()));
    let length = |ranges: &[(Range<u64>, &u64)]| ranges.iter().map(|(r, _)| r.end - r.start).sum();
    let aligned_bytes: u64 = length(&fits);
    let mut text = FileText { path: path.into(), aligned_bytes, large_bytes: 0, why: None };
    if !apart.is_empty() {
        text.why = Some(format!("its addresses and places in the file differ modulo {huge}"));
    }
    if aligned_bytes == 0 {
        return Ok((!apart.is_empty()).then_some(text));
    }
    let ranges: Vec<_> = fits.into_iter().map(|(range, _)| range).collect();
    text.large_bytes = read_in(path, &ranges, huge)?;
    if text.large_bytes < aligned_bytes {
        let why = "in use by running programs, or its file system keeps small pages only";
        text.why.get_or_insert(why.into());
    }
    Ok(Some(text))
}

/// Returns true if a file has code that could lie on huge pages.
pub fn has_code(path: &Path) -> bool {
    let huge = PageSettings::host().pmd_size().unwrap_or(PageSize::M2);
    let fits = |(range, beyond): &(Range<u64>, u64)| {
        beyond.is_multiple_of(huge.bytes()) && !whole(range, huge).is_empty()
    };
    Elf::open(path).ok().flatten().is_some_and(|elf| elf.code.iter().any(fits))
}

/// Puts code back on base pages: drops the file from memory and reads it page by page.
pub fn settle(path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    // No reading ahead, which would make large folios again.
    fadvise(&file, 0, None, Advice::Random)?;
    io::copy(&mut file, &mut io::sink()).map(drop)
}

/// Returns the whole huge pages inside a range.
fn whole(range: &Range<u64>, huge: PageSize) -> Range<u64> {
    let start = range.start.next_multiple_of(huge.bytes());
    start..(range.end / huge.bytes() * huge.bytes()).max(start)
}

/// Reads ranges in as huge pages. Returns the bytes that came so.
fn read_in(path: &Path, ranges: &[Range<u64>], huge: PageSize) -> io::Result<u64> {
    let file = File::open(path)?;
    if huge_bytes(&file, ranges, huge)? == ranges.iter().map(|r| r.end - r.start).sum::<u64>() {
        return huge_bytes(&file, ranges, huge);
    }
    // Pages that are not written yet cannot be dropped.
    file.sync_data()?;
    for range in ranges {
        let length = std::num::NonZeroU64::new(range.end - range.start);
        fadvise(&file, range.start, length, Advice::DontNeed)?;
    }
    huge_bytes(&file, ranges, huge)
}

/// Maps the file aligned for huge pages, has the kernel fill it with them, and counts them.
fn huge_bytes(file: &File, ranges: &[Range<u64>], huge: PageSize) -> io::Result<u64> {
    let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
    let source = Source::File { file, private: true, writable: false };
    let (len, align) = (end as usize, huge.bytes() as usize);
    let mapping = OwnedMapping::new(Request { source, len, align, hugetlb: None })?;
    mapping.advise(libc::MADV_HUGEPAGE)?;
    for range in ranges {
        mapping.populate(range.start as usize, (range.end - range.start) as usize)?;
    }
    let (start, end) = (mapping.address(), mapping.address() + end);
    let is_ours = |from: VirtAddr, to: VirtAddr| from.0 < end && to.0 > start;
    let map = pagemap::read_where(std::process::id(), is_ours).map_err(io::Error::other)?;
    let found = |range: &Range<u64>| {
        let mut map = map.clone();
        map.cut(VirtAddr(start + range.start), VirtAddr(start + range.end));
        map.resident_by_size(|_| true).get(&huge).copied().unwrap_or(0)
    };
    Ok(ranges.iter().map(found).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_of_a_range() {
        let m2 = PageSize::M2;
        assert_eq!(whole(&(1..(6 << 20)), m2), 2 << 20..6 << 20);
        assert!(whole(&(1..(3 << 20)), m2).is_empty());
        assert!(whole(&(0..4096), m2).is_empty());
    }

    #[test]
    fn small_programs_and_text_files_have_no_code_for_it() {
        assert_eq!(prepare(Path::new("/bin/true")).unwrap(), None);
        assert!(!has_code(Path::new("/bin/true")) && !has_code(Path::new("/nonexistent")));
        assert_eq!(prepare(Path::new("/etc/passwd")).unwrap(), None);
        assert!(prepare(Path::new("/nonexistent")).is_err());
    }
}
