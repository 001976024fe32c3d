//! Has a process make system calls about its own memory, in short stops.
//!
//! Needs no privilege beyond tracing it (same user, and what yama says). The instruction is one of
//! the vdso's own, so nothing is written into the program.

use super::target::Refusal;
use crate::procfs::{Root, StatLine, maps};
use crate::sys::ptrace::{Stop, Stopped, with_fork, with_stopped};
use rustix::process::Pid;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Makes calls in another process.
#[derive(Debug)]
pub struct Injector {
    tid: Pid,
    instruction: u64,
}

/// A stopped process that makes calls for us.
pub struct Session<'a> {
    stopped: &'a mut Stopped,
    instruction: u64,
}

/// The stops of the target.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stops {
    /// Each stop, in the order made.
    pub all: Vec<Stop>,
}

impl Stops {
    /// Returns the longest stop; none if it was never stopped.
    pub fn longest(&self) -> Option<Stop> {
        self.all.iter().copied().max_by_key(|stop| stop.wall_ns)
    }
}

impl Injector {
    /// Finds a thread that lives and the vdso's instruction.
    pub fn open(pid: Pid) -> Result<Injector, Refusal> {
        let instruction = instruction(pid)?;
        let threads = Injector::threads(pid).map_err(refused)?;
        let tid = threads.first().copied().ok_or(Refusal::Gone)?;
        Ok(Injector { tid, instruction })
    }

    /// Returns an injector for a thread of a process.
    pub fn of_thread(pid: Pid, tid: Pid) -> io::Result<Injector> {
        let instruction = instruction(pid).map_err(io::Error::other)?;
        Ok(Injector { tid, instruction })
    }

    /// Returns the live threads of a process, the main one first.
    pub fn threads(pid: Pid) -> io::Result<Vec<Pid>> {
        let number = pid.as_raw_nonzero();
        let entries = std::fs::read_dir(format!("/proc/{number}/task"))?.flatten();
        let mut tids: Vec<i32> =
            entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        tids.sort_by_key(|tid| (*tid != number.get(), *tid));
        let lives = |tid: &i32| {
            let stat = std::fs::read_to_string(format!("/proc/{number}/task/{tid}/stat"));
            stat.is_ok_and(|stat| StatLine::parse(&stat).is_some_and(|stat| !stat.has_ended()))
        };
        Ok(tids.into_iter().filter(lives).filter_map(Pid::from_raw).collect())
    }

    /// Stops a thread, lets `work` make calls, and lets it go on; adds the stop to `stops`.
    pub fn session<T: Send>(
        &self,
        stops: &mut Stops,
        work: impl FnOnce(&mut Session<'_>) -> T + Send,
    ) -> io::Result<T> {
        let instruction = self.instruction;
        let (result, stop) =
            with_stopped(self.tid, |stopped| work(&mut Session { stopped, instruction }))?;
        stops.all.push(stop);
        Ok(result)
    }

    /// Forks the process, lets it go on, and runs `work` while a child that never runs holds its memory.
    pub fn fork(&self, work: impl FnOnce()) -> io::Result<()> {
        with_fork(self.tid, self.instruction, work)
    }
}

impl Session<'_> {
    /// Makes a system call in the target.
    pub fn call(&mut self, number: i64, args: [u64; 6]) -> io::Result<u64> {
        self.stopped.call(self.instruction, number, args)
    }

    /// Calls madvise(2) in the target.
    pub fn advise(&mut self, start: u64, len: u64, advice: i32) -> io::Result<()> {
        self.call(libc::SYS_madvise, [start, len, advice as u64, 0, 0, 0]).map(drop)
    }

    /// Returns the time since the stop began.
    pub fn elapsed(&self) -> Duration {
        self.stopped.elapsed()
    }
}

/// The kernel's are of two pages.
const VDSO_BYTES_MAX: u64 = 1 << 20;

/// Returns the address of a `syscall` in the vdso of a process.
fn instruction(pid: Pid) -> Result<u64, Refusal> {
    let number = pid.as_raw_nonzero();
    let maps = maps(&Root::default(), number.get() as u32).map_err(refused)?;
    let vdso = maps.into_iter().find(|line| line.name == "[vdso]" && line.inode == 0);
    let Range { start, end } = vdso.ok_or_else(|| Refusal::System("it has no vdso".into()))?.range;
    if end - start > VDSO_BYTES_MAX {
        return Err(Refusal::System(format!("its vdso of {} bytes is no kernel's", end - start)));
    }
    let mut code = vec![0; (end - start) as usize];
    let memory = File::open(format!("/proc/{number}/mem")).map_err(refused)?;
    memory.read_exact_at(&mut code, start).map_err(refused)?;
    let offset = system_call_in(&code)
        .ok_or_else(|| Refusal::System("its vdso makes no system call".into()))?;
    Ok(start + offset)
}

fn refused(error: io::Error) -> Refusal {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => Refusal::Gone,
        _ => Refusal::System(format!("{error}; tracing it is not allowed")),
    }
}

