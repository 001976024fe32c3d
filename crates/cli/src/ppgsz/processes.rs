//! `pagetax ppgsz -p`: running processes, one after the other.

use super::{Args, table};
use crate::{exit, output};
use anyhow::Result;
use pagetax_core::page_size::{How, MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::{Bytes, Nanos, PageSize};
use pagetax_host::pages::change::{self, Cause, Outcome};
use pagetax_host::pages::documents::{PageSizeChange, ProcessChange};
use pagetax_host::pages::follow::{Sweeper, Whose};
use pagetax_host::pages::launch;
use pagetax_host::pages::pagemap::{self, Segment};
use pagetax_host::pages::target::{Refusal, Target, pid_of};
use pagetax_host::pages::verdict::NO_FILE;
use pagetax_host::pages::{PageSettings, Verdict, base_page, judge};
use pagetax_host::sys::signal::{StopSignals, asked_to_stop};
use rustix::process::Pid;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How soon a wish to stop is heard between two sweeps.
const STOP_POLL: Duration = Duration::from_millis(50);

/// Changes them all; an error of one does not stop the list. 125 if there was any, 1 if an undo left pages as
/// they are.
pub fn run(args: &Args, advice: &PartSizes, system: &PageSettings) -> Result<ExitCode> {
    if advice.iter().any(|(_, wish)| wish.how() != How::Preferred) {
        anyhow::bail!(
            "pages of a hugetlb pool are for commands: a running process could be killed for the \
             want of one later\n  hint: -o heap=2M"
        );
    }
    launch::sizes_are_on(advice, system)?;
    let _signals = StopSignals::watch()?;
    let (mut processes, mut is_undone) = (Vec::new(), true);
    let words = args.operands.iter().map(|operand| operand.to_string_lossy());
    let operands: Vec<String> =
        words.flat_map(|word| word.split(',').map(String::from).collect::<Vec<_>>()).collect();
    for operand in operands {
        if asked_to_stop() {
            break;
        }
        let pid = pid_of(&operand);
        let done = pid.ok_or(Refusal::NoId).and_then(|pid| change_one(args, advice, system, pid));
        match done {
            Ok(Some((verdict, outcome))) => {
                is_undone &= !args.undo || has_undone(&verdict, &outcome);
                if let Some(bytes) = outcome.failed_bytes.get(&(MemoryPart::Text, Cause::NoFile)) {
                    let bytes = Bytes(*bytes);
                    output::note(&format!(
                        "{operand}: {bytes} of code stay a private copy: {NO_FILE}"
                    ));
                }
                processes.push(ProcessChange::new(operand, verdict, &outcome));
            }
            Ok(None) => {}
            Err(refusal) => {
                output::error(&anyhow::anyhow!("{operand}: {refusal}"));
                processes.push(ProcessChange::refused(operand, pid, refusal.to_string()));
            }
        }
    }
    let interrupted = asked_to_stop();
    if args.follow && !args.dry_run && !interrupted {
        follow(args, advice, &mut processes);
    }
    let document = PageSizeChange { asked: advice.clone(), processes, files: None };
    args.outputs
        .print(&document, |document| table(&document.processes) + &stops(&document.processes))?;
    let processes = document.processes;
    let failed = interrupted || processes.iter().any(|process| process.error.is_some());
    Ok(match (failed, is_undone) {
        (true, _) => exit::WRAPPER_FAILED,
        (_, false) => exit::THRESHOLD_FAILED,
        _ => exit::FINE,
    }
    .into())
}

type Done = (Verdict, Outcome);

/// Changes a process; returns None for a dry run.
fn change_one(
    args: &Args,
    advice: &PartSizes,
    system: &PageSettings,
    pid: u32,
) -> Result<Option<Done>, Refusal> {
    let target = Target::open(pid, args.force)?;
    let huge = system.pmd_size().unwrap_or(PageSize::M2);
    // An undo of everything leaves the files' own pages alone: other processes may map them.
    let read = |pid| {
        let mut map = read(pid)?;
        if args.undo && args.options.is_empty() {
            map.mappings.retain(|mapping| mapping.segment != Segment::Text);
        }
        Ok::<_, Refusal>(map)
    };
    let map = read(pid)?;
    if args.dry_run {
        let verdict = judge(&map, advice, &Outcome::default(), system);
        let way = match target.is_remote() {
            true => "process_madvise(2), without stopping it",
            false => "calls that it makes itself, in stops of a few milliseconds",
        };
        output::say(&format!("{pid}: would be changed by {way}; now:"));
        output::say(crate::output::pages::verdicts(&[&verdict]).trim_end());
        return Ok(None);
    }
    let outcome = match args.undo {
        true => change::undo(&target, &map, advice, huge)?,
        false => change::apply_all(&target, &map, advice, huge, args.force)?,
    };
    let advice = if args.undo { base_pages(advice) } else { advice.clone() };
    Ok(Some((judge(&read(pid)?, &advice, &outcome, system), outcome)))
}

/// Returns true if an undo succeeded. Memory other than code may have got huge pages since.
fn has_undone(verdict: &Verdict, outcome: &Outcome) -> bool {
    let mut text = verdict.parts.iter().filter(|part| part.part == MemoryPart::Text);
    // What has gone, or is in use for a moment, is no refusal.
    let passing = |cause: &Cause| matches!(cause, Cause::Gone | Cause::Busy);
    outcome.failed_bytes.keys().all(|(_, cause)| passing(cause))
        && text.all(|part| part.as_asked_bytes == part.resident_bytes)
}

/// Returns base pages for each part that is undone.
fn base_pages(advice: &PartSizes) -> PartSizes {
    PartSizes::of(&advice.parts(), PageSizeRequest::preferred(base_page()))
}

fn read(pid: u32) -> Result<pagemap::PageMap, Refusal> {
    pagemap::read(pid).map_err(|error| match error {
        pagemap::PageMapError::NoProcess(_) | pagemap::PageMapError::NoMemory(_) => Refusal::Gone,
        error => Refusal::System(error.to_string()),
    })
}

/// Repeats the change until all processes have ended, or a signal asks to stop.
fn follow(args: &Args, advice: &PartSizes, processes: &mut Vec<ProcessChange>) {
    let roots: Vec<Pid> = processes
        .iter()
        .filter(|process| process.error.is_none())
        .filter_map(|process| Pid::from_raw(process.pid? as i32))
        .collect();
    let mut sweeper = Sweeper::new(advice.clone(), args.force, Whose::Everybodys, true);
    while let Some(pause) = sweeper.sweep(&roots) {
        let until = Instant::now() + pause;
        while Instant::now() < until && !asked_to_stop() {
            std::thread::sleep(STOP_POLL.min(until.saturating_duration_since(Instant::now())));
        }
        if asked_to_stop() {
            break;
        }
    }
    processes.retain(|process| process.error.is_some());
    for (verdict, outcome) in sweeper.finish() {
        processes.push(ProcessChange::new(verdict.pid.to_string(), verdict, &outcome));
    }
}

/// Describes the stops of each process.
fn stops(processes: &[ProcessChange]) -> String {
    let line = |process: &ProcessChange| {
        let (pid, longest) = (process.pid?, process.stop_ns_max?);
        let longest = Nanos(longest);
        Some(match process.stop_count {
            1 => format!("  {pid} was stopped once, for {longest}\n"),
            times => format!("  {pid} was stopped {times} times, for {longest} at most\n"),
        })
    };
    processes.iter().filter_map(line).collect()
}
