//! A calibration: what one machine's faults and page walks cost, and what follows from it.
//!
//! `pagetax calibrate` measures it once. The budget multiplies fault counts by it where no stacks
//! can be sampled, `diagnose` bounds translation with it, and a simulated x86 machine takes its walk
//! costs from it. Invariant: a calibration belongs to one [`Identity`]; before using it on another
//! machine, ask [`Identity::difference`].

use crate::document::Document;
use crate::stats::quantiles;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};

/// The version of the document. Another version is measured again, never converted.
pub const CALIBRATION_VERSION: u32 = 5;

/// The machine that a calibration belongs to. Nothing in it changes with a reboot alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Identity {
    /// The `model name` of /proc/cpuinfo.
    pub cpu_model: String,
    /// The number of CPUs online.
    pub cpu_count: u32,
    /// The kernel's release, as uname(2) gives it.
    pub kernel: String,
    /// The memory that the kernel manages.
    pub memory_bytes: u64,
    /// `kvm`, `xen`, …; `none` on bare metal.
    pub hypervisor: String,
    /// True if the kernel has page tables of its own (against Meltdown), which makes each fault slower.
    pub page_table_isolation: bool,
}

impl Identity {
    /// Returns the first difference between `other` and this machine, if there is one. Memory may differ by
    /// an eighth, because firmware and ballooning take varying parts of it.
    pub fn difference(&self, other: &Identity) -> Option<String> {
        let differ = |what: &str, mine: &dyn std::fmt::Display, theirs: &dyn std::fmt::Display| {
            Some(format!("{what} is `{mine}` here and `{theirs}` there"))
        };
        if self.cpu_model != other.cpu_model {
            return differ("the CPU model", &self.cpu_model, &other.cpu_model);
        }
        if self.cpu_count != other.cpu_count {
            return differ("the number of CPUs", &self.cpu_count, &other.cpu_count);
        }
        if self.kernel != other.kernel {
            return differ("the kernel", &self.kernel, &other.kernel);
        }
        if self.hypervisor != other.hypervisor {
            return differ("the hypervisor", &self.hypervisor, &other.hypervisor);
        }
        if self.page_table_isolation != other.page_table_isolation {
            let (mine, theirs) = (self.page_table_isolation, other.page_table_isolation);
            return differ("page-table isolation", &mine, &theirs);
        }
        if self.memory_bytes.abs_diff(other.memory_bytes) > self.memory_bytes / 8 {
            return differ("memory", &Bytes(self.memory_bytes), &Bytes(other.memory_bytes));
        }
        None
    }
}

/// A median over interleaved repetitions, with the middle half of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Spread {
    /// The median in nanoseconds.
    pub median_ns: f64,
    /// The lower quartile of the repetitions.
    pub low_ns: f64,
    /// The upper quartile of the repetitions.
    pub high_ns: f64,
    /// The number of repetitions.
    pub repetitions: u32,
}

impl Spread {
    /// Returns the spread of these repetitions; `None` if there are none.
    pub fn of(values_ns: Vec<f64>) -> Option<Spread> {
        if values_ns.is_empty() {
            return None;
        }
        let [low_ns, median_ns, high_ns] = quantiles(&values_ns, [0.25, 0.5, 0.75]);
        Some(Spread { median_ns, low_ns, high_ns, repetitions: values_ns.len() as u32 })
    }
}

/// An event of a page whose cost is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// First write to private anonymous memory: a zeroed page.
    AnonWrite,
    /// The same, and all of the page is stored to by memset, as by a program that fills its memory.
    AnonFill,
    /// First read of private anonymous memory: the shared zero page.
    ZeroRead,
    /// First write after fork: a copied page.
    CowWrite,
    /// First read of a mapped file whose page is in the page cache.
    FileCachedRead,
    /// First read of a mapped file whose page is on its disk; elapsed time, not CPU time.
    FileMajorRead,
    /// munmap of a resident page; no fault, but a page's last cost.
    Unmap,
}

impl FaultKind {
    /// Describes it in a few words.
    pub fn meaning(self) -> &'static str {
        match self {
            FaultKind::AnonWrite => "first write, anonymous",
            FaultKind::AnonFill => "first write and filling, anonymous",
            FaultKind::ZeroRead => "first read, anonymous (zero page)",
            FaultKind::CowWrite => "first write after fork (copy)",
            FaultKind::FileCachedRead => "first read, file in the page cache",
            FaultKind::FileMajorRead => "first read, file on disk (elapsed)",
            FaultKind::Unmap => "munmap, resident",
        }
    }
}

