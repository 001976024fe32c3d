//! The memory of the pages: a bounded number of slots of one page each. Slots lie in chunks that are
//! mapped on demand and unmapped when they are empty.
//!
//! Invariants: at most `pages_max` slots are in use. A freed slot is wiped before another page can
//! take it. A slot that several regions share is neither changed nor freed.

use crate::page::PAGE_BYTES;
use crate::wire::WireChecksum;
use memmap2::{Advice, MmapMut};
use std::collections::BTreeSet;
use std::io;
use std::num::NonZeroU32;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;

/// The number of pages of a chunk, 2 MiB. The last chunk may be shorter.
const CHUNK_PAGES: usize = 512;

/// The number of mapped chunks from which the next is mapped ahead. It is then less than 2 % of the
/// mapped memory.
const PREPARE_FROM: usize = 64;

/// The place of one page. Numbers start at 1, so that `Option<PageSlot>` takes no more bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSlot(NonZeroU32);

impl PageSlot {
    fn new(chunk: u32, index: u16) -> PageSlot {
        PageSlot(NonZeroU32::MIN.saturating_add(chunk * CHUNK_PAGES as u32 + u32::from(index)))
    }

    fn number(self) -> usize {
        self.0.get() as usize - 1
    }

    fn chunk(self) -> usize {
        self.number() / CHUNK_PAGES
    }

    fn index(self) -> usize {
        self.number() % CHUNK_PAGES
    }
}

/// The memory for all pages of a server.
#[derive(Debug)]
pub struct Slab {
    pages_max: u64,
    chunks: Box<[RwLock<Option<SlabChunk>>]>,
    free: Mutex<FreeSlots>,
    /// Notified when a slot that is being wiped becomes free.
    slot_released: Condvar,
}

#[derive(Debug)]
struct SlabChunk {
    bytes: MmapMut,
    checksums: Box<[WireChecksum]>,
    /// The number of regions beyond the first that use each slot.
    sharers: Box<[u16]>,
}

#[derive(Debug, Default)]
struct FreeSlots {
    used: u64,
    /// The pages whose memory is reserved for something else.
    reserved: u64,
    /// The used slots that are being wiped. They count as free: `allocate` waits for them.
    leaving: u64,
    /// The free slots of each chunk that was ever mapped.
    slots: Vec<Vec<u16>>,
    /// The mapped chunks that have free slots.
    open: BTreeSet<u32>,
    /// The chunks that were unmapped.
    unmapped: Vec<u32>,
    /// The chunk that will be mapped next, if its size still fits then.
    next: Option<JoinHandle<io::Result<SlabChunk>>>,
}

impl FreeSlots {
    /// Returns the number of the chunk to map next. It may be beyond the last chunk.
    fn next_chunk(&self) -> u32 {
        self.unmapped.last().copied().unwrap_or(self.slots.len() as u32)
    }
}

/// Returns the error if the system has no memory for a chunk. Writing to such a chunk would start
/// the kernel's OOM killer. Kernels before Linux 5.14 do not know the advice, so there it is
/// undetected.
fn backed(populated: io::Result<()>) -> io::Result<()> {
    match populated {
        Err(error) if error.kind() != io::ErrorKind::InvalidInput => Err(error),
        _ => Ok(()),
    }
}

impl SlabChunk {
    fn new(pages: usize) -> io::Result<SlabChunk> {
        let bytes = MmapMut::map_anon(pages * PAGE_BYTES)?;
        // MADV_POPULATE_WRITE is a third faster than faulting page by page. Huge pages would take a
        // third of the time. But they take four times as long where a hypervisor has reclaimed free
        // memory, because it reclaims whole huge pages.
        backed(bytes.advise(Advice::PopulateWrite))?;
        let checksums = vec![WireChecksum::default(); pages].into();
        Ok(SlabChunk { bytes, checksums, sharers: vec![0; pages].into() })
    }

    fn page(&self, index: usize) -> &[u8] {
        &self.bytes[index * PAGE_BYTES..][..PAGE_BYTES]
    }
}

impl Slab {
    /// Returns a slab for at most this many pages. Nothing is mapped yet.
    pub fn new(pages_max: u64) -> Slab {
        let pages_max = pages_max.min(u32::MAX as u64 - CHUNK_PAGES as u64);
        let chunks = pages_max.div_ceil(CHUNK_PAGES as u64);
        let chunks = (0..chunks).map(|_| RwLock::default()).collect();
        Slab { pages_max, chunks, free: Mutex::default(), slot_released: Condvar::new() }
    }

    /// Returns the number of slots, used or free.
    pub fn pages_max(&self) -> u64 {
        self.pages_max
    }

