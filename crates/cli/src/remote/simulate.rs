//! `pagetax remote --simulate TRACE`: the page-ins of a traced program by replacement policy, and the time
//! that they would take.

use super::ALLOCATOR;
use crate::output::progress::Progress;
use crate::recorded::{Recorded, open_trace};
use anyhow::{Result, bail};
use pagetax_core::access::Rng;
use pagetax_core::stats::median;
use pagetax_core::units::Bytes;
use pagetax_recorder::pages::{AccessKind, PageObserver, SYSTEM_CALL_PAGES_MAX, Thread};
use pagetax_recorder::places::Segment;
use pagetax_recorder::stream::MemoryUse;
use pagetax_remote::documents::{PageInTime, PolicyResult, Replacement, ReplacementAtLimit};
use pagetax_remote::pager::replacement::{PolicyName, ReferenceCollector, References};
use pagetax_remote::pager::{PagerOptions, RemoteRegion};
use pagetax_remote::store::PageStore;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const PAGE_BYTES: u64 = 4096;
/// The least memory that `--resident` takes.
pub const RESIDENT_MIN: u64 = 1 << 20;
/// The amounts of resident memory beside the one that was asked about, as multiples of half of it.
const HALVES: [u64; 4] = [1, 2, 4, 8];
/// The most references of a process. They take 4 bytes each, and 12 more for the optimum.
const STEPS_MAX: usize = 1 << 28;
/// The memory in which page-ins are timed.
const TIMED_BYTES: u64 = 16 << 20;
/// The groups of page-ins that are timed, and the reads of each.
const GROUPS: usize = 5;
const READS: usize = 1_000;

/// An observer of the pages that `pagetax remote` would page: heap and anonymous mappings.
#[derive(Default)]
struct PagedMemory {
    processes: BTreeMap<u32, ReferenceCollector>,
    is_cut: bool,
}

impl PagedMemory {
    fn of(&mut self, process: u32) -> &mut ReferenceCollector {
        let new = || ReferenceCollector::new(ReferenceCollector::WINDOW);
        self.processes.entry(process).or_insert_with(new)
    }
}

impl PageObserver for PagedMemory {
    fn change(&mut self, thread: Thread, kind: AccessKind, page: u64) {
        let of = self.of(thread.process);
        match of.steps() < STEPS_MAX {
            true => of.access(page, kind == AccessKind::Store),
            false => self.is_cut = true,
        }
    }

    fn ran(&mut self, _: Thread, _: u64, _: u64) {}

    fn found(&mut self, process: u32, page: u64, segment: Segment) {
        let is_paged = matches!(segment, Segment::Heap | Segment::Anon | Segment::Unknown);
        self.of(process).follow(page, is_paged);
    }

    fn gone(&mut self, thread: Thread, pages: Range<u64>) {
        self.of(thread.process).unmap(pages);
    }

    fn memory_use(&mut self, thread: Thread, memory_use: MemoryUse, pages: Range<u64>) {
        let kind = match memory_use {
            MemoryUse::Dropped => return self.gone(thread, pages),
            MemoryUse::Zeros => return pages.for_each(|page| self.of(thread.process).zeros(page)),
            MemoryUse::Written => AccessKind::Store,
            MemoryUse::Read => AccessKind::Load,
        };
        let end = pages.end.min(pages.start.saturating_add(SYSTEM_CALL_PAGES_MAX));
        (pages.start..end).for_each(|page| self.change(thread, kind, page));
    }
}

/// Reads a trace, and returns the page-ins with this much resident memory and others.
pub fn simulate(trace: &Path, resident: Bytes) -> Result<Replacement> {
    let opened = open_trace(trace)?;
    let is_placed = opened.head.allocator.as_deref() == Some(ALLOCATOR);
    let source = Recorded::Trace(Box::new(opened));
    let (seen, outcome) = source.observe("remote", PagedMemory::default())?;
    if outcome.code != 0 {
        bail!("interrupted");
    }
    let mut notes = outcome.notes;
    if !is_placed {
        notes.push(
            "under `pagetax remote`, memory lies elsewhere than in this trace, so page-ins may differ by a \
             factor of three: record it with `pagetax record --for-remote`"
                .into(),
        );
    }
    let others = seen.processes.len().saturating_sub(1);
    let largest = seen.processes.into_values().max_by_key(ReferenceCollector::steps);
    let references = largest.map(ReferenceCollector::finish).unwrap_or_default();
    if references.pages() == 0 {
        bail!(
            "{} has no heap and no anonymous mapping: nothing of it would be paged",
            trace.display()
        );
    }
    if others > 0 {
        notes.push(format!("{others} smaller processes are left out: each has a limit of its own"));
    }
    if seen.is_cut {
        notes.push(format!("only the first {STEPS_MAX} references count"));
    }
    Ok(Replacement {
        title: source.title(),
        page_count: references.pages() as u64,
        access_count: references.access_count(),
        resident_bytes: resident.0,
        limits: at_limits(&references, resident),
        page_in: None,
        notes,
    })
}

fn at_limits(references: &References, resident: Bytes) -> Vec<ReplacementAtLimit> {
    let touched = references.pages() as u64 * PAGE_BYTES;
    let is_useful =
        |bytes: &u64| *bytes == resident.0 || (*bytes >= RESIDENT_MIN && *bytes < touched);
    let limits: Vec<u64> =
        HALVES.into_iter().map(|halves| resident.0 / 2 * halves).filter(is_useful).collect();
    let mut progress = Progress::start("simulate");
    let total = (limits.len() * PolicyName::ALL.len()) as f64;
    let mut done = 0.0;
    let mut at = |bytes: u64| {
        let mut of = |policy: PolicyName| {
            let counts = policy.counts(references, (bytes / PAGE_BYTES) as usize);
            done += 1.0;
            progress.update(done / total);
            PolicyResult { policy, counts }
        };
        ReplacementAtLimit {
            resident_bytes: bytes,
            policies: PolicyName::ALL.map(&mut of).to_vec(),
        }
    };
    limits.into_iter().map(&mut at).collect()
}

/// Measures page-ins at random from a store, in memory of our own.
pub fn time_page_ins(store: Arc<dyn PageStore>, options: PagerOptions) -> Result<PageInTime> {
    let options = PagerOptions { resident_bytes: RESIDENT_MIN, prefetch: false, ..options };
    let mut region = RemoteRegion::map(store, TIMED_BYTES, options)?;
    let mut rng = Rng::new(TIMED_BYTES);
    // Half of each word is zeros, so that the pages are neither zeros nor incompressible.
    for word in region.as_mut_slice().chunks_exact_mut(8) {
        word[..4].copy_from_slice(&(rng.below(u64::from(u32::MAX)) as u32).to_le_bytes());
    }
    region.evict_all();
    let mut groups = Vec::new();
    for _ in 0..GROUPS {
        let before = region.counts().demand_page_in_count;
        let started = Instant::now();
        for _ in 0..READS {
            let at = rng.below(TIMED_BYTES / PAGE_BYTES) * PAGE_BYTES;
            std::hint::black_box(region.as_slice()[at as usize]);
        }
        let took_ns = started.elapsed().as_nanos() as u64;
        let count = region.counts().demand_page_in_count - before;
        groups.push(took_ns / count.max(1));
    }
    let [low, high] = [groups.iter().min(), groups.iter().max()].map(|ns| ns.copied().unwrap_or(0));
    Ok(PageInTime { median_ns: median(&groups).unwrap_or(0), low_ns: low, high_ns: high })
}
