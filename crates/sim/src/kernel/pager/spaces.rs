//! Address spaces of a paging kernel: which page is where, and who else has it.
//!
//! Invariant: a page lists exactly the places where it is mapped.

use super::memory::{Page, Translations};
use crate::mmu::{PageTables, SpaceId};
use pagetax_core::plan::{Backing, Region, RegionId};

/// A mapped region in one space.
#[derive(Debug, Clone)]
pub struct Area {
    /// Which region.
    pub id: RegionId,
    /// Virtual address.
    pub base: u64,
    /// Whether forked children write to the same pages.
    pub shared: bool,
    /// In the order of addresses.
    pub pages: Vec<Page>,
    /// How many of them, from the first on, are locked.
    pub locked_pages: usize,
}

#[derive(Debug, Clone, Default)]
struct Space {
    areas: Vec<Area>,
    end: u64,
}

/// A place of a page: area and index of the page in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    area: usize,
    index: usize,
}

/// All spaces, and where each page is mapped.
#[derive(Debug, Clone)]
pub struct Spaces {
    page_bytes: u64,
    spaces: Vec<Space>,
    mappings: Vec<Vec<(SpaceId, u64)>>,
}

impl Spaces {
    /// No spaces yet.
    pub fn new(page_bytes: u64) -> Self {
        Spaces { page_bytes, spaces: Vec::new(), mappings: Vec::new() }
    }

    fn space_mut(&mut self, space: SpaceId) -> &mut Space {
        if self.spaces.len() <= space.0 {
            self.spaces.resize_with(space.0 + 1, Space::default);
        }
        &mut self.spaces[space.0]
    }

    /// Maps new pages behind what is mapped already, a page apart; returns the virtual address.
    pub fn map(&mut self, space: SpaceId, id: RegionId, region: &Region, pages: Vec<Page>) -> u64 {
        let page_bytes = self.page_bytes;
        let shared = match &region.backing {
            Backing::Anon => false,
            Backing::Shared | Backing::Memfd => true,
            Backing::File { private, .. } => !private,
        };
        let owner = self.space_mut(space);
        let base = owner.end + page_bytes;
        owner.end = base + pages.len() as u64 * page_bytes;
        for (index, page) in pages.iter().enumerate() {
            self.attach(*page, space, base + index as u64 * page_bytes);
        }
        let area = Area { id, base, shared, pages, locked_pages: 0 };
        self.space_mut(space).areas.push(area);
        base
    }

    /// Gives a new space the same areas; returns those that are copy-on-write from now on, as
    /// (address, bytes). Locks are not inherited.
    pub fn fork(&mut self, parent: SpaceId, child: SpaceId) -> Vec<(u64, u64)> {
        let mut copy = self.space_mut(parent).clone();
        let mut private = Vec::new();
        for area in &mut copy.areas {
            area.locked_pages = 0;
            for (index, page) in area.pages.iter().enumerate() {
                self.attach(*page, child, area.base + index as u64 * self.page_bytes);
            }
            if !area.shared {
                private.push((area.base, area.pages.len() as u64 * self.page_bytes));
            }
        }
        *self.space_mut(child) = copy;
        private
    }

    /// Removes an area; its pages are still attached.
    pub fn remove(&mut self, space: SpaceId, id: RegionId) -> Option<Area> {
        let areas = &mut self.space_mut(space).areas;
        let index = areas.iter().position(|area| area.id == id)?;
        Some(areas.remove(index))
    }

    /// The regions that are mapped in a space.
    pub fn regions(&self, space: SpaceId) -> Vec<RegionId> {
        let areas = self.spaces.get(space.0).map(|space| space.areas.as_slice());
        areas.unwrap_or_default().iter().map(|area| area.id).collect()
    }

    /// The area of a region.
    pub fn area_mut(&mut self, space: SpaceId, id: RegionId) -> Option<&mut Area> {
        self.space_mut(space).areas.iter_mut().find(|area| area.id == id)
    }

    /// Which place an address is in.
    pub fn find(&self, space: SpaceId, address: u64) -> Option<Place> {
        let areas = &self.spaces.get(space.0)?.areas;
        areas.iter().enumerate().find_map(|(number, area)| {
            let index = (address.checked_sub(area.base)? / self.page_bytes) as usize;
            (index < area.pages.len()).then_some(Place { area: number, index })
        })
    }

    /// The page in a place, and whether its area is shared.
    pub fn page(&self, space: SpaceId, place: Place) -> (Page, bool) {
        let area = &self.spaces[space.0].areas[place.area];
        (area.pages[place.index], area.shared)
    }

    /// Puts another page in a place. Returns the page that was there, and whether it was locked.
    pub fn replace(&mut self, space: SpaceId, place: Place, page: Page) -> (Page, bool) {
        let area = &mut self.spaces[space.0].areas[place.area];
        let address = area.base + place.index as u64 * self.page_bytes;
        let old = std::mem::replace(&mut area.pages[place.index], page);
        let locked = place.index < area.locked_pages;
        self.attach(page, space, address);
        self.detach(old, space, address);
        (old, locked)
    }

    fn mappings(&self, page: Page) -> &[(SpaceId, u64)] {
        self.mappings.get(page as usize).map_or(&[], Vec::as_slice)
    }

    /// How many places a page has.
    pub fn places(&self, page: Page) -> usize {
        self.mappings(page).len()
    }

    fn attach(&mut self, page: Page, space: SpaceId, address: u64) {
        if self.mappings.len() <= page as usize {
            self.mappings.resize_with(page as usize + 1, Vec::new);
        }
        self.mappings[page as usize].push((space, address));
    }

    /// A page leaves a place.
    pub fn detach(&mut self, page: Page, space: SpaceId, address: u64) {
        self.mappings[page as usize].retain(|place| *place != (space, address));
    }
}

/// The hardware seen by pages.
pub struct Mapped<'a, M> {
    /// Where pages are mapped.
    pub spaces: &'a Spaces,
    /// The hardware.
    pub hw: &'a mut M,
}

impl<M: PageTables> Translations for Mapped<'_, M> {
    fn take_referenced(&mut self, page: Page) -> bool {
        let places = self.spaces.mappings(page).iter();
        places.fold(false, |referenced, (space, address)| {
            referenced | self.hw.test_and_clear_referenced(*space, *address).referenced
        })
    }

    fn unload(&mut self, page: Page) -> bool {
        let places = self.spaces.mappings(page).iter();
        places.fold(false, |dirty, (space, address)| {
            let used = self.hw.used(*space, *address);
            self.hw.unload(*space, *address, self.spaces.page_bytes);
            dirty | (used.present && used.dirty)
        })
    }
}
