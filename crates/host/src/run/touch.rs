//! The loops that touch memory, compiled for each pattern, access and grain.
//!
//! Invariant: `pagetax_core` alone decides which offsets are visited, and in which order. The null
//! machine runs the same loops with [`Nothing`] instead of memory.

use super::pace::{Halt, Pace};
use crate::sys::mapping::OwnedMapping;
use pagetax_core::access::{Chase, Offsets, pattern_word};
use pagetax_core::plan::{Access, Pattern, Random, Touch};
use std::hint::black_box;
use std::marker::PhantomData;

/// A word whose content differs from the pattern that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wrong {
    /// The offset in the region, in bytes.
    pub offset: u64,
    /// The word that was written.
    pub expected: u64,
    /// The word that was read instead.
    pub found: u64,
}

/// The client and the repeat that a touch belongs to; they select its random stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientRepeat {
    /// The client's number, from 0.
    pub client: u32,
    /// The number of the repeat, from 0.
    pub repeat: u64,
}

/// An action at each visited offset.
pub trait Visit {
    /// Visits one offset, in bytes from the region's start. Fails if a verified word differs.
    fn visit(&mut self, offset: u64) -> Result<(), Wrong>;
}

/// A visit that touches no memory. It still keeps the compiler from removing the loop.
pub struct Nothing;

impl Visit for Nothing {
    #[inline(always)]
    fn visit(&mut self, offset: u64) -> Result<(), Wrong> {
        black_box(offset);
        Ok(())
    }
}

/// One of the four accesses, on one word.
trait Act {
    /// Accesses the word; the error is the word that was found instead of `expected`.
    fn act(load: impl Fn() -> u64, store: impl Fn(u64), expected: u64) -> Result<(), u64>;
}

struct Read;
struct Write;
struct Verify;
struct Rewrite;

impl Act for Read {
    #[inline(always)]
    fn act(load: impl Fn() -> u64, _: impl Fn(u64), _: u64) -> Result<(), u64> {
        load(); // a volatile load: the compiler keeps it although nothing uses the value
        Ok(())
    }
}

impl Act for Write {
    #[inline(always)]
    fn act(_: impl Fn() -> u64, store: impl Fn(u64), expected: u64) -> Result<(), u64> {
        store(expected);
        Ok(())
    }
}

impl Act for Verify {
    #[inline(always)]
    fn act(load: impl Fn() -> u64, _: impl Fn(u64), expected: u64) -> Result<(), u64> {
        let found = load();
        if found == expected { Ok(()) } else { Err(found) }
    }
}

impl Act for Rewrite {
    #[inline(always)]
    fn act(load: impl Fn() -> u64, store: impl Fn(u64), expected: u64) -> Result<(), u64> {
        Verify::act(load, &store, expected)?;
        store(expected);
        Ok(())
    }
}

/// Accesses to one word per grain, for grains of at most 8 bytes.
struct OneWord<'a, A> {
    mapping: &'a OwnedMapping,
    pattern_seed: u64,
    access: PhantomData<A>,
}

impl<A: Act> Visit for OneWord<'_, A> {
    #[inline(always)]
    fn visit(&mut self, offset: u64) -> Result<(), Wrong> {
        let expected = pattern_word(self.pattern_seed, offset);
        A::act(|| self.mapping.load(offset), |word| self.mapping.store(offset, word), expected)
            .map_err(|found| Wrong { offset, expected, found })
    }
}

/// Accesses to every word of a grain of more than 8 bytes.
struct EveryWord<'a, A> {
    mapping: &'a OwnedMapping,
    pattern_seed: u64,
    grain_bytes: u64,
    access: PhantomData<A>,
}

impl<A: Act> Visit for EveryWord<'_, A> {
    #[inline(always)]
    fn visit(&mut self, offset: u64) -> Result<(), Wrong> {
        self.mapping.each_word(offset, self.grain_bytes, |offset, word| {
            let expected = pattern_word(self.pattern_seed, offset);
            A::act(|| word.load(), |value| word.store(value), expected).map_err(|found| Wrong {
                offset,
                expected,
                found,
            })
        })
    }
}

/// The offsets of one linear run.
struct Sweep {
    next: u64,
    stride: u64,
}

impl Offsets for Sweep {
    #[inline(always)]
    fn next_offset(&mut self) -> u64 {
        let offset = self.next;
        self.next = offset.wrapping_add(self.stride);
        offset
    }
}

