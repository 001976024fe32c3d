//! What page walks cost: the same accesses on base pages and on huge pages.
//!
//! Dependent: a random cycle through all pages, again and again, each lap on another line of each page, so
//! that what is added is the walk and not the room that page tables take from the data in the caches.
//! Which line comes first in a page is hashed: regular offsets collide in the data caches.
//! Independent: uniformly random words, their addresses known beforehand, so that walks overlap.
//!
//! In a virtual machine the difference depends on where base pages come to lie: a walk ends with the
//! hypervisor's own translation, which neighbours share. On one such machine a chase over 64M took 16 ns on
//! 2M pages, 20 ns on base pages that were the parts of 2M pages, and on base pages as the kernel hands
//! them out 24 ns with 5,000 single free pages in /proc/buddyinfo, and 57 ns with 83,000.

use super::{CalibrateError, Effort, thread_ns};
use crate::at_hand;
use crate::procfs::{Root, process_huge_bytes};
use crate::sys::mapping::{Mapping, Request, Source};
use crate::sys::signal::asked_to_stop;
use pagetax_core::access::Rng;
use pagetax_core::calibration::{Spread, WalkCost, WalkPattern};
use pagetax_core::units::{Bytes, PageSize};

const LINE_BYTES: u64 = 64;
/// Independent accesses are this many times as many as dependent ones, being as much faster.
const GATHER_FACTOR: u64 = 8;
/// How often a working set is measured whose repetitions do not agree.
const TRIES: u32 = 3;

/// By working set; and notes about those that could not be had.
pub(super) fn measure(
    effort: Effort,
    huge: PageSize,
    memory_bytes_max: u64,
    mut on_progress: impl FnMut(f64),
) -> Result<(Vec<WalkCost>, Vec<String>), CalibrateError> {
    let (mut walks, mut notes) = (Vec::new(), Vec::new());
    let total: u64 = effort.working_sets.iter().sum();
    let mut done = 0;
    for bytes in effort.working_sets {
        // Two mappings of it, at once.
        if bytes * 2 > memory_bytes_max {
            let most = Bytes(memory_bytes_max);
            notes.push(format!("{}: more memory than the {most} to spare", Bytes(*bytes)));
        } else {
            match working_set(effort, huge, *bytes)? {
                Ok(costs) => walks.extend(costs),
                Err(why) => notes.push(why),
            }
        }
        done += bytes;
        on_progress(done as f64 / total as f64);
    }
    walks.sort_by_key(|walk| (walk.pattern, walk.working_set_bytes));
    Ok((walks, notes))
}

/// What was seen of one working set, by pattern and side.
type Samples = [[Vec<f64>; 2]; 2];

/// Measured once more where repetitions do not agree: the better one counts.
fn working_set(
    effort: Effort,
    huge: PageSize,
    bytes: u64,
) -> Result<Result<[WalkCost; 2], String>, CalibrateError> {
    let order = cycle(bytes / PageSize::K4.bytes());
    let mut best: Option<[WalkCost; 2]> = None;
    for _ in 0..TRIES {
        let mut samples = Samples::default();
        // Where base pages come to lie in the caches is chance: no one place stands for all.
        let each = effort.repetitions.div_ceil(effort.placements);
        for _ in 0..effort.placements {
            if let Err(why) = placement(effort, huge, bytes, &order, each, &mut samples)? {
                return Ok(Err(why));
            }
        }
        let [dependent, independent] = samples;
        let costs = [
            cost(WalkPattern::Dependent, bytes, dependent),
            cost(WalkPattern::Independent, bytes, independent),
        ];
        let [Some(dependent), Some(independent)] = costs else {
            return Ok(Err(format!("{}: not one repetition was asked for", Bytes(bytes))));
        };
        let found = [dependent, independent];
        let width = |costs: &[WalkCost; 2]| -> f64 {
            costs.iter().map(|cost| cost.extra.high_ns - cost.extra.low_ns).sum()
        };
        if best.is_none_or(|best| width(&found) < width(&best)) {
            best = Some(found);
        }
        if !found.iter().any(|cost| cost.extra.is_noisy()) {
            break;
        }
    }
    best.map(Ok).ok_or(CalibrateError::Interrupted)
}

