//! The allocator of the region's pages. Pure: it touches no memory.
//!
//! Invariants: no page is allocated twice, and free ranges are never adjacent, except at the border
//! of the halves.
//!
//! The second half of the addresses is for large requests, so that many small blocks never leave a
//! large one without room. Blocks lie side by side, in the smallest free range that fits. The
//! kernel keeps one mapping for neighbours of the same protection, and limits the mappings of a
//! process (`vm.max_map_count`). A block that grows may ask for free pages behind it
//! ([`Space::take_to_grow`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// The free ranges of one half, by length and first page.
type ByLength = BTreeSet<(usize, usize)>;

/// The free pages, and the blocks of malloc.
#[derive(Debug)]
pub struct Space {
    pages: usize,
    /// The first page of the second half.
    half: usize,
    /// Lengths of the free ranges, by first page.
    free: BTreeMap<usize, usize>,
    by_length: [ByLength; 2],
    /// The lengths of malloc's blocks, by first page.
    allocations: BTreeMap<usize, usize>,
    /// The freed blocks of malloc that still have their pages, the oldest first: first page and length.
    kept: VecDeque<(usize, usize)>,
    kept_pages: usize,
}

/// Requests of this many pages and more are large. They begin at multiples of it, as allocators want, and as
/// the region itself does.
pub const LARGE_PAGES: usize = pagetax_remote::pager::REGION_ALIGN_PAGES;

/// The free pages behind a block that may grow, in multiples of its length.
const ROOM_TO_GROW: usize = 3;

/// The number of ranges that are tried although they are barely long enough. In most of them,
/// alignment leaves too little.
const TIGHT_FITS_MAX: usize = 8;

impl Space {
    /// Creates an allocator of which all pages are free.
    pub fn new(pages: usize) -> Space {
        let (free, allocations) = (BTreeMap::new(), BTreeMap::new());
        let half = pages / 2;
        let (by_length, kept) = Default::default();
        let mut space = Space { pages, half, free, by_length, allocations, kept, kept_pages: 0 };
        space.insert(0..half);
        space.insert(half..pages);
        space
    }

    /// Allocates this many pages; the first page number is a multiple of `align`.
    pub fn take(&mut self, pages: usize, align: usize) -> Option<usize> {
        let room = if pages >= LARGE_PAGES { pages.saturating_mul(ROOM_TO_GROW) } else { 0 };
        self.take_with_room(pages, align, room, usize::from(pages >= LARGE_PAGES))
    }

    /// Allocates as [`Self::take`] does, with free pages behind the block. Other requests may take
    /// those when nothing else is free.
    pub fn take_to_grow(&mut self, pages: usize, align: usize) -> Option<usize> {
        self.take_with_room(pages, align, pages.saturating_mul(ROOM_TO_GROW), 1)
    }

    fn take_with_room(
        &mut self,
        pages: usize,
        align: usize,
        room: usize,
        half: usize,
    ) -> Option<usize> {
        let align = if pages >= LARGE_PAGES { align.max(LARGE_PAGES) } else { align.max(1) };
        let with_room = pages.saturating_add(room);
        // Room that takes most of a range would leave none for a large request.
        let roomy = if room > 0 { with_room.saturating_mul(2) } else { pages };
        let tries = [(half, with_room, roomy), (half, pages, pages), (1 - half, pages, pages)];
        let at = tries.into_iter().find_map(|(half, pages, len)| self.fit(half, pages, align, len));
        let at = at.or_else(|| self.fit_across(pages, align))?;
        self.take_at(at, pages).then_some(at)
    }

    /// Finds room in the shortest range that fits and has at least `len_min` pages: at its start in the first
    /// half, at its end in the second. So the free pages around the border stay in one piece.
    fn fit(&self, half: usize, pages: usize, align: usize, len_min: usize) -> Option<usize> {
        let place = |(len, first): &(usize, usize)| {
            let (first, end) = (*first, first + len);
            let at = match half {
                0 => first.checked_next_multiple_of(align)?,
                _ => end.checked_sub(pages)? / align * align,
            };
            (at >= first && at.checked_add(pages)? <= end).then_some(at)
        };
        let ranges = &self.by_length[half];
        let tight = ranges.range((len_min, 0)..).take(TIGHT_FITS_MAX).find_map(place);
        tight.or_else(|| {
            let enough = pages.checked_add(align)?.max(len_min);
            ranges.range((enough, 0)..).next().and_then(place)
        })
    }

    /// Finds room across the border of the halves, for a request that is too long for either.
    fn fit_across(&self, pages: usize, align: usize) -> Option<usize> {
        let (&first, &len) = self.free.range(..self.half).next_back()?;
        let behind = *self.free.get(&self.half)?;
        let end = if first + len == self.half { self.half + behind } else { return None };
        let at = end.checked_sub(pages)? / align * align;
        (at >= first).then_some(at)
    }