/// The cost of one event for pages of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FaultCost {
    /// The event that was timed.
    pub kind: FaultKind,
    /// The size of the page that it fills.
    pub page_bytes: u64,
    /// CPU time for each page of `page_bytes`; absent if it could not be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Spread>,
    /// The reason why it could not be measured, and a hint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The accesses that a TLB serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TlbKind {
    /// Loads and stores.
    Data,
    /// Loads alone.
    Load,
    /// Stores alone.
    Store,
    /// Fetches of instructions.
    Instruction,
    /// All of them.
    Unified,
}

impl TlbKind {
    /// Returns true if loads look here.
    pub fn serves_loads(self) -> bool {
        matches!(self, TlbKind::Data | TlbKind::Load | TlbKind::Unified)
    }
}

/// A TLB as the CPU itself describes it, by the CPUID instruction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TlbUnit {
    /// The accesses that it serves.
    pub kind: TlbKind,
    /// The level: 1 is asked first.
    pub level: u32,
    /// The page sizes that it has entries for.
    pub page_bytes: Vec<u64>,
    /// The number of entries.
    pub entries: u32,
    /// The number of entries of a set; absent if any entry may hold any page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ways: Option<u32>,
}

/// The number of base pages up to which accesses to one page after another pay for no walk, as measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TlbReach {
    /// The most pages without walks that were tried.
    pub low_pages: u64,
    /// The fewest pages with walks that were tried.
    pub high_pages: u64,
}

/// The pattern of addresses of a walk measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum WalkPattern {
    /// Each address is the result of the previous load, one line a page: walks cannot overlap.
    Dependent,
    /// Addresses are known beforehand, uniform over all lines: walks overlap.
    Independent,
    /// Addresses are known beforehand, one page after another: eight walks share a line of page tables.
    InOrder,
}

impl WalkPattern {
    /// All patterns.
    pub const ALL: [WalkPattern; 3] =
        [WalkPattern::Dependent, WalkPattern::Independent, WalkPattern::InOrder];

    /// Describes the pattern in three words.
    pub fn meaning(self) -> &'static str {
        match self {
            WalkPattern::Dependent => "each from the last",
            WalkPattern::Independent => "known beforehand",
            WalkPattern::InOrder => "page after page",
        }
    }
}

/// One access on base pages and on huge pages, over one working set.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WalkCost {
    /// The pattern of addresses.
    pub pattern: WalkPattern,
    /// The memory that addresses are taken from.
    pub working_set_bytes: u64,
    /// The time of an access on base pages.
    pub base: Spread,
    /// The time of an access on huge pages.
    pub huge: Spread,
    /// The difference, paired by repetition: what base pages add to an access.
    pub extra: Spread,
}

/// The costs of one machine's memory operations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Calibration {
    /// The version of the measurement, [`CALIBRATION_VERSION`].
    pub version: u32,
    /// The machine that was measured.
    pub identity: Identity,
    /// True for fewer repetitions and sizes.
    pub quick: bool,
    /// The time of the calibration, in seconds since 1970.
    pub taken_unix_s: u64,
    /// The length of the calibration.
    pub took_ns: u64,
    /// The size of a base page of this machine.
    pub base_page_bytes: u64,
    /// The size of the huge page that walks are compared with.
    pub huge_page_bytes: u64,
    /// Costs of pages, by kind and page size.
    pub faults: Vec<FaultCost>,
    /// Costs of accesses, by pattern and working set.
    pub walks: Vec<WalkCost>,
    /// The TLBs by CPUID; none if this CPU or its hypervisor does not describe them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tlbs: Vec<TlbUnit>,
    /// The reach of all TLBs on base pages, as measured; absent if no walk showed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_reach: Option<TlbReach>,
    /// Walks that could not be measured, with the reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Reasons to doubt some of it: see [`Calibration::doubts`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl Document for Calibration {
    const KIND: &'static str = "calibration";
}

/// Repetitions whose middle half is wider than this share of their median were disturbed.
const NOISE_SHARE_MAX: f64 = 0.5;
/// Below this a difference is nothing, however it varies.
const NOISE_FLOOR_NS: f64 = 1.0;
/// The most adjacent base pages that share an entry of a TLB on any known CPU.
const PAGES_OF_ENTRY_MAX: u64 = 8;

