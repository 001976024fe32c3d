//! Large pages for the heap, through glibc's own malloc tunable.
//!
//! malloc reads the tunable when the process starts, before any constructor; so, where it is not
//! set yet, the program is started again with it: same process, same file, same arguments, same
//! name. Whoever sets the tunable beforehand (`pagetax ppgsz`) saves that step, and what a user has
//! put there stands.

use crate::arena;
use crate::log::{Decimal, Log};
use crate::program::Process;
use crate::stack::refuse;
use crate::system::{self, Offer};
use std::ffi::CStr;

const TUNABLES: &[u8] = b"GLIBC_TUNABLES=";
const WISH: &[u8] = b"glibc.malloc.hugetlb=";
/// Carries the process's name over the second start; a script's would be lost otherwise.
const NAME: &[u8] = b"PAGETAX_PRELOAD_NAME=";
/// <linux/prctl.h>, 6.18: advice is still followed.
const THP_DISABLE_EXCEPT_ADVISED: libc::c_ulong = 2;

/// Asks for pages of this size. 0 leaves the heap alone.
pub fn advise(page_bytes: u64, process: &Process, log: &Log) {
    if page_bytes == 0 {
        return;
    }
    if page_bytes == system::base_page() {
        return keep_to_base_pages(log);
    }
    match system::offer(page_bytes) {
        Offer::Advised => {}
        offer => return refuse(b"heap", page_bytes, offer, log),
    }
    arena::advise_from_now_on();
    let tunables = process.variable(TUNABLES).map_or(&b""[..], CStr::to_bytes);
    if !contains(tunables, WISH) {
        start_again(tunables, process, log);
    }
}

/// Without the tunable malloc asks for nothing, so only `enabled=always` has to be turned away.
fn keep_to_base_pages(log: &Log) {
    // SAFETY: these options take plain numbers.
    let done = unsafe {
        libc::prctl(libc::PR_SET_THP_DISABLE, 1, THP_DISABLE_EXCEPT_ADVISED, 0, 0) == 0
            || libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    };
    if !done {
        log.line(&[b"heap: cannot keep it to base pages"]);
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Whether the dynamic linker was run as a command; its arguments are not what exec needs again.
fn run_by_linker(exe: &CStr) -> bool {
    let bytes = exe.to_bytes();
    let start = bytes.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    bytes.get(start..).is_some_and(|base| base.starts_with(b"ld-") || base.starts_with(b"ld.so"))
}

/// Gives the process its name back after a second start, and clears the trace of it.
pub fn restore_name(process: &Process) {
    if let Some(name) = process.variable(NAME) {
        // SAFETY: the string ends in null; the kernel copies it.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
        process.remove_variable(NAME);
    }
}

/// Replaces the process by itself with the tunable set. Comes back only if that fails.
fn start_again(tunables: &[u8], process: &Process, log: &Log) {
    let exe = process.exe();
    if run_by_linker(exe) {
        return log.line(&[b"heap: started by the dynamic linker; set GLIBC_TUNABLES yourself"]);
    }
    let separator: &[u8] = if tunables.is_empty() { b"" } else { b":" };
    let mut name = [0u8; 17];
    // SAFETY: the kernel writes at most 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let name = CStr::from_bytes_until_nul(&name).unwrap_or(c"").to_bytes();
    let entries = process.environment().count() + 3;
    let Some(mut scratch) = Scratch::new(entries, tunables.len() + 128) else {
        return log.line(&[b"heap: no memory for the environment"]);
    };
    let kept = process.environment().filter(|entry| !entry.to_bytes().starts_with(TUNABLES));
    kept.for_each(|entry| scratch.entry(entry.as_ptr()));
    scratch.compose(&[TUNABLES, tunables, separator, WISH, b"1"]);
    scratch.compose(&[NAME, name]);
    // SAFETY: path, arguments and environment are arrays and strings that end in null; the scratch
    // memory is zeroed, so its array does too.
    unsafe { libc::execve(exe.as_ptr(), process.argv(), scratch.array()) };
    log.line(&[b"heap: cannot start again, errno ", Decimal::of(system::errno() as u64).digits()]);
}

/// Memory for a new environment, from the kernel: malloc is not to be touched yet.
struct Scratch {
    memory: *mut u8,
    bytes: usize,
    entries: usize,
    entries_max: usize,
    text: usize,
}

impl Scratch {
    fn new(entries_max: usize, text_bytes: usize) -> Option<Scratch> {
        let text = (entries_max + 1) * size_of::<*const libc::c_char>();
        let bytes = text + text_bytes;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, owned by the result.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        let memory = (memory != libc::MAP_FAILED).then_some(memory.cast())?;
        Some(Scratch { memory, bytes, entries: 0, entries_max, text })
    }

    fn array(&self) -> *const *const libc::c_char {
        self.memory.cast()
    }

    fn entry(&mut self, string: *const libc::c_char) {
        if self.entries < self.entries_max {
            // SAFETY: within the array, which `new` made room for.
            unsafe { *self.memory.cast::<*const libc::c_char>().add(self.entries) = string };
            self.entries += 1;
        }
    }

    /// Adds an entry made of parts; one that does not fit is left out.
    fn compose(&mut self, parts: &[&[u8]]) {
        let start = self.text;
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if start + len + 1 > self.bytes {
            return;
        }
        for byte in parts.iter().copied().flatten() {
            // SAFETY: `start + len` is within the mapping; the byte after stays 0 and ends the string.
            unsafe { *self.memory.add(self.text) = *byte };
            self.text += 1;
        }
        self.text += 1;
        // SAFETY: `start` is within the mapping.
        self.entry(unsafe { self.memory.add(start) }.cast());
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, not used after.
        unsafe { libc::munmap(self.memory.cast(), self.bytes) };
    }
}
