//! The CPUs that threads run on.

use rustix::fs::{Mode, OFlags};

/// Returns the CPU that a thread of this process ran on last.
pub fn cpu_of(thread: u32) -> Option<usize> {
    let path = format!("/proc/self/task/{thread}/stat");
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0; 1024];
    let read = rustix::io::read(file, &mut text).ok()?;
    let text = std::str::from_utf8(&text[..read]).ok()?;
    // After the command's name, which may hold anything: field 3 comes first, `processor` is 39.
    text.rsplit_once(')')?.1.split_whitespace().nth(36)?.parse().ok()
}

/// Returns the CPU that the calling thread runs on.
pub fn this_cpu() -> usize {
    rustix::thread::sched_getcpu()
}
