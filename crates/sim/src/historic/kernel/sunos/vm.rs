//! The resident pages of each mapping, and the space that owns each.
//!
//! Invariant: a page frame is counted once, for the private page or the object page that it holds.
//! Pages that become common by a fork stay counted for the parent. A store to a common page makes a
//! copy for the writer.

use super::bits::PageSet;
use crate::hardware::SpaceId;
use pagetax_core::plan::{Backing, Region, RegionId};

/// A mapped region in a space.
#[derive(Debug, Clone)]
pub struct SegmentMapping {
    /// Virtual address of the first page.
    pub base: u64,
    /// Length of the mapping in pages.
    pub pages: u64,
    kind: SegmentKind,
    /// Private pages that no other space sees.
    own: PageSet,
    /// Private pages that a fork has made common.
    common: PageSet,
    /// Common pages that this space faulted in, so their frames count for it.
    lent: PageSet,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SegmentKind {
    Anon,
    Shared,
    PrivateFile,
    SharedFile,
}

/// The work that lets an access to a page succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provision {
    /// The page is already present.
    Present,
    /// A new page of zeros has been made present.
    Zeroed,
    /// A private copy has been made present.
    Copied,
    /// The page and those after it, so many in all, have to be read from their file.
    Read(u64),
}

/// Present pages of a 64-page window, one bit each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Present {
    /// Pages that loads find present.
    pub read: u64,
    /// Pages that stores find present.
    pub write: u64,
}

impl Present {
    /// Returns the pages that stores (`writes`) or loads find present.
    #[inline(always)]
    pub fn to(self, writes: bool) -> u64 {
        if writes { self.write } else { self.read }
    }
}

/// The mappings of all spaces.
#[derive(Debug, Clone, Default)]
pub struct Vm {
    /// Mappings by space and region.
    spaces: Vec<Vec<Option<SegmentMapping>>>,
    /// Resident pages of shared memory and files, by region.
    objects: Vec<Option<PageSet>>,
    frames: u64,
    children: u64,
}

impl Vm {
    /// Returns the number of page frames in use.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Makes room for a space's mappings.
    pub fn add_space(&mut self, space: SpaceId) {
        self.spaces.resize_with(self.spaces.len().max(space.0 + 1), Vec::new);
    }

    /// Returns the mapping of a region, or None if it is not mapped.
    pub fn mapping(&self, space: SpaceId, id: RegionId) -> Option<&SegmentMapping> {
        self.spaces.get(space.0)?.get(id.0)?.as_ref()
    }

    /// Returns the region whose mapping starts at this address.
    pub fn region_at(&self, space: SpaceId, base: u64) -> Option<RegionId> {
        let at =
            |mapping: &Option<SegmentMapping>| mapping.as_ref().is_some_and(|m| m.base == base);
        self.spaces.get(space.0)?.iter().position(at).map(RegionId)
    }

    /// Returns the regions of a space and their addresses.
    pub fn regions(&self, space: SpaceId) -> impl Iterator<Item = (RegionId, u64)> {
        let regions = self.spaces[space.0].iter().enumerate();
        regions.filter_map(|(id, mapping)| Some((RegionId(id), mapping.as_ref()?.base)))
    }

    /// Returns the lowest multiple of `align` in `start..end` with a gap of `bytes`, or None if
    /// there is none.
    pub fn place(
        &self,
        space: SpaceId,
        bytes: u64,
        align: u64,
        start: u64,
        end: u64,
        page_bytes: u64,
    ) -> Option<u64> {
        let mut taken: Vec<_> = self.spaces[space.0]
            .iter()
            .flatten()
            .map(|m| (m.base, m.base + m.pages * page_bytes))
            .collect();
        taken.sort_unstable();
        let mut base = start.next_multiple_of(align);
        for (from, to) in taken {
            if base + bytes <= from {
                break;
            }
            base = base.max(to.next_multiple_of(align));
        }
        (base + bytes <= end).then_some(base)
    }

