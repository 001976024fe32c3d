//! The calibration of this machine: the cost of faults by kind and page size, and of page walks by
//! working set. It is kept in `$XDG_CACHE_HOME/pagetax/calibration.json` (`~/.cache` without the
//! variable, /var/cache for root without a home).
//!
//! Invariants: without [`Extent::change_settings`], no setting of the machine changes. Page sizes that
//! are switched off are missing, with the command that would enable them. Repetitions are interleaved,
//! so a slow moment of the machine affects all measurements alike. A calibration of another machine is
//! never used.

mod faults;
mod reach;
mod tlbs;
mod walks;

use crate::cache::{self, NoFolder};
use crate::measure::backed_memory::available_bytes;
use crate::measure::environment::identity;
use crate::pages::{Changed, Mode, PageSettings, Setting};
use crate::procfs::{Root, schedstat};
use pagetax_core::calibration::{
    CALIBRATION_VERSION, Calibration, Identity, WalkCost, WalkPattern,
};
use pagetax_core::diagnosis::BUSY_SHARE;
use pagetax_core::document::{self, Document};
use pagetax_core::units::PageSize;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The reason why there is no calibration.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// The machine's identity cannot be read.
    #[error("cannot tell what machine this is: {0}")]
    Identity(String),
    /// The system refused memory, a child or a file.
    #[error("cannot {0}: {1}")]
    System(&'static str, io::Error),
    /// The environment names no folder to keep it in.
    #[error(transparent)]
    NoFolder(#[from] NoFolder),
    /// Other programs use the CPUs.
    #[error("{0}")]
    Busy(String),
    /// SIGINT or SIGTERM ended the measurement.
    #[error("interrupted")]
    Interrupted,
    /// The file could not be written.
    #[error("cannot write {0}: {1}")]
    Write(PathBuf, io::Error),
}

/// The extent of a measurement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extent {
    /// True for fewer repetitions and working sets.
    pub quick: bool,
    /// True to measure page sizes that are switched off too, by enabling them for their measurement.
    pub change_settings: bool,
    /// True to measure nothing on a busy machine; else that is a warning.
    pub only_if_quiet: bool,
}

/// The effort of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Effort {
    repetitions: u32,
    /// The number of new mappings of each working set over all repetitions.
    placements: u32,
    /// The bytes that each repetition of a fault measurement touches.
    fault_bytes: usize,
    /// The working sets of page walks, in bytes. The largest comes first, so that progress is not
    /// overstated.
    working_sets: &'static [u64],
    /// The dependent accesses of one repetition.
    chase_count: u64,
    /// The time from the start in which walks are measured again if their repetitions disagree. On a
    /// busy machine they always do, and each try takes longer.
    retry_for: Duration,
}

const FULL: Effort = Effort {
    repetitions: 9,
    placements: 3,
    fault_bytes: 32 << 20,
    working_sets: &[1 << 30, 256 << 20, 64 << 20, 16 << 20, 4 << 20, 1 << 20],
    chase_count: 1 << 18,
    retry_for: Duration::from_secs(30),
};
const QUICK: Effort = Effort {
    repetitions: 5,
    placements: 1,
    fault_bytes: 8 << 20,
    working_sets: &[256 << 20, 64 << 20, 16 << 20, 4 << 20],
    chase_count: 1 << 16,
    retry_for: Duration::from_secs(4),
};

/// The time in which a busy machine is recognized beforehand.
const LOOK_FOR: Duration = Duration::from_millis(100);

