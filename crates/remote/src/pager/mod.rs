//! The pager: memory whose pages lie in a [`PageStore`] and are fetched when the program touches
//! them.
//!
//! ```text
//!   program ──fault──▶ handler ──get──▶ store
//!      ▲                  │               ▲
//!      └────UFFDIO_COPY───┘               │ put
//!   region ──UFFDIO_MOVE──▶ staging ──────┘   (evictor)
//! ```
//!
//! The handler is a thread of its own, or the program's thread itself ([`Serving`]).
//!
//! The whole pager is in the process whose memory it pages, because only that process can move its
//! anonymous pages. Invariants: a page is evicted by a move, or by a copy that counts only if no
//! thread wrote to the page since. So no write is lost (except as [`EvictionMethod`] says). A
//! staged page is dropped only when the store has acknowledged it. An access to a page that no MAC
//! proves gets SIGBUS.
//!
//! Source: userfaultfd(2). Measured on this kind of machine: a handler on the CPU of the faulting
//! thread costs a third of one on another CPU. Moving 64 adjacent pages takes 0.1 µs for each,
//! moving scattered pages 1.1 µs.

pub mod doctor;
mod evictor;
mod frame_pool;
mod handler;
mod install;
mod job_memory;
mod mask;
mod options;
mod policy;
pub mod replacement;
mod shared;
mod stats;
mod sys;
mod table;
#[cfg(test)]
mod tests;

pub use job_memory::JobMemory;
pub use options::{EvictionMethod, Features, KeepAwake, Log, PagerOptions};
pub use pagetax_core::network_memory::{PagerCounts, Serving};
pub use shared::{PagerError, REGION_ALIGN_PAGES};
pub use sys::uffd::{Access, UffdError, remedy};

use crate::page::{PAGE_BYTES, draw_key};
use crate::store::{ChildStore, PageStore, StoreError};
use crate::threads::{self, RunningThread};
use evictor::Evictor;
use handler::FaultHandler;
use shared::SharedPager;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;
use sys::idle_poll::IdlePoll;
use sys::sigbus::{self, ServedRegion};
use sys::uffd::Uffd;

/// The time for which a thread that serves itself polls for a reply before it sleeps. Servers on
/// the same machine are faster than this, and a thread that sleeps may be woken on another CPU.
const ANSWER_SPIN: Duration = Duration::from_micros(100);

/// The names of a pager's threads, by which a measurement finds their CPU time.
pub const THREADS: [&str; 2] = ["pagetax-fault", "pagetax-evict"];

/// Opens a userfaultfd as a region does, and closes it. Returns the faults that it would serve, and
/// its features.
///
/// # Errors
/// This user or this kernel cannot page.
pub fn probe(user_mode_only: bool, serving: Serving) -> Result<(Access, Features), UffdError> {
    Uffd::open(user_mode_only, serving, Features::All)
        .map(|(uffd, access)| (access, uffd.features()))
}

/// Memory that may be larger than the machine's. A limited part of it is resident; the rest is in a
/// page store.
#[derive(Debug)]
pub struct RemoteRegion {
    shared: Arc<SharedPager>,
    running: Mutex<PagerThreads>,
    /// True if `running`'s store is inherited. This is outside the lock: any thread reads it while
    /// another forks, and the child would find the lock held.
    is_store_inherited: AtomicBool,
}

/// The store of a forked child.
#[derive(Debug)]
pub enum StoreInChild {
    /// The store in the parent's memory, of which the child has a copy.
    Inherited,
    /// A store of [`RemoteRegion::fork_store`], which has the region's pages.
    WithPages(Arc<dyn PageStore>),
    /// A store without pages. All pages are resident.
    Empty(Arc<dyn PageStore>),
}

/// The threads and the store, which a child of a fork does not inherit.
#[derive(Debug)]
struct PagerThreads {
    store: Arc<dyn PageStore>,
    handler: Option<RunningHandler>,
    evictor: Option<RunningThread>,
}

/// The handler's thread, or its registration for in-place serving.
#[derive(Debug)]
enum RunningHandler {
    Thread(RunningThread),
    InPlace(ServedRegion),
}

