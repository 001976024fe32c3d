//! The processes that virtual memory costs most, found without a change to any of them.
//!
//! CPU times and faults of all processes are counted over an interval. Then each process that can pay
//! much gets one look at the pages that it touches in a short time: processes with random accesses touch
//! many, readers in order few, and sleepers none. [`Damon`] samples them where the kernel has it, else
//! [`PageIdle`]. Elsewhere a look clears the accessed bits, waits until the process had some CPU time,
//! and reads the bits again.
//!
//! Invariant: each process gets at most one clear_refs and one smaps_rollup. Both hold its
//! mmap lock, so a loop would stall its faults.

mod damon;
mod page_idle;
mod touch_watch;

pub use touch_watch::{TouchKey, TouchWatch};

use self::damon::Damon;
use self::page_idle::PageIdle;
use crate::measure::system::{Process, Scope};
use crate::procfs::{Root, online_cpus, process_memory, smaps_rollup};
use crate::sys::mapping::{OwnedMapping, Request, Source};
use crate::sys::process::cpu_clock_ns;
use crate::sys::signal::{StopSignals, asked_to_stop};
use pagetax_core::calibration::Calibration;
use pagetax_core::ranking::{ProcessFigures, ProcessInterval, Ranking, TouchWindow};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Processes with a smaller share of a CPU have no tax worth a look.
const CPU_SHARE_MIN: f64 = 0.005;
/// The second-level TLBs of today's CPUs hold the base pages of so much memory.
const RESIDENT_BYTES_MIN: u64 = 4 << 20;
/// The CPU time that ends a window. In more time, slow readers touch as much as fast ones.
const WINDOW_CPU_NS: u64 = 2_000_000;
/// The longest window, for processes that sleep.
const WINDOW_MAX: Duration = Duration::from_millis(200);
/// The time between two looks at a process's CPU clock.
const WINDOW_STEP: Duration = Duration::from_micros(300);
/// A process with less CPU time in its window has told nothing.
const WINDOW_CPU_NS_MIN: u64 = 100_000;
/// Memory in which the price of an accessed bit is measured: more pages than a TLB holds.
const MARK_PAGES: u64 = 8_192;

const PRICES: &str = "× the calibrated price of a walk, plus faults × their calibrated price";
const BY_DAMON: &str = "base pages touched in 2 ms, sampled by DAMON";
const BY_IDLE: &str = "base pages touched in 2 ms, of a sample, by idle page tracking";
const BY_CLEARING: &str = "base pages touched in a window of 2 ms of CPU time (one clear_refs and one smaps_rollup a process)";

/// Counters of a process since it started.
type Times = [u64; 4];

