//! Free memory without a block of 2M, made and put back by a child of this process.
//!
//! The child takes each free block as a huge page, splits it, and frees all of it but some pages. It goes on
//! with those that become free, as long as it runs. So it never holds more than a small part of the memory,
//! and all of it is free again when the child ends, however that happens. A page that stays either is held by
//! a pipe, and cannot be moved, or is ordinary memory, which compaction moves.
//!
//! Sources: for the split, madvise_cold_or_pageout_pte_range() in mm/madvise.c; for pages that cannot move,
//! isolate_migratepages_block() in mm/compaction.c (Linux 6.18).

use crate::procfs::{Fragmentation, Root};
use crate::sys::mapping::{OwnedMapping, Request, Source};
use crate::sys::process::{Child, fork};
use pagetax_core::exit::Exit;
use pagetax_core::system_stat::huge_blocks;
use pagetax_core::units::PageSize;
use procfs_core::Meminfo;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with};
use rustix::process::Pid;
use rustix::thread::CpuSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// The pages of each block that stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// The first page, which cannot be moved.
    Held,
    /// Every eighth page, which can be moved.
    Movable,
}

/// One in this many pages of a block stays where they can be moved.
const MOVABLE_PART: usize = 8;
/// Blocks that are taken before the free ones are counted again.
const BATCH: u64 = 32;
/// The work ends with so few free blocks, or where a batch found none: the kernel keeps a reserve.
const DONE: u64 = 8;
/// The time between two looks at free blocks: the kernel compacts memory in the background.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
/// The size of a pipe; each of its pages holds one.
const PIPE_BYTES: usize = 1 << 20;
/// The share of the free blocks that may be left, at most.
const LEFT_MAX: f64 = 0.1;
/// As few free blocks as this do not count.
const FEW: u64 = 64;

/// Free memory without a block of 2M. Dropping it frees what it holds.
#[derive(Debug)]
pub struct Fragments {
    child: Child,
    ask: OwnedFd,
    answers: OwnedFd,
}

impl Fragments {
    /// Fragments the free memory of the machine. Takes some 0.3 ms for each free block of 2M, and more where
    /// the hypervisor must bring it back.
    ///
    /// # Errors
    /// A sentence with what would make it possible.
    pub fn make(pattern: Pattern) -> Result<Fragments, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("it takes memory of the whole machine; be root".into());
        }
        if pattern == Pattern::Held {
            // Compaction would make blocks of the page cache. What cannot be dropped stays in use.
            let _ = std::fs::write("/proc/sys/vm/drop_caches", "1");
        }
        let before = free_blocks().map_err(|error| error.to_string())?;
        let failed = |error: io::Error| format!("free memory cannot be fragmented: {error}");
        let mut fragments = Fragments::start(pattern).map_err(failed)?;
        let left = fragments.left().map_err(failed)?;
        if left > FEW && left as f64 > LEFT_MAX * before as f64 {
            return Err(format!(
                "{left} of {before} free blocks of 2M could not be taken; set \
                 /sys/kernel/mm/transparent_hugepage/enabled to madvise"
            ));
        }
        Ok(fragments)
    }

    fn start(pattern: Pattern) -> io::Result<Fragments> {
        let (asked, ask) = pipe_with(PipeFlags::CLOEXEC)?;
        let (answers, answer) = pipe_with(PipeFlags::CLOEXEC)?;
        let child = fork(move || match serve(pattern, &asked, &answer) {
            Ok(()) => 0,
            Err(error) => error.raw_os_error().unwrap_or(1),
        })?;
        Ok(Fragments { child, ask, answers })
    }

    /// Returns the number of blocks that are free. Fails if the process has ended.
    pub fn left(&mut self) -> io::Result<u64> {
        rustix::io::write(&self.ask, &[0])?;
        let mut left = [0; 8];
        match rustix::io::read(&self.answers, &mut left)? {
            8 => Ok(u64::from_ne_bytes(left)),
            _ => Err(match self.child.wait()? {
                (Exit::Code(errno), _) => io::Error::from_raw_os_error(errno),
                (killed, _) => io::Error::other(format!("its process was {killed}")),
            }),
        }
    }

    /// Returns the process that holds the memory.
    pub fn pid(&self) -> Pid {
        self.child.pid()
    }
}

fn block_bytes() -> usize {
    PageSize::M2.bytes() as usize
}