    /// Maps a region at `base`; none of its private pages is resident yet.
    pub fn map(&mut self, space: SpaceId, id: RegionId, region: &Region, base: u64, pages: u64) {
        let kind = match region.backing {
            Backing::Anon | Backing::Remote { .. } => SegmentKind::Anon,
            Backing::Shared | Backing::Memfd => SegmentKind::Shared,
            Backing::File { private: true, .. } => SegmentKind::PrivateFile,
            Backing::File { private: false, .. } => SegmentKind::SharedFile,
        };
        if kind != SegmentKind::Anon {
            self.objects.resize_with(self.objects.len().max(id.0 + 1), || None);
            self.objects[id.0].get_or_insert_with(|| PageSet::new(pages));
        }
        let none = || PageSet::new(pages);
        let mapping =
            SegmentMapping { base, pages, kind, own: none(), common: none(), lent: none() };
        let mappings = &mut self.spaces[space.0];
        mappings.resize_with(mappings.len().max(id.0 + 1), || None);
        mappings[id.0] = Some(mapping);
    }

    /// Lets an access to a page of a mapped region succeed. For [`Provision::Read`], the caller
    /// must first read the pages from the file.
    pub fn provide(
        &mut self,
        space: SpaceId,
        id: RegionId,
        page: u64,
        writes: bool,
        cluster: u64,
    ) -> Provision {
        let Some(mapping) = self.spaces[space.0][id.0].as_mut() else { return Provision::Present };
        if mapping.own.contains(page) {
            return Provision::Present;
        }
        if mapping.common.contains(page) {
            if !writes {
                return Provision::Present;
            }
            mapping.common.remove(page);
            mapping.own.insert(page);
            self.frames += 1;
            return Provision::Copied;
        }
        if mapping.kind == SegmentKind::Anon {
            mapping.own.insert(page);
            self.frames += 1;
            return Provision::Zeroed;
        }
        let object = self.objects[id.0].as_mut().expect("a mapped region has its object");
        if !object.contains(page) {
            let count = if mapping.kind == SegmentKind::Shared {
                1
            } else {
                cluster.min(mapping.pages - page)
            };
            self.frames += (page..page + count).filter(|page| object.insert(*page)).count() as u64;
            if mapping.kind != SegmentKind::Shared {
                return Provision::Read(count);
            }
            return Provision::Zeroed;
        }
        if writes && mapping.kind == SegmentKind::PrivateFile {
            mapping.own.insert(page);
            self.frames += 1;
            return Provision::Copied;
        }
        Provision::Present
    }

    /// Returns the pages of a mapping that accesses find present: a window of 64 pages from
    /// `first`.
    pub fn present(&self, space: SpaceId, id: RegionId, first: i64) -> Present {
        let Some(mapping) = self.mapping(space, id) else { return Present::default() };
        let object = || {
            let object = self.objects.get(id.0).and_then(Option::as_ref);
            object.map_or(0, |object| object.window(first))
        };
        let own = mapping.own.window(first);
        match mapping.kind {
            SegmentKind::Anon => Present { read: own | mapping.common.window(first), write: own },
            SegmentKind::PrivateFile => Present { read: own | object(), write: own },
            SegmentKind::Shared | SegmentKind::SharedFile => {
                let object = object();
                Present { read: object, write: object }
            }
        }
    }

    /// Returns true if the space has no page of its own in this window, so all are shared with its
    /// parent.
    pub fn is_common(&self, space: SpaceId, id: RegionId, first: i64) -> bool {
        self.mapping(space, id).is_none_or(|mapping| mapping.own.window(first) == 0)
    }

    /// Drops the private pages of a region (MADV_DONTNEED).
    pub fn drop_private(&mut self, space: SpaceId, id: RegionId) {
        let Some(mapping) = self.spaces[space.0].get_mut(id.0).and_then(Option::as_mut) else {
            return;
        };
        self.frames -= mapping.own.count();
        mapping.own.clear();
        mapping.common.clear();
    }

    /// Unmaps a region. Pages of shared memory and files stay in memory until the last space unmaps
    /// them.
    pub fn unmap(&mut self, space: SpaceId, id: RegionId) {
        self.drop_private(space, id);
        let Some(mapping) = self.spaces[space.0].get_mut(id.0).and_then(Option::take) else {
            return;
        };
        self.frames -= mapping.lent.count();
        let in_use =
            self.spaces.iter().any(|regions| regions.get(id.0).is_some_and(Option::is_some));
        if !in_use && let Some(object) = self.objects.get_mut(id.0).and_then(Option::take) {
            self.frames -= object.count();
        }
    }

