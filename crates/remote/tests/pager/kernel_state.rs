//! Pages that the program drops, locks, protects or pins, and system calls into missing ones.

use super::*;

pub fn dropped_pages_are_zeros_and_leave_the_store() {
    let store = Arc::new(EmbeddedStore::new(Bytes(64 * MIB)));
    let Some(mut region) = map(store.clone(), 8 * MIB, resident(MIB)) else { return };
    let mut rng = Rng::new(1);
    region.as_mut_slice().fill_with(|| rng.next_u64() as u8);
    assert!(store.used_bytes() > 6 * MIB);
    region.discard(5, 8 * MIB as usize - 5 - PAGE_BYTES);
    let bytes = region.as_slice();
    assert!(bytes[..PAGE_BYTES].iter().any(|byte| *byte != 0), "the part of a page stays");
    assert!(bytes[8 * MIB as usize - PAGE_BYTES..].iter().any(|byte| *byte != 0));
    assert!(bytes[PAGE_BYTES..8 * MIB as usize - PAGE_BYTES].iter().all(|byte| *byte == 0));
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while store.used_bytes() > MIB {
        assert!(std::time::Instant::now() < until, "{} bytes stay", store.used_bytes());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    drop(region);
    assert_eq!(store.used_bytes(), 0);
}

#[allow(unsafe_code)]
pub fn locked_pages_are_not_dropped() {
    let Some(mut region) = map(embedded(), 8 * MIB, resident(4 * MIB)) else { return };
    let pages = 8;
    region.as_mut_slice()[..2 * pages * PAGE_BYTES].fill(1);
    let locked = &region.as_slice()[..pages * PAGE_BYTES];
    // SAFETY: neither call changes memory.
    let lock = |call: unsafe extern "C" fn(*const libc::c_void, usize) -> i32| unsafe {
        call(locked.as_ptr().cast(), locked.len())
    };
    assert_eq!(lock(libc::mlock), 0);
    assert!(!region.discard(0, 2 * pages * PAGE_BYTES), "locked pages count as dropped");
    assert!(region.as_slice()[..pages * PAGE_BYTES].iter().all(|byte| *byte == 1));
    let locked = &region.as_slice()[..pages * PAGE_BYTES];
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munlock(locked.as_ptr().cast(), locked.len()) }, 0);
    assert!(region.discard(0, 2 * pages * PAGE_BYTES));
    assert!(region.as_slice()[..2 * pages * PAGE_BYTES].iter().all(|byte| *byte == 0));
}

#[allow(unsafe_code)]
pub fn memory_that_may_not_be_written_to_leaves() {
    const BYTES: usize = 8 * MIB as usize;
    let Some(mut region) = map(embedded(), BYTES as u64, resident(MIB)) else { return };
    for (number, page) in (0..).zip(region.as_mut_slice().chunks_exact_mut(PAGE_BYTES)) {
        fill(page, number, 1);
    }
    let start = region.as_ptr();
    let protect = |at: usize, bytes: usize, protection| {
        // SAFETY: pages of the region; the test touches none that it protects.
        let result = unsafe { libc::mprotect(start.add(at).cast(), bytes, protection) };
        assert_eq!(result, 0);
    };
    let settles = |what: &str| {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while region.resident_bytes() > MIB {
            let resident = Bytes(region.resident_bytes());
            assert!(std::time::Instant::now() < until, "{resident} of {what} memory stay");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    };
    protect(0, BYTES, libc::PROT_READ);
    for _ in 0..2 {
        for (number, page) in (0..).zip(region.as_slice().chunks_exact(PAGE_BYTES)) {
            assert_is(page, number, 1);
        }
        settles("read-only");
    }
    // The resident pages of the first half are evicted while the second half is read.
    protect(0, BYTES / 2, libc::PROT_NONE);
    for (number, page) in (0..).zip(region.as_slice().chunks_exact(PAGE_BYTES)) {
        if number as usize * PAGE_BYTES >= BYTES / 2 {
            assert_is(page, number, 1);
        }
    }
    settles("inaccessible");
    protect(0, BYTES, libc::PROT_READ | libc::PROT_WRITE);
    for (number, page) in (0..).zip(region.as_mut_slice().chunks_exact_mut(PAGE_BYTES)) {
        assert_is(page, number, 1);
        fill(page, number, 2);
    }
    for (number, page) in (0..).zip(region.as_slice().chunks_exact(PAGE_BYTES)) {
        assert_is(page, number, 2);
    }
}

pub fn the_system_writes_into_missing_pages() {
    let Some(mut region) = map(embedded(), 8 * MIB, resident(MIB)) else { return };
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let wanted = {
        let mut bytes = vec![0; 4 * MIB as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
        bytes
    };
    let bytes = &mut region.as_mut_slice()[100..100 + wanted.len()];
    std::os::unix::fs::FileExt::read_exact_at(&file, bytes, 0).unwrap();
    assert!(region.as_slice()[100..100 + wanted.len()] == wanted);
}

/// Pins memory for a device, as direct I/O does while it runs. Closing the result unpins it.
#[allow(unsafe_code)]
pub fn pin(bytes: &[u8]) -> std::io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    const REGISTER_BUFFERS: libc::c_int = 0;
    let checked = |result: libc::c_long| match result {
        -1 => Err(std::io::Error::last_os_error()),
        result => Ok(result as i32),
    };
    // `struct io_uring_params`: plain integers, zeros ask for nothing special.
    let mut params = [0u64; 15];
    let part = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
    // SAFETY: the first call fills `params`, which is as long as the structure, and its result is a
    // descriptor of our own. The second reads one iovec; nothing is ever read or written through it.
    unsafe {
        let ring = checked(libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()))?;
        let ring = std::os::fd::OwnedFd::from_raw_fd(ring);
        let number = std::os::fd::AsRawFd::as_raw_fd(&ring);
        checked(libc::syscall(libc::SYS_io_uring_register, number, REGISTER_BUFFERS, &part, 1))?;
        Ok(ring)
    }
}

/// Checks that a pinned page is not evicted: the device's later writes would be lost.
#[test]
fn a_page_that_is_pinned_for_a_device_stays() {
    if !can_move() {
        return;
    }
    let Some(mut region) = map(embedded(), 8 * MIB, resident(MIB)) else { return };
    region.as_mut_slice()[3 * PAGE_BYTES..4 * PAGE_BYTES].fill(7);
    let pinned = match pin(&region.as_slice()[3 * PAGE_BYTES..4 * PAGE_BYTES]) {
        Ok(pinned) => pinned,
        Err(error) => return println!("SKIP: io_uring: {error}"),
    };
    region.as_mut_slice()[4 * PAGE_BYTES..].fill(8);
    region.evict_all();
    let is_resident = |page: usize| region.is_resident(&region.as_slice()[page * PAGE_BYTES]);
    assert!(is_resident(3) && !is_resident(4), "{:?}", region.counts());
    assert!(region.counts().stuck_count > 0, "{:?}", region.counts());
    drop(pinned);
    // The kernel releases the ring's buffers with a delay.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while is_resident(3) {
        assert!(std::time::Instant::now() < until, "it stays: {:?}", region.counts());
        std::thread::sleep(std::time::Duration::from_millis(10));
        region.evict_all();
    }
    assert!(region.as_slice()[3 * PAGE_BYTES..4 * PAGE_BYTES].iter().all(|byte| *byte == 7));
}
