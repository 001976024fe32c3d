//! Physical memory: zones with watermarks, and the lists that page frames are on.
//!
//! Invariant: in each zone, free, active, inactive dirty, inactive clean, unlisted and reserved
//! frames add up to its size. Every change of a page goes through this module, so that the counts
//! always hold.

use super::groups::Kinds;
use super::runs::{Extent, ObjectId, ReclaimState, RunView, Runs};

/// The list of active pages; an index into [`Runs`], like the other lists.
pub const ACTIVE: usize = 0;
/// The list of pages that may be freed once they are clean; in 2.4.13 the only inactive list.
pub const INACTIVE: usize = 1;
/// The list of private memory without a place in swap; in the kernel such pages are on no list.
pub const UNLISTED: usize = 2;
/// The first of the inactive clean lists, one per zone; their pages can be reused at once.
const CLEAN: usize = 3;

/// The number of pages in the first 16 MiB.
const DMA_PAGES: u64 = 4096;
/// The number of pages below 896 MiB, which the kernel can address directly.
const LOW_PAGES: u64 = 229_376;
/// Divisor of each zone's size that yields the unit of its watermarks.
const BALANCE_RATIO: [u64; 3] = [32, 128, 128];
/// Lower and upper bound of that unit, in pages.
const BALANCE_BOUNDS: (u64, u64) = (10, 255);

/// Zones for user pages, in order of preference: user pages can be in any zone.
pub const USER_ZONES: [usize; 3] = [2, 1, 0];

/// Zones that the kernel's own allocations may use.
pub const LOW_ZONES: [usize; 2] = [1, 0];

/// A zone's watermarks in pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Marks {
    /// Below this mark, only the kernel's emergency allocations succeed.
    pub min: u64,
    /// Below this mark, the zone is short of pages.
    pub low: u64,
    /// Target of reclaim for free pages.
    pub high: u64,
}

/// A memory zone; its counts are in pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zone {
    /// One of "DMA", "Normal" and "HighMem".
    pub name: &'static str,
    /// Pages present in the zone, used or not.
    pub size: u64,
    /// The number of free pages.
    pub free: u64,
    /// Pages on each list: active, inactive, unlisted, clean.
    pub listed: [u64; 4],
    /// Watermarks that start and end reclaim.
    pub marks: Marks,
}

impl Zone {
    fn new(index: usize, size: u64, reserved: u64) -> Self {
        let (least, most) = BALANCE_BOUNDS;
        let unit = (size / BALANCE_RATIO[index]).clamp(least, most);
        let unit = if size == 0 { 0 } else { unit };
        Zone {
            name: ["DMA", "Normal", "HighMem"][index],
            size,
            free: size.saturating_sub(reserved),
            listed: [0; 4],
            marks: Marks { min: unit, low: 2 * unit, high: 3 * unit },
        }
    }

    /// Returns the number of pages that can be allocated at once: free or inactive clean.
    pub fn available(&self) -> u64 {
        self.free + self.listed[CLEAN]
    }

    /// Returns the number of pages that are free or inactive.
    pub fn inactive(&self) -> u64 {
        self.available() + self.listed[INACTIVE]
    }

    /// Returns true if the zone has so many free pages that none of its pages needs cleaning.
    pub fn is_free_plenty(&self) -> bool {
        self.available() > 2 * self.marks.high
    }
}

/// The machine's memory and the kernel's share of it, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// All memory of the machine.
    pub pages: u64,
    /// Pages of the DMA zone that firmware and the kernel's image use.
    pub reserved_dma: u64,
    /// Pages of the Normal zone that the kernel's page descriptors, tables and caches use.
    pub reserved_normal: u64,
}

/// The frames that an allocation received, by zone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Grant {
    /// The number of pages from each zone.
    pub by_zone: [u64; 3],
    /// The number of these pages that came from the clean lists.
    pub reclaimed: u64,
}

impl Grant {
    /// Returns the number of pages in the grant.
    pub fn pages(&self) -> u64 {
        self.by_zone.iter().sum()
    }