    /// Allocates exactly this range, if all of it is free.
    fn take_at(&mut self, at: usize, pages: usize) -> bool {
        let Some(end) = at.checked_add(pages) else { return false };
        let parts = self.at_border(at..end);
        let free = parts.iter().all(|part| self.free_around(part).is_some());
        if free {
            parts.into_iter().for_each(|part| self.carve(part));
        }
        free
    }

    /// Allocates the free parts of a range whose address the program chose.
    pub fn claim(&mut self, first: usize, pages: usize) {
        let end = first + pages;
        while let Some((&at, &len)) = self.free.range(..end).next_back() {
            let part = at.max(first)..(at + len).min(end);
            if part.is_empty() {
                break;
            }
            self.carve(part);
        }
    }

    /// Splits a range at the border of the halves.
    fn at_border(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let parts = [range.start..range.end.min(self.half), range.start.max(self.half)..range.end];
        parts.into_iter().filter(|part| !part.is_empty()).collect()
    }

    /// Returns the free range that contains a range.
    fn free_around(&self, range: &Range<usize>) -> Option<Range<usize>> {
        let (&first, &len) = self.free.range(..=range.start).next_back()?;
        (range.end <= first + len).then_some(first..first + len)
    }

    fn carve(&mut self, range: Range<usize>) {
        let Some(free) = self.free_around(&range) else { return };
        self.remove(&free);
        self.insert(free.start..range.start);
        self.insert(range.end..free.end);
    }

    fn insert(&mut self, range: Range<usize>) {
        if !range.is_empty() {
            self.free.insert(range.start, range.len());
            self.by_length[self.half_of(range.start)].insert((range.len(), range.start));
        }
    }

    fn remove(&mut self, range: &Range<usize>) {
        self.free.remove(&range.start);
        self.by_length[self.half_of(range.start)].remove(&(range.len(), range.start));
    }

    fn half_of(&self, page: usize) -> usize {
        usize::from(page >= self.half)
    }

    /// Extends a range in place, if the pages behind it are free.
    pub fn grow(&mut self, end: usize, pages: usize) -> bool {
        pages == 0 || self.take_at(end, pages)
    }

    /// Frees a range. Parts that are free already stay free.
    pub fn give(&mut self, first: usize, pages: usize) {
        for part in self.at_border(first..first + pages) {
            self.give_part(part);
        }
    }

    /// Joins a range with all free ones of its half that touch or overlap it.
    fn give_part(&mut self, mut range: Range<usize>) {
        let limit = if range.start < self.half { 0..self.half } else { self.half..self.pages };
        while let Some((&at, &len)) =
            self.free.range(limit.start..limit.end.min(range.end + 1)).next_back()
        {
            if at + len < range.start {
                break;
            }
            self.remove(&(at..at + len));
            range = range.start.min(at)..range.end.max(at + len);
        }
        self.insert(range);
    }

    /// Records a block of malloc.
    pub fn note(&mut self, first: usize, pages: usize) {
        self.allocations.insert(first, pages);
    }

    /// Returns the length in pages of malloc's block that begins here.
    pub fn noted(&self, first: usize) -> Option<usize> {
        self.allocations.get(&first).copied()
    }

    /// Removes the record of a block of malloc, and keeps the block for [`Self::take_kept`]: most programs
    /// soon ask for the same length again. Returns the kept blocks beyond `kept_max` pages, which the caller
    /// frees. None if no block begins here.
    pub fn forget(&mut self, first: usize, kept_max: usize) -> Option<Vec<(usize, usize)>> {
        let pages = self.allocations.remove(&first)?;
        self.kept.push_back((first, pages));
        self.kept_pages += pages;
        let mut freed = Vec::new();
        // A block that is too long itself leaves the others alone.
        while self.kept_pages > kept_max {
            let oldest =
                if pages > kept_max { self.kept.pop_back() } else { self.kept.pop_front() };
            let Some(block) = oldest else { break };
            self.kept_pages -= block.1;
            freed.push(block);
        }
        Some(freed)
    }

    /// Takes all kept blocks, for the caller to free.
    pub fn take_all_kept(&mut self) -> VecDeque<(usize, usize)> {
        self.kept_pages = 0;
        std::mem::take(&mut self.kept)
    }

    /// Takes the latest of the kept blocks that has this length and alignment.
    pub fn take_kept(&mut self, pages: usize, align: usize) -> Option<usize> {
        let fits =
            |block: &(usize, usize)| block.1 == pages && block.0.is_multiple_of(align.max(1));
        let at = self.kept.iter().rposition(fits)?;
        self.kept_pages -= pages;
        self.kept.remove(at).map(|(first, _)| first)
    }
}
