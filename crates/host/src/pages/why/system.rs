//! Causes that lie in the system: its settings, its pools, its free memory, and khugepaged.

use super::facts::Facts;
use super::{CauseEvidence, Claim, Piece};
use crate::pages::Mode;
use crate::pages::pagemap::{HugePageAdvice, Segment};
use crate::pages::tunables::{HUGETLB, tunable};
use crate::procfs::{cgroup_file, memory_cgroup};
use pagetax_core::units::{Bytes, PageSize};

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Claims all memory if the kernel has no transparent huge pages.
pub(super) fn no_thp(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    if facts.system.thp().is_some() {
        return None;
    }
    let evidence = CauseEvidence::new(THP, "no such directory");
    Claim::certain(
        piece.inside + piece.outside,
        "the kernel was built without transparent huge pages",
        vec![evidence],
    )
    .hint("boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y")
}

/// Claims memory if huge pages are switched off and a smaller size is on.
pub(super) fn smaller_only(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    (facts.mode == Some(Mode::Never)).then_some(())?;
    let is_on = |size: &PageSize| {
        *size < facts.huge
            && matches!(facts.system.of_size(*size), Some(Mode::Always | Mode::Madvise))
    };
    let smaller = facts.system.sizes().into_iter().find(is_on)?;
    let file = |size: PageSize| format!("hugepages-{}kB/enabled", size.bytes() >> 10);
    let evidence =
        vec![facts.shown_by_setting(&file(facts.huge)), facts.shown_by_setting(&file(smaller))];
    let what = format!("only smaller sizes are switched on ({smaller}), and {} is off", facts.huge);
    Claim::certain(piece.inside, what, evidence)
        .hint(format!("echo madvise | sudo tee {THP}/{}", file(facts.huge)))
}

/// Claims memory if huge pages are switched off.
pub(super) fn switched_off(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    (facts.mode == Some(Mode::Never)).then_some(())?;
    let own = format!("hugepages-{}kB/enabled", facts.huge.bytes() >> 10);
    let is_own = facts.system.thp() != Some(Mode::Never);
    let file = if is_own { own.as_str() } else { "enabled" };
    Claim::certain(
        piece.inside,
        "huge pages are switched off on this system (never)",
        vec![facts.shown_by_setting(file)],
    )
    .hint(format!("echo madvise | sudo tee {THP}/{file}; then {}", facts.start_line()))
}

/// Claims memory that nobody advised if huge pages are given on advice.
pub(super) fn advice_only(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let is_advised = piece.mapping.advice == Some(HugePageAdvice::Huge);
    if is_advised || facts.mode != Some(Mode::Madvise) {
        return None;
    }
    let mapping = piece.mapping;
    let evidence = vec![
        facts.shown_by_setting("enabled"),
        CauseEvidence::new(
            format!("/proc/{}/smaps, {:x}-{:x}", facts.pid(), mapping.start.0, mapping.end.0),
            "VmFlags: no hg",
        ),
    ];
    Claim::certain(
        piece.inside,
        "huge pages are given on advice only (madvise), and nobody advised this memory",
        evidence,
    )
    .hint(facts.collapse_line())
}

/// Claims malloc's memory if it was to take pages of a hugetlb pool and got none.
pub(super) fn hugetlb_pool(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let is_malloc = matches!(piece.mapping.segment, Segment::Heap | Segment::Anon);
    let tunables = facts.variable("GLIBC_TUNABLES")?;
    let value: u64 = tunable(tunables, HUGETLB)?.parse().ok()?;
    if !is_malloc || value < 2 {
        return None;
    }
    let size = if value == 2 { facts.huge } else { PageSize::new(value).ok()? };
    let asked = facts.shown_by_variable("GLIBC_TUNABLES");
    let pool = facts.system.pool_path(size);
    let Some(pages) = facts.system.hugetlb_pages(size) else {
        let evidence =
            vec![asked, CauseEvidence::new(pool.display().to_string(), "no such directory")];
        return Claim::certain(
            piece.inside,
            format!("the system has no pool of {size} pages"),
            evidence,
        )
        .hint(facts.start_line());
    };
    if let Some((path, limit)) = hugetlb_limit(facts, size) {
        let evidence = vec![asked, CauseEvidence::new(&path, limit)];
        let what = format!("its cgroup is at its limit of {size} pages from the pool");
        let bytes = piece.inside.next_multiple_of(size.bytes());
        return Claim::certain(piece.inside, what, evidence)
            .hint(format!("echo {bytes} | sudo tee {path}; then start it again"));
    }
    (pages == 0).then_some(())?;
    let free = pool.join("free_hugepages").display().to_string();
    let count = piece.inside.div_ceil(size.bytes());
    let total = pool.join("nr_hugepages");
    Claim::certain(
        piece.inside,
        format!(
            "malloc was to take pages of the hugetlb pool, and the pool of {size} pages is empty"
        ),
        vec![asked, CauseEvidence::new(free, "0")],
    )
    .hint(format!("echo {count} | sudo tee {}; then start it again", total.display()))
}

