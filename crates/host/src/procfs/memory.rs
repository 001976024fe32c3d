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
    /// Reads the free blocks in /proc/buddyinfo.
    pub fn read(root: &Root) -> Result<Fragmentation, String> {
        Fragmentation::of_zones(root, |_| true)
    }

    /// Reads the free blocks that ordinary memory can have. The kernel keeps the zone DMA in reserve, and its
    /// few megabytes are nearly always free.
    pub fn usable(root: &Root) -> Result<Fragmentation, String> {
        Fragmentation::of_zones(root, |zone| zone != "DMA")
    }

    fn of_zones(root: &Root, counts: impl Fn(&str) -> bool) -> Result<Fragmentation, String> {
        let text = root.text("/proc/buddyinfo")?;
        let mut free_blocks: Vec<u64> = Vec::new();
        for line in text.lines() {
            // "Node 0, zone   Normal   12   7 …": numbers follow the zone's name.
            let mut words = line.split_whitespace().skip_while(|word| *word != "zone").skip(1);
            if !words.next().is_some_and(&counts) {
                continue;
            }
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

    /// Returns the free bytes in blocks of at least `block_bytes`, for base pages of `page_bytes`.
    pub fn free_bytes_in(&self, block_bytes: u64, page_bytes: u64) -> u64 {
        let blocks = self.free_blocks.iter().enumerate();
        blocks
            .map(|(order, count)| (page_bytes << order, count))
            .filter(|(size, _)| *size >= block_bytes)
            .map(|(size, count)| size * count)
            .sum()
    }
}

/// Reads the memory cgroup of a process, version 1 or 2: `limit_bytes`, `usage_bytes`, and the keys of
/// memory.stat.
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

/// Returns the lines of a /proc/PID/cgroup: controllers, of which version 2 names none, and the path.
pub fn cgroup_paths(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        Some((parts.next()?, parts.next()?))
    })
}

/// Reads a file of a process's cgroup of one controller: `v2_file` or `v1_file` by the cgroup's version.
/// Returns its path and its text.
pub fn cgroup_file(
    root: &Root,
    pid: u32,
    controller: &str,
    v2_file: &str,
    v1_file: &str,
) -> Option<(String, String)> {
    let text = root.text(&format!("/proc/{pid}/cgroup")).ok()?;
    let mut candidates = cgroup_paths(&text).filter_map(|(controllers, path)| {
        let (mount, file) = match controllers {
            "" => ("/sys/fs/cgroup".into(), v2_file),
            named if named.split(',').any(|name| name == controller) => {
                (format!("/sys/fs/cgroup/{controller}"), v1_file)
            }
            _ => return None,
        };
        // Inside a container, only the root of the mount may be visible.
        let folders = [format!("{mount}{}", path.trim_end_matches('/')), mount];
        folders.into_iter().find_map(|folder| {
            let path = format!("{folder}/{file}");
            Some((path.clone(), root.text(&path).ok()?))
        })
    });
    candidates.next()
}

/// Returns the lowest memory limit of a process's cgroup and those around it, in bytes. `None` means that
/// there is no limit, or that the cgroups cannot be read.
pub fn memory_limit(root: &Root, pid: u32) -> Option<u64> {
    let text = root.text(&format!("/proc/{pid}/cgroup")).ok()?;
    let limits = cgroup_paths(&text).filter_map(|(controllers, path)| {
        let (mount, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            named if named.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return None,
        };
        // Inside a container the path may be the host's; the mount is then the container's own cgroup.
        let path = path.trim_end_matches('/');
        let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
        let limit_of = |end: usize| {
            let text = root.text(&format!("{mount}{}/{file}", &path[..end]));
            limit_reading(text).value()
        };
        ends.filter_map(limit_of).min()
    });
    limits.min()
}

/// Returns the folder of a cgroup. Inside a container, only the root of the mount may be visible.
fn existing(root: &Root, mount: &str, path: &str) -> Option<String> {
    let full = format!("{mount}{}", path.trim_end_matches('/'));
    let candidates = [full, mount.to_string()];
    candidates.into_iter().find(|folder| root.has(&format!("{folder}/memory.stat")))
}

/// Parses a limit. Version 2 writes `max` for no limit, and version 1 a number near 2^63.
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
        let usable = Fragmentation::usable(&captured()).unwrap().free_bytes_in(4096, 4096);
        assert!(usable < free && free - usable < 16 << 20, "the zone DMA has 16 MiB at most");
    }

    /// Returns a tree with these files.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let root = Root::at(folder.path());
        (folder, root)
    }

    #[test]
    fn the_least_limit_of_all_cgroups_around_a_process_is_its_limit() {
        let two = "sys/fs/cgroup";
        let (_folder, root) = tree(&[
            ("proc/7/cgroup", "0::/a/b\n"),
            (&format!("{two}/a/memory.max"), "4096\n"),
            (&format!("{two}/a/b/memory.max"), "max\n"),
        ]);
        assert_eq!(memory_limit(&root, 7), Some(4096));
        let one = "sys/fs/cgroup/memory";
        let (_folder, root) = tree(&[
            ("proc/7/cgroup", "4:cpu,cpuacct:/x\n3:memory:/a/b/\n"),
            (&format!("{one}/memory.limit_in_bytes"), "9223372036854771712\n"),
            (&format!("{one}/a/b/memory.limit_in_bytes"), "8192\n"),
        ]);
        assert_eq!(memory_limit(&root, 7), Some(8192));
        // In a container, the path may be the host's; the mount is then the container's own cgroup.
        let (_folder, root) = tree(&[
            ("proc/7/cgroup", "0::/host/path\n"),
            (&format!("{two}/memory.max"), "12288\n"),
        ]);
        assert_eq!(memory_limit(&root, 7), Some(12288));
        assert_eq!(memory_limit(&root, 8), None);
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
