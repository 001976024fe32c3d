//! `pagetax doctor`: what of this machine can be used, and how to enable the rest.

use crate::exit;
use crate::output::{self, documents::Outputs, text};
use anyhow::{Context, Result};
use pagetax_core::finding::Standing;
use pagetax_core::units::Bytes;
use pagetax_host::measure::doctor::{Compaction, Doctor, Examination, FreeMemory, examine};
use pagetax_host::measure::environment::environment;
use pagetax_host::pages::journal::{Journal, Record, Restoration};
use pagetax_host::procfs::Root;
use pagetax_remote::pager::doctor::user_faults;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax doctor                what works, what is limited, what is not here
  pagetax doctor --json         the same as a document
  pagetax doctor --repair       first put back settings that a killed command has left changed";

/// Try what this machine offers, and say how to enable the rest
///
/// Each feature is opened or done in small, and nothing of the machine is changed but by --repair.
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    outputs: Outputs<Doctor>,

    /// First put back the settings that a killed command (`diagnose --allow-sysfs`, `calibrate
    /// --allow-sysfs`) has left changed
    #[arg(long)]
    repair: bool,
}

/// Runs `pagetax doctor`.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.repair {
        repair().map_err(|error| exit::with(exit::UNMET, error))?;
    }
    let doctor =
        Doctor { examination: examine(user_faults()), environment: environment(&Root::default()) };
    args.outputs.print(&doctor, |doctor| render(&doctor.examination))?;
    Ok(exit::FINE.into())
}

/// Says of each setting what became of it.
fn repair() -> Result<()> {
    const FAILED: &str =
        "cannot put settings back\n  hint: run it as the user of the killed command";
    let repaired = Journal::host().and_then(|journal| journal.repair()).context(FAILED)?;
    for (Record { path, before, value, .. }, outcome) in repaired {
        output::note(&match outcome {
            Restoration::Restored => format!("{}: `{value}` is `{before}` again", path.display()),
            Restoration::ChangedSince => {
                format!("{}: left alone: set since by somebody else", path.display())
            }
        });
    }
    Ok(())
}

fn render(examination: &Examination) -> String {
    let mut out = String::new();
    for standing in [Standing::Works, Standing::Limited, Standing::NotHere] {
        let findings: Vec<_> =
            examination.findings.iter().filter(|finding| finding.standing == standing).collect();
        if findings.is_empty() {
            continue;
        }
        out += &text::heading(&standing.to_string());
        let rows = findings.iter().map(|f| vec![f.what.to_string(), f.detail.clone()]).collect();
        out += &text::table(&["", ""], &[], rows);
        let enabled = findings.iter().filter_map(|f| Some((&f.id, f.enable.as_ref()?)));
        for (index, (id, command)) in enabled.enumerate() {
            let lead = if index == 0 { "\n  To enable more:\n" } else { "" };
            out += &format!("{lead}    # {id}\n    {command}\n");
        }
    }
    if let Some(free) = &examination.free_memory {
        out += &text::heading("free memory by size of block");
        out += &fragmentation(free);
    }
    out.trim_start_matches('\n').to_string()
}

fn fragmentation(free: &FreeMemory) -> String {
    let rows = free.free_block_counts.iter().enumerate().map(|(order, count)| {
        let block = free.base_page_bytes << order;
        vec![Bytes(block).to_string(), count.to_string(), Bytes(block * count).to_string()]
    });
    let table = text::table(&["block", "free", "in all"], &[0, 1, 2], rows.collect());
    let (huge, all) = (free.free_in_huge_blocks_bytes, free.free_bytes);
    let percent = huge as f64 / all.max(1) as f64 * 100.0;
    let compaction = free.compaction.as_ref().map(compaction).unwrap_or_default();
    format!(
        "{table}  {} of {} free ({percent:.0} %) can be had as huge pages without compaction\n\
         {compaction}",
        Bytes(huge),
        Bytes(all)
    )
}

/// Describes compaction since the machine started.
fn compaction(state: &Compaction) -> String {
    let beforehand = match state.proactiveness {
        Some(0) => "; none is done beforehand (vm.compaction_proactiveness = 0)".into(),
        Some(level) => format!("; vm.compaction_proactiveness = {level}"),
        None => String::new(),
    };
    format!(
        "  compaction was waited for {} times and helped {} times; {} faults found no huge \
         page{beforehand}\n",
        text::count(state.stall_count),
        text::count(state.success_count),
        text::count(state.fallback_count),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::finding::Finding;

    #[test]
    fn what_can_be_enabled_comes_with_its_command() {
        let finding = |id: &'static str, standing, enable: Option<&str>| Finding {
            id: id.into(),
            what: "something".into(),
            standing,
            detail: "as seen".into(),
            enable: enable.map(String::from),
        };
        let examination = Examination {
            findings: vec![
                finding("good", Standing::Works, None),
                finding("off", Standing::NotHere, Some("sudo sysctl it=1")),
            ],
            free_memory: Some(FreeMemory {
                base_page_bytes: 4096,
                free_block_counts: vec![1; 10],
                free_bytes: 1023 * 4096,
                free_in_huge_blocks_bytes: 512 * 4096,
                compaction: Some(Compaction {
                    stall_count: 1_200,
                    success_count: 7,
                    fail_count: 1_193,
                    fallback_count: 3,
                    proactiveness: Some(20),
                }),
            }),
        };
        let text = anstream::adapter::strip_str(&render(&examination)).to_string();
        assert!(text.starts_with("works\n"), "{text}");
        assert!(text.contains("# off\n    sudo sysctl it=1\n"), "{text}");
        assert!(text.contains("2M of 4.0M free (50 %)"), "{text}");
        assert!(text.contains("waited for 1 200 times and helped 7 times; 3 faults"), "{text}");
        assert!(!text.contains("limited"), "{text}");
    }
}
