//! Large pages for a part of a program's memory alone, by patterns that survive a restart
//! ([`pagetax_core::address_pattern`]).
//!
//! The preload library takes the patterns, since only it sees memory when it is allocated. It can also log
//! all memory that patterns could name ([`Allocations`]).

use super::launch::{Launch, Surroundings};
use super::tunables::{HUGETLB, tunable};
use pagetax_core::address_pattern::{AddressPart, AddressPattern, BadPattern, check, size_class};
use pagetax_core::page_size::{MemoryPart, PartSizes};
use pagetax_core::units::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The variable that names the patterns to the preload library.
pub const PATTERNS_VARIABLE: &str = "PAGETAX_ONLY";
/// The variable that names the log of allocations to it.
pub const LOG_VARIABLE: &str = "PAGETAX_ALLOCATIONS";

/// The reason why patterns cannot be applied to a command.
#[derive(Debug, thiserror::Error)]
pub enum OnlyError {
    /// A text is no pattern.
    #[error(transparent)]
    Bad(#[from] BadPattern),
    /// A part cannot have large pages, or not so.
    #[error("--only {pattern}: {why}\n  hint: {remedy}")]
    Unavailable {
        /// The pattern that is not possible.
        pattern: String,
        /// The obstacle, in one sentence.
        why: String,
        /// The change that would help.
        remedy: String,
    },
}

impl Launch {
    /// Restricts the plan of a command to the memory that patterns name.
    ///
    /// # Errors
    /// A text is no pattern, no size is asked for its part, or the program cannot take the preload library.
    pub fn restrict(
        &mut self,
        only: &str,
        advice: &PartSizes,
        around: &Surroundings,
    ) -> Result<(), OnlyError> {
        let patterns = check(only)?;
        for pattern in &patterns {
            self.check_pattern(pattern, advice, around).map_err(|(why, remedy)| {
                OnlyError::Unavailable { pattern: pattern.to_string(), why, remedy }
            })?;
        }
        if advice.get(MemoryPart::Text).is_some() {
            self.text.retain(|path| patterns.iter().any(|pattern| pattern.is_of_file(name(path))));
        }
        if advice.get(MemoryPart::Heap).is_some() {
            // By its tunable, malloc would advise all of its memory, and sweeps would collapse it.
            self.environment.retain(|(name, _)| *name != "GLIBC_TUNABLES");
            let swept = self.swept.take().map(|s| s.without(MemoryPart::Heap));
            let swept = swept.map(|s| s.without(MemoryPart::Anon));
            self.swept = swept.filter(|sizes| !sizes.parts().is_empty());
            self.environment.push((PATTERNS_VARIABLE, only.into()));
        }
        Ok(())
    }

    fn check_pattern(
        &self,
        pattern: &AddressPattern<'_>,
        advice: &PartSizes,
        around: &Surroundings,
    ) -> Result<(), (String, String)> {
        let (part, option) = match pattern.part {
            AddressPart::Stack => (MemoryPart::Stack, "stack=2M"),
            AddressPart::Text => (MemoryPart::Text, "text=2M"),
            _ => (MemoryPart::Heap, "heap=2M"),
        };
        if advice.get(part).is_none() {
            return Err((format!("no page size is asked for {part}"), format!("-o {option}")));
        }
        if pattern.part == AddressPart::Text
            && !self.text.iter().any(|path| pattern.is_of_file(name(path)))
        {
            let files: Vec<_> =
                self.text.iter().map(|path| String::from_utf8_lossy(name(path))).collect();
            return Err((
                "the program starts with no such file".into(),
                format!("one of {}", files.join(", ")),
            ));
        }
        if part != MemoryPart::Heap {
            return Ok(());
        }
        if around.tunables.as_deref().is_some_and(|text| tunable(text, HUGETLB).is_some()) {
            return Err((
                "GLIBC_TUNABLES has glibc.malloc.hugetlb, by which malloc decides alone".into(),
                "unset it".into(),
            ));
        }
        match self.variable("MPSSHEAP") {
            Some(_) => Ok(()),
            None => Err(self.why_no_library(around)),
        }
    }

    /// Returns the reason why no library sees what the program allocates, and the change that would help.
    fn why_no_library(&self, around: &Surroundings) -> (String, String) {
        let kind = self.program.kind.words();
        if self.program.takes_preload().is_err() {
            return (
                format!("{kind}: no library can see what it allocates"),
                "patterns of memory need a dynamic program with glibc's malloc or none".into(),
            );
        }
        if let Err(error) = (around.library)() {
            let text = error.to_string();
            let (why, remedy) = text.split_once("\n  hint: ").unwrap_or((&text, "pagetax doctor"));
            return (why.into(), remedy.into());
        }
        (
            "the system's setting turns transparent large pages off".into(),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled".into(),
        )
    }

