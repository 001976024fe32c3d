//! The number of files that `mlock-cycle` locks at one time on this machine.
//!
//! The program of 2001 finds it by locking anonymous blocks until that fails. Linux 2.4 let a process lock
//! half of memory. Today the limit is RLIMIT_MEMLOCK, and root has none. So the share of memory that a run
//! may lock ends the search as well.

use crate::sys::mapping::{OwnedMapping, Request, Source};
use pagetax_core::quantity::Params;
use std::collections::BTreeMap;

/// The slots of the program of 2001.
const SLOTS_MAX: u64 = 6;
const STEP_BYTES_MIN: usize = 64 << 10;

/// Returns the parameters of built-in jobs that this machine sets itself.
pub fn job_params(lockable_bytes_max: u64) -> BTreeMap<String, Params> {
    let lockable = lockable_bytes(lockable_bytes_max);
    let slots = format!("max(1, min({SLOTS_MAX}, {lockable}B / $file_size))");
    BTreeMap::from([("mlock-cycle".to_string(), Params::from([("slots".to_string(), slots)]))])
}

/// Locks anonymous memory until that fails or `max` bytes are locked, and returns how much it was. The locks
/// get no pages, as MLOCK_ONFAULT defers these.
fn lockable_bytes(max: u64) -> u64 {
    let len = usize::try_from(max).unwrap_or(usize::MAX) / STEP_BYTES_MIN * STEP_BYTES_MIN;
    let request = Request { source: Source::Anon, len, align: 0, hugetlb: None };
    let Ok(memory) = OwnedMapping::new(request) else { return 0 };
    let (mut locked, mut step) = (0, len);
    while step >= STEP_BYTES_MIN && locked < len {
        match memory.lock_on_fault(locked, step) {
            Ok(()) => locked += step.min(len - locked),
            Err(_) => step /= 2,
        }
    }
    (locked / STEP_BYTES_MIN * STEP_BYTES_MIN) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_ends_at_the_limit_of_the_user_or_at_the_most() {
        let most = 1 << 20;
        let found = lockable_bytes(most);
        assert!(found <= most, "{found}");
        if rustix::process::geteuid().is_root() {
            assert_eq!(found, most, "root has no limit of its own");
        }
    }
}
