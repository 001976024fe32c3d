//! Why kswapd works: a decision among eight causes, from two looks at the kernel's counters.
//!
//! [`KswapdCounters`] reads /proc; [`decide`] is a pure function of two of them. Invariant: a cause is
//! certain only if counters of this interval show it. What cannot be read is listed as missing, and nothing
//! rests on it.

use crate::measure::system::{daemon_ns, daemons};
use crate::procfs::{Fragmentation, Root};
use pagetax_core::explain::{KswapdCause, KswapdDecision};
use pagetax_core::system_stat::huge_blocks;
use pagetax_core::units::Bytes;
use procfs_core::{Meminfo, VmStat};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// kswapd with less of a CPU than this is idle.
const IDLE_SHARE: f64 = 0.01;

/// The time between two looks at the watermarks. The kernel takes a boost back when kswapd has reclaimed it,
/// so a boost that comes and goes lasts for some tenths of a second.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// A zone of memory, in pages. The watermarks include the boost, as /proc/zoneinfo has them
/// (include/linux/mmzone.h, `wmark_pages`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Zone {
    /// Node and name, such as `0 Normal`.
    pub name: String,
    /// The pages that are free now.
    pub free: u64,
    /// The pages that fragmentation added to the watermarks for some time.
    pub boost: u64,
    /// Below this number of free pages, tasks reclaim.
    pub min: u64,
    /// Below this number, kswapd is woken.
    pub low: u64,
    /// The number of free pages at which it sleeps again.
    pub high: u64,
    /// The pages that the kernel hands out of it.
    pub managed: u64,
}

/// The kernel's counters at one moment.
#[derive(Debug, Clone)]
pub struct KswapdCounters {
    taken: Instant,
    kswapd_ns: Option<u64>,
    vmstat: BTreeMap<String, u64>,
    meminfo: BTreeMap<&'static str, u64>,
    /// The zones at each look since the counters before: a boost comes and goes.
    zones: Vec<Vec<Zone>>,
    free_blocks: Option<Vec<u64>>,
    /// Memory cgroups within a twentieth of their limit, or above their soft limit.
    full_cgroups: Vec<String>,
    missing: Vec<String>,
}

impl KswapdCounters {
    /// Reads the counters.
    pub fn read(root: &Root) -> KswapdCounters {
        let mut missing = Vec::new();
        let vmstat = root.parse::<VmStat>("/proc/vmstat").map_err(|why| missing.push(why));
        let vmstat = vmstat.map_or_else(
            |()| BTreeMap::new(),
            |vmstat| {
                vmstat.0.into_iter().map(|(name, count)| (name, count.max(0) as u64)).collect()
            },
        );
        let meminfo = root.parse::<Meminfo>("/proc/meminfo").map_err(|why| missing.push(why));
        let meminfo = meminfo.map_or_else(
            |()| BTreeMap::new(),
            |info| {
                let mut known = BTreeMap::from([
                    ("total", info.mem_total),
                    ("swap_total", info.swap_total),
                    ("swap_free", info.swap_free),
                    ("dirty", info.dirty + info.writeback),
                ]);
                // Locked memory is on neither list.
                let lists = info.active_anon.zip(info.inactive_anon);
                known.extend(lists.map(|(active, inactive)| ("anon", active + inactive)));
                known.extend(info.unevictable.map(|bytes| ("unevictable", bytes)));
                known
            },
        );
        let zones = root.text("/proc/zoneinfo").map(|text| {
            if !text.contains(" boost ") {
                missing.push("/proc/zoneinfo has no boost of watermarks".into());
            }
            zones(&text)
        });
        let zones = zones.unwrap_or_else(|why| {
            missing.push(why);
            Vec::new()
        });
        let kswapd_ns = daemon_ns(root, &daemons(root), 0).map_err(|why| missing.push(why)).ok();
        KswapdCounters {
            taken: Instant::now(),
            kswapd_ns,
            vmstat,
            meminfo,
            zones: vec![zones],
            free_blocks: Fragmentation::usable(root).ok().map(|blocks| blocks.free_blocks),
            full_cgroups: full_cgroups(root),
            missing,
        }
    }
}

