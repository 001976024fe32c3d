//! Address spaces: the regions in each, and the objects that their pages come from.
//!
//! A mapping has layers. A private mapping's own pages are on top; below are the objects that it
//! was copied from (a file, the parent of a fork). A page comes from the first layer that has it.

use super::runs::ObjectId;
use pagetax_core::plan::{Backing, RegionId};
use std::collections::BTreeMap;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Address space of a process in bytes; the rest of 4 GiB is the kernel's.
pub const SPACE_BYTES: u64 = 3 << 30;
/// Alignment of mappings in bytes.
const ALIGN: u64 = 1 << 20;

/// The source of an object's pages that are not resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    /// Pages are read from the file.
    File,
    /// Pages are zeros, or in swap.
    ZonedMemory,
}

/// The contents behind mappings: a file, or memory.
#[derive(Debug, Clone)]
pub struct Object {
    /// The source of absent pages.
    pub kind: ObjectKind,
    /// The number of mappings that have the object among their layers.
    pub mappings: u32,
    swapped: Vec<u64>,
}

impl Object {
    /// Returns true if the page has a place in swap.
    pub fn is_swapped(&self, page: u32) -> bool {
        self.swapped.get(page as usize / 64).is_some_and(|word| word & (1 << (page % 64)) != 0)
    }

    /// Returns the first page in `page..end` that has a place in swap.
    pub fn swapped_from(&self, page: u32, end: u32) -> Option<u32> {
        let end = end.min(self.swapped.len() as u32 * 64);
        (page..end).find(|page| self.is_swapped(*page))
    }

    /// Gives the page a place in swap. Returns true if it had none.
    pub fn set_swapped(&mut self, page: u32) -> bool {
        let (word, bit) = (page as usize / 64, 1 << (page % 64));
        if self.swapped.len() <= word {
            self.swapped.resize(word + 1, 0);
        }
        let new = self.swapped[word] & bit == 0;
        self.swapped[word] |= bit;
        new
    }

    /// Frees the swap places of `count` pages from `first` on. Returns how many had one.
    pub fn clear_swapped(&mut self, first: u32, count: u32) -> u64 {
        let mut cleared = 0;
        for page in first..first + count {
            if self.is_swapped(page) {
                self.swapped[page as usize / 64] &= !(1 << (page % 64));
                cleared += 1;
            }
        }
        cleared
    }

    /// Frees all swap places and returns their number.
    pub fn forget_swap(&mut self) -> u64 {
        let pages = self.swapped.iter().map(|word| u64::from(word.count_ones())).sum();
        self.swapped.clear();
        pages
    }
}

/// A region in a space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmArea {
    /// Virtual address of the first page.
    pub base: u64,
    /// Length of the mapping in pages.
    pub pages: u32,
    /// Layers from top to bottom; at least one.
    pub layers: Vec<ObjectId>,
    /// True if stores go to the top layer only.
    pub private: bool,
    /// The number of locked pages, from the start on.
    pub locked: u32,
}

/// The mappings of a process.
#[derive(Debug, Clone, Default)]
pub struct ProcessSpace {
    /// The space's mappings by region.
    pub mappings: BTreeMap<RegionId, VmArea>,
    /// The number of pages in the process's page tables.
    pub resident: u64,
    /// The address at which swap-out continues.
    pub cursor: u64,
}

impl ProcessSpace {
    /// Returns the address of the lowest gap of `pages` pages.
    fn gap(&self, pages: u32) -> Option<u64> {
        let mut taken: Vec<_> = self.mappings.values().map(|m| (m.base, m.pages)).collect();
        taken.sort_unstable();
        let (mut base, bytes) = (ALIGN, u64::from(pages) * PAGE);
        for (other, pages) in taken {
            if base + bytes <= other {
                break;
            }
            base = (other + u64::from(pages) * PAGE).next_multiple_of(ALIGN);
        }
        (base + bytes <= SPACE_BYTES).then_some(base)
    }

    /// Returns the region at an address and the page's index in it.
    pub fn at(&self, address: u64) -> Option<(RegionId, u32)> {
        self.mappings.iter().find_map(|(id, mapping)| {
            let page = address.checked_sub(mapping.base)? / PAGE;
            (page < u64::from(mapping.pages)).then_some((*id, page as u32))
        })
    }
}

/// All spaces and objects.
#[derive(Debug, Clone, Default)]
pub struct ProcessSpaces {
    /// Spaces by the engine's number.
    pub spaces: Vec<ProcessSpace>,
    objects: Vec<Object>,
    shared: BTreeMap<RegionId, ObjectId>,
}

impl ProcessSpaces {
    /// Returns the space of this number, and creates it empty if necessary.
    pub fn space_mut(&mut self, space: usize) -> &mut ProcessSpace {
        if self.spaces.len() <= space {
            self.spaces.resize_with(space + 1, ProcessSpace::default);
        }
        &mut self.spaces[space]
    }

    /// Returns an object. The id must come from [`ProcessSpaces::create`].
    pub fn object(&self, id: ObjectId) -> &Object {
        &self.objects[id.0 as usize]
    }

