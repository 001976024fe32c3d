//! `pagetax pmap` beside a walk over /proc/kpageflags that knows nothing of how it works, and on
//! processes that are not there.

use pagetax_core::units::PageSize;
use pagetax_host::pages::{Changed, PageSettings, Setting};
use pagetax_host::sys::mapping::{OwnedMapping, Request, Source};
use proptest::prelude::*;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::{Command, Output};

const PAGE: u64 = 4096;
const HUGE_PAGES: u64 = 512;
/// Mappings begin at multiples of this and are shorter, so that no two touch.
const APART: u64 = 4 << 20;

/// Bits of /proc/kpageflags.
const ANON: u64 = 12;
const HEAD: u64 = 15;
const TAIL: u64 = 16;
const ZERO_PAGE: u64 = 24;

fn pmap(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.arg("pmap").args(args).env("NO_COLOR", "1").output().unwrap()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

/// A random mapping and what is done to it.
#[derive(Debug, Clone)]
struct Recipe {
    source: Kind,
    pages: u64,
    advice: Option<i32>,
    /// First page, count, and whether they are written.
    touches: Vec<(u64, u64, bool)>,
    collapse: bool,
    lock: bool,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Anon,
    Shared,
    FileCopy,
    FileShared,
}

fn recipe() -> impl Strategy<Value = Recipe> {
    let kinds = [Kind::Anon, Kind::Anon, Kind::Shared, Kind::FileCopy, Kind::FileShared];
    let advice = [None, Some(libc::MADV_HUGEPAGE), Some(libc::MADV_NOHUGEPAGE)];
    let touch = (0..900u64, prop_oneof![1..4u64, 1..40u64, 1..700u64], any::<bool>());
    (
        prop::sample::select(kinds.to_vec()),
        1..1000u64,
        prop::sample::select(advice.to_vec()),
        prop::collection::vec(touch, 0..8),
        prop::bool::weighted(0.2),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(source, pages, advice, touches, collapse, lock)| Recipe {
            source,
            pages,
            advice,
            touches,
            collapse,
            lock,
        })
}

fn make(recipe: &Recipe, file: &File) -> OwnedMapping {
    let source = match recipe.source {
        Kind::Anon => Source::Anon,
        Kind::Shared => Source::Shared,
        Kind::FileCopy => Source::File { file, private: true, writable: true },
        Kind::FileShared => Source::File { file, private: false, writable: true },
    };
    let len = (recipe.pages * PAGE) as usize;
    let request = Request { source, len, align: APART as usize, hugetlb: None };
    let mapping = OwnedMapping::new(request).unwrap();
    if let Some(advice) = recipe.advice {
        mapping.advise(advice).unwrap();
    }
    for (first, count, write) in &recipe.touches {
        for page in (*first..first + count).filter(|page| *page < recipe.pages) {
            match write {
                true => mapping.store(page * PAGE, page + 1),
                false => drop(mapping.load(page * PAGE)),
            }
        }
    }
    if recipe.collapse {
        // Whether there is room for it, and whether this kind of memory allows it, is no matter.
        let _ = mapping.advise(libc::MADV_COLLAPSE);
    }
    if recipe.lock {
        mapping.lock(0, len).unwrap();
    }
    mapping
}

/// A page as root sees it without the page table.
#[derive(Clone, Copy, PartialEq)]
struct Seen {
    frame: u64,
    flags: u64,
}

impl Seen {
    fn has(self, bit: u64) -> bool {
        self.flags & (1 << bit) != 0
    }
}

fn word(file: &File, index: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, index * 8).map_or(0, |()| u64::from_ne_bytes(bytes))
}

/// Returns the mapping's pages; None where no page is in memory.
fn walk(start: u64, pages: u64) -> Vec<Option<Seen>> {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let flags = File::open("/proc/kpageflags").unwrap();
    let see = |page: u64| {
        let entry = word(&pagemap, start / PAGE + page);
        let frame = entry & ((1 << 55) - 1);
        (entry >> 63 == 1).then(|| Seen { frame, flags: word(&flags, frame) })
    };
    (0..pages).map(see).collect()
}

