//! What `pagetax pmap` is given: processes and addresses.

use anyhow::{Result, anyhow, bail};
use pagetax_core::units::VirtAddr;
use std::str::FromStr;

/// A process, by id or by its folder in /proc.
pub struct Operand(pub u32);

impl FromStr for Operand {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> Result<Operand> {
        let id = text.strip_prefix("/proc/").unwrap_or(text).trim_end_matches('/');
        if let Ok(pid) = id.parse() {
            return Ok(Operand(pid));
        }
        if std::path::Path::new(text).is_file() {
            bail!("{text} is a file; core files are not read\n  remedy: name a process: ps -e");
        }
        bail!("`{text}` is no process id\n  remedy: list processes with ps -e")
    }
}

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
    fn processes() {
        let pid = |text: &str| text.parse::<Operand>().map(|operand| operand.0);
        assert_eq!(pid("12").unwrap(), 12);
        assert_eq!(pid("/proc/12/").unwrap(), 12);
        for bad in ["", "-1", "x", "/proc/", "/etc/passwd", "99999999999"] {
            assert!(format!("{:#}", pid(bad).unwrap_err()).contains("remedy"), "{bad}");
        }
    }

    #[test]
    fn addresses() {
        assert_eq!(range("7f00,0x8000").unwrap(), (VirtAddr(0x7f00), Some(VirtAddr(0x8000))));
        assert_eq!(range("10").unwrap(), (VirtAddr(16), None));
        for bad in ["", "x", "10,", "20,10", "10,10"] {
            assert!(range(bad).is_err(), "{bad}");
        }
    }
}
