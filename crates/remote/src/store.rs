//! The interface between the pager and the store of its pages.
//!
//! All threads share a store. Each of them takes a reader or a writer of its own, which owns its
//! connections and buffers. The caller knows of each page if it was ever put, and which MAC it had
//! then. The store keeps the bytes.
//!
//! Invariants:
//! 1. `get` returns exactly the bytes of the last completed `put`, verified by their MAC, or fails.
//!    A page that no replica can prove is [`StoreError::PageLost`]: never zeros, never another
//!    page's bytes.
//! 2. `put` returns when every replica is acknowledged. Only then may the caller drop its own page.
//! 3. A `get` that succeeds allocates nothing and takes no lock that is held across a system call.
//! 4. The caller does not read and write the same page at the same time. It serves a soft refault
//!    from the page in memory.

pub mod embedded;
pub mod redis;

use crate::page::{PAGE_BYTES, PageMac, PageRun, RUN_PAGES_MAX};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A region: pages that are created and dropped together, numbered from 0. Only the store that
/// created it knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u64);

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The capacity of a store in pages of the caller: divided by the number of replicas.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capacity {
    /// The number of pages, held and free together.
    pub pages_total: u64,
    /// The number of pages that it would take now. An estimate if pages are compressed, or others
    /// use the store too.
    pub pages_free: u64,
}

/// An error of a page store, and its reason.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No replica of the page is left, or none has the bytes that were put. The pager answers the
    /// access with SIGBUS.
    #[error("page {page} of region {region} is lost: {why}")]
    PageLost {
        /// The region that the page belongs to.
        region: RegionId,
        /// The number of the page in its region.
        page: u64,
        /// The fate of the replicas, for the user.
        why: String,
    },
    /// No room is left. Earlier pages stay. The caller must not take any page of this put as
    /// stored.
    #[error(
        "the page store is full: {pages_asked} pages asked for, {pages_free} free; start another \
         memory server or raise its --memory"
    )]
    Full {
        /// The number of pages to be put or reserved.
        pages_asked: u64,
        /// The number of pages that are free.
        pages_free: u64,
    },
    /// A region that was dropped, or is of another store.
    #[error("region {0} is not of this page store")]
    NoRegion(RegionId),
    /// The caller's mistake: a run outside its region or longer than [`RUN_PAGES_MAX`], or slices
    /// whose lengths do not fit each other.
    #[error("a bad request to the page store: {0}")]
    BadRequest(&'static str),
    /// No suitable server is reachable.
    #[error(
        "cannot reach {server}: {source}; check that `pagetax serve`, or the store, runs there"
    )]
    Unreachable {
        /// The server's address, as named or announced.
        server: String,
        /// The error that the system reports.
        source: io::Error,
    },
    /// A server beyond loopback without TLS, and the user has not declared the network as trusted.
    #[error(
        "{server} is not on this machine's loopback, and without TLS anybody on the way can read and \
         change the pages; give --tls-cert, --tls-key and --tls-ca, or --insecure where the network is \
         trusted"
    )]
    Insecure {
        /// The server's address, as named or announced, or `a server that --discover finds`.
        server: String,
    },
    /// The server is alive, but takes no more connections of this client.
    #[error(
        "{server} has as many connections as it may; raise its --connections-max or \
         --client-connections-max, or use another server"
    )]
    Busy {
        /// The server's address, as named or announced.
        server: String,
    },
    /// The other side rejects this client, or is no peer of ours.
    #[error("{server} refused: {why}")]
    Refused {
        /// The server's address, as named or announced.
        server: String,
        /// The reason, with a hint for the user.
        why: String,
    },
}

/// A run of adjacent pages to put, at most [`RUN_PAGES_MAX`].
#[derive(Debug, Clone, Copy)]
pub struct PutRun<'a> {
    /// The number of the first page.
    pub first: u64,
    /// The bytes of the pages, [`PAGE_BYTES`] each.
    pub pages: &'a [u8],
    /// The MACs of the pages, in the same order.
    pub macs: &'a [PageMac],
}

/// The opener of the store in the child of a fork.
pub type ChildStore = Box<dyn FnOnce() -> Result<Arc<dyn PageStore>, StoreError> + Send>;

/// A store of pages, which all threads share.
pub trait PageStore: Send + Sync {
    /// Returns the kind and place of the store for the user. Examples: `embedded LZ4 store of …`,
    /// `2 copies on a:7070, b:7070`.
    fn describe(&self) -> String;

    /// Returns lines for the user on what is not as it should be, such as a server that is down.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the time for which the pager repeats a read that is [`StoreError::Unreachable`]. None leaves
    /// that to the options of the pager.
    fn unreachable_limit(&self) -> Option<Duration> {
        None
    }

    /// Returns the number of pages that the store holds and can take.
    ///
    /// # Errors
    /// If no server that keeps pages is reachable.
    fn capacity(&self) -> Result<Capacity, StoreError>;

    /// Creates a region of `pages` pages, none of them put. Reserves nothing: `overcommit` allows
    /// more pages than the store could take now.
    ///
    /// # Errors
    /// [`StoreError::Full`] without `overcommit`; otherwise as [`PageStore::capacity`].
    fn create_region(&self, pages: u64, overcommit: bool) -> Result<RegionId, StoreError>;