/// Visits `count` offsets, and checks the clock and the stop flag every few thousand.
fn drive<O: Offsets, V: Visit>(
    offsets: &mut O,
    visit: &mut V,
    count: u64,
    pace: &mut Pace<'_>,
) -> Result<(), Halt> {
    let mut left = count;
    while left > 0 {
        let chunk = left.min(pace.accesses_until_look());
        for _ in 0..chunk {
            visit.visit(offsets.next_offset())?;
        }
        left -= chunk;
        pace.done(chunk)?;
    }
    Ok(())
}

/// Visits the offsets of the touch's pattern, for this turn.
pub fn walk<V: Visit>(
    touch: &Touch,
    region_bytes: u64,
    turn: ClientRepeat,
    visit: &mut V,
    pace: &mut Pace<'_>,
) -> Result<(), Halt> {
    pace.begin_touch(touch.grain_bytes);
    match touch.random(region_bytes, turn.client, turn.repeat) {
        None => {
            for run in touch.runs(region_bytes) {
                let mut sweep = Sweep { next: run.first, stride: run.stride };
                drive(&mut sweep, visit, run.count, pace)?;
            }
            Ok(())
        }
        Some(Random::Uniform(mut stream)) => drive(&mut stream, visit, touch.count, pace),
        Some(Random::Zipf(mut stream)) => drive(&mut stream, visit, touch.count, pace),
        Some(Random::Chase(mut stream)) => drive(&mut stream, visit, touch.count, pace),
    }
}

/// Touches a region that is mapped.
pub fn touch(
    touch: &Touch,
    region_bytes: u64,
    mapping: &OwnedMapping,
    pattern_seed: u64,
    turn: ClientRepeat,
    pace: &mut Pace<'_>,
) -> Result<(), Halt> {
    if touch.pattern == Pattern::PointerChase {
        return chase(touch, region_bytes, mapping, pace).map(|_| ());
    }
    let place = Place { touch, region_bytes, mapping, pattern_seed, turn };
    match touch.access {
        Access::Read => place.touch::<Read>(pace),
        Access::Write => place.touch::<Write>(pace),
        Access::Verify => place.touch::<Verify>(pace),
        Access::Rewrite => place.touch::<Rewrite>(pace),
    }
}

struct Place<'a> {
    touch: &'a Touch,
    region_bytes: u64,
    mapping: &'a OwnedMapping,
    pattern_seed: u64,
    turn: ClientRepeat,
}

impl Place<'_> {
    fn touch<A: Act>(&self, pace: &mut Pace<'_>) -> Result<(), Halt> {
        let Place { touch, region_bytes, mapping, pattern_seed, turn } = *self;
        let (grain_bytes, access) = (touch.grain_bytes, PhantomData::<A>);
        if grain_bytes <= 8 {
            let mut visit = OneWord { mapping, pattern_seed, access };
            walk(touch, region_bytes, turn, &mut visit, pace)
        } else {
            let mut visit = EveryWord { mapping, pattern_seed, grain_bytes, access };
            walk(touch, region_bytes, turn, &mut visit, pace)
        }
    }
}

/// Writes the links of a chase: the first word of each grain holds the offset of the next grain.
pub fn lay_links(touch: &Touch, region_bytes: u64, mapping: &OwnedMapping) {
    let mut order = Chase::new(touch.seed, region_bytes, touch.grain_bytes);
    let mut at = order.next_offset();
    for _ in 0..(region_bytes / touch.grain_bytes).max(1) {
        let next = order.next_offset();
        mapping.store(at, next);
        at = next;
    }
}

/// Follows the links and returns the last offset. Each address depends on the previous load.
fn chase(
    touch: &Touch,
    region_bytes: u64,
    mapping: &OwnedMapping,
    pace: &mut Pace<'_>,
) -> Result<u64, Halt> {
    pace.begin_touch(touch.grain_bytes);
    let mut at = Chase::new(touch.seed, region_bytes, touch.grain_bytes).next_offset();
    let mut left = touch.count;
    while left > 0 {
        let chunk = left.min(pace.accesses_until_look());
        for step in 0..chunk {
            let next = mapping.load(at);
            if next >= region_bytes {
                let expected = link_after(touch, region_bytes, touch.count - left + step);
                return Err(Wrong { offset: at, expected, found: next }.into());
            }
            at = next;
        }
        left -= chunk;
        pace.done(chunk)?;
    }
    Ok(at)
}

/// Returns the link in the grain that a chase visits as number `step`.
fn link_after(touch: &Touch, region_bytes: u64, step: u64) -> u64 {
    let grains = (region_bytes / touch.grain_bytes).max(1);
    let mut order = Chase::new(touch.seed, region_bytes, touch.grain_bytes);
    for _ in 0..=step % grains {
        order.next_offset();
    }
    order.next_offset()
}

