//! Reads a trace: its head and index, then any block by itself.

use super::code::{Decoder, Step};
use super::index::{BlockInfo, Index, PageRun, Reader, found_max, pages_of};
use super::{FIRST_VERSION, Head, MAGIC, TraceError, VERSION, frame};
use crate::pages::{AccessKind, PageObserver, Thread};
use pagetax_core::replay::ThreadTotals;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub(super) const TRAILER: &[u8; 8] = b"pttindex";

/// An open trace.
#[derive(Debug)]
pub struct Trace {
    path: PathBuf,
    file: File,
    /// The head of the trace file.
    pub head: Head,
    pub(super) index: Index,
    /// Notes on damaged or missing parts.
    pub notes: Vec<String>,
}

/// A decoded block.
#[derive(Debug)]
pub struct Block {
    /// The block's place and contents.
    pub info: BlockInfo,
    /// Pages that were found before the block's end.
    pub found: Vec<PageRun>,
    code: Vec<u8>,
}

impl Block {
    fn parse(raw: &[u8]) -> Option<Block> {
        let mut reader = Reader(raw);
        let (info, found) = (reader.info()?, reader.runs()?);
        Some(Block { info, found, code: reader.0.to_vec() })
    }

    /// Returns the thread's steps, in order.
    pub fn steps(&self) -> impl Iterator<Item = Step> + '_ {
        Decoder::new(&self.code)
    }
}

/// Returns the sum of all threads' counts.
pub(super) fn sum(totals: impl Iterator<Item = ThreadTotals>) -> ThreadTotals {
    totals.fold(ThreadTotals::default(), |sum, of| ThreadTotals {
        page_change_count: sum.page_change_count + of.page_change_count,
        far_count: sum.far_count + of.far_count,
        access_count: sum.access_count + of.access_count,
        instruction_count: sum.instruction_count + of.instruction_count,
        fetch_change_count: sum.fetch_change_count + of.fetch_change_count,
    })
}

impl Trace {
    /// Opens a file. If the index is missing or damaged, rebuilds it from the whole blocks and adds a
    /// note.
    ///
    /// # Errors
    /// The file cannot be read or is not a trace.
    pub fn open(path: &Path) -> Result<Trace, TraceError> {
        let failed = |error| TraceError::System("read", path.into(), error);
        let no_trace = |why| TraceError::NoTrace(path.into(), why);
        let mut file = File::open(path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(no_trace("it is not a regular file"));
        }
        let mut begin = [0; 12];
        if file.read_exact(&mut begin).is_err() || begin[..8] != *MAGIC {
            return Err(no_trace("it does not begin with a trace's magic number"));
        }
        let version = u32::from_le_bytes([begin[8], begin[9], begin[10], begin[11]]);
        if !(FIRST_VERSION..=VERSION).contains(&version) {
            return Err(TraceError::Version(path.into(), version));
        }
        let head = match frame::unpack(&mut file).map_err(failed)? {
            Some((frame::HEAD, raw, length)) => {
                serde_json::from_slice(&raw).ok().map(|head: Head| (head, 12 + length))
            }
            _ => None,
        };
        let (head, first_block) = head.ok_or_else(|| no_trace("its head is damaged"))?;
        let mut trace =
            Trace { path: path.into(), file, head, index: Index::default(), notes: Vec::new() };
        match trace.read_index().map_err(failed)? {
            Some(index) => trace.index = index,
            None => trace.rebuild_index(first_block).map_err(failed)?,
        }
        Ok(trace)
    }

    /// Reads the index at the end; none if it is damaged.
    fn read_index(&self) -> io::Result<Option<Index>> {
        let bytes = self.file.metadata()?.len();
        let mut trailer = [0; 16];
        let Some(at) = bytes.checked_sub(16) else { return Ok(None) };
        self.file.read_exact_at(&mut trailer, at)?;
        let (offset, magic) = trailer.split_at(8);
        let offset = u64::from_le_bytes(offset.try_into().unwrap_or_default());
        if magic != TRAILER || offset > at {
            return Ok(None);
        }
        let mut file = &self.file;
        file.seek(SeekFrom::Start(offset))?;
        let found = frame::unpack(&mut BufReader::new(file))?;
        let found = found.filter(|(kind, ..)| *kind == frame::INDEX);
        let index = found.and_then(|frame| Index::decode(&frame.1));
        Ok(index.filter(|index| index.fits(bytes)))
    }

