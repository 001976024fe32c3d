//! Writes a trace while its program runs. Full blocks go to the file at once, so that a crash loses
//! little.

use super::code::Encoder;
use super::index::{BlockInfo, Index, Numbers, PageRun, add_page};
use super::{Head, MAGIC, TraceError, VERSION, frame};
use crate::filter::{INDEX_END, PAGE_SHIFT};
use crate::pages::{AccessKind, PageObserver, Thread};
use crate::places::Segment;
use crate::stream::MemoryUse;
use pagetax_core::replay::ThreadTotals;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Changes of page in a block: enough to compress well, few enough to seek.
const BLOCK_CHANGES: u64 = 1 << 16;
const FAR_SLOTS: usize = 1 << (INDEX_END - PAGE_SHIFT);

/// The encoder of a thread's current block.
struct ThreadEncoder {
    thread: Thread,
    code: Encoder,
    totals: ThreadTotals,
    steps: u64,
    /// The pages used last by address bits, as in [`crate::simulate`].
    far: [u64; FAR_SLOTS],
}

/// An observer that writes a trace.
pub struct TraceWriter {
    path: PathBuf,
    /// The file. Unbuffered: each write is a whole frame, which survives a crash.
    file: File,
    offset: u64,
    encoders: Vec<ThreadEncoder>,
    /// Pages found since the last block.
    found: Vec<PageRun>,
    index: Index,
    failed: Option<io::Error>,
}

impl TraceWriter {
    /// Creates the file and writes its head.
    pub fn create(path: &Path, head: &Head) -> Result<TraceWriter, TraceError> {
        let failed = |error| TraceError::System("write", path.into(), error);
        let file = File::create(path).map_err(failed)?;
        let (encoders, found) = (Vec::new(), Vec::new());
        let (index, path) = (Index::default(), path.into());
        let mut writer =
            TraceWriter { path, file, offset: 0, encoders, found, index, failed: None };
        writer.put(MAGIC);
        writer.put(&VERSION.to_le_bytes());
        let head = serde_json::to_vec(head).expect("a head is plain text");
        writer.put(&frame::pack(frame::HEAD, &head));
        Ok(writer)
    }

    /// Writes bytes. Keeps the first error until [`TraceWriter::finish`], so that the program continues.
    fn put(&mut self, bytes: &[u8]) {
        if self.failed.is_none() {
            self.failed = self.file.write_all(bytes).err();
            self.offset += bytes.len() as u64;
        }
    }

    fn encoder(&mut self, thread: Thread) -> &mut ThreadEncoder {
        let number = thread.number as usize;
        while self.encoders.len() <= number {
            let number = self.encoders.len() as u32;
            self.encoders.push(ThreadEncoder {
                thread: Thread { number, process: thread.process },
                code: Encoder::default(),
                totals: ThreadTotals::default(),
                steps: 0,
                far: [u64::MAX; FAR_SLOTS],
            });
        }
        let encoder = &mut self.encoders[number];
        encoder.thread = thread;
        encoder
    }

    fn write_block(&mut self, number: usize) {
        let encoder = &mut self.encoders[number];
        let totals = std::mem::take(&mut encoder.totals);
        let (thread, code) = (encoder.thread, encoder.code.take());
        encoder.steps = 0;
        let info = BlockInfo {
            offset: self.offset,
            thread: thread.number,
            process: thread.process,
            totals,
        };
        let found = std::mem::take(&mut self.found);
        let mut numbers = Numbers::default();
        numbers.put_info(&info);
        numbers.put_runs(&found);
        numbers.0.extend_from_slice(&code);
        self.put(&frame::pack(frame::BLOCK, &numbers.0));
        self.index.blocks.push(info);
        self.index.found.extend(found);
    }

    /// Writes the last blocks and the index; returns the file's length and the counts of all threads.
    pub fn finish(mut self) -> Result<(u64, ThreadTotals), TraceError> {
        for number in 0..self.encoders.len() {
            let encoder = &self.encoders[number];
            if !encoder.code.is_empty() || encoder.totals != ThreadTotals::default() {
                self.write_block(number);
            }
        }
        let index_offset = self.offset;
        let index = frame::pack(frame::INDEX, &self.index.encode());
        self.put(&index);
        self.put(&index_offset.to_le_bytes());
        self.put(super::read::TRAILER);
        if let Some(error) = self.failed.take() {
            return Err(TraceError::System("write", self.path.clone(), error));
        }
        Ok((self.offset, super::read::sum(self.index.blocks.iter().map(|block| block.totals))))
    }
}

impl PageObserver for TraceWriter {
    #[inline]
    fn change(&mut self, thread: Thread, kind: AccessKind, page: u64) {
        let encoder = self.encoder(thread);
        encoder.code.change(kind, page);
        encoder.steps += 1;
        if kind != AccessKind::Fetch {
            let slot = &mut encoder.far[page as usize % FAR_SLOTS];
            encoder.totals.page_change_count += 1;
            encoder.totals.far_count += u64::from(*slot != page);
            *slot = page;
        }
        if encoder.steps >= BLOCK_CHANGES {
            self.write_block(thread.number as usize);
        }
    }

    fn ran(&mut self, thread: Thread, instructions: u64, accesses: u64) {
        let totals = &mut self.encoder(thread).totals;
        totals.instruction_count += instructions;
        totals.access_count += accesses;
    }

    fn found(&mut self, process: u32, page: u64, segment: Segment) {
        add_page(&mut self.found, process, page, segment);
    }

    fn gone(&mut self, thread: Thread, pages: Range<u64>) {
        self.encoder(thread).code.gone(pages);
    }

    fn memory_use(&mut self, thread: Thread, memory_use: MemoryUse, pages: Range<u64>) {
        self.encoder(thread).code.memory_use(memory_use, pages);
    }
}
