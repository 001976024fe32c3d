//! Address spaces of a paging kernel: the location of each page, and the number of its mappings.
//!
//! Invariant: a page is counted once for each place where it is mapped. A frame lists exactly the
//! translations that the hardware has of it.

use super::memory::{PageNumber, Translations};
use crate::hardware::{PageTables, SpaceId};
use crate::historic::kernel::replacement::FrameIndex;
use pagetax_core::plan::{Backing, Region, RegionId};
use std::collections::BTreeMap;

/// A mapped region in one space.
#[derive(Debug, Clone)]
pub struct ClientArea {
    /// The region's id in the plan.
    pub id: RegionId,
    /// Virtual address of the first page.
    pub base: u64,
    /// True if forked children write to the same pages.
    pub shared: bool,
    /// Pages in order of address.
    pub pages: Vec<PageNumber>,
    /// The number of locked pages, from the first on.
    pub locked_pages: usize,
}

#[derive(Debug, Clone, Default)]
struct ClientSpace {
    areas: Vec<ClientArea>,
    end: u64,
}

/// A place of a page: area and index of the page in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AreaPage {
    area: usize,
    index: usize,
}

/// All spaces, and the number of places of each page.
#[derive(Debug, Clone)]
pub struct ClientSpaces {
    page_bytes: u64,
    spaces: Vec<ClientSpace>,
    places: Vec<u32>,
}

impl ClientSpaces {
    /// Returns a table without spaces, for pages of `page_bytes`.
    pub fn new(page_bytes: u64) -> Self {
        ClientSpaces { page_bytes, spaces: Vec::new(), places: Vec::new() }
    }

    fn space_mut(&mut self, space: SpaceId) -> &mut ClientSpace {
        if self.spaces.len() <= space.0 {
            self.spaces.resize_with(space.0 + 1, ClientSpace::default);
        }
        &mut self.spaces[space.0]
    }

    /// Maps new pages after the space's last mapping, one page apart. Returns the virtual address.
    pub fn map(
        &mut self,
        space: SpaceId,
        id: RegionId,
        region: &Region,
        pages: Vec<PageNumber>,
    ) -> u64 {
        let page_bytes = self.page_bytes;
        let shared = match &region.backing {
            Backing::Anon | Backing::Remote { .. } => false,
            Backing::Shared | Backing::Memfd => true,
            Backing::File { private, .. } => !private,
        };
        let owner = self.space_mut(space);
        let base = owner.end + page_bytes;
        owner.end = base + pages.len() as u64 * page_bytes;
        pages.iter().for_each(|page| self.attach(*page));
        let area = ClientArea { id, base, shared, pages, locked_pages: 0 };
        self.space_mut(space).areas.push(area);
        base
    }

    /// Gives a new space the same areas. Returns the areas that are now copy-on-write, as (address,
    /// bytes). Locks are not inherited.
    pub fn fork(&mut self, parent: SpaceId, child: SpaceId) -> Vec<(u64, u64)> {
        let mut copy = self.space_mut(parent).clone();
        let mut private = Vec::new();
        for area in &mut copy.areas {
            area.locked_pages = 0;
            area.pages.iter().for_each(|page| self.attach(*page));
            if !area.shared {
                private.push((area.base, area.pages.len() as u64 * self.page_bytes));
            }
        }
        *self.space_mut(child) = copy;
        private
    }

    /// Removes an area. Its pages stay attached until [`ClientSpaces::detach`].
    pub fn remove(&mut self, space: SpaceId, id: RegionId) -> Option<ClientArea> {
        let areas = &mut self.space_mut(space).areas;
        let index = areas.iter().position(|area| area.id == id)?;
        Some(areas.remove(index))
    }

    /// Returns the regions that are mapped in a space.
    pub fn regions(&self, space: SpaceId) -> Vec<RegionId> {
        let areas = self.spaces.get(space.0).map(|space| space.areas.as_slice());
        areas.unwrap_or_default().iter().map(|area| area.id).collect()
    }

    /// Returns the area of a region, or None if it is not mapped.
    pub fn area_mut(&mut self, space: SpaceId, id: RegionId) -> Option<&mut ClientArea> {
        self.space_mut(space).areas.iter_mut().find(|area| area.id == id)
    }

