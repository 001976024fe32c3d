//! `pagetax record`: a trace of the pages that a program goes to, to run on any simulated machine.

use crate::output::{self, progress::Progress};
use crate::recorded::{EngineCommand, Source};
use crate::{exit, remote};
use anyhow::{Result, bail};
use pagetax_core::replay::ThreadTotals;
use pagetax_core::units::Bytes;
use pagetax_recorder::trace::import::{Format, import};
use pagetax_recorder::trace::{DROPPED, Head, TraceWriter};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax record -o sort.ptt -- sort big.txt              then: pagetax run sort.ptt --on sim:ultrasparc-3plus-900
  pagetax record -f -o make.ptt -- make                   children and what they run, too
  pagetax record --for-remote -o sort.ptt -- sort big.txt then: pagetax remote --resident 50M --simulate sort.ptt
  pagetax record --import lackey mem.log -o app.ptt       from valgrind --tool=lackey --trace-mem=yes
  pagetax record --import drmemtrace-text view.txt -o app.ptt";

/// Somebody else's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum FormatChoice {
    /// The output of `valgrind --tool=lackey --trace-mem=yes`
    Lackey,
    /// The output of DynamoRIO's `drmemtrace` view tool
    DrmemtraceText,
}

/// Record which pages a command goes to, as a trace that runs on any simulated machine
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// The file that the trace goes to
    #[arg(short = 'o', long, value_name = "FILE.ptt")]
    output: Option<PathBuf>,

    /// Make it from somebody else's trace: TRACE is a file in this format
    #[arg(long, value_enum, value_name = "FORMAT", requires_all = ["trace", "output"])]
    import: Option<FormatChoice>,

    /// Place the command's memory as `pagetax remote` does, for its --simulate
    #[arg(long, conflicts_with = "import")]
    for_remote: bool,

    #[command(flatten)]
    source: Source,
}

/// Runs `pagetax record -o FILE -- COMMAND`.
pub fn run(args: Args) -> Result<ExitCode> {
    args.output.iter().try_for_each(|path| output::check_writable(path))?;
    let code = match (&args.output, &args.source.trace, args.import) {
        (Some(output), Some(from), Some(format)) => import_file(format, from, output)?,
        (Some(output), None, _) => {
            let mut command = args.source.command()?;
            if args.for_remote {
                command.environment = remote::layout_environment(&command.program)?;
                // The pager drops them.
                command.zeros = true;
            }
            let allocator = args.for_remote.then(|| remote::ALLOCATOR.to_string());
            record(&command, allocator, output)?
        }
        (Some(_), Some(_), None) => {
            bail!(
                "a trace has been recorded already\n  hint: drop -o, or say --import FORMAT if the \
                 file is of another tool"
            )
        }
        (None, ..) => bail!("nowhere to write to\n  hint: name a file: -o FILE.ptt"),
    };
    Ok(code.into())
}

fn record(command: &EngineCommand, allocator: Option<String>, output: &Path) -> Result<u8> {
    let head = Head {
        command: command.words(),
        recorded_by: command.engine.kind.to_string(),
        architecture: command
            .program
            .architecture
            .map_or("unknown".into(), |architecture| format!("{architecture:?}").to_lowercase()),
        dropped: DROPPED.into(),
        allocator,
    };
    let writer = TraceWriter::create(output, &head)?;
    let (writer, outcome) = command.observe("record", writer)?;
    finish(writer, output)?;
    outcome.notes.iter().for_each(|note| output::note(&format!("record: {note}")));
    Ok(outcome.code)
}

fn import_file(format: FormatChoice, from: &Path, output: &Path) -> Result<u8> {
    let (format, name) = match format {
        FormatChoice::Lackey => (Format::Lackey, "valgrind lackey"),
        FormatChoice::DrmemtraceText => (Format::Drmemtrace, "drmemtrace view"),
    };
    let head = Head {
        command: vec![from.display().to_string()],
        recorded_by: name.into(),
        architecture: "unknown".into(),
        dropped: DROPPED.into(),
        allocator: None,
    };
    let mut writer = TraceWriter::create(output, &head)?;
    let mut progress = Progress::start("record");
    let imported = import(format, from, &mut writer, |done| progress.update(done));
    drop(progress);
    if let Err(error) = imported {
        drop(writer);
        // Ours, and of no use.
        std::fs::remove_file(output).ok();
        return Err(error.into());
    }
    finish(writer, output)?;
    Ok(exit::FINE)
}

fn finish(writer: TraceWriter, output: &Path) -> Result<()> {
    let (bytes, totals) = writer.finish()?;
    let ThreadTotals { page_change_count, access_count, instruction_count, .. } = totals;
    output::note(&format!(
        "record: {}: {}; {instruction_count} instructions, {access_count} loads and stores, \
         {page_change_count} changes of page",
        output.display(),
        Bytes(bytes)
    ));
    Ok(())
}