/// Pages of the folio that begins at `page`, if it is mapped there as a whole; else 1.
fn folio_pages(seen: &[Option<Seen>], page: usize) -> u64 {
    let Some(first) = seen[page].filter(|seen| seen.has(HEAD)) else { return 1 };
    let flags = File::open("/proc/kpageflags").unwrap();
    let is_tail = |offset: u64| word(&flags, first.frame + offset) & (1 << TAIL) != 0;
    let pages = (1..).take_while(|offset| is_tail(*offset)).count() as u64 + 1;
    let follows = |offset: u64| {
        let other = seen.get(page + offset as usize).copied().flatten();
        other.is_some_and(|other| other.frame == first.frame + offset)
    };
    let whole = (page as u64).is_multiple_of(pages) && (0..pages).all(follows);
    if whole { pages } else { 1 }
}

/// Bytes of the mapping that smaps says are mapped by entries above the base level.
fn huge_bytes(start: u64) -> (u64, bool) {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let block = smaps.split(&format!("{start:x}-")).nth(1).unwrap();
    let lines = block.lines().skip(1).take_while(|line| line.starts_with(char::is_uppercase));
    let (mut sum, mut locked) = (0, false);
    for line in lines {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[0] {
            "AnonHugePages:" | "ShmemPmdMapped:" | "FilePmdMapped:" => {
                sum += words[1].parse::<u64>().unwrap() * 1024;
            }
            "VmFlags:" => locked = words.contains(&"lo"),
            _ => {}
        }
    }
    (sum, locked)
}

/// Returns the rows that `pmap -xsl` should print; None if smaps and kpageflags alone do not determine them.
fn expected(mapping: &OwnedMapping, name: &str, mode: &str) -> Option<String> {
    let pages = mapping.len() as u64 / PAGE;
    let seen = walk(mapping.address(), pages);
    let (huge_bytes, locked) = huge_bytes(mapping.address());
    // The huge page of zeros is mapped as a whole or not at all, and no part of smaps.
    let zeros = |page: usize| seen[page].is_some_and(|seen| seen.has(ZERO_PAGE));
    let is_huge = |page: &usize| folio_pages(&seen, *page) == HUGE_PAGES && !zeros(*page);
    let whole_huge = (0..seen.len()).filter(is_huge).count();
    let huge = match huge_bytes / (HUGE_PAGES * PAGE) {
        0 => false,
        count if count == whole_huge as u64 => true,
        _ => return None,
    };
    // (first page, pages, page size in pages, resident, anonymous)
    let mut rows: Vec<(u64, u64, u64, u64, u64)> = Vec::new();
    let mut page = 0;
    while page < seen.len() {
        let size = match seen[page] {
            None => 0,
            Some(_) => match folio_pages(&seen, page) {
                HUGE_PAGES if !huge && !zeros(page) => 1,
                size => size,
            },
        };
        let count = size.max(1);
        let here = seen[page].filter(|seen| !seen.has(ZERO_PAGE));
        let resident = if here.is_some() { count } else { 0 };
        let anon = if here.is_some_and(|seen| seen.has(ANON)) { count } else { 0 };
        match rows.last_mut().filter(|row| row.2 == size) {
            Some(row) => (row.1, row.3, row.4) = (row.1 + count, row.3 + resident, row.4 + anon),
            None => rows.push((page as u64, count, size, resident, anon)),
        }
        page += count as usize;
    }
    let number = |pages: u64| if pages == 0 { "-".into() } else { (pages * 4).to_string() };
    let size = |pages: u64| match pages {
        0 => "-".into(),
        1..256 => format!("{}K", pages * 4),
        _ => format!("{}M", pages / 256),
    };
    let locks = |resident: u64| if locked { resident } else { 0 };
    let mut text = String::new();
    for (first, count, pages, resident, anon) in &rows {
        text += &format!(
            "{:016x} {:>10} {:>10} {:>10} {:>10} {:>4} {mode} {name}\n",
            mapping.address() + first * PAGE,
            number(*count),
            number(*resident),
            number(*anon),
            number(locks(*resident)),
            size(*pages),
        );
    }
    Some(text)
}