#[cfg(test)]
mod tests {
    use super::super::control::Control;
    use super::*;
    use crate::sys::mapping::{Request, Source};
    use pagetax_core::plan::RegionId;
    use std::collections::BTreeSet;

    const BYTES: u64 = 1 << 16;

    fn touch_of(pattern: Pattern, count: u64, grain_bytes: u64) -> Touch {
        let (region, access) = (RegionId(0), Access::Read);
        Touch { region, access, pattern, count, grain_bytes, seed: 7 }
    }

    /// Records the offsets that the loops visit.
    #[derive(Default)]
    struct Visited(Vec<u64>);

    impl Visit for Visited {
        fn visit(&mut self, offset: u64) -> Result<(), Wrong> {
            self.0.push(offset);
            Ok(())
        }
    }

    fn visited(touch: &Touch, turn: ClientRepeat) -> Vec<u64> {
        let control = Control::new(1).unwrap();
        let mut pace = Pace::new(&control, 0, None, None, false);
        let mut visited = Visited::default();
        walk(touch, BYTES, turn, &mut visited, &mut pace).unwrap();
        visited.0
    }

    #[test]
    fn the_loops_visit_what_the_plan_says() {
        let turn = ClientRepeat { client: 2, repeat: 3 };
        for pattern in [Pattern::Uniform, Pattern::Zipf { theta: 0.9 }, Pattern::PointerChase] {
            let touch = touch_of(pattern, 10_000, 64);
            let mut stream = touch.random(BYTES, 2, 3).unwrap();
            let expected: Vec<_> = (0..10_000).map(|_| stream.next_offset()).collect();
            assert_eq!(visited(&touch, turn), expected, "{pattern:?}");
        }
        let sweep = touch_of(Pattern::Strided { stride_bytes: 192 }, 10_000, 64);
        let laps = sweep.runs(BYTES);
        let expected: Vec<_> =
            laps.flat_map(|run| (0..run.count).map(move |i| run.first + i * run.stride)).collect();
        assert_eq!(visited(&sweep, turn), expected);
        assert_eq!(expected.len(), 10_000);
    }

    /// Writes at random offsets reach the words that the plan's stream names, and no others.
    #[test]
    fn memory_is_written_where_the_stream_says() {
        let (source, len, align) = (Source::Anon, BYTES as usize, 4096);
        let mapping = OwnedMapping::new(Request { source, len, align, hugetlb: None }).unwrap();
        let write = Touch { access: Access::Write, ..touch_of(Pattern::Uniform, 500, 8) };
        let control = Control::new(1).unwrap();
        let mut pace = Pace::new(&control, 0, None, None, false);
        let turn = ClientRepeat { client: 1, repeat: 2 };
        touch(&write, BYTES, &mapping, 11, turn, &mut pace).unwrap();
        let mut stream = write.random(BYTES, 1, 2).unwrap();
        let written: BTreeSet<u64> = (0..500).map(|_| stream.next_offset()).collect();
        for offset in (0..BYTES).step_by(8) {
            let expected = if written.contains(&offset) { pattern_word(11, offset) } else { 0 };
            assert_eq!(mapping.load(offset), expected, "{offset}");
        }
    }

    fn chased(touch: &Touch, spoil: Option<u64>) -> Result<u64, Halt> {
        let (source, len, align) = (Source::Anon, BYTES as usize, 4096);
        let mapping = OwnedMapping::new(Request { source, len, align, hugetlb: None }).unwrap();
        lay_links(touch, BYTES, &mapping);
        if let Some(offset) = spoil {
            mapping.store(offset, u64::MAX);
        }
        let control = Control::new(1).unwrap();
        chase(touch, BYTES, &mapping, &mut Pace::new(&control, 0, None, None, false))
    }

    #[test]
    fn a_chase_goes_the_way_of_its_stream() {
        for count in [0, 1, 1023, 1024, 5000] {
            let touch = touch_of(Pattern::PointerChase, count, 64);
            let mut stream = Chase::new(7, BYTES, 64);
            let end = (0..=count).map(|_| stream.next_offset()).last().unwrap();
            assert_eq!(chased(&touch, None), Ok(end), "{count}");
        }
    }

    #[test]
    fn a_broken_link_is_reported() {
        let mut stream = Chase::new(7, BYTES, 64);
        let at = (0..=10).map(|_| stream.next_offset()).last().unwrap();
        let (expected, found) = (stream.next_offset(), u64::MAX);
        let touch = touch_of(Pattern::PointerChase, 5000, 64);
        let wrong = Wrong { offset: at, expected, found };
        assert_eq!(chased(&touch, Some(at)), Err(Halt::Wrong(wrong)));
    }
}
