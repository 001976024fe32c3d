//! `pagetax ppgsz CMD`: starts a command on the pages asked for.

use super::{Args, table_of_large};
use crate::{exit, output};
use anyhow::{Context, Result};
use pagetax_core::exit::Exit;
use pagetax_core::page_size::{MemoryPart, PartSizes};
use pagetax_core::units::PageSize;
use pagetax_host::launch::Launcher;
use pagetax_host::launch::program::Program;
use pagetax_host::launch::signals::ends_within;
use pagetax_host::pages::PageSettings;
use pagetax_host::pages::documents::{PageSizeChange, ProcessChange};
use pagetax_host::pages::follow::{Sweeper, Whose};
use pagetax_host::pages::launch::{Launch, LaunchError, Surroundings, plan};
use pagetax_host::pages::only::Allocations;
use pagetax_host::pages::text::{self, FileText};
use pagetax_host::sys::signal::PassedOn;
use std::io;
use std::process::ExitCode;
use std::time::Duration;
use tempfile::NamedTempFile;

/// The time between two looks at a command that has nothing to sweep.
const PAUSE: Duration = Duration::from_millis(50);

/// Plans, prepares, and either becomes the command or waits for it.
pub fn run(args: &Args, advice: &PartSizes) -> Result<ExitCode> {
    let name = args.operands[0].to_string_lossy();
    let program = Program::find(&*name).map_err(|error| with_code(error.into()))?;
    program.heeds_us().map_err(|error| with_code(error.into()))?;
    let own = |error: anyhow::Error| exit::with(exit::WRAPPER_FAILED, error);
    let around = Surroundings::here();
    let mut launch = plan(program, advice, &around, args.force, args.follow).map_err(with_code)?;
    let log = match &args.only {
        Some(only) => {
            launch.restrict(only, advice, &around).map_err(|error| own(error.into()))?;
            args.verify.then(|| log_for(&mut launch)).transpose().map_err(own)?
        }
        None => None,
    };
    launch.notes.iter().for_each(|note| output::note(&format!("pagetax ppgsz: {note}")));
    if args.dry_run {
        output::print(&launch.words().iter().map(|line| format!("{line}\n")).collect::<String>())?;
        return Ok(exit::FINE.into());
    }
    let files = bring_in(&launch);
    let mut launcher = launch.launcher(&args.operands);
    if args.outputs.takes_stdout() {
        launcher.command.stdout(io::stderr());
    }
    let watched = args.verify || args.outputs.is_wanted();
    if launch.swept.is_none() && !watched {
        return Err(with_code(launcher.exec().into()));
    }
    let whose = match (&launch.swept, launch.sweeps_all) {
        (None, _) => Whose::Nobodys,
        (Some(_), false) => Whose::OwnAllocators,
        (Some(_), true) => Whose::Everybodys,
    };
    // What is looked at is what was asked for, and malloc's own mappings with the heap.
    let looked_at = match advice.get(MemoryPart::Heap) {
        Some(wish) => advice.clone().or(MemoryPart::Anon, wish),
        None => advice.clone(),
    };
    let sweeper = Sweeper::new(looked_at, args.force, whose, watched);
    let (exit, processes, unseen) = watch(launcher, sweeper)?;
    let document = PageSizeChange { asked: advice.clone(), processes, files: Some(files) };
    args.outputs.write(&document).map_err(own)?;
    let PageSizeChange { processes, files, .. } = document;
    let verdicts = processes.iter().filter_map(|process| process.verdict.as_ref());
    let large_bytes: u64 =
        verdicts.flat_map(|verdict| &verdict.parts).map(|part| part.as_asked_bytes).sum();
    if args.verify && processes.is_empty() {
        output::say(&match unseen {
            Some(why) => format!("pagetax ppgsz: the command could not be looked at: {why}"),
            None => "pagetax ppgsz: the command ended before it could be looked at".into(),
        });
    } else if args.verify {
        let huge = PageSettings::host().pmd_size().unwrap_or(PageSize::M2);
        let table = table_of_large(processes, huge.bytes());
        output::say((table + &said_of(&files.unwrap_or_default())).trim_end());
    }
    if let (Some(log), Some(only)) = (log, &args.only) {
        let mut allocations = Allocations::at(log.path());
        allocations.read();
        let mut lines = allocations.unmatched(only);
        if lines.is_empty() && large_bytes == 0 {
            lines.push(format!("--only {only}: the command used none of it by whole large pages"));
        }
        lines.iter().for_each(|line| output::say(&format!("pagetax ppgsz: {line}")));
    }
    Ok(exit.shell_code().into())
}

/// Has the command's memory logged to a new file.
fn log_for(launch: &mut Launch) -> Result<NamedTempFile> {
    let file = NamedTempFile::new().context("cannot make a file for the log of its memory")?;
    launch.log_allocations(file.path());
    Ok(file)
}

fn with_code(error: LaunchError) -> anyhow::Error {
    let code = match &error {
        LaunchError::Program(error) => exit::of_program(error),
        LaunchError::Unavailable { .. } => exit::WRAPPER_FAILED,
    };
    exit::with(code, error)
}

/// Brings code into huge pages. Code that cannot be read keeps its pages, and the program runs all the same.
fn bring_in(launch: &Launch) -> Vec<FileText> {
    let prepare = |path: &std::path::PathBuf| match text::prepare(path) {
        Ok(text) => text,
        Err(error) => {
            output::note(&format!("pagetax ppgsz: {}: {error}", path.display()));
            None
        }
    };
    launch.text.iter().filter_map(prepare).collect()
}

fn said_of(files: &[FileText]) -> String {
    if files.is_empty() { String::new() } else { output::pages::files(files) }
}

/// How a command ended, what became of its processes, and why nothing is known of them if so.
type Watched = (Exit, Vec<ProcessChange>, Option<String>);

/// Runs the command as a child and sweeps over it and all that it starts.
fn watch(launcher: Launcher, mut sweeper: Sweeper) -> Result<Watched> {
    let own = |error: anyhow::Error| exit::with(exit::WRAPPER_FAILED, error);
    let waiting =
        |error: io::Error| own(anyhow::Error::from(error).context("cannot wait for the command"));
    let signals = PassedOn::watch().context("cannot watch for signals").map_err(own)?;
    let mut child = launcher.spawn().map_err(|error| with_code(error.into()))?;
    loop {
        let pause = sweeper.sweep(&[child.pid()]).unwrap_or(PAUSE);
        if ends_within(&mut child, pause, &signals).map_err(waiting)? {
            break;
        }
    }
    let (exit, _) = child.wait().map_err(waiting)?;
    let unseen = sweeper.unseen();
    let processes = sweeper.finish();
    let processes = processes
        .into_iter()
        .map(|(verdict, outcome)| ProcessChange::new(verdict.command.clone(), verdict, &outcome));
    Ok((exit, processes.collect(), unseen))
}
