//! The pager's MAC of a page for the C floors of `cargo xtask bench remote`. A page-in must verify
//! it, so it is part of the least cost of a page-in.

use pagetax_remote::page::{PAGE_BYTES, PageMac};
use std::slice;

/// Returns the MAC of a page under this process's key.
///
/// # Safety
/// `page` must point to 4,096 readable bytes that no thread changes during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn page_sum(page: *const u8) -> u64 {
    // SAFETY: as the caller promises.
    PageMac::of(unsafe { slice::from_raw_parts(page, PAGE_BYTES) }).0
}
