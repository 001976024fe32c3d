//! System calls that another process makes on our behalf: ptrace(2), for x86-64.
//!
//! The session stops a thread of the target on its way back to user mode. It sends the thread through a
//! `syscall` instruction of the vdso, stops it behind that, and restores its registers. No byte of text
//! changes, so the target's other threads are not affected.
//!
//! Invariant: whatever fails, the thread continues where it was, with its registers and its signal mask.
//! From inside a restartable sequence it continues at the abort handler, as after any preemption. The
//! kernel detaches when the tracing thread ends, so each session has its own thread ([`with_stopped`]).
//!
//! Sources: ptrace(2); for interrupted system calls, kernel/signal.c and arch/x86/kernel/signal.c of
//! Linux 6.18; for restartable sequences, rseq(2) and kernel/rseq.c.

use super::Stop;
use rustix::process::Pid;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::time::{Duration, Instant};

/// The time that a thread has to stop. A thread that waits for a disk stops only after its I/O.
const PATIENCE: Duration = Duration::from_millis(500);
/// The time to poll without sleeping, because most threads stop at once.
const EAGER: Duration = Duration::from_micros(300);
const EVENT_STOP: i32 = 128;
/// Calls that fail with EINTR after any stop, although no signal came. The session restarts them.
/// Source: signal(7), "Interruption of system calls and library functions by stop signals".
const NOT_RESTARTED: [i64; 10] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_accept,
    libc::SYS_accept4,
];

/// A stopped thread of another process.
pub struct Stopped {
    tid: Pid,
    saved: libc::user_regs_struct,
    mask: u64,
    since: Instant,
}

/// The time that a thread has waited for CPUs, from /proc/PID/schedstat.
struct CpuWait(Option<File>);

impl CpuWait {
    fn of(task: &str) -> CpuWait {
        CpuWait(File::open(format!("/proc/{task}/schedstat")).ok())
    }

    /// Returns nanoseconds, or 0 on kernels without CONFIG_SCHED_INFO.
    fn ns(&self) -> u64 {
        let mut text = [0; 80];
        let len = self.0.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let text = std::str::from_utf8(&text[..len]).unwrap_or_default();
        text.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0)
    }
}

