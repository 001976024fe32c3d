//! The contents of a trace's blocks: stored in each block, and in the index for all blocks.

use super::frame::RATIO_MAX;
use crate::places::Segment;
use integer_encoding::VarInt;
use pagetax_core::replay::ThreadTotals;

/// A block's place and contents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockInfo {
    /// The offset of its frame in the file.
    pub offset: u64,
    /// The number of its thread.
    pub thread: u32,
    /// The number of the thread's address space.
    pub process: u32,
    /// The thread's counts in the block.
    pub totals: ThreadTotals,
}

/// Adjacent pages of one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// The number of their process.
    pub process: u32,
    /// The number of the first page.
    pub first: u64,
    /// The number of adjacent pages.
    pub pages: u64,
    /// The segment of the pages.
    pub segment: Segment,
}

/// The most pages of an address space: 48 bits of addresses.
const PAGES_MAX: u64 = 1 << 36;

/// Segments in the order of their numbers in files.
const SEGMENTS: [Segment; 6] = [
    Segment::Heap,
    Segment::Stack,
    Segment::Anon,
    Segment::File,
    Segment::Kernel,
    Segment::Unknown,
];

/// Adds a page to the last run, or begins a new run.
pub fn add_page(runs: &mut Vec<PageRun>, process: u32, page: u64, segment: Segment) {
    if let Some(last) = runs.last_mut()
        && (last.process, last.segment, last.first + last.pages) == (process, segment, page)
    {
        last.pages += 1;
        return;
    }
    runs.push(PageRun { process, first: page, pages: 1, segment });
}

/// A writer of varints.
#[derive(Default)]
pub struct Numbers(pub Vec<u8>);

impl Numbers {
    pub fn put(&mut self, number: u64) {
        let mut buffer = [0; 10];
        let length = number.encode_var(&mut buffer);
        self.0.extend_from_slice(&buffer[..length]);
    }

    pub fn put_info(&mut self, info: &BlockInfo) {
        let ThreadTotals { page_change_count, far_count, access_count, instruction_count, .. } =
            info.totals;
        let numbers = [info.offset, info.thread.into(), info.process.into(), page_change_count];
        numbers.into_iter().for_each(|number| self.put(number));
        [far_count, access_count, instruction_count].into_iter().for_each(|n| self.put(n));
    }

    pub fn put_runs(&mut self, runs: &[PageRun]) {
        self.put(runs.len() as u64);
        for run in runs {
            let segment = SEGMENTS.iter().position(|known| *known == run.segment).unwrap_or(5);
            [run.process.into(), run.first, run.pages, segment as u64]
                .into_iter()
                .for_each(|number| self.put(number));
        }
    }
}

/// A reader of varints.
pub struct Reader<'a>(pub &'a [u8]);

impl Reader<'_> {
    pub fn number(&mut self) -> Option<u64> {
        let (number, length) = u64::decode_var(self.0)?;
        self.0 = &self.0[length..];
        Some(number)
    }

    pub fn info(&mut self) -> Option<BlockInfo> {
        let offset = self.number()?;
        let (thread, process) =
            (u32::try_from(self.number()?).ok()?, u32::try_from(self.number()?).ok()?);
        let (page_change_count, far_count) = (self.number()?, self.number()?);
        let (access_count, instruction_count) = (self.number()?, self.number()?);
        let totals = ThreadTotals {
            page_change_count,
            far_count,
            access_count,
            instruction_count,
            ..ThreadTotals::default()
        };
        Some(BlockInfo { offset, thread, process, totals })
    }

    pub fn runs(&mut self) -> Option<Vec<PageRun>> {
        let count = self.number()?;
        let run = |_| {
            let process = u32::try_from(self.number()?).ok()?;
            let (first, pages) = (self.number()?, self.number()?);
            if first.checked_add(pages)? > PAGES_MAX {
                return None;
            }
            let segment = *SEGMENTS.get(usize::try_from(self.number()?).ok()?)?;
            Some(PageRun { process, first, pages, segment })
        };
        (0..count).map(run).collect()
    }
}

/// Returns the number of pages in all runs.
pub fn pages_of(runs: &[PageRun]) -> u64 {
    runs.iter().fold(0, |sum, run| sum.saturating_add(run.pages))
}

/// Returns the most found pages that a file can have. In a cut file, steps of other threads may be
/// missing.
pub fn found_max(file_bytes: u64) -> u64 {
    const LACKING: u64 = 1 << 20;
    file_bytes.saturating_mul(RATIO_MAX.into()).saturating_add(LACKING)
}

/// All blocks of a trace, and all pages that were found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    pub blocks: Vec<BlockInfo>,
    pub found: Vec<PageRun>,
}

impl Index {
    pub fn encode(&self) -> Vec<u8> {
        let mut numbers = Numbers::default();
        numbers.put(self.blocks.len() as u64);
        self.blocks.iter().for_each(|info| numbers.put_info(info));
        numbers.put_runs(&self.found);
        numbers.0
    }

    /// Returns true if a file of this length can have this index. Blocks follow each other, and each
    /// found page has a step, which takes a byte before compression. Otherwise a short file could cost
    /// hours and all memory.
    pub fn fits(&self, file_bytes: u64) -> bool {
        let follow = self.blocks.windows(2).all(|two| two[0].offset < two[1].offset);
        follow && pages_of(&self.found) <= found_max(file_bytes)
    }

    pub fn decode(bytes: &[u8]) -> Option<Index> {
        let mut reader = Reader(bytes);
        let count = reader.number()?;
        let blocks = (0..count).map(|_| reader.info()).collect::<Option<_>>()?;
        Some(Index { blocks, found: reader.runs()? })
    }
}
