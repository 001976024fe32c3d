//! Where the pages lie: a bounded number of slots of one page each, in chunks that are mapped when
//! they are needed and unmapped when they are empty.
//!
//! Invariants: never more than `pages_max` slots are in use; a slot that is given back is wiped
//! before anybody else can get it.

use crate::page::PAGE_BYTES;
use crate::wire::Checksum;
use memmap2::{Advice, MmapMut};
use std::collections::BTreeSet;
use std::io;
use std::num::NonZeroU32;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;

/// Pages of a chunk, but for the last: 2 MiB.
const CHUNK_PAGES: usize = 512;

/// From so many mapped chunks on, the next is mapped before it is needed: it is less than 2 % of them.
const PREPARE_FROM: usize = 64;

/// A place for one page: its number, from 1 on, so that none takes no room of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot(NonZeroU32);

impl Slot {
    fn new(chunk: u32, index: u16) -> Slot {
        Slot(NonZeroU32::MIN.saturating_add(chunk * CHUNK_PAGES as u32 + u32::from(index)))
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

/// All slots.
#[derive(Debug)]
pub struct Slab {
    pages_max: u64,
    chunks: Box<[RwLock<Option<Chunk>>]>,
    free: Mutex<Free>,
    /// One of those that leave has been given back.
    given_back: Condvar,
}

#[derive(Debug)]
struct Chunk {
    bytes: MmapMut,
    sums: Box<[Checksum]>,
}

#[derive(Debug, Default)]
struct Free {
    used: u64,
    /// Of them: being wiped, to be given back. They count as free: who wants one waits.
    leaving: u64,
    /// The free slots of each chunk that was ever mapped.
    slots: Vec<Vec<u16>>,
    /// Mapped chunks that have free slots.
    open: BTreeSet<u32>,
    /// Chunks that were unmapped.
    unmapped: Vec<u32>,
    /// The chunk that will be mapped next, if its size still fits then.
    next: Option<JoinHandle<io::Result<Chunk>>>,
}

impl Free {
    /// Which chunk will be mapped next: none, if it is beyond the last.
    fn next_chunk(&self) -> u32 {
        self.unmapped.last().copied().unwrap_or(self.slots.len() as u32)
    }
}

/// A chunk that the system has no memory for is refused, as putting pages into it would have the kernel look for
/// a process to kill. Before Linux 5.14 nothing tells: it does not know the advice.
fn backed(populated: io::Result<()>) -> io::Result<()> {
    match populated {
        Err(error) if error.kind() != io::ErrorKind::InvalidInput => Err(error),
        _ => Ok(()),
    }
}

impl Chunk {
    fn new(pages: usize) -> io::Result<Chunk> {
        let bytes = MmapMut::map_anon(pages * PAGE_BYTES)?;
        // All at once takes two thirds of the time that a fault for each takes. Huge pages would take a
        // third, but where a hypervisor has taken free memory back, they take four times as much: it
        // takes back whole ones.
        backed(bytes.advise(Advice::PopulateWrite))?;
        Ok(Chunk { bytes, sums: vec![Checksum::default(); pages].into() })
    }

    fn page(&self, index: usize) -> &[u8] {
        &self.bytes[index * PAGE_BYTES..][..PAGE_BYTES]
    }
}

impl Slab {
    /// For at most this many pages. Nothing is mapped yet.
    pub fn new(pages_max: u64) -> Slab {
        let pages_max = pages_max.min(u32::MAX as u64 - CHUNK_PAGES as u64);
        let chunks = pages_max.div_ceil(CHUNK_PAGES as u64);
        let chunks = (0..chunks).map(|_| RwLock::default()).collect();
        Slab { pages_max, chunks, free: Mutex::default(), given_back: Condvar::new() }
    }

    /// Slots in all.
    pub fn pages_max(&self) -> u64 {
        self.pages_max
    }

    /// Slots that can be had.
    pub fn pages_free(&self) -> u64 {
        let free = self.free();
        self.pages_max - free.used + free.leaving
    }

    /// Takes a slot and fills it; none when all are in use or the system gives no memory.
    pub fn put(&self, page: &[u8], sum: Checksum) -> Option<Slot> {
        let slot = self.allocate()?;
        self.replace(slot, page, sum);
        Some(slot)
    }

    /// Puts another page into a slot that is in use.
    pub fn replace(&self, slot: Slot, page: &[u8], sum: Checksum) {
        self.change(slot, |chunk| {
            chunk.bytes[slot.index() * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(page);
            chunk.sums[slot.index()] = sum;
        });
    }

    /// Puts the same page into its slot again, if that is what it has: only damage makes it another. Looks and puts at
    /// once, as another connection may replace it.
    pub fn repair(&self, slot: Slot, page: &[u8], sum: Checksum) {
        self.change(slot, |chunk| {
            if chunk.sums[slot.index()] == sum {
                chunk.bytes[slot.index() * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(page);
            }
        });
    }

    /// Shows the page in a slot that is in use.
    pub fn with<T>(&self, slot: Slot, look: impl FnOnce(&[u8], Checksum) -> T) -> T {
        let chunk = self.chunks[slot.chunk()].read().unwrap_or_else(PoisonError::into_inner);
        let chunk = chunk.as_ref().expect("a slot in use lies in a mapped chunk");
        look(chunk.page(slot.index()), chunk.sums[slot.index()])
    }

    /// Wipes many slots and gives them back; others can count on their room from the start.
    pub fn free_slots(&self, slots: impl ExactSizeIterator<Item = Slot>) {
        self.free().leaving += slots.len() as u64;
        slots.for_each(|slot| self.give_back(slot, 1));
    }

    /// Wipes a slot and gives it back.
    pub fn free_slot(&self, slot: Slot) {
        self.give_back(slot, 0);
    }

    fn give_back(&self, slot: Slot, leaving: u64) {
        self.change(slot, |chunk| {
            chunk.bytes[slot.index() * PAGE_BYTES..][..PAGE_BYTES].fill(0);
            chunk.sums[slot.index()] = Checksum::default();
        });
        let mut free = self.free();
        free.used -= 1;
        free.leaving -= leaving;
        if free.leaving == 0 {
            // Nothing more is coming: those that get none of these slots must see that there is no room.
            self.given_back.notify_all();
        } else {
            self.given_back.notify_one();
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

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, slot: Slot, change: impl FnOnce(&mut Chunk)) {
        let mut chunk = self.chunks[slot.chunk()].write().unwrap_or_else(PoisonError::into_inner);
        change(chunk.as_mut().expect("a slot in use lies in a mapped chunk"));
    }

    fn allocate(&self) -> Option<Slot> {
        let mut free = self.free();
        while free.used == self.pages_max {
            if free.leaving == 0 {
                return None;
            }
            free = self.given_back.wait(free).unwrap_or_else(PoisonError::into_inner);
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
        Some(Slot::new(chunk, index))
    }

    /// The last chunk is as long as the limit leaves it.
    fn pages_of(&self, chunk: usize) -> usize {
        CHUNK_PAGES.min(self.pages_max as usize - chunk * CHUNK_PAGES)
    }

    fn map_chunk(&self, free: &mut Free) -> Option<u32> {
        let chunk = free.next_chunk();
        let pages = self.pages_of(chunk as usize);
        let fresh = free.next.take().and_then(|next| next.join().ok()?.ok());
        let fresh = match fresh.filter(|fresh| fresh.sums.len() == pages) {
            Some(fresh) => fresh,
            None => Chunk::new(pages).ok()?,
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

    /// Has the next chunk mapped meanwhile, where it is little beside what is held: to have the system clear its pages
    /// takes half of a put's time.
    fn prepare_next(&self, free: &mut Free) {
        let next = free.next_chunk() as usize;
        let mapped = free.slots.len() - free.unmapped.len();
        if next < self.chunks.len() && mapped >= PREPARE_FROM {
            let pages = self.pages_of(next);
            let thread = std::thread::Builder::new().name("pagetax-room".into());
            free.next = thread.spawn(move || Chunk::new(pages)).ok();
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
        let slots: Vec<Slot> =
            (0..1000).map(|sum| slab.put(&page, Checksum(sum)).expect("room")).collect();
        assert_eq!(slab.pages_free(), 0);
        assert!(slab.put(&page, Checksum(1)).is_none());
        let chunks = slab.chunks.iter().map(|chunk| chunk.read().unwrap());
        let mapped: usize = chunks.flat_map(|chunk| chunk.as_ref().map(|c| c.bytes.len())).sum();
        assert_eq!(mapped, 1000 * PAGE_BYTES, "not a byte over the limit");
        slab.free_slot(slots[5]);
        slab.with(slots[5], |page, sum| assert!(page == [0; PAGE_BYTES] && sum == Checksum(0)));
        let again = slab.put(&page, Checksum(3)).expect("the slot that was given back");
        assert_eq!(again, slots[5]);
        slab.with(slots[999], |bytes, sum| assert!(bytes == page && sum == Checksum(999)));
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
        let put = || slab.put(&[1; PAGE_BYTES], Checksum(1));
        let slots: Vec<Slot> = std::iter::from_fn(put).collect();
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

    /// Gives its slots when it is told to.
    struct WhenTold(std::sync::mpsc::Receiver<()>, std::vec::IntoIter<Slot>);

    impl Iterator for WhenTold {
        type Item = Slot;
        fn next(&mut self) -> Option<Slot> {
            self.0.recv().expect("to be told");
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
        let slots: Vec<Slot> =
            std::iter::from_fn(|| slab.put(&[1; PAGE_BYTES], Checksum(1))).take(10).collect();
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
                        .send(slab.put(&[2; PAGE_BYTES], Checksum(2)).is_some())
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
            let slots: Vec<Slot> =
                std::iter::from_fn(|| slab.put(&[1; PAGE_BYTES], Checksum(1))).collect();
            assert_eq!((slots.len(), mapped(&slab)), (3 * CHUNK_PAGES, 3));
            slots.into_iter().for_each(|slot| slab.free_slot(slot));
            assert_eq!((slab.pages_free(), mapped(&slab)), (3 * CHUNK_PAGES as u64, 1));
        }
    }

    #[test]
    fn chunks_that_were_prepared_are_used_up_to_the_limit() {
        let pages = (PREPARE_FROM + 3) * CHUNK_PAGES + 100;
        let slab = Slab::new(pages as u64);
        let put = || slab.put(&[1; PAGE_BYTES], Checksum(1));
        let slots: Vec<Slot> = std::iter::from_fn(put).collect();
        assert_eq!(slots.len(), pages);
        assert!(slab.free().next.is_none(), "nothing is left to be prepared");
        let last = slots.len() - 100 - CHUNK_PAGES..slots.len();
        // The shorter chunk at the end leaves first, and the next that is mapped is a whole one.
        slots[last].iter().rev().for_each(|slot| slab.free_slot(*slot));
        let again: Vec<Slot> = std::iter::from_fn(put).collect();
        assert_eq!(again.len(), 100 + CHUNK_PAGES);
    }
}
