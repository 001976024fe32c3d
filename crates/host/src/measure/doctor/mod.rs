//! The features of this machine that pagetax can use, and the commands that enable more of them.
//!
//! Invariants: a feature that "works" was opened or used a moment ago, on a small scale. The check
//! changes nothing on the machine. Each feature that does not work comes with the exact command that
//! would enable it, or with the reason why no command can.

mod events;
mod memory;
mod system;

use crate::pages::journal::{Journal, Record};
use crate::procfs::{Fragmentation, Root};
use pagetax_core::document::Document;
use pagetax_core::finding::{Feature, Finding};
use pagetax_core::report::Environment;
use serde::{Deserialize, Serialize};

/// The machine's free memory by block size. It shows if huge pages are available without compaction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FreeMemory {
    /// The size of the smallest block.
    pub base_page_bytes: u64,
    /// The number of free blocks of `base_page_bytes` × 2^index.
    pub free_block_counts: Vec<u64>,
    /// The bytes of all free blocks.
    pub free_bytes: u64,
    /// The free bytes in blocks that can hold a huge page.
    pub free_in_huge_blocks_bytes: u64,
    /// The counts of compaction; `None` if the kernel was built without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compaction: Option<Compaction>,
}

/// The counts of compaction, which moves pages to make large free blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Compaction {
    /// The number of faults and collapses that waited for compaction, since boot.
    pub stall_count: u64,
    /// The number of these that got their block.
    pub success_count: u64,
    /// The number of these that did not get it.
    pub fail_count: u64,
    /// The number of faults that took base pages for lack of a huge one, since boot.
    pub fallback_count: u64,
    /// The extent of proactive compaction, 0 to 100 (vm.compaction_proactiveness).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proactiveness: Option<u64>,
}

impl Compaction {
    fn read(root: &Root) -> Option<Compaction> {
        let vmstat = root.text("/proc/vmstat").ok()?;
        let count = |name: &str| {
            let mut fields = vmstat.lines().filter_map(|line| line.split_once(' '));
            fields.find(|(known, _)| *known == name)?.1.parse().ok()
        };
        Some(Compaction {
            stall_count: count("compact_stall")?,
            success_count: count("compact_success")?,
            fail_count: count("compact_fail")?,
            fallback_count: count("thp_fault_fallback")?,
            proactiveness: root.number("/proc/sys/vm/compaction_proactiveness").ok(),
        })
    }
}

/// The findings of the doctor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Examination {
    /// The findings, one for each feature.
    pub findings: Vec<Finding>,
    /// The fragmentation of free memory; `None` if /proc/buddyinfo cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_memory: Option<FreeMemory>,
}

/// The findings, and the machine that they were made on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Doctor {
    /// The findings, with their remedies.
    #[serde(flatten)]
    pub examination: Examination,
    /// The machine that was examined.
    pub environment: Environment,
}

impl Document for Doctor {
    const KIND: &'static str = "doctor";
}

/// Examines all features. The finding about serving faults from user space is the pager's own, which this
/// crate does not know.
pub fn examine(user_faults: Finding) -> Examination {
    let root = Root::default();
    let mut findings = events::findings(&root);
    findings.extend(memory::findings(&root));
    findings.push(user_faults);
    findings.extend(system::findings(&root));
    findings.extend(settings_left(&Journal::left_on_host()));
    Examination { findings, free_memory: free_memory(&root) }
}

/// Returns a finding if a killed command did not restore its settings.
fn settings_left(records: &[Record]) -> Option<Finding> {
    let feature = Feature("settings_left", "settings as they were before pagetax changed them");
    let left = records.iter().map(|record| {
        let Record { path, before, value, .. } = record;
        format!("{} is `{value}`, was `{before}`", path.display())
    });
    let left: Vec<String> = left.collect();
    (!left.is_empty()).then(|| {
        let detail = format!("a command was killed: {}", left.join("; "));
        feature.limited(detail, "sudo pagetax doctor --repair")
    })
}

fn free_memory(root: &Root) -> Option<FreeMemory> {
    let state = Fragmentation::read(root).ok()?;
    let base = rustix::param::page_size() as u64;
    let huge = crate::pages::PageSettings::host().pmd_size().map_or(2 << 20, |s| s.bytes());
    Some(FreeMemory {
        base_page_bytes: base,
        free_bytes: state.free_bytes_in(base, base),
        free_in_huge_blocks_bytes: state.free_bytes_in(huge, base),
        free_block_counts: state.free_blocks,
        compaction: Compaction::read(root),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::ran_alone;
    use pagetax_core::finding::Standing;
    use pagetax_remote::pager::doctor::user_faults;
    use std::collections::BTreeMap;
    use std::time::{Duration, Instant};

    /// Returns the settings that a careless check could change, and the open files of this process.
    fn state() -> BTreeMap<String, String> {
        let root = Root::default();
        let mut state = BTreeMap::new();
        let mut folders: Vec<String> = [
            "/proc/sys/vm",
            "/proc/sys/kernel",
            "/sys/kernel/mm/transparent_hugepage",
            "/sys/kernel/mm/hugepages",
            "/sys/fs/cgroup",
        ]
        .map(String::from)
        .into();
        // Counters, and random or changing values, are not settings.
        let moving = |path: &str| {
            ["/stats", "random", "ns_last_pid", "/pty", "stat_refresh", "sched_", "/khugepaged/"]
                .iter()
                .any(|part| path.contains(part))
        };
        while let Some(folder) = folders.pop() {
            for name in root.names(&folder) {
                let path = format!("{folder}/{name}");
                if moving(&path) {
                    continue;
                }
                if root.path(&path).is_dir() && !path.starts_with("/sys/fs/cgroup/") {
                    folders.push(path);
                } else {
                    state.insert(path.clone(), root.text(&path).unwrap_or_default());
                }
            }
        }
        state.insert("swaps".into(), root.text("/proc/swaps").unwrap_or_default());
        state.insert("mounts".into(), root.text("/proc/self/mounts").unwrap_or_default());
        state
    }

    #[test]
    fn a_look_changes_nothing() {
        if ran_alone() {
            return;
        }
        let (before, first) = (state(), examine(user_faults()));
        // Another process on this machine may change a setting for a moment; a change of ours would
        // stay.
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut after = state();
        while after != before && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(200));
            after = state();
        }
        for (path, text) in &before {
            assert_eq!(Some(text), after.get(path), "{path}");
        }
        assert_eq!(before.len(), after.len());
        let children = format!("/proc/self/task/{}/children", std::process::id());
        assert_eq!(Root::default().text(&children).unwrap_or_default(), "");
        // A feature that works must work again.
        let standings = |e: &Examination| {
            e.findings.iter().map(|f| (f.id.clone(), f.standing)).collect::<Vec<_>>()
        };
        assert_eq!(standings(&first), standings(&examine(user_faults())));
    }

    #[test]
    fn every_finding_is_of_use() {
        let examination = examine(user_faults());
        let mut ids: Vec<_> = examination.findings.iter().map(|f| f.id.clone()).collect();
        assert!(ids.len() >= 18, "{ids:?}");
        ids.sort();
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]));
        for finding in &examination.findings {
            assert!(!finding.detail.is_empty(), "{finding:?}");
            assert_eq!(finding.standing == Standing::Works, {
                finding.enable.is_none() && finding.standing != Standing::NotHere
            });
        }
        let free = examination.free_memory.unwrap();
        assert!(free.free_in_huge_blocks_bytes <= free.free_bytes && free.free_bytes > 0);
    }
}
