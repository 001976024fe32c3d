//! What is asked for: `heap=2M,stack=64K,anon=2M,text=2M,bss=2M,data=2M`, in the grammar of ppgsz.
//!
//! A size is an integer, in octal or hexadecimal too if it says so (`0x`, `0`), and one of B K M G T
//! in either case; 0 leaves the choice to the kernel. `hugetlb:2M` asks for pages of a pool.

use super::{PageSettings, Unavailable};
use crate::pages::pagemap::{Mapping, Segment};
use pagetax_core::units::PageSize;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;

/// A part of a program that can be asked for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// bss and brk; of a command that we start, also what its malloc maps.
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

/// All parts, and their names on the command line.
pub const PARTS: [(Part, &str); 6] = [
    (Part::Heap, "heap"),
    (Part::Stack, "stack"),
    (Part::Anon, "anon"),
    (Part::Text, "text"),
    (Part::Data, "data"),
    (Part::Bss, "bss"),
];

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = PARTS.iter().find(|(part, _)| part == self).map_or("", |(_, name)| name);
        f.pad(name)
    }
}

/// The pages that are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wish {
    /// Whatever the kernel gives.
    Kernels,
    /// The base page, or transparent pages of this size.
    Size(PageSize),
    /// Pages of the hugetlb pool of this size.
    Hugetlb(PageSize),
}

impl fmt::Display for Wish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wish::Kernels => f.pad("0"),
            Wish::Size(size) => size.fmt(f),
            Wish::Hugetlb(size) => write!(f, "hugetlb:{size}"),
        }
    }
}

impl Serialize for Wish {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Wish {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let size = |text: &str| text.parse().map_err(serde::de::Error::custom);
        match text.strip_prefix("hugetlb:") {
            Some(pool) => size(pool).map(Wish::Hugetlb),
            None if text == "0" => Ok(Wish::Kernels),
            None => size(&text).map(Wish::Size),
        }
    }
}

/// Why an option is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdviceError {
    /// Nothing is asked for.
    #[error("no page size is given\n  remedy: name one, as in -o heap=2M,stack=2M")]
    Empty,
    /// Not `part=size`.
    #[error("`{0}` is no option\n  remedy: heap, stack, anon, text, data or bss, as in heap=2M")]
    NoOption(String),
    /// No number, or none that is a power of two.
    #[error("`{0}`: invalid page size\n  remedy: a power of two such as 4K, 64K or 2M, or 0")]
    Malformed(String),
    /// Not a size of this system.
    #[error("`{0}`: {1}\n  remedy: one of {2}")]
    Unsupported(String, String, String),
}

/// Parts, and the pages asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Advice(BTreeMap<Part, Wish>);

