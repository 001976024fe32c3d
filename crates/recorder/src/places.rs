//! Finds the segment, the file and the real page size at an address. Source: /proc/PID/maps and
//! PAGEMAP_SCAN, read when a page is first touched.
//!
//! Invariant: a page is looked up again after its mapping changed and never in between, so that an
//! access costs a read of two bytes. Memory that is unmapped before it is looked up is `Unknown`.

use crate::stream::MappingHint;
use pagetax_host::procfs::{MapsLine, Root, maps};
use pagetax_host::sys::pagemap::{PAGE_IS_HUGE, scan};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::rc::Rc;

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Segment {
    /// Memory of the program break.
    Heap,
    /// A stack of a thread that the engine knows.
    Stack,
    /// Private memory without a file.
    Anon,
    /// A mapped file.
    File,
    /// Memory that the kernel maps, such as the vdso.
    Kernel,
    /// Memory that was unmapped before it was looked up.
    Unknown,
}

impl Segment {
    /// Returns the name for output.
    pub fn name(self) -> &'static str {
        match self {
            Segment::Heap => "heap",
            Segment::Stack => "stack",
            Segment::Anon => "anon",
            Segment::File => "file",
            Segment::Kernel => "kernel",
            Segment::Unknown => "unknown",
        }
    }
}

/// The memory at an address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    /// The segment of the address.
    pub segment: Segment,
    /// The path of the mapped file.
    pub file: Option<Rc<str>>,
    /// log2 of the page size that the process has there.
    pub real_shift: u32,
}

/// A table of all places, by number.
#[derive(Debug, Default)]
pub struct PlaceList {
    places: Vec<Place>,
    numbers: HashMap<Place, u16>,
}

impl PlaceList {
    /// Returns the number of a place; a new one gets the next. From 65,534 on, places share the last
    /// number.
    fn number(&mut self, place: Place) -> u16 {
        if let Some(number) = self.numbers.get(&place) {
            return *number;
        }
        if self.places.len() < usize::from(u16::MAX) - 1 {
            self.places.push(place.clone());
            self.numbers.insert(place, self.places.len() as u16 - 1);
        }
        self.places.len() as u16 - 1
    }

    /// Returns the place with this number.
    pub fn get(&self, number: u16) -> &Place {
        &self.places[usize::from(number)]
    }

    /// Returns the number of places.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns true if the table is empty.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}

/// A line of /proc/PID/maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// The addresses that are mapped.
    pub range: Range<u64>,
    /// The file offset of the first address.
    pub offset: u64,
    /// The file's path, a name such as `[stack]`, or empty.
    pub name: Rc<str>,
}

impl From<MapsLine> for Mapping {
    fn from(line: MapsLine) -> Mapping {
        let name = line.name.strip_suffix(" (deleted)").unwrap_or(&line.name);
        Mapping { range: line.range, offset: line.offset_bytes, name: name.into() }
    }
}

/// Returns true if the kernel gives huge pages to programs that do not request them.
pub fn kernel_makes_large_pages() -> bool {
    let folder = "/sys/kernel/mm/transparent_hugepage";
    ["enabled", "hugepages-2048kB/enabled", "shmem_enabled"].iter().any(|file| {
        let text = std::fs::read_to_string(format!("{folder}/{file}"));
        // A kernel without this file has no such pages.
        text.is_ok_and(|text| ["[always]", "[force]"].iter().any(|word| text.contains(word)))
    })
}

/// log2 of the addresses that a chunk of the table covers: 256 MiB.
const CHUNK_SHIFT: u32 = 28;
const PAGE_SHIFT: u32 = 12;
const CHUNK_PAGES: usize = 1 << (CHUNK_SHIFT - PAGE_SHIFT);
/// User addresses lie below 2^47. Higher ones are looked up each time.
const CHUNKS: usize = 1 << (47 - CHUNK_SHIFT);
const HUGE_SHIFT: u32 = 21;

/// The address space of one process.
pub struct AddressSpace {
    pid: u32,
    /// The place's number + 1 for each base page; 0 before the lookup.
    chunks: Vec<Option<Box<[u16]>>>,
    maps: Vec<Mapping>,
    is_stale: bool,
    hints: Vec<(Range<u64>, Segment)>,
    pagemap: Option<File>,
    /// The segment of the next page that is looked up, for a process that does not exist.
    expected: Option<Segment>,
    /// All file mappings so far, for symbols.
    seen: Vec<Mapping>,
}

impl AddressSpace {
    /// Creates the table of a process, which may still run.
    pub fn new(pid: u32) -> Self {
        AddressSpace {
            pid,
            chunks: std::iter::repeat_with(|| None).take(CHUNKS).collect(),
            maps: Vec::new(),
            is_stale: true,
            hints: Vec::new(),
            pagemap: File::open(format!("/proc/{pid}/pagemap")).ok(),
            expected: None,
            seen: Vec::new(),
        }
    }

    /// Returns the number of the place at an address, if it was looked up.
    #[inline(always)]
    pub fn known(&self, address: u64) -> Option<u16> {
        let Some(Some(chunk)) = self.chunks.get((address >> CHUNK_SHIFT) as usize) else {
            return None;
        };
        chunk[(address >> PAGE_SHIFT) as usize % CHUNK_PAGES].checked_sub(1)
    }

    /// Sets the segment of the next page that is looked up. For traces, whose process does not exist.
    pub fn expect(&mut self, segment: Segment) {
        self.expected = Some(segment);
    }

