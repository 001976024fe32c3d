//! The allocator of the paged region: no page is allocated twice, and large requests find room
//! beside many small ones.

#[path = "../src/space.rs"]
#[allow(dead_code)]
mod space;

use space::{LARGE_PAGES, Space};

const TERABYTE: usize = 1 << 28;
const GIB: usize = 1 << 18;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ mixed >> 27) % limit as u64) as usize
    }
}

/// A model of the allocated pages.
struct Model(Vec<bool>);

impl Model {
    fn set(&mut self, first: usize, pages: usize, given: bool) {
        for page in &mut self.0[first..first + pages] {
            assert_ne!(*page, given, "page in {first}+{pages} changes hands twice");
            *page = given;
        }
    }
}

#[test]
fn no_page_is_given_out_twice_and_all_come_back() {
    const PAGES: usize = 5000;
    for seed in 0..200 {
        let mut random = Random(seed);
        let (mut space, mut model) = (Space::new(PAGES), Model(vec![false; PAGES]));
        let mut blocks: Vec<(usize, usize)> = Vec::new();
        for _ in 0..400 {
            match random.below(5) {
                4 => {
                    let first = random.below(PAGES);
                    let pages = 1 + random.below((PAGES - first).min(100));
                    space.claim(first, pages);
                    let free: Vec<usize> =
                        (first..first + pages).filter(|page| !model.0[*page]).collect();
                    for page in free {
                        model.set(page, 1, true);
                        blocks.push((page, 1));
                    }
                }
                0 | 1 => {
                    let (pages, align) = (1 + random.below(300), 1 << random.below(6));
                    let taken = match random.below(2) {
                        0 => space.take(pages, align),
                        _ => space.take_to_grow(pages, align),
                    };
                    if let Some(first) = taken {
                        assert_eq!(first % align, 0);
                        model.set(first, pages, true);
                        blocks.push((first, pages));
                    }
                }
                2 if !blocks.is_empty() => {
                    let nth = random.below(blocks.len());
                    let (first, pages) = blocks[nth];
                    let more = random.below(100);
                    let end = first + pages;
                    let is_free = end + more <= PAGES && !model.0[end..end + more].contains(&true);
                    assert_eq!(space.grow(end, more), is_free);
                    if is_free {
                        model.set(end, more, true);
                        blocks[nth].1 += more;
                    }
                }
                _ if !blocks.is_empty() => {
                    let nth = random.below(blocks.len());
                    let (first, pages) = blocks.swap_remove(nth);
                    space.give(first, pages);
                    model.set(first, pages, false);
                }
                _ => {}
            }
        }
        for (first, pages) in blocks {
            space.give(first, pages);
        }
        // Longer than a half, and so across the border.
        assert_eq!(space.take(PAGES, 1), Some(0), "seed {seed}");
    }
}

#[test]
fn large_requests_find_room_beside_many_small_blocks() {
    let mut space = Space::new(TERABYTE);
    let mut blocks: Vec<usize> = (0..100_000).map(|_| space.take(64, 1).unwrap()).collect();
    // In one piece, so that they are one mapping.
    blocks.sort_unstable();
    assert!(blocks.windows(2).all(|two| two[1] == two[0] + 64), "gaps between neighbours");
    assert!(space.take(8 * GIB, 1).is_some() && space.take(200 * GIB, 1).is_some());
    // Holes everywhere do not make a request look at each of them.
    for first in blocks.iter().step_by(2) {
        space.give(*first, 64);
    }
    let again: Vec<usize> = (0..50_000).map(|_| space.take(64, 1).unwrap()).collect();
    assert!(again.iter().all(|first| blocks.binary_search(first).is_ok()), "holes are not filled");
    let longer = space.take(65, 16).unwrap();
    assert!(longer.is_multiple_of(16) && longer > blocks[blocks.len() - 1]);
    // What is longer than either half lies across their border.
    let mut space = Space::new(TERABYTE);
    assert!(space.take(64, 1).is_some() && space.take(600 * GIB, 1).is_some());
}

#[test]
fn many_large_blocks_leave_room_for_larger_ones() {
    let mut space = Space::new(TERABYTE);
    for _ in 0..512 {
        assert!(space.take(LARGE_PAGES, 1).is_some());
    }
    assert!(space.take(64 * GIB, 1).is_some());
}

#[test]
fn room_to_grow_leaves_the_border_free() {
    // Half of it is as long as a large block with its room.
    let mut space = Space::new(8 * LARGE_PAGES);
    assert!(space.take(LARGE_PAGES, 1).is_some());
    assert!(space.take(5 * LARGE_PAGES, 1).is_some(), "longer than a half");
}

#[test]
fn a_block_that_grows_has_room_for_it() {
    let mut space = Space::new(TERABYTE);
    let first = space.take_to_grow(100, 1).unwrap();
    let others: Vec<_> = (0..1000).map(|_| space.take_to_grow(100, 1).unwrap()).collect();
    assert!(others.iter().all(|other| !(first..first + 300).contains(other)));
    assert!(space.grow(first + 100, 200));
}

#[test]
fn freed_blocks_serve_requests_of_their_length() {
    let mut space = Space::new(TERABYTE);
    let mut block = |pages: usize| {
        let first = space.take(pages, 1).unwrap();
        space.note(first, pages);
        first
    };
    let [a, b, c, long] = [100, 100, 50, 1_000].map(&mut block);
    assert_eq!(space.forget(a, 250), Some(vec![]));
    assert_eq!(space.forget(a, 250), None, "it is no block any more");
    assert_eq!(space.forget(b, 250), Some(vec![]));
    // A block that is too long goes at once, and the oldest make room for others.
    assert_eq!(space.forget(long, 250), Some(vec![(long, 1_000)]));
    assert_eq!(space.forget(c, 200), Some(vec![(a, 100)]));
    assert_eq!(space.take_kept(99, 1), None);
    assert_eq!((space.take_kept(100, 1), space.take_kept(100, 1)), (Some(b), None));
    assert_eq!(space.take_kept(50, 2 * c), None, "it is not aligned");
    // Where nothing may be kept, nothing stays.
    space.note(b, 100);
    assert_eq!(space.forget(b, 0), Some(vec![(b, 100), (c, 50)]));
    assert_eq!(space.take_kept(50, 1), None);
    space.note(b, 100);
    assert_eq!(space.forget(b, 250), Some(vec![]));
    assert_eq!((space.take_all_kept().len(), space.take_kept(100, 1)), (1, None));
}
