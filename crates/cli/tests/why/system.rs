//! Plants that change settings of the whole system. Other tests run at the same time on this machine, so
//! only a guest of `cargo xtask kernels` runs these, one after the other.

use super::planted::{Plant, pool_pages};
use super::{BYTES, MALLOC_BYTES, assert_cause};
use std::fs;
use std::path::{Path, PathBuf};

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// A setting that has its former value again when this is dropped.
struct Changed {
    path: PathBuf,
    before: String,
}

impl Changed {
    fn set(path: impl Into<PathBuf>, value: &str) -> Changed {
        let path = path.into();
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        let before = word.map_or(text.trim(), |(word, _)| word).to_string();
        fs::write(&path, value).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        Changed { path, before }
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        fs::write(&self.path, &self.before).unwrap();
    }
}

#[test]
#[ignore = "changes settings of the system; cargo xtask kernels runs it in a guest"]
fn huge_pages_that_are_switched_off() {
    let _off = Changed::set(format!("{THP}/enabled"), "never");
    assert_cause(&Plant::of("advised").answer(), "switched_off", "certain", 4 * BYTES);
}

#[test]
#[ignore = "changes settings of the system; cargo xtask kernels runs it in a guest"]
fn smaller_sizes_alone() {
    let small = format!("{THP}/hugepages-64kB/enabled");
    if !Path::new(&small).exists() {
        println!("no 64K pages before Linux 6.8");
        return;
    }
    let _small = Changed::set(small, "madvise");
    let _off = Changed::set(format!("{THP}/hugepages-2048kB/enabled"), "never");
    assert_cause(&Plant::of("advised").answer(), "mthp_only", "certain", 4 * BYTES);
}

#[test]
#[ignore = "changes settings of the system; cargo xtask kernels runs it in a guest"]
fn equal_pages_that_are_merged() {
    const KSM: &str = "/sys/kernel/mm/ksm";
    let _always = Changed::set(format!("{THP}/enabled"), "always");
    let _fast = Changed::set(format!("{KSM}/pages_to_scan"), "20000");
    let _short = Changed::set(format!("{KSM}/sleep_millisecs"), "1");
    let _run = Changed::set(format!("{KSM}/run"), "1");
    let plant = Plant::of("merged");
    let merged = || fs::read_to_string(format!("{KSM}/pages_sharing")).unwrap();
    let pages = || merged().trim().parse::<u64>().unwrap();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(100);
    while pages() < BYTES / 4096 * 9 / 10 && std::time::Instant::now() < end {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let answer = plant.answer();
    let first = &answer["causes"][0];
    assert_eq!(first["id"], "merged", "{} pages merged: {answer:#}", pages());
    assert!(first["bytes"].as_u64().unwrap() >= BYTES * 8 / 10, "{answer:#}");
}

#[test]
#[ignore = "changes settings of the system; cargo xtask kernels runs it in a guest"]
fn memory_in_pieces() {
    // The kernel then does not compact memory for a fault.
    let _no_compaction = Changed::set(format!("{THP}/defrag"), "never");
    let _not_beforehand = Changed::set("/proc/sys/vm/compaction_proactiveness", "0");
    let _no_daemon = Changed::set(format!("{THP}/khugepaged/defrag"), "0");
    let _held = Plant::of("pieces");
    let answer = Plant::of("advised").answer();
    // A few blocks become free when other programs end, before and after the plant fills its memory.
    let [all, huge] = ["anon_bytes", "huge_bytes"].map(|key| answer[key].as_u64().unwrap());
    let blocks = answer["causes"][0]["evidence"][0]["value"].as_str().unwrap();
    let free = blocks.split_once(" free blocks").and_then(|(count, _)| count.parse::<u64>().ok());
    let small = all - huge - free.unwrap_or(0) * (2 << 20);
    assert!(small >= 3 * BYTES / 2, "{answer:#}");
    assert_cause(&answer, "no_free_block", "possible", small);
}

/// A cgroup of version 2 with a limit, which goes with the value.
struct Group(PathBuf);

impl Group {
    fn make(controller: &str, file: &str, limit: u64) -> Group {
        let root = Path::new("/sys/fs/cgroup");
        let _ = fs::write(root.join("cgroup.subtree_control"), format!("+{controller}"));
        let path = root.join(format!("pagetax-why-{controller}"));
        fs::create_dir(&path).unwrap();
        let group = Group(path);
        fs::write(group.0.join(file), limit.to_string()).unwrap();
        group
    }

    fn plant(&self, plant: &str, environment: &[(&str, &str)]) -> Plant {
        let mut command = std::process::Command::new("sh");
        let program = super::compiled("plants");
        let script = format!(
            "echo $$ > {}/cgroup.procs; exec {} {plant}",
            self.0.display(),
            program.display()
        );
        command.args(["-c", &script]).envs(environment.iter().copied());
        Plant::start(command)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        fs::remove_dir(&self.0).unwrap();
    }
}

#[test]
#[ignore = "changes settings of the system; cargo xtask kernels runs it in a guest"]
fn a_memory_cgroup_at_its_limit() {
    let group = Group::make("memory", "memory.max", BYTES + (3 << 19));
    // It fills its memory before it is advised.
    let plant = group.plant("crowded", &[]);
    assert_cause(&plant.answer(), "cgroup_limit", "possible", BYTES);
    drop(plant);
}

#[test]
#[ignore = "changes settings of the system; cargo xtask kernels runs it in a guest"]
fn a_hugetlb_cgroup_at_its_limit() {
    let pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    let _pool = Changed::set(pool, &(pool_pages() + 40).to_string());
    let group = Group::make("hugetlb", "hugetlb.2MB.rsvd.max", 0);
    let plant = group.plant("malloc", &[("GLIBC_TUNABLES", "glibc.malloc.hugetlb=2")]);
    assert_cause(&plant.answer(), "hugetlb_pool", "certain", MALLOC_BYTES);
    let source = plant.answer()["causes"][0]["evidence"][1]["source"].to_string();
    assert!(source.contains("rsvd.max"), "{source}");
    drop(plant);
}