/// Stops a thread, runs `work` on it, and detaches. Returns the duration of the stop as well.
///
/// # Errors
/// `EPERM` means that we may not trace the thread, or that another process does; `ESRCH` that it has
/// ended; `TimedOut` that it did not stop, because it waits in the kernel.
pub fn with_stopped<T: Send>(
    tid: Pid,
    work: impl FnOnce(&mut Stopped) -> T + Send,
) -> io::Result<(T, Stop)> {
    std::thread::scope(|scope| {
        let session = scope.spawn(|| {
            let waits =
                [CpuWait::of("thread-self"), CpuWait::of(&tid.as_raw_nonzero().to_string())];
            let waited_ns = || waits.iter().map(CpuWait::ns).sum::<u64>();
            let (since, before) = (Instant::now(), waited_ns());
            let wall_ns = || since.elapsed().as_nanos() as u64;
            let mut stopped = Stopped::stop(tid, since)?;
            // The scheduler adds a wait when it ends, so this may include a wait from before the stop.
            let stopping_ns = waited_ns().saturating_sub(before).min(wall_ns());
            let at_work = waited_ns();
            let result = work(&mut stopped);
            drop(stopped);
            let cpu_wait_ns = stopping_ns + waited_ns().saturating_sub(at_work);
            Ok((result, Stop { wall_ns: wall_ns(), cpu_wait_ns }))
        });
        session.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

/// Has a thread fork its process by the `syscall` instruction at `instruction`, lets it go on, and runs
/// `work` while the child holds its memory. The child never runs, and is killed before this returns. The
/// process gets no signal for it, and its own waits do not see it. The calling thread traces, and should end
/// soon after.
///
/// # Errors
/// As [`with_stopped`], or as clone(2) fails.
pub fn with_fork(tid: Pid, instruction: u64, work: impl FnOnce()) -> io::Result<()> {
    let mut stopped = Stopped::stop(tid, Instant::now())?;
    let child = stopped.fork(instruction)?;
    drop(stopped);
    work();
    drop(child);
    Ok(())
}

/// A child of a traced process that never runs. Dropping it kills it.
struct HeldChild(Pid);

impl Drop for HeldChild {
    fn drop(&mut self) {
        let pid = self.0.as_raw_nonzero().get();
        // It has ended if its memory was needed elsewhere.
        let _ = rustix::process::kill_process(self.0, rustix::process::Signal::KILL);
        let mut status = 0;
        // SAFETY: the status is live. The child is our tracee, so this reaps no other code's child.
        while unsafe { libc::waitpid(pid, &mut status, libc::__WALL) } == pid
            && libc::WIFSTOPPED(status)
        {}
    }
}

/// Makes a ptrace(2) request with plain numbers, or pointers to data of the request's type.
fn request(request: libc::c_uint, tid: Pid, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: callers pass, as `data`, either a number or the address of a live object of the type
    // that the request reads or writes. The kernel refuses to trace this process, so the request
    // changes nothing here but that object.
    let done = unsafe {
        libc::ptrace(request as _, tid.as_raw_nonzero().get(), address as *mut u8, data as *mut u8)
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Stopped {
    fn stop(tid: Pid, since: Instant) -> io::Result<Stopped> {
        request(libc::PTRACE_SEIZE as _, tid, 0, libc::PTRACE_O_TRACESYSGOOD as usize)?;
        request(libc::PTRACE_INTERRUPT as _, tid, 0, 0)?;
        wait_event_stop(tid)?;
        // SAFETY: plain numbers, for which zeros are valid.
        let saved = unsafe { std::mem::zeroed() };
        let mut stopped = Stopped { tid, saved, mask: 0, since };
        stopped.saved = stopped.registers()?;
        // During our call the kernel finds the thread outside its sequence, and clears `rseq_cs`. Returned
        // into the sequence, the thread would commit although it was preempted.
        if let Some(abort) = abort_handler(tid, stopped.saved.rip)? {
            stopped.saved.rip = abort;
        }
        let mask = ptr::from_mut(&mut stopped.mask) as usize;
        request(libc::PTRACE_GETSIGMASK as _, tid, 8, mask)?;
        // A signal handler between our calls would run on the registers of those calls.
        let all = u64::MAX;
        request(libc::PTRACE_SETSIGMASK as _, tid, 8, ptr::from_ref(&all) as usize)?;
        Ok(stopped)
    }

    /// Returns the time since the stop began.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// Returns the stack pointer. Memory more than 128 bytes below is free (System V ABI's red zone).
    pub fn stack_pointer(&self) -> u64 {
        self.saved.rsp
    }

    /// Makes the thread execute a system call by the `syscall` instruction at `instruction`.
    ///
    /// # Errors
    /// Fails as the call does, or as ptrace(2) does.
    pub fn call(&mut self, instruction: u64, number: i64, args: [u64; 6]) -> io::Result<u64> {
        self.begin_call(instruction, number, args)?;
        // The first stop is at the call's entry, the second at its exit.
        for _ in 0..2 {
            request(libc::PTRACE_SYSCALL as _, self.tid, 0, 0)?;
            wait_for(self.tid, |status| libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80, None)?;
        }
        match self.registers()?.rax as i64 {
            error @ -4095..0 => Err(io::Error::from_raw_os_error(-error as i32)),
            value => Ok(value as u64),
        }
    }

    /// Calls clone(2) in the thread, and keeps the child stopped at its first instruction.
    fn fork(&mut self, instruction: u64) -> io::Result<HeldChild> {
        let both = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE;
        request(libc::PTRACE_SETOPTIONS as _, self.tid, 0, both as usize)?;
        // Without a signal at its end, the child is none that wait(2) returns.
        self.begin_call(instruction, libc::SYS_clone, [0; 6])?;
        let is_event = |status: i32| status >> 16 == libc::PTRACE_EVENT_CLONE;
        let is_call = |status: i32| libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80;
        let next = |thread: &Stopped| {
            request(libc::PTRACE_SYSCALL as _, thread.tid, 0, 0)?;
            wait_for(thread.tid, |status| is_event(status) || is_call(status), None)
        };
        next(self)?;
        if !is_event(next(self)?) {
            let error = -(self.registers()?.rax as i64);
            return Err(io::Error::from_raw_os_error(error as i32));
        }
        let mut pid: libc::c_ulong = 0;
        request(libc::PTRACE_GETEVENTMSG as _, self.tid, 0, ptr::from_mut(&mut pid) as usize)?;
        let child = Pid::from_raw(pid as i32).map(HeldChild).ok_or(io::ErrorKind::InvalidData)?;
        wait_for(child.0, |_| true, None)?;
        // If this process is killed, the child must not run on as a second copy of the program.
        request(libc::PTRACE_SETOPTIONS as _, child.0, 0, libc::PTRACE_O_EXITKILL as usize)?;
        next(self)?;
        Ok(child)
    }

    /// Sends the thread to a system call, without letting it go.
    fn begin_call(&mut self, instruction: u64, number: i64, args: [u64; 6]) -> io::Result<()> {
        let mut registers = self.saved;
        registers.rip = instruction;
        registers.rax = number as u64;
        // -1 means "not in a system call", so the kernel restarts nothing on the way back to user mode.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] =
            args;
        self.set_registers(&registers)
    }

    fn registers(&self) -> io::Result<libc::user_regs_struct> {
        // SAFETY: plain numbers, for which zeros are valid.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        let place = ptr::from_mut(&mut registers) as usize;
        request(libc::PTRACE_GETREGS as _, self.tid, 0, place)?;
        Ok(registers)
    }

    fn set_registers(&self, registers: &libc::user_regs_struct) -> io::Result<()> {
        request(libc::PTRACE_SETREGS as _, self.tid, 0, ptr::from_ref(registers) as usize)
    }

    /// Restores the registers and detaches. The thread then returns through the kernel's signal code, which
    /// restarts an interrupted call by the registers that it finds.
    fn let_go(&mut self) -> io::Result<()> {
        let mut registers = self.saved;
        let interrupted = registers.rax as i64 == -i64::from(libc::EINTR);
        if interrupted && NOT_RESTARTED.contains(&(registers.orig_rax as i64)) && !self.has_signal()
        {
            registers.rax = registers.orig_rax;
            registers.rip -= SYSCALL_BYTES;
        }
        self.set_registers(&registers)?;
        request(libc::PTRACE_SETSIGMASK as _, self.tid, 8, ptr::from_ref(&self.mask) as usize)?;
        request(libc::PTRACE_DETACH as _, self.tid, 0, 0)
    }

    /// Returns true if a signal is pending that the thread does not block.
    fn has_signal(&self) -> bool {
        let tid = self.tid.as_raw_nonzero();
        let status = std::fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
        let pending = status.lines().filter_map(|line| {
            let set = line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:"))?;
            u64::from_str_radix(set.trim(), 16).ok()
        });
        pending.fold(0, |all, set| all | set) & !self.mask != 0
    }
}

/// Returns the abort handler of the restartable sequence around an address; none outside of sequences. Before
/// Linux 5.13 the kernel does not report where a thread registered them, so none is found.
fn abort_handler(tid: Pid, address: u64) -> io::Result<Option<u64>> {
    let Some(area) = rseq_area(tid)? else { return Ok(None) };
    let memory = File::open(format!("/proc/{}/mem", tid.as_raw_nonzero()))?;
    let word = |at: u64| {
        let mut word = [0; 8];
        memory.read_exact_at(&mut word, at).map(|()| u64::from_ne_bytes(word))
    };
    let sequence = word(area + RSEQ_CS)?;
    if sequence == 0 {
        return Ok(None);
    }
    // If the memory is unmapped, the kernel kills the thread when it next returns to user mode.
    let Ok(start) = word(sequence + START_IP) else { return Ok(None) };
    let inside = address.wrapping_sub(start) < word(sequence + POST_COMMIT_OFFSET)?;
    Ok(if inside { Some(word(sequence + ABORT_IP)?) } else { None })
}

/// Returns the address of a thread's `struct rseq`; none if it registered none.
fn rseq_area(tid: Pid) -> io::Result<Option<u64>> {
    /// `struct ptrace_rseq_configuration` of <linux/ptrace.h>.
    #[repr(C)]
    #[derive(Default)]
    struct Configuration {
        area: u64,
        bytes: u32,
        signature: u32,
        flags: u32,
        padding: u32,
    }
    const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
    let mut configuration = Configuration::default();
    let place = ptr::from_mut(&mut configuration) as usize;
    match request(PTRACE_GET_RSEQ_CONFIGURATION, tid, size_of::<Configuration>(), place) {
        Ok(()) => Ok(Some(configuration.area).filter(|area| *area != 0)),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(error),
        Err(_) => Ok(None),
    }
}

/// The offset of `rseq_cs` in `struct rseq`; the next three are of `struct rseq_cs` (<linux/rseq.h>).
const RSEQ_CS: u64 = 8;
const START_IP: u64 = 8;
const POST_COMMIT_OFFSET: u64 = 16;
const ABORT_IP: u64 = 24;

/// The length of the `syscall` instruction.
const SYSCALL_BYTES: u64 = 2;

impl Drop for Stopped {
    fn drop(&mut self) {
        // It fails only if the thread has ended. Otherwise the kernel detaches when this thread ends.
        let _ = self.let_go();
    }
}

/// Waits for the stop of PTRACE_INTERRUPT, and delivers signals that come first.
fn wait_event_stop(tid: Pid) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = wait_for(tid, |_| true, Some(deadline))?;
        let signal = libc::WSTOPSIG(status);
        match status >> 16 {
            EVENT_STOP if signal == libc::SIGTRAP => return Ok(()),
            // Job control has stopped it: it must stay stopped, so it cannot make calls.
            EVENT_STOP => return Err(io::ErrorKind::WouldBlock.into()),
            _ => request(libc::PTRACE_CONT as _, tid, 0, signal as usize)?,
        }
    }
}

/// Waits for a stop whose status is `wanted`.
fn wait_for(tid: Pid, wanted: impl Fn(i32) -> bool, deadline: Option<Instant>) -> io::Result<i32> {
    let start = Instant::now();
    loop {
        let mut status = 0;
        let flags = libc::__WALL | if deadline.is_some() { libc::WNOHANG } else { 0 };
        // SAFETY: the status is live. The thread is our tracee, so this reaps no other code's child.
        match unsafe { libc::waitpid(tid.as_raw_nonzero().get(), &mut status, flags) } {
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            -1 => return Err(io::Error::last_os_error()),
            0 if deadline.is_some_and(|deadline| Instant::now() > deadline) => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            0 if start.elapsed() > EAGER => std::thread::sleep(Duration::from_micros(50)),
            0 => std::thread::yield_now(),
            _ if !libc::WIFSTOPPED(status) => {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            _ if wanted(status) => return Ok(status),
            // SIGSTOP, which cannot be blocked, has stopped the process. Only this thread continues: the
            // kernel stops it when we detach, unless SIGCONT has come.
            _ if status >> 16 == EVENT_STOP => request(libc::PTRACE_SYSCALL as _, tid, 0, 0)?,
            _ => request(libc::PTRACE_SYSCALL as _, tid, 0, libc::WSTOPSIG(status) as usize)?,
        }
    }
}
