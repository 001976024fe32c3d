//! clone(2), by its function and by syscall(2): a child that gets a copy of the memory is the child of a fork.

use crate::forks::{around_clone, begin_cloned, without_handlers};
use crate::threads::next;
use crate::{fail, paged, private};
use libc::{c_int, c_long, c_void, pid_t};
use std::arch::asm;
use std::sync::atomic::AtomicUsize;

/// What a child runs on until the pager is there: its own stack may be short, and paged.
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

/// What a child is to run, and on which stack.
struct CloneStart {
    run: ChildMain,
    argument: *mut c_void,
    stack: *mut c_void,
}

/// Whether the memory of a child is a copy.
fn is_copied(flags: u64) -> bool {
    flags & libc::CLONE_VM as u64 == 0 && paged::paged().is_some()
}

/// clone(2), in the C library's form.
///
/// # Safety
/// As of clone(2). What is not handed over is not looked at: the flags say which of the last three are there.
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
    // SAFETY: the C library's own function of that name takes these arguments, the last three if there are any.
    let real = unsafe { std::mem::transmute::<usize, Clone>(address) };
    let call = |run: ChildMain, stack, argument| {
        // SAFETY: as the caller promises.
        unsafe { real(run, stack, flags, argument, parents_number, variables, childs_number) }
    };
    if !is_copied(flags as u32 as u64) || stack.is_null() {
        return call(run, stack, argument);
    }
    let ours = private::allocate(STACK_BYTES, 16);
    if ours.is_null() {
        return fail(libc::ENOMEM, -1);
    }
    let mut begin = CloneStart { run, argument, stack };
    let result = around_clone(|| {
        call(begin_child, ours.wrapping_add(STACK_BYTES).cast(), (&raw mut begin).cast())
    });
    // SAFETY: allocated above; the child has a copy of its own.
    unsafe { private::free(ours) };
    result
}

/// Begins a child, on a stack of ours. The parent's is not touched: it may be paged.
unsafe extern "C" fn begin_child(begin: *mut c_void) -> c_int {
    // SAFETY: the copy of what `clone` handed over, on the stack that the parent's thread was using.
    let CloneStart { run, argument, stack } = unsafe { begin.cast::<CloneStart>().read() };
    begin_cloned();
    // SAFETY: moves to the child's own stack for good, whose end the program gave, as clone(2) does.
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

/// Ends the child with its pager's threads; what clone(2) does ends one thread.
extern "C" fn exit_child(status: c_int) -> ! {
    // SAFETY: ends the process without its handlers, as clone(2) does.
    unsafe { libc::_exit(status) }
}

/// syscall(2): those that fork are forks.
///
/// # Safety
/// As of syscall(2). Calls with fewer arguments hand over what happens to be there.
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
        libc::SYS_fork => is_copied(0),
        // With another stack, the function that called could not be returned to.
        libc::SYS_clone => second == 0 && is_copied(first as u64),
        libc::SYS_clone3 => {
            second >= size_of::<CloneArguments>() && {
                // SAFETY: the caller hands over a structure of that length.
                let arguments = unsafe { (first as *const CloneArguments).read_unaligned() };
                arguments.stack == 0 && is_copied(arguments.flags)
            }
        }
        _ => false,
    };
    match forks {
        true => without_handlers(|| call() as pid_t).into(),
        false => call(),
    }
}

/// The first version of `clone_args` of `linux/sched.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CloneArguments {
    flags: u64,
    _numbers: [u64; 3],
    _exit_signal: u64,
    stack: u64,
    _more: [u64; 2],
}

/// # Safety
/// As of syscall(2).
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
    // The last page of numbers is errors.
    if (-4095..0).contains(&result) { fail(-result as c_int, -1) } else { result }
}
