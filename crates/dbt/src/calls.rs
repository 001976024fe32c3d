//! The system calls that a burst may make. They return soon in any case, as signals are blocked until then,
//! and they change nothing that a burst relies on. The program makes all others natively.

use crate::maps::Maps;
use crate::system;
use crate::thread_state::SignalContext;
use std::ops::Range;

/// The action for a system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The program makes the call natively: the burst ends before it.
    Leave,
    /// The burst makes the call.
    Run,
    /// The burst makes the call, which unmaps this memory.
    Unmap(Range<u64>),
    /// The burst makes the call without waiting: it sets the timeout, in this register of
    /// [`SignalContext::registers`], to 0. If the call returns 0, the program repeats it natively.
    Try(usize),
}

const RDI: usize = 8;
const RSI: usize = 9;
const RDX: usize = 12;
const R10: usize = 2;
const R8: usize = 0;
const R9: usize = 1;
/// The register of a call's number, then of its result.
pub const RAX: usize = 13;

/// Decides on the call that a program is about to make.
pub fn decide(context: &SignalContext, maps: &Maps) -> Decision {
    let [a, b, c, d] = [RDI, RSI, RDX, R10].map(|place| context.registers[place]);
    let run_if = |may: bool| if may { Decision::Run } else { Decision::Leave };
    let range = a..a.saturating_add(b);
    match context.registers[RAX] as i64 {
        libc::SYS_brk
        | libc::SYS_madvise
        | libc::SYS_mincore
        | libc::SYS_lseek
        | libc::SYS_fstat
        | libc::SYS_stat
        | libc::SYS_lstat
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_access
        | libc::SYS_readlink
        | libc::SYS_getcwd
        | libc::SYS_getpid
        | libc::SYS_gettid
        | libc::SYS_getuid
        | libc::SYS_geteuid
        | libc::SYS_getgid
        | libc::SYS_getegid
        | libc::SYS_getrusage
        | libc::SYS_times
        | libc::SYS_time
        | libc::SYS_gettimeofday
        | libc::SYS_clock_gettime
        | libc::SYS_getcpu
        | libc::SYS_sched_yield
        | libc::SYS_sched_getaffinity
        | libc::SYS_sysinfo
        | libc::SYS_uname
        | libc::SYS_epoll_ctl
        | libc::SYS_ftruncate
        | libc::SYS_unlink => Decision::Run,
        libc::SYS_getrandom => run_if(c & u64::from(libc::GRND_RANDOM) == 0),
        libc::SYS_mmap => {
            let is_fixed = d as i32 & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
            let makes_code = c as i32 & libc::PROT_EXEC != 0;
            match () {
                () if makes_code || is_fixed && maps.has_code_in(range.clone()) => Decision::Leave,
                () if is_fixed => Decision::Unmap(range),
                () => Decision::Run,
            }
        }
        libc::SYS_munmap | libc::SYS_mremap if maps.has_code_in(range.clone()) => Decision::Leave,
        libc::SYS_munmap => Decision::Unmap(range),
        libc::SYS_mremap => run_if(d as i32 & libc::MREMAP_FIXED == 0).unmapping(range),
        libc::SYS_mprotect => run_if(c as i32 & libc::PROT_EXEC == 0 && !maps.has_code_in(range)),
        // Operations that wake return at once; those that sleep do not.
        libc::SYS_futex => run_if(matches!(
            b as i32 & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME),
            libc::FUTEX_WAKE
                | libc::FUTEX_WAKE_OP
                | libc::FUTEX_WAKE_BITSET
                | libc::FUTEX_CMP_REQUEUE
        )),
        libc::SYS_fcntl => run_if(matches!(
            b as i32,
            libc::F_GETFD
                | libc::F_SETFD
                | libc::F_GETFL
                | libc::F_SETFL
                | libc::F_GETLK
                | libc::F_SETLK
        )),
        libc::SYS_read
        | libc::SYS_write
        | libc::SYS_pread64
        | libc::SYS_pwrite64
        | libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_recvfrom
        | libc::SYS_sendto => run_if(comes_back(a)),
        libc::SYS_epoll_wait if c as i64 > 0 => Decision::Try(R10),
        _ => Decision::Leave,
    }
}

/// Returns true if a call may bring huge pages where there were none.
pub fn asks_for_large_pages(context: &SignalContext) -> bool {
    let [c, d] = [RDX, R10].map(|place| context.registers[place] as i32);
    match context.registers[RAX] as i64 {
        libc::SYS_madvise => [libc::MADV_HUGEPAGE, libc::MADV_COLLAPSE].contains(&c),
        libc::SYS_mmap => d & libc::MAP_HUGETLB != 0,
        libc::SYS_shmget => c & libc::SHM_HUGETLB != 0,
        _ => false,
    }
}

/// Makes the call that a program is about to make. Returns its result, or a negative error.
pub fn make(context: &SignalContext) -> i64 {
    let registers = &context.registers;
    let arguments = [RDI, RSI, RDX, R10, R8, R9].map(|place| registers[place] as usize);
    // SAFETY: the program's own call, one that `decide` allows here.
    unsafe { system::call(registers[RAX] as i64, arguments) as i64 }
}

impl Decision {
    fn unmapping(self, range: Range<u64>) -> Decision {
        if self == Decision::Run { Decision::Unmap(range) } else { self }
    }
}

/// Returns true if reads and writes do not wait: the file is regular or has O_NONBLOCK.
fn comes_back(file: u64) -> bool {
    let arguments = [file as usize, libc::F_GETFL as usize, 0, 0, 0, 0];
    // SAFETY: only reads flags.
    let flags = unsafe { system::call(libc::SYS_fcntl, arguments) };
    if flags >= 0 && flags as i32 & libc::O_NONBLOCK != 0 {
        return true;
    }
    // SAFETY: zeros are a valid stat.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    let arguments = [file as usize, &raw mut status as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes a stat.
    let known = unsafe { system::call(libc::SYS_fstat, arguments) };
    known == 0 && status.st_mode & libc::S_IFMT == libc::S_IFREG
}