/// Parses the zones of /proc/zoneinfo that have memory.
fn zones(text: &str) -> Vec<Zone> {
    let mut zones: Vec<Zone> = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("Node ") {
            let name = rest.replace(", zone", "").split_whitespace().collect::<Vec<_>>().join(" ");
            zones.push(Zone { name, ..Zone::default() });
            continue;
        }
        let Some(zone) = zones.last_mut() else { continue };
        let words: Vec<&str> = line.split_whitespace().collect();
        let field = match words[..] {
            ["pages", "free", _] => &mut zone.free,
            ["boost", _] => &mut zone.boost,
            ["min", _] => &mut zone.min,
            ["low", _] => &mut zone.low,
            ["high", _] if zone.high == 0 => &mut zone.high,
            ["managed", _] => &mut zone.managed,
            _ => continue,
        };
        *field = words.last().and_then(|word| word.parse().ok()).unwrap_or(0);
    }
    zones.retain(|zone| zone.managed > 0);
    zones
}

/// Returns the memory cgroups that are at their limit, of either version, with a limit in their name's file.
fn full_cgroups(root: &Root) -> Vec<String> {
    let mut full = Vec::new();
    let mounts = [
        ("/sys/fs/cgroup", "memory.current", &["memory.max", "memory.high"][..]),
        (
            "/sys/fs/cgroup/memory",
            "memory.usage_in_bytes",
            &["memory.limit_in_bytes", "memory.soft_limit_in_bytes"][..],
        ),
    ];
    for (mount, usage, limits) in mounts {
        visit(root, mount, 0, &mut |folder| {
            let Ok(used) = root.number(&format!("{folder}/{usage}")) else { return };
            for limit in limits {
                let bytes = root.number(&format!("{folder}/{limit}"));
                if let Some(bytes) = bytes.ok().filter(|bytes| (1..1 << 60).contains(bytes))
                    && used as f64 >= 0.95 * bytes as f64
                {
                    let name = folder.strip_prefix(mount).unwrap_or(folder);
                    full.push(format!("{name}: {} of {limit} {}", Bytes(used), Bytes(bytes)));
                }
            }
        });
    }
    full
}

/// Calls `each` with the folders of cgroups below a mount, three levels deep.
fn visit(root: &Root, folder: &str, depth: u32, each: &mut impl FnMut(&str)) {
    each(folder);
    let below = root.names(folder).into_iter().map(|name| format!("{folder}/{name}"));
    for folder in below.filter(|path| depth < 3 && root.has(&format!("{path}/cgroup.procs"))) {
        visit(root, &folder, depth + 1, each);
    }
}

/// Watches for so long, and decides.
pub fn watch(root: &Root, time: Duration) -> KswapdDecision {
    let before = KswapdCounters::read(root);
    let mut looks = before.zones.clone();
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::thread::sleep(LOOK_INTERVAL.min(end - Instant::now()));
        looks.push(root.text("/proc/zoneinfo").map(|text| zones(&text)).unwrap_or_default());
    }
    let mut now = KswapdCounters::read(root);
    looks.append(&mut now.zones);
    now.zones = looks;
    decide(&before, &now)
}

/// Returns the zones whose watermarks are boosted.
fn boosted_zones(zones: &[Zone]) -> impl Iterator<Item = &Zone> {
    zones.iter().filter(|zone| zone.boost > 0 && zone.matters())
}

/// The two looks, as the rules see them.
struct Looks<'a> {
    before: &'a KswapdCounters,
    now: &'a KswapdCounters,
}

