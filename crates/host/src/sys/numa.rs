//! The memory nodes of a process's pages: move_pages(2), which reports them if no target is given.

pub use rustix::process::Pid;
use std::io;

/// The number of pages in one call.
const BATCH: usize = 4096;

/// Returns the node of the page at each address, or none where the process has no page.
pub fn nodes(pid: Pid, addresses: &[u64]) -> io::Result<Vec<Option<u32>>> {
    let mut nodes = Vec::with_capacity(addresses.len());
    for batch in addresses.chunks(BATCH) {
        let mut status = vec![-1 as libc::c_int; batch.len()];
        // SAFETY: `batch` holds as many addresses as `status` has places. The kernel looks them up in the
        // other process and never dereferences them here. Without target nodes it moves nothing.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                pid.as_raw_nonzero().get(),
                batch.len(),
                batch.as_ptr(),
                std::ptr::null::<libc::c_int>(),
                status.as_mut_ptr(),
                0,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        // A negative status is an errno: there is no page, or only the zero page.
        nodes.extend(status.into_iter().map(|node| u32::try_from(node).ok()));
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use super::super::mapping::{OwnedMapping, Request, Source};
    use super::*;

    #[test]
    fn touched_pages_have_a_node() {
        let request = Request { source: Source::Anon, len: 2 << 12, align: 1 << 12, hugetlb: None };
        let mapping = OwnedMapping::new(request).unwrap();
        mapping.advise(libc::MADV_NOHUGEPAGE).unwrap();
        mapping.store(0, 1);
        let start = mapping.address();
        match nodes(rustix::process::getpid(), &[start, start + (1 << 12)]) {
            Ok(found) => assert!(found[0].is_some() && found[1].is_none(), "{found:?}"),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOSYS), "{error}"),
        }
    }
}