    fn rebuild_index(&mut self, first_block: u64) -> io::Result<()> {
        let bytes = self.file.metadata()?.len();
        let mut file = &self.file;
        file.seek(SeekFrom::Start(first_block))?;
        let (mut reader, mut offset) = (BufReader::with_capacity(1 << 20, file), first_block);
        let mut found = 0u64;
        while let Some((frame::BLOCK, raw, length)) = frame::unpack(&mut reader)? {
            let Some(block) = Block::parse(&raw) else { break };
            found = found.saturating_add(pages_of(&block.found));
            if found > found_max(bytes) {
                break;
            }
            self.index.blocks.push(BlockInfo { offset, ..block.info });
            self.index.found.extend(block.found);
            offset += length;
        }
        self.notes.push(format!(
            "the trace is cut or damaged: {} whole blocks were read, the last {} of {bytes} bytes \
             were not",
            self.index.blocks.len(),
            bytes - offset
        ));
        Ok(())
    }

    /// Decodes every block and counts its fetches. Leaves out blocks that follow a damaged one of the
    /// same thread, and adds a note.
    ///
    /// # Errors
    /// The disk fails.
    pub fn check(&mut self) -> Result<(), TraceError> {
        let mut damaged: Vec<u32> = Vec::new();
        let mut whole = Vec::new();
        for number in 0..self.index.blocks.len() {
            let info = self.index.blocks[number];
            if damaged.contains(&info.thread) {
                continue;
            }
            match self.block(number) {
                Ok(block) => {
                    let is_fetch = |step: &Step| matches!(step, Step::Change(AccessKind::Fetch, _));
                    let fetch_change_count = block.steps().filter(is_fetch).count() as u64;
                    let totals = ThreadTotals { fetch_change_count, ..info.totals };
                    whole.push(BlockInfo { totals, ..info });
                }
                Err(TraceError::Damaged(..)) => damaged.push(info.thread),
                Err(error) => return Err(error),
            }
        }
        if !damaged.is_empty() {
            self.notes.push(format!(
                "the trace is damaged: {} of {} blocks were read",
                whole.len(),
                self.index.blocks.len()
            ));
        }
        self.index.blocks = whole;
        Ok(())
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.index.blocks.len()
    }

    /// Returns the counts of all threads.
    pub fn totals(&self) -> ThreadTotals {
        sum(self.index.blocks.iter().map(|block| block.totals))
    }

    /// Decodes one block of the trace.
    ///
    /// # Errors
    /// The block is damaged, or the disk fails.
    pub fn block(&self, number: usize) -> Result<Block, TraceError> {
        let damaged = || TraceError::Damaged(self.path.clone(), number);
        let info = self.index.blocks.get(number).ok_or_else(damaged)?;
        // Several readers may share the file: it has no common position.
        let mut at = At { file: &self.file, offset: info.offset };
        let frame = frame::unpack(&mut at)
            .map_err(|error| TraceError::System("read", self.path.clone(), error))?;
        let Some((frame::BLOCK, raw, length)) = frame else { return Err(damaged()) };
        let next = self.index.blocks.get(number + 1).map_or(u64::MAX, |next| next.offset);
        if info.offset.saturating_add(length) > next {
            return Err(damaged());
        }
        let block = Block::parse(&raw).ok_or_else(damaged)?;
        Ok(Block { info: *info, ..block })
    }

    /// Reports all pages to an observer, in the order of the file.
    ///
    /// # Errors
    /// The first damaged block.
    pub fn replay(
        &self,
        pages: &mut impl PageObserver,
        mut on_progress: impl FnMut(f64) -> bool,
    ) -> Result<(), TraceError> {
        let bytes = self.file.metadata();
        let bytes = bytes.map_err(|error| TraceError::System("read", self.path.clone(), error))?;
        let mut found_left = found_max(bytes.len());
        for number in 0..self.blocks() {
            if !on_progress(number as f64 / self.blocks() as f64) {
                break;
            }
            let block = self.block(number)?;
            let thread = Thread { number: block.info.thread, process: block.info.process };
            found_left = found_left
                .checked_sub(pages_of(&block.found))
                .ok_or_else(|| TraceError::Damaged(self.path.clone(), number))?;
            for run in &block.found {
                let all = run.first..run.first.saturating_add(run.pages);
                all.for_each(|page| pages.found(run.process, page, run.segment));
            }
            for step in block.steps() {
                match step {
                    Step::Change(kind, page) => pages.change(thread, kind, page),
                    Step::Gone(range) => pages.gone(thread, range),
                    Step::MemoryUse(how, range) => pages.memory_use(thread, how, range),
                }
            }
            let ThreadTotals { instruction_count, access_count, .. } = block.info.totals;
            pages.ran(thread, instruction_count, access_count);
        }
        Ok(())
    }
}

/// A reader of a file from an offset, with its own position.
struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(bytes, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}