    /// Splits `count` frames, at most all, off the grant: those of the lowest zones.
    pub fn split_off(&mut self, mut count: u64) -> Grant {
        let mut rest = Grant::default();
        for (from, to) in self.by_zone.iter_mut().zip(&mut rest.by_zone) {
            *to = count.min(*from);
            *from -= *to;
            count -= *to;
        }
        rest
    }
}

/// All zones and page lists.
#[derive(Debug, Clone)]
pub struct ZonedMemory {
    /// The zones in the order DMA, Normal, HighMem.
    pub zones: [Zone; 3],
    /// The sum of all zones' [`Marks::high`].
    pub high: u64,
    runs: Runs,
}

impl ZonedMemory {
    /// Returns memory that is free except for the kernel's reserved pages.
    pub fn new(layout: Layout) -> Self {
        let dma = layout.pages.min(DMA_PAGES);
        let normal = layout.pages.min(LOW_PAGES) - dma;
        let zones = [
            Zone::new(0, dma, layout.reserved_dma),
            Zone::new(1, normal, layout.reserved_normal),
            Zone::new(2, layout.pages - dma - normal, 0),
        ];
        let high = zones.iter().map(|zone| zone.marks.high).sum();
        ZonedMemory { zones, high, runs: Runs::new(CLEAN + 3) }
    }

    /// Returns the number of pages of the machine.
    pub fn pages(&self) -> u64 {
        self.zones.iter().map(|zone| zone.size).sum()
    }

    /// Sums a count over the zones.
    pub fn total(&self, of: impl Fn(&Zone) -> u64) -> u64 {
        self.zones.iter().map(of).sum()
    }

    /// Returns the number of pages on a list.
    pub fn listed(&self, list: usize) -> u64 {
        self.runs.pages(list)
    }

    /// Returns the pages at the tail of a list, like [`Runs::tail`].
    pub fn tail(&self, list: usize) -> Option<RunView> {
        self.runs.tail(list)
    }

    /// Finds the resident pages of an object, like [`Runs::find`].
    pub fn find(&self, object: ObjectId, from: u32, end: u32) -> Option<RunView> {
        self.runs.find(object, from, end)
    }

    /// Moves pages from the tail to the head, like [`Runs::rotate`].
    pub fn rotate(&mut self, list: usize, count: u32) {
        self.runs.rotate(list, count);
    }

    /// Moves pages of some kinds from the tail to the head, like [`Runs::pass`].
    pub fn pass(&mut self, list: usize, most: u64, kinds: Kinds) -> u64 {
        self.runs.pass(list, most, kinds)
    }

    /// Moves `count` pages of `tail`, the tail of its list, to the head of `list`, and sets their
    /// state to `page`. `list` may be the same list.
    pub fn move_tail(&mut self, tail: RunView, count: u32, list: usize, page: ReclaimState) {
        self.account(tail.list, tail.page.zone, |n| n - u64::from(count));
        self.runs.move_tail(tail.list, count, list, page);
        self.account(list, page.zone, |n| n + u64::from(count));
    }

    /// Moves pages from anywhere on their list to the head of `list`, and sets their state to
    /// `page`.
    pub fn move_found(&mut self, found: RunView, list: usize, page: ReclaimState) {
        self.runs.detach(found.extent);
        self.account(found.list, found.page.zone, |n| n - u64::from(found.extent.len));
        self.put(list, found.extent, page);
    }

    /// Changes the state of pages in place. `change` must not change their zone.
    pub fn update(&mut self, extent: Extent, change: impl Fn(&mut ReclaimState)) {
        self.runs.update(extent, change);
    }

    /// Frees pages, even if they are dirty or mapped.
    pub fn release(&mut self, found: RunView) {
        self.runs.detach(found.extent);
        let count = u64::from(found.extent.len);
        self.account(found.list, found.page.zone, |n| n - count);
        self.zones[usize::from(found.page.zone)].free += count;
    }

    /// Frees `count` pages of `tail`, the tail of its list.
    pub fn release_tail(&mut self, tail: RunView, count: u32) {
        self.runs.take(tail.list, count);
        self.account(tail.list, tail.page.zone, |n| n - u64::from(count));
        self.zones[usize::from(tail.page.zone)].free += u64::from(count);
    }

