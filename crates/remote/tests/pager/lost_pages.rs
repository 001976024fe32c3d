//! Lost pages, and exits of processes: SIGBUS for one page, not for its neighbours.

use super::*;

/// Overwrites a page in the store behind the pager's back.
pub fn spoil(store: &dyn PageStore, page: u64) {
    let sums = [PageMac::of(&[1; PAGE_BYTES])];
    let run = PutRun { first: page, pages: &[1; PAGE_BYTES], macs: &sums };
    store.writer().unwrap().put(RegionId(1), &[run]).unwrap();
}

/// Runs the body in a process of its own, and passes it a directory of its own. Returns the output,
/// or `None` if this user may not page.
pub fn alone(body: impl FnOnce(&std::path::Path)) -> Option<std::process::Output> {
    const CHILD: &str = "PAGETAX_TEST_ALONE";
    if let Some(directory) = std::env::var_os(CHILD) {
        body(directory.as_ref());
        std::process::exit(0);
    }
    let directory = tempfile::tempdir().unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let thread = std::thread::current();
    let this_test = thread.name().expect("the name of a test");
    child.args(["--exact", this_test, "--nocapture"]).env(CHILD, directory.path());
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(skip) = text.lines().find(|line| line.contains("SKIP: ")) {
        println!("{skip}");
        return None;
    }
    Some(output)
}

pub fn signal_of(output: &std::process::Output) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&output.status)
}

pub fn a_page_that_the_store_lost_is_sigbus() {
    let ended = alone(|_| {
        let store = embedded();
        let Some(mut region) = map(store.clone(), 4 * MIB, resident(MIB)) else { return };
        region.as_mut_slice().fill(9);
        spoil(&*store, 2);
        assert_eq!(region.as_slice()[PAGE_BYTES], 9);
        println!("{}", region.as_slice()[2 * PAGE_BYTES]);
    });
    let Some(output) = ended else { return };
    assert_eq!(signal_of(&output), Some(libc::SIGBUS), "{output:?}");
}

/// Returns true if a system call can read a page.
pub fn is_readable(page: &[u8]) -> bool {
    let written = std::io::Write::write_all(&mut tempfile::tempfile().unwrap(), page);
    assert_ne!(
        written.as_ref().err().map(|error| error.raw_os_error() == Some(libc::EFAULT)),
        Some(false)
    );
    written.is_ok()
}

pub fn a_lost_page_that_is_dropped_is_one_again() {
    let store = embedded();
    let Some(mut region) = map(store.clone(), 4 * MIB, resident(MIB)) else { return };
    region.as_mut_slice().fill(9);
    let lost = [2, 3, 5, 77];
    lost.iter().for_each(|page| spoil(&*store, *page));
    for page in 0..100 {
        let bytes = &region.as_slice()[page * PAGE_BYTES..(page + 1) * PAGE_BYTES];
        assert_eq!(is_readable(bytes), !lost.contains(&(page as u64)), "page {page}");
    }
    region.discard(PAGE_BYTES, 4 * PAGE_BYTES);
    region.discard(77 * PAGE_BYTES, PAGE_BYTES);
    for round in 0..3 {
        for page in [1, 2, 3, 4, 77] {
            let bytes = &mut region.as_mut_slice()[page * PAGE_BYTES..(page + 1) * PAGE_BYTES];
            assert!(bytes.iter().all(|byte| *byte == round), "page {page}");
            bytes.fill(round + 1);
        }
        region.evict_all();
        assert!(
            [2, 77].iter().all(|page| !region.is_resident(&region.as_slice()[page * PAGE_BYTES]))
        );
    }
    assert!(!is_readable(&region.as_slice()[5 * PAGE_BYTES..6 * PAGE_BYTES]), "it was not dropped");
}

