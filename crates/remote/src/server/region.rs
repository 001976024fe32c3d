//! One client's region on this server: which of its pages are held, and where.
//!
//! Invariant: whatever is done under a lease is done while that lease is the region's current one:
//! the check and the deed are under one lock. So nothing sent before a fence happens after it.

use super::client::Client;
use super::index::Index;
use super::slab::Slab;
use crate::page::{PAGE_BYTES, PageRun, RUN_PAGES_MAX};
use crate::wire::reply::{Failure, Reply};
use crate::wire::request::Token;
use crate::wire::{Checksum, SUM_BYTES, push_sums};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Who made a region, for people.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The address that it came from, without the port.
    pub address: String,
    /// Its process there.
    pub pid: u32,
    /// Its program.
    pub name: String,
}

/// The client that a region's pages are counted for.
#[derive(Debug)]
pub struct RegionClient {
    /// Its counts.
    pub client: Arc<Client>,
    /// Pages that it may have in all of its regions together.
    pub pages_max: u64,
}

/// A region.
#[derive(Debug)]
pub struct Region {
    /// The server's number of it.
    pub number: u32,
    /// How many pages it may have.
    pub pages: u64,
    /// Who made it.
    pub owner: Owner,
    /// What proves that one may use it.
    pub token: Token,
    /// Connections that use it.
    pub attached: AtomicU32,
    /// Its client said that it is about to end, and will not come back to it.
    pub ends_with_client: AtomicBool,
    /// The last connection went without a word: the client may be back later, and go on.
    pub is_client_silent: AtomicBool,
    /// When the last connection went, on the server's clock.
    pub idle_since_ns: AtomicU64,
    /// Pages taken in since it was made.
    pub pages_in_total: AtomicU64,
    /// Pages given out since it was made.
    pub pages_out_total: AtomicU64,
    client: RegionClient,
    held: RwLock<Held>,
}

#[derive(Debug)]
struct Held {
    lease: u32,
    /// Nobody can find the region any more, so nothing may be put into it.
    removed: bool,
    index: Index,
}

/// A page that is put.
struct Page<'a> {
    number: u64,
    bytes: &'a [u8],
    sum: Checksum,
    if_absent: bool,
}

impl Held {
    fn check(&self, lease: u32) -> Result<(), Failure> {
        match lease {
            _ if self.removed => Err(Failure::NoRegion),
            lease if lease == self.lease => Ok(()),
            _ => Err(Failure::StaleLease),
        }
    }

    /// Puts a page that is held already; whether it is.
    fn put_again(&self, slab: &Slab, page: &Page<'_>) -> bool {
        let slot = self.index.get(page.number);
        match slot {
            Some(slot) if page.if_absent => slab.repair(slot, page.bytes, page.sum),
            Some(slot) => slab.replace(slot, page.bytes, page.sum),
            None => {}
        }
        slot.is_some()
    }
}

impl Region {
    /// An empty one, attached to the connection that makes it.
    pub fn new(
        number: u32,
        lease: u32,
        pages: u64,
        owner: Owner,
        token: Token,
        client: RegionClient,
    ) -> Region {
        Region {
            number,
            pages,
            owner,
            token,
            attached: AtomicU32::new(1),
            ends_with_client: AtomicBool::new(false),
            is_client_silent: AtomicBool::new(false),
            idle_since_ns: AtomicU64::new(0),
            pages_in_total: AtomicU64::new(0),
            pages_out_total: AtomicU64::new(0),
            client,
            held: RwLock::new(Held { lease, removed: false, index: Index::default() }),
        }
    }

    /// Pages held now.
    pub fn pages_held(&self) -> u64 {
        self.read().index.pages()
    }

    /// Returns the lease that is good now.
    ///
    /// # Errors
    /// When the region has been removed.
    pub fn lease(&self) -> Result<u32, Failure> {
        let held = self.read();
        held.check(held.lease).map(|()| held.lease)
    }

    /// Makes this lease the only good one.
    ///
    /// # Errors
    /// When the region has been removed.
    pub fn fence(&self, lease: u32) -> Result<(), Failure> {
        let mut held = self.write();
        held.check(held.lease)?;
        held.lease = lease;
        Ok(())
    }

