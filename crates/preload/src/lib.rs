//! libpagetax_preload.so: page sizes for the heap and the stack of unmodified programs.
//!
//! `LD_PRELOAD=libpagetax_preload.so MPSSHEAP=2M MPSSSTACK=2M ./program`, with the variables, the
//! configuration file and the precedence of mpss.so.1; inherited over exec, as the environment is.
//!
//! Invariants: the program always runs, and does and prints what it would have. So: libc and raw
//! system calls only, no allocation before main, nothing that can panic, every failure logged (to
//! MPSSERRFILE, else to syslog) and carried on from. The errno that main sees is untouched.
//!
//! How: the constructor reads the wishes ([`config`]), advises the stack ([`stack`]), and for the
//! heap starts the program again with glibc's own malloc tunable set ([`heap`]), because malloc
//! reads it only at start and never calls mmap or brk through a symbol that could be interposed.
//! Arenas of threads, which the tunable misses, are advised when a thread starts ([`arena`]).

pub mod config;
pub mod size;

mod arena;
mod heap;
mod log;
mod program;
mod stack;
mod system;

use config::Wanted;
use log::Log;
use program::Process;

/// Runs before main, and before any thread of the program.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn(
    libc::c_int,
    *const *const libc::c_char,
    *const *const libc::c_char,
) = constructor;

extern "C" fn constructor(
    argc: libc::c_int,
    argv: *const *const libc::c_char,
    envp: *const *const libc::c_char,
) {
    if argc < 0 || argv.is_null() || envp.is_null() {
        return;
    }
    // SAFETY: the C library hands a constructor main's own arguments: two arrays that end in null,
    // of strings that live as long as the process.
    let Some(process) = (unsafe { Process::of_main(argv, envp) }) else { return };
    if process.is_secure() || !process.asks_for_anything() {
        return;
    }
    let errno = system::errno();
    let log = Log::open(&process);
    heap::restore_name(&process);
    let wanted = wanted(&process, &log);
    if let Some(bytes) = wanted.stack {
        stack::advise(bytes, &log);
    }
    if let Some(bytes) = wanted.heap {
        heap::advise(bytes, &process, &log);
    }
    log.close();
    system::set_errno(errno);
}

/// The configuration file's word, else the environment's.
fn wanted(process: &Process, log: &Log) -> Wanted {
    let (path, named) = match process.variable(b"MPSSCFGFILE=") {
        Some(path) => (path, true),
        None => (c"/etc/mpss.conf", false),
    };
    match system::MappedFile::open(path) {
        Ok(file) => {
            let mut complain = |line: usize, mistake: config::Mistake| {
                log.line(&[
                    path.to_bytes(),
                    b", line ",
                    log::Decimal::of(line as u64).digits(),
                    b": ",
                    mistake.text(),
                ]);
            };
            if let Some(wanted) = config::lookup(file.bytes(), process, &mut complain) {
                return wanted;
            }
        }
        Err(_) if !named => {}
        Err(_) => log.line(&[b"cannot open ", path.to_bytes()]),
    }
    let from = |name: &[u8]| {
        let text = process.variable(name)?.to_bytes();
        let size = size::parse(text);
        if size.is_none() && !text.is_empty() {
            log.line(&[name, text, b": invalid page size"]);
        }
        size
    };
    Wanted { heap: from(b"MPSSHEAP="), stack: from(b"MPSSSTACK=") }
}
