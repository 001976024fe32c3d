//! State that a pager's threads share: memory, page states, room, and the queue of clusters to evict.
//!
//! Invariant: resident and staged pages together stay within the limit, unless nothing more can be
//! evicted ([`SharedPager::allow_overflow`]); then the program goes on rather than stops.

use super::frame_pool::FramePool;
mod discard;
mod queue;
mod room;

use super::options::{EvictionMethod, Features, PagerOptions};
use super::policy::{BlockUse, VictimQueue};
use super::stats::{PagerStats, add};
use super::sys::lock::{Lock, Signal};
use super::sys::memory::{OwnMemory, PageSpan, Pages, ZeroedTable};
use super::sys::uffd::{Access, Uffd, UffdError};
use super::table::{
    BLOCKS_MAX, CLUSTER_PAGES, EvictionStamp, HeldCluster, PageLocation, PageState, PageTable,
    cluster_of,
};
use crate::page::{PAGE_BYTES, PageRun};
use crate::store::{RegionId, StoreError};
pub use room::Thresholds;
use rustix::io::Errno;
use rustix::mm::Advice;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest wait of a thread for another one. A lost wake-up costs no more than this.
const WAIT_MAX: Duration = Duration::from_millis(50);

/// The pause before the next try if the kernel has no memory for a page.
const MEMORY_RETRY_PAUSE: Duration = Duration::from_millis(5);

/// The interval between two log lines about the same recurring event.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A region at least this long (32 MiB) begins at a multiple of it. Then a page that an allocator inside the
/// region aligns is aligned in memory too.
pub const REGION_ALIGN_PAGES: usize = (32 << 20) / PAGE_BYTES;

/// A number that no CPU has.
pub const NO_CPU: usize = usize::MAX;

/// The reason for which memory cannot be paged.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// The size is out of range.
    #[error("cannot page {bytes} bytes: {why}")]
    Size {
        /// The size that was asked for, in bytes.
        bytes: u64,
        /// The range that is allowed, for the user.
        why: &'static str,
    },
    /// This user or this kernel has no userfaultfd that can page.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// The system refused address space, a descriptor or a thread.
    #[error("{what}: {source}")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The error that the system returned.
        source: io::Error,
    },
    /// An error of the page store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The time at which a recurring line was last logged.
#[derive(Debug, Default)]
pub struct LogThrottle(Option<Instant>);

impl LogThrottle {
    /// Returns true if the line is due, and then counts it as logged.
    pub fn is_due(&mut self) -> bool {
        let is_due = self.0.is_none_or(|at| at.elapsed() >= LOG_INTERVAL);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}

/// A time in which the kernel has no memory for fetched pages. Only the thread that serves faults takes its
/// lock, so the lock is open in the child of a fork.
#[derive(Debug, Default)]
struct MemoryShortage {
    since: Option<Instant>,
    log: LogThrottle,
}

/// The state of one region's pager.
pub struct SharedPager {
    pub(super) arena: Pages,
    pub(super) staging: Pages,
    pub(super) uffd: Uffd,
    pub(super) frame_pool: FramePool,
    pub(super) access: Access,
    /// The eviction method in use, given this kernel's features.
    pub(super) eviction_method: EvictionMethod,
    /// The source of copies, opened before the program can change its root directory.
    pub(super) own_memory: Option<OwnMemory>,
    /// True once the notice about copies was logged; a forked child inherits it.
    pub(super) has_logged_copies: AtomicBool,
    pub(super) table: PageTable,
    /// The number of frames in each staging block.
    pub(super) frames: ZeroedTable<AtomicU32>,
    /// The [`BlockUse`] of each staging block. Only the handler writes it.
    uses: ZeroedTable<AtomicU64>,
    region: AtomicU64,
    /// The lock of the thread that serves faults, and the lock of the evictor while it works. A
    /// fork takes both.
    pub(super) serving: Lock,
    pub(super) evicting: Lock,
    /// The number of callers that have stopped the evictor, and the lock for changes to it.
    stops: AtomicUsize,
    changing_stops: Lock,
    pub(super) thresholds: Thresholds,
    pub(super) options: PagerOptions,
    pub(super) stats: PagerStats,
    /// The CPU that serves faults, or NO_CPU; other threads avoid it.
    pub(super) serving_cpu: AtomicUsize,
    /// Notifies the evictor of less room, or of dropped pages.
    pub(super) work: Signal,
    /// Notifies handlers of more room.
    pub(super) room: Signal,
    pub(super) is_stopping: AtomicBool,
    /// A request to evict all pages. The four flags are independent of each other, so they form no single
    /// mode.
    pub(super) is_evicting_all: AtomicBool,
    /// A request to release all staged pages and to evict nothing.
    pub(super) is_unstaging: AtomicBool,
    /// The number of resident and staged pages.
    used: AtomicUsize,
    staged: AtomicUsize,
    /// The pages of the copy buffer in use; the limit has room for them.
    pub(super) copy_pages: AtomicUsize,
    /// The number of pages made resident since the start.
    made_resident_count: AtomicU64,
    /// The number of pages dropped from memory since the start; it wraps.
    dropped_count: AtomicU32,
    may_overflow: AtomicBool,
    is_short: AtomicBool,
    shortage: Mutex<MemoryShortage>,
    queue: Mutex<VictimQueue>,
    dropped: Mutex<Vec<PageRun>>,
    /// Pages that other mappings have replaced.
    replaced: Mutex<Vec<std::ops::Range<usize>>>,
}

impl std::fmt::Debug for SharedPager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pages = self.table.pages();
        f.debug_struct("Shared")
            .field("pages", &pages)
            .field("thresholds", &self.thresholds)
            .finish()
    }
}

