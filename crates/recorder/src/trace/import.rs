//! Imports traces of Valgrind's lackey (`--trace-mem=yes`) and of DynamoRIO's drmemtrace view tool.
//!
//! Both list every access. The importer drops what a recording would have dropped. The lists have no
//! mappings: executed pages count as a file's, all others as unknown.

use super::{TraceError, TraceWriter};
use crate::filter::PAGE_SHIFT;
use crate::pages::{AccessKind, PageObserver, Thread};
use crate::places::Segment;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// The number of lines between two reports of progress.
const PROGRESS_LINES: u64 = 1 << 16;

/// The format of an imported trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `valgrind --tool=lackey --trace-mem=yes`
    Lackey,
    /// `drrun -t drmemtrace -tool view`
    Drmemtrace,
}

/// An access in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ListedAccess {
    thread: u32,
    kind: AccessKind,
    address: u64,
    bytes: u64,
    /// True for an access that loads and stores.
    twice: bool,
}

/// The contents of a line.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Access(ListedAccess),
    /// A line without access: a heading, a marker, a message of the program.
    Nothing,
    Wrong(&'static str),
}

/// Reads a file to its end and returns its number of accesses. `on_progress` gets the share that is read.
///
/// # Errors
/// The file cannot be read, has no access, or has an invalid line.
pub fn import(
    format: Format,
    path: &Path,
    writer: &mut TraceWriter,
    mut on_progress: impl FnMut(f64),
) -> Result<u64, TraceError> {
    let failed = |error| TraceError::System("read", path.into(), error);
    let file = File::open(path).map_err(failed)?;
    let all_bytes = file.metadata().map_err(failed)?.len();
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let mut dropper = Dropper { writer, threads: HashMap::new(), found: HashSet::new(), count: 0 };
    let (mut text, mut number, mut read_bytes) = (Vec::new(), 0, 0);
    loop {
        text.clear();
        match reader.read_until(b'\n', &mut text).map_err(failed)? {
            0 => break,
            count => read_bytes += count as u64,
        }
        number += 1;
        if number % PROGRESS_LINES == 0 {
            // A pipe has no length.
            on_progress(read_bytes as f64 / all_bytes.max(read_bytes) as f64);
        }
        let line = String::from_utf8_lossy(&text);
        let parsed = match format {
            Format::Lackey => lackey(line.trim_end()),
            Format::Drmemtrace => drmemtrace(line.trim_end()),
        };
        match parsed {
            Line::Access(access) => dropper.access(access),
            Line::Nothing => {}
            Line::Wrong(problem) => return Err(wrong(path, number, problem.into())),
        }
    }
    match dropper.count {
        0 => Err(wrong(path, number.max(1), "the file has no accesses".into())),
        count => Ok(count),
    }
}

fn wrong(path: &Path, line: u64, problem: String) -> TraceError {
    let remedy = "name the right format: lackey for `valgrind --tool=lackey --trace-mem=yes`, \
                  drmemtrace-text for `drrun -t drmemtrace -tool view`; cut off a last line that is not \
                  whole";
    TraceError::Import { place: path.into(), line, problem, remedy }
}

/// Parses `I  04001000,3`, ` L 1ffeffe7e0,8`, ` S …`, ` M …`.
fn lackey(line: &str) -> Line {
    let (kind, twice) = match line.get(..3) {
        Some("I  ") => (AccessKind::Fetch, false),
        Some(" L ") => (AccessKind::Load, false),
        Some(" S ") => (AccessKind::Store, false),
        Some(" M ") => (AccessKind::Store, true),
        _ => return Line::Nothing,
    };
    let number = |text: &str, radix| u64::from_str_radix(text, radix).ok();
    let place = line[3..].split_once(',');
    match place.and_then(|(address, bytes)| Some((number(address, 16)?, number(bytes, 10)?))) {
        Some((address, bytes)) => {
            Line::Access(ListedAccess { thread: 0, kind, address, bytes, twice })
        }
        None => Line::Wrong("an access without address,size"),
    }
}

