//! The cost of page walks: the difference between the same accesses on base pages and on huge pages.
//!
//! Dependent: a random cycle through all pages, again and again. Each lap uses another line of each
//! page. So the difference is the walk alone, and not the cache space that page tables take from the
//! data. The first line in a page is hashed, as regular offsets collide in the data caches.
//!
//! Independent: uniformly random words whose addresses are known in advance, so that walks overlap.
//!
//! In order: one page after another, the next line in each. Eight walks share a line of page tables, and
//! the CPU fetches the next line early. Over much memory they hide behind the misses of the data.
//!
//! In a virtual machine, the difference depends on the physical place of the base pages. A walk ends
//! with the hypervisor's own translation, which neighbours share. On one such machine, a chase over 64M
//! took 16 ns on 2M pages, and 20 ns on base pages that were parts of 2M pages. On base pages as the
//! kernel hands them out, it took 24 ns with 5,000 single free pages in /proc/buddyinfo, and 57 ns with
//! 83,000.

use super::{CalibrateError, Effort, thread_ns};
use crate::measure::backed_memory;
use crate::procfs::{Root, process_huge_bytes};
use crate::sys::mapping::{OwnedMapping, Request, Source};
use crate::sys::signal::asked_to_stop;
use pagetax_core::access::Rng;
use pagetax_core::calibration::{Spread, WalkCost, WalkPattern};
use pagetax_core::units::{Bytes, PageSize};
use std::time::Instant;

const LINE_BYTES: u64 = 64;
/// The number of independent accesses for each dependent one: they are faster by about this factor.
const GATHER_FACTOR: u64 = 8;
/// The turns of each side in a repetition.
const TURNS: u64 = 16;
/// The most measurements of a working set whose repetitions disagree.
const TRIES: u32 = 3;

/// Measures all working sets. Returns their costs, and notes about the sets that could not be measured.
pub(super) fn measure(
    effort: Effort,
    huge: PageSize,
    memory_bytes_max: u64,
    mut on_progress: impl FnMut(f64),
) -> Result<(Vec<WalkCost>, Vec<String>), CalibrateError> {
    let (mut walks, mut notes) = (Vec::new(), Vec::new());
    let total: u64 = effort.working_sets.iter().sum();
    let retry_until = Instant::now() + effort.retry_for;
    let mut done = 0;
    for bytes in effort.working_sets {
        // Both mappings of the set exist at the same time.
        if bytes * 2 > memory_bytes_max {
            let most = Bytes(memory_bytes_max);
            notes.push(format!("{}: more memory than the {most} to spare", Bytes(*bytes)));
        } else {
            match working_set(effort, huge, *bytes, retry_until)? {
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

/// The number of patterns.
const PATTERNS: usize = WalkPattern::ALL.len();
/// The measured costs of one working set, by pattern and side.
type Samples = [[Vec<f64>; 2]; PATTERNS];

/// Measures a working set, again if its repetitions disagree. The result with the narrower interval
/// counts.
fn working_set(
    effort: Effort,
    huge: PageSize,
    bytes: u64,
    retry_until: Instant,
) -> Result<Result<[WalkCost; PATTERNS], String>, CalibrateError> {
    let order = cycle(bytes / PageSize::K4.bytes());
    let mut best: Option<[WalkCost; PATTERNS]> = None;
    for _ in 0..TRIES {
        let mut samples = Samples::default();
        // The place of base pages in the caches is random, so no single placement is representative.
        let each = effort.repetitions.div_ceil(effort.placements);
        for _ in 0..effort.placements {
            if let Err(why) = placement(effort, huge, bytes, &order, each, &mut samples)? {
                return Ok(Err(why));
            }
        }
        let sides = WalkPattern::ALL.into_iter().zip(samples);
        let costs: Vec<_> = sides.map(|(pattern, sides)| cost(pattern, bytes, sides)).collect();
        let [Some(dependent), Some(independent), Some(in_order)] = costs[..] else {
            return Ok(Err(format!("{}: not one repetition was asked for", Bytes(bytes))));
        };
        let found = [dependent, independent, in_order];
        let width = |costs: &[WalkCost; PATTERNS]| -> f64 {
            costs.iter().map(|cost| cost.extra.high_ns - cost.extra.low_ns).sum()
        };
        if best.is_none_or(|best| width(&found) < width(&best)) {
            best = Some(found);
        }
        if !is_retried(&found, retry_until) {
            break;
        }
    }
    best.map(Ok).ok_or(CalibrateError::Interrupted)
}

/// Returns true if repetitions disagree, and there is time to measure them again.
fn is_retried(found: &[WalkCost], retry_until: Instant) -> bool {
    found.iter().any(|cost| cost.extra.is_noisy()) && Instant::now() < retry_until
}

/// Measures both sides in new memory, in turns. The inner error shows why the memory is not available.
fn placement(
    effort: Effort,
    huge: PageSize,
    bytes: u64,
    order: &[u32],
    repetitions: u32,
    samples: &mut Samples,
) -> Result<Result<(), String>, CalibrateError> {
    backed_memory::bring(2 * bytes);
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
        let seen = repeat(effort, [&on_base, &on_huge], order.len() as u64, u64::from(repetition));
        if repetition > 0 {
            for (of_pattern, ns) in samples.iter_mut().zip(seen) {
                of_pattern.iter_mut().zip(ns).for_each(|(side, ns)| side.push(ns));
            }
        }
    }
    Ok(Ok(()))
}

/// Measures both sides once, and returns the time of an access by pattern and side. The sides take turns of
/// about a millisecond, so that what slows the machine slows both.
fn repeat(
    effort: Effort,
    mappings: [&OwnedMapping; 2],
    pages: u64,
    repetition: u64,
) -> [[f64; 2]; PATTERNS] {
    let mut ns = [[0.0; 2]; PATTERNS];
    let (mut chased, mut swept) = ([slot(0, 0); 2], [0; 2]);
    let (chases, others) = (effort.chase_count / TURNS, effort.chase_count * GATHER_FACTOR / TURNS);
    let bytes = pages * PageSize::K4.bytes();
    for turn in 0..TURNS {
        // Each side comes first as often as the other.
        let sides = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
        for side in sides {
            ns[0][side] += chase(mappings[side], &mut chased[side], chases, pages);
        }
        for side in sides {
            ns[1][side] += gather(mappings[side], others, bytes, repetition * TURNS + turn);
        }
        for side in sides {
            ns[2][side] += sweep(mappings[side], &mut swept[side], others, bytes);
        }
    }
    ns.map(|sides| sides.map(|sum| sum / TURNS as f64))
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

/// Returns the offset of the line that a lap visits in a page.
fn slot(page: u64, lap: u64) -> u64 {
    let first = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    page * PageSize::K4.bytes() + (first + lap) % LINES * LINE_BYTES
}

/// Returns a random cycle through all pages: `order[page]` follows `page` (Sattolo's algorithm).
pub(super) fn cycle(pages: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..pages as u32).collect();
    let mut random = Rng::new(pages);
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64) as usize);
    }
    order
}

