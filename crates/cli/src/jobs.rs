//! `pagetax jobs`: the built-in jobs, and where every subcommand finds the job it is given.

use crate::output::{documents::Outputs, text};
use crate::recorded::open_trace;
use crate::{exit, output};
use anyhow::{Context, Result, bail};
use pagetax_core::catalog::{JobCatalog, JobEntry};
use pagetax_core::job::{Job, builtin_names, nearest};
use pagetax_core::replay::RecordedProgram;
use pagetax_recorder::trace::{Replayable, is_trace};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  pagetax jobs                        list the built-in jobs
  pagetax jobs vmtest                 parameters and text of one
  pagetax jobs vmtest > mine.toml     start your own from it, then: pagetax run mine.toml";

/// A job file is text; one larger than this is something else.
const JOB_BYTES_MAX: u64 = 1 << 20;

/// List the built-in jobs, or show one
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Print this job's parameters and its text: a built-in job, or a job file
    #[arg(value_name = "NAME", conflicts_with = "json")]
    job: Option<String>,

    #[command(flatten)]
    outputs: Outputs<JobCatalog>,
}

/// Runs `pagetax jobs [NAME]`.
pub fn run(args: Args) -> Result<ExitCode> {
    match args.job {
        None => args.outputs.print(&catalog(), list)?,
        Some(job) => output::print(&show(&load(&job)?))?,
    }
    Ok(exit::FINE.into())
}

/// Returns the job of this name or in this file.
///
/// # Errors
/// For unknown names, unreadable files and mistakes in them, each with its remedy.
pub fn load(name: &str) -> Result<Job> {
    if let Some(job) = Job::builtin(name) {
        output::detail(|| format!("job {name}: built in"));
        return Ok(job);
    }
    let path = Path::new(name);
    if path.extension().is_none() && !name.contains('/') && !path.exists() {
        let remedy = match nearest(name, builtin_names()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => "`pagetax jobs` lists them; a job file ends in .toml".into(),
        };
        bail!("no built-in job is called `{name}`\n  hint: {remedy}");
    }
    output::detail(|| format!("job {name}: the file {}", path.display()));
    if is_trace(path) || path.extension().is_some_and(|extension| extension == "ptt") {
        return of_trace(path);
    }
    Ok(Job::parse(&read(path)?, name)?)
}

/// Returns the job that makes the same accesses as a trace.
fn of_trace(path: &Path) -> Result<Job> {
    let trace = open_trace(path)?;
    let (what, said) = (trace.head.title(), trace.notes.len());
    let replay = Replayable::new(trace)?;
    replay.trace().notes[said..].iter().for_each(|note| output::note(note));
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    Ok(Job::of_recording(&name, &what, RecordedProgram(Arc::new(replay))))
}

fn read(path: &Path) -> Result<String> {
    let cannot = || {
        let remedy = "check the path, or choose a built-in job from `pagetax jobs`";
        format!("cannot read the job file {}\n  hint: {remedy}", path.display())
    };
    let meta = std::fs::metadata(path).with_context(cannot)?;
    if !meta.is_file() || meta.len() > JOB_BYTES_MAX {
        bail!(
            "{} is no job file: it is {}\n  hint: name a TOML file; `pagetax jobs vmtest` \
             prints one",
            path.display(),
            if meta.is_file() { "larger than 1M" } else { "not a regular file" }
        );
    }
    std::fs::read_to_string(path).with_context(cannot)
}

fn catalog() -> JobCatalog {
    let entry = |job: Job| JobEntry { name: job.name().into(), summary: job.summary().into() };
    JobCatalog { jobs: builtin_names().filter_map(Job::builtin).map(entry).collect() }
}

fn list(catalog: &JobCatalog) -> String {
    let row = |job: &JobEntry| vec![job.name.clone(), job.summary.clone()];
    let rows = catalog.jobs.iter().map(row).collect();
    text::table(&["job", "what it does"], &[], rows)
        + "\nRun one with `pagetax run JOB`, read one with `pagetax jobs JOB`.\n"
}

/// Renders a job file: the parameters as comments, then the job's text.
fn show(job: &Job) -> String {
    let mut out = format!("# {}: {}\n", job.name(), job.summary());
    if !job.source().is_empty() {
        out += &format!("# From: {}\n", job.source());
    }
    let rows: Vec<Vec<String>> = job
        .params()
        .into_iter()
        .map(|(name, param)| vec![name, param.values.join(", "), param.meaning])
        .collect();
    if !rows.is_empty() {
        out += "#\n# Parameters (change them with --set NAME=VALUE; several values are a sweep):\n";
        let table = text::table(&["name", "default", "meaning"], &[], rows);
        out += &table.lines().map(|line| format!("# {line}\n")).collect::<String>();
    }
    out + "\n" + &job.text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_show_prints_is_the_same_job() {
        for name in builtin_names() {
            let job = Job::builtin(name).unwrap();
            let again = Job::parse(&show(&job), "shown").unwrap();
            assert_eq!(again.params(), job.params());
        }
    }
}
