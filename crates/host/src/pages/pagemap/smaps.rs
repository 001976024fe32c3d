//! The mappings in /proc/PID/smaps, with their flags.
//!
//! The procfs crate cannot read other users' processes safely: it refuses file names that are not UTF-8,
//! and panics on some names that a process may choose (`/SYSV`).
//!
//! Source: Documentation/filesystems/proc.rst of Linux 6.18.

use super::{HugePageAdvice, Mapping, Segment};
use crate::procfs::maps_line;
use pagetax_core::units::{PageSize, VirtAddr};

/// Parses the mappings, without runs. The error shows a line that no kernel writes.
pub fn parse(text: &[u8]) -> Result<Vec<Mapping>, String> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        if line[0].is_ascii_uppercase() {
            let mapping = mappings.last_mut().ok_or("smaps begins without a mapping")?;
            let field = std::str::from_utf8(line).map_err(|_| broken(line))?;
            attribute(mapping, field).ok_or_else(|| broken(line))?;
        } else {
            mappings.push(header(line).ok_or_else(|| broken(line))?);
        }
    }
    classify(&mut mappings);
    Ok(mappings)
}

fn broken(line: &[u8]) -> String {
    format!("smaps has the line `{}`", String::from_utf8_lossy(line))
}

fn header(line: &[u8]) -> Option<Mapping> {
    let line = maps_line(line)?;
    let is = |field: usize, letter: u8| line.permissions[field] == letter;
    Some(Mapping {
        start: VirtAddr(line.range.start),
        end: VirtAddr(line.range.end),
        read: is(0, b'r'),
        write: is(1, b'w'),
        execute: is(2, b'x'),
        shared: is(3, b's'),
        no_reserve: false,
        locked: false,
        accounted: false,
        advice: None,
        thp_eligible: None,
        hugetlb: None,
        offset_bytes: line.offset_bytes,
        inode: line.inode,
        name: line.name,
        segment: Segment::Anon,
        swapped_bytes: 0,
        mergeable: false,
        has_user_faults: false,
        amounts: super::Amounts::default(),
        unplaced: None,
        runs: Vec::new(),
    })
}

/// Parses `KernelPageSize:   4 kB`, `THPeligible:    0`, `VmFlags: rd wr mr mw me ac sd`; ignores other
/// lines.
fn attribute(mapping: &mut Mapping, line: &str) -> Option<()> {
    let (key, value) = line.split_once(':')?;
    let mut words = value.split_ascii_whitespace();
    match key {
        // Only hugetlb mappings keep it; see VmFlags, which comes later.
        "KernelPageSize" => mapping.hugetlb = PageSize::new(kilobytes(&mut words)?).ok(),
        "Rss" => mapping.amounts.resident = kilobytes(&mut words)?,
        "Anonymous" => mapping.amounts.anon = kilobytes(&mut words)?,
        "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" => {
            mapping.amounts.huge += kilobytes(&mut words)?;
        }
        "KSM" => mapping.amounts.merged = Some(kilobytes(&mut words)?),
        "Swap" => mapping.swapped_bytes = kilobytes(&mut words)?,
        "THPeligible" => mapping.thp_eligible = Some(words.next()? != "0"),
        "VmFlags" => {
            let flags: Vec<&str> = words.collect();
            let has = |flag: &str| flags.contains(&flag);
            mapping.no_reserve = has("nr");
            mapping.locked = has("lo");
            mapping.accounted = has("ac");
            mapping.mergeable = has("mg");
            mapping.has_user_faults = ["um", "uw", "ui"].into_iter().any(has);
            mapping.advice = match (has("hg"), has("nh")) {
                (true, _) => Some(HugePageAdvice::Huge),
                (_, true) => Some(HugePageAdvice::NoHuge),
                _ => None,
            };
            mapping.hugetlb = mapping.hugetlb.filter(|_| has("ht"));
            if has("gd") {
                mapping.segment = Segment::Stack;
            }
        }
        _ => {}
    }
    Some(())
}