    /// Returns the number of slots that are free or being wiped.
    pub fn pages_free(&self) -> u64 {
        let free = self.free();
        self.pages_max - free.used - free.reserved + free.leaving
    }

    /// Returns the number of slots in use that are not being wiped.
    pub fn pages_held(&self) -> u64 {
        let free = self.free();
        free.used - free.leaving
    }

    /// Takes a slot and fills it. Returns `None` if all are in use or the system has no memory.
    pub fn put(&self, page: &[u8], checksum: WireChecksum) -> Option<PageSlot> {
        let slot = self.allocate()?;
        self.replace(slot, page, checksum);
        Some(slot)
    }

    /// Replaces the page in a slot that is in use. Returns false, and changes nothing, if another region
    /// uses the slot too.
    pub fn replace(&self, slot: PageSlot, page: &[u8], checksum: WireChecksum) -> bool {
        self.change(slot, |chunk| {
            let is_own = chunk.sharers[slot.index()] == 0;
            if is_own {
                chunk.bytes[slot.index() * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(page);
                chunk.checksums[slot.index()] = checksum;
            }
            is_own
        })
    }

    /// Reserves the memory of this many pages for something else than pages. Returns false if it is not free.
    pub fn reserve(&self, pages: u64) -> bool {
        let mut free = self.free();
        let is_free = free.used + free.reserved + pages <= self.pages_max;
        free.reserved += if is_free { pages } else { 0 };
        is_free
    }

    /// Gives back memory of [`Self::reserve`].
    pub fn release_reserved(&self, pages: u64) {
        self.free().reserved -= pages;
    }

    /// Counts one more region that uses a slot. Returns false if there are too many.
    pub fn share(&self, slot: PageSlot) -> bool {
        self.change(slot, |chunk| {
            let sharers = &mut chunk.sharers[slot.index()];
            let more = sharers.checked_add(1);
            *sharers = more.unwrap_or(*sharers);
            more.is_some()
        })
    }

    /// Counts one region less that uses a slot. Returns true if the caller's was the last one, which
    /// frees the slot.
    pub fn unshare(&self, slot: PageSlot) -> bool {
        self.change(slot, |chunk| {
            let sharers = &mut chunk.sharers[slot.index()];
            let is_last = *sharers == 0;
            *sharers = sharers.saturating_sub(1);
            is_last
        })
    }

    /// Writes a page again into its slot, if the slot's checksum is the same: this repairs damaged
    /// bytes. Checks and writes under one lock, because another connection may replace the page.
    pub fn repair(&self, slot: PageSlot, page: &[u8], checksum: WireChecksum) {
        self.change(slot, |chunk| {
            if chunk.checksums[slot.index()] == checksum {
                chunk.bytes[slot.index() * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(page);
            }
        });
    }

    /// Calls `look` with the page in a slot that is in use.
    pub fn with<T>(&self, slot: PageSlot, look: impl FnOnce(&[u8], WireChecksum) -> T) -> T {
        let chunk = self.chunks[slot.chunk()].read().unwrap_or_else(PoisonError::into_inner);
        let chunk = chunk.as_ref().expect("a slot in use lies in a mapped chunk");
        look(chunk.page(slot.index()), chunk.checksums[slot.index()])
    }

    /// Wipes and frees many slots. They count as free from the start.
    pub fn free_slots(&self, slots: impl ExactSizeIterator<Item = PageSlot>) {
        self.free().leaving += slots.len() as u64;
        slots.for_each(|slot| self.release_slot(slot, 1));
    }

    /// Wipes a slot and then frees it for reuse.
    pub fn free_slot(&self, slot: PageSlot) {
        self.release_slot(slot, 0);
    }

    fn release_slot(&self, slot: PageSlot, leaving: u64) {
        self.change(slot, |chunk| {
            chunk.bytes[slot.index() * PAGE_BYTES..][..PAGE_BYTES].fill(0);
            chunk.checksums[slot.index()] = WireChecksum::default();
        });
        let mut free = self.free();
        free.used -= 1;
        free.leaving -= leaving;
        if free.leaving == 0 {
            // No more slots will be freed: waiters that get none must see that the slab is full.
            self.slot_released.notify_all();
        } else {
            self.slot_released.notify_one();
        }
        free.slots[slot.chunk()].push(slot.index() as u16);
        free.open.insert(slot.chunk() as u32);
        // One chunk stays mapped for the next page.
        if free.slots[slot.chunk()].len() == self.pages_of(slot.chunk()) && free.open.len() > 1 {
            free.open.remove(&(slot.chunk() as u32));
            free.slots[slot.chunk()] = Vec::new();
            free.unmapped.push(slot.chunk() as u32);
            *self.chunks[slot.chunk()].write().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    fn free(&self) -> MutexGuard<'_, FreeSlots> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, slot: PageSlot, change: impl FnOnce(&mut SlabChunk) -> T) -> T {
        let mut chunk = self.chunks[slot.chunk()].write().unwrap_or_else(PoisonError::into_inner);
        change(chunk.as_mut().expect("a slot in use lies in a mapped chunk"))
    }

    fn allocate(&self) -> Option<PageSlot> {
        let mut free = self.free();
        while free.used + free.reserved == self.pages_max {
            if free.leaving == 0 {
                return None;
            }
            free = self.slot_released.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        let chunk = match free.open.first() {
            Some(chunk) => *chunk,
            None => self.map_chunk(&mut free)?,
        };
        let index = free.slots[chunk as usize].pop().expect("an open chunk has free slots");
        if free.slots[chunk as usize].is_empty() {
            free.open.remove(&chunk);
            free.slots[chunk as usize] = Vec::new();
        }
        free.used += 1;
        Some(PageSlot::new(chunk, index))
    }

    /// Returns the number of pages of a chunk. The limit may shorten the last one.
    fn pages_of(&self, chunk: usize) -> usize {
        CHUNK_PAGES.min(self.pages_max as usize - chunk * CHUNK_PAGES)
    }

    fn map_chunk(&self, free: &mut FreeSlots) -> Option<u32> {
        let chunk = free.next_chunk();
        let pages = self.pages_of(chunk as usize);
        let fresh = free.next.take().and_then(|next| next.join().ok()?.ok());
        let fresh = match fresh.filter(|fresh| fresh.checksums.len() == pages) {
            Some(fresh) => fresh,
            None => SlabChunk::new(pages).ok()?,
        };
        free.unmapped.pop();
        if chunk as usize == free.slots.len() {
            free.slots.push(Vec::new());
        }
        free.slots[chunk as usize] = (0..pages as u16).rev().collect();
        free.open.insert(chunk);
        *self.chunks[chunk as usize].write().unwrap_or_else(PoisonError::into_inner) = Some(fresh);
        self.prepare_next(free);
        Some(chunk)
    }

    /// Maps the next chunk in a thread, if it is small in comparison with the mapped memory. The
    /// kernel's zeroing of pages would take half of a put's time.
    fn prepare_next(&self, free: &mut FreeSlots) {
        let next = free.next_chunk() as usize;
        let mapped = free.slots.len() - free.unmapped.len();
        if next < self.chunks.len() && mapped >= PREPARE_FROM {
            let pages = self.pages_of(next);
            let thread = std::thread::Builder::new().name("pagetax-room".into());
            free.next = thread.spawn(move || SlabChunk::new(pages)).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn bounded_and_wiped() {
        let slab = Slab::new(1000);
        let page = [7u8; PAGE_BYTES];
        let slots: Vec<PageSlot> = (0..1000)
            .map(|checksum| slab.put(&page, WireChecksum(checksum)).expect("room"))
            .collect();
        assert_eq!(slab.pages_free(), 0);
        assert!(slab.put(&page, WireChecksum(1)).is_none());
        let chunks = slab.chunks.iter().map(|chunk| chunk.read().unwrap());
        let mapped: usize = chunks.flat_map(|chunk| chunk.as_ref().map(|c| c.bytes.len())).sum();
        assert_eq!(mapped, 1000 * PAGE_BYTES, "not a byte over the limit");
        slab.free_slot(slots[5]);
        slab.with(slots[5], |page, checksum| {
            assert!(page == [0; PAGE_BYTES] && checksum == WireChecksum(0))
        });
        let again = slab.put(&page, WireChecksum(3)).expect("the slot that was given back");
        assert_eq!(again, slots[5]);
        slab.with(slots[999], |bytes, checksum| {
            assert!(bytes == page && checksum == WireChecksum(999))
        });
    }

    #[test]
    fn a_shared_slot_keeps_its_page_until_its_last_region_ends() {
        let slab = Slab::new(10);
        let slot = slab.put(&[1; PAGE_BYTES], WireChecksum(1)).unwrap();
        assert!(slab.share(slot) && slab.share(slot));
        assert!(!slab.replace(slot, &[2; PAGE_BYTES], WireChecksum(2)));
        slab.with(slot, |page, checksum| {
            assert!(page == [1; PAGE_BYTES] && checksum == WireChecksum(1))
        });
        assert_eq!([(); 3].map(|()| slab.unshare(slot)), [false, false, true]);
        assert!(slab.replace(slot, &[2; PAGE_BYTES], WireChecksum(2)));
    }

    #[test]
    fn a_chunk_without_memory_is_refused() {
        assert!(backed(Err(io::Error::from_raw_os_error(libc::ENOMEM))).is_err());
        assert!(backed(Err(io::Error::from_raw_os_error(libc::EINVAL))).is_ok());
        assert!(backed(Ok(())).is_ok());
    }

    #[test]
    fn what_is_being_given_back_can_be_had() {
        let slab = Slab::new(2000);
        let put = || slab.put(&[1; PAGE_BYTES], WireChecksum(1));
        let slots: Vec<PageSlot> = std::iter::from_fn(put).collect();
        let (begun, go) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let given_back = slots.into_iter().inspect(|_| {
                let _ = begun.send(());
            });
            let slab = &slab;
            scope.spawn(move || slab.free_slots(given_back));
            go.recv().unwrap();
            // Most are still in use; none of them is refused.
            assert_eq!(slab.pages_free(), 2000);
            assert!((0..2000).all(|_| put().is_some()) && put().is_none());
        });
    }

    /// An iterator that yields each slot after a message.
    struct WhenTold(std::sync::mpsc::Receiver<()>, std::vec::IntoIter<PageSlot>);

    impl Iterator for WhenTold {
        type Item = PageSlot;
        fn next(&mut self) -> Option<PageSlot> {
            self.0.recv().expect("a slot to yield");
            self.1.next()
        }

        fn size_hint(&self) -> (usize, Option<usize>) {
            self.1.size_hint()
        }
    }

    impl ExactSizeIterator for WhenTold {}

    #[test]
    fn nobody_waits_for_a_slot_that_another_has_taken() {
        const WAITERS: usize = 4;
        let slab = Arc::new(Slab::new(10));
        let slots: Vec<PageSlot> =
            std::iter::from_fn(|| slab.put(&[1; PAGE_BYTES], WireChecksum(1))).take(10).collect();
        let (tell, told) = channel();
        let leaving = WhenTold(told, vec![slots[3]].into_iter());
        let (slabs, (taken, took)) = (slab.clone(), channel());
        let giver = std::thread::spawn(move || slabs.free_slots(leaving));
        while slab.pages_free() == 0 {
            std::thread::yield_now();
        }
        let asleep: Vec<_> = (0..WAITERS)
            .map(|_| {
                let (slab, taken, (say, id)) = (slab.clone(), taken.clone(), channel());
                std::thread::spawn(move || {
                    say.send(rustix::thread::gettid().as_raw_pid()).expect("the test");
                    taken
                        .send(slab.put(&[2; PAGE_BYTES], WireChecksum(2)).is_some())
                        .expect("the test");
                });
                id.recv().expect("a thread")
            })
            .collect();
        for thread in asleep {
            // Blocked: the one thing that it waits for is a slot.
            let state = || std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
            while !state().is_ok_and(|stat| stat.contains(") S ")) {
                std::thread::yield_now();
            }
        }
        tell.send(()).expect("the giver");
        drop(tell);
        let got = |_| took.recv_timeout(Duration::from_secs(60)).expect("a waiter sleeps on");
        assert_eq!((0..WAITERS).map(got).filter(|got| *got).count(), 1);
        // The iterator is asked no more than there are slots.
        drop(giver);
    }

    #[test]
    fn empty_chunks_are_unmapped_and_come_back() {
        let slab = Slab::new(3 * CHUNK_PAGES as u64);
        let mapped = |slab: &Slab| {
            slab.chunks.iter().filter(|chunk| chunk.read().unwrap().is_some()).count()
        };
        for _ in 0..3 {
            let slots: Vec<PageSlot> =
                std::iter::from_fn(|| slab.put(&[1; PAGE_BYTES], WireChecksum(1))).collect();
            assert_eq!((slots.len(), mapped(&slab)), (3 * CHUNK_PAGES, 3));
            slots.into_iter().for_each(|slot| slab.free_slot(slot));
            assert_eq!((slab.pages_free(), mapped(&slab)), (3 * CHUNK_PAGES as u64, 1));
        }
    }

    #[test]
    fn chunks_that_were_prepared_are_used_up_to_the_limit() {
        let pages = (PREPARE_FROM + 3) * CHUNK_PAGES + 100;
        let slab = Slab::new(pages as u64);
        let put = || slab.put(&[1; PAGE_BYTES], WireChecksum(1));
        let slots: Vec<PageSlot> = std::iter::from_fn(put).collect();
        assert_eq!(slots.len(), pages);
        assert!(slab.free().next.is_none(), "nothing is left to be prepared");
        let last = slots.len() - 100 - CHUNK_PAGES..slots.len();
        // The shorter chunk at the end leaves first, and the next that is mapped is a whole one.
        slots[last].iter().rev().for_each(|slot| slab.free_slot(*slot));
        let again: Vec<PageSlot> = std::iter::from_fn(put).collect();
        assert_eq!(again.len(), 100 + CHUNK_PAGES);
    }
}
