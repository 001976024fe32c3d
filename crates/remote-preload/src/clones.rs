//! clone(2), as a function and through syscall(2). A child that gets a copy of the memory is
//! handled as the child of a fork.

use crate::forks::{clone_as_fork, fork_without_handlers, restart_cloned_child};
use crate::threads::next;
use crate::{fail, paged, private};
use libc::{c_int, c_long, c_void, pid_t};
use std::arch::asm;
use std::sync::atomic::AtomicUsize;

/// The size of the stack that a child uses until its pager runs. Its own stack may be short, and
/// paged.
const STACK_BYTES: usize = 256 << 10;

type ChildMain = unsafe extern "C" fn(*mut c_void) -> c_int;
type Clone = unsafe extern "C" fn(
    ChildMain,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

/// The function that a child is to run, and its stack.
struct CloneStart {
    run: ChildMain,
    argument: *mut c_void,
    stack: *mut c_void,
}

/// Returns true if the child gets a copy of the paged memory.
fn copies_memory(flags: u64) -> bool {
    flags & libc::CLONE_VM as u64 == 0 && paged::paged().is_some()
}

/// Replaces the C library's clone(2). A child that gets a copy of the memory starts on a stack of
/// ours.
///
/// # Safety
/// The caller keeps the contract of clone(2). The last three arguments are passed on unread: the
/// flags say which of them exist.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    run: ChildMain,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parents_number: *mut c_void,
    variables: *mut c_void,
    childs_number: *mut c_void,
) -> c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let address = next(c"clone", &NEXT);
    if address == 0 {
        return fail(libc::ENOSYS, -1);
    }
    // SAFETY: the C library's own function of that name takes these arguments, or only the first
    // four.
    let real = unsafe { std::mem::transmute::<usize, Clone>(address) };
    let call = |run: ChildMain, stack, argument| {
        // SAFETY: as the caller promises.
        unsafe { real(run, stack, flags, argument, parents_number, variables, childs_number) }
    };
    if !copies_memory(flags as u32 as u64) || stack.is_null() {
        return call(run, stack, argument);
    }
    let ours = private::allocate(STACK_BYTES, 16);
    if ours.is_null() {
        return fail(libc::ENOMEM, -1);
    }
    let mut begin = CloneStart { run, argument, stack };
    let result = clone_as_fork(|| {
        call(run_child, ours.wrapping_add(STACK_BYTES).cast(), (&raw mut begin).cast())
    });
    // SAFETY: allocated above; the child has a copy of its own.
    unsafe { private::free(ours) };
    result
}

/// Runs in the child, on a stack of ours. The stack that the program gave is not touched yet: it
/// may be paged.
unsafe extern "C" fn run_child(begin: *mut c_void) -> c_int {
    // SAFETY: `clone` passed a pointer into the parent thread's stack, of which the child has a
    // copy.
    let CloneStart { run, argument, stack } = unsafe { begin.cast::<CloneStart>().read() };
    restart_cloned_child();
    // SAFETY: switches to the child's own stack for good. The program passed its end, as clone(2)
    // requires.
    unsafe {
        asm!(
            "mov rsp, rsi",
            "and rsp, -16",
            "xor ebp, ebp",
            "call rdx",
            "mov edi, eax",
            "call {exit}",
            "ud2",
            in("rsi") stack,
            in("rdi") argument,
            in("rdx") run,
            exit = sym exit_child,
            options(noreturn)
        )
    }
}

/// Ends the child together with its pager threads. The exit that follows clone(2) ends one thread
/// only.
extern "C" fn exit_child(status: c_int) -> ! {
    // SAFETY: ends the process without its handlers, as clone(2) does.
    unsafe { libc::_exit(status) }
}

/// Replaces syscall(2): a call that forks is handled as a fork.
///
/// # Safety
/// The caller keeps the contract of syscall(2). Calls with fewer arguments pass whatever the
/// registers hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    first: usize,
    second: usize,
    third: usize,
    fourth: usize,
    fifth: usize,
    sixth: usize,
) -> c_long {
    // SAFETY: as the caller promises.
    let call = || unsafe { system_call(number, [first, second, third, fourth, fifth, sixth]) };
    let forks = match number {
        libc::SYS_fork => copies_memory(0),
        // With another stack, the child could not return to the caller of this function.
        libc::SYS_clone => second == 0 && copies_memory(first as u64),
        libc::SYS_clone3 => {
            second >= size_of::<CloneArguments>() && {
                // SAFETY: the caller passes a structure of that length.
                let arguments = unsafe { (first as *const CloneArguments).read_unaligned() };
                arguments.stack == 0 && copies_memory(arguments.flags)
            }
        }
        _ => false,
    };
    match forks {
        true => fork_without_handlers(|| call() as pid_t).into(),
        false => call(),
    }
}

/// The first version of the kernel's `struct clone_args` (`linux/sched.h`).
#[repr(C)]
#[derive(Clone, Copy)]
struct CloneArguments {
    flags: u64,
    _numbers: [u64; 3],
    _exit_signal: u64,
    stack: u64,
    _more: [u64; 2],
}

/// Makes a system call with six arguments.
///
/// # Safety
/// The caller keeps the contract of syscall(2).
unsafe fn system_call(number: c_long, arguments: [usize; 6]) -> c_long {
    let result: c_long;
    // SAFETY: as the caller promises; the kernel changes these registers alone.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    // The kernel returns errors as -4095 to -1.
    if (-4095..0).contains(&result) { fail(-result as c_int, -1) } else { result }
}
