//! `pagetax remote`: runs a command whose memory may be larger than this machine's.

use crate::exit;
use crate::memory_servers::CopiesArgs;
use crate::output;
use anyhow::{Result, anyhow};
use pagetax_core::units::{Bytes, Nanos};
use pagetax_host::launch::preload::Preload;
use pagetax_host::launch::program::{Kind, Program, ProgramError, native};
use pagetax_host::launch::{Launcher, installed};
use pagetax_remote::pager::EvictionMethod;
use pagetax_remote::preloaded::{self, Settings};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const LIBRARY: &str = "libpagetax_remote_preload.so";

const EXAMPLES: &str = "\
Examples:
  pagetax remote --resident 4G -- ./big-program        at most 4 GiB of it in memory, the rest compressed
  pagetax remote --resident 4G --servers a,b --copies 2 -- ./big-program
                                                       the rest twice on memory servers
  pagetax remote --resident 100M --stats -- sort big.txt";

/// Run a command with its memory in a page store, and only so much of it resident
///
/// The store is memory servers, where they are named or looked for; else pages are compressed inside the
/// process: a server on the same machine would take as much memory as it saves, and two trips through
/// the network stack for each page.
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Most bytes of each process that stay in this machine's memory, beside its code and stacks
    #[arg(long, value_name = "SIZE", value_parser = parse_resident)]
    resident: Bytes,

    #[command(flatten)]
    copies: CopiesArgs,

    /// Addresses to give out; they cost nothing until they are used
    #[arg(long, value_name = "SIZE", default_value = "1T")]
    address_space: Bytes,

    /// The time for which fault handlers look for the next fault before they sleep; 0s is best on few CPUs
    #[arg(long, value_name = "TIME", default_value = "0s")]
    spin: Nanos,

    /// Keep idle CPUs awake while pages are wanted, which costs power. If they halt at once, as in many
    /// virtual machines, waking them takes longer than the rest of a page-in
    #[arg(long)]
    awake: bool,

    /// Promise that no device writes into the program's memory (direct I/O, io_uring's registered buffers):
    /// scattered pages then leave in a cheaper way, that would lose such writes
    #[arg(long)]
    no_device_writes: bool,

    /// Print each process's counts of pages to stderr at its end
    #[arg(long)]
    stats: bool,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

fn parse_resident(text: &str) -> Result<Bytes> {
    match text.parse::<Bytes>()? {
        small if small.0 < 1 << 20 => Err(anyhow!("at least 1M must be resident")),
        bytes => Ok(bytes),
    }
}

/// Runs `pagetax remote -- COMMAND`.
pub fn run(args: Args) -> Result<ExitCode> {
    let library = library().map_err(|error| exit::with(exit::WRAPPER_FAILED, error))?;
    let program = reachable(&args.command[0])?;
    let settings = Settings {
        address_space: args.address_space,
        spin: Duration::from_nanos(args.spin.0),
        eviction_method: if args.no_device_writes {
            EvictionMethod::Cheapest
        } else {
            EvictionMethod::Moved
        },
        keep_awake: args.awake,
        stats: args.stats,
        servers: args.copies.servers()?,
        // This process becomes the command.
        program: Some(std::process::id()),
        ..Settings::resident(args.resident)
    };
    if let Some(servers) = &settings.servers {
        // Shows a mistake before the program starts. The program connects by itself.
        let reached = servers.connect(None).map_err(|why| anyhow!("{why}"));
        let cluster = reached.map_err(|error| exit::with(exit::WRAPPER_FAILED, error))?;
        cluster.warnings().iter().for_each(|line| output::note(&format!("pagetax remote: {line}")));
    }
    let mut launcher = Launcher::found(&program, &args.command);
    launcher.preload(&library);
    // If one `pagetax remote` runs another, our own settings are not the command's.
    for name in preloaded::VARIABLES {
        launcher.command.env_remove(name);
    }
    launcher.command.envs(settings.to_environment());
    // Nothing is left to do here: the command takes our place, and so our process id, terminal and signals.
    Err(with_code(launcher.exec()))
}

/// Returns the library where it was built or installed. The loader leaves out what it does not find, and the
/// program would run with all of its memory here.
fn library() -> Result<Preload> {
    let path = match std::env::var_os("PAGETAX_REMOTE_LIBRARY").map(PathBuf::from) {
        Some(named) => named.canonicalize().map_err(|error| {
            anyhow!("PAGETAX_REMOTE_LIBRARY={}: {error}\n  remedy: name a file", named.display())
        })?,
        None => installed::find(LIBRARY).ok_or_else(|| {
            anyhow!(
                "{LIBRARY} is neither beside pagetax nor in its lib directory\n  remedy: cargo build \
                 --release -p pagetax-remote-preload, or name it in PAGETAX_REMOTE_LIBRARY"
            )
        })?,
    };
    Ok(Preload::new(path)?)
}

/// Finds the program, unless the library would not reach it: it would run with all of its memory here.
fn reachable(name: &OsString) -> Result<Program> {
    let program = Program::find(name).map_err(with_code)?;
    program.heeds_us().map_err(with_code)?;
    let Some((why, remedy)) = unreachable_because(&program) else { return Ok(program) };
    let binary = program.binary.display();
    let error = anyhow!("`{binary}` {why}, so that its memory cannot be paged\n  remedy: {remedy}");
    Err(exit::with(exit::NOT_EXECUTABLE, error))
}

fn with_code(error: ProgramError) -> anyhow::Error {
    exit::with(exit::of_program(&error), error)
}

/// Returns the reason why our library cannot be loaded into a program, with a hint; None if it can be.
fn unreachable_because(program: &Program) -> Option<(&'static str, &'static str)> {
    // What is no ELF file the kernel may know to run; by what, is not known.
    let architecture = program.architecture?;
    if architecture != native() {
        return Some((
            "is built for another architecture: our library cannot be loaded into it",
            "use a build for this machine's own",
        ));
    }
    match program.kind {
        Kind::DynamicGlibc => None,
        Kind::StaticGlibc | Kind::Own => {
            Some(("is linked statically: nothing can be preloaded into it", "link it dynamically"))
        }
        Kind::OtherLoader => Some((
            "uses another C library than glibc: our library cannot be loaded into it",
            "use a build for glibc",
        )),
    }
}