/// Returns the limit of reservations of the process's cgroup for a pool and its file, if no page is left
/// below it. The other limit of that controller kills processes, and gives them no small pages.
fn hugetlb_limit(facts: &Facts, size: PageSize) -> Option<(String, String)> {
    let name = match size.bytes() >> 20 {
        megabytes if megabytes >= 1024 => format!("{}GB", megabytes >> 10),
        megabytes => format!("{megabytes}MB"),
    };
    let file = |v2: &str, v1: &str| {
        let [v2, v1] = [v2, v1].map(|key| format!("hugetlb.{name}.{key}"));
        cgroup_file(&facts.root, facts.pid(), "hugetlb", &v2, &v1)
    };
    let (path, limit) = file("rsvd.max", "rsvd.limit_in_bytes")?;
    let (_, used) = file("rsvd.current", "rsvd.usage_in_bytes")?;
    let (limit_bytes, used): (u64, u64) = (limit.parse().ok()?, used.parse().ok()?);
    (used + size.bytes() > limit_bytes).then_some((path, limit))
}

/// Claims memory of a process whose memory cgroup is at its limit.
pub(super) fn cgroup_limit(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let readings = memory_cgroup(&facts.root, facts.pid()).ok()?;
    let value = |key: &str| readings.get(key).and_then(|reading| reading.value());
    let (limit, usage) = (value("limit_bytes")?, value("usage_bytes")?);
    (usage + facts.huge.bytes() > limit).then_some(())?;
    let (path, _) =
        cgroup_file(&facts.root, facts.pid(), "memory", "memory.max", "memory.limit_in_bytes")?;
    let evidence =
        CauseEvidence::new(&path, format!("{}, of which {} are used", Bytes(limit), Bytes(usage)));
    let raised = (limit + piece.inside).next_multiple_of(facts.huge.bytes());
    Claim::possible(piece.inside, "its memory cgroup is at its limit", vec![evidence])
        .hint(format!("echo {raised} | sudo tee {path}"))
}

/// Claims the memory for which there are too few free blocks that could hold a huge page. Some blocks become
/// free after the process got its small pages, whenever another program ends; khugepaged could use those.
pub(super) fn too_few_free_blocks(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let free = *facts.free_blocks.as_ref().ok()?;
    let needed = piece.inside.div_ceil(facts.huge.bytes());
    (free < needed).then_some(())?;
    let blocks = format!("{free} free blocks of {} outside the zone DMA", facts.huge);
    let evidence =
        vec![CauseEvidence::new("/proc/buddyinfo", blocks), facts.shown_by_setting("defrag")];
    let what = match free {
        0 => format!("memory is fragmented: no block of {} is free", facts.huge),
        _ => format!(
            "memory is fragmented or full: {free} blocks of {} are free, and these pages need {needed}",
            facts.huge
        ),
    };
    Claim::possible(piece.inside.saturating_sub(free * facts.huge.bytes()), what, evidence)
        .hint("echo 1 | sudo tee /proc/sys/vm/compact_memory")
}

/// Claims memory that khugepaged has not joined yet.
pub(super) fn khugepaged(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let number = |name: &str| facts.root.number(&format!("{THP}/khugepaged/{name}")).ok();
    let what = "its pages came one by one, and khugepaged has not joined them yet";
    let mut evidence = Vec::new();
    if let (Some(pages), Some(pause_ms)) = (number("pages_to_scan"), number("scan_sleep_millisecs"))
    {
        let pass = pages.max(1) * facts.map.base_page.bytes();
        let seconds = piece.inside.div_ceil(pass) * pause_ms / 1000;
        evidence.push(CauseEvidence::new(
            format!("{THP}/khugepaged"),
            format!("{pages} pages each {pause_ms} ms, so {seconds} s or more for these"),
        ));
    }
    Claim::possible(piece.inside, what, evidence).hint(facts.collapse_line())
}
