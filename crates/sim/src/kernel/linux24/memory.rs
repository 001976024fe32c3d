//! Physical memory: zones with watermarks, and the lists that page frames are on.
//!
//! Invariant: in each zone free + active + inactive dirty + inactive clean + unlisted + reserved
//! frames are its size; every change of a page goes through here, so that the counts always hold.

use super::groups::Kinds;
use super::runs::{Extent, ObjectId, Page, Runs, View};

/// The list of pages in use. Index into [`Runs`].
pub const ACTIVE: usize = 0;
/// Pages that may be freed once they are clean; in 2.4.13 the one inactive list.
pub const INACTIVE: usize = 1;
/// Private memory that has no place in swap yet: on no list of the kernel's.
pub const UNLISTED: usize = 2;
/// The first of the lists of pages that can be reused at once, one for each zone.
const CLEAN: usize = 3;

/// Pages in the first 16 MiB.
const DMA_PAGES: u64 = 4096;
/// Pages below 896 MiB, which the kernel can address directly.
const LOW_PAGES: u64 = 229_376;
/// By zone: size / this is the unit of its watermarks.
const BALANCE_RATIO: [u64; 3] = [32, 128, 128];
/// Bounds of that unit, in pages.
const BALANCE_BOUNDS: (u64, u64) = (10, 255);

/// Zones that an allocation may use, in order of preference: user pages can be anywhere.
pub const USER_ZONES: [usize; 3] = [2, 1, 0];

/// Zones that the kernel's own allocations may use.
pub const LOW_ZONES: [usize; 2] = [1, 0];

/// A zone's watermarks in pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Marks {
    /// Below it only the kernel's own emergencies are served.
    pub min: u64,
    /// Below it the zone is short.
    pub low: u64,
    /// Reclaim's aim.
    pub high: u64,
}

/// A zone, in pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zone {
    /// DMA, Normal, HighMem.
    pub name: &'static str,
    /// Present.
    pub size: u64,
    /// In no use.
    pub free: u64,
    /// By list: active, inactive, unlisted, clean.
    pub listed: [u64; 4],
    /// When to worry.
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

    /// Pages that can be had at once.
    pub fn available(&self) -> u64 {
        self.free + self.listed[CLEAN]
    }

    /// Pages that are free or on their way there.
    pub fn inactive(&self) -> u64 {
        self.available() + self.listed[INACTIVE]
    }

    /// Whether there is no need to clean this zone's pages.
    pub fn is_free_plenty(&self) -> bool {
        self.available() > 2 * self.marks.high
    }
}

/// What the machine has and what the kernel keeps of it, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// All memory.
    pub pages: u64,
    /// Of the first zone, taken by firmware and the kernel's image.
    pub reserved_dma: u64,
    /// Of the second, taken by page descriptors, tables and caches of the kernel.
    pub reserved_normal: u64,
}

/// Frames that an allocation got, by zone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Grant {
    /// Pages by zone.
    pub by_zone: [u64; 3],
    /// Of these, taken from the clean lists.
    pub reclaimed: u64,
}

impl Grant {
    /// Pages in all.
    pub fn pages(&self) -> u64 {
        self.by_zone.iter().sum()
    }

    /// Takes `count` of the frames, at most all, out of the grant: those of the lowest zones.
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

/// Zones and lists.
#[derive(Debug, Clone)]
pub struct Memory {
    /// DMA, Normal, HighMem.
    pub zones: [Zone; 3],
    /// All zones' [`Marks::high`] together.
    pub high: u64,
    runs: Runs,
}

impl Memory {
    /// All free but for what the kernel keeps.
    pub fn new(layout: Layout) -> Self {
        let dma = layout.pages.min(DMA_PAGES);
        let normal = layout.pages.min(LOW_PAGES) - dma;
        let zones = [
            Zone::new(0, dma, layout.reserved_dma),
            Zone::new(1, normal, layout.reserved_normal),
            Zone::new(2, layout.pages - dma - normal, 0),
        ];
        let high = zones.iter().map(|zone| zone.marks.high).sum();
        Memory { zones, high, runs: Runs::new(CLEAN + 3) }
    }

    /// All pages of the machine.
    pub fn pages(&self) -> u64 {
        self.zones.iter().map(|zone| zone.size).sum()
    }

    /// A sum over the zones.
    pub fn total(&self, of: impl Fn(&Zone) -> u64) -> u64 {
        self.zones.iter().map(of).sum()
    }

    /// Pages on a list.
    pub fn listed(&self, list: usize) -> u64 {
        self.runs.pages(list)
    }

    /// See [`Runs::tail`].
    pub fn tail(&self, list: usize) -> Option<View> {
        self.runs.tail(list)
    }

