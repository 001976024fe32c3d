//! Children, and the resource usage of processes and threads.

use pagetax_core::exit::Exit;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
pub use rustix::process::Signal;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, kill_process, pidfd_open, waitid};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// The time between two questions whether a child has ended, where no pidfd tells.
const PAUSE: Duration = Duration::from_millis(5);

/// Returns the CPU time of all threads of a process in nanoseconds, up to this moment. /proc shows it as
/// of the last tick.
///
/// # Errors
/// Fails as clock_getcpuclockid(3) does: the process has ended, or is a thread.
pub fn cpu_clock_ns(pid: u32) -> io::Result<u64> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: `clock` outlives the call, which writes only it.
    let code = unsafe { libc::clock_getcpuclockid(pid, &mut clock) };
    if code != 0 {
        return Err(io::Error::from_raw_os_error(code));
    }
    // SAFETY: `time` outlives the call, which writes only it.
    if unsafe { libc::clock_gettime(clock, &mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// CPU time, faults and switches, as of getrusage(2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// The CPU time in user mode.
    pub user_ns: u64,
    /// The CPU time in the kernel.
    pub kernel_ns: u64,
    /// The faults that needed no I/O.
    pub minor_fault_count: u64,
    /// Faults that waited for I/O.
    pub major_fault_count: u64,
    /// Voluntary and involuntary context switches.
    pub context_switch_count: u64,
    /// The largest resident set so far, in bytes.
    pub resident_bytes_max: u64,
}

impl Usage {
    /// Returns the usage since `before`, with this resident maximum.
    pub fn since(self, before: Usage) -> Usage {
        Usage {
            user_ns: self.user_ns.saturating_sub(before.user_ns),
            kernel_ns: self.kernel_ns.saturating_sub(before.kernel_ns),
            minor_fault_count: self.minor_fault_count.saturating_sub(before.minor_fault_count),
            major_fault_count: self.major_fault_count.saturating_sub(before.major_fault_count),
            context_switch_count: self
                .context_switch_count
                .saturating_sub(before.context_switch_count),
            resident_bytes_max: self.resident_bytes_max,
        }
    }

    /// Returns the sums of both usages, with the larger resident maximum.
    pub fn plus(self, other: Usage) -> Usage {
        Usage {
            user_ns: self.user_ns + other.user_ns,
            kernel_ns: self.kernel_ns + other.kernel_ns,
            minor_fault_count: self.minor_fault_count + other.minor_fault_count,
            major_fault_count: self.major_fault_count + other.major_fault_count,
            context_switch_count: self.context_switch_count + other.context_switch_count,
            resident_bytes_max: self.resident_bytes_max.max(other.resident_bytes_max),
        }
    }

    fn of(raw: &libc::rusage) -> Usage {
        let time = |t: libc::timeval| t.tv_sec as u64 * 1_000_000_000 + t.tv_usec as u64 * 1_000;
        Usage {
            user_ns: time(raw.ru_utime),
            kernel_ns: time(raw.ru_stime),
            minor_fault_count: raw.ru_minflt as u64,
            major_fault_count: raw.ru_majflt as u64,
            context_switch_count: (raw.ru_nvcsw + raw.ru_nivcsw) as u64,
            resident_bytes_max: raw.ru_maxrss as u64 * 1024,
        }
    }
}

/// Returns the usage of the calling thread.
pub fn thread_usage() -> Usage {
    usage_of(libc::RUSAGE_THREAD)
}

/// Returns the usage of all threads of the calling process.
pub fn process_usage() -> Usage {
    usage_of(libc::RUSAGE_SELF)
}

fn usage_of(who: libc::c_int) -> Usage {
    let mut raw = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a live rusage; zeros are valid for it, so it is initialised even if
    // the call failed, which it cannot for these constants.
    let raw = unsafe {
        libc::getrusage(who, raw.as_mut_ptr());
        raw.assume_init()
    };
    Usage::of(&raw)
}

/// A forked child. Dropping it kills and reaps it, unless it was waited for.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    pidfd: Option<OwnedFd>,
    reaped: bool,
}

/// Forks a child that runs `work` and exits with its result. The child is killed when its parent ends.
///
/// The child has only the forking thread, so `work` must not wait for a lock that another thread may
/// hold: it cannot print or log. It may allocate: glibc and musl keep the heap consistent across forks.
pub fn fork(work: impl FnOnce() -> i32) -> io::Result<Child> {
    let parent = rustix::process::getpid();
    // SAFETY: the child runs only `work`, under the contract above, and ends in _exit. So no
    // destructor or exit handler of the parent runs twice.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let killed_with_parent =
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            let orphan = rustix::process::getppid() != Some(parent);
            let status = if killed_with_parent.is_err() || orphan {
                125
            } else {
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(101)
            };
            // SAFETY: _exit never returns and takes any status.
            unsafe { libc::_exit(status) }
        }
        pid => {
            let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?;
            Ok(Child { pid, pidfd: None, reaped: false })
        }
    }
}