/// Returns the rows of pmap, without title, headings and totals.
fn printed(mapping: &OwnedMapping) -> String {
    let start = mapping.address();
    let range = format!("{start:x},{:x}", start + mapping.len() as u64);
    let output = pmap(&["-xs", "-l", "-A", &range, &std::process::id().to_string()]);
    assert!(output.status.success(), "{output:?}");
    let lines: Vec<_> = stdout(&output).split_inclusive('\n').collect();
    lines[2..lines.len() - 2].concat()
}

/// Compares; again if khugepaged or reclaim came between.
fn compare(mapping: &OwnedMapping, recipe: &Recipe, path: &str) -> Result<(), TestCaseError> {
    let (name, mode) = match recipe.source {
        Kind::Anon => ("  [ anon ]", "rw---"),
        Kind::Shared => ("/dev/zero (deleted)", "rw-s-"),
        Kind::FileCopy => (path, "rw---"),
        Kind::FileShared => (path, "rw-s-"),
    };
    for _ in 0..5 {
        let before = expected(mapping, name, mode);
        let printed = printed(mapping);
        if before == expected(mapping, name, mode) {
            match before {
                Some(expected) => prop_assert_eq!(printed, expected),
                None => prop_assume!(false, "huge pages of which some are mapped by base entries"),
            }
            return Ok(());
        }
    }
    Err(TestCaseError::reject("the pages never came to rest"))
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root() && File::open("/proc/kpageflags").is_ok();
    if !root {
        println!("SKIP: only root may read /proc/kpageflags");
    }
    root
}

/// Lets advised memory have pages of 64K where no huge page fits, for as long as this lives.
fn with_64k() -> Option<Changed> {
    let path = PageSettings::host().size_path("64K".parse().unwrap());
    Changed::apply(&[Setting { path, value: "madvise".into() }]).ok()
}

#[test]
fn rows_equal_a_walk_over_the_physical_pages() {
    if !is_root() {
        return;
    }
    let _sizes = with_64k();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let contents = vec![7u8; APART as usize];
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    (&file).write_all(&contents).unwrap();
    let path = path.to_str().unwrap();
    let config = ProptestConfig {
        cases: 64,
        max_shrink_iters: 32,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(recipes in prop::collection::vec(recipe(), 1..4))| {
        let mappings: Vec<_> = recipes.iter().map(|recipe| make(recipe, &file)).collect();
        for (mapping, recipe) in mappings.iter().zip(&recipes) {
            compare(mapping, recipe, path)?;
        }
    });
}

/// Enlarges a pool to at least this many free pages, for as long as the result lives.
fn pool(settings: &PageSettings, size: PageSize, pages: u64) -> Option<Changed> {
    let path = settings.pool_path(size).join("nr_hugepages");
    let now: u64 = std::fs::read_to_string(&path).ok()?.trim().parse().ok()?;
    let changed = Changed::apply(&[Setting { path, value: (now + pages).to_string() }]).ok()?;
    settings.hugetlb_pages(size).is_some_and(|free| free >= pages).then_some(changed)
}

#[test]
fn hugetlb_of_2m_is_what_the_page_table_says() {
    hugetlb_is_what_the_page_table_says(PageSize::M2, "2M");
}

#[test]
fn hugetlb_of_1g_is_what_the_page_table_says() {
    hugetlb_is_what_the_page_table_says(PageSize::G1, "1G");
}

