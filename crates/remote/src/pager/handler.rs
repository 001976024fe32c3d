//! The handler: it serves threads that wait for pages. It is a thread of its own, or the waiting
//! thread itself, one at a time.
//!
//! Invariants: the handler touches neither paged memory nor the program's allocator. It installs a
//! page under the cluster's lock, so never while the evictor moves pages of that cluster. An access
//! to a page that no MAC proves gets SIGBUS: never zeros, never another page's bytes.

mod soft_refault;
mod zeros;

use super::frame_pool::SpareFrames;
use super::install::{install, install_one, install_spare};
use super::mask::{PageMask, bits, ends, mask_of, run_of, runs};
use super::policy::{Readahead, ReadaheadPolicy, StoredPage, last_run_boundary, next_run_boundary};
use super::shared::{NO_CPU, SharedPager};
use super::stats::add;
use super::sys::memory::Pages;
use super::sys::sigbus::ServeFault;
use super::sys::threads;
use super::sys::uffd::{FAULTS_MAX, Fault};
use super::table::{CLUSTER_PAGES, HeldCluster, PageLocation, PageState, cluster_of};
use crate::affinity::{CpuChoice, ThreadAffinity};
use crate::page::{PageMac, PageRun, RUN_PAGES_MAX};
use crate::store::{PageReader, StoreError};
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The number of reads from one check of the served threads' CPU to the next. It doubles up to the
/// maximum while the threads stay, because a check takes as long as a fault and delays the next
/// one.
const FAULTS_PER_CPU_CHECK: u32 = 256;
const FAULTS_PER_CPU_CHECK_MAX: u32 = 2048;
/// The most threads that one check looks at: each costs a read of a file.
const CPU_CHECK_THREADS_MAX: usize = 4;

/// The length of a run after which the next, longest run is announced before its fault.
const ANNOUNCE_FROM_PAGES: usize = RUN_PAGES_MAX / 2;

/// The server of faults of one region.
pub struct FaultHandler {
    shared: Arc<SharedPager>,
    reader: Box<dyn PageReader>,
    readahead: ReadaheadPolicy,
    /// The buffer of fetched pages before they are installed.
    buffer: Pages,
    zeros: Pages,
    /// The stored pages of one read of faults that need no neighbours. They are fetched together.
    pending: Vec<usize>,
    placement: ThreadAffinity,
    until_cpu_check: u32,
    cpu_check_interval: u32,
}

impl FaultHandler {
    /// Creates a handler with its memory, so that serving allocates nothing.
    pub fn new(shared: Arc<SharedPager>, reader: Box<dyn PageReader>) -> io::Result<FaultHandler> {
        let mut buffer = Pages::reserve(RUN_PAGES_MAX)?;
        buffer.bytes_mut(0, RUN_PAGES_MAX).fill(1);
        let zeros = Pages::reserve(CLUSTER_PAGES)?;
        let placement = ThreadAffinity::of_this_thread();
        let pending = Vec::with_capacity(FAULTS_MAX);
        Ok(FaultHandler {
            shared,
            reader,
            readahead: ReadaheadPolicy::default(),
            buffer,
            zeros,
            pending,
            placement,
            until_cpu_check: 0,
            cpu_check_interval: FAULTS_PER_CPU_CHECK,
        })
    }

