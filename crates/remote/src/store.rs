//! The seam between the pager and whatever keeps its pages.
//!
//! A store is shared by all threads; each of them takes a reader or a writer of its own, which owns
//! its connections and buffers. The caller knows of each page whether it was ever put and which sum
//! it had then; the store keeps the bytes.
//!
//! Invariants:
//! 1. `get` fills in exactly the bytes of the last completed `put`, proven by their sum, or fails.
//!    A page that no copy can prove is [`StoreError::PageLost`]: never zeros, never another's bytes.
//! 2. `put` returns when every copy is acknowledged; only then may the caller drop its own.
//! 3. A get that succeeds allocates nothing and takes no lock that is held across a system call.
//! 4. The caller does not read and write the same page at the same time (it serves a page that is
//!    being evicted from where it lies).

pub mod embedded;
pub mod redis;

use crate::page::{PAGE_BYTES, PageRun, PageSum, RUN_PAGES_MAX};
use std::fmt;
use std::io;
use std::time::Duration;

/// A region: pages that live and go together, numbered from 0. Known to the store that made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u64);

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How much a store holds and can still take, in pages of the caller: copies are accounted for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Held and free together.
    pub pages_total: u64,
    /// That it would take now. An estimate where pages are compressed or others use the store too.
    pub pages_free: u64,
}

/// What a store cannot do, and why.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No copy of the page is left, or none has the bytes that were put. The pager answers the
    /// access with SIGBUS.
    #[error("page {page} of region {region} is lost: {why}")]
    PageLost {
        /// Of which region.
        region: RegionId,
        /// Its number.
        page: u64,
        /// What became of the copies.
        why: String,
    },
    /// No room. What was there stays; of what was to be put nothing may be taken as stored.
    #[error(
        "the page store is full: {pages_asked} pages asked for, {pages_free} free; start another \
         memory server or raise its --memory"
    )]
    Full {
        /// That were to be put or reserved.
        pages_asked: u64,
        /// That are left.
        pages_free: u64,
    },
    /// Dropped, or of another store.
    #[error("region {0} is not of this page store")]
    NoRegion(RegionId),
    /// The caller's mistake: a run outside its region or longer than [`RUN_PAGES_MAX`], or slices
    /// whose lengths do not fit each other.
    #[error("a bad request to the page store: {0}")]
    BadRequest(&'static str),
    /// No server can be reached that would do.
    #[error("cannot reach {server}: {source}; check that `pagetax serve` runs there")]
    Unreachable {
        /// Its address as it was given.
        server: String,
        /// What the system says.
        source: io::Error,
    },
    /// Neither TLS nor loopback, and nobody said that the network is trusted.
    #[error(
        "{server} is not on this machine's loopback, and without TLS anybody on the way can read and \
         change the pages; give --tls-cert, --tls-key and --tls-ca, or --insecure where the network is \
         trusted"
    )]
    Insecure {
        /// The address as it was given, or `a server that --discover finds`.
        server: String,
    },
    /// It lives, but takes no more connections of this client.
    #[error(
        "{server} has as many connections as it may; raise its --connections-max or \
         --client-connections-max, or use another server"
    )]
    Busy {
        /// Its address as it was given.
        server: String,
    },
    /// The other side does not want us, or is no peer of ours.
    #[error("{server} refused: {why}")]
    Refused {
        /// Its address as it was given.
        server: String,
        /// With the remedy.
        why: String,
    },
}

/// Pages to be put: adjacent, at most [`RUN_PAGES_MAX`].
#[derive(Debug, Clone, Copy)]
pub struct PutRun<'a> {
    /// Number of the first.
    pub first: u64,
    /// Their bytes, [`PAGE_BYTES`] each.
    pub pages: &'a [u8],
    /// The sum of each.
    pub sums: &'a [PageSum],
}

/// Keeps pages.
pub trait PageStore: Send + Sync {
    /// What and where it is, for people: `embedded lz4 store`, `2 copies on a:7070, b:7070`.
    fn describe(&self) -> String;

    /// What it holds and can take.
    ///
    /// # Errors
    /// When nothing that keeps pages can be reached.
    fn capacity(&self) -> Result<Capacity, StoreError>;

