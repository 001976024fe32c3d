//! libpagetax_preload.so: page sizes for the heap and the stack of unmodified programs.
//!
//! `LD_PRELOAD=libpagetax_preload.so MPSSHEAP=2M MPSSSTACK=2M ./program`. The variables, the configuration
//! file and the precedence are those of mpss.so.1. They are inherited over exec, as the environment is.
//!
//! Invariants: the program always runs, and does and prints the same as without the library. So the code uses
//! only libc and raw system calls. It does not allocate before main, and nothing can panic. Every failure is
//! logged (to MPSSERRFILE, else to syslog) and ignored. main sees errno unchanged.
//!
//! This crate reads the settings, in a constructor; [`pagetax_interpose`] applies them. Of pagetax-core it
//! uses [`page_bytes`] and [`patterns`], which do not allocate; the linker drops the rest.

pub mod config;

mod file;
mod log;
mod program;

use config::Wanted;
use file::MappedFile;
use log::Log;
use pagetax_core::address_pattern::{AddressPart, patterns};
use pagetax_core::page_size::page_bytes;
use pagetax_interpose::selection::{self, Kind, SELECTIONS_MAX, Selection};
use pagetax_interpose::system::{self, Decimal};
use pagetax_interpose::{Refused, heap, stack};
use program::Process;

/// Runs before main, and before the program has a second thread.
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
    // SAFETY: the C library passes main's own arguments to a constructor: two arrays that end in null, of
    // strings that live as long as the process.
    let Some(process) = (unsafe { Process::of_main(argv, envp) }) else { return };
    if process.is_secure() || !process.asks_for_anything() {
        return;
    }
    let errno = system::errno();
    let log = Log::open(&process);
    let wanted = wanted(&process, &log);
    restrict(&process, &log);
    if let Some(bytes) = wanted.stack {
        log_refusal(b"stack", bytes, stack::advise(bytes), &log);
    }
    if let Some(bytes) = wanted.heap {
        log_refusal(b"heap", bytes, heap::advise(bytes), &log);
    }
    log.close();
    system::set_errno(errno);
}

/// Returns the page sizes of the configuration file, or those of the environment if no line matches.
fn wanted(process: &Process, log: &Log) -> Wanted {
    let (path, named) = match process.variable(b"MPSSCFGFILE=") {
        Some(path) => (path, true),
        None => (c"/etc/mpss.conf", false),
    };
    match MappedFile::open(path) {
        Ok(file) => {
            let mut complain = |line: usize, mistake: config::Mistake| {
                log.line(&[
                    path.to_bytes(),
                    b", line ",
                    Decimal::of(line as u64).digits(),
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
        let size = page_bytes(text);
        if size.is_none() && !text.is_empty() {
            log.line(&[name, text, b": invalid page size"]);
        }
        size
    };
    Wanted { heap: from(b"MPSSHEAP="), stack: from(b"MPSSSTACK=") }
}

/// Restricts large pages to the patterns of the environment, and logs memory to the file that it names.
fn restrict(process: &Process, log: &Log) {
    if let Some(path) = process.variable(b"PAGETAX_ALLOCATIONS=") {
        selection::log_to(path);
    }
    let Some(text) = process.variable(b"PAGETAX_ONLY=") else { return };
    let chosen = patterns(text.to_bytes()).filter_map(|pattern| {
        let kind = |part| match part {
            AddressPart::Heap => Some(Kind::Heap),
            AddressPart::Arena => Some(Kind::Arena),
            AddressPart::Mapping => Some(Kind::Mapping),
            AddressPart::Stack | AddressPart::Text => None,
        };
        match pattern {
            Ok(pattern) => Some(Selection {
                kind: kind(pattern.part)?,
                class_bytes: pattern.class_bytes.unwrap_or(0),
                range: pattern.range,
            }),
            Err(word) => {
                log.line(&[b"PAGETAX_ONLY: ", word, b": no pattern of addresses"]);
                None
            }
        }
    });
    if !selection::only(chosen) {
        let most = Decimal::of(SELECTIONS_MAX as u64);
        log.line(&[b"PAGETAX_ONLY: more ranges than ", most.digits()]);
    }
}

fn log_refusal(what: &[u8], page_bytes: u64, result: Result<(), Refused>, log: &Log) {
    let Err(refused) = result else { return };
    let (number, why): (u64, &[u8]) = match refused {
        Refused::NoSuchSize => (page_bytes, b" bytes: invalid page size on this system"),
        Refused::SwitchedOff => {
            (page_bytes, b" bytes: such pages are switched off (transparent_hugepage: never)")
        }
        Refused::StackLimit(bytes) => (bytes, b" bytes of limit are too few for such pages"),
        Refused::Failed(errno) => (errno as u64, b": errno of the advice, which failed"),
    };
    log.line(&[what, b": ", Decimal::of(number).digits(), why]);
}
