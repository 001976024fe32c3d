//! Proof that a mechanism took: bytes on large pages at the peak of memory, and if not, why not.

use super::{Finished, Peak};
use crate::launch::program::Program;
use crate::pages::mechanism::{Mechanism, Rest};
use crate::pages::{PageSettings, Recipe};
use crate::procfs::{Root, maps};
use pagetax_core::diagnosis::Took;
use pagetax_core::page_size::MemoryPart;
use pagetax_core::units::{Bytes, PageSize};
use rustix::process::Pid;
use std::ffi::OsString;

/// From this share of anonymous memory on there is nothing to explain.
const NEARLY_ALL: f64 = 0.9;

/// The allocator that gives a program its memory, by its mappings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allocator {
    /// glibc's malloc, which obeys GLIBC_TUNABLES.
    Glibc,
    /// CPython, whose small objects live in arenas of its own beside malloc.
    Python,
    /// A library that takes malloc's place.
    Library(&'static str),
    /// No C library is mapped: a static program.
    Static,
}

/// Libraries that take malloc's place, by a part of their file names.
const LIBRARIES: &[(&str, &str)] = &[
    ("/libjemalloc", "jemalloc"),
    ("/libtcmalloc", "tcmalloc"),
    ("/libmimalloc", "mimalloc"),
    ("/ld-musl", "musl"),
    ("/libjvm.so", "the Java virtual machine"),
];

impl Allocator {
    /// Returns the allocator of a live process; none if it has ended.
    pub fn of(pid: Pid) -> Option<Allocator> {
        let maps = maps(&Root::default(), pid.as_raw_nonzero().get() as u32).ok()?;
        let files: Vec<String> = maps.into_iter().map(|line| line.name).collect();
        (!files.is_empty()).then(|| Allocator::by_files(&files))
    }

    /// Returns the allocator by the files that the process maps.
    fn by_files(files: &[impl AsRef<str>]) -> Allocator {
        let maps = |part: &str| files.iter().any(|file| file.as_ref().contains(part));
        if let Some((_, name)) = LIBRARIES.iter().find(|(part, _)| maps(part)) {
            return Allocator::Library(name);
        }
        match () {
            () if maps("/python3") || maps("/libpython3") => Allocator::Python,
            () if maps("/libc.so.6") => Allocator::Glibc,
            () => Allocator::Static,
        }
    }
}

/// The facts that a proof rests on, beside the peak.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The allocator of the largest process.
    pub allocator: Option<Allocator>,
    /// Huge pages that the kernel could not find during the run, whole system.
    pub thp_fallback_count: Option<u64>,
    /// The reason why our library could not be preloaded, of a trial that needs it.
    pub no_preload: Option<String>,
}

/// System-wide counts before a run.
pub(super) struct System {
    thp_fallback_count: Option<u64>,
}

fn thp_fallback_count() -> Option<u64> {
    let vmstat = std::fs::read_to_string("/proc/vmstat").ok()?;
    vmstat.lines().find_map(|line| line.strip_prefix("thp_fault_fallback ")?.parse().ok())
}

impl System {
    pub(super) fn read() -> System {
        System { thp_fallback_count: thp_fallback_count() }
    }

    pub(super) fn since(
        self,
        allocator: Option<Allocator>,
        no_preload: Option<String>,
    ) -> Evidence {
        let fallbacks = thp_fallback_count().zip(self.thp_fallback_count);
        let thp_fallback_count = fallbacks.map(|(now, then)| now - then);
        Evidence { allocator, thp_fallback_count, no_preload }
    }
}

/// Returns the reason why our library cannot be preloaded into a command; none if the recipe does without it.
pub(super) fn no_preload(recipe: &Recipe, argv: &[OsString]) -> Option<String> {
    let sizes = recipe.mechanism.by_ppgsz().filter(|_| !recipe.wrapper.is_empty())?;
    let of_library = [MemoryPart::Heap, MemoryPart::Stack];
    of_library.into_iter().find(|part| sizes.get(*part).is_some())?;
    let refused = Program::find(argv.first()?).ok()?.takes_preload().err()?;
    Some(format!("it {}", refused.why))
}

