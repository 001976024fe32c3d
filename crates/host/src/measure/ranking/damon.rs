//! Touched pages by DAMON, the kernel's monitor of data accesses. It clears the accessed bit of one page in
//! each region, looks at it after a sampling interval, and counts the times that it was set again.
//!
//! The regions are the base pages of a process that are resident, so huge pages and holes are no part of
//! them. A page whose translation stays in the TLB keeps its bit cleared. It counts as untouched, and costs
//! no walk.
//!
//! Invariant: DAMON is ours only if nobody had it before, and dropping [`Damon`] gives it back. It needs
//! Linux 6.7 (PAGEMAP_SCAN) with `CONFIG_DAMON_VADDR` and `CONFIG_DAMON_SYSFS`.
//!
//! Source: Documentation/admin-guide/mm/damon/usage.rst of Linux 6.12.

use super::write_there;
use crate::procfs::Root;
use crate::sys::pagemap::{PAGE_IS_HUGE, PAGE_IS_PRESENT, PageRange, scan_any};
use crate::sys::process::cpu_clock_ns;
use crate::sys::signal::{StopSignals, asked_to_stop};
use pagetax_core::ranking::TouchWindow;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const FOLDER: &str = "/sys/kernel/mm/damon/admin/kdamonds";
/// Y while the kernel's own statistics have DAMON (`CONFIG_DAMON_STAT`). They let nobody else in.
const STATISTICS: &str = "/sys/module/damon_stat/parameters/enabled";
/// The time in which a page is touched or not: as long as a window by clear_refs.
const SAMPLE: Duration = Duration::from_millis(2);
/// The time over which samples are added up, for one look at a process.
pub(super) const WATCH: Duration = Duration::from_millis(400);
/// The most regions of a process. In each sampling interval, the kernel looks at a page of each.
const REGIONS_MAX: usize = 200;
/// DAMON wants at least so many.
const REGIONS_MIN: usize = 10;
/// The first address that no program has: four levels of page tables.
const ADDRESSES_END: u64 = 0x7fff_ffff_f000;

/// DAMON, used by us.
pub(super) struct Damon {
    folder: PathBuf,
    _signals: Option<StopSignals>,
}

impl Damon {
    /// Takes DAMON; none if the kernel lacks it. A caller that may be interrupted passes
    /// [`StopSignals::watch`], so that DAMON is given back.
    ///
    /// # Errors
    /// We may not use it, or somebody else does.
    pub fn take(
        root: &Root,
        watch: impl FnOnce() -> io::Result<Option<StopSignals>>,
    ) -> Result<Option<Damon>, String> {
        let folder = root.path(FOLDER);
        let used = match fs::read_to_string(folder.join("nr_kdamonds")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            used => used.map_err(|error| format!("{FOLDER}: {error}"))?,
        };
        if used.trim() != "0" {
            return Err(format!("DAMON is in use; if it is not, write 0 to {FOLDER}/nr_kdamonds"));
        }
        if root.text(STATISTICS).is_ok_and(|text| text.trim() == "Y") {
            return Err(format!("the kernel's statistics have DAMON; write N to {STATISTICS}"));
        }
        let signals = watch().map_err(|error| error.to_string())?;
        let damon = Damon { folder, _signals: signals };
        damon.write("nr_kdamonds", 1)?;
        Ok(Some(damon))
    }

    /// Watches a process for a time, and returns its mean window.
    pub fn window(&self, root: &Root, pid: u32, watch: Duration) -> Result<TouchWindow, String> {
        let ranges = base_ranges(root, pid)?;
        let base_bytes = ranges.iter().map(|(start, end)| end - start).sum();
        let ranges = joined(ranges, REGIONS_MAX);
        self.set_up(pid, &ranges, watch)?;
        let clock = || cpu_clock_ns(pid).map_err(|error| format!("no CPU clock: {error}"));
        let (before_ns, begin) = (clock()?, Instant::now());
        self.write("0/state", "on")?;
        let ended = wait(watch).and_then(|()| {
            // The kernel answers at the end of its interval.
            self.write("0/state", "update_schemes_tried_regions")?;
            let cpu_ns = clock()?.saturating_sub(before_ns) as f64;
            let part = SAMPLE.as_secs_f64() / begin.elapsed().as_secs_f64();
            Ok(TouchWindow {
                cpu_ns: (cpu_ns * part) as u64,
                base_bytes,
                touched_bytes: self.touched_bytes(watch)?.min(base_bytes),
                mark_ns: 0.0,
            })
        });
        // It is off already if the process has ended.
        let _ = self.write("0/state", "off");
        ended
    }

    fn set_up(&self, pid: u32, ranges: &[(u64, u64)], watch: Duration) -> Result<(), String> {
        // Fewer contexts than before: what an earlier process left is gone.
        self.write("0/contexts/nr_contexts", 0)?;
        self.write("0/contexts/nr_contexts", 1)?;
        let context = |file: &str| format!("0/contexts/0/{file}");
        self.write(&context("operations"), "fvaddr")?;
        let intervals = [("sample", SAMPLE), ("aggr", watch), ("update", watch)];
        for (name, time) in intervals {
            let file = context(&format!("monitoring_attrs/intervals/{name}_us"));
            self.write(&file, time.as_micros())?;
        }
        let most = (2 * ranges.len()).max(2 * REGIONS_MIN);
        self.write(&context("monitoring_attrs/nr_regions/max"), most)?;
        self.write(&context("monitoring_attrs/nr_regions/min"), REGIONS_MIN)?;
        self.write(&context("targets/nr_targets"), 1)?;
        self.write(&context("targets/0/pid_target"), pid)?;
        self.write(&context("targets/0/regions/nr_regions"), ranges.len())?;
        for (at, (start, end)) in ranges.iter().enumerate() {
            self.write(&context(&format!("targets/0/regions/{at}/start")), start)?;
            self.write(&context(&format!("targets/0/regions/{at}/end")), end)?;
        }
        // A scheme that does nothing with all regions makes their counts readable.
        self.write(&context("schemes/nr_schemes"), 1)?;
        self.write(&context("schemes/0/action"), "stat")?;
        for (name, most) in
            [("sz", u64::MAX), ("nr_accesses", u32::MAX.into()), ("age", u32::MAX.into())]
        {
            self.write(&context(&format!("schemes/0/access_pattern/{name}/max")), most)?;
        }
        Ok(())
    }