impl std::fmt::Debug for dyn PageStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

impl RemoteRegion {
    /// Maps `bytes` zeros, rounded up to whole pages.
    ///
    /// # Errors
    /// The store has no room for all of it (unless [`PagerOptions::overcommit`]) or is unreachable,
    /// or the kernel has no userfaultfd for this user.
    pub fn map(
        store: Arc<dyn PageStore>,
        bytes: u64,
        options: PagerOptions,
    ) -> Result<RemoteRegion, PagerError> {
        let pages = bytes.div_ceil(PAGE_BYTES as u64);
        // Page numbers and cluster numbers have 32 bits each.
        if pages == 0 || pages > u32::MAX.into() {
            return Err(PagerError::Size { bytes, why: "a region has from 1 byte to 16 TiB" });
        }
        let no_key = |source| PagerError::System { what: "drawing the key of checksums", source };
        draw_key().map_err(no_key)?;
        let unreachable_limit = store.unreachable_limit().unwrap_or(options.unreachable_limit);
        let options = PagerOptions { unreachable_limit, ..options };
        let region = store.create_region(pages, options.overcommit)?;
        let started = Self::start(&store, pages as usize, region, options);
        if started.is_err() {
            // That error matters more than a failure to drop an empty region.
            let _ = store.drop_region(region);
        }
        started
    }

    fn start(
        store: &Arc<dyn PageStore>,
        pages: usize,
        region: crate::store::RegionId,
        options: PagerOptions,
    ) -> Result<RemoteRegion, PagerError> {
        let shared = Arc::new(SharedPager::new(pages, region, options)?);
        let running = PagerThreads { store: store.clone(), handler: None, evictor: None };
        let is_store_inherited = AtomicBool::new(store.is_inherited());
        let mapped = RemoteRegion { shared, running: Mutex::new(running), is_store_inherited };
        mapped.running().spawn(&mapped.shared)?;
        Ok(mapped)
    }

    fn running(&self) -> MutexGuard<'_, PagerThreads> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first byte. It is valid for reads and writes of [`Self::len`] bytes while the
    /// region lives. An access to a lost page gets SIGBUS.
    pub fn as_ptr(&self) -> *mut u8 {
        self.shared.arena.as_ptr()
    }

    /// Returns the length in bytes: whole pages.
    pub fn len(&self) -> usize {
        self.shared.table.pages() * PAGE_BYTES
    }

    /// Returns false: a region has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the bytes of the region.
    pub fn as_slice(&self) -> &[u8] {
        self.shared.arena.bytes(0, self.shared.table.pages())
    }

