//! The shared memory between engines and pagetax: a header and rings of records, in a memfd.
//!
//! Invariants: each ring has one writer, which alone stores the head, and one reader, which alone stores
//! the tail. A record is read only after the reader saw a later head (acquire). Its slot is free only
//! after the tail has passed it (release). An engine's records are untrusted data: no value makes the
//! reader leave the mapping.
#![allow(unsafe_code)]

use crate::native;
use crate::stream::{Consumer, RawRecord, SideFilters, Writer};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const MAGIC: u64 = 0x7274_736b_6361_7274;
const VERSION: u32 = 8;
const PAGE: usize = 4096;

/// The most concurrent writers.
const RINGS: usize = 64;
/// 256 KiB of records, which fit into the second-level cache.
const RECORDS: usize = 1 << 14;
const RING_BYTES: usize = PAGE + RECORDS * size_of::<RawRecord>();
const TOTAL_BYTES: usize = PAGE + RINGS * RING_BYTES;

#[repr(C)]
struct RingHeader {
    magic: u64,
    version: u32,
    ring_count: u32,
    ring_records: u64,
    consumer_pid: u32,
    follow: u32,
    sample: u32,
    zeros: u32,
    data: SideFilters,
    code: SideFilters,
    stop: AtomicU32,
    unrecorded: AtomicU32,
    processes: AtomicU32,
    native: native::Shared,
}

#[repr(C)]
struct Control {
    state: AtomicU32,
    pid: AtomicU32,
    process: AtomicU32,
    warm_up: AtomicU32,
    pad1: [u64; 6],
    head: AtomicU64,
    pad2: [u64; 7],
    tail: AtomicU64,
    pad3: [u64; 7],
}

const FREE: u32 = 0;
const ENDED: u32 = 2;

/// The shared memory, and the writer of each ring.
pub struct Rings {
    memory: OwnedFd,
    start: NonNull<u8>,
    /// Writers by ring; none if the ring seems free.
    writers: Vec<Option<Writer>>,
    writers_seen: usize,
    batch: Vec<RawRecord>,
}

// SAFETY: the mapping is owned. `&self` reaches it through atomics and copies only, and no thread owns
// it.
unsafe impl Send for Rings {}

impl Rings {
    /// Creates the memory for engines that use these filters. With `follow`, forked children write too;
    /// with `sample`, engines write bursts only; with `zeros`, those that can tell pages of zeros do.
    pub fn new(
        data: SideFilters,
        code: SideFilters,
        follow: bool,
        sample: bool,
        zeros: bool,
    ) -> io::Result<Rings> {
        let memory = memfd_create("pagetax-stream", MemfdFlags::CLOEXEC)?;
        ftruncate(&memory, TOTAL_BYTES as u64)?;
        // SAFETY: a new shared mapping of a memfd of exactly this length; the kernel chooses the
        // address.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                TOTAL_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &memory,
                0,
            )
        }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let header = RingHeader {
            magic: MAGIC,
            version: VERSION,
            ring_count: RINGS as u32,
            ring_records: RECORDS as u64,
            consumer_pid: std::process::id(),
            follow: follow.into(),
            sample: sample.into(),
            zeros: zeros.into(),
            data,
            code,
            stop: AtomicU32::new(0),
            unrecorded: AtomicU32::new(0),
            processes: AtomicU32::new(0),
            native: native::Shared::default(),
        };
        // SAFETY: the mapping begins on a page, has room for a header, and no engine has opened it yet.
        unsafe { start.cast::<RingHeader>().write(header) };
        Ok(Rings { memory, start, writers: vec![None; RINGS], writers_seen: 0, batch: Vec::new() })
    }

    /// Returns the path by which an engine of the same user opens the memory. No file stays behind.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.memory.as_raw_fd()).into()
    }

    fn header(&self) -> &RingHeader {
        // SAFETY: written in `new`; engines change only its atomics.
        unsafe { self.start.cast::<RingHeader>().as_ref() }
    }

    fn control(&self, ring: usize) -> &Control {
        assert!(ring < RINGS);
        // SAFETY: ring < RINGS, so the control block lies inside the mapping, on a page boundary. All of
        // its fields that change are atomics, for which zeros are valid.
        unsafe { self.start.add(PAGE + ring * RING_BYTES).cast::<Control>().as_ref() }
    }

    /// Tells all engines that nobody reads any more. They continue without writing.
    pub fn stop(&self) {
        self.header().stop.store(1, Ordering::Relaxed);
    }

    /// Returns the native engine's status.
    pub fn native(&self) -> &native::Shared {
        &self.header().native
    }

    /// Returns how many processes and threads found no free ring.
    pub fn unrecorded_count(&self) -> u32 {
        self.header().unrecorded.load(Ordering::Relaxed)
    }

    /// Passes all new records to the consumer and returns their number.
    pub fn drain(&mut self, consumer: &mut dyn Consumer) -> usize {
        (0..RINGS).map(|ring| self.drain_ring(ring, consumer)).sum()
    }

    fn drain_ring(&mut self, ring: usize, consumer: &mut dyn Consumer) -> usize {
        let control = self.control(ring);
        let state = control.state.load(Ordering::Acquire);
        let pid = control.pid.load(Ordering::Acquire);
        if state == FREE || pid == 0 {
            return 0;
        }
        let (tail, head) =
            (control.tail.load(Ordering::Relaxed), control.head.load(Ordering::Acquire));
        let count = (head.wrapping_sub(tail) as usize).min(RECORDS);
        let writer = self.writer(ring, pid, control.process.load(Ordering::Relaxed));
        self.read(ring, tail, count);
        self.control(ring).tail.store(tail.wrapping_add(count as u64), Ordering::Release);
        if count > 0 {
            consumer.take(writer, &self.batch);
            self.control(ring).warm_up.store(consumer.warm_up(writer), Ordering::Relaxed);
        } else if state == ENDED || !is_alive(pid) {
            self.free(ring, consumer);
        }
        count
    }

    fn writer(&mut self, ring: usize, pid: u32, process: u32) -> Writer {
        *self.writers[ring].get_or_insert_with(|| {
            self.writers_seen += 1;
            Writer { number: self.writers_seen - 1, process, pid }
        })
    }

    /// Copies records out, so that the engine can reuse their slots during the work on them.
    fn read(&mut self, ring: usize, tail: u64, count: usize) {
        assert!(ring < RINGS && count <= RECORDS);
        self.batch.clear();
        let at = tail as usize % RECORDS;
        for (from, count) in
            [(at, count.min(RECORDS - at)), (0, count.saturating_sub(RECORDS - at))]
        {
            // SAFETY: from + count ≤ RECORDS of a ring inside the mapping, aligned to 16. The writer
            // published these records before the head that was read, and leaves them alone until the
            // tail passes them. If it breaks that rule, we copy plain integers of arbitrary value.
            let records = unsafe {
                let first = self.start.add(PAGE + ring * RING_BYTES + PAGE).cast::<RawRecord>();
                std::slice::from_raw_parts(first.add(from).as_ptr(), count)
            };
            self.batch.extend_from_slice(records);
        }
    }

    fn free(&mut self, ring: usize, consumer: &mut dyn Consumer) {
        if let Some(writer) = self.writers[ring].take() {
            consumer.ended(writer);
        }
        let control = self.control(ring);
        control.pid.store(0, Ordering::Relaxed);
        control.warm_up.store(0, Ordering::Relaxed);
        control.state.store(FREE, Ordering::Release);
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        self.stop();
        // SAFETY: exactly the mapping that `new` made; no reference into it outlives a method call.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), TOTAL_BYTES) };
    }
}