    /// Appends the frame that answers request `id` with these pages.
    ///
    /// # Errors
    /// When one of them is not held, or the lease is void; nothing is appended then.
    pub fn get(
        &self,
        slab: &Slab,
        lease: u32,
        run: PageRun,
        with_sums: bool,
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
        let mut sums = Vec::new();
        if with_sums {
            sums.reserve(run.count as usize * SUM_BYTES);
            slots().for_each(|slot| slab.with(*slot, |_, sum| push_sums(&mut sums, [sum])));
        }
        Reply::Pages { count: run.count as u16, sums: &sums }.encode_head(id, out);
        slots().for_each(|slot| slab.with(*slot, |page, _| out.extend_from_slice(page)));
        self.pages_out_total.fetch_add(run.count, Ordering::Relaxed);
        Ok(())
    }

    /// Takes pages in. Their sums have been checked.
    ///
    /// # Errors
    /// When there is no room (the pages before that one are stored), or the lease is void.
    pub fn put(
        &self,
        slab: &Slab,
        lease: u32,
        first: u64,
        if_absent: bool,
        pages: &[u8],
        sums: impl Iterator<Item = Checksum>,
    ) -> Result<(), Failure> {
        for ((number, bytes), sum) in (first..).zip(pages.chunks_exact(PAGE_BYTES)).zip(sums) {
            let page = Page { number, bytes, sum, if_absent };
            // Others read meanwhile, also this one: a slot is changed as a whole.
            if self.leased(lease)?.put_again(slab, &page) {
                continue;
            }
            let RegionClient { client, pages_max } = &self.client;
            if !client.take_page(*pages_max) {
                return Err(Failure::Full { pages_free: 0 });
            }
            // Without the lock: in a full server a slot may be long in coming, and others read meanwhile.
            let Some(slot) = slab.put(bytes, sum) else {
                client.give_pages_back(1);
                return Err(Failure::Full { pages_free: slab.pages_free() });
            };
            let mut held = self.write();
            let checked = held.check(lease);
            if checked.is_ok() && !held.put_again(slab, &page) {
                held.index.insert(number, slot);
                continue;
            }
            drop(held);
            client.give_pages_back(1);
            slab.free_slot(slot);
            checked?;
        }
        self.pages_in_total.fetch_add((pages.len() / PAGE_BYTES) as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Forgets pages.
    ///
    /// # Errors
    /// When the lease is void.
    pub fn discard(&self, slab: &Slab, lease: u32, run: PageRun) -> Result<(), Failure> {
        let mut held = self.write();
        held.check(lease)?;
        let end = run.end().unwrap_or(u64::MAX);
        held.index.remove(run.first, end, |slot| {
            self.client.client.give_pages_back(1);
            slab.free_slot(slot);
        });
        Ok(())
    }

    /// A bit for each page of the run.
    ///
    /// # Errors
    /// When the lease is void.
    pub fn held(&self, lease: u32, run: PageRun) -> Result<Vec<u8>, Failure> {
        let held = self.leased(lease)?;
        let mut bits = vec![0; run.count.div_ceil(8) as usize];
        for at in 0..run.count {
            let is_held = held.index.get(run.first + at).is_some();
            bits[at as usize / 8] |= (is_held as u8) << (at % 8);
        }
        Ok(bits)
    }

    /// Gives all pages back; nothing can be done with the region after.
    pub fn clear(&self, slab: &Slab) {
        let mut held = self.write();
        if std::mem::replace(&mut held.removed, true) {
            return;
        }
        let slots = std::mem::take(&mut held.index).into_slots();
        self.client.client.give_pages_back(slots.len() as u64);
        self.client.client.give_region_back();
        slab.free_slots(slots.into_iter());
    }

    fn read(&self) -> RwLockReadGuard<'_, Held> {
        self.held.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Held> {
        self.held.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn leased(&self, lease: u32) -> Result<RwLockReadGuard<'_, Held>, Failure> {
        let held = self.read();
        held.check(lease)?;
        Ok(held)
    }
}
