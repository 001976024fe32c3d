//! Runs split by NUMA node. They are separate from the map, because the query costs time.

use super::{Mapping, PageMap, PageMapError, Run};
use crate::sys::numa;
use pagetax_core::units::VirtAddr;
use rustix::process::Pid;

/// The runs of a mapping, each of one page size and on one node; `None` if there is no page.
pub type NodeRuns = Vec<(Run, Option<u32>)>;

/// Returns the runs by node for each mapping of the map.
pub fn by_node(map: &PageMap) -> Result<Vec<NodeRuns>, PageMapError> {
    let pid = i32::try_from(map.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(PageMapError::NoProcess(map.pid))?;
    let split = |mapping: &Mapping| -> Result<NodeRuns, PageMapError> {
        let mut rows = NodeRuns::new();
        for run in &mapping.runs {
            split_run(pid, run, &mut rows)
                .map_err(|error| PageMapError::of(map.pid, "move_pages", error))?;
        }
        Ok(rows)
    };
    map.mappings.iter().map(split).collect()
}

/// Splits a run by node. A page is on one node, so one address per page is queried.
fn split_run(pid: Pid, run: &Run, rows: &mut NodeRuns) -> std::io::Result<()> {
    let Some(page) = run.page else {
        rows.push((*run, None));
        return Ok(());
    };
    let starts: Vec<u64> = (run.start.0..run.end.0).step_by(page.bytes() as usize).collect();
    let nodes = numa::nodes(pid, &starts)?;
    let first = rows.len();
    for (start, node) in starts.into_iter().zip(nodes) {
        let end = VirtAddr((start + page.bytes()).min(run.end.0));
        match rows[first..].last_mut().filter(|(_, last)| *last == node) {
            Some((row, _)) => row.end = end,
            None => rows.push((Run { start: VirtAddr(start), end, ..*run }, node)),
        }
    }
    for (row, _) in &mut rows[first..] {
        row.resident_bytes = run.share(run.resident_bytes, row.bytes());
        row.anon_bytes = run.share(run.anon_bytes, row.bytes());
    }
    Ok(())
}