impl Spread {
    /// Returns true if the repetitions differ too much for the median to be reliable.
    pub fn is_noisy(&self) -> bool {
        self.high_ns - self.low_ns > (NOISE_SHARE_MAX * self.median_ns.abs()).max(NOISE_FLOOR_NS)
    }
}

impl Calibration {
    /// Returns reasons to doubt it: repetitions that do not agree, and walks that cost less over more memory,
    /// by more than their repetitions differ. Walks in order may: they hide behind slower data.
    pub fn doubts(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        for fault in &self.faults {
            if fault.cost.is_some_and(|cost| cost.is_noisy()) {
                let (kind, page) = (fault.kind.meaning(), Bytes(fault.page_bytes));
                doubts.push(format!("{kind}, {page}: repetitions differ by more than half"));
            }
        }
        for walk in self.walks.iter().filter(|walk| walk.extra.is_noisy()) {
            let (pattern, bytes) = (walk.pattern.meaning(), Bytes(walk.working_set_bytes));
            doubts.push(format!("walks, {pattern}, {bytes}: repetitions differ by more than half"));
        }
        for pair in self.walks.windows(2).filter(|pair| pair[0].pattern == pair[1].pattern) {
            let (near, far) = (&pair[0], &pair[1]);
            let may_fall = near.pattern == WalkPattern::InOrder;
            if !may_fall && far.extra.high_ns + NOISE_FLOOR_NS < near.extra.low_ns {
                let [near_bytes, far_bytes] = [near, far].map(|walk| Bytes(walk.working_set_bytes));
                let pattern = near.pattern.meaning();
                doubts.push(format!(
                    "walks, {pattern}: cheaper over {far_bytes} than over {near_bytes}"
                ));
            }
        }
        doubts.extend(self.hidden_entries());
        doubts
    }

    /// Returns a doubt if far more base pages take no walk than the CPU describes entries for.
    fn hidden_entries(&self) -> Option<String> {
        let held = self.base_reach?.low_pages;
        let of_loads = self.tlbs.iter().filter(|unit| {
            unit.kind.serves_loads() && unit.page_bytes.contains(&self.base_page_bytes)
        });
        let entries: u64 = of_loads.map(|unit| u64::from(unit.entries)).sum();
        (entries > 0 && held > PAGES_OF_ENTRY_MAX * entries).then(|| {
            format!(
                "TLBs: {held} base pages take no walk, but the CPU describes {entries} entries; a hypervisor may \
                 hide the rest"
            )
        })
    }

    /// Adapts the calibration to a few measurements that were taken again. Faults get their new costs. Walks
    /// of a pattern are scaled as the one that was measured again. In a virtual machine the cost of a walk on
    /// base pages depends on how scattered free pages are, which changes by the minute.
    pub fn paced(&self, faults: &[FaultCost], walks: &[WalkCost]) -> Calibration {
        let mut now = self.clone();
        for fault in &mut now.faults {
            let same = |f: &&FaultCost| f.kind == fault.kind && f.page_bytes == fault.page_bytes;
            fault.cost = faults.iter().find(same).and_then(|f| f.cost).or(fault.cost);
        }
        for walk in &mut now.walks {
            let pace = walks.iter().find(|w| w.pattern == walk.pattern).and_then(|w| self.pace(w));
            if let Some(pace) = pace {
                let Spread { median_ns, low_ns, high_ns, .. } = walk.extra;
                let [median_ns, low_ns, high_ns] = [median_ns, low_ns, high_ns].map(|ns| ns * pace);
                walk.extra = Spread { median_ns, low_ns, high_ns, ..walk.extra };
            }
        }
        now
    }

    /// Returns the new cost of a walk ÷ its cost in the calibration; None if either is below the noise.
    pub fn pace(&self, now: &WalkCost) -> Option<f64> {
        let alike = |w: &&WalkCost| {
            w.pattern == now.pattern && w.working_set_bytes == now.working_set_bytes
        };
        let then_ns = self.walks.iter().find(alike)?.extra.median_ns;
        let now_ns = now.extra.median_ns;
        (then_ns > NOISE_FLOOR_NS && now_ns > 0.0).then(|| now_ns / then_ns)
    }