/// Ranks all processes by their tax in an interval.
///
/// # Errors
/// The list of CPUs or this process's own memory cannot be read, or a signal asks to stop.
pub fn ranking(
    root: &Root,
    calibration: &Calibration,
    interval: Duration,
) -> Result<Ranking, String> {
    let mark_ns = mark_ns().map_err(|error| format!("cannot time an accessed bit: {error}"))?;
    let users = users(root);
    let before = all_times(root);
    let begin = Instant::now();
    std::thread::sleep(interval);
    let after = all_times(root);
    let elapsed_ns = begin.elapsed().as_nanos() as u64;
    let mut figures: Vec<ProcessFigures> = after
        .iter()
        .filter(|(pid, _)| **pid != std::process::id())
        .map(|(pid, times)| figures(root, &users, *pid, since(times, before.get(pid))))
        .collect();
    // On a busy machine this process would wait for a CPU within a window, and lengthen it. Ordinary users may
    // not raise their priority, and get longer windows.
    let _ = rustix::process::setpriority_process(None, -20);
    let (damon, why_not) = match Damon::take(root, || StopSignals::watch().map(Some)) {
        Ok(damon) => (damon, None),
        Err(why) => (None, Some(why)),
    };
    let idle = if damon.is_none() { PageIdle::open(root) } else { None };
    let (mut by_sample, mut failed) = (0, None);
    for process in &mut figures {
        look(process, elapsed_ns, |pid| {
            let by_damon = damon.as_ref().map(|damon| damon.window(root, pid, damon::WATCH));
            match by_damon.or_else(|| Some(idle.as_ref()?.window(root, pid, page_idle::ROUNDS))) {
                Some(Ok(window)) => {
                    by_sample += 1;
                    Ok(window)
                }
                Some(Err(why)) if asked_to_stop() => Err(why),
                other => {
                    failed = failed.take().or(other.and_then(Result::err));
                    window(root, pid, mark_ns)
                }
            }
        });
        if damon.is_some() && asked_to_stop() {
            return Err("interrupted".into());
        }
    }
    let how = match (by_sample > 0, &damon) {
        (false, _) => BY_CLEARING,
        (true, Some(_)) => BY_DAMON,
        (true, None) => BY_IDLE,
    };
    drop(damon);
    figures.extend(ended(&before, &after));
    let mut ranking = Ranking {
        elapsed_ns,
        cpu_count: online_cpus(root)?.len() as u32,
        mark_ns,
        how: match why_not {
            Some(why) => format!("{how} {PRICES}; DAMON was not used: {why}"),
            None if by_sample == 0 && failed.is_some() => {
                format!("{how} {PRICES}; samples failed: {}", failed.unwrap_or_default())
            }
            None => format!("{how} {PRICES}"),
        },
        processes: figures.into_iter().map(|process| process.row(calibration)).collect(),
    };
    ranking.sort();
    Ok(ranking)
}

fn all_times(root: &Root) -> BTreeMap<u32, Times> {
    root.pids().filter_map(|pid| Some((pid, Scope::times_and_faults(root, pid).ok()?))).collect()
}

/// Returns the names of users by number.
fn users(root: &Root) -> BTreeMap<u32, String> {
    let text = root.text("/etc/passwd").unwrap_or_default();
    let user = |line: &str| {
        let mut words = line.split(':');
        let name = words.next()?.to_string();
        Some((words.nth(1)?.parse().ok()?, name))
    };
    text.lines().filter_map(user).collect()
}

/// Returns the counters over the interval. A process that started in it, perhaps under the number of one
/// that ended, has all of its counters from the interval.
fn since(times: &Times, before: Option<&Times>) -> Times {
    let before = before.filter(|before| before.iter().zip(times).all(|(then, now)| then <= now));
    let before = before.copied().unwrap_or_default();
    std::array::from_fn(|index| times[index] - before[index])
}

fn figures(
    root: &Root,
    users: &BTreeMap<u32, String>,
    pid: u32,
    [user_ns, kernel_ns, minor, major]: Times,
) -> ProcessFigures {
    let process = Process::read(root, pid);
    let is_kernel = process.as_ref().is_some_and(|process| process.is_kernel);
    let owner = fs::metadata(root.path(&format!("/proc/{pid}"))).map(|meta| meta.uid());
    let user = |uid: u32| users.get(&uid).cloned().unwrap_or_else(|| uid.to_string());
    let resident = process_memory(root, pid).resident_bytes;
    let interval = match (&process, is_kernel) {
        (None, _) => Err("it ended while it was looked at".to_string()),
        (_, true) => Err("a thread of the kernel has no memory of its own".to_string()),
        _ => resident.value().ok_or_else(|| "it has no memory: a zombie".to_string()),
    };
    ProcessFigures {
        pid,
        name: process.map_or_else(|| "ended".into(), |process| process.name),
        user: owner.map_or_else(|_| "unknown".into(), user),
        interval: interval.map(|resident_bytes| ProcessInterval {
            user_ns,
            kernel_ns,
            fault_count: minor + major,
            resident_bytes,
        }),
        window: Err("not looked at".into()),
        is_small: false,
    }
}

