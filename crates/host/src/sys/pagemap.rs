//! PAGEMAP_SCAN (Linux 6.7): the ranges of a process's memory that are huge, resident or written.
//!
//! Source: Documentation/admin-guide/mm/pagemap.rst and include/uapi/linux/fs.h of Linux 6.7.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// The page is mapped by a PMD or larger.
pub const PAGE_IS_HUGE: u64 = 1 << 6;
/// The page is resident.
pub const PAGE_IS_PRESENT: u64 = 1 << 3;
/// The page is swapped out.
pub const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// The page is the zero page.
pub const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// The page belongs to a file.
pub const PAGE_IS_FILE: u64 = 1 << 2;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// A range of pages that have the same categories: `struct page_region`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageRange {
    /// The first address of the range.
    pub start: u64,
    /// The first address after the range.
    pub end: u64,
    /// The categories that its pages have, of those that the scan returns.
    pub categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`
const PAGEMAP_SCAN: u64 =
    (3 << 30) | ((size_of::<ScanArg>() as u64) << 16) | ((b'f' as u64) << 8) | 16;

/// Returns the ranges in `start..end` (whole pages) whose pages have all of `categories`. `pagemap` is an
/// open /proc/PID/pagemap.
///
/// # Errors
/// Fails with `ENOTTY` on kernels before 6.7.
pub fn scan(pagemap: &File, start: u64, end: u64, categories: u64) -> io::Result<Vec<PageRange>> {
    let arg = ScanArg { category_mask: categories, return_mask: categories, ..ScanArg::default() };
    walk(pagemap, start, end, arg)
}

/// Returns the ranges in `start..end` (whole pages) whose pages have any of the categories `any`. Each has
/// those of `wanted` that its pages have, and adjacent ranges differ in them. Fails as [`scan`] does.
pub fn scan_any(
    pagemap: &File,
    start: u64,
    end: u64,
    any: u64,
    wanted: u64,
) -> io::Result<Vec<PageRange>> {
    let arg = ScanArg { category_anyof_mask: any, return_mask: wanted, ..ScanArg::default() };
    walk(pagemap, start, end, arg)
}

fn walk(pagemap: &File, start: u64, end: u64, mut arg: ScanArg) -> io::Result<Vec<PageRange>> {
    let mut found = Vec::new();
    let mut buffer = [PageRange::default(); 512];
    arg.size = size_of::<ScanArg>() as u64;
    (arg.start, arg.end) = (start, end);
    while arg.start < end {
        (arg.vec, arg.vec_len) = (buffer.as_mut_ptr() as u64, buffer.len() as u64);
        // SAFETY: arg is a live pm_scan_arg that states its size; vec points to vec_len writable
        // page_regions. Without write-protect flags the call only reads.
        let n = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as _, &mut arg) };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        found.extend_from_slice(&buffer[..n as usize]);
        if arg.walk_end <= arg.start {
            break;
        }
        arg.start = arg.walk_end;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::mapping::{OwnedMapping, Request, Source};
    use super::*;

    #[test]
    fn finds_the_pages_that_were_touched() {
        let request =
            Request { source: Source::Anon, len: 16 << 12, align: 1 << 12, hugetlb: None };
        let mapping = OwnedMapping::new(request).unwrap();
        mapping.advise(libc::MADV_NOHUGEPAGE).unwrap();
        mapping.store(3 << 12, 1);
        mapping.store(4 << 12, 1);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let (start, end) = (mapping.address(), mapping.address() + mapping.len() as u64);
        match scan(&pagemap, start, end, PAGE_IS_PRESENT) {
            Ok(found) => {
                let ranges: Vec<_> =
                    found.iter().map(|r| (r.start - start, r.end - start)).collect();
                assert_eq!(ranges, [(3 << 12, 5 << 12)]);
            }
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOTTY)),
        }
    }
}