    /// Returns the bytes that a sampling interval touches on average.
    fn touched_bytes(&self, watch: Duration) -> Result<u64, String> {
        let folder = self.folder.join("0/contexts/0/schemes/0/tried_regions");
        let regions = fs::read_dir(&folder).map_err(|error| error.to_string())?;
        let number = |region: &std::path::Path, file: &str| -> Option<u64> {
            fs::read_to_string(region.join(file)).ok()?.trim().parse().ok()
        };
        let samples = (watch.as_micros() / SAMPLE.as_micros()) as f64;
        let touched = |region: PathBuf| {
            let bytes = number(&region, "end")?.checked_sub(number(&region, "start")?)?;
            Some(bytes as f64 * (number(&region, "nr_accesses")? as f64 / samples).min(1.0))
        };
        let all: Vec<f64> = regions.flatten().filter_map(|region| touched(region.path())).collect();
        match all.is_empty() {
            true => Err("DAMON saw no region of it".into()),
            false => Ok(all.iter().sum::<f64>() as u64),
        }
    }

    fn write(&self, file: &str, value: impl ToString) -> Result<(), String> {
        write_there(&self.folder.join(file), &value.to_string())
    }
}

impl Drop for Damon {
    fn drop(&mut self) {
        // The files go with the kernel's thread.
        let _ = self.write("0/state", "off");
        let _ = self.write("nr_kdamonds", 0);
    }
}

/// Waits, unless a signal asks to stop.
fn wait(time: Duration) -> Result<(), String> {
    let begin = Instant::now();
    while begin.elapsed() < time {
        if asked_to_stop() {
            return Err("interrupted".into());
        }
        std::thread::sleep(SAMPLE);
    }
    Ok(())
}

/// Returns the ranges of resident base pages.
fn base_ranges(root: &Root, pid: u32) -> Result<Vec<(u64, u64)>, String> {
    let path = format!("/proc/{pid}/pagemap");
    let failed = |error: std::io::Error| format!("{path}: {error}");
    let pagemap = File::open(root.path(&path)).map_err(failed)?;
    let all = scan_any(&pagemap, 0, ADDRESSES_END, PAGE_IS_PRESENT, PAGE_IS_HUGE);
    let is_base = |range: &PageRange| range.categories & PAGE_IS_HUGE == 0;
    let ranges = all.map_err(failed)?.into_iter().filter(is_base);
    Ok(ranges.map(|range| (range.start, range.end)).collect())
}

/// Joins ranges over the smallest gaps, until there are at most so many.
fn joined(ranges: Vec<(u64, u64)>, most: usize) -> Vec<(u64, u64)> {
    let gap = |pair: &[(u64, u64)]| pair[1].0 - pair[0].1;
    let mut gaps: Vec<u64> = ranges.windows(2).map(gap).collect();
    gaps.sort_unstable_by_key(|gap| std::cmp::Reverse(*gap));
    // So many of the widest gaps stay.
    let widest = gaps.get(most.saturating_sub(1)).copied().unwrap_or(0);
    let mut all: Vec<(u64, u64)> = Vec::new();
    for (start, end) in ranges {
        match all.last_mut() {
            Some(last) if start - last.1 <= widest => last.1 = end,
            _ => all.push((start, end)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_over_the_smallest_gaps() {
        let ranges = vec![(0, 10), (12, 20), (100, 110), (111, 120), (500, 510)];
        assert_eq!(
            joined(ranges.clone(), 5),
            vec![(0, 10), (12, 20), (100, 110), (111, 120), (500, 510)]
        );
        assert_eq!(joined(ranges.clone(), 3), vec![(0, 20), (100, 120), (500, 510)]);
        assert_eq!(joined(ranges.clone(), 2), vec![(0, 120), (500, 510)]);
        assert_eq!(joined(ranges, 1), vec![(0, 510)]);
        assert_eq!(joined(Vec::new(), 1), vec![]);
    }

    #[test]
    fn what_is_in_use_or_missing_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let take = || Damon::take(&root, || Ok(None));
        assert!(matches!(take(), Ok(None)));
        let place = folder.path().join(&FOLDER[1..]);
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("nr_kdamonds"), "1\n").unwrap();
        assert!(take().err().unwrap().contains("in use"));
        assert_eq!(fs::read_to_string(place.join("nr_kdamonds")).unwrap(), "1\n");
        fs::write(place.join("nr_kdamonds"), "0\n").unwrap();
        let statistics = folder.path().join(&STATISTICS[1..]);
        fs::create_dir_all(statistics.parent().unwrap()).unwrap();
        fs::write(&statistics, "Y\n").unwrap();
        assert!(take().err().unwrap().contains("write N"));
        assert_eq!(fs::read_to_string(place.join("nr_kdamonds")).unwrap(), "0\n");
    }
}
