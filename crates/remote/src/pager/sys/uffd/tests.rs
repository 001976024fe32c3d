//! Moves of pages under concurrent drops, against the running kernel.

use super::*;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Reproduces the state that a kernel leaves when it moves a page and does not count it, beside a
/// real obstacle.
#[test]
fn a_page_that_is_gone_from_where_it_was_has_been_moved() {
    let uffd = match Uffd::open(true, Serving::Thread, Features::All) {
        Ok((uffd, _)) if !uffd.features().can_move() => {
            return println!("SKIP: this kernel cannot move pages (Linux 6.8)");
        }
        Ok((uffd, _)) => uffd,
        Err(error) => return println!("SKIP: userfaultfd: {error}"),
    };
    let (mut from, mut to) = (Pages::reserve(4).unwrap(), Pages::reserve(4).unwrap());
    from.bytes_mut(0, 4).fill(1);
    uffd.register_target(&to).unwrap();
    assert_eq!(uffd.move_pages(to.span(0, 1), from.span(0, 1)), (1, None));
    assert_eq!(uffd.move_pages(to.span(0, 3), from.span(0, 3)), (3, None));
    assert!(to.bytes(0, 3).iter().all(|byte| *byte == 1));
    to.bytes_mut(3, 1).fill(2);
    assert_eq!(uffd.move_pages(to.span(2, 2), from.span(2, 2)), (1, Some(Errno::EXIST)));
    assert_eq!((from.bytes(3, 1)[0], to.bytes(3, 1)[0]), (1, 2));
}

/// Checks that moves end. If it is asked to skip holes, Linux 6.18 hangs after some hundred such
/// moves.
#[test]
fn moving_ends_while_pages_are_dropped() {
    const COUNT: usize = 64;
    const MOVES: usize = 4_000;
    let uffd = match Uffd::open(true, Serving::Thread, Features::All) {
        Ok((uffd, _)) if !uffd.features().can_move() => {
            return println!("SKIP: this kernel cannot move pages (Linux 6.8)");
        }
        Ok((uffd, _)) => uffd,
        Err(error) => return println!("SKIP: userfaultfd: {error}"),
    };
    let (mut from, to) = (Pages::reserve(COUNT).unwrap(), Pages::reserve(COUNT).unwrap());
    uffd.register_target(&to).unwrap();
    let dropped = from.span(0, COUNT).address() as usize;
    let stop = Arc::new(AtomicBool::new(false));
    let (moved, moves) = mpsc::channel();
    let dropper = std::thread::spawn({
        let stop = stop.clone();
        move || {
            for page in (0..COUNT).cycle().take_while(|_| !stop.load(Relaxed)) {
                let at = (dropped + page * PAGE_BYTES) as *mut _;
                // SAFETY: a page that is only written to and moved; no code relies on its bytes.
                unsafe { libc::madvise(at, PAGE_BYTES, libc::MADV_DONTNEED) };
            }
        }
    });
    std::thread::spawn(move || {
        let mut count_moved = 0;
        while count_moved < MOVES {
            from.bytes_mut(0, COUNT).iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 1);
            let result = uffd.move_pages(to.span(0, COUNT), from.span(0, COUNT));
            to.span(0, COUNT).advise(Advice::LinuxDontNeed).unwrap();
            if result.0 > 0 {
                count_moved += 1;
                moved.send(()).unwrap();
            }
        }
        stop.store(true, Relaxed);
        dropper.join().unwrap();
    });
    for _ in 0..MOVES {
        moves.recv_timeout(Duration::from_secs(60)).expect("a move that ends");
    }
}