    /// Gives granted frames to pages of an object that are not resident, at the head of a list.
    /// HighMem frames come first. Frames that are left over stay in the grant.
    pub fn place(&mut self, grant: &mut Grant, extent: Extent, list: usize, page: ReclaimState) {
        let (mut first, end) = (extent.first, extent.first + extent.len);
        for zone in USER_ZONES {
            let len = grant.by_zone[zone].min(u64::from(end - first)) as u32;
            grant.by_zone[zone] -= u64::from(len);
            self.put(
                list,
                Extent { first, len, ..extent },
                ReclaimState { zone: zone as u8, ..page },
            );
            first += len;
        }
        debug_assert_eq!(first, end, "no more pages than granted frames");
    }

    /// Returns the index of a zone's inactive clean list.
    pub fn clean_list(zone: u8) -> usize {
        CLEAN + usize::from(zone)
    }

    /// Takes up to `count` frames of a zone. If few frames are free, it takes clean pages, as an
    /// allocation does that may wait. Otherwise it takes free frames.
    pub fn grant(&mut self, zone: usize, count: u64, grant: &mut Grant) {
        let Zone { free, marks, .. } = self.zones[zone];
        let spare = (free + 1).saturating_sub(marks.min + 8).min(count);
        let from_clean = self.zones[zone].listed[CLEAN].min(count - spare);
        let from_free = (count - from_clean).min(free);
        self.zones[zone].free -= from_free;
        self.evict_clean(zone, from_clean);
        grant.by_zone[zone] += from_free + from_clean;
        grant.reclaimed += from_clean;
    }

    /// Returns granted frames that were not placed to the free pages.
    pub fn give_back(&mut self, grant: Grant) {
        self.zones.iter_mut().zip(grant.by_zone).for_each(|(zone, pages)| zone.free += pages);
    }

    fn evict_clean(&mut self, zone: usize, mut count: u64) {
        let list = Self::clean_list(zone as u8);
        self.account(list, zone as u8, |n| n - count);
        while count > 0 {
            let tail = self.runs.tail(list).expect("the zone's count says there are clean pages");
            let len = u64::from(tail.extent.len).min(count);
            self.runs.take(list, len as u32);
            count -= len;
        }
    }

    fn put(&mut self, list: usize, extent: Extent, page: ReclaimState) {
        self.runs.insert(list, extent, page);
        self.account(list, page.zone, |n| n + u64::from(extent.len));
    }

    fn account(&mut self, list: usize, zone: u8, change: impl Fn(u64) -> u64) {
        let count = &mut self.zones[usize::from(zone)].listed[list.min(CLEAN)];
        *count = change(*count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_gigabytes() -> ZonedMemory {
        ZonedMemory::new(Layout { pages: 524_288, reserved_dma: 1000, reserved_normal: 12_000 })
    }

    #[test]
    fn zones_have_the_published_watermarks() {
        let memory = two_gigabytes();
        let marks = memory.zones.clone().map(|zone| (zone.marks.min, zone.marks.high));
        assert_eq!(marks, [(128, 384), (255, 765), (255, 765)]);
        assert_eq!(memory.zones[2].size, 294_912);
        let small = ZonedMemory::new(Layout { pages: 4096, reserved_dma: 0, reserved_normal: 0 });
        assert_eq!(small.total(|zone| zone.size), 4096);
        assert_eq!(small.zones[2].marks, Marks::default());
    }

    #[test]
    fn frames_come_from_the_clean_list_when_few_are_free() {
        let mut memory = two_gigabytes();
        let page = ReclaimState::default();
        let mut grant = Grant::default();
        memory.grant(2, 294_912 - 255, &mut grant);
        let extent = Extent { object: ObjectId(0), first: 0, len: grant.pages() as u32 };
        memory.place(&mut grant, extent, ZonedMemory::clean_list(2), page);
        let mut second = Grant::default();
        memory.grant(2, 300, &mut second);
        assert_eq!((second.by_zone[2], second.reclaimed), (300, 300));
        assert_eq!(memory.find(ObjectId(0), 0, 1000).unwrap().extent.first, 300);
        assert_eq!((memory.zones[2].free, memory.zones[2].available()), (255, 294_912 - 300));
    }
}