    /// Drops a region and its pages.
    ///
    /// # Errors
    /// [`StoreError::NoRegion`] if the store does not know it.
    fn drop_region(&self, region: RegionId) -> Result<(), StoreError>;

    /// Asks the store to drop a region soon after this process has ended, and to keep it until
    /// then. Without this, a server waits for a client that ended without notice. Ignores errors:
    /// no caller is left to act on them.
    fn drop_region_at_end(&self, region: RegionId) {
        let _ = region;
    }

    /// Returns true if a child of a fork also has all pages as they were. The store is then in this
    /// process's memory, and no other process knows of it.
    fn is_inherited(&self) -> bool {
        false
    }

    /// Keeps the pages of a region as they are now for the child of a fork. In the store that the child
    /// then opens, the region has the same number. Until the fork, no page may be put or discarded.
    ///
    /// # Errors
    /// The store cannot share pages, or some of them are unreachable.
    fn fork(&self, region: RegionId) -> Result<ChildStore, StoreError> {
        let _ = region;
        Err(StoreError::BadRequest("this store cannot share pages with a child"))
    }

    /// Returns a reader for one thread.
    ///
    /// # Errors
    /// If no server that keeps pages is reachable.
    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError>;

    /// Returns a writer for one thread.
    ///
    /// # Errors
    /// As [`PageStore::reader`].
    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError>;
}

/// A thread's reader of pages, one call at a time.
pub trait PageReader: Send {
    /// Reads `macs.len()` adjacent pages from `first` on into `into`, and verifies each by its MAC.
    /// Blocks. If a replica does not answer, another one is read.
    ///
    /// # Errors
    /// [`StoreError::PageLost`] names the first page that no replica can prove. After any error the
    /// caller must not use the bytes in `into`. To keep the good pages, it reads them one by one.
    fn get(
        &mut self,
        region: RegionId,
        first: u64,
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<(), StoreError>;

    /// Reads up to [`RUN_PAGES_MAX`] pages from anywhere in a region. All reads are under way
    /// before it waits for the first. It passes each verified page to `good`, with the page's index
    /// in `wanted`. The caller must `get` the other pages one by one, which also reports the
    /// reason.
    fn get_each(
        &mut self,
        _region: RegionId,
        _wanted: &[(u64, PageMac)],
        _good: &mut dyn FnMut(usize, &[u8]),
    ) {
    }

    /// Announces a run within a multiple of [`RUN_PAGES_MAX`] that will probably be the next but
    /// one to be read, in one `get`. This is a hint. The MACs of that `get` verify the prefetched
    /// pages.
    fn announce(&mut self, _region: RegionId, _run: PageRun) {}

    /// Sets the time to poll for a reply from this machine before sleeping. Other threads may run
    /// while it polls.
    fn set_poll_time(&mut self, _time: Duration) {}
}

/// A thread's writer of pages, one call at a time.
pub trait PageWriter: Send {
    /// Puts all runs, and replaces earlier pages. All runs are under way before it waits for the
    /// first. Returns when every replica is acknowledged.
    ///
    /// # Errors
    /// After any error the caller keeps its pages: some of the runs may be stored, some not.
    fn put(&mut self, region: RegionId, runs: &[PutRun<'_>]) -> Result<(), StoreError>;

    /// Discards pages, so that their room can be reused. Pages that were never put are no error.
    ///
    /// # Errors
    /// If the store cannot discard them. The pages may then stay until the region is dropped.
    fn discard(&mut self, region: RegionId, runs: &[PageRun]) -> Result<(), StoreError>;
}

/// Checks the arguments of a get against each other and against the region.
pub(crate) fn check_get(
    region_pages: u64,
    first: u64,
    macs: &[PageMac],
    into: &[u8],
) -> Result<(), StoreError> {
    check_run(region_pages, first, macs.len())?;
    if into.len() != macs.len() * PAGE_BYTES {
        return Err(StoreError::BadRequest("as many pages of room as MACs"));
    }
    Ok(())
}

/// Checks the arguments of a put.
pub(crate) fn check_put(region_pages: u64, runs: &[PutRun<'_>]) -> Result<(), StoreError> {
    for run in runs {
        check_run(region_pages, run.first, run.macs.len())?;
        if run.pages.len() != run.macs.len() * PAGE_BYTES {
            return Err(StoreError::BadRequest("as many pages as MACs"));
        }
    }
    Ok(())
}

/// Checks the arguments of a discard, whose runs may be of any length.
pub(crate) fn check_discard(region_pages: u64, runs: &[PageRun]) -> Result<(), StoreError> {
    let inside = |run: &PageRun| run.end().is_some_and(|end| end <= region_pages);
    if runs.iter().all(inside) {
        Ok(())
    } else {
        Err(StoreError::BadRequest("a run ends after its region"))
    }
}

fn check_run(region_pages: u64, first: u64, count: usize) -> Result<(), StoreError> {
    if count == 0 || count > RUN_PAGES_MAX {
        return Err(StoreError::BadRequest("a run has from 1 to 64 pages"));
    }
    check_discard(region_pages, &[PageRun { first, count: count as u64 }])
}