impl Advice {
    /// Reads the options of a command line; of several for one part the last counts.
    pub fn parse<'a>(
        options: impl IntoIterator<Item = &'a str>,
        system: &PageSettings,
    ) -> Result<Advice, AdviceError> {
        let mut advice = Advice::default();
        for option in options.into_iter().flat_map(|text| text.split(',')) {
            let no_option = || AdviceError::NoOption(option.into());
            let (name, value) = option.split_once('=').ok_or_else(no_option)?;
            let (part, _) = PARTS.iter().find(|(_, known)| *known == name).ok_or_else(no_option)?;
            advice.0.insert(*part, wish(option, value, system)?);
        }
        if advice.0.is_empty() { Err(AdviceError::Empty) } else { Ok(advice) }
    }

    /// All parts whose pages can be changed back, left to the kernel. Data is of files, and shared with others; code is
    /// named for what was moved to anonymous memory.
    pub fn undoable() -> Advice {
        let parts = [Part::Heap, Part::Stack, Part::Anon, Part::Bss, Part::Text];
        Advice(parts.map(|part| (part, Wish::Kernels)).into())
    }

    /// What is asked for a part, by name.
    pub fn get(&self, part: Part) -> Option<Wish> {
        self.0.get(&part).copied()
    }

    /// Parts and wishes, by part.
    pub fn iter(&self) -> impl Iterator<Item = (Part, Wish)> + '_ {
        self.0.iter().map(|(part, wish)| (*part, *wish))
    }

    /// The part that decides about a mapping, if it is asked for. bss belongs to the heap unless it is
    /// named itself; anonymous memory that is executed is code, be it compiled at run time or moved.
    pub fn part_of(&self, mapping: &Mapping) -> Option<Part> {
        let part = match mapping.segment {
            Segment::Anon if mapping.execute && !mapping.write => Part::Text,
            Segment::Bss if self.0.contains_key(&Part::Bss) => Part::Bss,
            Segment::Heap | Segment::Bss => Part::Heap,
            Segment::Stack => Part::Stack,
            Segment::Anon => Part::Anon,
            Segment::Text => Part::Text,
            Segment::Data => Part::Data,
            Segment::ReadOnly | Segment::Shared | Segment::Kernel => return None,
        };
        self.0.contains_key(&part).then_some(part)
    }

    /// Also asks for a part, unless something is asked for it already.
    pub fn or(mut self, part: Part, wish: Wish) -> Advice {
        self.0.entry(part).or_insert(wish);
        self
    }

    /// Without a part.
    pub fn without(mut self, part: Part) -> Advice {
        self.0.remove(&part);
        self
    }

    /// Whether any part asks for more than base pages.
    pub fn wants_large(&self) -> bool {
        let base = rustix::param::page_size() as u64;
        self.0.values().any(|wish| match wish {
            Wish::Kernels => false,
            Wish::Size(size) => size.bytes() > base,
            Wish::Hugetlb(_) => true,
        })
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options: Vec<String> =
            self.0.iter().map(|(part, wish)| format!("{part}={wish}")).collect();
        f.pad(&options.join(","))
    }
}

fn wish(option: &str, value: &str, system: &PageSettings) -> Result<Wish, AdviceError> {
    let malformed = || AdviceError::Malformed(option.into());
    let names = |sizes: &[PageSize]| sizes.iter().map(PageSize::to_string).collect::<Vec<_>>();
    let pools = system.hugetlb_sizes();
    if let Some(text) = value.strip_prefix("hugetlb:") {
        let size = PageSize::new(number(text).ok_or_else(malformed)?).map_err(|_| malformed())?;
        return match pools.contains(&size) {
            true => Ok(Wish::Hugetlb(size)),
            false => Err(AdviceError::Unsupported(
                option.into(),
                format!("this system has no {size} pages"),
                names(&pools)
                    .iter()
                    .map(|name| format!("hugetlb:{name}"))
                    .collect::<Vec<_>>()
                    .join(", "),
            )),
        };
    }
    let bytes = number(value).ok_or_else(malformed)?;
    if bytes == 0 {
        return Ok(Wish::Kernels);
    }
    let size = PageSize::new(bytes).map_err(|_| malformed())?;
    let base = PageSize::new(rustix::param::page_size() as u64).ok();
    let known: Vec<PageSize> = base.into_iter().chain(system.sizes()).collect();
    if known.contains(&size) {
        return Ok(Wish::Size(size));
    }
    let mut all = names(&known);
    all.extend(names(&pools).iter().map(|name| format!("hugetlb:{name}")));
    let why = Unavailable::no_size(size, system).why;
    Err(AdviceError::Unsupported(option.into(), why, all.join(", ")))
}

