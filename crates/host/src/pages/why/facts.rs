//! The facts that causes rest on, each read once. A fact that cannot be read keeps its reason.

use super::{CauseEvidence, MissingFact};
use crate::launch::program::{Kind, Program};
use crate::measure::trial::tree::ProcessTree;
use crate::pages::pagemap::PageMap;
use crate::pages::verdict::{free_blocks, status_field};
use crate::pages::{Mode, PageSettings};
use crate::procfs::{Root, maps};
use crate::sys::remote;
use pagetax_core::units::PageSize;
use rustix::process::Pid;
use std::collections::{BTreeMap, BTreeSet};

/// The key of the vector of /proc/PID/auxv that marks set-id programs.
const AT_SECURE: u64 = 23;

/// The facts about a process and its system.
pub(super) struct Facts {
    pub map: PageMap,
    pub huge: PageSize,
    pub root: Root,
    pub system: PageSettings,
    /// The mode of pages of the huge size.
    pub mode: Option<Mode>,
    /// True if the process forbids itself huge pages; `None` before Linux 5.0.
    pub forbidden: Option<bool>,
    /// The environment at its start.
    pub environment: Result<BTreeMap<String, String>, String>,
    /// The kind of its program.
    pub kind: Result<Kind, String>,
    /// True if it runs with privileges of its own (AT_SECURE).
    pub is_secure: Result<bool, String>,
    /// The starts of mappings of a parent or child that runs the same program, by process.
    pub relatives: Vec<(u32, BTreeSet<u64>)>,
    /// Free blocks of at least the huge size.
    pub free_blocks: Result<u64, String>,
}

impl Facts {
    pub fn read(map: PageMap) -> Facts {
        let (root, system) = (Root::default(), PageSettings::host());
        let huge = system.pmd_size().unwrap_or(PageSize::M2);
        let pid = map.pid;
        Facts {
            huge,
            mode: system.of_size(huge),
            forbidden: status_field(pid, "THP_enabled:").map(|value| value == "0"),
            environment: environment(&root, pid),
            kind: kind(pid),
            is_secure: is_secure(&root, pid),
            relatives: relatives(&root, pid),
            free_blocks: free_blocks(huge),
            map,
            root,
            system,
        }
    }

    pub fn pid(&self) -> u32 {
        self.map.pid
    }

    /// Returns the names of files that the process maps.
    pub fn mapped_files(&self) -> impl Iterator<Item = &str> {
        let files = self.map.mappings.iter().filter(|mapping| mapping.inode != 0);
        files.map(|mapping| mapping.name.as_str())
    }

    /// Returns a variable of the process's environment.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.environment.as_ref().ok()?.get(name).map(String::as_str)
    }

    /// Returns the evidence that a variable is set.
    pub fn shown_by_variable(&self, name: &str) -> CauseEvidence {
        let value = self.variable(name).unwrap_or_default();
        CauseEvidence::new(format!("/proc/{}/environ", self.pid()), format!("{name}={value}"))
    }

    /// Returns a file under /sys/kernel/mm/transparent_hugepage with its value.
    pub fn shown_by_setting(&self, file: &str) -> CauseEvidence {
        let path = format!("/sys/kernel/mm/transparent_hugepage/{file}");
        let value = self.root.text(&path).unwrap_or_else(|why| why);
        CauseEvidence::new(path, value)
    }

    /// Returns the line that collapses memory which is there, or before Linux 6.1 starts the command again.
    pub fn collapse_line(&self) -> String {
        match remote::knows_collapse() {
            true => format!("pagetax ppgsz -o heap=2M,anon=2M -p {}", self.pid()),
            false => format!("start it again: {}", self.start_line()),
        }
    }

    /// Returns the line that starts the command on huge pages.
    pub fn start_line(&self) -> String {
        format!("pagetax ppgsz -o heap=2M {}", self.map.command)
    }

    /// Lists what could not be read.
    pub fn missing(&self) -> Vec<MissingFact> {
        let pid = self.pid();
        let facts = [
            (format!("/proc/{pid}/environ: allocator settings and preloaded libraries"), {
                self.environment.as_ref().err()
            }),
            (format!("/proc/{pid}/exe: the kind of program"), self.kind.as_ref().err()),
            (format!("/proc/{pid}/auxv: set-id"), self.is_secure.as_ref().err()),
            ("/proc/buddyinfo: free blocks".into(), self.free_blocks.as_ref().err()),
        ];
        let missing =
            |(what, why): (String, Option<&String>)| Some(MissingFact { what, why: why?.clone() });
        facts.into_iter().filter_map(missing).collect()
    }
}

fn environment(root: &Root, pid: u32) -> Result<BTreeMap<String, String>, String> {
    let bytes = root.bytes(&format!("/proc/{pid}/environ")).map_err(|error| error.to_string())?;
    let entries = bytes.split(|byte| *byte == 0).filter_map(|entry| {
        let text = String::from_utf8_lossy(entry);
        let (name, value) = text.split_once('=')?;
        Some((name.to_string(), value.to_string()))
    });
    Ok(entries.collect())
}

fn kind(pid: u32) -> Result<Kind, String> {
    Program::find(format!("/proc/{pid}/exe"))
        .map(|program| program.kind)
        .map_err(|error| error.to_string().lines().next().unwrap_or_default().to_string())
}

fn is_secure(root: &Root, pid: u32) -> Result<bool, String> {
    let bytes = root.bytes(&format!("/proc/{pid}/auxv")).map_err(|error| error.to_string())?;
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
    let is_set = |pair: &[u8]| word(&pair[..8]) == AT_SECURE && word(&pair[8..]) != 0;
    Ok(bytes.chunks_exact(16).any(is_set))
}

/// Returns the mappings of the parent and the children, if they run the same program: copy-on-write relates
/// their memory.
fn relatives(root: &Root, pid: u32) -> Vec<(u32, BTreeSet<u64>)> {
    let exe = |pid: u32| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let Some(own) = exe(pid) else { return Vec::new() };
    let parent = status_field(pid, "PPid:").and_then(|text| text.parse::<u32>().ok());
    let children = Pid::from_raw(pid as i32)
        .map(|pid| ProcessTree::default().descendants(pid))
        .unwrap_or_default();
    let children = children.into_iter().map(|child| child.as_raw_nonzero().get() as u32);
    let same =
        parent.into_iter().chain(children).filter(|other| exe(*other).as_ref() == Some(&own));
    let starts = |other: u32| {
        let lines = maps(root, other).ok()?;
        Some((other, lines.into_iter().map(|line| line.range.start).collect()))
    };
    same.filter_map(starts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_read() {
        let pid = std::process::id();
        let environment = environment(&Root::default(), pid).unwrap();
        assert_eq!(
            environment.get("PATH").map(String::as_str),
            std::env::var("PATH").ok().as_deref()
        );
        assert_eq!(is_secure(&Root::default(), pid), Ok(false));
        assert_eq!(kind(pid), Ok(Kind::DynamicGlibc));
        assert!(environment_of_nobody().is_err() && kind(u32::MAX).is_err());
    }

    fn environment_of_nobody() -> Result<BTreeMap<String, String>, String> {
        environment(&Root::default(), u32::MAX)
    }
}
