//! Patterns of addresses that survive a restart: `PART[:CLASS|:FILE][@FROM-TO]`.
//!
//! `heap@0-64M` is the first 64 MiB of the brk heap. `text:libssl*` is the code of a file.
//! `mapping:32M@0-96M` is the first 96 MiB that a program maps in pieces of 32 to 64 MiB, in the order of
//! allocation. A program that allocates in the same order has the same memory under the same pattern.
//!
//! Invariant: [`AddressPattern::parse`] neither allocates nor panics. The preload library calls it before
//! main.

use std::fmt;
use std::ops::Range;

/// A part of memory that a pattern names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AddressPart {
    /// The brk heap of glibc's malloc, by offset.
    Heap = 0,
    /// The main thread's stack.
    Stack = 1,
    /// Code of the program and its libraries, by file.
    Text = 2,
    /// Arenas of malloc for threads, each of 64 MiB, in the order of their first use.
    Arena = 3,
    /// Other private anonymous memory, by size class and in the order of allocation.
    Mapping = 4,
}

/// The parts in the order of their numbers, and their names.
const PARTS: [(AddressPart, &str); 5] = [
    (AddressPart::Heap, "heap"),
    (AddressPart::Stack, "stack"),
    (AddressPart::Text, "text"),
    (AddressPart::Arena, "arena"),
    (AddressPart::Mapping, "mapping"),
];

impl AddressPart {
    /// All parts.
    pub const ALL: [AddressPart; 5] = [
        AddressPart::Heap,
        AddressPart::Stack,
        AddressPart::Text,
        AddressPart::Arena,
        AddressPart::Mapping,
    ];

    /// Returns the name in patterns.
    pub const fn name(self) -> &'static str {
        PARTS[self as usize].1
    }

    /// Returns true if malloc or mmap made such memory, so that the preload library reaches it.
    pub const fn is_allocated(self) -> bool {
        matches!(self, AddressPart::Heap | AddressPart::Arena | AddressPart::Mapping)
    }

    fn named(name: &[u8]) -> Option<AddressPart> {
        PARTS.iter().find(|(_, known)| known.as_bytes() == name).map(|(part, _)| *part)
    }
}

impl fmt::Display for AddressPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for AddressPart {
    type Err = BadPattern;
    fn from_str(text: &str) -> Result<AddressPart, BadPattern> {
        AddressPart::named(text.as_bytes()).ok_or_else(|| BadPattern(text.into()))
    }
}

/// The text is no pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` names no part of memory\n  hint: heap, stack, text, arena or mapping; with a range as in heap@0-64M, a \
     size class as in mapping:32M@0-96M, a file as in text:libssl*"
)]
pub struct BadPattern(pub String);

/// Addresses of one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressPattern<'a> {
    /// The part of memory.
    pub part: AddressPart,
    /// The size class of mappings: the largest power of two that is at most their length.
    pub class_bytes: Option<u64>,
    /// The name of a file with code; a `*` at its end stands for any rest.
    pub file: Option<&'a [u8]>,
    /// Bytes of the part, or of its size class, in the order of allocation.
    pub range: Range<u64>,
}

impl<'a> AddressPattern<'a> {
    /// Parses a pattern. None if it is none, or if its range is empty the wrong way round.
    pub fn parse(text: &'a [u8]) -> Option<AddressPattern<'a>> {
        let (text, range) = match text.iter().rposition(|byte| *byte == b'@') {
            None => (text, 0..u64::MAX),
            Some(at) => (text.get(..at)?, range(text.get(at + 1..)?)?),
        };
        let (name, rest) = match text.iter().position(|byte| *byte == b':') {
            None => (text, None),
            Some(at) => (text.get(..at)?, Some(text.get(at + 1..)?)),
        };
        let part = AddressPart::named(name)?;
        let is_whole = range == (0..u64::MAX);
        let mut pattern = AddressPattern { part, class_bytes: None, file: None, range };
        match (part, rest) {
            (AddressPart::Text, Some([_, ..])) if is_whole => pattern.file = rest,
            (AddressPart::Mapping, Some(class)) => {
                pattern.class_bytes = Some(bytes(class).filter(|bytes| bytes.is_power_of_two())?);
            }
            // Mappings of several classes come in no order that a restart keeps.
            (AddressPart::Heap | AddressPart::Arena, None) => {}
            (_, None) if is_whole => {}
            _ => return None,
        }
        Some(pattern)
    }

    /// Returns true if the pattern is of this file with code.
    pub fn is_of_file(&self, name: &[u8]) -> bool {
        match (self.part, self.file) {
            (AddressPart::Text, None) => true,
            (AddressPart::Text, Some([start @ .., b'*'])) => name.starts_with(start),
            (AddressPart::Text, Some(file)) => name == file,
            _ => false,
        }
    }
}

impl fmt::Display for AddressPattern<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.part.name())?;
        if let Some(class) = self.class_bytes {
            write!(f, ":{}", Short(class))?;
        }
        if let Some(file) = self.file {
            write!(f, ":{}", String::from_utf8_lossy(file))?;
        }
        match self.range {
            Range { start: 0, end: u64::MAX } => Ok(()),
            Range { start, end: u64::MAX } => write!(f, "@{}-", Short(start)),
            Range { start, end } => write!(f, "@{}-{}", Short(start), Short(end)),
        }
    }
}

