//! Quantities with their units as types: an address is not a size, a size is not a time.
//!
//! Invariant: only this module parses the quantities that a user writes (`2M`, `40ms`), and only it
//! prints those that a user reads. `K`, `M`, `G`, `T` are powers of 1024.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// An error: the text is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// Not a number.
    #[error("`{0}` is not {1}; write a number with a unit, as in {2}")]
    Malformed(String, &'static str, &'static str),
    /// No unit after the number of a time.
    #[error("`{0}` has no unit: write {0}s for seconds; the units are {1}")]
    NoUnit(String, &'static str),
    /// An unknown unit after the number.
    #[error("`{0}` has the unknown unit `{1}`; known are {2}")]
    UnknownUnit(String, String, &'static str),
    /// A value beyond 64 bits.
    #[error("`{0}` is too large")]
    TooLarge(String),
    /// A page size that is not a power of two of at least 512 bytes.
    #[error("`{0}` is no page size: page sizes are powers of two, such as 4K, 64K or 2M")]
    NoPageSize(String),
}

const SIZE_UNITS: &str = "K, M, G, T (powers of 1024), with or without a trailing B or iB";
const TIME_UNITS: &str = "ns, us, ms, s, min, h";

/// Splits `12.5ms` into its number and its unit.
fn split_unit(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end =
        text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    (&text[..end], text[end..].trim())
}

/// Returns `number × factor`, exact for whole numbers.
fn scale(text: &str, number: &str, factor: u64) -> Option<Result<u64, UnitError>> {
    let digits: String = number.chars().filter(|c| *c != '_').collect();
    if let Ok(whole) = digits.parse::<u64>() {
        return Some(whole.checked_mul(factor).ok_or_else(|| UnitError::TooLarge(text.into())));
    }
    if !digits.contains('.') && digits.chars().all(|c| c.is_ascii_digit()) && !digits.is_empty() {
        return Some(Err(UnitError::TooLarge(text.into())));
    }
    let value = digits.parse::<f64>().ok()? * factor as f64;
    if value >= u64::MAX as f64 {
        return Some(Err(UnitError::TooLarge(text.into())));
    }
    Some(Ok(value.round() as u64))
}

/// Returns the factor of a size suffix (`K`, `MiB`, `gb`, empty), or none.
pub(crate) fn size_factor(unit: &str) -> Option<u64> {
    let lower = unit.to_ascii_lowercase();
    let shift = match lower.strip_suffix("ib").or(lower.strip_suffix('b')).unwrap_or(&lower) {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    Some(1 << shift)
}

/// Returns the factor of a time suffix in nanoseconds, or none.
pub(crate) fn time_factor(unit: &str) -> Option<u64> {
    Some(match unit {
        "ns" => 1,
        "us" | "µs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    })
}

/// An amount of memory in bytes.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let malformed = || UnitError::Malformed(text.into(), "a size", "64K, 2M or 1.5G");
        let (number, unit) = split_unit(text);
        if number.is_empty() {
            return Err(malformed());
        }
        let factor = size_factor(unit)
            .ok_or_else(|| UnitError::UnknownUnit(text.into(), unit.into(), SIZE_UNITS))?;
        scale(text, number, factor).ok_or_else(malformed)?.map(Bytes)
    }
}

impl fmt::Display for Bytes {
    /// Prints the largest unit that needs at most one decimal: `4K`, `1.5G`, `408M`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1u64 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")];
        let text = match units.iter().find(|(size, _)| self.0 >= *size) {
            Some((size, unit)) if self.0.is_multiple_of(*size) => {
                format!("{}{unit}", self.0 / size)
            }
            Some((size, unit)) => format!("{:.1}{unit}", self.0 as f64 / *size as f64),
            None => format!("{}B", self.0),
        };
        f.pad(&text)
    }
}

/// A length of time in nanoseconds, real or virtual.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Returns seconds, for printing and for ratios.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

impl FromStr for Nanos {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let malformed = || UnitError::Malformed(text.into(), "a time", "800us, 40ms or 2.5s");
        let (number, unit) = split_unit(text);
        if number.is_empty() {
            return Err(malformed());
        }
        let factor = time_factor(unit).ok_or_else(|| match unit {
            "" => UnitError::NoUnit(text.into(), TIME_UNITS),
            unit => UnitError::UnknownUnit(text.into(), unit.into(), TIME_UNITS),
        })?;
        scale(text, number, factor).ok_or_else(malformed)?.map(Nanos)
    }
}

