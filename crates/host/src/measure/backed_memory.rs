//! Free memory that the hypervisor has backed.
//!
//! A hypervisor may take back memory that its guest has left free for a while (free page reporting). The
//! next access waits until it is back: on one such machine 5 ms for each 2M, instead of 0.3 ms. So the
//! memory for a measurement is touched and freed just before it. The kernel hands out first the memory
//! that was freed last.

use crate::measure::environment::is_guest;
use crate::procfs::{Root, memory_cgroup};
use crate::sys::mapping::{OwnedMapping, Request, Source};
use crate::sys::process::fork;
use pagetax_core::units::PageSize;
use procfs_core::Meminfo;

/// Returns the memory that is available to this machine and to this cgroup, in bytes.
pub fn available_bytes(root: &Root) -> Result<u64, String> {
    let meminfo: Meminfo = root.parse("/proc/meminfo")?;
    let mut available = meminfo.mem_available.unwrap_or(meminfo.mem_free);
    if let Ok(cgroup) = memory_cgroup(root, std::process::id()) {
        let value = |key: &str| cgroup.get(key).and_then(|reading| reading.value());
        if let (Some(limit), Some(usage)) = (value("limit_bytes"), value("usage_bytes")) {
            available = available.min(limit.saturating_sub(usage));
        }
    }
    Ok(available)
}

/// Touches and frees memory, so that the next allocations get backed memory. Takes at most half of the
/// available memory. Returns the bytes touched; 0 without a hypervisor.
pub fn bring(bytes: u64) -> u64 {
    let root = Root::default();
    let bytes = bytes.min(available_bytes(&root).unwrap_or(0) / 2);
    if bytes == 0 || !is_guest(&root) {
        return 0;
    }
    let (len, align) = (bytes as usize, PageSize::M2.bytes() as usize);
    let request = Request { source: Source::Anon, len, align, hugetlb: None };
    // Measuring without it is less accurate, not wrong.
    let Ok(mapping) = OwnedMapping::new(request) else { return 0 };
    // A kernel without huge pages refuses this; base pages do as well.
    let _ = mapping.advise(libc::MADV_HUGEPAGE);
    // A child touches it: commands started later would inherit this process's peak of resident memory.
    let touched = fork(|| {
        let page = rustix::param::page_size();
        (0..mapping.len()).step_by(page).for_each(|offset| mapping.store(offset as u64, 1));
        0
    });
    match touched.and_then(|mut child| child.wait()) {
        Ok(_) => mapping.len() as u64,
        Err(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::ran_alone;
    use crate::sys::process::process_usage;

    #[test]
    fn no_more_than_half_is_taken_and_all_is_given_back() {
        if ran_alone() {
            return;
        }
        let root = Root::default();
        let before = available_bytes(&root).unwrap();
        let brought = bring(32 << 20);
        assert_eq!(brought, if is_guest(&root) { 32 << 20 } else { 0 });
        assert_eq!(bring(0), 0);
        let own = process_usage().resident_bytes_max;
        bring(256 << 20);
        let grown = process_usage().resident_bytes_max - own;
        assert!(grown < 64 << 20, "{grown} bytes of {before} became our own");
    }
}