    /// See [`Runs::find`].
    pub fn find(&self, object: ObjectId, from: u32, end: u32) -> Option<View> {
        self.runs.find(object, from, end)
    }

    /// See [`Runs::rotate`].
    pub fn rotate(&mut self, list: usize, count: u32) {
        self.runs.rotate(list, count);
    }

    /// See [`Runs::pass`].
    pub fn pass(&mut self, list: usize, most: u64, kinds: Kinds) -> u64 {
        self.runs.pass(list, most, kinds)
    }

    /// Moves `count` pages of `tail`, which is the tail of its list, to the head of another or the
    /// same list, changed into `page`.
    pub fn move_tail(&mut self, tail: View, count: u32, list: usize, page: Page) {
        self.account(tail.list, tail.page.zone, |n| n - u64::from(count));
        self.runs.move_tail(tail.list, count, list, page);
        self.account(list, page.zone, |n| n + u64::from(count));
    }

    /// Moves pages from wherever they are to the head of a list.
    pub fn move_found(&mut self, found: View, list: usize, page: Page) {
        self.runs.detach(found.extent);
        self.account(found.list, found.page.zone, |n| n - u64::from(found.extent.len));
        self.put(list, found.extent, page);
    }

    /// Changes pages where they are; not their zone.
    pub fn update(&mut self, extent: Extent, change: impl Fn(&mut Page)) {
        self.runs.update(extent, change);
    }

    /// Frees pages, whatever they hold.
    pub fn release(&mut self, found: View) {
        self.runs.detach(found.extent);
        let count = u64::from(found.extent.len);
        self.account(found.list, found.page.zone, |n| n - count);
        self.zones[usize::from(found.page.zone)].free += count;
    }

    /// Frees `count` pages of `tail`.
    pub fn release_tail(&mut self, tail: View, count: u32) {
        self.runs.take(tail.list, count);
        self.account(tail.list, tail.page.zone, |n| n - u64::from(count));
        self.zones[usize::from(tail.page.zone)].free += u64::from(count);
    }

    /// Gives granted frames to pages of an object that are not resident: at the head of a list, in
    /// the order of the zones. What is left of the grant is for the next pages.
    pub fn place(&mut self, grant: &mut Grant, extent: Extent, list: usize, page: Page) {
        let (mut first, end) = (extent.first, extent.first + extent.len);
        for zone in USER_ZONES {
            let len = grant.by_zone[zone].min(u64::from(end - first)) as u32;
            grant.by_zone[zone] -= u64::from(len);
            self.put(list, Extent { first, len, ..extent }, Page { zone: zone as u8, ..page });
            first += len;
        }
        debug_assert_eq!(first, end, "no more pages than granted frames");
    }

    /// The list of a zone's pages that can be reused at once.
    pub fn clean_list(zone: u8) -> usize {
        CLEAN + usize::from(zone)
    }

    /// Takes up to `count` frames of a zone: clean pages when few frames are free, as an allocation
    /// that may wait does it; else free frames.
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

    /// Frees granted frames that were not placed.
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

    fn put(&mut self, list: usize, extent: Extent, page: Page) {
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

    fn two_gigabytes() -> Memory {
        Memory::new(Layout { pages: 524_288, reserved_dma: 1000, reserved_normal: 12_000 })
    }

    #[test]
    fn zones_have_the_published_watermarks() {
        let memory = two_gigabytes();
        let marks = memory.zones.clone().map(|zone| (zone.marks.min, zone.marks.high));
        assert_eq!(marks, [(128, 384), (255, 765), (255, 765)]);
        assert_eq!(memory.zones[2].size, 294_912);
        let small = Memory::new(Layout { pages: 4096, reserved_dma: 0, reserved_normal: 0 });
        assert_eq!(small.total(|zone| zone.size), 4096);
        assert_eq!(small.zones[2].marks, Marks::default());
    }

    #[test]
    fn frames_come_from_the_clean_list_when_few_are_free() {
        let mut memory = two_gigabytes();
        let page = Page::default();
        let mut grant = Grant::default();
        memory.grant(2, 294_912 - 255, &mut grant);
        let extent = Extent { object: ObjectId(0), first: 0, len: grant.pages() as u32 };
        memory.place(&mut grant, extent, Memory::clean_list(2), page);
        let mut second = Grant::default();
        memory.grant(2, 300, &mut second);
        assert_eq!((second.by_zone[2], second.reclaimed), (300, 300));
        assert_eq!(memory.find(ObjectId(0), 0, 1000).unwrap().extent.first, 300);
        assert_eq!((memory.zones[2].free, memory.zones[2].available()), (255, 294_912 - 300));
    }
}
