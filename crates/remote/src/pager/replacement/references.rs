//! A program's references to pages, without those that no policy would notice.

use std::collections::HashMap;
use std::ops::Range;

/// Steps are numbers of pages, with two flags. Both together are a page of zeros.
const WRITE: u32 = 1 << 30;
const UNMAP: u32 = 1 << 31;

/// The number of steps at the last one of a page that has none…
const NEVER: u64 = u64::MAX;
/// …and of one whose next access counts, however soon it comes.
const LONG_AGO: u64 = NEVER - 1;

/// One step of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// An access to a page, true for a write.
    Access(u32, bool),
    /// A page was dropped.
    Unmap(u32),
    /// A page is all zeros until its next access.
    Zeros(u32),
}

/// The references of one process, whose pages are numbered in the order of their addresses.
#[derive(Debug, Default)]
pub struct References {
    /// Page addresses (address / 4 KiB), ascending.
    addresses: Vec<u64>,
    steps: Vec<u32>,
    /// The number of accesses before any were left out.
    access_count: u64,
}

impl References {
    /// Returns the number of distinct pages.
    pub fn pages(&self) -> usize {
        self.addresses.len()
    }

    /// Returns the number of accesses, with those that were left out.
    pub fn access_count(&self) -> u64 {
        self.access_count
    }

    pub(super) fn addresses(&self) -> &[u64] {
        &self.addresses
    }

    pub(super) fn step_count(&self) -> usize {
        self.steps.len()
    }

    pub(super) fn steps(&self) -> impl DoubleEndedIterator<Item = Step> {
        self.steps.iter().map(|step| match (step & UNMAP, step & WRITE) {
            (0, write) => Step::Access(step & !WRITE, write != 0),
            (_, 0) => Step::Unmap(step & !UNMAP),
            _ => Step::Zeros(step & !(UNMAP | WRITE)),
        })
    }
}

/// A page while references are collected.
#[derive(Debug, Clone, Copy)]
struct Seen {
    number: u32,
    /// The number of steps at its last one.
    at: u64,
    /// True if that step, or one since it last came up, was a write.
    is_written: bool,
}

/// A collector of references.
///
/// It leaves out an access to a page that is among those of the last `window` steps. A policy would have kept
/// it, and knows its last use to within so many steps.
#[derive(Debug, Default)]
pub struct ReferenceCollector {
    window: u64,
    /// Pages by address.
    seen: HashMap<u64, Seen>,
    /// The address of each page, in the order of first uses.
    addresses: Vec<u64>,
    steps: Vec<u32>,
    access_count: u64,
}

impl ReferenceCollector {
    /// The window that is small against the least memory of `pagetax remote`, 256 pages.
    pub const WINDOW: u64 = 32;

    /// Creates a collector; with a window of 0 it keeps each access.
    pub fn new(window: u64) -> ReferenceCollector {
        ReferenceCollector { window, ..ReferenceCollector::default() }
    }

    /// Notes that a page (address / 4 KiB) is paged from now on, or no more. At most 2^30 pages are followed.
    pub fn follow(&mut self, address: u64, is_paged: bool) {
        let number = self.addresses.len() as u32;
        if !is_paged {
            self.seen.remove(&address);
        } else if number < WRITE && !self.seen.contains_key(&address) {
            self.addresses.push(address);
            self.seen.insert(address, Seen { number, at: NEVER, is_written: false });
        }
    }

    /// Notes an access. Ignores pages that are not followed.
    pub fn access(&mut self, address: u64, is_write: bool) {
        let now = self.steps.len() as u64;
        let Some(seen) = self.seen.get_mut(&address) else { return };
        self.access_count += 1;
        let is_recent = seen.at < LONG_AGO && now - seen.at <= self.window && self.window > 0;
        if is_recent && (seen.is_written || !is_write) {
            return;
        }
        (seen.at, seen.is_written) = (now, is_write || is_recent && seen.is_written);
        self.steps.push(seen.number | if is_write { WRITE } else { 0 });
    }

    /// Notes that pages were unmapped or dropped.
    pub fn unmap(&mut self, addresses: Range<u64>) {
        let is_short = addresses.end.saturating_sub(addresses.start) <= self.seen.len() as u64;
        let known: Vec<u64> = match is_short {
            true => addresses.filter(|address| self.seen.contains_key(address)).collect(),
            false => {
                self.seen.keys().filter(|address| addresses.contains(address)).copied().collect()
            }
        };
        for address in known {
            if let Some(seen) = self.seen.get_mut(&address).filter(|seen| seen.at != NEVER) {
                seen.at = NEVER;
                self.steps.push(seen.number | UNMAP);
            }
        }
    }

    /// Notes that a page is all zeros until its next access.
    pub fn zeros(&mut self, address: u64) {
        if let Some(seen) = self.seen.get_mut(&address).filter(|seen| seen.at < LONG_AGO) {
            seen.at = LONG_AGO;
            self.steps.push(seen.number | UNMAP | WRITE);
        }
    }

    /// Returns the number of steps so far, which take 4 bytes each.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Numbers the pages by address.
    pub fn finish(self) -> References {
        let mut order: Vec<u32> = (0..self.addresses.len() as u32).collect();
        order.sort_unstable_by_key(|number| self.addresses[*number as usize]);
        let mut rank = vec![0; order.len()];
        (0..).zip(&order).for_each(|(place, number)| rank[*number as usize] = place);
        let flags = WRITE | UNMAP;
        let mut steps = self.steps;
        steps.iter_mut().for_each(|step| *step = *step & flags | rank[(*step & !flags) as usize]);
        let addresses = order.iter().map(|number| self.addresses[*number as usize]).collect();
        References { addresses, steps, access_count: self.access_count }
    }
}