/// Parses `12  5:  3264465 read  8 byte(s) @ 0x00007ffd by PC 0x…`. Earlier versions write `T3264465`.
fn drmemtrace(line: &str) -> Line {
    let Some((_, rest)) = line.split_once(':') else { return Line::Nothing };
    let mut words = rest.split_whitespace();
    let (Some(thread), Some(kind)) = (words.next(), words.next()) else { return Line::Nothing };
    let kind = match kind {
        "ifetch" => AccessKind::Fetch,
        "read" => AccessKind::Load,
        "write" => AccessKind::Store,
        _ => return Line::Nothing,
    };
    let Ok(thread) =
        thread.trim_start_matches(['T', 'W']).split('.').next_back().unwrap_or("").parse()
    else {
        return Line::Wrong("an access without a thread");
    };
    let bytes = words.next().and_then(|word| word.parse().ok());
    let address =
        words.nth(2).and_then(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    match (bytes, address) {
        (Some(bytes), Some(address)) => {
            Line::Access(ListedAccess { thread, kind, address, bytes, twice: false })
        }
        _ => Line::Wrong("an access without size and address"),
    }
}

/// The current pages of a thread.
struct CurrentPages {
    thread: Thread,
    data: u64,
    code: u64,
}

struct Dropper<'a> {
    writer: &'a mut TraceWriter,
    /// Threads by their number in the file.
    threads: HashMap<u32, CurrentPages>,
    found: HashSet<u64>,
    count: u64,
}

impl Dropper<'_> {
    fn access(&mut self, access: ListedAccess) {
        let next = self.threads.len() as u32;
        let on = self.threads.entry(access.thread).or_insert_with(|| CurrentPages {
            thread: Thread { number: next, process: 0 },
            data: u64::MAX,
            code: u64::MAX,
        });
        let is_code = access.kind == AccessKind::Fetch;
        let last = access.address.saturating_add(access.bytes.max(1) - 1);
        for page in [access.address >> PAGE_SHIFT, last >> PAGE_SHIFT] {
            let on_page = if is_code { &mut on.code } else { &mut on.data };
            if std::mem::replace(on_page, page) != page {
                if self.found.insert(page) {
                    let segment = if is_code { Segment::File } else { Segment::Unknown };
                    self.writer.found(0, page, segment);
                }
                self.writer.change(on.thread, access.kind, page);
            }
        }
        let accesses = if is_code { 0 } else { 1 + u64::from(access.twice) };
        self.writer.ran(on.thread, is_code.into(), accesses);
        self.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(thread: u32, kind: AccessKind, address: u64, bytes: u64) -> Line {
        Line::Access(ListedAccess { thread, kind, address, bytes, twice: false })
    }

    #[test]
    fn lackey_lines() {
        assert_eq!(lackey("I  04001a30,3"), access(0, AccessKind::Fetch, 0x400_1a30, 3));
        assert_eq!(lackey(" L 1ffeffe7e0,8"), access(0, AccessKind::Load, 0x1f_feff_e7e0, 8));
        assert!(matches!(lackey(" M 10,4"), Line::Access(ListedAccess { twice: true, .. })));
        assert_eq!(lackey("==12== Lackey, an example tool"), Line::Nothing);
        assert!(matches!(lackey(" S 10"), Line::Wrong(_)));
        assert!(matches!(lackey(" S 10,"), Line::Wrong(_)));
    }

    #[test]
    fn drmemtrace_lines_of_old_and_new_versions() {
        let new = "          11           1:     3264465 write        8 byte(s) @ 0x00007ffd4d4ef5b8 by PC 0x00007f7f63f7c3b3";
        assert_eq!(drmemtrace(new), access(3_264_465, AccessKind::Store, 0x7ffd_4d4e_f5b8, 8));
        let old = "  2923092: T3551528   ifetch 5 byte(s) @ 0x00007f7fe3a61755  non-branch";
        assert_eq!(drmemtrace(old), access(3_551_528, AccessKind::Fetch, 0x7f7f_e3a6_1755, 5));
        assert_eq!(drmemtrace("  1  0: 3264465 <marker: version 4>"), Line::Nothing);
        assert_eq!(drmemtrace("------------"), Line::Nothing);
        assert!(matches!(drmemtrace("1 2: 3 read 8 byte(s) @"), Line::Wrong(_)));
    }
}
