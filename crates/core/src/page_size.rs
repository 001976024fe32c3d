//! Requests for page sizes, in one grammar: `PART=SIZE[,PART=SIZE…]`, or a bare `SIZE` where the reader of
//! the request knows the part.
//!
//! A SIZE is `default` or `0` (the system's choice), `base`, a number such as `2M`, or `hugetlb:2M` (from a
//! reserved pool; `hugetlb-2M`, as the trial is called, means the same). Numbers are those of Solaris's ppgsz
//! and mpss.so.1: decimal, octal (`020000`) or hexadecimal (`0x2000`), with one of B K M G T in either case.
//! Jobs, `diagnose`, `whatif`, `ppgsz`, `trapstat`, `build` and the preload library all read page sizes here.

use crate::units::{PageSize, UnitError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// A part of a program's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryPart {
    /// bss and brk. Of a command that pagetax starts, malloc's mappings too.
    Heap,
    /// The main thread's stack.
    Stack,
    /// Other private anonymous memory.
    Anon,
    /// Code of the program and its libraries.
    Text,
    /// Initialised data of the program and its libraries.
    Data,
    /// Data that starts as zeros.
    Bss,
}

/// The parts, and their names in requests.
const PARTS: [(MemoryPart, &str); 6] = [
    (MemoryPart::Heap, "heap"),
    (MemoryPart::Stack, "stack"),
    (MemoryPart::Anon, "anon"),
    (MemoryPart::Text, "text"),
    (MemoryPart::Data, "data"),
    (MemoryPart::Bss, "bss"),
];

impl fmt::Display for MemoryPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(PARTS.iter().find(|(part, _)| part == self).map_or("", |(_, name)| name))
    }
}

/// The way to get pages of a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum How {
    /// The machine's ordinary pages of this size, where it has them (THP, mTHP, MPSS).
    Preferred,
    /// Pages of a reserved pool (hugetlb).
    Hugetlb,
}

/// The ways that a request names: `WORD:SIZE`.
const WAYS: [(How, &str); 1] = [(How::Hugetlb, "hugetlb")];

/// The pages that are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PageSizeRequest {
    /// The system's choice.
    Default,
    /// Base pages by all means.
    Base,
    /// Pages of this size, by this way.
    Size(PageSize, How),
}

impl PageSizeRequest {
    /// Returns the request for ordinary pages of a size.
    pub const fn preferred(size: PageSize) -> PageSizeRequest {
        PageSizeRequest::Size(size, How::Preferred)
    }

    /// Returns the page size on a system with this base page; none if the choice is the system's.
    pub fn size(self, base: PageSize) -> Option<PageSize> {
        match self {
            PageSizeRequest::Default => None,
            PageSizeRequest::Base => Some(base),
            PageSizeRequest::Size(size, _) => Some(size),
        }
    }

    /// Returns the way that is asked for.
    pub fn how(self) -> How {
        if let PageSizeRequest::Size(_, how) = self { how } else { How::Preferred }
    }

    /// Returns the page size that must come from a reserved pool, if one must.
    pub fn hugetlb(self) -> Option<PageSize> {
        if let PageSizeRequest::Size(size, How::Hugetlb) = self { Some(size) } else { None }
    }
}

impl FromStr for PageSizeRequest {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let named = WAYS.iter().find_map(|(how, word)| {
            Some((*how, text.strip_prefix(word)?.strip_prefix([':', '-'])?))
        });
        let (how, number) = named.unwrap_or((How::Preferred, text));
        match (text, how, page_bytes(number.as_bytes())) {
            ("default", ..) | (_, How::Preferred, Some(0)) => Ok(PageSizeRequest::Default),
            ("base", ..) => Ok(PageSizeRequest::Base),
            (_, _, bytes) => bytes
                .and_then(|bytes| PageSize::new(bytes).ok())
                .map(|size| PageSizeRequest::Size(size, how))
                .ok_or_else(|| UnitError::NoPageSize(text.into())),
        }
    }
}

impl fmt::Display for PageSizeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PageSizeRequest::Default => f.pad("default"),
            PageSizeRequest::Base => f.pad("base"),
            PageSizeRequest::Size(size, how) => match WAYS.iter().find(|(known, _)| known == how) {
                Some((_, word)) => f.pad(&format!("{word}:{size}")),
                None => size.fmt(f),
            },
        }
    }
}

impl TryFrom<String> for PageSizeRequest {
    type Error = UnitError;
    fn try_from(text: String) -> Result<Self, UnitError> {
        text.parse()
    }
}

impl From<PageSizeRequest> for String {
    fn from(request: PageSizeRequest) -> String {
        request.to_string()
    }
}