    /// Returns the place of an address, or None if nothing is mapped there.
    pub fn find(&self, space: SpaceId, address: u64) -> Option<AreaPage> {
        let areas = &self.spaces.get(space.0)?.areas;
        areas.iter().enumerate().find_map(|(number, area)| {
            let index = (address.checked_sub(area.base)? / self.page_bytes) as usize;
            (index < area.pages.len()).then_some(AreaPage { area: number, index })
        })
    }

    /// Returns the page in a place, and true if its area is shared.
    pub fn page(&self, space: SpaceId, place: AreaPage) -> (PageNumber, bool) {
        let area = &self.spaces[space.0].areas[place.area];
        (area.pages[place.index], area.shared)
    }

    /// Replaces the page in a place. Returns the old page, and true if the place is locked.
    pub fn replace(
        &mut self,
        space: SpaceId,
        place: AreaPage,
        page: PageNumber,
    ) -> (PageNumber, bool) {
        let area = &mut self.spaces[space.0].areas[place.area];
        let old = std::mem::replace(&mut area.pages[place.index], page);
        let locked = place.index < area.locked_pages;
        self.attach(page);
        self.detach(old);
        (old, locked)
    }

    /// Returns the number of places of a page.
    pub fn places(&self, page: PageNumber) -> u32 {
        self.places[page as usize]
    }

    fn attach(&mut self, page: PageNumber) {
        if self.places.len() <= page as usize {
            self.places.resize(page as usize + 1, 0);
        }
        self.places[page as usize] += 1;
    }

    /// Removes one place from a page's count.
    pub fn detach(&mut self, page: PageNumber) {
        self.places[page as usize] -= 1;
    }
}

/// A translation: space and virtual address of the page.
type SpaceAddress = (SpaceId, u64);

/// The hardware's translations of each frame. Nearly all frames have one or none.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    first: Vec<Option<SpaceAddress>>,
    others: BTreeMap<FrameIndex, Vec<SpaceAddress>>,
}

impl Loaded {
    /// Records a translation that was loaded, perhaps not for the first time.
    pub fn add(&mut self, frame: FrameIndex, translation: SpaceAddress) {
        if self.first.len() <= frame as usize {
            self.first.resize(frame as usize + 1, None);
        }
        if *self.first[frame as usize].get_or_insert(translation) != translation {
            let others = self.others.entry(frame).or_default();
            if !others.contains(&translation) {
                others.push(translation);
            }
        }
    }

    /// Removes a translation if it was loaded. A locked page may never have been touched, so it may
    /// have none.
    pub fn remove(&mut self, frame: FrameIndex, translation: SpaceAddress) {
        if let Some(first) = self.first.get_mut(frame as usize) {
            first.take_if(|first| *first == translation);
        }
        if let Some(others) = self.others.get_mut(&frame) {
            others.retain(|other| *other != translation);
        }
    }

    fn of(&self, frame: FrameIndex) -> impl Iterator<Item = SpaceAddress> {
        let first = self.first.get(frame as usize).copied().flatten();
        let others = if self.others.is_empty() { None } else { self.others.get(&frame) };
        first.into_iter().chain(others.into_iter().flatten().copied())
    }

    fn clear(&mut self, frame: FrameIndex) {
        if let Some(first) = self.first.get_mut(frame as usize) {
            *first = None;
        }
        if !self.others.is_empty() {
            self.others.remove(&frame);
        }
    }
}

/// The hardware's translations, addressed by frame.
pub struct Mapped<'a, M> {
    /// The translations that the hardware has loaded.
    pub loaded: &'a mut Loaded,
    /// The hardware itself, by space and address.
    pub hw: &'a mut M,
    /// The size of each page, in bytes.
    pub page_bytes: u64,
}

impl<M: PageTables> Translations for Mapped<'_, M> {
    fn take_referenced(&mut self, frame: FrameIndex) -> bool {
        self.loaded.of(frame).fold(false, |referenced, (space, address)| {
            referenced | self.hw.test_and_clear_referenced(space, address).referenced
        })
    }

    fn unload(&mut self, frame: FrameIndex) -> bool {
        let dirty = self.loaded.of(frame).fold(false, |dirty, (space, address)| {
            let used = self.hw.used(space, address);
            self.hw.unload(space, address, self.page_bytes);
            dirty | used.dirty
        });
        self.loaded.clear(frame);
        dirty
    }
}
