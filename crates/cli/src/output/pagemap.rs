//! Maps of processes as text: the rows and columns of pmap.
//!
//! Invariant: a zero, and no page, are `-`; rows are plain text without colour, for scripts that
//! know the original.

use super::text;
use pagetax_core::units::{Bytes, PageSize, VirtAddr};
use pagetax_host::pages::pagemap::{Change, Mapping, NodeRuns, PageMap, Pages, Run};

/// Options of all tables.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// A row for each run, not for each mapping.
    pub by_size: bool,
    /// Show whole paths of files, not only names.
    pub long_names: bool,
    /// Shared memory of no file counts as anonymous, and its reservation as ours.
    pub anon_shared: bool,
}

const DASH: &str = "-";

/// Renders `-x` and `-xs`: Address Kbytes RSS Anon Locked [Pgsz] Mode Mapped-File.
pub fn extended(map: &PageMap, options: Options) -> String {
    let numbers = ["Kbytes", "RSS", "Anon", "Locked"];
    let mut out = title(map) + &heading(&numbers, options.by_size);
    let mut sums = [0; 4];
    for (mapping, run) in rows(map, options.by_size) {
        let resident = run.resident_bytes;
        let anon = match mapping.shared {
            true if options.anon_shared && is_memory(mapping) => resident,
            true => 0,
            false => run.anon_bytes,
        };
        let locked = if mapping.locked { resident } else { 0 };
        let counts = [run.bytes(), resident, anon, locked];
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        let size = options.by_size.then_some(run.page);
        out += &row(run.start, &counts, size, mapping, options.long_names);
    }
    out + &trailer(&sums)
}

/// Renders `-S`: Address Kbytes Swap Mode Mapped-File. Swap is the space reserved, also while the page is in
/// memory.
pub fn swap(map: &PageMap, options: Options) -> String {
    let mut out = title(map) + &heading(&["Kbytes", "Swap"], false);
    let mut sums = [0; 2];
    for mapping in &map.mappings {
        let ours = mapping.accounted && (!mapping.shared || options.anon_shared);
        let counts = [mapping.bytes(), if ours { mapping.bytes() } else { 0 }];
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        out += &row(mapping.start, &counts, None, mapping, options.long_names);
    }
    out + &trailer(&sums)
}

/// Renders the form without -x: Address, length, [Pgsz], Mode, Mapped-File, and a total.
pub fn plain(map: &PageMap, options: Options) -> String {
    let mut out = title(map);
    let mut sum = 0;
    for (mapping, run) in rows(map, options.by_size) {
        sum += run.bytes();
        let size = if options.by_size { format!("{:>5} ", page(run.page)) } else { String::new() };
        out += &format!(
            "{:016x} {:>10}K {size}{} {}\n",
            run.start.0,
            run.bytes() >> 10,
            mode(mapping),
            name(mapping, true)
        );
    }
    out + &format!(" total {:>20}K\n", sum >> 10)
}

/// Renders `-L`: Address, length, Pgsz, Lgrp, Mode, Mapped-File.
pub fn nodes(map: &PageMap, runs: &[NodeRuns], options: Options) -> String {
    let mut out = title(map)
        + &format!(
            "{:>16} {:>11} {:>5} {:>4} {:5} Mapped-File\n",
            "Address", "Bytes", "Pgsz", "Lgrp", "Mode"
        );
    for (mapping, runs) in map.mappings.iter().zip(runs) {
        for (run, node) in runs {
            out += &format!(
                "{:016x} {:>10}K {:>5} {:>4} {} {}\n",
                run.start.0,
                run.bytes() >> 10,
                page(run.page),
                node.map_or(DASH.into(), |node| node.to_string()),
                mode(mapping),
                name(mapping, options.long_names)
            );
        }
    }
    let sum: u64 = map.mappings.iter().map(Mapping::bytes).sum();
    out + &format!(" total {:>20}K\n", sum >> 10)
}

