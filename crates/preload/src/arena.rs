//! Large pages for the arenas of threads, which glibc's malloc tunable misses.
//!
//! A thread's arena lies in heaps of 64 MiB, aligned to their size, reserved at once and made
//! accessible in small steps; a huge page cannot come where a step ends within it. So each new thread
//! first makes sure that it has an arena, and makes its heap accessible and advised as a whole; glibc's
//! own steps then change nothing. Heaps that an arena adds later (beyond 64 MiB) keep base pages
//! until the next thread starts in it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// glibc's HEAP_MAX_SIZE on 64-bit machines.
const HEAP_BYTES: usize = 64 << 20;
/// The bit of a chunk's size that says "not in the main arena".
const NON_MAIN_ARENA: usize = 4;

static ACTIVE: AtomicBool = AtomicBool::new(false);
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Start = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Start,
    *mut c_void,
) -> libc::c_int;

/// What a thread was really started for.
struct Task {
    start: Start,
    argument: *mut c_void,
}

/// From now on new threads advise their arenas.
pub fn advise_from_now_on() {
    ACTIVE.store(true, Ordering::Relaxed);
}

/// The C library's own function.
fn next() -> Option<Create> {
    let mut found = NEXT.load(Ordering::Acquire);
    if found.is_null() {
        // SAFETY: the name ends in null.
        found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) };
        NEXT.store(found, Ordering::Release);
    }
    // SAFETY: the symbol has this type by POSIX.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Create>(found) })
}

/// Interposed: the same, with a short detour at the new thread's start.
///
/// # Safety
/// As pthread_create(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> libc::c_int {
    let Some(create) = next() else { return libc::EAGAIN };
    if !ACTIVE.load(Ordering::Relaxed) || !malloc_is_glibcs() {
        // SAFETY: the caller's own arguments.
        return unsafe { create(thread, attributes, start, argument) };
    }
    // SAFETY: the memory is checked, written before it is read, and freed by exactly one side: here
    // if no thread came about, else by the thread.
    unsafe {
        let task = libc::malloc(size_of::<Task>()).cast::<Task>();
        if task.is_null() {
            return create(thread, attributes, start, argument);
        }
        task.write(Task { start, argument });
        let result = create(thread, attributes, detour, task.cast());
        if result != 0 {
            libc::free(task.cast());
        }
        result
    }
}

extern "C" fn detour(task: *mut c_void) -> *mut c_void {
    // SAFETY: `pthread_create` above wrote it and left it to this thread.
    let Task { start, argument } = unsafe { task.cast::<Task>().read() };
    // Before the task is freed: it would come back from the thread's cache, but is the main arena's.
    advise_own_arena();
    // SAFETY: allocated there, not used after.
    unsafe { libc::free(task) };
    start(argument)
}

/// Programs with an allocator of their own have no such arenas, and no such chunks.
fn malloc_is_glibcs() -> bool {
    // SAFETY: the names end in null; the results are compared, not called.
    unsafe {
        let own = libc::dlsym(libc::RTLD_DEFAULT, c"__libc_malloc".as_ptr());
        !own.is_null() && own == libc::dlsym(libc::RTLD_DEFAULT, c"malloc".as_ptr())
    }
}

fn advise_own_arena() {
    let errno = crate::system::errno();
    // SAFETY: malloc is glibc's (checked at creation), so the word before an allocation is its
    // chunk's size. The heap of a chunk outside the main arena is the aligned 64 MiB around it, which
    // malloc reserved for nothing else and would make accessible itself before using it.
    unsafe {
        // The compiler knows what malloc is, and that nobody may look before an allocation.
        let chunk = std::hint::black_box(libc::malloc(1));
        if !chunk.is_null() {
            let size = chunk.cast::<usize>().sub(1).read();
            if size & NON_MAIN_ARENA != 0 {
                let heap = chunk as usize & !(HEAP_BYTES - 1);
                let heap = heap as *mut c_void;
                libc::mprotect(heap, HEAP_BYTES, libc::PROT_READ | libc::PROT_WRITE);
                libc::madvise(heap, HEAP_BYTES, libc::MADV_HUGEPAGE);
            }
            libc::free(chunk);
        }
    }
    crate::system::set_errno(errno);
}