    /// Forks: the parent's private pages become common to parent and child.
    pub fn fork(&mut self, parent: SpaceId, child: SpaceId) {
        self.add_space(child);
        self.children += 1;
        for mapping in self.spaces[parent.0].iter_mut().flatten() {
            mapping.common.add(&mapping.own);
            mapping.lent.add(&mapping.own);
            mapping.own.clear();
        }
        let none = |m: &SegmentMapping| PageSet::new(m.pages);
        let copy = |m: &SegmentMapping| SegmentMapping { own: none(m), lent: none(m), ..m.clone() };
        let mappings = self.spaces[parent.0].iter().map(|m| m.as_ref().map(copy)).collect();
        self.spaces[child.0] = mappings;
    }

    /// Removes a space. After the last child, the common pages are the parent's own again.
    pub fn remove_space(&mut self, space: SpaceId, parent: Option<SpaceId>) {
        for index in 0..self.spaces[space.0].len() {
            self.unmap(space, RegionId(index));
        }
        let Some(parent) = parent else { return };
        self.children -= 1;
        if self.children == 0 {
            for mapping in self.spaces[parent.0].iter_mut().flatten() {
                self.frames -= mapping.lent.count_without(&mapping.common);
                mapping.own.add(&mapping.common);
                mapping.common.clear();
                mapping.lent.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::page_size::PageSizeRequest;

    const PARENT: SpaceId = SpaceId(0);
    const CHILD: SpaceId = SpaceId(1);
    const REGION: RegionId = RegionId(0);

    fn vm(backing: Backing) -> Vm {
        let mut vm = Vm::default();
        vm.add_space(PARENT);
        let region = Region {
            name: "r".into(),
            backing,
            bytes: 10 * 4096,
            page_size: PageSizeRequest::Default,
            advice: vec![],
            mapped_at_start: true,
            place: None,
        };
        vm.map(PARENT, REGION, &region, 4096, 10);
        vm
    }

    #[test]
    fn pages_are_zeroed_once_and_copied_when_common() {
        let mut vm = vm(Backing::Anon);
        assert_eq!(vm.provide(PARENT, REGION, 3, true, 1), Provision::Zeroed);
        assert_eq!(vm.provide(PARENT, REGION, 3, false, 1), Provision::Present);
        vm.fork(PARENT, CHILD);
        assert_eq!(vm.present(CHILD, REGION, 0), Present { read: 8, write: 0 });
        assert_eq!(vm.provide(CHILD, REGION, 3, false, 1), Provision::Present);
        assert_eq!(vm.provide(CHILD, REGION, 3, true, 1), Provision::Copied);
        assert_eq!(vm.provide(PARENT, REGION, 3, true, 1), Provision::Copied);
        assert_eq!(vm.frames(), 3);
        vm.remove_space(CHILD, Some(PARENT));
        assert_eq!(vm.frames(), 1);
        vm.remove_space(PARENT, None);
        assert_eq!(vm.frames(), 0);
    }

    #[test]
    fn the_parents_pages_are_its_own_again() {
        let mut vm = vm(Backing::Anon);
        vm.provide(PARENT, REGION, 0, true, 1);
        vm.fork(PARENT, CHILD);
        vm.remove_space(CHILD, Some(PARENT));
        assert_eq!(vm.present(PARENT, REGION, 0).write, 1);
        assert_eq!(vm.frames(), 1);
    }

    #[test]
    fn files_are_read_in_clusters_and_stay_while_mapped() {
        let mut vm = vm(Backing::File { directory: None, private: false });
        assert_eq!(vm.provide(PARENT, REGION, 8, false, 4), Provision::Read(2));
        assert_eq!(vm.provide(PARENT, REGION, 9, true, 4), Provision::Present);
        vm.fork(PARENT, CHILD);
        vm.unmap(PARENT, REGION);
        assert_eq!(vm.frames(), 2);
        vm.unmap(CHILD, REGION);
        assert_eq!(vm.frames(), 0);
    }

    #[test]
    fn places_do_not_overlap() {
        let mut vm = vm(Backing::Anon);
        let place = |vm: &Vm, bytes| vm.place(PARENT, bytes, 4096, 0, 1 << 20, 4096);
        assert_eq!(place(&vm, 4096), Some(0));
        assert_eq!(place(&vm, 8192), Some(11 * 4096));
        assert_eq!(place(&vm, 1 << 20), None);
        vm.unmap(PARENT, REGION);
        assert_eq!(place(&vm, 8192), Some(0));
    }
}
