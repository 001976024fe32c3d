//! The program that waits: it rewrites its memory, and knows what should be there.

use anyhow::Result;
use pagetax_core::access::Rng;
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::pager::{self, RemoteRegion};
use pagetax_remote::store::PageStore;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub const REGION_BYTES: u64 = 32 << 20;
pub const RESIDENT_BYTES: u64 = 8 << 20;

/// Memory whose pages begin and end with the last value written to them.
pub struct RewritingProgram {
    memory: RemoteRegion,
    versions: Vec<u64>,
    rng: Rng,
    pub wrong_pages: u64,
}

impl RewritingProgram {
    pub fn fill(store: Arc<dyn PageStore>, seed: u64) -> Result<RewritingProgram> {
        let log: pager::Log = Arc::new(|line: &str| eprintln!("{line}"));
        let options =
            pager::PagerOptions { log: Some(log), ..pager::PagerOptions::resident(RESIDENT_BYTES) };
        let memory = RemoteRegion::map(store, REGION_BYTES, options)?;
        let versions = vec![0; memory.len() / PAGE_BYTES];
        let mut program =
            RewritingProgram { memory, versions, rng: Rng::new(seed), wrong_pages: 0 };
        (0..program.versions.len()).for_each(|page| program.rewrite(page));
        Ok(program)
    }

    pub fn page_ins(&self) -> u64 {
        self.memory.counts().page_in_count
    }

    fn rewrite(&mut self, page: usize) {
        self.check(page);
        self.versions[page] = self.rng.next_u64();
        let bytes = &mut self.memory.as_mut_slice()[page * PAGE_BYTES..][..PAGE_BYTES];
        bytes[..8].copy_from_slice(&self.versions[page].to_le_bytes());
        bytes[PAGE_BYTES - 8..].copy_from_slice(&self.versions[page].to_le_bytes());
    }

    fn check(&mut self, page: usize) {
        let bytes = &self.memory.as_slice()[page * PAGE_BYTES..][..PAGE_BYTES];
        let version = self.versions[page].to_le_bytes();
        let is_right = bytes[..8] == version
            && bytes[PAGE_BYTES - 8..] == version
            && bytes[8..PAGE_BYTES - 8].iter().all(|byte| *byte == 0);
        if !is_right {
            eprintln!("page {page} is wrong");
            self.wrong_pages += 1;
        }
    }

    /// Reads all pages and checks their content.
    pub fn check_all(&mut self) {
        (0..self.versions.len()).for_each(|page| self.check(page));
    }

    /// Rewrites random pages until told to stop. Returns the longest wait that ended before `since`, which is
    /// in nanoseconds from `start`, and the longest one after it.
    pub fn rewrite_until(
        &mut self,
        start: Instant,
        since: &AtomicU64,
        mut is_over: impl FnMut() -> bool,
    ) -> [Duration; 2] {
        let mut longest = [Duration::ZERO; 2];
        let mut before = start.elapsed();
        while !is_over() {
            let page = self.rng.below(self.versions.len() as u64) as usize;
            self.rewrite(page);
            let now = start.elapsed();
            let after = (now.as_nanos() as u64 >= since.load(Ordering::Relaxed)) as usize;
            (longest[after], before) = (longest[after].max(now - before), now);
        }
        longest
    }
}