    /// Returns the bytes of the region, to write to.
    #[allow(unsafe_code)]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is live and writable as long as the region is, and `&mut self` is the
        // only safe path to it. The pager moves pages away and back, but never changes their bytes.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len()) }
    }

    /// Drops the whole pages of a range, so that they read as zeros. Returns false if some, such as
    /// locked ones, could not be dropped; those keep their bytes.
    ///
    /// # Panics
    /// The range is not inside the region.
    pub fn discard(&mut self, offset: usize, len: usize) -> bool {
        let end = offset.checked_add(len).filter(|end| *end <= self.len());
        let end = end.expect("a range inside the region") / PAGE_BYTES;
        let first = offset.div_ceil(PAGE_BYTES);
        self.shared.discard(first, end.saturating_sub(first))
    }

    /// Drops pages that other threads may be using, on behalf of an allocator. Returns the same as
    /// [`Self::discard`].
    ///
    /// # Safety
    /// No reference to these bytes, such as one from [`Self::as_slice`], may rely on their values.
    ///
    /// # Panics
    /// The pages are not inside the region.
    #[allow(unsafe_code)]
    pub unsafe fn discard_shared(&self, first: usize, pages: usize) -> bool {
        self.shared.discard(first, pages)
    }

    /// Returns true if a child of a fork can inherit the memory: all pages are resident, or the store is in
    /// the process.
    pub fn can_fork(&self) -> bool {
        self.is_store_inherited() || self.shared.table.away() == 0
    }

    /// Returns true if children of a fork need no store of their own.
    pub fn is_store_inherited(&self) -> bool {
        self.is_store_inherited.load(Relaxed)
    }

    /// Stops evicting until as many calls of [`Self::resume_evicting`], so that the answer of
    /// [`Self::can_fork`] stays true. Meanwhile the resident limit does not hold.
    pub fn stop_evicting(&self) {
        self.shared.stop_evicting();
    }

    /// Undoes one [`Self::stop_evicting`].
    pub fn resume_evicting(&self) {
        self.shared.resume_evicting();
    }

    /// Keeps the pages that are in the store for the child of one fork. Evicting is stopped from before
    /// this call until the fork.
    ///
    /// # Errors
    /// Those of [`PageStore::fork`].
    pub fn fork_store(&self) -> Result<ChildStore, StoreError> {
        let store = self.running().store.clone();
        store.fork(self.shared.region())
    }

    /// Stops the pager for a fork. Until [`Self::after_fork`], no thread may touch missing pages.
    /// Returns true if the child will have the memory: with a [`Self::fork_store`], or without.
    pub fn before_fork(&self, has_child_store: bool) -> bool {
        // This comes first, because a handler may be waiting for room that only the evictor makes.
        self.stop_evicting();
        self.shared.serving.raw_lock();
        (has_child_store || self.can_fork()) && self.shared.set_fork_inheritance(true).is_ok()
    }

    /// Lets the pager go on in the parent.
    pub fn after_fork(&self) {
        // Ignored: advice that was accepted can be withdrawn. Otherwise children of raw system
        // calls would read zeros.
        let _ = self.shared.set_fork_inheritance(false);
        self.shared.serving.raw_unlock();
        self.shared.resume_evicting();
    }

    /// Restarts the pager in the child, which has none of the parent's threads.
    ///
    /// # Errors
    /// Those of [`Self::map`]. The memory cannot be used then.
    pub fn restart_in_child(&self, store: StoreInChild) -> Result<(), PagerError> {
        let failed = |source| PagerError::System { what: "starting the child's pager", source };
        let mut running = match self.running.try_lock() {
            Ok(running) => running,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            // A thread of the parent that was ending the process held it. No thread of the child
            // will release it.
            Err(TryLockError::WouldBlock) => return Err(failed(ErrorKind::WouldBlock.into())),
        };
        let (store, region) = match store {
            StoreInChild::Inherited => (running.store.clone(), None),
            StoreInChild::WithPages(store) => (store, None),
            StoreInChild::Empty(store) => {
                let region = store.create_region(self.shared.table.pages() as u64, true)?;
                (store, Some(region))
            }
        };
        self.is_store_inherited.store(store.is_inherited(), Relaxed);
        // The child must not end the parent's threads and store.
        let parents = PagerThreads { store, handler: None, evictor: None };
        std::mem::forget(std::mem::replace(&mut *running, parents));
        self.shared.restart(region).map_err(failed)?;
        let _ = self.shared.set_fork_inheritance(false);
        self.shared.serving.raw_unlock();
        self.shared.resume_evicting_in_child();
        running.spawn(&self.shared)
    }

    /// Stops paging a range for good: the caller has mapped something else over it. The pages count
    /// as dropped.
    pub fn stop_paging(&self, first: usize, pages: usize) {
        self.shared.stop_paging(first, pages);
    }

    /// Returns true if the page of an address is resident. It may be evicted at once, unless the
    /// pager is stopped.
    pub fn is_resident(&self, at: *const u8) -> bool {
        let page = self.shared.arena.page_at(at as u64);
        page.is_none_or(|page| self.shared.table.peek(page).location().is_mapped())
    }

    /// Returns true if system calls into missing pages work; otherwise they fail with EFAULT.
    pub fn serves_system_calls(&self) -> bool {
        self.shared.access == Access::Full
    }

    /// Asks the store to drop the region after this process has ended. Unlike a drop of this value,
    /// the region can still be used until then.
    pub fn drop_at_end(&self) {
        let store = self.running().store.clone();
        store.drop_region_at_end(self.shared.region());
    }

    /// Evicts all pages that can be evicted, so that the next access to each fetches it. Waits as
    /// long as there is progress.
    pub fn evict_all(&self) {
        // The thread of the last fault may run before the handler has recorded the installed pages.
        // The evictor does not see them until then.
        drop(self.shared.serving.lock());
        let mut left = usize::MAX;
        while self.shared.used() < left {
            left = self.shared.used();
            self.shared.is_evicting_all.store(true, Relaxed);
            self.shared.work.notify();
            // Do not wait only until no page is left: the evictor would go on with pages that are
            // touched next.
            while self.shared.is_evicting_all.load(Relaxed) {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> PagerCounts {
        self.shared.stats.counts()
    }

    /// Returns the latency histogram of demand page-ins: nanoseconds (within 6 %) and count.
    pub fn page_in_latency(&self) -> Vec<(u64, u64)> {
        self.shared.stats.page_in.steps()
    }

    /// Returns the bytes in this machine's memory, including pages that are being evicted, and
    /// spare frames.
    pub fn resident_bytes(&self) -> u64 {
        let unlisted = self.shared.copy_pages.load(Relaxed) + self.shared.frame_pool.pages();
        ((self.shared.used() + unlisted) * PAGE_BYTES) as u64
    }
}

impl PagerThreads {
    fn spawn(&mut self, shared: &Arc<SharedPager>) -> Result<(), PagerError> {
        let failed = |source| PagerError::System { what: "starting the pager", source };
        let mut reader = self.store.reader()?;
        if shared.options.serving == Serving::InPlace {
            reader.set_poll_time(ANSWER_SPIN);
        }
        let handler = FaultHandler::new(shared.clone(), reader).map_err(failed)?;
        let idle_poll = idle_poll(&shared.options)?;
        let evictor =
            Evictor::new(shared.clone(), self.store.writer()?, idle_poll).map_err(failed)?;
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let shared = shared.clone();
            let log = move || {
                shared.log(
                    "a thread of the pager has panicked: the process ends, as it would wait for its memory for ever; \
                     please report this",
                );
            };
            threads::spawn(name, || threads::run_or_abort(work, log)).map_err(failed)
        };
        self.handler = Some(match shared.options.serving {
            Serving::Thread => {
                RunningHandler::Thread(spawn(THREADS[0], Box::new(|| handler.run()))?)
            }
            Serving::InPlace => {
                let (server, pages) = (Box::new(Mutex::new(handler)), shared.table.pages());
                let served = sigbus::serve(&shared.arena, pages, server);
                RunningHandler::InPlace(served.map_err(|source| {
                    let what = "serving faults in place";
                    PagerError::System { what, source }
                })?)
            }
        });
        self.evictor = Some(spawn(THREADS[1], Box::new(|| evictor.run()))?);
        Ok(())
    }
}

/// Opens what keeps idle CPUs awake, if it is wanted.
fn idle_poll(options: &PagerOptions) -> Result<Option<IdlePoll>, PagerError> {
    match options.keep_awake {
        KeepAwake::Never => Ok(None),
        KeepAwake::Auto if options.serving == Serving::InPlace => Ok(None),
        KeepAwake::Auto => Ok(IdlePoll::open_where_useful()),
        KeepAwake::Always => {
            let what = "keeping CPUs awake takes /dev/cpu_dma_latency (as root: `chgrp GROUP` and `chmod 0660` it)";
            let opened = IdlePoll::open().map(Some);
            opened.map_err(|source| PagerError::System { what, source })
        }
    }
}

impl Drop for RemoteRegion {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Relaxed);
        let mut running = self.running();
        self.shared.work.notify();
        // The evictor ends first: it may be copying a page that the handler must bring.
        if let Some(evictor) = running.evictor.take() {
            evictor.join();
        }
        match running.handler.take() {
            Some(RunningHandler::Thread(handler)) => {
                self.shared.arena.touch(self.shared.table.pages());
                handler.join();
            }
            Some(RunningHandler::InPlace(served)) => drop(served),
            None => {}
        }
        // The store forgets the regions of a client that has gone; this is only earlier.
        let _ = running.store.drop_region(self.shared.region());
    }
}
