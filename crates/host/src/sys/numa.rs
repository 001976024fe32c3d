//! Which memory node the pages of a process lie on: move_pages(2), asked without moving any.

pub use rustix::process::Pid;
use std::io;

/// Pages asked for at once.
const BATCH: usize = 4096;

/// For each address the node of its page; none where no page of the process's own is.
pub fn nodes(pid: Pid, addresses: &[u64]) -> io::Result<Vec<Option<u32>>> {
    let mut nodes = Vec::with_capacity(addresses.len());
    for batch in addresses.chunks(BATCH) {
        let mut status = vec![-1 as libc::c_int; batch.len()];
        // SAFETY: `batch` holds as many addresses as `status` has places; they are only looked up in
        // the other process, never dereferenced here. Without target nodes nothing is moved.
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
        // Below 0 is an errno: no page, or the kernel's page of zeros.
        nodes.extend(status.into_iter().map(|node| u32::try_from(node).ok()));
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use super::super::mapping::{Mapping, Request, Source};
    use super::*;

    #[test]
    fn touched_pages_have_a_node() {
        let request = Request { source: Source::Anon, len: 2 << 12, align: 1 << 12, hugetlb: None };
        let mapping = Mapping::new(request).unwrap();
        mapping.advise(libc::MADV_NOHUGEPAGE).unwrap();
        mapping.store(0, 1);
        let start = mapping.address();
        match nodes(rustix::process::getpid(), &[start, start + (1 << 12)]) {
            Ok(found) => assert!(found[0].is_some() && found[1].is_none(), "{found:?}"),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOSYS), "{error}"),
        }
    }
}