/// Returns the number of free blocks of 2M that ordinary memory can have.
fn free_blocks() -> io::Result<u64> {
    let free = Fragmentation::usable(&Root::default()).map_err(io::Error::other)?;
    Ok(huge_blocks(&free.free_blocks))
}

/// Takes blocks as they become free, until the other end of the pipe is closed. Answers with the number of
/// those that are left.
fn serve(pattern: Pattern, asked: &OwnedFd, answer: &OwnedFd) -> io::Result<()> {
    let meminfo: Meminfo = Root::default().parse("/proc/meminfo").map_err(io::Error::other)?;
    // The kernel refuses a mapping that is larger than memory.
    let len = (meminfo.mem_total as usize / 4).next_multiple_of(block_bytes());
    let mut taker = Taker::new(pattern, len)?;
    taker.take_all()?;
    loop {
        let mut asked_now = [PollFd::new(asked, PollFlags::IN)];
        let mut word = [0];
        match rustix::event::poll(&mut asked_now, Some(&LOOK)) {
            Ok(0) | Err(Errno::INTR) => drop(taker.take_all()?),
            ready => {
                ready?;
                if rustix::io::read(asked, &mut word)? == 0 {
                    return Ok(());
                }
                taker.take_lists()?;
                let left = taker.take_all()?;
                rustix::io::write(answer, &left.to_ne_bytes())?;
            }
        }
    }
}

/// Maps memory that gets huge pages.
fn map(len: usize) -> io::Result<OwnedMapping> {
    let request = Request { source: Source::Anon, len, align: block_bytes(), hugetlb: None };
    let mapping = OwnedMapping::new(request)?;
    mapping.advise(libc::MADV_HUGEPAGE)?;
    Ok(mapping)
}

/// Returns the free pages on the list of each CPU, over all zones, from the text of /proc/zoneinfo.
fn listed_pages(text: &str) -> Vec<u64> {
    let (mut pages, mut cpu) = (Vec::new(), None);
    for line in text.lines() {
        let number = |name: &str| line.trim().strip_prefix(name)?.trim().parse::<u64>().ok();
        if let Some(number) = number("cpu:") {
            cpu = Some(number as usize);
        } else if let (Some(cpu), Some(count)) = (cpu, number("count:")) {
            if pages.len() <= cpu {
                pages.resize(cpu + 1, 0);
            }
            pages[cpu] += count;
        }
    }
    pages
}

/// Takes free blocks.
struct Taker {
    pattern: Pattern,
    /// The mapping that blocks are taken in.
    mapping: OwnedMapping,
    /// The offset of the next block in it.
    next: usize,
    /// Mappings that have no room left.
    full: Vec<OwnedMapping>,
    /// Pipes that hold pages.
    pipes: Vec<OwnedFd>,
    /// The end for writing of the last pipe, and the pages that it can still hold.
    open: Option<(OwnedFd, usize)>,
}

impl Taker {
    /// Takes blocks in mappings of this length.
    fn new(pattern: Pattern, len: usize) -> io::Result<Taker> {
        let mapping = map(len)?;
        Ok(Taker { pattern, mapping, next: 0, full: Vec::new(), pipes: Vec::new(), open: None })
    }

    /// Takes free blocks until there are none, and returns how many are left.
    fn take_all(&mut self) -> io::Result<u64> {
        loop {
            let free = free_blocks()?;
            if free <= DONE {
                return Ok(free);
            }
            let mut taken = 0;
            for _ in 0..free.min(BATCH) {
                taken += u64::from(self.take()?);
            }
            // khugepaged would make huge pages of them again.
            self.mapping.advise_range(0, self.next, libc::MADV_NOHUGEPAGE)?;
            if taken == 0 {
                return Ok(free);
            }
        }
    }

    /// Takes the blocks that each CPU keeps on a list of its own, which no count of free blocks has: those
    /// that programs have freed there.
    fn take_lists(&mut self) -> io::Result<()> {
        let before = rustix::thread::sched_getaffinity(None)?;
        let text = Root::default().text("/proc/zoneinfo").map_err(io::Error::other)?;
        for (cpu, pages) in listed_pages(&text).into_iter().enumerate() {
            if !before.is_set(cpu) {
                continue;
            }
            let mut one = CpuSet::new();
            one.set(cpu);
            rustix::thread::sched_setaffinity(None, &one)?;
            let blocks = pages * rustix::param::page_size() as u64 / PageSize::M2.bytes();
            for _ in 0..blocks {
                if !self.take()? {
                    break;
                }
            }
        }
        Ok(rustix::thread::sched_setaffinity(None, &before)?)
    }

