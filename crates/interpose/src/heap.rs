//! Huge pages for the heap: the choice of the means.
//!
//! The heap is bss ([`crate::bss`]), the memory of glibc's malloc ([`crate::growth`]), and the mappings of
//! other allocators ([`crate::mmap`]). Tunables that the user has set for malloc take precedence.

use crate::{Refused, bss, growth, mmap, offered, selection, system};
use std::ffi::CStr;

const HUGETLB: &[u8] = b"glibc.malloc.hugetlb=";
/// Tunables that we would overwrite.
const SIZES: [&[u8]; 4] = [
    b"glibc.malloc.top_pad=",
    b"glibc.malloc.mmap_threshold=",
    b"glibc.malloc.trim_threshold=",
    b"glibc.malloc.mmap_max=",
];
/// The older environment variables for the same settings.
const OLD_NAMES: [&CStr; 4] =
    [c"MALLOC_TOP_PAD_", c"MALLOC_MMAP_THRESHOLD_", c"MALLOC_TRIM_THRESHOLD_", c"MALLOC_MMAP_MAX_"];
/// A flag of PR_SET_THP_DISABLE (<linux/prctl.h>, Linux 6.18): the kernel still follows advice.
const THP_DISABLE_EXCEPT_ADVISED: libc::c_ulong = 2;

/// Advises pages of this size in bytes for the heap; 0 leaves the heap alone. The caller must be the only
/// thread.
///
/// # Errors
/// [`Refused`] if the size is not available, or if prctl(2) fails.
pub fn advise(page_bytes: u64) -> Result<(), Refused> {
    if page_bytes == 0 {
        return Ok(());
    }
    if page_bytes == system::base_page() {
        return keep_to_base_pages();
    }
    offered(page_bytes)?;
    if !selection::is_restricted() {
        bss::advise();
    }
    mmap::advise_from_now_on(page_bytes as usize);
    match managed() {
        Managed::Advice => growth::advise_from_now_on(page_bytes as usize, true),
        Managed::Tunable => growth::advise_from_now_on(page_bytes as usize, false),
        Managed::User => {}
    }
    Ok(())
}

/// The owner of the page sizes in malloc's main heap.
enum Managed {
    /// This library: the user has configured nothing.
    Advice,
    /// glibc: the hugetlb tunable names a pool. It does not cover the arenas of threads.
    Tunable,
    /// The user, who wants no such pages, or has set sizes that we would overwrite.
    User,
}

fn managed() -> Managed {
    let tunables = variable(c"GLIBC_TUNABLES").unwrap_or(b"");
    let entry = |name: &[u8]| tunables.split(|b| *b == b':').rfind(|e| e.starts_with(name));
    let sizes_are_set = SIZES.iter().any(|name| entry(name).is_some())
        || OLD_NAMES.iter().any(|name| variable(name).is_some());
    match entry(HUGETLB).and_then(|entry| entry.get(HUGETLB.len()..)) {
        Some(b"0") => Managed::User,
        // glibc 2.36 may or may not obey 1: it depends on uninitialised stack memory.
        Some(pool) if pool != b"1" => Managed::Tunable,
        _ if sizes_are_set => Managed::User,
        _ => Managed::Advice,
    }
}

fn variable(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: the name ends in null. The only thread reads the value at once.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
    }
}

/// Switches transparent huge pages off for the process. Without the tunable malloc asks for none, so this
/// matters only under `enabled=always`.
fn keep_to_base_pages() -> Result<(), Refused> {
    // SAFETY: these options take plain numbers.
    let done = unsafe {
        libc::prctl(libc::PR_SET_THP_DISABLE, 1, THP_DISABLE_EXCEPT_ADVISED, 0, 0) == 0
            || libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    };
    if done { Ok(()) } else { Err(Refused::Failed(system::errno())) }
}