#[allow(unsafe_code)]
pub fn both_sides_of_a_fork_have_lost_pages() {
    let ended = alone(|_| {
        let store = embedded();
        let Some(mut region) = map(store.clone(), 4 * MIB, resident(MIB)) else { return };
        region.as_mut_slice().fill(9);
        let lost = [0, 2, 3, 77];
        lost.iter().for_each(|page| spoil(&*store, *page));
        let page =
            |number: usize| &region.as_slice()[number * PAGE_BYTES..(number + 1) * PAGE_BYTES];
        let are_right =
            || (0..1024).all(|number| is_readable(page(number)) != lost.contains(&(number as u64)));
        assert!(are_right());
        assert!(region.before_fork(false));
        // SAFETY: the child uses only locks and memory that glibc allows after a fork, and ends by
        // _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let right = region.restart_in_child(StoreInChild::Inherited).is_ok() && are_right();
            // SAFETY: ends at once.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        region.after_fork();
        assert!(are_right());
        let mut status = 0;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    });
    let Some(output) = ended else { return };
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

/// Checks that a process ends if the empty file cannot be mapped over a lost page. Otherwise the
/// waiting thread would fault for ever.
#[test]
fn a_process_ends_whose_lost_page_cannot_be_given_sigbus() {
    let ended = alone(|_| {
        let store = embedded();
        let log: pagetax_remote::pager::Log = Arc::new(|line: &str| println!("{line}"));
        let options = PagerOptions {
            features: Features::NoMoveNoPoison,
            unreachable_limit: std::time::Duration::from_millis(100),
            log: Some(log),
            ..PagerOptions::resident(MIB)
        };
        let Some(mut region) = map(store.clone(), 4 * MIB, options) else { return };
        region.as_mut_slice().fill(9);
        spoil(&*store, 2);
        use_up_mappings();
        std::hint::black_box(region.as_slice()[2 * PAGE_BYTES]);
    });
    let Some(output) = ended else { return };
    assert_eq!(signal_of(&output), Some(libc::SIGABRT), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("vm.max_map_count"), "{output:?}");
}

/// Maps pages that the kernel cannot merge with their neighbours, until it refuses more.
#[allow(unsafe_code)]
pub fn use_up_mappings() {
    const COUNT: usize = 1 << 22;
    let map = |at: *mut libc::c_void, bytes, protection, more| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | more;
        // SAFETY: fresh mappings, or parts of one, of memory that no code uses.
        unsafe { libc::mmap(at, bytes, protection, flags, -1, 0) }
    };
    let all = map(std::ptr::null_mut(), COUNT * PAGE_BYTES, libc::PROT_NONE, 0);
    assert_ne!(all, libc::MAP_FAILED);
    for page in (1..COUNT).step_by(2) {
        let at = all.wrapping_byte_add(page * PAGE_BYTES);
        if map(at, PAGE_BYTES, libc::PROT_READ, libc::MAP_FIXED) == libc::MAP_FAILED {
            // The last mappings, which split none.
            while map(std::ptr::null_mut(), PAGE_BYTES, libc::PROT_READ, 0) != libc::MAP_FAILED
                && map(std::ptr::null_mut(), PAGE_BYTES, libc::PROT_NONE, 0) != libc::MAP_FAILED
            {
            }
            return;
        }
    }
    panic!("this process may have any number of mappings");
}

/// Checks that copies work after the program has changed its root directory: they need /proc.
#[test]
fn pages_leave_whose_program_has_another_root() {
    let ended = alone(|directory| {
        let options = PagerOptions { features: Features::NoMove, ..PagerOptions::resident(MIB) };
        let Some(mut region) = map(embedded(), 8 * MIB, options) else { return };
        if let Err(error) = std::os::unix::fs::chroot(directory) {
            return println!("SKIP: chroot: {error}");
        }
        // A copy must not wait for a missing page.
        let first = region.as_ptr() as usize;
        for round in 0..8u64 {
            for (number, page) in region.as_mut_slice().chunks_exact_mut(PAGE_BYTES).enumerate() {
                page[..8].copy_from_slice(&(number as u64 + round).to_le_bytes());
                if number % 7 == 0 {
                    drop_pages(first + number * PAGE_BYTES, 1);
                }
            }
        }
        assert!(region.counts().page_out_count > 4_000, "{:?}", region.counts());
    });
    let Some(output) = ended else { return };
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}
