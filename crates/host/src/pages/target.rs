//! A running process whose pages may be changed, or the reason why not.
//!
//! Invariant: a process is named by a pidfd from the first look on, so that what is done to it is
//! never done to another one that got its number.

use crate::sys::remote;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::{AsFd, OwnedFd};

/// The reason for which a process is left alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not a number.
    #[error("it is no process id\n  hint: list processes with ps -e")]
    NoId,
    /// No process has this number, or no longer.
    #[error("no such process\n  hint: list processes with ps -e")]
    Gone,
    /// Ended, and not waited for.
    #[error("it has ended already")]
    Zombie,
    /// It has no memory of its own.
    #[error("a kernel thread has no memory of its own")]
    KernelThread,
    /// It belongs to another user.
    #[error("it belongs to user {0}\n  hint: be that user, or root")]
    OtherUser(u32),
    /// Its rights are not its user's.
    #[error("it runs set-id or with capabilities of its own\n  hint: be root")]
    SetId,
    /// A filter could kill it for a call that it would not make itself.
    #[error(
        "a seccomp filter watches its system calls, and may kill it for ours\n  hint: -F, if that may be"
    )]
    Seccomp,
    /// A 32-bit program has another way to make system calls.
    #[error("it is no 64-bit program of this machine")]
    Foreign,
    /// It is this process.
    #[error("pagetax does not change itself")]
    Own,
    /// It has capabilities that this process lacks, or is outside its user namespace.
    #[error(
        "the kernel does not let this root change it\n  hint: run pagetax outside the container, or with \
         CAP_SYS_PTRACE"
    )]
    Denied,
    /// An error of the kernel.
    #[error("the kernel does not let us: {0}")]
    System(String),
}

/// A process that may be changed.
#[derive(Debug)]
pub struct Target {
    pid: Pid,
    pidfd: OwnedFd,
    /// process_madvise(2) is allowed; else calls are made by the target itself.
    remote: bool,
}

impl Target {
    /// Opens a process, if it may be changed. `force` allows a seccomp filter, which could kill the target.
    pub fn open(pid: u32, force: bool) -> Result<Target, Refusal> {
        let gone = |_| Refusal::Gone;
        let pid = Pid::from_raw(i32::try_from(pid).map_err(|_| Refusal::Gone)?);
        let pid = pid.ok_or(Refusal::Gone)?;
        if pid == rustix::process::getpid() {
            return Err(Refusal::Own);
        }
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(gone)?;
        let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))
            .map_err(|_| Refusal::Gone)?;
        check(&status, rustix::process::geteuid().as_raw(), force)?;
        check_class(pid)?;
        // Advice about nothing: only the permission is looked at. Linux 5.10 refuses advice that it does not know
        // before it looks at permissions.
        let probe = remote::advise(pidfd.as_fd(), 0, 0, remote::RemoteAdvice::Cold);
        let remote = !matches!(probe, Err(error) if error.raw_os_error() == Some(libc::EPERM));
        Ok(Target { pid, pidfd, remote })
    }

    /// Returns the same process, which makes all calls itself, as where process_madvise(2) is not allowed.
    pub fn by_tracing(self) -> Target {
        Target { remote: false, ..self }
    }

    /// Returns the target's process id.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns the pidfd, for calls that take one.
    pub fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    /// Returns true if process_madvise(2) is allowed.
    pub fn is_remote(&self) -> bool {
        self.remote
    }

    /// Returns true if it still runs.
    pub fn is_alive(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.pidfd, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(0))
    }
}

/// Parses the number of a process: `123`, or `/proc/123`.
pub fn pid_of(operand: &str) -> Option<u32> {
    let digits = operand.strip_prefix("/proc/").unwrap_or(operand).trim_end_matches('/');
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|pid| plain && *pid > 0)
}

/// Checks a process by /proc/PID/status.
fn check(status: &str, euid: u32, force: bool) -> Result<(), Refusal> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.split_whitespace().collect::<Vec<_>>())
    };
    let first = |name: &str| field(name).and_then(|words| words.first().copied());
    if matches!(first("State:"), Some("Z" | "X")) {
        return Err(Refusal::Zombie);
    }
    if field("VmSize:").is_none() {
        return Err(Refusal::KernelThread);
    }
    if euid != 0 {
        let uids = field("Uid:").unwrap_or_default();
        let owner = uids.first().and_then(|uid| uid.parse::<u32>().ok());
        if let Some(owner) = owner.filter(|owner| *owner != euid) {
            return Err(Refusal::OtherUser(owner));
        }
        let gids = field("Gid:").unwrap_or_default();
        let one = |ids: &[&str]| ids.windows(2).all(|pair| pair[0] == pair[1]);
        let capable = first("CapPrm:").is_some_and(|set| set.bytes().any(|digit| digit != b'0'));
        if !one(&uids) || !one(&gids) || capable {
            return Err(Refusal::SetId);
        }
    }
    match first("Seccomp:") {
        Some("1" | "2") if !force => Err(Refusal::Seccomp),
        _ => Ok(()),
    }
}