/// Parses the number of a page size: a power of two, or 0 for the system's choice.
///
/// Neither allocates nor panics: the preload library calls it before the program's main.
pub fn page_bytes(text: &[u8]) -> Option<u64> {
    // In a hexadecimal number a trailing `b` is a digit.
    let is_hexadecimal = matches!(text, [b'0', b'x' | b'X', ..]);
    let (digits, shift) = match text.split_last()? {
        (b'b' | b'B', rest) if !is_hexadecimal => (rest, 0),
        (b'k' | b'K', rest) => (rest, 10),
        (b'm' | b'M', rest) => (rest, 20),
        (b'g' | b'G', rest) => (rest, 30),
        (b't' | b'T', rest) => (rest, 40),
        _ => (text, 0),
    };
    let (digits, base) = match digits {
        [b'0', b'x' | b'X', rest @ ..] => (rest, 16),
        [b'0', rest @ ..] if !rest.is_empty() => (rest, 8),
        _ => (digits, 10),
    };
    if digits.is_empty() {
        return None;
    }
    let mut value: u64 = 0;
    for digit in digits {
        let digit = (*digit as char).to_digit(base)?;
        value = value.checked_mul(u64::from(base))?.checked_add(u64::from(digit))?;
    }
    let bytes = value.checked_mul(1 << shift)?;
    (bytes == 0 || bytes.is_power_of_two()).then_some(bytes)
}

/// An error in a request for page sizes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PageSizeError {
    /// The request is empty.
    #[error("no page size is given\n  hint: name one, as in heap=2M,stack=2M")]
    Empty,
    /// The text before `=` names no part, or there is no `=` where a part is needed.
    #[error(
        "`{0}` names no part\n  hint: heap, stack, anon, text, data or bss, as in heap=2M,stack=64K"
    )]
    NoPart(String),
    /// The size is none.
    #[error(
        "`{0}`: invalid page size\n  hint: page sizes are powers of two such as 4K, 64K or 2M; or hugetlb:2M, \
         base, default; by part heap=2M,stack=64K"
    )]
    NoSize(String),
}

/// Page sizes by part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PartSizes(BTreeMap<MemoryPart, PageSizeRequest>);

impl PartSizes {
    /// Parses texts of the form `PART=SIZE[,PART=SIZE…]` into one request; of several sizes for one part the
    /// last counts.
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<PartSizes, PageSizeError> {
        let mut sizes = PartSizes::default();
        for option in texts.into_iter().flat_map(|text| text.split(',')) {
            sizes.insert(option)?;
        }
        if sizes.0.is_empty() { Err(PageSizeError::Empty) } else { Ok(sizes) }
    }

    /// Parses alternatives: each bare SIZE is one, for the parts `bare`; the PART=SIZE of one text are one
    /// together. A bare `default` leaves all parts to the system.
    pub fn alternatives<'a>(
        texts: impl IntoIterator<Item = &'a str>,
        bare: &[MemoryPart],
    ) -> Result<Vec<PartSizes>, PageSizeError> {
        let mut all = Vec::new();
        for text in texts {
            let mut named = None;
            for word in text.split(',') {
                if word.contains('=') {
                    let index = *named.get_or_insert_with(|| {
                        all.push(PartSizes::default());
                        all.len() - 1
                    });
                    all[index].insert(word)?;
                    continue;
                }
                let request = word.parse().map_err(|_| PageSizeError::NoSize(word.into()))?;
                all.push(match request {
                    PageSizeRequest::Default => {
                        PartSizes::of(&PARTS.map(|(part, _)| part), request)
                    }
                    _ => PartSizes::of(bare, request),
                });
            }
        }
        Ok(all)
    }

    fn insert(&mut self, option: &str) -> Result<(), PageSizeError> {
        let no_part = || PageSizeError::NoPart(option.into());
        let (name, size) = option.split_once('=').ok_or_else(no_part)?;
        let (part, _) = PARTS.iter().find(|(_, known)| *known == name).ok_or_else(no_part)?;
        let request = size.parse().map_err(|_| PageSizeError::NoSize(option.into()))?;
        self.0.insert(*part, request);
        Ok(())
    }

    /// Returns the same request for several parts.
    pub fn of(parts: &[MemoryPart], request: PageSizeRequest) -> PartSizes {
        PartSizes(parts.iter().map(|part| (*part, request)).collect())
    }

    /// Returns the request for a part that is named.
    pub fn get(&self, part: MemoryPart) -> Option<PageSizeRequest> {
        self.0.get(&part).copied()
    }

    /// Returns the request that all named parts share, if they do.
    pub fn uniform(&self) -> Option<PageSizeRequest> {
        let first = *self.0.values().next()?;
        self.0.values().all(|request| *request == first).then_some(first)
    }

    /// Returns the parts that are named, in order.
    pub fn parts(&self) -> Vec<MemoryPart> {
        self.0.keys().copied().collect()
    }

    /// Returns each named part and its request.
    pub fn iter(&self) -> impl Iterator<Item = (MemoryPart, PageSizeRequest)> + '_ {
        self.0.iter().map(|(part, request)| (*part, *request))
    }

    /// Adds a request for a part, unless the part is named already.
    pub fn or(mut self, part: MemoryPart, request: PageSizeRequest) -> PartSizes {
        self.0.entry(part).or_insert(request);
        self
    }

    /// Removes what is asked for one part.
    pub fn without(mut self, part: MemoryPart) -> PartSizes {
        self.0.remove(&part);
        self
    }
}

