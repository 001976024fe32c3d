//! A thread of fixed work that shares a CPU with a program, to see how fast the machine is meanwhile.
//!
//! Guests of one host share its caches and its memory. On one such machine the CPU time of the same
//! program varied by 5 to 20 % with what its neighbours did, within milliseconds. A chain of arithmetic
//! varied by 1 %, reads of memory as much as the programs. So the work is such reads. Beside a command,
//! the thread has a quarter of the CPU's time, in slices of the scheduler between those of the command.
//! Beside a process that runs already it works in bursts, in 1 % of the time.

use crate::procfs::Root;
use crate::sys::mapping::{OwnedMapping, Request, Source};
use pagetax_core::stats::median;
use pagetax_core::units::PageSize;
use procfs_core::Meminfo;
use rustix::thread::CpuSet;
use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The memory that is read: more than the caches of one core, about what cores share. With 4 MiB,
/// programs followed the probe less closely.
const NEAR_BYTES: usize = 32 << 20;
/// Memory that no cache holds, which bursts read as well: some programs follow the one, some the other.
const FAR_BYTES: usize = 256 << 20;
/// It is read if so many times as much is available.
const FAR_AVAILABLE: u64 = 8;
/// The reads of one piece of work, some 10 µs.
const READS: u32 = 1_000;
/// Added to the nice value of the command: a third of its weight.
const NICE: i32 = 5;
/// A longer piece had the command between its ends.
const SLICE: Duration = Duration::from_micros(300);
/// The pieces after a slice of the command that do not count: they bring the caches back.
const COLD_PIECES: u32 = 4;
/// Fewer pieces of a run, and of a burst, say too little.
const PIECES_MIN: u32 = 30;
const BURST_PIECES_MIN: u32 = 5;
/// The pieces of a burst, some 100 us. Few pieces often say more than many pieces seldom, as neighbours
/// change within milliseconds.
const BURST_PIECES: u32 = 15;
/// The time between two bursts.
const BURST_GAP: Duration = Duration::from_millis(20);
/// The bursts for which the CPU of the processes is looked up once.
const BURSTS_OF_LOOK: u32 = 5;

/// A probe beside a run.
#[derive(Debug)]
pub struct SpeedProbe {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Option<u64>>>,
}

impl SpeedProbe {
    /// Starts a probe on this CPU.
    pub fn start(cpu: usize) -> io::Result<SpeedProbe> {
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = stop.clone();
        let body = move || {
            let memory = near().as_ref()?;
            run_on(cpu)?;
            let own = rustix::thread::gettid();
            let nice = rustix::process::getpriority_process(Some(own)).ok()?;
            rustix::process::setpriority_process(Some(own), nice + NICE).ok()?;
            let mut at = 1;
            mean_ns(memory, &mut at, PIECES_MIN, || !is_over.load(Ordering::Relaxed))
        };
        let thread = std::thread::Builder::new().name("speed probe".into()).spawn(body)?;
        Ok(SpeedProbe { stop, thread: Some(thread) })
    }

    /// Ends the probe, and returns the mean time of a piece of work; none if it ran too short.
    pub fn finish(mut self) -> Option<u64> {
        self.end()
    }

    fn end(&mut self) -> Option<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take()?.join().ok()?
    }
}

impl Drop for SpeedProbe {
    fn drop(&mut self) {
        self.end();
    }
}

/// A probe beside processes that run already.
#[derive(Debug)]
pub struct SpeedBursts {
    probe: SpeedProbe,
    /// The mean time of a piece in each burst so far, in nanoseconds: of near and of far memory.
    bursts_ns: Arc<Mutex<[Vec<u64>; 2]>>,
}

impl SpeedBursts {
    /// Starts a probe. It works on the CPU that `cpu` returns before each burst.
    pub fn start(cpu: impl Fn() -> Option<usize> + Send + 'static) -> io::Result<SpeedBursts> {
        let stop = Arc::new(AtomicBool::new(false));
        let bursts_ns = Arc::<Mutex<[Vec<u64>; 2]>>::default();
        let (is_over, all) = (stop.clone(), bursts_ns.clone());
        // They are filled before the first look at the processes.
        let memories = [near().as_ref(), far().as_ref()];
        let body = move || {
            let mut at = 1;
            let mut place = None;
            for number in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                if number % BURSTS_OF_LOOK == 0 {
                    place = cpu();
                    place.map_or(Some(()), run_on)?;
                }
                let which = (number % 2) as usize;
                if let (Some(_), Some(memory)) = (place, memories[which]) {
                    let mut left = BURST_PIECES;
                    let goes_on = || {
                        left = left.saturating_sub(1);
                        left > 0
                    };
                    let burst_ns = mean_ns(memory, &mut at, BURST_PIECES_MIN, goes_on);
                    all.lock().ok()?[which].extend(burst_ns);
                }
                std::thread::sleep(BURST_GAP);
            }
            None
        };
        let thread = std::thread::Builder::new().name("speed probe".into()).spawn(body)?;
        Ok(SpeedBursts { probe: SpeedProbe { stop, thread: Some(thread) }, bursts_ns })
    }

    /// Returns the numbers of bursts so far, on near and on far memory.
    pub fn counts(&self) -> [usize; 2] {
        self.bursts_ns.lock().map_or([0; 2], |bursts| [bursts[0].len(), bursts[1].len()])
    }

    /// Returns the times of a piece in the medians of the bursts after the first `earlier`; none without
    /// one.
    pub fn medians_ns(&self, earlier: [usize; 2]) -> [Option<u64>; 2] {
        let Ok(bursts) = self.bursts_ns.lock() else { return [None; 2] };
        // Some single bursts take several times as long as the others; a mean would believe them.
        [0, 1].map(|which| median(bursts[which].get(earlier[which]..)?))
    }

    /// Ends the probe.
    pub fn finish(self) {
        self.probe.finish();
    }
}