/// Returns the proof of a trial, from the run whose peak was largest.
pub fn took(mechanism: &dyn Mechanism, runs: &[Finished]) -> Took {
    let largest = runs
        .iter()
        .filter_map(|run| Some((run.peak?, &run.evidence)))
        .max_by_key(|(peak, _)| peak.looked_at_bytes);
    let Some((peak, evidence)) = largest else {
        let why = "every run was over before its memory could be looked at";
        return Took { bytes: None, fraction: None, why: Some(why.into()) };
    };
    let proof = mechanism.proof(&peak.large_pages());
    let Some(bytes) = proof.bytes else {
        let why = "the kernel does not count pages of this size";
        return Took { bytes: None, fraction: None, why: Some(why.into()) };
    };
    let fraction = (peak.anon_bytes > 0).then(|| bytes as f64 / peak.anon_bytes as f64);
    let why = why_not(mechanism, proof.rest, &peak, evidence, fraction);
    Took { bytes: Some(bytes), fraction, why }
}

fn why_not(
    mechanism: &dyn Mechanism,
    rest: Rest,
    peak: &Peak,
    evidence: &Evidence,
    fraction: Option<f64>,
) -> Option<String> {
    let is_done = fraction.is_some_and(|f| f >= NEARLY_ALL);
    if let Some(why) = evidence.no_preload.clone().filter(|_| !is_done) {
        return Some(why);
    }
    if !peak.was_looked_at() {
        return Some(format!(
            "looked at {} of a peak of {}: it was too short to be seen",
            Bytes(peak.looked_at_bytes),
            Bytes(peak.resident_bytes)
        ));
    }
    // Two accounts of the kernel; the second was taken later, when there was rather more.
    if let Some(mapped) = peak.huge_mapped_bytes
        && (mapped as f64) < NEARLY_ALL * (peak.thp_bytes + peak.hugetlb_bytes) as f64
    {
        return Some(format!("PAGEMAP_SCAN saw only {} of it: it was just going", Bytes(mapped)));
    }
    if rest == Rest::Expected || is_done {
        return None;
    }
    let large = mechanism.page_size().map_or(0, PageSize::bytes);
    let huge_pages = PageSettings::host().pmd_size().map_or(large, |pmd| pmd.bytes());
    // glibc advises nothing smaller than the PMD size, whichever size the kernel then takes.
    if peak.anon_bytes < 2 * large.max(huge_pages) {
        return Some(format!("its {} of anonymous memory is too little", Bytes(peak.anon_bytes)));
    }
    if let Rest::Because(why) = rest {
        return Some(why.into());
    }
    if let Some(count) = evidence.thp_fallback_count.filter(|count| *count > 0) {
        return Some(format!("memory is fragmented: {count} huge pages could not be had"));
    }
    Some(match &evidence.allocator {
        Some(Allocator::Static) => {
            "a static program: GLIBC_TUNABLES reaches only glibc's malloc".into()
        }
        Some(Allocator::Library(name)) => {
            format!("its memory comes from {name}, which GLIBC_TUNABLES does not reach")
        }
        Some(Allocator::Python) => {
            "Python's small objects are not malloc's (--settings tries PYTHONMALLOC=malloc)".into()
        }
        _ if peak.process_count > 1 => {
            "written after fork (copy-on-write is by base pages), or not malloc's main heap".into()
        }
        _ => {
            "the rest is not malloc's main heap: thread arenas, stacks, mmap by the program".into()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::mechanism::{Mthp, Thp};
    use pagetax_core::exit::Exit;

    fn run(peak: Option<Peak>, allocator: Allocator) -> Finished {
        Finished {
            exit: Exit::Code(0),
            wall_ns: 1,
            step_ns: 1,
            start_ns: None,
            load: None,
            usage: Default::default(),
            peak,
            evidence: Evidence {
                allocator: Some(allocator),
                thp_fallback_count: Some(0),
                no_preload: None,
            },
            backing_ns: 0,
            watch_ns: 0,
            left_running: 0,
            brief_count: 0,
            probe_ns: None,
        }
    }

    fn peak(resident_mb: u64, thp_mb: u64) -> Option<Peak> {
        Some(Peak {
            resident_bytes: resident_mb << 20,
            looked_at_bytes: resident_mb << 20,
            anon_bytes: resident_mb << 20,
            thp_bytes: thp_mb << 20,
            process_count: 1,
            ..Peak::default()
        })
    }

    const THP: &dyn Mechanism = &Thp(PageSize::M2);

    #[test]
    fn the_proof_is_of_the_largest_run() {
        let runs = [
            run(peak(100, 0), Allocator::Glibc),
            run(None, Allocator::Glibc),
            run(peak(200, 190), Allocator::Glibc),
        ];
        let took = took(THP, &runs);
        assert_eq!((took.bytes, took.fraction, took.why), (Some(190 << 20), Some(0.95), None));
    }

    #[test]
    fn reasons() {
        let why = |peak, allocator| took(THP, &[run(peak, allocator)]).why.unwrap();
        assert!(why(None, Allocator::Glibc).contains("over before"));
        assert!(why(peak(3, 0), Allocator::Glibc).contains("too little"));
        assert!(why(peak(100, 10), Allocator::Python).contains("PYTHONMALLOC"));
        assert!(why(peak(100, 10), Allocator::Static).contains("static"));
        assert!(why(peak(100, 10), Allocator::Library("jemalloc")).contains("jemalloc"));
        let mut fragmented = run(peak(100, 10), Allocator::Glibc);
        fragmented.evidence.thp_fallback_count = Some(45);
        assert!(took(THP, &[fragmented.clone()]).why.unwrap().contains("45 huge pages"));
        let no_preload = Some("it is linked statically".to_string());
        fragmented.evidence.no_preload = no_preload.clone();
        assert_eq!(took(THP, &[fragmented]).why, no_preload, "before any other reason");
        let mut small = run(peak(3, 0), Allocator::Static);
        small.evidence.no_preload = no_preload.clone();
        assert_eq!(took(THP, &[small]).why, no_preload);
        let mut done = run(peak(100, 95), Allocator::Static);
        done.evidence.no_preload = no_preload;
        assert_eq!(took(THP, &[done]).why, None, "nothing is left to explain");
        let mut going = peak(100, 95).unwrap();
        going.huge_mapped_bytes = Some(10 << 20);
        assert!(why(Some(going), Allocator::Glibc).contains("PAGEMAP_SCAN saw only 10M"));
        let mut missed = peak(100, 95).unwrap();
        missed.resident_bytes = 300 << 20;
        assert!(why(Some(missed), Allocator::Glibc).contains("looked at 100M of a peak of 300M"));
    }

    #[test]
    fn sizes_that_are_not_counted_are_not_zero() {
        let mthp = Mthp(PageSize::new(64 << 10).unwrap());
        let took = took(&mthp, &[run(peak(100, 0), Allocator::Glibc)]);
        assert_eq!((took.bytes, took.fraction), (None, None));
        assert!(took.why.is_some());
    }

    #[test]
    fn allocators_are_known_by_their_files() {
        let of = |files: &[&str]| Allocator::by_files(files);
        assert_eq!(of(&["/usr/lib/x86_64-linux-gnu/libc.so.6"]), Allocator::Glibc);
        assert_eq!(of(&["/usr/bin/python3.11", "", "/libc.so.6"]), Allocator::Python);
        let jemalloc = ["/libc.so.6", "/usr/lib/libjemalloc.so.2"];
        assert_eq!(of(&jemalloc), Allocator::Library("jemalloc"));
        assert_eq!(of(&["/usr/local/bin/go-server", "[heap]"]), Allocator::Static);
    }
}