    /// Has the preload library log the command's memory to a file, which exists.
    pub fn log_allocations(&mut self, path: &Path) {
        self.environment.push((LOG_VARIABLE, path.into()));
    }
}

fn name(path: &Path) -> &[u8] {
    use std::os::unix::ffi::OsStrExt;
    path.file_name().unwrap_or_default().as_bytes()
}

/// Memory that a program allocated in one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The part of memory.
    pub part: AddressPart,
    /// The size class of a mapping; 0 for other memory.
    pub class_bytes: u64,
    /// The offset of its first byte in the order of allocation.
    pub offset: u64,
    /// The addresses in this run.
    pub addresses: Range<u64>,
}

impl Allocation {
    fn read(line: &str) -> Option<Allocation> {
        let mut words = line.split(' ');
        let part = words.next()?.parse().ok()?;
        let mut number = || words.next()?.parse::<u64>().ok();
        let (class_bytes, offset, start, bytes) = (number()?, number()?, number()?, number()?);
        Some(Allocation { part, class_bytes, offset, addresses: start..start.checked_add(bytes)? })
    }

    /// Returns the pattern of so many bytes of this memory's part and class.
    pub fn pattern(&self, range: Range<u64>) -> AddressPattern<'static> {
        let is_mapping = self.part == AddressPart::Mapping;
        let class_bytes = is_mapping.then(|| size_class(self.class_bytes));
        AddressPattern { part: self.part, class_bytes, file: None, range }
    }

    /// Returns the bytes of this memory that a pattern names.
    pub fn bytes_in(&self, pattern: &AddressPattern<'_>) -> u64 {
        let bytes = self.addresses.end - self.addresses.start;
        let is_named = pattern.part == self.part
            && pattern.class_bytes.is_none_or(|class| class == self.class_bytes);
        let end = (self.offset + bytes).min(pattern.range.end);
        if is_named { end.saturating_sub(self.offset.max(pattern.range.start)) } else { 0 }
    }
}

/// The memory that the preload library has logged so far.
#[derive(Debug, Default)]
pub struct Allocations {
    path: PathBuf,
    read_bytes: usize,
    all: Vec<Allocation>,
}

impl Allocations {
    /// Returns the log in a file.
    pub fn at(path: &Path) -> Allocations {
        Allocations { path: path.into(), ..Allocations::default() }
    }

    /// Reads the lines that are new.
    pub fn read(&mut self) {
        let text = std::fs::read(&self.path).unwrap_or_default();
        let new = text.get(self.read_bytes..).unwrap_or_default();
        // The last line may still be written.
        let whole = new.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines = String::from_utf8_lossy(&new[..whole]);
        self.all.extend(lines.lines().filter_map(Allocation::read));
        self.read_bytes += whole;
    }

    /// Returns the memory that was allocated last at an address.
    pub fn at_address(&self, address: u64) -> Option<&Allocation> {
        self.all.iter().rev().find(|known| known.addresses.contains(&address))
    }

    /// Returns a sentence for each pattern that names none of this memory, though it could.
    pub fn unmatched(&self, only: &str) -> Vec<String> {
        let patterns = check(only).unwrap_or_default();
        let is_unmatched = |pattern: &&AddressPattern<'_>| {
            pattern.part.is_allocated() && self.all.iter().all(|known| known.bytes_in(pattern) == 0)
        };
        let sentence = |pattern: &AddressPattern<'_>| {
            format!("{pattern} named no memory: the program had {}", self.totals())
        };
        patterns.iter().filter(is_unmatched).map(sentence).collect()
    }

    /// Returns all memory by part and class, as text.
    fn totals(&self) -> String {
        let mut totals: BTreeMap<(AddressPart, u64), u64> = BTreeMap::new();
        for known in &self.all {
            let end = known.offset + (known.addresses.end - known.addresses.start);
            let total = totals.entry((known.part, known.class_bytes)).or_default();
            *total = end.max(*total);
        }
        let text = |((part, class), bytes): (&(AddressPart, u64), &u64)| match class {
            0 => format!("{part} {}", Bytes(*bytes)),
            class => format!("{part}:{} {}", Bytes(*class), Bytes(*bytes)),
        };
        let all: Vec<String> = totals.iter().map(text).collect();
        if all.is_empty() { "nothing that fills a large page".into() } else { all.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_read_as_it_grows() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut log = Allocations::at(file.path());
        let first = "heap 0 0 4194304 8388608\nmapping 33554432 0 1073741824 41943040\nmapp";
        std::fs::write(file.path(), first).unwrap();
        log.read();
        assert_eq!(log.at_address(4 << 20).unwrap().part, AddressPart::Heap);
        let mapping = log.at_address(1 << 30).unwrap();
        assert_eq!(mapping.pattern(0..2 << 20).to_string(), "mapping:32M@0-2M");
        assert_eq!(log.at_address(2 << 30), None);
        std::fs::write(
            file.path(),
            format!("{first}ing 0 0 0 0\nnoise\narena 0 0 8589934592 67108864\n"),
        )
        .unwrap();
        log.read();
        assert_eq!(log.at_address(8 << 30).unwrap().part, AddressPart::Arena);
        let unmatched = log.unmatched("heap@6M-,heap@8M-,mapping:32M,mapping:64M,stack");
        assert_eq!(unmatched.len(), 2, "{unmatched:?}");
        assert!(unmatched[0].starts_with("heap@8M- named no memory: the program had heap 8M"));
    }
}