/// Checks the executable. If it cannot be read, later calls refuse.
fn check_class(pid: Pid) -> Result<(), Refusal> {
    use std::io::Read;
    const ELF64_X86: ([u8; 5], u16) = ([0x7f, b'E', b'L', b'F', 2], 62);
    let mut head = [0; 20];
    let path = format!("/proc/{}/exe", pid.as_raw_nonzero());
    match std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut head)) {
        Ok(()) if head[..5] != ELF64_X86.0 => Err(Refusal::Foreign),
        Ok(()) if u16::from_le_bytes([head[18], head[19]]) != ELF64_X86.1 => Err(Refusal::Foreign),
        Ok(()) => Ok(()),
        Err(error) => match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) if !rustix::process::geteuid().is_root() => {
                Err(Refusal::SetId)
            }
            Some(libc::EACCES | libc::EPERM) => Err(Refusal::Denied),
            Some(libc::ENOENT | libc::ESRCH) => Err(Refusal::Gone),
            _ => Err(Refusal::System(error.to_string())),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(changes: &[(&str, &str)]) -> String {
        let mut fields = vec![
            ("State:", "S (sleeping)"),
            ("Uid:", "7 7 7 7"),
            ("Gid:", "7 7 7 7"),
            ("VmSize:", "100 kB"),
            ("CapPrm:", "0000000000000000"),
            ("Seccomp:", "0"),
        ];
        for (name, value) in changes {
            fields.retain(|(known, _)| known != name);
            fields.push((name, value));
        }
        let lines = fields.iter().filter(|(_, value)| !value.is_empty());
        lines.map(|(name, value)| format!("{name}\t{value}\n")).collect()
    }

    #[test]
    fn each_refusal_has_its_reason() {
        let of = |changes, euid, force| check(&status(changes), euid, force);
        assert_eq!(of(&[], 7, false), Ok(()));
        assert_eq!(of(&[("State:", "Z (zombie)")], 7, false), Err(Refusal::Zombie));
        assert_eq!(of(&[("VmSize:", "")], 0, true), Err(Refusal::KernelThread));
        assert_eq!(of(&[], 8, true), Err(Refusal::OtherUser(7)));
        assert_eq!(of(&[], 0, false), Ok(()));
        assert_eq!(of(&[("Uid:", "7 0 0 0")], 7, true), Err(Refusal::SetId));
        assert_eq!(of(&[("Gid:", "7 4 4 4")], 7, true), Err(Refusal::SetId));
        assert_eq!(of(&[("CapPrm:", "0000000000000400")], 7, true), Err(Refusal::SetId));
        assert_eq!(of(&[("Seccomp:", "2")], 7, false), Err(Refusal::Seccomp));
        assert_eq!(of(&[("Seccomp:", "2")], 7, true), Ok(()));
    }

    #[test]
    fn operands_name_processes() {
        assert_eq!(pid_of("123"), Some(123));
        assert_eq!(pid_of("/proc/123"), Some(123));
        assert_eq!(pid_of("/proc/123/"), Some(123));
        for bad in ["", "0", "-1", "+1", "12a", "/proc/self", "99999999999"] {
            assert_eq!(pid_of(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_is_not_there_or_has_no_memory_is_refused() {
        assert_eq!(Target::open(std::process::id(), true).unwrap_err(), Refusal::Own);
        assert_eq!(Target::open(u32::MAX, true).unwrap_err(), Refusal::Gone);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        while std::fs::read_to_string(format!("/proc/{}/status", child.id()))
            .is_ok_and(|status| !status.contains("State:\tZ"))
        {
            std::thread::yield_now();
        }
        let refused = Target::open(child.id(), true).unwrap_err();
        child.wait().unwrap();
        assert_eq!(refused, Refusal::Zombie);
        assert_eq!(Target::open(child.id(), true).unwrap_err(), Refusal::Gone);
    }
}