/// Maps memory and writes the cycle into it, once for each lap. The last lap leads to the first.
fn filled(
    bytes: u64,
    page: PageSize,
    advice: i32,
    order: &[u32],
) -> Result<OwnedMapping, CalibrateError> {
    let failed = |error| CalibrateError::System("map memory for walks", error);
    let (len, align) = (bytes as usize, page.bytes() as usize);
    let request = Request { source: Source::Anon, len, align, hugetlb: None };
    let mapping = OwnedMapping::new(request).map_err(failed)?;
    mapping.advise(advice).map_err(failed)?;
    for (page, next) in order.iter().enumerate() {
        for lap in 0..LINES {
            let next_lap = if *next == 0 { lap + 1 } else { lap };
            mapping.store(slot(page as u64, lap), slot(u64::from(*next), next_lap));
        }
    }
    Ok(mapping)
}

/// Returns the CPU time of a dependent access, in a cycle of so many pages that goes on at an offset.
pub(super) fn chase(mapping: &OwnedMapping, offset: &mut u64, count: u64, pages: u64) -> f64 {
    // Follow the chain before the clock starts: cold caches would overstate the cost of small sets.
    let mut at = *offset;
    for _ in 0..pages.min(count / 8) {
        at = mapping.load(at);
    }
    let before = thread_ns();
    for _ in 0..count {
        at = mapping.load(at);
    }
    *offset = at;
    (thread_ns() - before) as f64 / count as f64
}

/// Returns the CPU time of an independent access.
fn gather(mapping: &OwnedMapping, count: u64, bytes: u64, seed: u64) -> f64 {
    let mut random = Rng::new(seed);
    let before = thread_ns();
    for _ in 0..count {
        mapping.load(random.below(bytes - 7));
    }
    (thread_ns() - before) as f64 / count as f64
}

/// Returns the CPU time of an access that goes on to the next page, and to the next line in it.
fn sweep(mapping: &OwnedMapping, offset: &mut u64, count: u64, bytes: u64) -> f64 {
    let (before, mut at) = (thread_ns(), *offset);
    for _ in 0..count {
        mapping.load(at);
        at += PageSize::K4.bytes() + LINE_BYTES;
        if at >= bytes {
            at -= bytes;
        }
    }
    *offset = at;
    (thread_ns() - before) as f64 / count as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn noisy_walks_are_measured_again_until_the_time_is_up() {
        let spread = |ns: [f64; 3]| Spread::of(ns.to_vec()).unwrap();
        let walk = |extra| {
            let (base, huge) = (spread([90.0; 3]), spread([10.0; 3]));
            let pattern = WalkPattern::Dependent;
            WalkCost { pattern, working_set_bytes: 64 << 20, base, huge, extra }
        };
        let (quiet, noisy) = (walk(spread([80.0; 3])), walk(spread([5.0, 80.0, 200.0])));
        let now = Instant::now();
        let later = now + Duration::from_secs(60);
        assert!(is_retried(&[quiet, noisy], later));
        assert!(!is_retried(&[quiet, quiet], later));
        assert!(!is_retried(&[quiet, noisy], now));
    }
}