impl fmt::Display for PartSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options: Vec<String> =
            self.0.iter().map(|(part, request)| format!("{part}={request}")).collect();
        f.pad(&options.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_solaris_reads_them() {
        let good: [(&str, u64); 12] = [
            ("4M", 4 << 20),
            ("2m", 2 << 20),
            ("64k", 64 << 10),
            ("8192", 8192),
            ("8192B", 8192),
            ("8192b", 8192),
            ("0x2000", 8192),
            ("0x2000K", 8192 << 10),
            ("020000", 8192),
            ("0", 0),
            ("1g", 1 << 30),
            ("1T", 1 << 40),
        ];
        for (text, bytes) in good {
            assert_eq!(page_bytes(text.as_bytes()), Some(bytes), "{text}");
        }
        for bad in [
            "",
            "M",
            "3M",
            "4MB",
            "-4K",
            "+4K",
            "4 K",
            "0x",
            "0x+8",
            "99999999999999999999",
            "16777216T",
            "four",
            "µ",
        ] {
            assert_eq!(page_bytes(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn requests_are_read_and_written() {
        for text in ["default", "base", "64K", "2M", "hugetlb:2M"] {
            assert_eq!(text.parse::<PageSizeRequest>().unwrap().to_string(), text);
        }
        assert_eq!("0".parse(), Ok(PageSizeRequest::Default));
        for bad in ["", "3M", "hugetlb:", "hugetlb:0", "hugetlb:base", "hugetlb-", "2MB", "real"] {
            assert!(bad.parse::<PageSizeRequest>().is_err(), "{bad}");
        }
    }

    #[test]
    fn parts_are_read_and_refused() {
        let parse = |text| PartSizes::parse([text]);
        let sizes = parse("heap=2M,stack=64K,text=default,bss=4K,anon=hugetlb:2M").unwrap();
        assert_eq!(sizes.to_string(), "heap=2M,stack=64K,anon=hugetlb:2M,text=default,bss=4K");
        assert_eq!(PartSizes::parse(["heap=4K", "heap=2M"]).unwrap().to_string(), "heap=2M");
        for bad in ["heap", "hep=2M", "heap=2M,", "2M", "all=2M"] {
            assert!(matches!(parse(bad), Err(PageSizeError::NoPart(_))), "{bad}");
        }
        for bad in ["heap=3M", "heap=", "heap=4M+stack=64K"] {
            assert!(matches!(parse(bad), Err(PageSizeError::NoSize(_))), "{bad}");
        }
        assert_eq!(PartSizes::parse([]), Err(PageSizeError::Empty));
    }

    #[test]
    fn bare_sizes_are_alternatives_and_named_parts_go_together() {
        let heap = [MemoryPart::Heap];
        let read = |texts: &[&str]| -> Vec<String> {
            let all = PartSizes::alternatives(texts.iter().copied(), &heap).unwrap();
            all.iter().map(PartSizes::to_string).collect()
        };
        assert_eq!(read(&["4K,hugetlb:2M"]), ["heap=4K", "heap=hugetlb:2M"]);
        // As the trial is called.
        assert_eq!(read(&["hugetlb-2M"]), ["heap=hugetlb:2M"]);
        assert_eq!(read(&["stack=2M,4K,text=2M"]), ["stack=2M,text=2M", "heap=4K"]);
        assert_eq!(read(&["stack=2M", "text=2M"]), ["stack=2M", "text=2M"]);
        assert!(read(&["default"])[0].contains("bss=default"));
        for old in ["stack-2M", "real", "heap=4M+stack=64K"] {
            let error = PartSizes::alternatives([old], &heap).unwrap_err().to_string();
            assert!(error.contains("hugetlb:2M") && error.contains("heap=2M,stack=64K"), "{error}");
        }
    }
}
