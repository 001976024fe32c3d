//! Raw system calls. They do not change errno, which belongs to the program.

use std::arch::asm;

/// Makes a system call. Returns its result, or a negative error.
///
/// # Safety
/// The same conditions as for the call.
pub unsafe fn call(number: i64, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the kernel changes no registers except these. The caller promises the rest.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// Maps private anonymous memory at an address of the kernel's choice. Returns none if the kernel refuses.
pub fn map(bytes: usize, protection: i32, flags: i32) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | flags;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe {
        call(libc::SYS_mmap, [0, bytes, protection as usize, flags as usize, usize::MAX, 0])
    };
    (start > 0).then_some(start as usize)
}

/// Returns the id of the calling thread.
pub fn thread() -> u32 {
    // SAFETY: touches no memory.
    unsafe { call(libc::SYS_gettid, [0; 6]) as u32 }
}

/// Returns the id of the process.
pub fn process() -> u32 {
    // SAFETY: touches no memory.
    unsafe { call(libc::SYS_getpid, [0; 6]) as u32 }
}

/// Returns the time of a clock, in ns.
pub fn now_ns(clock: i32) -> u64 {
    let mut time = [0u64; 2];
    // SAFETY: the kernel writes a timespec, two words.
    unsafe { call(libc::SYS_clock_gettime, [clock as usize, &raw mut time as usize, 0, 0, 0, 0]) };
    time[0] * 1_000_000_000 + time[1]
}

/// Waits between two tries of a loop: yields in the first 64, then sleeps for 100 µs each.
pub fn pause(nth: u32) {
    let time = [0u64, 100_000];
    let arguments = [time.as_ptr() as usize, 0, 0, 0, 0, 0];
    // SAFETY: the kernel reads a timespec.
    unsafe {
        match nth < 64 {
            true => call(libc::SYS_sched_yield, [0; 6]),
            false => call(libc::SYS_nanosleep, arguments),
        }
    };
}

/// Opens a file. The path must end in 0. Returns none on an error.
pub fn open(path: &[u8], flags: i32) -> Option<usize> {
    debug_assert_eq!(path.last(), Some(&0));
    let at = libc::AT_FDCWD as usize;
    let flags = (flags | libc::O_CLOEXEC) as usize;
    // SAFETY: the path ends in 0.
    let file = unsafe { call(libc::SYS_openat, [at, path.as_ptr() as usize, flags, 0o600, 0, 0]) };
    (file >= 0).then_some(file as usize)
}

/// Reads until the buffer is full, the file ends or an error occurs. Returns the number of bytes.
pub fn read(file: usize, into: &mut [u8]) -> usize {
    let mut count = 0;
    while count < into.len() {
        let rest = &mut into[count..];
        // SAFETY: the kernel writes at most the rest.
        let got = unsafe {
            call(libc::SYS_read, [file, rest.as_mut_ptr() as usize, rest.len(), 0, 0, 0])
        };
        if got <= 0 {
            break;
        }
        count += got as usize;
    }
    count
}

/// Closes a file descriptor.
pub fn close(file: usize) {
    // SAFETY: the caller owns the descriptor.
    unsafe { call(libc::SYS_close, [file, 0, 0, 0, 0, 0]) };
}