    /// Serves faults until one is on the sentinel, the page after the last.
    pub fn run(mut self) {
        self.placement = ThreadAffinity::of_this_thread();
        let mut faults = [Fault::default(); FAULTS_MAX];
        loop {
            let count = match self.wait(&mut faults) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return self.shared.log(&format!("faults cannot be read: {error}")),
            };
            let shared = self.shared.clone();
            let _serving = shared.serving.lock();
            if !self.serve_all(&faults[..count]) {
                return;
            }
            self.follow_faulting_cpu(&faults[..count]);
        }
    }

    /// Serves faults that were read together; returns false if one is the sentinel that stops the handler.
    fn serve_all(&mut self, faults: &[Fault]) -> bool {
        let begun = Instant::now();
        for fault in faults {
            match self.shared.arena.page_at(fault.address) {
                Some(page) if page < self.shared.table.pages() && fault.is_protected => {
                    self.cancel_eviction(page);
                }
                Some(page) if page < self.shared.table.pages() => {
                    self.serve(page, *fault, begun);
                }
                Some(sentinel) => {
                    // The region is being dropped. An error has no one left to serve.
                    let _ = self.shared.uffd.zero(self.shared.arena.span(sentinel, 1));
                    return false;
                }
                None => {}
            }
        }
        self.page_in_pending(begun);
        true
    }

    /// Serves the calling thread. Returns false if its page is lost.
    fn serve_caller(&mut self, fault: Fault) -> bool {
        let shared = self.shared.clone();
        let _serving = shared.serving.lock();
        let page = shared.arena.page_at(fault.address);
        if page.is_some_and(|page| shared.table.peek(page).location() == PageLocation::Lost) {
            return false;
        }
        self.serve_all(&[fault]);
        if self.until_cpu_check == 0 {
            shared.serving_cpu.store(threads::this_cpu(), Relaxed);
            self.until_cpu_check = FAULTS_PER_CPU_CHECK;
        }
        self.until_cpu_check -= 1;
        true
    }

    fn wait(&self, faults: &mut [Fault; FAULTS_MAX]) -> io::Result<usize> {
        if !self.shared.options.spin.is_zero() {
            let until = Instant::now() + self.shared.options.spin;
            while Instant::now() < until && !self.shared.uffd.poll(0) {
                std::hint::spin_loop();
            }
        }
        self.shared.uffd.wait(faults)
    }

    /// Moves the handler to the CPU of the threads that it served last, once in a while. If they
    /// run on several CPUs, the handler keeps off none of them.
    fn follow_faulting_cpu(&mut self, faults: &[Fault]) {
        if self.until_cpu_check > 0 || !self.shared.options.follow_cpu {
            self.until_cpu_check = self.until_cpu_check.saturating_sub(1);
            return;
        }
        let mut cpus =
            faults.iter().take(CPU_CHECK_THREADS_MAX).map(|fault| threads::cpu_of(fault.thread));
        let cpu = cpus.next().flatten();
        let cpu = cpu.filter(|_| cpus.all(|other| other == cpu));
        self.placement.keep(cpu.map_or(CpuChoice::Anywhere, CpuChoice::On));
        let now = cpu.unwrap_or(NO_CPU);
        self.cpu_check_interval = match self.shared.serving_cpu.swap(now, Relaxed) == now {
            true => (2 * self.cpu_check_interval).min(FAULTS_PER_CPU_CHECK_MAX),
            false => FAULTS_PER_CPU_CHECK,
        };
        self.until_cpu_check = self.cpu_check_interval;
    }

    fn serve(&mut self, page: usize, fault: Fault, begun: Instant) {
        let shared = self.shared.clone();
        shared.table.prefetch(page);
        let ahead = match shared.options.prefetch {
            true => self.readahead.fault(page),
            false => Readahead::Nothing,
        };
        add(&shared.stats.fault_count, 1);
        // Take the room of the page before any lock: the evictor must run to make more.
        if shared.take_room(1) == 0 {
            self.page_in_pending(begun);
            shared.wait_for_room();
        }
        let held = shared.table.hold(cluster_of(page));
        let state = held.get(page);
        let used_room = match state.location() {
            PageLocation::Untouched => self.zero(held, page, fault.is_write, ahead),
            PageLocation::Resident | PageLocation::CopyingOut => self.serve_present(&held, page),
            // Another thread waits for it already. One wake-up wakes all that wait for the page.
            PageLocation::Fetching => false,
            PageLocation::Staged | PageLocation::Evicting => self.serve_soft_refault(held, page),
            PageLocation::Stored => {
                held.set(page, state.at(PageLocation::Fetching));
                drop(held);
                let stored = StoredPage {
                    used: shared.used(),
                    stored: shared.table.away().saturating_sub(shared.staged()),
                    dropped_since: shared.dropped_since(state),
                };
                let ahead = match shared.options.prefetch {
                    true => self.readahead.page_in(page, ahead, stored),
                    false => Readahead::Nothing,
                };
                if ahead == Readahead::Nothing {
                    return self.pending.push(page);
                }
                self.page_in(page, ahead, begun)
            }
            PageLocation::Lost => self.poison(&held, page),
        };
        if !used_room {
            shared.give_room(1);
        }
    }

    /// Handles a write to a page that is being copied out: the page stays. If it is gone already, the
    /// thread faults again.
    fn cancel_eviction(&self, page: usize) {
        let shared = &self.shared;
        let at = shared.arena.span(page, 1);
        let held = shared.table.hold(cluster_of(page));
        let state = held.get(page);
        if !state.location().is_mapped() {
            return shared.uffd.wake(at);
        }
        if state.location() == PageLocation::CopyingOut {
            held.set(page, state.at(PageLocation::Resident));
            held.mark_refaulted();
            add(&shared.stats.cancelled_count, 1);
        }
        if let Err(error) = shared.uffd.protect(at, false) {
            shared.log(&format!("page {page} cannot be made writable: {error}"));
            shared.uffd.wake(at);
        }
        drop(held);
        shared.enqueue(cluster_of(page));
    }

    /// Handles a fault on a present page: another fault brought it, or the program dropped it past
    /// the pager and it reads as zeros. An earlier copy must not replace it. Returns true if it
    /// used the room of a page, as all such functions do.
    fn serve_present(&self, held: &HeldCluster<'_>, page: usize) -> bool {
        let at = self.shared.arena.span(page, 1);
        held.set(page, held.get(page).at(PageLocation::Resident));
        match self.shared.uffd.zero(at) {
            Ok(_) => self.shared.note_memory_found(),
            Err(error) if self.shared.may_retry(error) => {}
            Err(error) => {
                self.shared.log(&format!("page {page} cannot be filled with zeros: {error}"));
                self.poison(held, page);
            }
        }
        self.shared.uffd.wake(at);
        false
    }

    /// Fetches a page from the store, together with its readahead.
    fn page_in(&mut self, page: usize, ahead: Readahead, begun: Instant) -> bool {
        let (before, after) = ahead.extent();
        let before = self.claim_run((0..page).rev().take(before));
        let after = self.claim_run((page + 1..).take(after));
        let first = page - before;
        let all = first..first + before + 1 + after;
        debug_assert!(all.len() <= RUN_PAGES_MAX, "{ahead:?}");
        self.announce_next_run(&all, ahead);
        let used_room = match self.fetch_and_install(first, all.len()) {
            Ok(()) => true,
            Err(_) => {
                all.filter(|other| *other != page).for_each(|other| self.release_claim(other));
                self.fetch_with_retries(page)
            }
        };
        self.count_page_in(begun);
        if let Readahead::Stride(stride, count) = ahead {
            self.page_in_stride(page, stride, count);
        }
        used_room
    }

    /// Fetches and installs a run. The longest runs go into spare frames, which can be moved into
    /// place.
    fn fetch_and_install(&mut self, first: usize, count: usize) -> Result<(), StoreError> {
        let frame_pool = &self.shared.clone().frame_pool;
        let spare = if count == RUN_PAGES_MAX { frame_pool.take_full() } else { None };
        let Some(spare) = spare else {
            self.fetch(first, count)?;
            install(&self.shared, first, self.buffer.bytes(0, count));
            return Ok(());
        };
        let own = std::mem::replace(&mut self.buffer, spare);
        let fetched = self.fetch(first, count);
        let spare = std::mem::replace(&mut self.buffer, own);
        let frames = match &fetched {
            Ok(()) if install_spare(&self.shared, first, &spare) => SpareFrames::None,
            Ok(()) => SpareFrames::Some,
            Err(_) => SpareFrames::All,
        };
        frame_pool.put(spare, frames);
        fetched
    }

    fn count_page_in(&self, begun: Instant) {
        let (stats, took_ns) = (&self.shared.stats, begun.elapsed().as_nanos() as u64);
        stats.page_in.record(took_ns);
        add(&stats.page_in_ns_total, took_ns as usize);
        add(&stats.demand_page_in_count, 1);
    }

    /// Fetches the pending pages, all at once if there are several.
    fn page_in_pending(&mut self, begun: Instant) {
        let mut pending = std::mem::take(&mut self.pending);
        let mut received = 0u64;
        if pending.len() > 1 {
            let mut wanted = [(0, PageMac::default()); FAULTS_MAX];
            for (want, page) in wanted.iter_mut().zip(&pending) {
                *want = (*page as u64, self.shared.table.mac(*page));
            }
            let (shared, wanted) = (self.shared.clone(), &wanted[..pending.len()]);
            self.reader.get_each(shared.region(), wanted, &mut |nth, bytes| {
                install_one(&shared, pending[nth], bytes);
                received |= 1 << nth;
            });
        }
        // Wake the threads only now: the first to wake takes the CPU, and delays the pages of the
        // others. Threads that wake together fault together again.
        let is_resident = |(nth, _): &(usize, &usize)| received & 1 << nth != 0;
        self.wake_all(pending.iter().enumerate().filter(is_resident).map(|(_, page)| *page));
        for (nth, page) in pending.drain(..).enumerate() {
            if received & 1 << nth != 0 {
                self.count_page_in(begun);
            } else if !self.page_in(page, Readahead::Nothing, begun) {
                self.shared.give_room(1);
            }
        }
        self.pending = pending;
    }

    /// Wakes the threads that wait for these pages. If they share a CPU, one call covers the range;
    /// a thread in between that waits for another page faults again, which costs less. On several
    /// CPUs, the first thread runs while others are woken.
    fn wake_all(&self, pages: impl Iterator<Item = usize> + Clone) {
        let wake =
            |first, last| self.shared.uffd.wake(self.shared.arena.span(first, last + 1 - first));
        match (self.shared.handlers_cpu(), pages.clone().min(), pages.clone().max()) {
            (Some(_), Some(first), Some(last)) => wake(first, last),
            _ => pages.for_each(|page| wake(page, page)),
        }
    }

    /// Announces a stream's next run, so that it is requested before its fault.
    fn announce_next_run(&mut self, all: &Range<usize>, ahead: Readahead) {
        if all.len() < ANNOUNCE_FROM_PAGES {
            return;
        }
        let is_stored =
            |page: &usize| self.shared.table.peek(*page).location() == PageLocation::Stored;
        let (first, count) = match ahead {
            Readahead::Up(_) => {
                let end = (next_run_boundary(all.end)).min(self.shared.table.pages());
                (all.end, (all.end..end).take_while(is_stored).count())
            }
            Readahead::Down(_) => {
                let end = last_run_boundary(all.start);
                let count = (end..all.start).rev().take_while(is_stored).count();
                (all.start - count, count)
            }
            Readahead::Around(..) | Readahead::Nothing | Readahead::Stride(..) => return,
        };
        if count > 1 {
            let run = PageRun { first: first as u64, count: count as u64 };
            self.reader.announce(self.shared.region(), run);
        }
    }

    /// Fetches the pages at a stride from one that has just been installed.
    fn page_in_stride(&mut self, page: usize, stride: isize, count: usize) {
        let next = |page: &usize| page.checked_add_signed(stride);
        for page in std::iter::successors(Some(page), next).skip(1).take(count) {
            if self.claim_run(std::iter::once(page)) == 0 {
                return;
            }
            match self.fetch(page, 1) {
                Ok(()) => install(&self.shared, page, self.buffer.bytes(0, 1)),
                Err(_) => return self.release_claim(page),
            }
        }
    }

    /// Marks pages as being fetched, while they are in the store and there is room. Returns how
    /// many.
    fn claim_run(&self, pages: impl Iterator<Item = usize> + Clone) -> usize {
        let shared = &self.shared;
        let is_stored = |page: &usize| {
            *page < shared.table.pages()
                && shared.table.peek(*page).location() == PageLocation::Stored
        };
        let pages = pages.take(RUN_PAGES_MAX - 1);
        let wanted = pages.clone().take_while(is_stored).count();
        if wanted == 0 {
            return 0;
        }
        let room = shared.take_room(wanted);
        let (mut claimed, mut cluster) = (0, None);
        for page in pages.take(room) {
            if !cluster.as_ref().is_some_and(|held: &HeldCluster<'_>| held.has(page)) {
                // Never hold two locks at a time.
                drop(cluster.take());
            }
            let held = cluster.get_or_insert_with(|| shared.table.hold(cluster_of(page)));
            let state = held.get(page);
            if state.location() != PageLocation::Stored {
                break;
            }
            held.set(page, state.at(PageLocation::Fetching));
            claimed += 1;
        }
        drop(cluster);
        shared.give_room(room - claimed);
        claimed
    }

    /// Releases the claim on a page that was not fetched. Its waiting threads fault again.
    fn release_claim(&self, page: usize) {
        let held = self.shared.table.hold(cluster_of(page));
        held.set(page, held.get(page).at(PageLocation::Stored));
        drop(held);
        self.shared.give_room(1);
        self.shared.uffd.wake(self.shared.arena.span(page, 1));
    }

    fn fetch(&mut self, first: usize, count: usize) -> Result<(), StoreError> {
        let mut macs = [PageMac::default(); RUN_PAGES_MAX];
        for (mac, page) in macs[..count].iter_mut().zip(first..) {
            *mac = self.shared.table.mac(page);
        }
        let into = self.buffer.bytes_mut(0, count);
        self.reader.get(self.shared.region(), first as u64, &macs[..count], into)
    }

    /// Fetches one page, with retries while servers may still answer.
    fn fetch_with_retries(&mut self, page: usize) -> bool {
        let until = Instant::now() + self.shared.options.unreachable_limit;
        let error = loop {
            match self.fetch(page, 1) {
                Ok(()) => {
                    install(&self.shared, page, self.buffer.bytes(0, 1));
                    return true;
                }
                Err(StoreError::Unreachable { .. }) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => break error,
            }
        };
        let address = self.shared.arena.span(page, 1).address();
        self.shared.log(&format!("SIGBUS at {address:#x}: {error}"));
        let held = self.shared.table.hold(cluster_of(page));
        self.poison(&held, page)
    }

    /// Marks a page as lost, so that accesses get SIGBUS. If the kernel cannot do that, the process
    /// ends: the waiting threads could get neither bytes nor a signal, and would fault for ever.
    fn poison(&self, held: &HeldCluster<'_>, page: usize) -> bool {
        let shared = &self.shared;
        let at = shared.arena.span(page, 1);
        held.set(page, held.get(page).at(PageLocation::Lost));
        match shared.uffd.poison(at) {
            Ok(()) => {}
            Err(error) if shared.may_retry(error) => {}
            Err(error) => {
                let (address, limit) = (at.address(), "sysctl vm.max_map_count");
                shared.log(&format!(
                    "the page at {address:#x} is lost, and SIGBUS cannot be given for it: {error} (see `{limit}`); \
                     ending the process"
                ));
                std::process::abort();
            }
        }
        shared.uffd.wake(at);
        false
    }
}

/// Threads that serve themselves take turns.
impl ServeFault for Mutex<FaultHandler> {
    fn serve(&self, fault: Fault) -> bool {
        self.lock().unwrap_or_else(PoisonError::into_inner).serve_caller(fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_fit_the_buffer() {
        let mut readahead = ReadaheadPolicy::default();
        for page in 1..10_000 {
            if let Readahead::Up(pages) | Readahead::Down(pages) = readahead.fault(page) {
                assert!(pages < RUN_PAGES_MAX);
            }
        }
    }
}