fn is_alive(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}/stat")).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Seen {
        records: Vec<(usize, u64)>,
        ended: Vec<usize>,
    }

    impl Consumer for Seen {
        fn take(&mut self, writer: Writer, records: &[RawRecord]) {
            self.records.extend(records.iter().map(|r| (writer.number, r.what)));
        }
        fn ended(&mut self, writer: Writer) {
            self.ended.push(writer.number);
        }
    }

    /// Writes one record as an engine does.
    fn write(rings: &Rings, ring: usize, what: u64) {
        let control = rings.control(ring);
        let head = control.head.load(Ordering::Relaxed);
        // SAFETY: a slot inside the ring, which this test owns on both sides.
        unsafe {
            let first = rings.start.add(PAGE + ring * RING_BYTES + PAGE).cast::<RawRecord>();
            first.add(head as usize % RECORDS).write(RawRecord { what, argument: 0 });
        }
        control.head.store(head + 1, Ordering::Release);
    }

    fn claim(rings: &Rings, ring: usize) {
        rings.control(ring).state.store(1, Ordering::Relaxed);
        rings.control(ring).pid.store(std::process::id(), Ordering::Release);
    }

    #[test]
    fn records_come_in_order_over_the_end_of_the_ring_and_rings_are_used_again() {
        let mut rings =
            Rings::new(SideFilters::default(), SideFilters::default(), false, false, false)
                .unwrap();
        let mut seen = Seen::default();
        claim(&rings, 3);
        for round in 0..5u64 {
            (0..RECORDS as u64 / 2 + 7).for_each(|n| write(&rings, 3, round * 100_000 + n));
            rings.drain(&mut seen);
        }
        assert!(seen.records.windows(2).all(|pair| pair[0].1 < pair[1].1));
        assert_eq!(seen.records.len(), 5 * (RECORDS / 2 + 7));
        rings.control(3).state.store(ENDED, Ordering::Release);
        rings.drain(&mut seen);
        assert_eq!(seen.ended, [0]);
        claim(&rings, 3);
        write(&rings, 3, 1);
        rings.drain(&mut seen);
        assert_eq!(seen.records.last(), Some(&(1, 1)), "a new writer");
    }

    #[test]
    fn a_broken_head_reads_nothing_outside() {
        let mut rings =
            Rings::new(SideFilters::default(), SideFilters::default(), false, false, false)
                .unwrap();
        claim(&rings, 0);
        rings.control(0).head.store(u64::MAX / 2, Ordering::Release);
        let mut seen = Seen::default();
        assert_eq!(rings.drain(&mut seen), RECORDS);
    }
}
