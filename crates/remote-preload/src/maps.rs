//! mmap and its family: large private anonymous maps come from the paged region.
//!
//! Maps at a fixed place (MAP_FIXED), of locked or huge pages, of stacks or of code stay local. So
//! do address ranges that are only reserved (PROT_NONE), and everything that the program puts there
//! later.

use crate::agent::log;
use crate::objects::is_own;
use crate::paged::{Paged, paged, paged_at};
use crate::{fail, local};
use libc::{MAP_FAILED, c_int, c_void, off_t, size_t};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Smaller maps stay local.
const LARGE: usize = 128 << 10;
const PAGE: usize = 4096;

/// Flags of maps that stay local.
const LOCAL: c_int = libc::MAP_SHARED
    | libc::MAP_FIXED
    | libc::MAP_FIXED_NOREPLACE
    | libc::MAP_GROWSDOWN
    | libc::MAP_HUGETLB
    | libc::MAP_LOCKED
    | libc::MAP_STACK;

/// A direct system call that returns -1 and sets errno, as the C library does.
macro_rules! system {
    ($number:ident $(, $argument:expr)*) => {
        // SAFETY: the program's own call, passed on as it is.
        unsafe { libc::syscall(libc::$number $(, $argument)*) }
    };
}

fn log_once(was_logged: &AtomicBool, line: &str) {
    if !was_logged.swap(true, Relaxed) {
        log(line);
    }
}

/// Serves mmap(2) for a known caller.
///
/// # Safety
/// The caller keeps the contract of mmap(2).
unsafe extern "C" fn mmap_for(
    at: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
    caller: usize,
) -> *mut c_void {
    let local = || system!(SYS_mmap, at, bytes, protection, flags, file, offset) as *mut c_void;
    let anonymous = flags & libc::MAP_ANONYMOUS != 0 && flags & libc::MAP_PRIVATE != 0;
    if let Some(paged) = paged_at(at.cast()).filter(|_| flags & libc::MAP_FIXED != 0) {
        return map_fixed(paged, at, bytes, protection, anonymous, local);
    }
    let wanted =
        anonymous && flags & LOCAL == 0 && bytes >= LARGE && protection & libc::PROT_EXEC == 0;
    let Some(paged) = paged().filter(|_| wanted) else { return local() };
    // mimalloc reserves addresses in the region and uses them there.
    let is_ours = is_own(caller);
    if protection == libc::PROT_NONE && !is_ours {
        if !paged.is_layout_only() {
            log_unpaged_reservation(bytes);
        }
        return local();
    }
    let made: *mut c_void = paged.map(bytes, PAGE, protection, false).cast();
    if !made.is_null() {
        return made;
    }
    // A reservation of which most pages are never used is no reason to fail.
    if !paged.is_out_of_mappings() && flags & libc::MAP_NORESERVE == 0 {
        return fail(libc::ENOMEM, MAP_FAILED);
    }
    let made = local();
    if is_ours && made != MAP_FAILED {
        local::note_area(made, bytes);
    }
    made
}

fn log_unpaged_reservation(bytes: usize) {
    /// Smaller reservations, such as stacks of threads, are not worth a line.
    const WORTH_A_LINE: usize = 64 << 20;
    static WAS_LOGGED: AtomicBool = AtomicBool::new(false);
    if bytes >= WORTH_A_LINE {
        log_once(
            &WAS_LOGGED,
            "the program reserves addresses first (PROT_NONE): what it puts there stays local, over the resident \
             limit",
        );
    }
}

/// Replaces mmap(2). Passes the return address on, which identifies the caller.
///
/// # Safety
/// The caller keeps the contract of mmap(2).
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    // The seventh argument is on the stack. The push also aligns the stack for the call.
    std::arch::naked_asm!(
        "push qword ptr [rsp]",
        "call {}",
        "add rsp, 8",
        "ret",
        sym mmap_for
    )
}

/// Replaces mmap(2) on architectures where the caller is unknown. Every reservation counts as
/// mimalloc's.
///
/// # Safety
/// The caller keeps the contract of mmap(2).
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    let caller = mmap as *const () as usize;
    // SAFETY: as the caller promises.
    unsafe { mmap_for(at, bytes, protection, flags, file, offset, caller) }
}