/// Moves this thread to a CPU.
fn run_on(cpu: usize) -> Option<()> {
    let mut one = CpuSet::new();
    one.set(cpu);
    rustix::thread::sched_setaffinity(None, &one).ok()
}

/// Returns the memory of all probes of this process. It stays the same, because the caches' slices make
/// some pages faster than others.
fn near() -> &'static Option<OwnedMapping> {
    static MEMORY: OnceLock<Option<OwnedMapping>> = OnceLock::new();
    MEMORY.get_or_init(|| filled(NEAR_BYTES))
}

/// Returns the far memory of all bursts; none where it would be much of what is left.
fn far() -> &'static Option<OwnedMapping> {
    static MEMORY: OnceLock<Option<OwnedMapping>> = OnceLock::new();
    MEMORY.get_or_init(|| {
        let available = Root::default().parse::<Meminfo>("/proc/meminfo").ok()?.mem_available?;
        let has_room = available >= FAR_AVAILABLE * FAR_BYTES as u64;
        has_room.then(|| filled(FAR_BYTES)).flatten()
    })
}

/// Maps memory, if possible on huge pages, and fills it.
fn filled(len: usize) -> Option<OwnedMapping> {
    let align = PageSize::M2.bytes() as usize;
    let request = Request { source: Source::Anon, len, align, hugetlb: None };
    let mapping = OwnedMapping::new(request).ok()?;
    // A kernel without huge pages refuses this; base pages do as well.
    let _ = mapping.advise(libc::MADV_HUGEPAGE);
    (0..len as u64).step_by(4096).for_each(|offset| mapping.store(offset, offset));
    Some(mapping)
}

/// Works as long as it is asked to, and returns the mean time of a piece; none of fewer than `least`.
fn mean_ns(
    memory: &OwnedMapping,
    at: &mut u64,
    least: u32,
    mut goes_on: impl FnMut() -> bool,
) -> Option<u64> {
    let mut cold = COLD_PIECES;
    let (mut total, mut pieces) = (Duration::ZERO, 0);
    let mut before = Instant::now();
    while goes_on() {
        *at = read_some(memory, *at);
        let now = Instant::now();
        let took = now - before;
        before = now;
        match (took > SLICE, cold) {
            (true, _) => cold = COLD_PIECES,
            (false, 0) => (total, pieces) = (total + took, pieces + 1),
            (false, _) => cold -= 1,
        }
    }
    (pieces >= least).then(|| (total / pieces).as_nanos() as u64)
}

/// Reads words at random, so that several reads are under way at a time.
fn read_some(memory: &OwnedMapping, mut at: u64) -> u64 {
    let words = memory.len() as u64 / 8;
    for _ in 0..READS {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        black_box(memory.load((at >> 36) % words * 8));
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_tells_the_time_of_its_work_and_ends() {
        let cpu = rustix::thread::sched_getcpu();
        let probe = SpeedProbe::start(cpu).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let ns = probe.finish().unwrap();
        // Each read takes a cycle at least, and less than the slowest memory.
        assert!(ns > u64::from(READS) / 5 && ns < u64::from(READS) * 1_000, "{ns} ns");
        assert_eq!(SpeedProbe::start(cpu).unwrap().finish(), None, "it ran too short");
    }

    #[test]
    fn bursts_take_a_small_part_of_the_time() {
        let cpu = rustix::thread::sched_getcpu();
        let bursts = SpeedBursts::start(move || Some(cpu)).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        let counts = bursts.counts();
        assert!(
            (1..=25).contains(&counts[0]) && bursts.medians_ns([0; 2])[0].is_some(),
            "{bursts:?}"
        );
        assert_eq!(bursts.medians_ns(counts.map(|count| count + 100)), [None; 2]);
        bursts.finish();
    }
}