    /// Returns an object for changes. The id must come from [`ProcessSpaces::create`].
    pub fn object_mut(&mut self, id: ObjectId) -> &mut Object {
        &mut self.objects[id.0 as usize]
    }

    /// Creates an object without pages.
    pub fn create(&mut self, kind: ObjectKind) -> ObjectId {
        self.objects.push(Object { kind, mappings: 0, swapped: Vec::new() });
        ObjectId((self.objects.len() - 1) as u32)
    }

    /// Maps a region at the lowest gap and returns its address, or None if no gap is large enough.
    pub fn map(
        &mut self,
        space: usize,
        id: RegionId,
        backing: &Backing,
        bytes: u64,
    ) -> Option<u64> {
        let pages = bytes.div_ceil(PAGE) as u32;
        let base = self.space_mut(space).gap(pages)?;
        let anonymous = backing.is_anonymous();
        let private = anonymous || matches!(backing, Backing::File { private: true, .. });
        let mut layers = Vec::new();
        if private {
            layers.push(self.create(ObjectKind::ZonedMemory));
        }
        if !anonymous {
            layers.push(self.shared_object(id, backing));
        }
        layers.iter().for_each(|layer| self.object_mut(*layer).mappings += 1);
        let mapping = VmArea { base, pages, layers, private, locked: 0 };
        self.space_mut(space).mappings.insert(id, mapping);
        Some(base)
    }

    fn shared_object(&mut self, id: RegionId, backing: &Backing) -> ObjectId {
        if let Some(object) = self.shared.get(&id) {
            return *object;
        }
        let kind = if matches!(backing, Backing::File { .. }) {
            ObjectKind::File
        } else {
            ObjectKind::ZonedMemory
        };
        let object = self.create(kind);
        self.shared.insert(id, object);
        object
    }

    /// Copies the mappings of a space. Private ones get a new top layer of their own.
    pub fn fork(&mut self, parent: usize, child: usize) {
        let mut copy = self.space_mut(parent).clone();
        for mapping in copy.mappings.values_mut() {
            if mapping.private {
                mapping.layers.insert(0, self.create(ObjectKind::ZonedMemory));
            }
            mapping.locked = 0;
            mapping.layers.iter().for_each(|layer| self.object_mut(*layer).mappings += 1);
        }
        (copy.resident, copy.cursor) = (0, 0);
        *self.space_mut(child) = copy;
    }

    /// Returns the places where an object is mapped: space, and address of its first page.
    pub fn mapped_at(&self, object: ObjectId) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.spaces.iter().enumerate().flat_map(move |(number, space)| {
            let has = move |mapping: &&VmArea| mapping.layers.contains(&object);
            space.mappings.values().filter(has).map(move |mapping| (number, mapping.base))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Backing = Backing::File { directory: None, private: true };

    #[test]
    fn gaps_are_used_again() {
        let mut spaces = ProcessSpaces::default();
        let map =
            |spaces: &mut ProcessSpaces, id| spaces.map(0, RegionId(id), &Backing::Anon, 1 << 30);
        assert_eq!(map(&mut spaces, 0), Some(ALIGN));
        assert_eq!(map(&mut spaces, 1), Some(ALIGN + (1 << 30)));
        assert_eq!(map(&mut spaces, 2), None);
        spaces.spaces[0].mappings.remove(&RegionId(0));
        assert_eq!(map(&mut spaces, 3), Some(ALIGN));
        assert_eq!(spaces.spaces[0].at(ALIGN + 5 * PAGE + 1), Some((RegionId(3), 5)));
        assert_eq!(spaces.spaces[0].at(0), None);
    }

    #[test]
    fn a_fork_puts_a_layer_on_private_mappings() {
        let mut spaces = ProcessSpaces::default();
        spaces.map(0, RegionId(0), &FILE, PAGE);
        spaces.map(0, RegionId(1), &Backing::Shared, PAGE);
        spaces.fork(0, 1);
        let layers = |space: usize, id| spaces.spaces[space].mappings[&RegionId(id)].layers.clone();
        assert_eq!(layers(1, 0)[1..], layers(0, 0)[..]);
        assert_eq!(layers(1, 1), layers(0, 1));
        assert_eq!(spaces.object(layers(0, 0)[1]).mappings, 2);
        assert_eq!(spaces.mapped_at(layers(0, 0)[0]).count(), 2);
    }

    #[test]
    fn places_in_swap_are_counted_once() {
        let mut spaces = ProcessSpaces::default();
        let id = spaces.create(ObjectKind::ZonedMemory);
        let object = spaces.object_mut(id);
        assert!(object.set_swapped(70) && !object.set_swapped(70) && object.is_swapped(70));
        assert_eq!((object.clear_swapped(60, 20), object.clear_swapped(60, 20)), (1, 0));
        assert!(object.set_swapped(70));
        assert!(!object.is_swapped(6) && object.forget_swap() == 1 && !object.is_swapped(70));
    }
}