    /// Returns the cost of a page of this size, if it was measured.
    pub fn fault(&self, kind: FaultKind, page_bytes: u64) -> Option<Spread> {
        let same = |f: &&FaultCost| f.kind == kind && f.page_bytes == page_bytes;
        self.faults.iter().find(same)?.cost
    }

    /// Returns the time that base pages add to an access over this working set. It is linear in log2 between
    /// measured working sets, constant beyond them, and never below 0 (noise at small sets).
    pub fn walk_extra(&self, pattern: WalkPattern, working_set_bytes: u64) -> Option<Spread> {
        self.interpolate(pattern, working_set_bytes, |walk| walk.extra).map(|s| Spread {
            median_ns: s.median_ns.max(0.0),
            low_ns: s.low_ns.max(0.0),
            high_ns: s.high_ns.max(0.0),
            ..s
        })
    }

    /// Returns the time of an access on base pages over this working set, interpolated as by
    /// [`Calibration::walk_extra`].
    pub fn walk_base(&self, pattern: WalkPattern, working_set_bytes: u64) -> Option<Spread> {
        self.interpolate(pattern, working_set_bytes, |walk| walk.base)
    }

    /// Returns the largest share of user time that translation can take over this working set, 0 to 1. It is
    /// that of a program which only follows pointers from page to page.
    pub fn walk_share_max(&self, working_set_bytes: u64) -> Option<f64> {
        let extra = self.walk_extra(WalkPattern::Dependent, working_set_bytes)?;
        let base = self.walk_base(WalkPattern::Dependent, working_set_bytes)?;
        (base.median_ns > 0.0).then(|| (extra.high_ns / base.median_ns).clamp(0.0, 1.0))
    }

