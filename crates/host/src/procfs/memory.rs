//! The machine's memory: fragmentation and cgroup limits.

use super::Root;
use pagetax_core::counter::Reading;
use std::collections::BTreeMap;

/// Free blocks of memory by size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fragmentation {
    /// Free blocks of 2^index base pages, over all zones.
    pub free_blocks: Vec<u64>,
}

impl Fragmentation {
    /// From /proc/buddyinfo.
    pub fn read(root: &Root) -> Result<Fragmentation, String> {
        let text = root.text("/proc/buddyinfo")?;
        let mut free_blocks: Vec<u64> = Vec::new();
        for line in text.lines() {
            // "Node 0, zone   Normal   12   7 …": numbers follow the zone's name.
            let words = line.split_whitespace().skip_while(|word| *word != "zone").skip(2);
            for (order, word) in words.enumerate() {
                let count: u64 =
                    word.parse().map_err(|_| format!("/proc/buddyinfo: `{word}` is no count"))?;
                if free_blocks.len() <= order {
                    free_blocks.push(0);
                }
                free_blocks[order] += count;
            }
        }
        if free_blocks.is_empty() {
            return Err("/proc/buddyinfo lists no zone".into());
        }
        Ok(Fragmentation { free_blocks })
    }

    /// Free bytes in blocks of at least `block_bytes`, for base pages of `page_bytes`.
    pub fn free_bytes_in(&self, block_bytes: u64, page_bytes: u64) -> u64 {
        let blocks = self.free_blocks.iter().enumerate();
        blocks
            .map(|(order, count)| (page_bytes << order, count))
            .filter(|(size, _)| *size >= block_bytes)
            .map(|(size, count)| size * count)
            .sum()
    }
}

/// Limits and use of the memory cgroup that a process is in: `limit_bytes`, `usage_bytes`, and the
/// keys of memory.stat. Version 1 and 2.
pub fn memory_cgroup(root: &Root, pid: u32) -> Result<BTreeMap<String, Reading>, String> {
    let text = root.text(&format!("/proc/{pid}/cgroup"))?;
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.splitn(3, ':').collect()).collect();
    let v1 = lines.iter().find(|l| l.len() == 3 && l[1].split(',').any(|name| name == "memory"));
    let v2 = lines.iter().find(|l| l.len() == 3 && l[0] == "0" && l[1].is_empty());
    let (folder, limit, usage) = match (v1, v2) {
        (Some(v1), _) => (
            existing(root, "/sys/fs/cgroup/memory", v1[2]),
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
        (None, Some(v2)) => {
            (existing(root, "/sys/fs/cgroup", v2[2]), "memory.max", "memory.current")
        }
        (None, None) => return Err("no memory cgroup controls this process".into()),
    };
    let folder = folder.ok_or("the process's memory cgroup is not mounted here")?;
    let mut readings = BTreeMap::new();
    readings.insert("limit_bytes".into(), limit_reading(root.text(&format!("{folder}/{limit}"))));
    let usage = root.number(&format!("{folder}/{usage}"));
    readings.insert("usage_bytes".into(), usage.map_or_else(Reading::Missing, Reading::Measured));
    for line in root.text(&format!("{folder}/memory.stat")).unwrap_or_default().lines() {
        if let Some((key, value)) = line.split_once(' ')
            && let Ok(value) = value.parse()
        {
            readings.insert(key.to_string(), Reading::Measured(value));
        }
    }
    Ok(readings)
}

/// The folder of a cgroup: inside a container, only the mount's own root may be visible.
fn existing(root: &Root, mount: &str, path: &str) -> Option<String> {
    let full = format!("{mount}{}", path.trim_end_matches('/'));
    let candidates = [full, mount.to_string()];
    candidates.into_iter().find(|folder| root.has(&format!("{folder}/memory.stat")))
}

/// No limit is `max` in version 2 and a number near 2^63 in version 1.
fn limit_reading(text: Result<String, String>) -> Reading {
    match text {
        Err(why) => Reading::Missing(why),
        Ok(text) => match text.parse::<u64>() {
            Ok(bytes) if bytes < 1 << 62 => Reading::Measured(bytes),
            _ => Reading::Missing("no limit is set".into()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::captured;
    use super::*;

    #[test]
    fn blocks_add_up_over_zones() {
        let state = Fragmentation::read(&captured()).unwrap();
        assert_eq!(state.free_blocks.len(), 11);
        let free = state.free_bytes_in(4096, 4096);
        assert!(free > state.free_bytes_in(2 << 20, 4096) && free < 64 << 30, "{free}");
    }

    #[test]
    fn cgroup_limits_and_stat() {
        let cgroup = memory_cgroup(&captured(), 4711).unwrap();
        assert_eq!(cgroup["limit_bytes"], Reading::Missing("no limit is set".into()));
        assert!(matches!(cgroup["usage_bytes"], Reading::Measured(bytes) if bytes > 0));
        assert!(matches!(cgroup["rss"], Reading::Measured(_)));
        assert!(memory_cgroup(&captured(), 1).is_err());
    }
}