/// Both sides in new memory, in turns; or why it cannot be had.
fn placement(
    effort: Effort,
    huge: PageSize,
    bytes: u64,
    order: &[u32],
    repetitions: u32,
    samples: &mut Samples,
) -> Result<Result<(), String>, CalibrateError> {
    at_hand::bring(2 * bytes);
    let huge_before = process_huge_bytes(&Root::default(), std::process::id()).value();
    let on_base = filled(bytes, PageSize::K4, libc::MADV_NOHUGEPAGE, order)?;
    let on_huge = filled(bytes, huge, libc::MADV_HUGEPAGE, order)?;
    let huge_after = process_huge_bytes(&Root::default(), std::process::id()).value();
    let wanted = bytes / huge.bytes() * huge.bytes();
    if let (Some(before), Some(after)) = (huge_before, huge_after)
        && after.saturating_sub(before) < wanted / 10 * 9
    {
        return Ok(Err(format!(
            "{}: memory is too fragmented for {huge} pages; \
             echo 1 > /proc/sys/vm/compact_memory (as root) may help",
            Bytes(bytes)
        )));
    }
    // The first lap only warms the caches.
    for repetition in 0..=repetitions {
        if asked_to_stop() {
            return Err(CalibrateError::Interrupted);
        }
        for (side, mapping) in [&on_base, &on_huge].into_iter().enumerate() {
            let seed = u64::from(repetition);
            let chase_ns = chase(mapping, effort.chase_count, order);
            let gather_ns = gather(mapping, effort.chase_count * GATHER_FACTOR, bytes, seed);
            if repetition > 0 {
                samples[0][side].push(chase_ns);
                samples[1][side].push(gather_ns);
            }
        }
    }
    Ok(Ok(()))
}

fn cost(pattern: WalkPattern, working_set_bytes: u64, sides: [Vec<f64>; 2]) -> Option<WalkCost> {
    let [base, huge] = sides;
    let extra = base.iter().zip(&huge).map(|(base, huge)| base - huge).collect();
    Some(WalkCost {
        pattern,
        working_set_bytes,
        base: Spread::of(base)?,
        huge: Spread::of(huge)?,
        extra: Spread::of(extra)?,
    })
}

const LINES: u64 = PageSize::K4.bytes() / LINE_BYTES;

/// The line of a page that a lap goes to.
fn slot(page: u64, lap: u64) -> u64 {
    let first = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    page * PageSize::K4.bytes() + (first + lap) % LINES * LINE_BYTES
}

/// A random cycle through all pages: `order[page]` follows `page` (Sattolo's algorithm).
fn cycle(pages: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..pages as u32).collect();
    let mut random = Rng::new(pages);
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64) as usize);
    }
    order
}

/// Memory with the cycle written into it, once for each lap; after the last comes the first.
fn filled(
    bytes: u64,
    page: PageSize,
    advice: i32,
    order: &[u32],
) -> Result<Mapping, CalibrateError> {
    let failed = |error| CalibrateError::System("map memory for walks", error);
    let (len, align) = (bytes as usize, page.bytes() as usize);
    let request = Request { source: Source::Anon, len, align, hugetlb: None };
    let mapping = Mapping::new(request).map_err(failed)?;
    mapping.advise(advice).map_err(failed)?;
    for (page, next) in order.iter().enumerate() {
        for lap in 0..LINES {
            let next_lap = if *next == 0 { lap + 1 } else { lap };
            mapping.store(slot(page as u64, lap), slot(u64::from(*next), next_lap));
        }
    }
    Ok(mapping)
}

/// CPU time of a dependent access.
fn chase(mapping: &Mapping, count: u64, order: &[u32]) -> f64 {
    // Warm laps would flatter small sets, cold ones tax them: start where the last lap ended.
    let mut offset = slot(0, 0);
    for _ in 0..order.len().min(count as usize / 8) {
        offset = mapping.load(offset);
    }
    let before = thread_ns();
    for _ in 0..count {
        offset = mapping.load(offset);
    }
    let ns = thread_ns() - before;
    std::hint::black_box(offset);
    ns as f64 / count as f64
}

/// CPU time of an independent access.
fn gather(mapping: &Mapping, count: u64, bytes: u64, seed: u64) -> f64 {
    let mut random = Rng::new(seed);
    let before = thread_ns();
    for _ in 0..count {
        mapping.load(random.below(bytes - 7));
    }
    (thread_ns() - before) as f64 / count as f64
}
