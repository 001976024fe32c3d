//! Ranges of addresses, as `pagetax pmap -A` is given them.

use anyhow::{Result, anyhow, bail};
use pagetax_core::units::VirtAddr;

/// Parses `START[,END]`, hexadecimal with or without 0x.
pub fn range(text: &str) -> Result<(VirtAddr, Option<VirtAddr>)> {
    let address = |text: &str| {
        let digits = text.strip_prefix("0x").unwrap_or(text);
        u64::from_str_radix(digits, 16).map(VirtAddr).map_err(|_| {
            anyhow!("`{text}` is no address; write hexadecimal digits, as in 7f0000000000")
        })
    };
    let Some((start, end)) = text.split_once(',') else { return Ok((address(text)?, None)) };
    let (start, end) = (address(start)?, address(end)?);
    if end <= start {
        bail!("the end {end} is not after the start {start}");
    }
    Ok((start, Some(end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(range("7f00,0x8000").unwrap(), (VirtAddr(0x7f00), Some(VirtAddr(0x8000))));
        assert_eq!(range("10").unwrap(), (VirtAddr(16), None));
        for bad in ["", "x", "10,", "20,10", "10,10"] {
            assert!(range(bad).is_err(), "{bad}");
        }
    }
}