/// Maps at a fixed place inside the paged region. Memory of the paged kind becomes zeros again. Any
/// other mapping replaces the pages for good.
fn map_fixed(
    paged: &Paged,
    at: *mut c_void,
    bytes: usize,
    protection: c_int,
    anonymous: bool,
    local: impl FnOnce() -> *mut c_void,
) -> *mut c_void {
    if !(at as usize).is_multiple_of(PAGE) || !paged.contains_all(at as usize, bytes) {
        return fail(libc::EINVAL, MAP_FAILED);
    }
    paged.claim(at as usize, bytes);
    if !anonymous || !paged.is_paged(at as usize, bytes) {
        return paged.replace(at as usize, bytes, local);
    }
    if !paged.discard(at as usize, bytes) {
        return fail(libc::ENOMEM, MAP_FAILED);
    }
    match system!(SYS_mprotect, at, bytes, protection) {
        0 => at,
        _ => MAP_FAILED,
    }
}

/// Replaces mmap64(2), which is mmap(2) where `long` has 64 bits.
///
/// # Safety
/// The caller keeps the contract of mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: as the caller promises.
    unsafe { mmap(at, bytes, protection, flags, file, offset) }
}

/// Replaces munmap(2). A paged range becomes free for reuse.
///
/// # Safety
/// The caller keeps the contract of munmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(at: *mut c_void, bytes: size_t) -> c_int {
    match paged_at(at.cast()) {
        Some(paged) => {
            if bytes == 0
                || !(at as usize).is_multiple_of(PAGE)
                || !paged.contains_all(at as usize, bytes)
            {
                return fail(libc::EINVAL, -1);
            }
            paged.unmap(at as usize, bytes);
            0
        }
        None => {
            local::forget_area(at, bytes);
            system!(SYS_munmap, at, bytes) as c_int
        }
    }
}

/// Replaces mremap(2). A range that cannot grow in place moves by a copy.
///
/// # Safety
/// The caller keeps the contract of mremap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    at: *mut c_void,
    before: size_t,
    bytes: size_t,
    flags: c_int,
    place: *mut c_void,
) -> *mut c_void {
    let Some(paged) = paged_at(at.cast()) else {
        let local = || system!(SYS_mremap, at, before, bytes, flags, place) as *mut c_void;
        let over = paged_at(place.cast()).filter(|_| flags & libc::MREMAP_FIXED != 0);
        return over.map_or_else(local, |paged| map_fixed(paged, place, bytes, 0, false, local));
    };
    let before = before.next_multiple_of(PAGE);
    if bytes == 0 || !(at as usize).is_multiple_of(PAGE) || !paged.contains_all(at as usize, before)
    {
        return fail(libc::EINVAL, MAP_FAILED);
    }
    if flags & !libc::MREMAP_MAYMOVE != 0 {
        return move_to(paged, at, before, bytes.next_multiple_of(PAGE), flags, place);
    }
    let bytes = bytes.next_multiple_of(PAGE);
    if bytes < before {
        paged.unmap(at as usize + bytes, before - bytes);
        return at;
    }
    if bytes == before || paged.grow(at as usize, before, bytes) {
        return at;
    }
    if flags & libc::MREMAP_MAYMOVE == 0 {
        return fail(libc::ENOMEM, MAP_FAILED);
    }
    let new = paged.map(bytes, PAGE, libc::PROT_READ | libc::PROT_WRITE, true);
    if new.is_null() {
        return fail(libc::ENOMEM, MAP_FAILED);
    }
    // SAFETY: both ranges are mapped, have at least this length and do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(at.cast::<u8>(), new, before) };
    paged.unmap(at as usize, before);
    new.cast()
}

/// Moves a range to a fixed place, or moves it and leaves zeros behind (MREMAP_DONTUNMAP).
fn move_to(
    paged: &Paged,
    at: *mut c_void,
    before: usize,
    bytes: usize,
    flags: c_int,
    place: *mut c_void,
) -> *mut c_void {
    const KNOWN: c_int = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    let (fixed, stays) = (flags & libc::MREMAP_FIXED != 0, flags & libc::MREMAP_DONTUNMAP != 0);
    let distance = (at as usize).abs_diff(place as usize);
    if flags & !KNOWN != 0
        || flags & libc::MREMAP_MAYMOVE == 0
        || stays && before != bytes
        || fixed && (!(place as usize).is_multiple_of(PAGE) || distance < before.max(bytes))
    {
        return fail(libc::EINVAL, MAP_FAILED);
    }
    let at_place = if fixed { libc::MAP_FIXED } else { 0 };
    let (protection, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | at_place);
    // SAFETY: the program asked to replace the mapping at that place.
    let new = unsafe { mmap_for(place, bytes, protection, kind, -1, 0, 0) };
    if new == MAP_FAILED {
        return new;
    }
    // SAFETY: both ranges are mapped, have at least this length and do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(at.cast::<u8>(), new.cast(), before.min(bytes)) };
    match stays {
        true => _ = paged.discard(at as usize, before),
        false => paged.unmap(at as usize, before),
    }
    new
}