    /// Looks up the place at an address.
    #[cold]
    pub fn look_up(&mut self, address: u64, list: &mut PlaceList) -> u16 {
        let place = match self.expected.take() {
            Some(segment) => Place { segment, file: None, real_shift: PAGE_SHIFT },
            None => self.seen_place(address),
        };
        let number = list.number(place);
        let chunk = (address >> CHUNK_SHIFT) as usize;
        if let Some(chunk) = self.chunks.get_mut(chunk) {
            let chunk = chunk.get_or_insert_with(|| vec![0; CHUNK_PAGES].into());
            chunk[(address >> PAGE_SHIFT) as usize % CHUNK_PAGES] = number + 1;
        }
        number
    }

    fn seen_place(&mut self, address: u64) -> Place {
        let mut found = self.mapping(address).cloned();
        if found.is_none() || self.is_stale {
            self.read();
            found = self.mapping(address).cloned();
        }
        self.place(address, found.as_ref())
    }

    /// Discards the places of memory that changed.
    pub fn changed(&mut self, start: u64, bytes: u64, hint: MappingHint) {
        let range = start..start.saturating_add(bytes);
        let segment = match hint {
            MappingHint::Heap => Some(Segment::Heap),
            MappingHint::Stack => Some(Segment::Stack),
            MappingHint::None | MappingHint::Gone => None,
        };
        self.hints.retain(|(known, _)| !(range.start <= known.start && known.end <= range.end));
        self.hints.extend(segment.map(|segment| (range.clone(), segment)));
        self.is_stale = true;
        self.forget(range);
    }

    fn forget(&mut self, range: Range<u64>) {
        let (mut page, end) = (range.start >> PAGE_SHIFT, range.end.div_ceil(1 << PAGE_SHIFT));
        while page < end {
            let chunk = page as usize / CHUNK_PAGES;
            let next = ((chunk + 1) * CHUNK_PAGES) as u64;
            match self.chunks.get_mut(chunk) {
                Some(Some(pages)) => {
                    let from = page as usize % CHUNK_PAGES;
                    let to = from + (end.min(next) - page) as usize;
                    pages[from..to].fill(0);
                }
                Some(None) => {}
                None => return,
            }
            page = next;
        }
    }

    /// Returns the file mapping that contains, or contained, an address.
    pub fn file_at(&self, address: u64) -> Option<&Mapping> {
        self.seen.iter().rev().find(|mapping| mapping.range.contains(&address))
    }

    fn mapping(&self, address: u64) -> Option<&Mapping> {
        let after = self.maps.partition_point(|mapping| mapping.range.start <= address);
        let mapping = &self.maps[after.checked_sub(1)?];
        mapping.range.contains(&address).then_some(mapping)
    }

    fn read(&mut self) {
        // A process that has ended has no maps: the last ones stay valid.
        let lines = maps(&Root::default(), self.pid).unwrap_or_default();
        if lines.is_empty() {
            return;
        }
        self.maps = lines.into_iter().map(Mapping::from).collect();
        self.is_stale = false;
        let new: Vec<Mapping> = self
            .maps
            .iter()
            .filter(|m| m.name.starts_with('/') && !self.seen.contains(m))
            .cloned()
            .collect();
        self.seen.extend(new);
    }

    fn place(&self, address: u64, mapping: Option<&Mapping>) -> Place {
        let hint = self.hints.iter().rev().find(|(range, _)| range.contains(&address));
        let name = mapping.map_or("", |mapping| &mapping.name);
        let (segment, file) = match (hint, mapping) {
            (_, Some(m)) if m.name.starts_with('/') => (Segment::File, Some(m.name.clone())),
            (Some((_, segment)), _) => (*segment, None),
            (None, None) => (Segment::Unknown, None),
            (None, Some(_)) => match name {
                "[heap]" => (Segment::Heap, None),
                "[stack]" => (Segment::Stack, None),
                "[vdso]" | "[vvar]" | "[vsyscall]" => (Segment::Kernel, None),
                _ => (Segment::Anon, None),
            },
        };
        let real_shift = if self.is_huge(address) { HUGE_SHIFT } else { PAGE_SHIFT };
        Place { segment, file, real_shift }
    }

    /// Returns true if a huge page maps the address. Kernels before 6.7 never report it.
    fn is_huge(&self, address: u64) -> bool {
        let Some(pagemap) = &self.pagemap else { return false };
        let page = address >> PAGE_SHIFT << PAGE_SHIFT;
        let found = scan(pagemap, page, page + (1 << PAGE_SHIFT), PAGE_IS_HUGE);
        found.is_ok_and(|ranges| !ranges.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_found_and_found_again_after_a_change() {
        let mut space = AddressSpace::new(std::process::id());
        let mut list = PlaceList::default();
        let code = kernel_makes_large_pages as *const () as u64;
        assert_eq!(space.known(code), None);
        let number = space.look_up(code, &mut list);
        assert_eq!(space.known(code), Some(number));
        assert_eq!(list.get(number).segment, Segment::File);
        assert!(space.file_at(code).is_some());
        let on_stack = 0u64;
        let address = &raw const on_stack as u64;
        space.changed(address & !0xfff, 4096, MappingHint::Stack);
        let number = space.look_up(address, &mut list);
        assert_eq!(list.get(number).segment, Segment::Stack);
        space.changed(code & !0xfff, 4096, MappingHint::None);
        assert_eq!(space.known(code), None);
        assert_eq!(space.known(u64::MAX >> 16), None, "beyond the table");
        assert_eq!(list.len(), 2);
    }

    #[test]
    fn a_process_that_has_gone_has_unknown_places() {
        let mut space = AddressSpace::new(u32::MAX);
        let mut list = PlaceList::default();
        let number = space.look_up(0x1000, &mut list);
        assert_eq!(list.get(number).segment, Segment::Unknown);
        assert!(!list.is_empty());
    }
}