/// Renders `--diff`: Address Kbytes Before After Mapped-File, and totals by kind of change.
pub fn changes(map: &PageMap, changes: &[Change], long_names: bool) -> String {
    if changes.is_empty() {
        return title(map) + "no page size changed\n";
    }
    let rows = changes.iter().map(|change| {
        vec![
            format!("{:016x}", change.start.0),
            ((change.end.0 - change.start.0) >> 10).to_string(),
            state(change.before),
            state(change.after),
            shown(&change.name, long_names),
        ]
    });
    let headings = ["Address", "Kbytes", "Before", "After", "Mapped-File"];
    let mut kinds: Vec<(Pages, Pages, u64)> = Vec::new();
    for change in changes {
        let bytes = change.end.0 - change.start.0;
        match kinds.iter_mut().find(|kind| (kind.0, kind.1) == (change.before, change.after)) {
            Some(kind) => kind.2 += bytes,
            None => kinds.push((change.before, change.after, bytes)),
        }
    }
    kinds.sort();
    let totals = kinds.into_iter().map(|(before, after, bytes)| {
        vec!["total".into(), (bytes >> 10).to_string(), state(before), state(after), String::new()]
    });
    title(map) + &text::table(&headings, &[1], rows.chain(totals).collect())
}

fn state(pages: Pages) -> String {
    match pages {
        Pages::Unmapped => "unmapped".into(),
        Pages::None => DASH.into(),
        Pages::Of(size) => size.to_string(),
    }
}

fn title(map: &PageMap) -> String {
    format!("{}:\t{}\n", map.pid, printable(&map.command))
}

/// Names are what other programs chose; control characters do not reach the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn heading(numbers: &[&str], by_size: bool) -> String {
    let mut line = format!("{:>16}", "Address");
    numbers.iter().for_each(|number| line += &format!(" {number:>10}"));
    if by_size {
        line += " Pgsz";
    }
    line + " Mode  Mapped-File\n"
}

fn row(
    start: VirtAddr,
    counts: &[u64],
    size: Option<Option<PageSize>>,
    mapping: &Mapping,
    long_names: bool,
) -> String {
    let mut line = format!("{:016x}", start.0);
    counts.iter().for_each(|count| line += &format!(" {:>10}", kilobytes(*count)));
    if let Some(size) = size {
        line += &format!(" {:>4}", page(size));
    }
    line + &format!(" {} {}\n", mode(mapping), name(mapping, long_names))
}

fn trailer(sums: &[u64]) -> String {
    let (mut rule, mut total) = ("-".repeat(16), format!("{:<16}", "total Kb"));
    for sum in sums {
        rule += &format!(" {:>10}", "-------");
        total += &format!(" {:>10}", kilobytes(*sum));
    }
    format!("{rule}\n{total}\n")
}

/// Returns a row for each run, or for each mapping as one run.
fn rows(map: &PageMap, by_size: bool) -> impl Iterator<Item = (&Mapping, Run)> {
    map.mappings.iter().flat_map(move |mapping| {
        let runs = if by_size { mapping.runs_by_size() } else { vec![whole(mapping)] };
        runs.into_iter().map(move |run| (mapping, run))
    })
}

fn whole(mapping: &Mapping) -> Run {
    Run {
        start: mapping.start,
        end: mapping.end,
        page: None,
        resident_bytes: mapping.resident_bytes(),
        anon_bytes: mapping.anon_bytes(),
    }
}

fn kilobytes(bytes: u64) -> String {
    if bytes == 0 { DASH.into() } else { (bytes >> 10).to_string() }
}

fn page(size: Option<PageSize>) -> String {
    size.map_or(DASH.into(), |size| Bytes(size.bytes()).to_string())
}

fn mode(mapping: &Mapping) -> String {
    let flag = |set: bool, letter: char| if set { letter } else { '-' };
    [
        flag(mapping.read, 'r'),
        flag(mapping.write, 'w'),
        flag(mapping.execute, 'x'),
        flag(mapping.shared, 's'),
        flag(mapping.no_reserve, 'R'),
    ]
    .iter()
    .collect()
}

/// Returns true for shared memory that is in no file system of a disk.
fn is_memory(mapping: &Mapping) -> bool {
    let parts = ["/dev/zero", "/memfd:", "/SYSV", "/dev/shm/"];
    mapping.name.is_empty() || parts.iter().any(|part| mapping.name.starts_with(part))
}

fn name(mapping: &Mapping, long_names: bool) -> String {
    shown(&mapping.name, long_names)
}

/// Returns a mapping's name: `[ heap ]` and `[ anon ]` as Solaris's pmap, files by their last part unless
/// `long_names`.
fn shown(name: &str, long_names: bool) -> String {
    let inner = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match (name, inner) {
        ("", _) => "  [ anon ]".into(),
        (_, Some(inner)) => format!("  [ {} ]", printable(inner)),
        _ if long_names => printable(name),
        _ => printable(name.rsplit_once('/').map_or(name, |(_, base)| base)),
    }
}
