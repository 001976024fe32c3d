//! A region of a client, and the pages of it that this server holds.
//!
//! Invariant: a lease is checked and used under one lock. So no request that was sent before a fence
//! takes effect after it.

use super::client::Client;
use super::index::PageIndex;
use super::slab::{PageSlot, Slab};
use crate::page::{PAGE_BYTES, PageRun, RUN_PAGES_MAX};
use crate::wire::reply::{Failure, Reply};
use crate::wire::request::Token;
use crate::wire::{CHECKSUM_BYTES, WireChecksum, push_checksums};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The creator of a region, for reports.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The client's address, without the port.
    pub address: String,
    /// The process ID that the client reports.
    pub pid: u32,
    /// The name of the client's program.
    pub name: String,
}

/// The client that a region's pages are counted for.
#[derive(Debug)]
pub struct RegionClient {
    /// The counts that limit the client.
    pub client: Arc<Client>,
    /// The most pages in all of its regions together.
    pub pages_max: u64,
}

/// A region that this server stores pages of.
#[derive(Debug)]
pub struct StoredRegion {
    /// The server's number of the region.
    pub number: u32,
    /// The region's size in pages.
    pub pages: u64,
    /// The creator of the region.
    pub owner: Owner,
    /// The secret of the region.
    pub token: Token,
    /// The number of connections that use it.
    pub attached: AtomicU32,
    /// True if the client has announced that it ends and will not use the region again.
    pub ends_with_client: AtomicBool,
    /// True if the last connection ended because the client was silent: it may come back.
    pub is_client_silent: AtomicBool,
    /// True if the region began as a snapshot, for the child of a fork. Most such children are short.
    pub is_snapshot: bool,
    /// The end of the last connection, on the server's clock.
    pub idle_since_ns: AtomicU64,
    /// Pages that were put since its creation.
    pub pages_in_total: AtomicU64,
    /// Pages that were read since its creation.
    pub pages_out_total: AtomicU64,
    client: RegionClient,
    /// The pages that a snapshot's index counts as.
    pages_reserved: u64,
    held: RwLock<RegionPages>,
}

/// Counts one more region for all slots of an index.
fn share_all(slab: &Slab, index: &PageIndex) -> Result<(), Failure> {
    for (count, slot) in index.slots().enumerate() {
        if !slab.share(slot) {
            index.slots().take(count).for_each(|slot| {
                slab.unshare(slot);
            });
            return Err(Failure::TooMany);
        }
    }
    Ok(())
}

#[derive(Debug)]
struct RegionPages {
    lease: u32,
    /// True after the region's removal: a page that is put then would never be freed.
    removed: bool,
    index: PageIndex,
}

/// A page that is put.
struct Page<'a> {
    number: u64,
    bytes: &'a [u8],
    checksum: WireChecksum,
    if_absent: bool,
}

impl RegionPages {
    fn check(&self, lease: u32) -> Result<(), Failure> {
        match lease {
            _ if self.removed => Err(Failure::NoRegion),
            lease if lease == self.lease => Ok(()),
            _ => Err(Failure::StaleLease),
        }
    }

    /// Replaces a page in its slot. Returns false if it is not held, or another region shares the slot.
    fn put_again(&self, slab: &Slab, page: &Page<'_>) -> bool {
        match self.index.get(page.number) {
            Some(slot) if page.if_absent => {
                slab.repair(slot, page.bytes, page.checksum);
                true
            }
            Some(slot) => slab.replace(slot, page.bytes, page.checksum),
            None => false,
        }
    }
}

impl StoredRegion {
    /// Returns an empty region, attached to the connection that creates it.
    pub fn new(
        number: u32,
        lease: u32,
        pages: u64,
        owner: Owner,
        token: Token,
        client: RegionClient,
    ) -> StoredRegion {
        StoredRegion {
            number,
            pages,
            owner,
            token,
            attached: AtomicU32::new(1),
            ends_with_client: AtomicBool::new(false),
            is_client_silent: AtomicBool::new(false),
            is_snapshot: false,
            idle_since_ns: AtomicU64::new(0),
            pages_in_total: AtomicU64::new(0),
            pages_out_total: AtomicU64::new(0),
            client,
            pages_reserved: 0,
            held: RwLock::new(RegionPages { lease, removed: false, index: PageIndex::default() }),
        }
    }

    /// Returns the client that the region is counted for.
    pub fn client(&self) -> &Client {
        &self.client.client
    }

    /// Returns the number of pages that are held.
    pub fn pages_held(&self) -> u64 {
        self.read().index.pages()
    }

    /// Returns the current lease.
    ///
    /// # Errors
    /// If the region has been removed.
    pub fn lease(&self) -> Result<u32, Failure> {
        let held = self.read();
        held.check(held.lease).map(|()| held.lease)
    }

    /// Makes this lease the only valid one.
    ///
    /// # Errors
    /// If the region has been removed.
    pub fn fence(&self, lease: u32) -> Result<(), Failure> {
        let mut held = self.write();
        held.check(held.lease)?;
        held.lease = lease;
        Ok(())
    }

    /// Appends the frame that answers request `id` with these pages.
    ///
    /// # Errors
    /// If one of them is not held, or the lease is void. Nothing is appended then.
    pub fn get(
        &self,
        slab: &Slab,
        lease: u32,
        run: PageRun,
        with_checksums: bool,
        id: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let held = self.leased(lease)?;
        let mut slots = [None; RUN_PAGES_MAX];
        let slots = &mut slots[..run.count as usize];
        for (slot, page) in slots.iter_mut().zip(run.first..) {
            *slot = Some(held.index.get(page).ok_or(Failure::NotHeld { page })?);
        }
        let slots = || slots.iter().flatten();
        let mut checksums = Vec::new();
        if with_checksums {
            checksums.reserve(run.count as usize * CHECKSUM_BYTES);
            slots().for_each(|slot| {
                slab.with(*slot, |_, checksum| push_checksums(&mut checksums, [checksum]))
            });
        }
        Reply::Pages { count: run.count as u16, checksums: &checksums }.encode_head(id, out);
        slots().for_each(|slot| slab.with(*slot, |page, _| out.extend_from_slice(page)));
        self.pages_out_total.fetch_add(run.count, Ordering::Relaxed);
        Ok(())
    }

