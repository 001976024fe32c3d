//! Events of all threads of a process that runs already.

use crate::pages::inject::Injector;
use crate::sys::perf::{Event, EventSpec, TASK_CLOCK};
use rustix::process::Pid;
use std::io;

/// Each thread needs a file descriptor, of which a process often has 1,024.
const CLOCKED_THREADS_MAX: usize = 256;

/// Opens an event for each thread of a process. Threads that they make later count as well.
pub fn of_threads(pid: Pid, open: impl Fn(i32) -> io::Result<Event>) -> io::Result<Vec<Event>> {
    let threads = Injector::threads(pid)?;
    threads.into_iter().map(|tid| open(tid.as_raw_nonzero().get())).collect()
}

/// The CPU time of a process since this was opened, by the times at which its threads got and left a CPU.
///
/// The kernel's own account is less exact. When a task wakes up and preempts another, the account charges
/// it from the wake-up on. The task that went on until then loses that time. A kernel thread that wakes
/// up often beside a long system call takes a tenth of its time so.
#[derive(Debug)]
pub struct TaskClock(Vec<Event>);

impl TaskClock {
    /// Opens the clock; none if the kernel is older than 5.13, does not allow it, or if the process has
    /// too many threads or starts some at this moment.
    pub fn open(pid: u32) -> Option<TaskClock> {
        let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
        let threads = Injector::threads(pid).ok()?;
        if threads.len() > CLOCKED_THREADS_MAX {
            return None;
        }
        let spec = EventSpec { inherit: true, threads_only: true, ..EventSpec::new(TASK_CLOCK) };
        let open = |tid| Event::open(&EventSpec { pid: tid, ..spec });
        let clock = TaskClock(of_threads(pid, open).ok()?);
        // A thread that came meanwhile may be in no count, or in two.
        (Injector::threads(pid).ok()? == threads).then_some(clock)
    }

    /// Reads the time so far, that of ended threads included.
    pub fn ns(&self) -> io::Result<u64> {
        self.0.iter().map(Event::count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::process::cpu_clock_ns;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    /// Starts a shell that works until its input ends, and does the work once more in a child.
    fn busy(script: &str) -> std::process::Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().unwrap()
    }

    #[test]
    fn the_clock_of_a_process_is_its_cpu_time_without_that_of_its_children() {
        let work = "i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done";
        let mut child = busy(&format!("read a; {work}; ({work}); echo; read b"));
        let Some(clock) = TaskClock::open(child.id()) else {
            println!("SKIP: the kernel gives no clock of another process's threads");
            child.kill().unwrap();
            child.wait().unwrap();
            return;
        };
        let before_ns = cpu_clock_ns(child.id()).unwrap();
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"\n").unwrap();
        let mut said = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        let account_ns = cpu_clock_ns(child.id()).unwrap() - before_ns;
        let ratio = clock.ns().unwrap() as f64 / account_ns as f64;
        child.kill().unwrap();
        child.wait().unwrap();
        assert!((0.9..1.3).contains(&ratio), "{ratio} of {account_ns} ns");
        assert!(clock.ns().unwrap() > 0, "an ended process keeps its time");
    }

    #[test]
    fn threads_that_start_later_and_end_count() {
        // Other tests start threads, but not all the time.
        let until = Instant::now() + Duration::from_secs(10);
        let clock = loop {
            match TaskClock::open(std::process::id()) {
                Some(clock) => break clock,
                None if Instant::now() > until => {
                    return println!("SKIP: the kernel gives no clock");
                }
                None => {}
            }
        };
        let before_ns = clock.ns().unwrap();
        let spin = || {
            let begun_ns = own_thread_ns();
            while own_thread_ns() - begun_ns < 50_000_000 {}
        };
        std::thread::spawn(spin).join().unwrap();
        assert!(clock.ns().unwrap() - before_ns >= 50_000_000);
    }

    fn own_thread_ns() -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }
}