impl SharedPager {
    /// Reserves and registers the memory of a region. Starts no thread.
    pub fn new(
        pages: usize,
        region: RegionId,
        options: PagerOptions,
    ) -> Result<SharedPager, PagerError> {
        let reserve = |source| PagerError::System { what: "reserving address space", source };
        let limit = options.resident_bytes as usize / PAGE_BYTES;
        let (uffd, access) = Uffd::open(options.user_mode_only, options.serving, options.features)?;
        let (eviction_method, own_memory) =
            choose_eviction_method(options.eviction_method, uffd.features())?;
        let thresholds = Thresholds::of(limit.max(CLUSTER_PAGES), eviction_method);
        // The worst case: one page in each block, and no more pages staged than the limit.
        let blocks = (thresholds.limit + thresholds.batch).min(BLOCKS_MAX - 1);
        // The page after the last is the sentinel: a fault on it stops the handler.
        let align = if pages < REGION_ALIGN_PAGES { 1 } else { REGION_ALIGN_PAGES };
        let arena = Pages::reserve_aligned(pages + 1, align).map_err(reserve)?;
        let staging = Pages::reserve(blocks * CLUSTER_PAGES).map_err(reserve)?;
        for memory in [&arena, &staging] {
            // A child that touches it gets SIGSEGV, not zeros.
            memory.all().advise(Advice::LinuxDontFork).map_err(|errno| reserve(errno.into()))?;
        }
        let register = |source: Errno| UffdError::System(source.into());
        uffd.register_paged(arena.all()).map_err(register)?;
        uffd.register_target(&staging).map_err(register)?;
        let frame_pool = FramePool::new(thresholds.frame_pool).map_err(reserve)?;
        frame_pool.register(&uffd).map_err(register)?;
        Ok(SharedPager {
            arena,
            staging,
            uffd,
            frame_pool,
            access,
            eviction_method,
            own_memory,
            has_logged_copies: AtomicBool::new(false),
            table: PageTable::new(pages).map_err(reserve)?,
            frames: ZeroedTable::new(blocks).map_err(reserve)?,
            uses: ZeroedTable::new(blocks).map_err(reserve)?,
            region: AtomicU64::new(region.0),
            serving: Lock::default(),
            evicting: Lock::default(),
            stops: AtomicUsize::new(0),
            changing_stops: Lock::default(),
            thresholds,
            options,
            stats: PagerStats::default(),
            serving_cpu: AtomicUsize::new(NO_CPU),
            work: Signal::default(),
            room: Signal::default(),
            is_stopping: AtomicBool::new(false),
            is_evicting_all: AtomicBool::new(false),
            is_unstaging: AtomicBool::new(false),
            used: AtomicUsize::new(0),
            staged: AtomicUsize::new(0),
            copy_pages: AtomicUsize::new(0),
            made_resident_count: AtomicU64::new(0),
            dropped_count: AtomicU32::new(0),
            may_overflow: AtomicBool::new(false),
            is_short: AtomicBool::new(false),
            shortage: Mutex::default(),
            queue: Mutex::default(),
            dropped: Mutex::default(),
            replaced: Mutex::default(),
        })
    }