impl Child {
    /// Returns the child's process id.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends a signal. If the child has ended meanwhile, the signal is lost.
    pub fn signal(&self, signal: Signal) {
        if !self.reaped {
            let _ = kill_process(self.pid, signal);
        }
    }

    /// Waits like [`Child::ends_within`], by asking again and again.
    fn ends_soon(&self, timeout: Duration) -> io::Result<bool> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let deadline = Instant::now() + timeout;
        loop {
            let has_ended = waitid(WaitId::Pid(self.pid), options)?.is_some();
            let left = deadline.saturating_duration_since(Instant::now());
            if has_ended || left.is_zero() {
                return Ok(has_ended);
            }
            std::thread::sleep(left.min(PAUSE));
        }
    }

    /// Waits at most `timeout` for its end and returns true if it has ended. It is not reaped, so /proc still
    /// shows its times. A signal that we handle cuts the wait short.
    pub fn ends_within(&mut self, timeout: Duration) -> io::Result<bool> {
        let pidfd = match self.pidfd.take() {
            Some(pidfd) => pidfd,
            None => match pidfd_open(self.pid, PidfdFlags::empty()) {
                Ok(pidfd) => pidfd,
                // Sandboxes filter the call.
                Err(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => return self.ends_soon(timeout),
                Err(error) => return Err(error.into()),
            },
        };
        let pidfd = self.pidfd.insert(pidfd);
        let timeout =
            Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos() as _ };
        match rustix::event::poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => Ok(false),
            ready => Ok(ready? > 0),
        }
    }

    /// Returns the exit and the usage, with that of its own children; `None` while it runs.
    pub fn try_wait(&mut self) -> io::Result<Option<(Exit, Usage)>> {
        self.wait4(libc::WNOHANG)
    }

    /// Waits until the child exits.
    pub fn wait(&mut self) -> io::Result<(Exit, Usage)> {
        self.wait4(0)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn wait4(&mut self, flags: libc::c_int) -> io::Result<Option<(Exit, Usage)>> {
        if self.reaped {
            return Err(io::Error::from_raw_os_error(libc::ECHILD));
        }
        let mut status = 0;
        let mut raw = MaybeUninit::<libc::rusage>::zeroed();
        let reaped = loop {
            // SAFETY: both pointers are live. The child was not reaped, so its pid still names it.
            let r = unsafe {
                libc::wait4(self.pid.as_raw_nonzero().get(), &mut status, flags, raw.as_mut_ptr())
            };
            match r {
                -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => continue,
                -1 => return Err(io::Error::last_os_error()),
                0 => return Ok(None),
                _ => break raw,
            }
        };
        self.reaped = true;
        let exit = if libc::WIFSIGNALED(status) {
            Exit::Signal(libc::WTERMSIG(status))
        } else {
            Exit::Code(libc::WEXITSTATUS(status))
        };
        // SAFETY: zeros are a valid rusage, and wait4 has filled it in.
        let raw = unsafe { reaped.assume_init() };
        Ok(Some((exit, Usage::of(&raw))))
    }
}

impl From<std::process::Child> for Child {
    /// Takes over a child of [`std::process::Command`], to read its usage.
    fn from(child: std::process::Child) -> Child {
        Child { pid: Pid::from_child(&child), pidfd: None, reaped: false }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            // Both fail only if the child has ended already.
            self.signal(Signal::KILL);
            let _ = self.wait();
        }
    }
}

/// Variables that fix the seeds of hash functions, which differ from run to run otherwise.
const HASH_SEEDS: [(&str, &str); 3] =
    [("PYTHONHASHSEED", "0"), ("PERL_HASH_SEED", "0"), ("PERL_PERTURB_KEYS", "0")];

/// Gives Python and Perl programs that this process starts from now on the same hashes in each run, unless
/// the environment says which. Returns false if other threads might read the environment.
pub fn keep_hashes() -> bool {
    let is_alone = std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    for (name, value) in HASH_SEEDS {
        if is_alone && std::env::var_os(name).is_none() {
            // SAFETY: no other thread of this process runs.
            unsafe { std::env::set_var(name, value) };
        }
    }
    is_alone
}

/// Gives programs that this process starts from now on the same addresses in each run.
///
/// # Errors
/// A filter of system calls refuses it, as that of some containers does.
pub fn keep_addresses() -> std::io::Result<()> {
    // SAFETY: the call changes how later programs are laid out, and no memory of this process.
    match unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) } {
        -1 => Err(std::io::Error::last_os_error()),
        _ => Ok(()),
    }
}
