//! Lists of CPUs, as the kernel writes them and users do: `0-3,8`.

use super::Root;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// A number that no CPU has: NR_CPUS is 8,192 at most.
const CPUS_MAX: u32 = 1 << 16;

/// A list of CPU numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(Vec<RangeInclusive<u32>>);

/// The error for a text that is no list of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no list of CPUs such as 0,2-3")]
pub struct NoCpuList(String);

impl FromStr for CpuList {
    type Err = NoCpuList;
    fn from_str(text: &str) -> Result<Self, NoCpuList> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
            (first <= last && last < CPUS_MAX).then_some(first..=last)
        };
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        ranges.map(CpuList).ok_or_else(|| NoCpuList(text.into()))
    }
}

impl CpuList {
    /// Returns the number of each CPU in the list.
    pub fn numbers(&self) -> Vec<u32> {
        self.0.iter().cloned().flatten().collect()
    }

    /// Returns true if the list has this CPU.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.iter().any(|range| range.contains(&cpu))
    }
}

/// Reads the numbers of the CPUs that are online.
pub fn online_cpus(root: &Root) -> Result<Vec<u32>, String> {
    const PATH: &str = "/sys/devices/system/cpu/online";
    let list: CpuList = root.text(PATH)?.parse().map_err(|error| format!("{PATH}: {error}"))?;
    Ok(list.numbers())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_numbers_and_ranges() {
        let list: CpuList = "0,2-3".parse().unwrap();
        assert_eq!(list.numbers(), [0, 2, 3]);
        assert_eq!([0, 1, 2, 3, 4].map(|cpu| list.contains(cpu)), [true, false, true, true, false]);
        for wrong in ["", "a", "3-2", "1,,2", "0-4294967295"] {
            assert!(wrong.parse::<CpuList>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_no_list_is_an_error_and_not_one_cpu() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        assert!(online_cpus(&root).unwrap_err().contains("cpu/online"));
        std::fs::create_dir_all(root.path("/sys/devices/system/cpu")).unwrap();
        std::fs::write(root.path("/sys/devices/system/cpu/online"), "0-x\n").unwrap();
        assert!(online_cpus(&root).unwrap_err().contains("`0-x`"));
        std::fs::write(root.path("/sys/devices/system/cpu/online"), "0-1,4\n").unwrap();
        assert_eq!(online_cpus(&root).unwrap(), [0, 1, 4]);
    }
}