    /// Stores pages whose checksums the caller has verified.
    ///
    /// # Errors
    /// If the lease is void, or there is no room. The pages before the failed one stay stored.
    pub fn put(
        &self,
        slab: &Slab,
        lease: u32,
        first: u64,
        if_absent: bool,
        pages: &[u8],
        checksums: impl Iterator<Item = WireChecksum>,
    ) -> Result<(), Failure> {
        for ((number, bytes), checksum) in
            (first..).zip(pages.chunks_exact(PAGE_BYTES)).zip(checksums)
        {
            let page = Page { number, bytes, checksum, if_absent };
            // The read lock suffices: a slot changes under a lock of its own.
            if self.leased(lease)?.put_again(slab, &page) {
                continue;
            }
            let RegionClient { client, pages_max } = &self.client;
            if !client.take_pages(1, *pages_max) {
                return Err(Failure::Full { pages_free: 0 });
            }
            // Without the lock: a full server may wait for a slot, and readers must go on.
            let Some(slot) = slab.put(bytes, checksum) else {
                client.release_pages(1);
                return Err(Failure::Full { pages_free: slab.pages_free() });
            };
            let mut held = self.write();
            let checked = held.check(lease);
            let unused = match checked.is_ok() && !held.put_again(slab, &page) {
                true => held.index.insert(number, slot),
                false => Some(slot),
            };
            drop(held);
            unused.into_iter().for_each(|slot| self.release_slot(slab, slot));
            checked?;
        }
        self.pages_in_total.fetch_add((pages.len() / PAGE_BYTES) as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Discards pages and frees their slots.
    ///
    /// # Errors
    /// If the lease is void.
    pub fn discard(&self, slab: &Slab, lease: u32, run: PageRun) -> Result<(), Failure> {
        let mut held = self.write();
        held.check(lease)?;
        let end = run.end().unwrap_or(u64::MAX);
        held.index.remove(run.first, end, |slot| self.release_slot(slab, slot));
        Ok(())
    }

    fn release_slot(&self, slab: &Slab, slot: PageSlot) {
        if slab.unshare(slot) {
            self.client.client.release_pages(1);
            slab.free_slot(slot);
        }
    }

    /// Returns a region with this number and secret that has the pages of this one as they are now, with
    /// no connection. Pages are counted once for the client while both share them; the index is counted in
    /// whole pages.
    ///
    /// # Errors
    /// If the lease is void, there is no room for the index, or a page is shared by too many regions.
    pub fn snapshot(
        &self,
        slab: &Slab,
        on: u32,
        (number, lease): (u32, u32),
        token: Token,
        now_ns: u64,
    ) -> Result<StoredRegion, Failure> {
        // No page changes meanwhile.
        let held = self.write();
        held.check(on)?;
        let RegionClient { client, pages_max } = &self.client;
        let pages_reserved = held.index.bytes().div_ceil(PAGE_BYTES as u64);
        if !client.take_pages(pages_reserved, *pages_max) {
            return Err(Failure::Full { pages_free: 0 });
        }
        let shared = match slab.reserve(pages_reserved) {
            true => {
                share_all(slab, &held.index).inspect_err(|_| slab.release_reserved(pages_reserved))
            }
            false => Err(Failure::Full { pages_free: slab.pages_free() }),
        };
        shared.inspect_err(|_| client.release_pages(pages_reserved))?;
        let client = RegionClient { client: client.clone(), pages_max: *pages_max };
        let copy = StoredRegion::new(number, lease, self.pages, self.owner.clone(), token, client);
        copy.write().index = held.index.clone();
        Ok(StoredRegion {
            attached: AtomicU32::new(0),
            idle_since_ns: AtomicU64::new(now_ns),
            is_snapshot: true,
            pages_reserved,
            ..copy
        })
    }

    /// Returns a bitmap of the pages of the run that are held.
    ///
    /// # Errors
    /// If the lease is void.
    pub fn held(&self, lease: u32, run: PageRun) -> Result<Vec<u8>, Failure> {
        let held = self.leased(lease)?;
        let mut bits = vec![0; run.count.div_ceil(8) as usize];
        for at in 0..run.count {
            let is_held = held.index.get(run.first + at).is_some();
            bits[at as usize / 8] |= (is_held as u8) << (at % 8);
        }
        Ok(bits)
    }

    /// Frees all pages. Every later request to the region fails.
    pub fn clear(&self, slab: &Slab) {
        let mut held = self.write();
        if std::mem::replace(&mut held.removed, true) {
            return;
        }
        let mut slots = std::mem::take(&mut held.index).into_slots();
        slots.retain(|slot| slab.unshare(*slot));
        self.client.client.release_pages(slots.len() as u64 + self.pages_reserved);
        self.client.client.release_region();
        slab.release_reserved(self.pages_reserved);
        slab.free_slots(slots.into_iter());
    }

    fn read(&self) -> RwLockReadGuard<'_, RegionPages> {
        self.held.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, RegionPages> {
        self.held.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn leased(&self, lease: u32) -> Result<RwLockReadGuard<'_, RegionPages>, Failure> {
        let held = self.read();
        held.check(lease)?;
        Ok(held)
    }
}