    /// Takes a block, and frees all of it but the pages of the pattern. Returns false if it got a base page.
    fn take(&mut self) -> io::Result<bool> {
        if self.next == self.mapping.len() {
            self.mapping.advise(libc::MADV_NOHUGEPAGE)?;
            let next = map(self.mapping.len())?;
            self.full.push(std::mem::replace(&mut self.mapping, next));
            self.next = 0;
        }
        let (page, offset) = (rustix::param::page_size(), self.next);
        self.next += block_bytes();
        self.mapping.store(offset as u64, 1);
        let is_huge = self.mapping.is_resident(offset + page)?;
        // Memory that is freed while the huge page is whole stays with it.
        self.mapping.advise_range(offset, page, libc::MADV_COLD)?;
        let group = match self.pattern {
            Pattern::Held => block_bytes(),
            Pattern::Movable => MOVABLE_PART * page,
        };
        for start in (offset..offset + block_bytes()).step_by(group) {
            self.mapping.advise_range(start + page, group - page, libc::MADV_DONTNEED)?;
        }
        if self.pattern == Pattern::Held {
            self.hold(offset)?;
        }
        Ok(is_huge)
    }

    /// Has a pipe hold a page.
    fn hold(&mut self, offset: usize) -> io::Result<()> {
        let (pipe, room) = match self.open.take() {
            Some((pipe, room)) if room > 0 => (pipe, room),
            _ => self.new_pipe()?,
        };
        self.mapping.hold_page(offset, pipe.as_fd())?;
        self.open = Some((pipe, room - 1));
        Ok(())
    }

    /// Makes a pipe, and keeps its end for reading.
    fn new_pipe(&mut self) -> io::Result<(OwnedFd, usize)> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        // A user who has many pipes gets no larger one.
        let _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
        let bytes = fcntl_getpipe_size(&writer)?;
        self.pipes.push(reader);
        Ok((writer, bytes / rustix::param::page_size()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::ran_alone;
    use std::time::{Duration, Instant};

    #[test]
    fn lists_of_cpus_are_summed_over_zones() {
        let text = "Node 0, zone DMA32\n  pagesets\n    cpu: 0\n              count:    5\n    cpu: 1\n  \
                    count: 7\n              high:  9\nNode 0, zone Normal\n    cpu: 1\n    count: 1\n";
        assert_eq!(listed_pages(text), [5, 8]);
        assert!(listed_pages("").is_empty());
    }

    #[test]
    fn a_block_that_is_taken_is_free_but_for_the_pages_of_its_pattern() {
        if ran_alone() {
            return;
        }
        for (pattern, kept) in [(Pattern::Held, 1), (Pattern::Movable, 64)] {
            let mut taker = Taker::new(pattern, block_bytes()).unwrap();
            // A block that got no huge page has one page alone.
            let kept = [(); 2].map(|()| if taker.take().unwrap() { kept } else { 1 });
            for (mapping, kept) in [&taker.full[0], &taker.mapping].into_iter().zip(kept) {
                let resident = mapping.resident_pages().unwrap();
                assert_eq!(resident.iter().filter(|page| **page & 1 == 1).count(), kept);
            }
            assert_eq!(taker.pipes.len(), usize::from(pattern == Pattern::Held));
        }
    }

    #[test]
    fn only_root_may_fragment_memory_and_a_process_that_has_ended_is_named() {
        if !rustix::process::geteuid().is_root() {
            assert!(Fragments::make(Pattern::Held).unwrap_err().contains("be root"));
            return;
        }
        let (ask, _closed) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        drop(ask);
        let mut ended = Fragments {
            child: fork(|| libc::ENOMEM).unwrap(),
            ask: pipe_with(PipeFlags::CLOEXEC).unwrap().1,
            answers: pipe_with(PipeFlags::CLOEXEC).unwrap().0,
        };
        let limit = Instant::now() + Duration::from_secs(10);
        while !ended.child.ends_within(Duration::from_millis(10)).unwrap() {
            assert!(Instant::now() < limit);
        }
        assert!(ended.left().is_err());
    }
}