    /// A region of this many pages, none of them put. Nothing is reserved: `overcommit` allows more
    /// than the store could take now.
    ///
    /// # Errors
    /// [`StoreError::Full`] without `overcommit`; else as `capacity`.
    fn create_region(&self, pages: u64, overcommit: bool) -> Result<RegionId, StoreError>;

    /// Forgets a region and its pages.
    ///
    /// # Errors
    /// [`StoreError::NoRegion`].
    fn drop_region(&self, region: RegionId) -> Result<(), StoreError>;

    /// Forgets a region soon after this process has ended, and keeps it until then. Without this, who keeps
    /// pages waits for a client that went without a word. Does what it can: there is nobody left to act on an
    /// error.
    fn drop_region_at_end(&self, region: RegionId) {
        let _ = region;
    }

    /// Whether a child of a fork has all of its pages too, as they were: then it lies in this process's
    /// memory, and nobody else knows of it.
    fn is_inherited(&self) -> bool {
        false
    }

    /// For one thread that reads.
    ///
    /// # Errors
    /// When nothing that keeps pages can be reached.
    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError>;

    /// For one thread that writes.
    ///
    /// # Errors
    /// As `reader`.
    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError>;
}

/// Reads pages, one call at a time.
pub trait PageReader: Send {
    /// Reads `sums.len()` adjacent pages from `first` on into `into`, and proves each by its sum.
    /// Blocks; a copy that does not answer is given up in favour of another.
    ///
    /// # Errors
    /// [`StoreError::PageLost`] names the first page that no copy can prove. After any error nothing
    /// in `into` may be used; ask again for the pages one by one to keep the good ones.
    fn get(
        &mut self,
        region: RegionId,
        first: u64,
        sums: &[PageSum],
        into: &mut [u8],
    ) -> Result<(), StoreError>;

    /// Reads pages from anywhere in a region, all of them on their way before the first is waited for, and
    /// hands over each that came and was proven, with its place among `wanted`. Those that it does not hand
    /// over must be got one by one, which also tells why. At most [`RUN_PAGES_MAX`].
    fn get_each(
        &mut self,
        _region: RegionId,
        _wanted: &[(u64, PageSum)],
        _good: &mut dyn FnMut(usize, &[u8]),
    ) {
    }

    /// These pages, within a multiple of [`RUN_PAGES_MAX`], will probably be the next but one to be
    /// got, all at once. A hint: what comes ahead of its get is proven by the sums of the get.
    fn expect(&mut self, _region: RegionId, _run: PageRun) {}

    /// From now on, looks for an answer from this machine for so long, and lets others run meanwhile, before it
    /// sleeps until it is there.
    fn look_for_answers(&mut self, _time: Duration) {}
}

/// Writes pages, one call at a time.
pub trait PageWriter: Send {
    /// Puts all runs, replacing what was there; all of them are on their way before the first is
    /// waited for. Returns when every copy is acknowledged.
    ///
    /// # Errors
    /// After any error the caller keeps its pages: some of the runs may be stored, some not.
    fn put(&mut self, region: RegionId, runs: &[PutRun<'_>]) -> Result<(), StoreError>;

    /// Forgets pages, so that their room can be used. Pages that were never put are no error.
    ///
    /// # Errors
    /// When it cannot be done; the pages may then stay until the region is dropped.
    fn discard(&mut self, region: RegionId, runs: &[PageRun]) -> Result<(), StoreError>;
}

/// Checks the arguments of a get against each other and against the region.
pub(crate) fn check_get(
    region_pages: u64,
    first: u64,
    sums: &[PageSum],
    into: &[u8],
) -> Result<(), StoreError> {
    check_run(region_pages, first, sums.len())?;
    if into.len() != sums.len() * PAGE_BYTES {
        return Err(StoreError::BadRequest("as many pages of room as sums"));
    }
    Ok(())
}

/// Checks the arguments of a put.
pub(crate) fn check_put(region_pages: u64, runs: &[PutRun<'_>]) -> Result<(), StoreError> {
    for run in runs {
        check_run(region_pages, run.first, run.sums.len())?;
        if run.pages.len() != run.sums.len() * PAGE_BYTES {
            return Err(StoreError::BadRequest("as many pages as sums"));
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