/// Returns the offset of a `syscall` that follows `mov $NUMBER,%eax`. So it is no part of another
/// instruction.
fn system_call_in(code: &[u8]) -> Option<u64> {
    let is = |w: &[u8]| w[0] == 0xb8 && w[3..5] == [0, 0] && w[5..7] == [0x0f, 0x05];
    code.windows(7).position(is).map(|offset| offset as u64 + 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_instruction_is_one() {
        let code = [0x90, 0x0f, 0x05, 0xb8, 0x60, 0, 0, 0, 0x0f, 0x05, 0xc3];
        assert_eq!(system_call_in(&code), Some(8));
        assert_eq!(system_call_in(&code[..9]), None);
    }

    #[test]
    fn a_sleeper_makes_a_call_and_sleeps_on() {
        let mut child = std::process::Command::new("sleep").arg("0.6").spawn().unwrap();
        let pid = Pid::from_child(&child);
        std::thread::sleep(Duration::from_millis(100));
        let mut stops = Stops::default();
        let injector = Injector::open(pid).unwrap();
        let seen = injector
            .session(&mut stops, |session| {
                let own = session.call(libc::SYS_getpid, [0; 6]);
                (own, session.call(libc::SYS_close, [9999, 0, 0, 0, 0, 0]))
            })
            .unwrap();
        assert_eq!(seen.0.unwrap(), child.id() as u64);
        assert_eq!(seen.1.unwrap_err().raw_os_error(), Some(libc::EBADF));
        assert_eq!(stops.all.len(), 1);
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn a_program_is_forked_and_sees_no_child() {
        let script = "import os, sys, time\nprint('up', flush=True)\nfor _ in range(200):\n  time.sleep(0.01)\n\
                      try:\n  os.waitpid(-1, os.WNOHANG)\nexcept ChildProcessError:\n  sys.exit(7)\n";
        let mut command = std::process::Command::new("/usr/bin/python3");
        command.args(["-c", script]).stdout(std::process::Stdio::piped());
        let mut child = Ended(command.spawn().unwrap());
        let mut line = [0; 3];
        io::Read::read_exact(child.0.stdout.as_mut().unwrap(), &mut line).unwrap();
        let pid = Pid::from_child(&child.0);
        let children = || {
            let number = pid.as_raw_nonzero();
            std::fs::read_to_string(format!("/proc/{number}/task/{number}/children")).unwrap()
        };
        let mut held = String::new();
        Injector::open(pid).unwrap().fork(|| held = children()).unwrap();
        assert_eq!(state_of(held.trim().parse().unwrap()), 'Z', "one child, which was killed");
        assert_eq!(child.0.wait().unwrap().code(), Some(7), "its own waits see no child");
    }

    /// Ends a child with the test, however that ends.
    struct Ended(std::process::Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn waits_for(what: &str, mut done: impl FnMut() -> bool) {
        let limit = std::time::Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(std::time::Instant::now() < limit, "not within a minute: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn state_of(pid: u32) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
    }

    #[test]
    fn a_process_that_is_stopped_meanwhile_stays_so() {
        let child = Ended(std::process::Command::new("sleep").arg("1000").spawn().unwrap());
        let pid = Pid::from_child(&child.0);
        waits_for("sleeps", || state_of(child.0.id()) == 'S');
        let called = Injector::open(pid).unwrap().session(&mut Stops::default(), |session| {
            rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
            [(); 2].map(|()| session.call(libc::SYS_getpid, [0; 6]).unwrap())
        });
        assert_eq!(called.unwrap(), [u64::from(child.0.id()); 2]);
        waits_for("stopped", || state_of(child.0.id()) == 'T');
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
        waits_for("sleeps on", || state_of(child.0.id()) == 'S');
    }

    /// Returns a word of a file that a program maps.
    fn word(file: &File, number: u64) -> u32 {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, 4 * number).unwrap();
        u32::from_ne_bytes(bytes)
    }

    #[test]
    fn a_restartable_sequence_is_aborted() {
        const GO: u64 = 0;
        const INSIDE: u64 = 1;
        const READY: u64 = 2;
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("rseq");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/pagesize/rseq.c");
        let mut cc = std::process::Command::new("cc");
        assert!(cc.args(["-O1", "-o"]).arg(&program).arg(source).status().unwrap().success());
        let path = directory.path().join("words");
        std::fs::write(&path, [0; 4096]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        for _ in 0..20 {
            file.write_all_at(&[0; 12], 0).unwrap();
            let child = std::process::Command::new(&program)
                .arg(&path)
                // The program registers an area of its own.
                .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
                .spawn();
            let mut child = Ended(child.unwrap());
            waits_for("in its loop", || word(&file, READY) == 1);
            let injector = Injector::open(Pid::from_child(&child.0)).unwrap();
            // Outside, as it is after it was scheduled away, nothing has to be aborted.
            waits_for("inside when stopped", || {
                let inside = injector.session(&mut Stops::default(), |session| {
                    session.call(libc::SYS_getpid, [0; 6]).unwrap();
                    let inside = word(&file, INSIDE) == 1;
                    if inside {
                        file.write_all_at(&1u32.to_ne_bytes(), 4 * GO).unwrap();
                    }
                    inside
                });
                inside.unwrap()
            });
            let status = child.0.wait().unwrap();
            assert_eq!(status.code(), Some(0), "it committed across our stop");
        }
    }
}
