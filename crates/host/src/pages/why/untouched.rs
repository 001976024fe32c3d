//! Memory on huge pages that was probably never touched: base pages of zeros inside them.
//!
//! Each huge page is read by process_vm_readv(2), which needs the right to trace the process. Beyond a limit
//! only evenly spaced huge pages are read; the bounds then hold whatever the others contain.

use super::facts::Facts;
use crate::sys::remote;
use pagetax_core::counter::Reading;
use rustix::process::Pid;

/// The most huge pages that are read: 1 GiB, in half a second or so.
const HUGE_PAGES_MAX: usize = 512;

/// Reads the bytes of zeros on huge pages of anonymous memory.
pub(super) fn read(facts: &Facts) -> Reading {
    let huge = facts.huge.bytes();
    let anonymous = || facts.map.mappings.iter().filter(|m| super::is_anonymous(m));
    if anonymous().any(|mapping| mapping.unplaced.is_some()) {
        return Reading::Missing(
            "the kernel does not show which pages are huge (Linux 6.7 does)".into(),
        );
    }
    let runs = anonymous().filter(|m| m.hugetlb.is_none() && m.read).flat_map(|m| &m.runs);
    let huge_runs = runs.filter(|run| run.page == Some(facts.huge) && run.anon_bytes > 0);
    let pages: Vec<u64> =
        huge_runs.flat_map(|run| (run.start.0..run.end.0).step_by(huge as usize)).collect();
    let Some(pid) = Pid::from_raw(facts.pid() as i32) else {
        return Reading::Missing("no process has this number".into());
    };
    count(&pages, huge, facts.map.base_page.bytes(), |at, buffer| remote::read(pid, at, buffer))
}

/// Counts the zeros on some huge pages, by a function that reads memory.
fn count(
    pages: &[u64],
    huge: u64,
    base: u64,
    read: impl Fn(u64, &mut [u8]) -> std::io::Result<()>,
) -> Reading {
    let step = pages.len().div_ceil(HUGE_PAGES_MAX).max(1);
    let mut buffer = vec![0; huge as usize];
    let (mut seen, mut zeros) = (0, 0);
    for page in pages.iter().step_by(step) {
        if let Err(error) = read(*page, &mut buffer) {
            return Reading::Missing(format!("its memory cannot be read: {error}"));
        }
        let is_zero = |page: &&[u8]| page.iter().all(|byte| *byte == 0);
        zeros += buffer.chunks_exact(base as usize).filter(is_zero).count() as u64 * base;
        seen += huge;
    }
    let all = pages.len() as u64 * huge;
    if seen == all {
        return Reading::Measured(zeros);
    }
    let value = (u128::from(zeros) * u128::from(all) / u128::from(seen.max(1))) as u64;
    Reading::Derived { value, low: zeros, high: zeros + (all - seen) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fills every other base page of huge pages with even numbers with zeros.
    fn half_of_even(at: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        buffer.fill(1);
        if (at / (2 << 20)).is_multiple_of(2) {
            buffer.chunks_exact_mut(4096).step_by(2).for_each(|page| page.fill(0));
        }
        Ok(())
    }

    fn pages(count: u64) -> Vec<u64> {
        (0..count).map(|page| page * (2 << 20)).collect()
    }

    #[test]
    fn zeros_are_counted_by_base_page() {
        assert_eq!(count(&pages(4), 2 << 20, 4096, half_of_even), Reading::Measured(2 << 20));
        assert_eq!(count(&[], 2 << 20, 4096, half_of_even), Reading::Measured(0));
    }

    #[test]
    fn beyond_the_limit_the_bounds_hold() {
        let count = count(&pages(1024), 2 << 20, 4096, half_of_even);
        // Only even huge pages were read.
        let zeros = 512 << 20;
        let high = zeros + (512 << 21);
        assert_eq!(count, Reading::Derived { value: 1024 << 20, low: zeros, high });
    }

    #[test]
    fn memory_that_may_not_be_read_is_missing() {
        let refused = |_, _: &mut [u8]| Err(std::io::Error::from_raw_os_error(libc::EPERM));
        let Reading::Missing(why) = count(&pages(1), 2 << 20, 4096, refused) else { panic!() };
        assert!(why.contains("not permitted"), "{why}");
    }
}