    /// Returns the region's identifier in the store.
    pub fn region(&self) -> RegionId {
        RegionId(self.region.load(Relaxed))
    }

    /// Sets whether children of a fork inherit the memory.
    pub fn set_fork_inheritance(&self, given: bool) -> Result<(), Errno> {
        let advice = if given { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
        self.arena.all().advise(advice)?;
        self.frame_pool.advise(advice)?;
        self.staging.all().advise(advice)
    }

    /// Stops the evictor, when no page is staged: a child lacks the evictor's list of staged blocks.
    /// Handlers that wait for room go over the limit.
    pub fn stop_evicting(&self) {
        let _changing = self.changing_stops.lock();
        if self.stops.fetch_add(1, Relaxed) == 0 {
            self.lock_unstaged();
            self.allow_overflow(true);
        }
    }

    /// Lets the evictor go on after as many calls as [`Self::stop_evicting`].
    pub fn resume_evicting(&self) {
        let _changing = self.changing_stops.lock();
        if self.stops.fetch_sub(1, Relaxed) == 1 {
            self.allow_overflow(false);
            self.evicting.raw_unlock();
        }
    }

    /// Lets the evictor of a forked child go on, however often the parent stopped its own.
    pub fn resume_evicting_in_child(&self) {
        self.changing_stops.raw_unlock();
        self.stops.store(0, Relaxed);
        self.allow_overflow(false);
        self.evicting.raw_unlock();
    }

    fn lock_unstaged(&self) {
        self.is_unstaging.store(true, Relaxed);
        loop {
            self.work.notify();
            self.evicting.raw_lock();
            if self.staged() == 0 {
                break self.is_unstaging.store(false, Relaxed);
            }
            self.evicting.raw_unlock();
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Prepares the child of a fork to serve its own faults. A new store has no pages of the child yet; all
    /// of them are resident.
    pub fn restart(&self, region: Option<RegionId>) -> io::Result<()> {
        self.uffd.renew(self.options.user_mode_only, self.options.serving)?;
        self.register_paged()?;
        if let Some(own_memory) = &self.own_memory
            && let Err(error) = own_memory.renew()
            && self.eviction_method != EvictionMethod::Moved
        {
            return Err(error);
        }
        // The new evictor takes all blocks as free.
        self.staging.all().advise(Advice::LinuxDontNeed)?;
        self.uffd.register_target(&self.staging)?;
        self.frame_pool.drop_all();
        self.frame_pool.register(&self.uffd)?;
        let Some(region) = region else { return Ok(()) };
        self.region.store(region.0, Relaxed);
        let forget = |held: &HeldCluster<'_>, pages: std::ops::Range<usize>| {
            pages.for_each(|page| held.set(page, held.get(page).with_in_store(false)));
        };
        // A page in the store is resident, so its cluster is in the queue, or it was dropped.
        for cluster in lock(&self.queue).clusters() {
            let held = self.table.hold(cluster);
            forget(&held, held.pages());
        }
        for run in self.take_dropped() {
            for page in run.first as usize..(run.first + run.count) as usize {
                let held = self.table.hold(cluster_of(page));
                forget(&held, page..page + 1);
            }
        }
        Ok(())
    }

    /// Marks pages as replaced by another mapping.
    pub fn stop_paging(&self, first: usize, count: usize) {
        lock(&self.replaced).push(first..first + count);
    }

    /// Registers the paged memory, without replaced pages and without lost pages that an empty file covers.
    fn register_paged(&self) -> Result<(), Errno> {
        let mut others = lock(&self.replaced).clone();
        if !self.uffd.features().can_poison() {
            let is_lost = |page: &usize| self.table.peek(*page).location() == PageLocation::Lost;
            let lost = (0..self.table.pages()).filter(is_lost);
            others.extend(lost.map(|page| page..page + 1));
        }
        others.sort_by_key(|range| range.start);
        // This includes the sentinel, the page after the last.
        let pages = self.table.pages() + 1;
        others.push(pages..pages);
        let mut first = 0;
        for other in others {
            if first < other.start {
                self.uffd.register_paged(self.arena.span(first, other.start - first))?;
            }
            first = first.max(other.end);
        }
        Ok(())
    }

    /// Writes a line to the log, if there is one.
    pub fn log(&self, line: &str) {
        if let Some(log) = &self.options.log {
            log(line);
        }
    }

    /// Handles the kernel's refusal to install a page. After ENOMEM, waits briefly. Returns true to retry,
    /// until the shortage has lasted for the time limit.
    pub fn may_retry(&self, refused: Errno) -> bool {
        if refused != Errno::NOMEM {
            return false;
        }
        let mut shortage = lock(&self.shortage);
        let since = *shortage.since.get_or_insert_with(Instant::now);
        if shortage.log.is_due() {
            self.log("the kernel finds no memory for fetched pages: they are tried again");
        }
        drop(shortage);
        self.is_short.store(true, Relaxed);
        self.work.notify();
        std::thread::sleep(MEMORY_RETRY_PAUSE);
        since.elapsed() < self.options.unreachable_limit
    }

    /// Notes that the kernel found memory for a page.
    pub fn note_memory_found(&self) {
        if self.is_short.load(Relaxed) {
            lock(&self.shortage).since = None;
            self.is_short.store(false, Relaxed);
        }
    }

    /// Returns the addresses of pages of a staging block.
    pub fn staged_span(&self, block: u32, offset: usize, count: usize) -> PageSpan<'_> {
        self.staging.span(block as usize * CLUSTER_PAGES + offset, count)
    }

    /// Resets the refault count of a block that is about to be filled.
    pub fn note_block_filled(&self, block: u32) {
        self.uses[block as usize].store(0, Relaxed);
    }

    /// Counts pages that a fault made resident.
    pub fn count_made_resident(&self, pages: usize) {
        add(&self.made_resident_count, pages);
    }

    /// Counts a soft refault of a block. Returns true if, at this rate, at least half of its pages refault
    /// before the staged pages are replaced.
    pub fn is_refaulted_whole(&self, block: u32) -> bool {
        let uses = &self.uses[block as usize];
        let (before, clock) =
            (BlockUse(uses.load(Relaxed)), self.made_resident_count.load(Relaxed));
        let (now, is_whole) = before.refault(clock, self.thresholds.staged);
        uses.store(now.0, Relaxed);
        is_whole
    }

    /// Returns the state of a page that is dropped from memory now.
    pub fn drop_stamped(&self, state: PageState) -> PageState {
        state.stored(EvictionStamp::of(self.dropped_count.fetch_add(1, Relaxed)))
    }

    /// Returns the number of pages dropped after a stored one (the refault distance).
    pub fn dropped_since(&self, state: PageState) -> usize {
        state.stamp().until(EvictionStamp::of(self.dropped_count.load(Relaxed)))
    }

    /// Returns the CPU that serves faults, if it is known.
    pub fn handlers_cpu(&self) -> Option<usize> {
        Some(self.serving_cpu.load(Relaxed)).filter(|cpu| *cpu != NO_CPU)
    }

    /// Waits until there is work for the evictor.
    pub fn wait_for_work(&self, seen: u32) {
        self.work.wait(seen, WAIT_MAX);
    }
}

/// Chooses the eviction method from the options and the kernel's features. Returns it with the
/// source of copies.
fn choose_eviction_method(
    wanted: EvictionMethod,
    features: Features,
) -> Result<(EvictionMethod, Option<OwnMemory>), PagerError> {
    let method = if features.can_move() { wanted } else { EvictionMethod::Copied };
    if method == EvictionMethod::Moved {
        // Only pages that the program may not write to are copied. If this fails, they stay.
        return Ok((method, OwnMemory::open().ok()));
    }
    match OwnMemory::open() {
        Ok(own_memory) => Ok((method, Some(own_memory))),
        Err(_) if method == EvictionMethod::Cheapest => Ok((EvictionMethod::Moved, None)),
        Err(source) => {
            let what = "opening /proc/self/mem, from which pages are copied (mount /proc)";
            Err(PagerError::System { what, source })
        }
    }
}

/// Locks a mutex even if it is poisoned: each change is one call, so values are whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
