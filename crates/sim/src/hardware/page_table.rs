//! Page tables for the TLB models: one byte for each base page, with its bits and the size of the page
//! that maps it. So a random access reads one byte.

use super::Used;
use pagetax_core::units::PageSize;

/// The bits of an entry that hold log2 of the page size less 8; 0: not present.
const SIZE: u8 = 0b0001_1111;
const WRITABLE: u8 = 0b0010_0000;
const REFERENCED: u8 = 0b0100_0000;
const DIRTY: u8 = 0b1000_0000;
const SIZE_BIAS: u32 = 8;

/// The log2 of the base pages in a chunk.
const CHUNK_BITS: u32 = 16;
const CHUNK_PAGES: u64 = 1 << CHUNK_BITS;

/// The translations of one space.
#[derive(Debug, Clone)]
pub struct PageTable {
    base_shift: u32,
    /// The chunks by address; none where nothing was ever mapped.
    chunks: Vec<Option<Box<[u8]>>>,
}

impl PageTable {
    /// Creates an empty table, for pages of `base` and above.
    pub fn new(base: PageSize) -> Self {
        PageTable { base_shift: base.shift(), chunks: Vec::new() }
    }

    #[inline(always)]
    fn entry(&self, address: u64) -> u8 {
        let page = address >> self.base_shift;
        match self.chunks.get((page >> CHUNK_BITS) as usize) {
            Some(Some(chunk)) => chunk[(page & (CHUNK_PAGES - 1)) as usize],
            _ => 0,
        }
    }

    fn entry_mut(&mut self, address: u64) -> &mut u8 {
        let page = address >> self.base_shift;
        let chunk = (page >> CHUNK_BITS) as usize;
        if self.chunks.len() <= chunk {
            self.chunks.resize(chunk + 1, None);
        }
        let chunk = self.chunks[chunk].get_or_insert_with(|| vec![0; CHUNK_PAGES as usize].into());
        &mut chunk[(page & (CHUNK_PAGES - 1)) as usize]
    }

    fn base_pages(&self, range: std::ops::Range<u64>) -> impl Iterator<Item = u64> + use<> {
        let shift = self.base_shift;
        ((range.start >> shift)..(range.end.div_ceil(1 << shift))).map(move |page| page << shift)
    }

    /// Translates an access: returns the log2 of the page's size and sets its bits, or none for a fault.
    #[inline(always)]
    pub fn translate(&mut self, address: u64, writes: bool) -> Option<u32> {
        let entry = self.entry(address);
        let (needs, notes) = if writes { (WRITABLE, REFERENCED | DIRTY) } else { (0, REFERENCED) };
        if entry & SIZE == 0 || entry & needs != needs {
            return None;
        }
        if entry & notes != notes {
            *self.entry_mut(address) |= notes;
        }
        Some(u32::from(entry & SIZE) + SIZE_BIAS)
    }

    /// Returns the size of the page that maps an address.
    pub fn size_at(&self, address: u64) -> Option<PageSize> {
        let entry = self.entry(address);
        let shift = u32::from(entry & SIZE) + SIZE_BIAS;
        (entry & SIZE != 0).then(|| PageSize::new(1 << shift).expect("sizes are powers of two"))
    }

    /// Maps the page that begins at `address`.
    pub fn load(&mut self, address: u64, size: PageSize, writable: bool) {
        let entry = (size.shift() - SIZE_BIAS) as u8 | if writable { WRITABLE } else { 0 };
        for page in self.base_pages(address..address + size.bytes()) {
            *self.entry_mut(page) = entry;
        }
    }

    /// Unmaps a range of whole pages.
    pub fn unload(&mut self, range: std::ops::Range<u64>) {
        self.change(range, |_| 0);
    }

    /// Makes a range of whole pages read-only.
    pub fn protect(&mut self, range: std::ops::Range<u64>) {
        self.change(range, |entry| entry & !WRITABLE);
    }

    fn change(&mut self, range: std::ops::Range<u64>, change: impl Fn(u8) -> u8) {
        for page in self.base_pages(range) {
            let entry = self.entry(page);
            if entry != 0 {
                *self.entry_mut(page) = change(entry);
            }
        }
    }

    /// Returns the bits of the page at `address`; for a large page, those of all its base pages.
    pub fn used(&self, address: u64) -> Used {
        let bits = self.parts(address).fold(0, |bits, part| bits | self.entry(part));
        Used {
            present: bits & SIZE != 0,
            referenced: bits & REFERENCED != 0,
            dirty: bits & DIRTY != 0,
        }
    }

    /// Clears the referenced bit of the page at `address`.
    pub fn clear_referenced(&mut self, address: u64) {
        for part in self.parts(address) {
            *self.entry_mut(part) &= !REFERENCED;
        }
    }

    fn parts(&self, address: u64) -> impl Iterator<Item = u64> + use<> {
        let size = self.size_at(address).map_or(1, PageSize::bytes);
        let start = address & !(size - 1);
        self.base_pages(start..start + size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> PageSize {
        text.parse().unwrap()
    }

    #[test]
    fn pages_of_several_sizes_side_by_side() {
        let mut table = PageTable::new(size("8K"));
        table.load(0x2000, size("8K"), true);
        table.load(0x40_0000, size("4M"), false);
        assert_eq!(table.translate(0x3fff, true), Some(13));
        assert_eq!(table.translate(0x4000, false), None);
        assert_eq!(table.translate(0x7f_ffff, false), Some(22));
        assert_eq!(table.translate(0x7f_ffff, true), None, "read-only");
        assert_eq!(table.size_at(0x50_0000), Some(size("4M")));
        table.unload(0x40_0000..0x80_0000);
        assert_eq!(table.translate(0x7f_ffff, false), None);
    }

    #[test]
    fn bits_are_those_of_the_whole_page() {
        let mut table = PageTable::new(size("8K"));
        table.load(0, size("64K"), true);
        table.translate(0xe000, true);
        assert_eq!(table.used(0), Used { present: true, referenced: true, dirty: true });
        table.clear_referenced(0x2000);
        assert_eq!(table.used(0), Used { present: true, referenced: false, dirty: true });
        table.protect(0..0x1_0000);
        assert_eq!(table.translate(0, true), None);
        assert_eq!(table.used(0x10_0000_0000), Used::default());
    }
}