fn hugetlb_is_what_the_page_table_says(size: PageSize, shown: &str) {
    let Some(_pool) = pool(&PageSettings::host(), size, 2) else {
        println!("SKIP: no two pages of {size} for the hugetlb pool (root, contiguous memory)");
        return;
    };
    let bytes = size.bytes();
    for source in [Source::Anon, Source::Shared] {
        let (len, hugetlb) = (2 * bytes as usize, Some(bytes as usize));
        let mapping = OwnedMapping::new(Request { source, len, align: 1, hugetlb }).unwrap();
        mapping.store(bytes, 1);
        let rows = printed(&mapping);
        let columns: Vec<Vec<_>> =
            rows.lines().map(|row| row.split_whitespace().collect()).collect();
        let kb = (bytes >> 10).to_string();
        let anon = if matches!(source, Source::Anon) { &kb } else { "-" };
        assert_eq!(columns[0][1..6], [&kb, "-", "-", "-", "-"], "{rows}");
        assert_eq!(columns[1][1..6], [&kb, &kb, anon, "-", shown], "{rows}");
    }
}

#[test]
fn processes_that_are_not_there_are_counted() {
    let me = std::process::id().to_string();
    let output = pmap(&["4294967295", &me, "/proc/4294967294", "4294967293"]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(stdout(&output).starts_with(&format!("{me}:\t")));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors.matches("no process").count(), 3, "{errors}");
    assert_eq!(pmap(&["-x", "-S", &me]).status.code(), Some(2));
    assert_eq!(pmap(&[]).status.code(), Some(2));
}

#[test]
fn every_view_shows_the_same_addresses() {
    let mut sleeper = Command::new("sleep").arg("100").spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(200));
    let pid = sleeper.id().to_string();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let starts = |output: &Output| -> Vec<u64> {
        let words = stdout(output).lines().filter_map(|line| line.split(' ').next());
        words.filter(|w| w.len() == 16).filter_map(|w| u64::from_str_radix(w, 16).ok()).collect()
    };
    let mapped: Vec<u64> = maps
        .lines()
        .map(|line| u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap())
        .collect();
    for options in [&["-x"][..], &["-S"], &["-l"], &["-a", "-x"], &["-F"]] {
        let output = pmap(&[options, &[&pid]].concat());
        assert!(output.status.success(), "{output:?}");
        assert_eq!(starts(&output), mapped, "{options:?}");
    }
    for options in [&["-xs"][..], &["-s"], &["-L"]] {
        let rows = starts(&pmap(&[options, &[&pid]].concat()));
        assert!(rows.is_sorted() && mapped.iter().all(|start| rows.contains(start)), "{options:?}");
    }
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
}

#[test]
fn differences_between_two_moments() {
    let directory = tempfile::tempdir().unwrap();
    let pid = std::process::id().to_string();
    let save = |name: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, pmap(&["--json", &pid]).stdout).unwrap();
        path.to_str().unwrap().to_string()
    };
    let request =
        Request { source: Source::Anon, len: 64 << 12, align: APART as usize, hugetlb: None };
    let mapping = OwnedMapping::new(request).unwrap();
    mapping.advise(libc::MADV_NOHUGEPAGE).unwrap();
    let before = save("before");
    (0..8).for_each(|page| mapping.store(page * PAGE, 1));
    let output = pmap(&["--diff", &before, &save("after")]);
    let row = format!("{:016x}", mapping.address());
    let row = stdout(&output).lines().find(|line| line.contains(&row)).map(str::to_string);
    let columns: Vec<String> = row.unwrap().split_whitespace().skip(1).map(String::from).collect();
    assert_eq!(columns[..3], ["32", "-", "4K"]);
    let unchanged = pmap(&["--diff", "0s", "-A", &format!("{:x}", mapping.address()), &pid]);
    assert!(stdout(&unchanged).contains("no page size changed"), "{unchanged:?}");
    assert_eq!(pmap(&["--diff", "/nonexistent", &before]).status.code(), Some(2));
}
