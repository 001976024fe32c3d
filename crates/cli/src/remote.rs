//! `pagetax remote`: runs a command whose memory may be larger than this machine's.

mod simulate;

use crate::exit;
use crate::memory_servers::CopiesArgs;
use crate::output::{self, documents::Outputs, replacement};
use anyhow::{Result, anyhow, bail};
use pagetax_core::units::{Bytes, Nanos};
use pagetax_host::launch::preload::{self, Preload};
use pagetax_host::launch::program::{Program, ProgramError};
use pagetax_host::launch::{Launcher, libraries};
use pagetax_remote::documents::Replacement;
use pagetax_remote::pager::{EvictionMethod, KeepAwake, PagerOptions};
use pagetax_remote::preloaded::{self, Settings};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const LIBRARY: &str = "libpagetax_remote_preload.so";
/// The name of the library's allocator in the head of a trace.
pub const ALLOCATOR: &str = "pagetax remote";

const EXAMPLES: &str = "\
Examples:
  pagetax remote --resident 4G -- ./big-program        at most 4 GiB of it in memory, the rest compressed
  pagetax remote --resident 4G --servers a,b --copies 2 -- ./big-program
                                                       the rest twice on memory servers
  pagetax remote --resident 4G --store valkey://a,b,c --copies 2 -- ./big-program
                                                       the rest twice in a Valkey or Redis cluster
  pagetax remote --resident 100M --stats -- sort big.txt
  pagetax remote --resident 100M --simulate sort.ptt   how much slower? (pagetax record --for-remote -o sort.ptt -- sort …)";

/// Run a command with its memory in a page store, and only so much of it resident
///
/// The store is memory servers, where they are named or looked for, or a Valkey or Redis cluster that runs
/// already. Else pages are compressed inside the process: a server on the same machine would take as much
/// memory as it saves, and two trips through the network stack for each page.
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
    /// virtual machines, waking them takes longer than the rest of a page-in. "auto" keeps them awake there,
    /// where /dev/cpu_dma_latency can be written; "always" fails if it cannot
    #[arg(long, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_value = "auto")]
    #[arg(default_missing_value = "always", value_parser = parse_awake)]
    awake: KeepAwake,

    /// Promise that no device writes into the program's memory (direct I/O, io_uring's registered buffers):
    /// scattered pages then leave in a cheaper way, that would lose such writes
    #[arg(long)]
    no_device_writes: bool,

    /// Print each process's counts of pages to stderr at its end
    #[arg(long)]
    stats: bool,

    /// Run nothing: tell from a trace (pagetax record) how many page-ins this much resident memory costs, and
    /// how long they take with this store. LRU, ARC and the optimum stand beside the pager's policy
    #[arg(long, value_name = "TRACE", visible_alias = "dry-run", conflicts_with = "command")]
    simulate: Option<PathBuf>,

    #[command(flatten)]
    outputs: Outputs<Replacement>,

    /// The command and its arguments
    #[arg(
        required_unless_present = "simulate",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
}

impl Args {
    fn eviction_method(&self) -> EvictionMethod {
        match self.no_device_writes {
            true => EvictionMethod::Cheapest,
            false => EvictionMethod::Moved,
        }
    }
}

fn parse_resident(text: &str) -> Result<Bytes> {
    match text.parse::<Bytes>()? {
        small if small.0 < simulate::RESIDENT_MIN => Err(anyhow!("at least 1M must be resident")),
        bytes => Ok(bytes),
    }
}

fn parse_awake(text: &str) -> Result<KeepAwake> {
    KeepAwake::named(text).ok_or_else(|| anyhow!("write auto, always or never"))
}

/// Runs `pagetax remote -- COMMAND`.
pub fn run(args: Args) -> Result<ExitCode> {
    if let Some(trace) = &args.simulate {
        return simulate(&args, trace);
    }
    if args.outputs.is_wanted() {
        bail!(
            "without --simulate, standard output is the command's\n  hint: --stats prints counts to stderr"
        );
    }
    let library = library()?;
    let program = Program::find(&args.command[0]).map_err(with_code)?;
    check_reachable(&program)?;
    let settings = Settings {
        address_space: args.address_space,
        spin: Duration::from_nanos(args.spin.0),
        eviction_method: args.eviction_method(),
        keep_awake: args.awake,
        stats: args.stats,
        store: args.copies.store()?,
        // This process becomes the command.
        program: Some(std::process::id()),
        ..Settings::resident(args.resident)
    };
    // Shows a mistake before the program starts. The program connects by itself.
    let opened = settings.store.open(None).map_err(|why| anyhow!("{why}"));
    let store = opened.map_err(|error| exit::with(exit::WRAPPER_FAILED, error))?;
    store.warnings().iter().for_each(|line| output::note(&format!("pagetax remote: {line}")));
    drop(store);
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

/// Runs `pagetax remote --simulate TRACE`.
fn simulate(args: &Args, trace: &Path) -> Result<ExitCode> {
    args.outputs.check_writable()?;
    let store = args.copies.store()?.open(None).map_err(|why| anyhow!("{why}"))?;
    store.warnings().iter().for_each(|line| output::note(&format!("pagetax remote: {line}")));
    let mut document = simulate::simulate(trace, args.resident)?;
    let options = PagerOptions {
        spin: Duration::from_nanos(args.spin.0),
        eviction_method: args.eviction_method(),
        keep_awake: args.awake,
        ..PagerOptions::resident(args.resident.0)
    };
    match simulate::time_page_ins(store, options) {
        Ok(measured) => document.page_in = Some(measured),
        Err(error) => document.notes.push(format!("the time of a page-in is missing: {error:#}")),
    }
    document.notes.iter().for_each(|note| output::note(&format!("remote: {note}")));
    args.outputs.print(&document, replacement::render)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the variables that make a program allocate as it would under `pagetax remote`. Nothing of it is
/// paged.
pub fn layout_environment(program: &Program) -> Result<Vec<(&'static str, OsString)>> {
    check_reachable(program)?;
    let before = std::env::var_os(preload::VARIABLE);
    let settings =
        Settings { is_layout_only: true, ..Settings::resident(Bytes(simulate::RESIDENT_MIN)) };
    let mut environment = settings.to_environment();
    environment.push((preload::VARIABLE, library()?.before(before.as_deref())));
    Ok(environment)
}

fn library() -> Result<Preload> {
    let library = libraries::find(LIBRARY).map_err(anyhow::Error::from);
    let library = library.and_then(|path| Ok(Preload::new(path)?));
    library.map_err(|error| exit::with(exit::WRAPPER_FAILED, error))
}

/// Refuses a program that the library would not reach: it would run with all of its memory here.
fn check_reachable(program: &Program) -> Result<()> {
    program.heeds_us().map_err(with_code)?;
    program.takes_preload().map_err(|refusal| exit::with(exit::NOT_EXECUTABLE, refusal))
}

fn with_code(error: ProgramError) -> anyhow::Error {
    exit::with(exit::of_program(&error), error)
}
