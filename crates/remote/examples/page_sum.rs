//! The pager's checksum of a page for the C floors of `cargo xtask bench remote`: what a page-in must check
//! is part of the least that it can cost.

use pagetax_remote::page::{PAGE_BYTES, PageSum};
use std::slice;

/// Returns the checksum of a page under this process's key.
///
/// # Safety
/// `page` points to 4,096 readable bytes that nobody changes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn page_sum(page: *const u8) -> u64 {
    // SAFETY: as the caller promises.
    PageSum::of(unsafe { slice::from_raw_parts(page, PAGE_BYTES) }).0
}