/// A number of bytes in its largest whole unit.
struct Short(u64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(30, "G"), (20, "M"), (10, "K")];
        let fits = |(shift, _): &&(u32, &str)| self.0 > 0 && self.0.trailing_zeros() >= *shift;
        match units.iter().find(fits) {
            Some((shift, unit)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Returns the size class of a mapping of so many bytes.
pub const fn size_class(bytes: u64) -> u64 {
    if bytes == 0 { 0 } else { 1 << bytes.ilog2() }
}

fn range(text: &[u8]) -> Option<Range<u64>> {
    let dash = text.iter().position(|byte| *byte == b'-')?;
    let (start, end) = (bytes(text.get(..dash)?)?, text.get(dash + 1..)?);
    let end = if end.is_empty() { u64::MAX } else { bytes(end)? };
    (start <= end).then_some(start..end)
}

fn bytes(text: &[u8]) -> Option<u64> {
    let (digits, shift) = match text.split_last()? {
        (b'K' | b'k', rest) => (rest, 10),
        (b'M' | b'm', rest) => (rest, 20),
        (b'G' | b'g', rest) => (rest, 30),
        _ => (text, 0),
    };
    if digits.is_empty() {
        return None;
    }
    let mut value: u64 = 0;
    for digit in digits {
        let digit = (*digit as char).to_digit(10)?;
        value = value.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    value.checked_mul(1 << shift)
}

/// Parses patterns that commas separate, each with its text.
pub fn patterns(text: &[u8]) -> impl Iterator<Item = Result<AddressPattern<'_>, &[u8]>> {
    let words = text.split(|byte| *byte == b',');
    words.map(|word| AddressPattern::parse(word).ok_or(word))
}

/// Checks patterns that commas separate.
///
/// # Errors
/// The first that is none.
pub fn check(text: &str) -> Result<Vec<AddressPattern<'_>>, BadPattern> {
    let bad = |word: &[u8]| BadPattern(String::from_utf8_lossy(word).into_owned());
    patterns(text.as_bytes()).map(|pattern| pattern.map_err(bad)).collect()
}

/// Merges sorted ranges that lie at most `gap` bytes apart.
pub fn merged(ranges: &[Range<u64>], gap: u64) -> Vec<Range<u64>> {
    let mut all: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match all.last_mut().filter(|last| range.start <= last.end.saturating_add(gap)) {
            Some(last) => last.end = last.end.max(range.end),
            None => all.push(range.clone()),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_read_and_written_alike() {
        let text = "heap,heap@0-64M,heap@6M-,arena@0-64M,mapping,mapping:32M,mapping:256K@2M-96M,stack,text,\
                    text:libssl*,heap@0-0";
        let read = check(text).unwrap();
        let written: Vec<String> = read.iter().map(ToString::to_string).collect();
        assert_eq!(written.join(","), text);
        assert_eq!(read[1].range, 0..64 << 20);
        assert_eq!(read[6].class_bytes, Some(256 << 10));
        assert_eq!(read[6].range, 2 << 20..96 << 20);
    }

    #[test]
    fn other_texts_are_refused() {
        for bad in [
            "",
            "hep",
            "heap:2M",
            "heap@",
            "heap@5M-2M",
            "heap@1-x",
            "mapping:3M",
            "mapping:",
            "mapping@0-2M",
            "arena:4M",
            "stack@0-2M",
            "text:",
            "heap@99999999999G-",
            "heap,,stack",
        ] {
            assert!(check(bad).is_err(), "{bad}");
        }
        assert!(check("mapping:3M").unwrap_err().to_string().contains("hint: heap"));
    }

    #[test]
    fn files_are_named_whole_or_by_their_start() {
        let is_of = |text: &str, name: &str| {
            AddressPattern::parse(text.as_bytes()).unwrap().is_of_file(name.as_bytes())
        };
        assert!(is_of("text", "a") && is_of("text:a", "a") && is_of("text:libc*", "libc.so.6"));
        assert!(!is_of("text:a", "ab") && !is_of("text:libc*", "lib") && !is_of("heap", "a"));
    }

    #[test]
    fn classes_and_ranges() {
        assert_eq!([1, 2 << 20, (4 << 20) - 1].map(size_class), [1, 2 << 20, 2 << 20]);
        assert_eq!(merged(&[0..2, 2..4, 7..9], 0), [0..4, 7..9]);
        assert_eq!(merged(&[0..2, 2..4, 7..9], 3).first(), Some(&(0..9)));
    }
}