/// 0, or a power of two; none for anything else.
fn number(text: &str) -> Option<u64> {
    let hexadecimal = text.starts_with("0x") || text.starts_with("0X");
    let (digits, shift) = match text.chars().next_back()?.to_ascii_uppercase() {
        'B' if !hexadecimal => (&text[..text.len() - 1], 0),
        'K' => (&text[..text.len() - 1], 10),
        'M' => (&text[..text.len() - 1], 20),
        'G' => (&text[..text.len() - 1], 30),
        'T' => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let (digits, base) = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None if digits.len() > 1 && digits.starts_with('0') => (&digits[1..], 8),
        None => (digits, 10),
    };
    let only_digits = digits.chars().all(|digit| digit.is_digit(base));
    let value = u64::from_str_radix(digits, base).ok().filter(|_| only_digits)?;
    let bytes = value.checked_mul(1 << shift)?;
    (bytes == 0 || bytes.is_power_of_two()).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::settings::tests::tree;
    use super::*;

    #[test]
    fn sizes_as_the_original_reads_them() {
        let good = [
            ("2M", 2 << 20),
            ("2m", 2 << 20),
            ("8192", 8192),
            ("8192b", 8192),
            ("0x2000", 8192),
            ("020000", 8192),
            ("0", 0),
            ("1T", 1 << 40),
        ];
        for (text, bytes) in good {
            assert_eq!(number(text), Some(bytes), "{text}");
        }
        for bad in ["", "M", "3M", "2MB", "-4K", "+4K", "4 K", "0x", "0x+8", "16777216T", "µ"] {
            assert_eq!(number(bad), None, "{bad}");
        }
    }

    #[test]
    fn options_are_read_and_refused() {
        let (_keep, system) = tree("madvise", "never", "inherit", 0);
        let parse = |text: &str| Advice::parse([text], &system);
        let advice = parse("heap=2M,stack=64K,text=0,bss=4K,anon=hugetlb:2M").unwrap();
        assert_eq!(advice.to_string(), "heap=2M,stack=64K,anon=hugetlb:2M,text=0,bss=4K");
        assert_eq!(Advice::parse(["heap=4K", "heap=2M"], &system).unwrap().to_string(), "heap=2M");
        assert!(matches!(parse("heap"), Err(AdviceError::NoOption(_))));
        assert!(matches!(parse("hep=2M"), Err(AdviceError::NoOption(_))));
        assert!(matches!(parse("heap=2M,"), Err(AdviceError::NoOption(_))));
        assert!(matches!(parse("heap=3M"), Err(AdviceError::Malformed(_))));
        assert!(matches!(parse("heap="), Err(AdviceError::Malformed(_))));
        let unsupported = parse("heap=1G").unwrap_err().to_string();
        assert!(unsupported.contains("no 1G pages") && unsupported.contains("hugetlb:2M"));
        assert!(matches!(parse("heap=hugetlb:1G"), Err(AdviceError::Unsupported(..))));
        assert_eq!(Advice::parse([], &system), Err(AdviceError::Empty));
    }

    #[test]
    fn bss_is_heap_unless_it_is_named() {
        let (_keep, system) = tree("madvise", "never", "inherit", 0);
        let parse = |text| Advice::parse([text], &system).unwrap();
        let own = crate::pages::pagemap::read(std::process::id()).unwrap();
        let of = |segment| own.mappings.iter().find(|m| m.segment == segment).unwrap();
        let part = |text, mapping: &Mapping| parse(text).part_of(mapping);
        let mut mapping = of(Segment::Heap).clone();
        assert_eq!(part("heap=2M", &mapping), Some(Part::Heap));
        mapping.segment = Segment::Bss;
        assert_eq!(part("heap=2M", &mapping), Some(Part::Heap));
        assert_eq!(part("heap=2M,bss=4K", &mapping), Some(Part::Bss));
        assert_eq!(part("anon=2M", &mapping), None);
        mapping.segment = Segment::Anon;
        assert_eq!(part("anon=2M", &mapping), Some(Part::Anon));
        (mapping.execute, mapping.write) = (true, false);
        assert_eq!(part("anon=2M,text=2M", &mapping), Some(Part::Text));
        assert_eq!(Advice::undoable().part_of(of(Segment::Kernel)), None);
    }
}