impl Looks<'_> {
    /// Returns the growth of a counter; none if the kernel lacks it.
    fn growth(&self, name: &str) -> Option<u64> {
        Some(self.now.vmstat.get(name)?.saturating_sub(*self.before.vmstat.get(name)?))
    }

    fn sum(&self, names: &[&str]) -> u64 {
        names.iter().filter_map(|name| self.growth(name)).sum()
    }

    fn bytes(&self, name: &str) -> Option<u64> {
        self.now.meminfo.get(name).copied()
    }

    /// Returns a part of all memory, 0 to 1.
    fn share(&self, name: &str) -> Option<f64> {
        Some(self.bytes(name)? as f64 / self.bytes("total")?.max(1) as f64)
    }

    /// Returns the pages that kswapd scanned, and those that it freed.
    fn work(&self) -> (u64, u64) {
        (self.sum(&["pgscan_kswapd"]), self.sum(&["pgsteal_kswapd"]))
    }
}

fn cause(id: &str, what: &str, is_certain: bool, evidence: String, cure: &str) -> KswapdCause {
    KswapdCause { id: id.into(), what: what.into(), is_certain, evidence, cure: cure.into() }
}

type Rule = fn(&Looks<'_>) -> Option<KswapdCause>;

/// The rules, the more special ones first: a working set that does not fit is what is left.
const RULES: [Rule; 8] =
    [boosted, unbalanced, high_order, locked, swap_full, dirty, cgroup_limit, working_set];

/// Decides why kswapd worked between two looks.
pub fn decide(before: &KswapdCounters, now: &KswapdCounters) -> KswapdDecision {
    let elapsed = now.taken.saturating_duration_since(before.taken).max(Duration::from_nanos(1));
    let looks = Looks { before, now };
    let ran = now.kswapd_ns.zip(before.kswapd_ns).map(|(now, then)| now.saturating_sub(then));
    let cpu_share = ran.map(|ns| ns as f64 / elapsed.as_nanos() as f64);
    let (scanned, freed) = looks.work();
    let is_idle = cpu_share.map_or(scanned == 0, |share| share < IDLE_SHARE);
    let mut causes: Vec<KswapdCause> = match is_idle {
        true => cgroup_limit(&looks).into_iter().collect(),
        false => RULES.iter().filter_map(|rule| rule(&looks)).collect(),
    };
    causes.sort_by_key(|cause| !cause.is_certain);
    let took =
        cpu_share.map_or("an unknown share".into(), |share| format!("{:.0} %", share * 100.0));
    let work = format!("kswapd took {took} of a CPU, scanned {scanned} pages and freed {freed}");
    let summary = match (is_idle, causes.first()) {
        (true, None) => format!("{work}: it is idle, so there is nothing to cure"),
        (true, Some(cause)) => format!("{work}: not kswapd, but tasks reclaim: {}", cause.what),
        (false, Some(cause)) => format!("{work}: {}", cause.what),
        (false, None) => format!("{work}: none of the known causes shows; look again for longer"),
    };
    let mut missing = now.missing.clone();
    missing.dedup();
    KswapdDecision { elapsed_ns: elapsed.as_nanos() as u64, cpu_share, summary, causes, missing }
}

impl Zone {
    /// Returns true except for the zone DMA, which is kept in reserve.
    fn matters(&self) -> bool {
        !self.name.ends_with(" DMA")
    }

    /// Returns true if kswapd would sleep without the boost.
    fn is_balanced_without_boost(&self) -> bool {
        self.free + self.boost >= self.high
    }
}

fn boosted(looks: &Looks<'_>) -> Option<KswapdCause> {
    let all = &looks.now.zones;
    let boosted: Vec<&Zone> = all.iter().flat_map(|zones| boosted_zones(zones)).collect();
    let zone = boosted.iter().max_by_key(|zone| zone.boost)?;
    let alone = boosted.iter().filter(|zone| zone.is_balanced_without_boost()).count();
    let count = all.iter().filter(|zones| boosted_zones(zones).next().is_some()).count();
    Some(cause(
        "boosted_watermarks",
        "fragmentation has raised the watermarks for some time",
        2 * alone >= boosted.len(),
        format!(
            "zone {}: boost {} pages, free {}, high {}; boosted at {count} of {} looks",
            zone.name,
            zone.boost,
            zone.free,
            zone.high,
            all.len(),
        ),
        "sysctl vm.watermark_boost_factor=0",
    ))
}

/// Returns a zone that is short of memory, and another one that has plenty.
fn short_and_rich(zones: &[Zone]) -> Option<(&Zone, &Zone)> {
    let large = || zones.iter().filter(|zone| zone.matters() && zone.managed > 8 * zone.high);
    let short = large().find(|zone| zone.free < zone.high)?;
    let rich = large().find(|zone| zone.name != short.name && zone.free > 8 * zone.high)?;
    Some((short, rich))
}

fn unbalanced(looks: &Looks<'_>) -> Option<KswapdCause> {
    let all = &looks.now.zones;
    let unbalanced: Vec<_> = all.iter().filter_map(|zones| short_and_rich(zones)).collect();
    let (short, rich) = *unbalanced.last()?;
    let count = unbalanced.len();
    (4 * count >= all.len()).then(|| {
        cause(
            "unbalanced",
            "one node or zone is short of memory while another has plenty",
            2 * count >= all.len(),
            format!(
                "at {count} of {} looks; zone {}: free {} below {}; zone {}: free {}",
                all.len(),
                short.name,
                short.free,
                short.high,
                rich.name,
                rich.free
            ),
            "numactl --interleave=all COMMAND; sysctl vm.zone_reclaim_mode=0",
        )
    })
}

/// Returns true if kswapd has no reason to work for single pages: all zones are above their watermarks.
fn are_balanced(zones: &[Zone]) -> bool {
    let mut zones = zones.iter().filter(|zone| zone.matters()).peekable();
    zones.peek().is_some() && zones.all(|zone| zone.free > zone.high)
}

fn high_order(looks: &Looks<'_>) -> Option<KswapdCause> {
    let all = &looks.now.zones;
    let balanced = all.iter().filter(|zones| are_balanced(zones)).count();
    // A boost, too, makes kswapd work for zones that have memory, and wakes the compaction.
    let is_boosted = all.iter().any(|zones| boosted_zones(zones).next().is_some());
    let blocks = huge_blocks(looks.now.free_blocks.as_ref()?);
    let wakes = looks.sum(&["compact_daemon_wake", "compact_stall", "thp_fault_fallback"]);
    // A request needs as many pages as a huge page has, and kswapd frees them.
    let explains_most = blocks == 0 || 2 * 512 * wakes >= looks.work().1;
    (4 * balanced >= all.len() && (blocks == 0 || wakes > 0)).then(|| {
        cause(
            "high_order",
            "large free blocks are asked for, and free memory is in pieces",
            explains_most && !is_boosted && 2 * balanced >= all.len(),
            format!(
                "all zones are above their watermarks at {balanced} of {} looks; {blocks} free blocks of 2 MiB; \
                 {wakes} requests to compact",
                all.len()
            ),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/defrag; sysctl vm.compaction_proactiveness=50",
        )
    })
}

fn locked(looks: &Looks<'_>) -> Option<KswapdCause> {
    let share = looks.share("unevictable")?;
    let bytes = Bytes(looks.bytes("unevictable")?);
    (share >= 0.3).then(|| {
        cause(
            "locked",
            "memory is locked, so little of it can be freed",
            share >= 0.5,
            format!("/proc/meminfo Unevictable: {bytes}, {:.0} % of memory", share * 100.0),
            "lock less (mlock, memfd_secret, ramfs), or add memory",
        )
    })
}

fn swap_full(looks: &Looks<'_>) -> Option<KswapdCause> {
    let (total, free) = (looks.bytes("swap_total")?, looks.bytes("swap_free")?);
    let anon = looks.share("anon")?;
    let is_full = (free as f64) < 0.02 * total as f64 || total == 0;
    (is_full && anon >= 0.5).then(|| {
        let what = match total {
            0 => "programs hold most of the memory, and there is no swap",
            _ => "programs hold most of the memory, and swap is full",
        };
        cause(
            "swap_full",
            what,
            anon >= 0.7,
            format!(
                "swap: {} of {} free; anonymous memory {:.0} %",
                Bytes(free),
                Bytes(total),
                anon * 100.0
            ),
            "add swap (zram) or memory, or run less at a time",
        )
    })
}

fn dirty(looks: &Looks<'_>) -> Option<KswapdCause> {
    let share = looks.share("dirty")?;
    let waiting = looks.sum(&["nr_vmscan_immediate_reclaim", "nr_vmscan_write"]);
    let (scanned, _) = looks.work();
    let many =
        waiting * 50 > scanned && looks.growth("nr_vmscan_immediate_reclaim").unwrap_or(0) > 0;
    (many || share >= 0.1).then(|| {
        cause(
            "dirty",
            "pages wait for the disk before they can be freed",
            many,
            format!(
                "dirty or being written: {:.0} % of memory; {waiting} pages met in reclaim",
                share * 100.0
            ),
            "sysctl vm.dirty_background_ratio=2 vm.dirty_ratio=5",
        )
    })
}

fn cgroup_limit(looks: &Looks<'_>) -> Option<KswapdCause> {
    let all = looks.sum(&["pgscan_anon", "pgscan_file"]);
    let global = looks.sum(&["pgscan_kswapd", "pgscan_direct", "pgscan_khugepaged"]);
    let of_cgroups = all.saturating_sub(global);
    let full = looks.now.full_cgroups.first()?;
    (of_cgroups > global.max(100)).then(|| {
        cause(
            "cgroup_limit",
            "a memory cgroup is at its limit, and its own tasks reclaim",
            true,
            format!("{of_cgroups} pages scanned for cgroups, {global} for the system; {full}"),
            "raise memory.max and memory.high of the cgroup, or give its programs less to do",
        )
    })
}

fn working_set(looks: &Looks<'_>) -> Option<KswapdCause> {
    let (_, freed) = looks.work();
    let back =
        looks.sum(&["workingset_refault_anon", "workingset_refault_file", "workingset_refault"]);
    let share = back as f64 / freed.max(1) as f64;
    (freed > 0 && share >= 0.1).then(|| {
        cause(
            "working_set",
            "programs use more memory than there is: what is freed is soon read again",
            share >= 0.3,
            format!("{back} of {freed} freed pages came back (workingset_refault)"),
            "add memory, or move a part elsewhere: pagetax remote -- COMMAND",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procfs::tests::captured;

    /// Returns two looks, a second apart, at a machine whose kswapd is busy and for which no cause shows.
    fn busy() -> (KswapdCounters, KswapdCounters) {
        let mut before = KswapdCounters::read(&captured());
        before.missing.clear();
        before.kswapd_ns = Some(0);
        before.full_cgroups.clear();
        before.vmstat.values_mut().for_each(|count| *count = 0);
        let memory = [("total", 4 << 30), ("swap_total", 1 << 30), ("swap_free", 1 << 29)];
        before.meminfo = BTreeMap::from(memory);
        before.meminfo.extend([("dirty", 0), ("anon", 1 << 30), ("unevictable", 0)]);
        let zone = |name: &str| Zone {
            name: name.into(),
            free: 5_000,
            boost: 0,
            min: 5_000,
            low: 7_000,
            high: 9_000,
            managed: 500_000,
        };
        before.zones = vec![vec![zone("0 DMA32"), zone("0 Normal")]];
        before.free_blocks = Some(vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 9]);
        let mut now = before.clone();
        now.taken += Duration::from_secs(1);
        now.kswapd_ns = Some(600_000_000);
        now.vmstat.insert("pgscan_kswapd".into(), 100_000);
        now.vmstat.insert("pgsteal_kswapd".into(), 50_000);
        (before, now)
    }

    fn first(change: impl Fn(&mut KswapdCounters)) -> String {
        let (before, mut now) = busy();
        change(&mut now);
        let decision = decide(&before, &now);
        assert_eq!(
            decision.cpu_share.map(|share| share > 0.01),
            Some(now.kswapd_ns > Some(1 << 24))
        );
        decision.causes.first().map_or_else(|| decision.summary.clone(), |cause| cause.id.clone())
    }

    #[test]
    fn eight_planted_causes_are_told_apart_and_none_is_invented() {
        let count = |now: &mut KswapdCounters, name: &str, value: u64| {
            now.vmstat.insert(name.into(), value);
        };
        assert!(first(|_| {}).contains("none of the known causes"));
        assert_eq!(first(|now| count(now, "workingset_refault_anon", 40_000)), "working_set");
        assert_eq!(first(|now| now.meminfo.extend([("unevictable", 3 << 30)])), "locked");
        let in_pieces = |now: &mut KswapdCounters| {
            now.zones[0].iter_mut().for_each(|zone| zone.free = 90_000);
            now.free_blocks = Some(vec![90_000, 8_000, 10]);
        };
        assert_eq!(first(in_pieces), "high_order");
        // The boost has come and gone between the two looks.
        let boosted = |free: u64| {
            move |now: &mut KswapdCounters| {
                let zone = Zone { boost: 4_500, high: 13_500, free, ..now.zones[0][1].clone() };
                now.zones.insert(0, vec![zone]);
            }
        };
        assert_eq!(first(boosted(9_500)), "boosted_watermarks");
        // Free memory is short without the boost, too.
        let short = |now: &mut KswapdCounters| {
            boosted(6_000)(now);
            count(now, "workingset_refault_anon", 40_000);
        };
        assert_eq!(first(short), "working_set");
        assert_eq!(first(|now| now.zones[0][0].free = 400_000), "unbalanced");
        assert_eq!(first(|now| count(now, "nr_vmscan_immediate_reclaim", 30_000)), "dirty");
        let full = |now: &mut KswapdCounters| {
            now.meminfo.extend([("swap_free", 0), ("anon", 3 << 30)]);
        };
        assert_eq!(first(full), "swap_full");
        let at_limit = |now: &mut KswapdCounters| {
            now.kswapd_ns = Some(0);
            count(now, "pgscan_kswapd", 0);
            count(now, "pgscan_anon", 90_000);
            now.full_cgroups = vec!["/big: 100M of memory.max 100M".into()];
        };
        assert_eq!(first(at_limit), "cgroup_limit");
    }

    #[test]
    fn an_idle_kswapd_has_no_cause() {
        let (before, mut now) = busy();
        now.kswapd_ns = Some(1_000_000);
        now.meminfo.insert("unevictable", 3 << 30);
        let decision = decide(&before, &now);
        assert!(decision.causes.is_empty() && decision.summary.contains("idle"), "{decision:?}");
    }

    #[test]
    fn a_boost_that_the_kernel_does_not_show_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let zone = "Node 0, zone Normal\n  pages free 9\n        min 1\n        managed 99\n";
        std::fs::write(folder.path().join("proc/zoneinfo"), zone).unwrap();
        let missing = KswapdCounters::read(&Root::at(folder.path())).missing;
        assert!(missing.iter().any(|why| why.contains("no boost")), "{missing:?}");
        assert!(!KswapdCounters::read(&captured()).missing.iter().any(|w| w.contains("boost")));
    }

    #[test]
    fn zones_of_a_captured_machine() {
        let counters = KswapdCounters::read(&captured());
        assert!(
            counters.zones[0].len() >= 2
                && counters.zones[0].iter().all(|zone| zone.high > zone.low)
        );
        assert!(counters.meminfo["total"] > 1 << 30);
        let nothing = KswapdCounters::read(&Root::at("/nonexistent"));
        assert!(nothing.missing.len() >= 4, "{:?}", nothing.missing);
        assert!(decide(&nothing, &nothing).causes.is_empty());
    }
}