impl fmt::Display for Nanos {
    /// Prints about three significant digits: `1.44 µs`, `350 ms`, `96.1 s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0 as f64;
        let (value, unit) = match self.0 {
            0..1_000 => return f.pad(&format!("{} ns", self.0)),
            1_000..1_000_000 => (ns / 1e3, "µs"),
            1_000_000..1_000_000_000 => (ns / 1e6, "ms"),
            _ => (ns / 1e9, "s"),
        };
        let text = match value {
            v if v < 10.0 => format!("{v:.2} {unit}"),
            v if v < 100.0 => format!("{v:.1} {unit}"),
            v => format!("{v:.0} {unit}"),
        };
        f.pad(&text)
    }
}

/// The size in bytes of a page: a power of two of at least 512.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(try_from = "u64", into = "u64")]
pub struct PageSize(u64);

impl PageSize {
    /// 4 KiB: the base page of x86-64.
    pub const K4: PageSize = PageSize(4 << 10);
    /// 2 MiB: the huge page of x86-64.
    pub const M2: PageSize = PageSize(2 << 20);
    /// 1 GiB: the largest page of x86-64.
    pub const G1: PageSize = PageSize(1 << 30);

    /// Returns a page size. Errors unless `bytes` is a power of two of at least 512.
    pub fn new(bytes: u64) -> Result<Self, UnitError> {
        if bytes.is_power_of_two() && bytes >= 512 {
            Ok(PageSize(bytes))
        } else {
            Err(UnitError::NoPageSize(Bytes(bytes).to_string()))
        }
    }

    /// Returns the size in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Returns log2 of the size: an address shifted right by it is a page number.
    pub const fn shift(self) -> u32 {
        self.0.trailing_zeros()
    }
}

impl TryFrom<u64> for PageSize {
    type Error = UnitError;
    fn try_from(bytes: u64) -> Result<Self, UnitError> {
        PageSize::new(bytes)
    }
}

impl From<PageSize> for u64 {
    fn from(size: PageSize) -> u64 {
        size.0
    }
}

impl FromStr for PageSize {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let bytes = text.parse::<Bytes>()?.0;
        PageSize::new(bytes).map_err(|_| UnitError::NoPageSize(text.into()))
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Bytes(self.0), f)
    }
}

/// A virtual address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct VirtAddr(pub u64);

impl VirtAddr {
    /// Returns the number of the page that contains this address.
    pub const fn page(self, size: PageSize) -> u64 {
        self.0 >> size.shift()
    }
}

impl fmt::Display for VirtAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!("4K".parse(), Ok(Bytes(4096)));
        assert_eq!("1.5G".parse(), Ok(Bytes(3 << 29)));
        assert_eq!("2MiB".parse(), Ok(Bytes(2 << 20)));
        assert_eq!("427_683_520".parse(), Ok(Bytes(427_683_520)));
        assert!(matches!("4X".parse::<Bytes>(), Err(UnitError::UnknownUnit(..))));
        assert!(matches!("".parse::<Bytes>(), Err(UnitError::Malformed(..))));
        assert!(matches!("-4K".parse::<Bytes>(), Err(UnitError::Malformed(..))));
        assert!(matches!("99999999T".parse::<Bytes>(), Err(UnitError::TooLarge(_))));
        assert!(matches!("99999999999999999999999".parse::<Bytes>(), Err(UnitError::TooLarge(_))));
    }

    #[test]
    fn times_need_a_unit() {
        assert_eq!("800us".parse(), Ok(Nanos(800_000)));
        assert_eq!("1.5min".parse(), Ok(Nanos(90_000_000_000)));
        assert!(matches!("40".parse::<Nanos>(), Err(UnitError::NoUnit(..))));
    }

    #[test]
    fn page_sizes_are_powers_of_two() {
        assert_eq!("2M".parse(), Ok(PageSize::M2));
        assert!("3M".parse::<PageSize>().is_err());
        assert!("0".parse::<PageSize>().is_err());
    }

    #[test]
    fn printing_is_short() {
        assert_eq!(Bytes(427_683_520).to_string(), "407.9M");
        assert_eq!(PageSize::M2.to_string(), "2M");
        assert_eq!(Nanos(1_440).to_string(), "1.44 µs");
        assert_eq!(Nanos(96_100_000_000).to_string(), "96.1 s");
    }
}