/// Measures the machine's calibration. `on_progress` gets the share that is done. On a quiet machine, it
/// takes up to 10 s if quick, else up to a minute. A busy machine is a warning in it. Uses at most a quarter
/// of the available memory, one CPU, and an unnamed file in the folder for temporary files.
pub fn calibrate(
    extent: Extent,
    mut on_progress: impl FnMut(f64),
) -> Result<Calibration, CalibrateError> {
    let Extent { quick, change_settings, only_if_quiet } = extent;
    let root = Root::default();
    let refused = |why: Option<String>| why.filter(|_| only_if_quiet).map(CalibrateError::Busy);
    if only_if_quiet && let Some(error) = refused(busy_now(&root)) {
        return Err(error);
    }
    let identity = identity(&root).map_err(CalibrateError::Identity)?;
    let (begun, effort) = (Instant::now(), if quick { QUICK } else { FULL });
    let queued_before = queued_ns(&root);
    let settings = PageSettings::host();
    let base = rustix::param::page_size() as u64;
    let huge = settings.pmd_size().unwrap_or(PageSize::M2);
    let faults = {
        let off = if change_settings { switched_off(&settings) } else { Vec::new() };
        let _put_back = Changed::apply(&off)
            .map_err(|error| CalibrateError::System("change a page-size setting", error))?;
        faults::measure(effort, &settings, |done| on_progress(done * 0.3))?
    };
    let most = available_bytes(&root).map_err(CalibrateError::Identity)? / 4;
    let (walks, notes, base_reach) = match settings.of_size(huge) {
        Some(Mode::Always | Mode::Madvise) => {
            let base_reach = reach::measure(effort, huge, most)?;
            let (walks, notes) =
                walks::measure(effort, huge, most, |done| on_progress(0.3 + done * 0.7))?;
            (walks, notes, base_reach)
        }
        _ => {
            let note = format!("walks need {huge} pages to compare with: {}", enable(huge));
            (Vec::new(), vec![note], None)
        }
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut calibration = Calibration {
        version: CALIBRATION_VERSION,
        identity,
        quick,
        taken_unix_s: now.map_or(0, |since| since.as_secs()),
        took_ns: begun.elapsed().as_nanos() as u64,
        base_page_bytes: base,
        huge_page_bytes: huge.bytes(),
        faults,
        walks,
        tlbs: tlbs::by_cpuid(),
        base_reach,
        notes,
        warnings: Vec::new(),
    };
    calibration.warnings = calibration.doubts();
    let busy = busy_since(&root, begun, queued_before);
    if let Some(error) = refused(busy.clone()) {
        return Err(error);
    }
    calibration.warnings.extend(busy);
    Ok(calibration)
}

/// Returns a warning if this thread must wait for a CPU now.
fn busy_now(root: &Root) -> Option<String> {
    let (begun, queued_before) = (Instant::now(), queued_ns(root));
    while begun.elapsed() < LOOK_FOR {
        std::hint::spin_loop();
    }
    busy_since(root, begun, queued_before)
}

/// Returns a warning if this thread has waited too long for a CPU since `begun`.
fn busy_since(root: &Root, begun: Instant, queued_before: Option<u64>) -> Option<String> {
    let (now, before) = queued_ns(root).zip(queued_before)?;
    busy(Duration::from_nanos(now.saturating_sub(before)), begun.elapsed())
}

/// Returns the time that this thread has waited for a CPU; `None` if the kernel does not count it.
fn queued_ns(root: &Root) -> Option<u64> {
    let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
    schedstat(root, std::process::id(), Some(thread)).ok().map(|(_, waited_ns)| waited_ns)
}

/// Returns a warning if a measurement waited too long for a CPU: other programs also took its caches.
fn busy(queued: Duration, elapsed: Duration) -> Option<String> {
    let share = queued.as_secs_f64() / elapsed.as_secs_f64();
    (share > BUSY_SHARE).then(|| {
        let percent = share * 100.0;
        format!("the machine was busy: the measurement waited {percent:.0} % of its time for a CPU")
    })
}

/// Costs that depend on the memory that the kernel hands out. They are measured again and again, between
/// the runs of another measurement.
#[derive(Debug, Default)]
pub struct Beside {
    faults: Vec<faults::Seen>,
    walks: Vec<WalkCost>,
}

/// The working sets of [`Beside`], one list per measurement, largest first. Over smaller ones the cost of an
/// access shows how many pages the TLB holds, which adjacent pages share an entry for, and not the cost of a
/// walk.
const BESIDE: [&[u64]; 2] = [&[256 << 20], &[64 << 20]];

impl Beside {
    /// Measures once: faults, and walks over the largest working set of at most `bytes`. It uses the
    /// memory that the next allocation would get. Takes less than a second. Does nothing without huge
    /// pages to compare with.
    pub fn measure(&mut self, bytes: u64) -> Result<(), CalibrateError> {
        let settings = PageSettings::host();
        let huge = settings.pmd_size().unwrap_or(PageSize::M2);
        if !matches!(settings.of_size(huge), Some(Mode::Always | Mode::Madvise)) {
            return Ok(());
        }
        let most = available_bytes(&Root::default()).map_err(CalibrateError::Identity)? / 4;
        let fits = |set: &&&[u64]| set[0] <= bytes && set[0] * 2 <= most;
        let working_sets = BESIDE.iter().find(fits).copied().unwrap_or(&[]);
        let effort = Effort { repetitions: 1, placements: 1, working_sets, ..FULL };
        let base = rustix::param::page_size() as u64;
        faults::again(effort, base, huge, &settings, &mut self.faults)?;
        let (walks, _) = walks::measure(effort, huge, most, |_| ())?;
        self.walks.extend(walks);
        Ok(())
    }

    /// Returns the calibration scaled to the pace of all measurements.
    pub fn pace(&self, calibration: &Calibration) -> Calibration {
        calibration.paced(&faults::summary(&self.faults), &self.walks())
    }

    /// Returns the walks with the median cost, one for each pattern.
    pub fn walks(&self) -> Vec<WalkCost> {
        let of = |pattern| {
            let mut same: Vec<_> = self.walks.iter().filter(|w| w.pattern == pattern).collect();
            same.sort_by(|a, b| a.extra.median_ns.total_cmp(&b.extra.median_ns));
            same.get(same.len() / 2).map(|walk| **walk)
        };
        WalkPattern::ALL.into_iter().filter_map(of).collect()
    }
}

/// Returns the settings that would enable all page sizes for memory that requests them.
fn switched_off(settings: &PageSettings) -> Vec<Setting> {
    let off = |size: &PageSize| settings.of_size(*size) == Some(Mode::Never);
    let on = |path| Setting { path, value: "madvise".into() };
    let sizes = settings.sizes().into_iter().filter(off).map(|size| settings.size_path(size));
    // Before Linux 6.8, only the system-wide file exists.
    let paths = sizes.map(|path| if path.exists() { path } else { settings.thp_path() });
    paths.map(on).collect()
}

/// Returns the command that lets memory with MADV_HUGEPAGE have pages of a size.
fn enable(size: PageSize) -> String {
    let path = PageSettings::host().size_path(size);
    format!("echo madvise > {} (as root) switches them on", path.display())
}

/// Returns the CPU time of this thread so far. Elapsed time would add waits for a CPU to a fault's cost.
fn thread_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns the path of the kept calibration.
pub fn cache_path() -> Result<PathBuf, CalibrateError> {
    Ok(cache::folder()?.join("calibration.json"))
}

/// Returns true if a calibration could be written to its path.
pub fn can_keep() -> bool {
    let folder = cache::folder().ok().filter(|folder| std::fs::create_dir_all(folder).is_ok());
    folder.is_some_and(|folder| tempfile::NamedTempFile::new_in(folder).is_ok())
}

/// Writes a calibration. It replaces the old one atomically.
pub fn save(calibration: &Calibration, path: &Path) -> Result<(), CalibrateError> {
    let failed = |error: io::Error| CalibrateError::Write(path.into(), error);
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(failed)?;
    let text = calibration.to_json().map_err(|e| failed(e.into()))?;
    // A random name: in another user's folder (sudo -E), a link could wait at a name that can be
    // guessed.
    let mut fresh = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
    fresh.write_all(text.as_bytes()).map_err(failed)?;
    fresh.persist(path).map_err(|error| failed(error.error)).map(drop)
}

/// Returns the kept calibration of this machine. The error shows why there is none, with a hint.
pub fn cached() -> Result<Calibration, String> {
    let path = cache_path().map_err(|error| error.to_string())?;
    load(&path, &identity(&Root::default())?)
}

/// Returns the calibration in a file, if this machine made it.
pub fn load(path: &Path, here: &Identity) -> Result<Calibration, String> {
    const REMEDY: &str = "`pagetax calibrate` measures this machine";
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(format!("this machine is not calibrated; {REMEDY}"));
        }
        Err(error) => return Err(format!("cannot read {}: {error}; {REMEDY}", path.display())),
    };
    let calibration: Calibration = document::from_json(&text)
        .map_err(|error| format!("{} is no calibration: {error}; {REMEDY}", path.display()))?;
    if calibration.version != CALIBRATION_VERSION {
        return Err(format!("{} is of another version; {REMEDY} again", path.display()));
    }
    match here.difference(&calibration.identity) {
        Some(difference) => {
            Err(format!("{} is of another machine: {difference}; {REMEDY}", path.display()))
        }
        None => Ok(calibration),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::budget::tests::calibration;

    #[test]
    fn a_kept_calibration_comes_back_and_a_foreign_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/calibration.json");
        let kept = calibration();
        let why = load(&path, &kept.identity).unwrap_err();
        assert!(why.contains("not calibrated"), "{why}");
        save(&kept, &path).unwrap();
        assert_eq!(load(&path, &kept.identity).unwrap(), kept);
        let upgraded = Identity { kernel: "7.0".into(), ..kept.identity.clone() };
        let why = load(&path, &upgraded).unwrap_err();
        assert!(why.contains("kernel") && why.contains("pagetax calibrate"), "{why}");
        std::fs::write(&path, "{").unwrap();
        assert!(load(&path, &kept.identity).unwrap_err().contains("no calibration"));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_measurement_that_waits_for_a_cpu_is_in_doubt() {
        let seconds = Duration::from_secs_f64;
        assert_eq!(busy(seconds(0.1), seconds(4.0)), None);
        let why = busy(seconds(1.0), seconds(4.0)).unwrap();
        assert!(why.contains("waited 25 %"), "{why}");
        assert!(queued_ns(&Root::default()).is_some());
    }

    #[test]
    fn small_measurements_are_plausible() {
        let effort = Effort {
            repetitions: 3,
            placements: 1,
            fault_bytes: 4 << 20,
            working_sets: &[4 << 20],
            chase_count: 1 << 12,
            retry_for: Duration::ZERO,
        };
        let settings = PageSettings::host();
        let mut done = Vec::new();
        let faults = faults::measure(effort, &settings, |share| done.push(share)).unwrap();
        assert!(done.windows(2).all(|pair| pair[0] <= pair[1]) && done.last() == Some(&1.0));
        let base = rustix::param::page_size() as u64;
        for fault in &faults {
            match (&fault.cost, &fault.why) {
                (Some(cost), None) => {
                    assert!(cost.median_ns > 1.0 && cost.median_ns < 1e8, "{fault:?}");
                    assert!(cost.low_ns <= cost.median_ns && cost.median_ns <= cost.high_ns);
                }
                (None, Some(why)) => assert!(!why.is_empty()),
                _ => panic!("{fault:?}"),
            }
        }
        let anon = faults.iter().find(|f| {
            f.kind == pagetax_core::calibration::FaultKind::AnonWrite && f.page_bytes == base
        });
        assert!(anon.unwrap().cost.is_some());
        let (walks, notes) = walks::measure(effort, PageSize::M2, 1 << 30, |_| ()).unwrap();
        assert_eq!(walks.len() + notes.len() * 3, 3, "{walks:?} {notes:?}");
        let mut beside = Beside::default();
        beside.measure(0).unwrap();
        assert!(beside.walks().is_empty() && !beside.faults.is_empty());
        let mut kept = calibration();
        let paced = beside.pace(&kept);
        assert_ne!(paced.faults, kept.faults, "not what the test made up");
        kept.faults.clear();
        assert_eq!(beside.pace(&kept).walks, kept.walks);
        let (walks, notes) = walks::measure(effort, PageSize::M2, 1 << 20, |_| ()).unwrap();
        assert!(walks.is_empty() && notes[0].contains("memory"), "{notes:?}");
    }
}
