//! Touched pages by idle page tracking: some base pages of a process are marked as idle, and after a
//! short time the kernel tells which of them were touched. Ubuntu's and Red Hat's kernels have it, also
//! those without DAMON.
//!
//! A mark clears the accessed bit of the page. A page whose translation stays in the TLB keeps it
//! cleared, counts as untouched, and costs no walk.
//!
//! Source: Documentation/admin-guide/mm/idle_page_tracking.rst and pagemap.rst of Linux 6.8.

use super::touched;
use crate::pages::pagemap::folio::{FRAME, HEAD, PRESENT, TAIL};
use crate::procfs::{MapsLine, Root, maps, smaps_rollup};
use crate::sys::process::cpu_clock_ns;
use crate::sys::signal::asked_to_stop;
use pagetax_core::access::Rng;
use pagetax_core::ranking::TouchWindow;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const BITMAP: &str = "/sys/kernel/mm/page_idle/bitmap";
const FLAGS: &str = "/proc/kpageflags";
/// The time in which a page is touched or not: as long as a window by clear_refs.
const SAMPLE: Duration = Duration::from_millis(2);
/// The pages that are marked at a time, and how often others are. Marking must be short beside a sample.
const PAGES: usize = 100;
pub(super) const ROUNDS: usize = 20;
/// The places of a process that are looked at for one page: much of a mapping may not be resident.
const TRIES: usize = 20;
/// The bits of an entry of /proc/kpageflags: a page that the kernel tracks, and the parts of larger
/// pages.
const TRACKED: u64 = 1 << 5;
const OF_LARGER: u64 = HEAD | TAIL | 1 << 17 | 1 << 22;

/// The kernel's files.
pub(super) struct PageIdle {
    bitmap: File,
    flags: File,
}

impl PageIdle {
    /// Opens the files; none if the kernel lacks them, or does not let us.
    pub fn open(root: &Root) -> Option<PageIdle> {
        let bitmap = OpenOptions::new().read(true).write(true).open(root.path(BITMAP)).ok()?;
        Some(PageIdle { bitmap, flags: File::open(root.path(FLAGS)).ok()? })
    }

    /// Watches a process for so many rounds, and returns its mean window.
    pub fn window(&self, root: &Root, pid: u32, rounds: usize) -> Result<TouchWindow, String> {
        let failed = |error: io::Error| format!("page_idle: {error}");
        let clock = || cpu_clock_ns(pid).map_err(|error| format!("no CPU clock: {error}"));
        let mut pages = RandomPages::of(root, pid).map_err(failed)?;
        let (mut cpu_ns, mut seen, mut touched_count) = (0, 0, 0);
        for _ in 0..rounds {
            if asked_to_stop() {
                return Err("interrupted".into());
            }
            let mut frames: Vec<u64> =
                (0..PAGES).filter_map(|_| pages.next_frame(&self.flags)).collect();
            let before_ns = clock()?;
            frames.retain(|frame| self.mark(*frame));
            let (marked_ns, begin) = (clock()?, Instant::now());
            std::thread::sleep(SAMPLE.saturating_sub(begin.elapsed()));
            let after_ns = clock()?;
            for frame in &frames {
                touched_count += u64::from(!self.is_idle(*frame).map_err(failed)?);
            }
            seen += frames.len() as u64;
            // A page is marked and read somewhere within both loops, so half of each belongs to its window.
            cpu_ns += (after_ns - marked_ns) + (marked_ns - before_ns + clock()? - after_ns) / 2;
        }
        if seen < PAGES as u64 {
            return Err("too few of its pages are resident on base pages".into());
        }
        let (base_bytes, _) = touched(&smaps_rollup(root, pid)?);
        Ok(TouchWindow {
            cpu_ns: cpu_ns / rounds as u64,
            base_bytes,
            touched_bytes: (base_bytes as f64 * touched_count as f64 / seen as f64) as u64,
            mark_ns: 0.0,
        })
    }

    /// Marks a page as idle. Zeros in a word change nothing. Returns false if the kernel does not take the
    /// whole word, as at the end of memory.
    fn mark(&self, frame: u64) -> bool {
        let word = (1u64 << (frame % 64)).to_ne_bytes();
        self.bitmap.write_at(&word, frame / 64 * 8).is_ok_and(|written| written == word.len())
    }

    fn is_idle(&self, frame: u64) -> io::Result<bool> {
        Ok(word(&self.bitmap, frame / 64)? & (1 << (frame % 64)) != 0)
    }
}

/// Random pages of a process, and the files that tell of them.
struct RandomPages {
    pagemap: File,
    mappings: Vec<MapsLine>,
    /// The pages in each mapping and those before it.
    ends: Vec<u64>,
    page_bytes: u64,
    rng: Rng,
}

impl RandomPages {
    fn of(root: &Root, pid: u32) -> io::Result<RandomPages> {
        let page_bytes = rustix::param::page_size() as u64;
        let mut mappings = maps(root, pid)?;
        // Memory without any right is reserved, and the kernel's own pages are not tracked.
        mappings.retain(|line| line.permissions[..3] != *b"---" && !line.name.starts_with("[v"));
        let mut end = 0;
        let ends = mappings.iter().map(|line| {
            end += (line.range.end - line.range.start) / page_bytes;
            end
        });
        let ends = ends.collect();
        let pagemap = File::open(root.path(&format!("/proc/{pid}/pagemap")))?;
        Ok(RandomPages { pagemap, mappings, ends, page_bytes, rng: Rng::new(u64::from(pid)) })
    }

    /// Returns the frame of a random base page that is resident; none if none is found.
    fn next_frame(&mut self, flags: &File) -> Option<u64> {
        let all = *self.ends.last()?;
        (0..TRIES).find_map(|_| {
            let number = (self.rng.unit() * all as f64) as u64;
            let at = self.ends.partition_point(|end| *end <= number);
            let before = at.checked_sub(1).map_or(0, |before| self.ends[before]);
            let first = self.mappings.get(at)?.range.start / self.page_bytes;
            let entry = word(&self.pagemap, first + number - before).ok()?;
            let frame = (entry & PRESENT != 0).then_some(entry & FRAME).filter(|f| *f > 0)?;
            let flags = word(flags, frame).ok()?;
            (flags & TRACKED != 0 && flags & OF_LARGER == 0).then_some(frame)
        })
    }
}

/// Reads a word of a file by its number.
fn word(file: &File, number: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, number * 8)?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_this_process_are_those_of_base_pages() {
        let Ok(flags) = File::open(FLAGS) else {
            println!("SKIP: only root reads {FLAGS}");
            return;
        };
        let mut pages = RandomPages::of(&Root::default(), std::process::id()).unwrap();
        let frames: Vec<u64> = (0..50).filter_map(|_| pages.next_frame(&flags)).collect();
        assert!(frames.len() > 10, "{frames:?}");
        assert!(frames.iter().all(|frame| word(&flags, *frame).unwrap() & OF_LARGER == 0));
    }

    #[test]
    fn a_kernel_without_it_is_told_from_one_that_has_it() {
        assert!(PageIdle::open(&Root::at("/nonexistent")).is_none());
    }
}