/// Replaces madvise(2). The pager drops pages itself. Advice that only helps the kernel is accepted
/// and ignored. Advice that changes what the memory does is followed or refused.
///
/// # Safety
/// The caller keeps the contract of madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(at: *mut c_void, bytes: size_t, advice: c_int) -> c_int {
    let system = || system!(SYS_madvise, at, bytes, advice) as c_int;
    let Some(paged) = paged_at(at.cast()) else { return system() };
    if !(at as usize).is_multiple_of(PAGE) || !paged.contains_all(at as usize, bytes) {
        return fail(libc::EINVAL, -1);
    }
    if bytes > 0 && !paged.is_paged(at as usize, bytes) {
        return system();
    }
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE => {
            match paged.discard_unlocked(at as usize, bytes) {
                true => 0,
                false => fail(libc::EINVAL, -1),
            }
        }
        libc::MADV_POPULATE_READ
        | libc::MADV_POPULATE_WRITE
        | libc::MADV_DONTDUMP
        | libc::MADV_DODUMP => system(),
        libc::MADV_NORMAL
        | libc::MADV_RANDOM
        | libc::MADV_SEQUENTIAL
        | libc::MADV_WILLNEED
        | libc::MADV_COLD
        | libc::MADV_PAGEOUT
        | libc::MADV_MERGEABLE
        | libc::MADV_UNMERGEABLE
        | libc::MADV_HUGEPAGE
        | libc::MADV_NOHUGEPAGE
        // These are true already, because their opposites are refused.
        | libc::MADV_DOFORK
        | libc::MADV_KEEPONFORK => 0,
        _ => fail(libc::EINVAL, -1),
    }
}

/// Replaces posix_madvise(3). DONTNEED is only a hint there, so it drops nothing.
///
/// # Safety
/// The caller keeps the contract of posix_madvise(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(at: *mut c_void, bytes: size_t, advice: c_int) -> c_int {
    if paged_at(at.cast()).is_some() || advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    match system!(SYS_madvise, at, bytes, advice) {
        0 => 0,
        // SAFETY: the location is valid for the calling thread.
        _ => unsafe { *libc::__errno_location() },
    }
}

fn note_lock(paged: &Paged) {
    paged.note_lock();
    static WAS_LOGGED: AtomicBool = AtomicBool::new(false);
    log_once(
        &WAS_LOGGED,
        "the program locks memory: locked pages stay local, over the resident limit",
    );
}

/// Replaces mlock(2). Locked pages cannot be moved, so they stay resident.
///
/// # Safety
/// The caller keeps the contract of mlock(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(at: *const c_void, bytes: size_t) -> c_int {
    if let Some(paged) = paged_at(at.cast()) {
        note_lock(paged);
    }
    system!(SYS_mlock, at, bytes) as c_int
}

/// Replaces mlock2(2). Locked pages stay resident, as with [`mlock`].
///
/// # Safety
/// The caller keeps the contract of mlock2(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(at: *const c_void, bytes: size_t, flags: libc::c_uint) -> c_int {
    if let Some(paged) = paged_at(at.cast()) {
        note_lock(paged);
    }
    system!(SYS_mlock2, at, bytes, flags) as c_int
}

/// Replaces mlockall(2). Fails with EPERM: the whole paged address space cannot be locked.
#[unsafe(no_mangle)]
pub extern "C" fn mlockall(flags: c_int) -> c_int {
    if paged().is_none() {
        return system!(SYS_mlockall, flags) as c_int;
    }
    static WAS_LOGGED: AtomicBool = AtomicBool::new(false);
    log_once(&WAS_LOGGED, "mlockall is refused: memory that is all locked cannot be paged");
    fail(libc::EPERM, -1)
}