fn kilobytes<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<u64> {
    words.next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Sets the segment of each mapping. The bss is known only from the mapping before it.
fn classify(mappings: &mut [Mapping]) {
    let mut data_end = VirtAddr(0);
    for mapping in mappings {
        let follows_data = mapping.start == data_end;
        mapping.segment = segment(mapping, follows_data);
        if matches!(mapping.segment, Segment::Data | Segment::Bss) {
            data_end = mapping.end;
        }
    }
}

fn segment(mapping: &Mapping, follows_data: bool) -> Segment {
    // Anonymous hugetlb memory is an unnamed file of the kernel.
    let anon_hugetlb = mapping.hugetlb.is_some() && mapping.name.starts_with("/anon_hugepage");
    let of_file = mapping.inode != 0 && !anon_hugetlb;
    match mapping.name.as_str() {
        "[heap]" => Segment::Heap,
        _ if mapping.segment == Segment::Stack => Segment::Stack,
        "[stack]" => Segment::Stack,
        name if name.starts_with("[v") => Segment::Kernel,
        _ if mapping.shared => Segment::Shared,
        _ if of_file && mapping.execute => Segment::Text,
        _ if of_file && mapping.write => Segment::Data,
        _ if of_file => Segment::ReadOnly,
        "" if follows_data && mapping.write => Segment::Bss,
        _ => Segment::Anon,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "\
555500000000-555500001000 r-xp 00000000 fe:00 77                         /usr/bin/a b
KernelPageSize:        4 kB
VmFlags: rd ex mr mw me
555500001000-555500002000 rw-p 00001000 fe:00 77                         /usr/bin/a b
555500002000-555500004000 rw-p 00000000 00:00 0
THPeligible:           0
555500010000-555500210000 rw-p 00000000 00:00 0                          [heap]
Swap:                 12 kB
THPeligible:           1
VmFlags: rd wr mr mw me ac lo hg
7f0000000000-7f0040000000 rw-p 00000000 00:0e 5                          /anon_hugepage (deleted)
KernelPageSize:  1048576 kB
VmFlags: rd wr mr mw me de ht
7ffc00000000-7ffc00100000 rw-p 00000000 00:00 0
KSM:                   4 kB
VmFlags: rd wr mr mw me gd ac nh mg um
7ffc00100000-7ffc00121000 rw-p 00000000 00:00 0                          [stack]
VmFlags: rd wr mr mw me gd ac
7ffc00200000-7ffc00202000 r-xp 00000000 00:00 0                          [vdso]
";

    #[test]
    fn mappings_and_what_they_are() {
        let mappings = parse(TEXT.as_bytes()).unwrap();
        let segments: Vec<_> = mappings.iter().map(|m| m.segment).collect();
        use Segment::*;
        assert_eq!(segments, [Text, Data, Bss, Heap, Anon, Stack, Stack, Kernel]);
        assert_eq!(mappings[0].name, "/usr/bin/a b");
        assert_eq!((mappings[0].hugetlb, mappings[4].hugetlb), (None, Some(PageSize::G1)));
        let heap = &mappings[3];
        assert_eq!((heap.advice, heap.thp_eligible), (Some(HugePageAdvice::Huge), Some(true)));
        assert_eq!((heap.locked, heap.swapped_bytes), (true, 12 << 10));
        let stack = &mappings[5];
        assert_eq!(stack.advice, Some(HugePageAdvice::NoHuge));
        assert_eq!((stack.merged_bytes(), heap.merged_bytes()), (Some(4 << 10), None));
        assert!(stack.mergeable && stack.has_user_faults);
        assert!(!heap.mergeable && !heap.has_user_faults);
    }

    #[test]
    fn names_are_whatever_others_chose() {
        let line = b"1000-2000 r--p 00000000 00:00 9          /SYSV\xff x\\012y (deleted)\n";
        let mappings = parse(line).unwrap();
        assert_eq!(mappings[0].name, "/SYSV\u{fffd} x\\012y (deleted)");
    }

    #[test]
    fn nonsense_is_shown() {
        for text in ["Rss: 1 kB\n", "2000-1000 r--p 0 0:0 0\n", "zz\n", "1000-2000 rw 0 0:0 0\n"] {
            assert!(parse(text.as_bytes()).unwrap_err().contains("smaps"), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&text);
            let damaged = [TEXT.as_bytes(), &text].concat();
            let _ = parse(&damaged);
        }
    }
}