/// Returns rows of the processes that ended in the interval.
fn ended<'a>(
    before: &'a BTreeMap<u32, Times>,
    after: &'a BTreeMap<u32, Times>,
) -> impl Iterator<Item = ProcessFigures> + 'a {
    let gone = before.keys().filter(|pid| !after.contains_key(pid));
    let why = || "it ended within the interval".to_string();
    gone.map(move |pid| ProcessFigures {
        pid: *pid,
        name: "ended".into(),
        user: "unknown".into(),
        interval: Err(why()),
        window: Err(why()),
        is_small: false,
    })
}

/// Looks at the pages that a process touches, if it can pay much.
fn look(
    process: &mut ProcessFigures,
    elapsed_ns: u64,
    window: impl FnOnce(u32) -> Result<TouchWindow, String>,
) {
    let interval = match &process.interval {
        Ok(interval) => interval,
        Err(why) => {
            process.window = Err(why.clone());
            return;
        }
    };
    let cpu_ns = interval.user_ns + interval.kernel_ns;
    if (cpu_ns as f64) < CPU_SHARE_MIN * elapsed_ns as f64 {
        process.window = Err("not looked at: it took less than 0.5 % of a CPU".into());
    } else if interval.resident_bytes < RESIDENT_BYTES_MIN {
        process.window = Err("not looked at: less than 4 MiB are resident".into());
        process.is_small = true;
    } else {
        process.window = window(process.pid);
    }
}

/// Clears the accessed bits of a process, waits for some of its CPU time, and reads the bits that are
/// set.
fn window(root: &Root, pid: u32, mark_ns: f64) -> Result<TouchWindow, String> {
    let clock = || cpu_clock_ns(pid).map_err(|error| format!("no CPU clock: {error}"));
    let clearing = clock()?;
    clear_accessed(root, pid)?;
    let (cleared, begin) = (clock()?, Instant::now());
    let mut reading = cleared;
    while reading < cleared + WINDOW_CPU_NS && begin.elapsed() < WINDOW_MAX {
        std::thread::sleep(WINDOW_STEP);
        reading = clock()?;
    }
    let rollup = smaps_rollup(root, pid)?;
    let read = clock().unwrap_or(reading);
    // A page is cleared and read somewhere within both walks, so half of each belongs to its window.
    let cpu_ns = (reading - cleared) + (cleared - clearing + read - reading) / 2;
    if cpu_ns < WINDOW_CPU_NS_MIN {
        return Err("it slept while it was looked at".into());
    }
    let (base_bytes, touched_bytes) = touched(&rollup);
    Ok(TouchWindow { cpu_ns, base_bytes, touched_bytes, mark_ns })
}

/// Returns bytes on base pages and those of them that are marked as accessed. Huge pages are marked as a
/// whole, so base pages get their proportion where both are resident.
fn touched(rollup: &std::collections::HashMap<String, u64>) -> (u64, u64) {
    let get = |key: &str| rollup.get(key).copied().unwrap_or(0);
    let huge = ["AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"].map(get).iter().sum();
    let (resident, referenced) = (get("Rss"), get("Referenced"));
    let base = resident.saturating_sub(huge);
    let part = referenced as f64 * base as f64 / resident.max(1) as f64;
    let least = referenced.saturating_sub(huge);
    (base, (part as u64).clamp(least.min(base), referenced.min(base).max(least.min(base))))
}

/// Clears the accessed bits of a process.
fn clear_accessed(root: &Root, pid: u32) -> Result<(), String> {
    write_there(&root.path(&format!("/proc/{pid}/clear_refs")), "1")
}

/// Writes a value into a file of the kernel. One that is not there, as in a captured tree, is not made.
fn write_there(path: &Path, value: &str) -> Result<(), String> {
    let file = OpenOptions::new().write(true).open(path);
    let written = file.and_then(|mut file| file.write_all(value.as_bytes()));
    written.map_err(|error| format!("{}: {error}", path.display()))
}