    fn interpolate(
        &self,
        pattern: WalkPattern,
        working_set_bytes: u64,
        of: impl Fn(&WalkCost) -> Spread,
    ) -> Option<Spread> {
        let mut walks: Vec<&WalkCost> =
            self.walks.iter().filter(|w| w.pattern == pattern).collect();
        walks.sort_by_key(|w| w.working_set_bytes);
        let above = walks.iter().find(|w| w.working_set_bytes >= working_set_bytes);
        let below = walks.iter().rev().find(|w| w.working_set_bytes <= working_set_bytes);
        let (below, above) = (below.or(above)?, above.or(below)?);
        let log2 = |bytes: u64| (bytes.max(1) as f64).log2();
        let (from, to) = (log2(below.working_set_bytes), log2(above.working_set_bytes));
        let share = if to > from { (log2(working_set_bytes) - from) / (to - from) } else { 0.0 };
        let (a, b) = (of(below), of(above));
        let mix = |a: f64, b: f64| a + (b - a) * share;
        Some(Spread {
            median_ns: mix(a.median_ns, b.median_ns),
            low_ns: mix(a.low_ns, b.low_ns),
            high_ns: mix(a.high_ns, b.high_ns),
            repetitions: a.repetitions.min(b.repetitions),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            cpu_model: "Xeon".into(),
            cpu_count: 2,
            kernel: "6.18".into(),
            memory_bytes: 24 << 30,
            hypervisor: "kvm".into(),
            page_table_isolation: false,
        }
    }

    fn spread(median_ns: f64) -> Spread {
        Spread { median_ns, low_ns: median_ns - 1.0, high_ns: median_ns + 1.0, repetitions: 5 }
    }

    fn walk(working_set_bytes: u64, base: f64, huge: f64) -> WalkCost {
        WalkCost {
            pattern: WalkPattern::Dependent,
            working_set_bytes,
            base: spread(base),
            huge: spread(huge),
            extra: spread(base - huge),
        }
    }

    fn calibration() -> Calibration {
        Calibration {
            version: CALIBRATION_VERSION,
            identity: identity(),
            quick: false,
            taken_unix_s: 0,
            took_ns: 0,
            base_page_bytes: 4096,
            huge_page_bytes: 2 << 20,
            faults: vec![],
            walks: vec![
                walk(64 << 20, 40.0, 10.0),
                walk(1 << 20, 4.0, 4.5),
                walk(256 << 20, 100.0, 50.0),
            ],
            tlbs: vec![],
            base_reach: None,
            notes: vec![],
            warnings: vec![],
        }
    }

    #[test]
    fn a_calibration_doubts_what_does_not_agree() {
        let mut c = calibration();
        c.walks.sort_by_key(|walk| walk.working_set_bytes);
        c.walks[0].extra = Spread { low_ns: -0.6, high_ns: -0.4, ..spread(-0.5) };
        assert_eq!(c.doubts(), [""; 0]);
        c.walks[1].extra = Spread { low_ns: 10.0, high_ns: 40.0, ..spread(30.0) };
        c.walks[2].extra = spread(5.0);
        let doubts = c.doubts();
        assert_eq!(doubts.len(), 2, "{doubts:?}");
        assert!(doubts[0].contains("64M: repetitions differ"), "{doubts:?}");
        assert!(doubts[1].contains("cheaper over 256M than over 64M"), "{doubts:?}");
    }

    #[test]
    fn a_tlb_that_holds_far_more_than_the_cpu_describes_is_doubted() {
        let unit = |entries| TlbUnit {
            kind: TlbKind::Data,
            level: 2,
            page_bytes: vec![4096],
            entries,
            ways: None,
        };
        let doubted = |entries| {
            let base_reach = Some(TlbReach { low_pages: 4096, high_pages: 6144 });
            let found = Calibration { tlbs: vec![unit(entries)], base_reach, ..calibration() };
            found.doubts().iter().any(|doubt| doubt.contains("4096 base pages take no walk"))
        };
        assert_eq!([128, 2048, 4096].map(doubted), [true, false, false]);
    }

    #[test]
    fn a_pace_scales_walks_and_replaces_faults() {
        let mut c = calibration();
        let fault = |ns| FaultCost {
            kind: FaultKind::AnonWrite,
            page_bytes: 4096,
            cost: Some(spread(ns)),
            why: None,
        };
        c.faults = vec![fault(1_000.0)];
        let now = c.paced(&[fault(1_500.0)], &[walk(64 << 20, 70.0, 10.0)]);
        assert_eq!(now.fault(FaultKind::AnonWrite, 4096).unwrap().median_ns, 1_500.0);
        let extra =
            |c: &Calibration, bytes| c.walk_extra(WalkPattern::Dependent, bytes).unwrap().median_ns;
        assert_eq!([extra(&now, 64 << 20), extra(&now, 256 << 20)], [60.0, 100.0], "twice as much");
        assert_eq!(c.pace(&walk(1 << 20, 9.0, 1.0)), None, "nothing then");
        assert_eq!(c.pace(&walk(32 << 20, 9.0, 1.0)), None, "not measured then");
        assert_eq!(c.paced(&[], &[]), c);
    }

    #[test]
    fn identity_names_what_differs() {
        let here = identity();
        assert_eq!(here.difference(&identity()), None);
        let rebooted = Identity { memory_bytes: (24 << 30) - (100 << 20), ..identity() };
        assert_eq!(here.difference(&rebooted), None);
        let upgraded = Identity { kernel: "6.19".into(), ..identity() };
        assert_eq!(
            here.difference(&upgraded).unwrap(),
            "the kernel is `6.18` here and `6.19` there"
        );
        assert!(here.difference(&Identity { page_table_isolation: true, ..identity() }).is_some());
        assert!(here.difference(&Identity { memory_bytes: 12 << 30, ..identity() }).is_some());
    }

    #[test]
    fn walks_interpolate_in_log2_and_hold_at_the_ends() {
        let c = calibration();
        let extra = |bytes| c.walk_extra(WalkPattern::Dependent, bytes).unwrap().median_ns;
        assert_eq!(extra(64 << 20), 30.0);
        assert_eq!(extra(128 << 20), 40.0);
        assert_eq!(extra(8 << 30), 50.0);
        assert_eq!(extra(4096), 0.0, "noise below zero is no negative walk");
        assert_eq!(c.walk_extra(WalkPattern::Independent, 1 << 20), None);
    }

    #[test]
    fn the_bound_is_the_share_of_a_pure_chase() {
        let share = calibration().walk_share_max(64 << 20).unwrap();
        assert!((share - 31.0 / 40.0).abs() < 1e-9, "{share}");
    }

    #[test]
    fn spread_is_the_middle_half() {
        let s = Spread::of(vec![9.0, 1.0, 3.0, 5.0, 7.0]).unwrap();
        assert_eq!((s.low_ns, s.median_ns, s.high_ns, s.repetitions), (3.0, 5.0, 7.0, 5));
        assert_eq!(Spread::of(vec![]), None);
    }
}