/// Measures the time that this machine takes to set an accessed bit, on memory of this process. A virtual
/// machine takes many times as long as bare metal.
fn mark_ns() -> io::Result<f64> {
    let page = rustix::param::page_size() as u64;
    let len = (MARK_PAGES * page) as usize;
    let request = Request { source: Source::Anon, len, align: 0, hugetlb: None };
    let mapping = OwnedMapping::new(request)?;
    mapping.advise(libc::MADV_NOHUGEPAGE).or_else(|error| match error.raw_os_error() {
        // A kernel without huge pages does not know the advice.
        Some(libc::EINVAL) => Ok(()),
        _ => Err(error),
    })?;
    let pass = |is_store: bool| -> io::Result<f64> {
        // On a busy machine, much of the elapsed time belongs to others.
        let begin_ns = cpu_clock_ns(std::process::id())?;
        // An odd factor permutes the pages, so that no prefetch helps. Lines differ to spread over the cache.
        for index in 0..MARK_PAGES {
            let number = (index * 5_167) % MARK_PAGES;
            let offset = number * page + (number % 64) * 64;
            match is_store {
                true => mapping.store(offset, index),
                false => drop(mapping.load(offset)),
            }
        }
        let took_ns = cpu_clock_ns(std::process::id())? - begin_ns;
        Ok(took_ns as f64 / MARK_PAGES as f64)
    };
    pass(true)?;
    let mut extras = Vec::new();
    for _ in 0..5 {
        if clear_accessed(&Root::default(), std::process::id()).is_err() {
            // Without clear_refs there are no windows to correct.
            return Ok(0.0);
        }
        let first = pass(false)?;
        extras.push((first - pass(false)?).max(0.0));
    }
    extras.sort_by(f64::total_cmp);
    Ok(extras[extras.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procfs::tests::captured;

    #[test]
    fn base_pages_of_a_captured_process_are_at_most_its_resident_ones_less_its_huge_ones() {
        let rollup = smaps_rollup(&captured(), 4711).unwrap();
        let (base, touched) = touched(&rollup);
        assert_eq!(base, rollup["Rss"] - rollup["AnonHugePages"]);
        assert!(touched <= base && touched > 0, "{touched} of {base}");
        let mixed = [("Rss", 100), ("AnonHugePages", 60), ("Referenced", 80)];
        let mixed = mixed.map(|(key, bytes)| (key.to_string(), bytes)).into();
        assert_eq!(super::touched(&mixed), (40, 32));
        assert_eq!(super::touched(&std::collections::HashMap::new()), (0, 0));
    }

    #[test]
    fn a_captured_tree_is_only_read() {
        let error = window(&captured(), std::process::id(), 0.0).unwrap_err();
        assert!(error.contains("clear_refs"), "{error}");
        assert!(!captured().has("/proc/4711/clear_refs"));
        assert!(window(&Root::default(), u32::MAX, 0.0).unwrap_err().contains("no CPU clock"));
    }

    #[test]
    fn a_process_under_the_number_of_an_ended_one_starts_at_zero() {
        assert_eq!(since(&[5, 5, 5, 5], Some(&[1, 2, 3, 4])), [4, 3, 2, 1]);
        assert_eq!(since(&[5, 5, 5, 5], Some(&[1, 9, 3, 4])), [5, 5, 5, 5]);
        assert_eq!(since(&[5, 5, 5, 5], None), [5, 5, 5, 5]);
        let after = BTreeMap::from([(1, [0; 4])]);
        let before = BTreeMap::from([(1, [0; 4]), (2, [0; 4])]);
        let gone: Vec<_> = ended(&before, &after).collect();
        assert!(gone.len() == 1 && gone[0].pid == 2 && gone[0].interval.is_err());
    }

    #[test]
    fn own_memory_tells_the_price_of_an_accessed_bit() {
        let ns = mark_ns().unwrap();
        assert!((0.0..100_000.0).contains(&ns), "{ns}");
    }
}
