//! Installs fetched pages: maps their bytes, or moves the frames of a spare into place.
//!
//! Invariants: a page is installed under its cluster's lock, and its cluster queued for eviction after that. One
//! that cannot be installed is [`PageLocation::Stored`] again, its room is given back, and who waits for it asks again.

use super::shared::SharedPager;
use super::stats::add;
use super::sys::memory::Pages;
use super::table::{CLUSTER_PAGES, HeldCluster, PageLocation, cluster_of};
use crate::page::{PAGE_BYTES, RUN_PAGES_MAX};
use std::ops::Range;

/// Maps fetched pages.
pub fn install(shared: &SharedPager, first: usize, bytes: &[u8]) {
    let count = bytes.len() / PAGE_BYTES;
    by_cluster(shared, first..first + count, |held, part| {
        let bytes = &bytes[(part.start - first) * PAGE_BYTES..(part.end - first) * PAGE_BYTES];
        install_in(shared, held, part.start, bytes);
    });
}

/// Maps the pages of a full spare; whether none of its frames is left.
pub fn install_spare(shared: &SharedPager, first: usize, spare: &Pages) -> bool {
    let mut left = RUN_PAGES_MAX;
    by_cluster(shared, first..first + RUN_PAGES_MAX, |held, part| {
        let (to, from) = (shared.arena.span(part.start, part.len()), part.start - first);
        let (moved, _) = shared.uffd.move_pages(to, spare.span(from, part.len()));
        left -= moved;
        let there = part.start + moved;
        (part.start..there)
            .for_each(|page| held.set(page, held.get(page).at(PageLocation::Resident)));
        if there < part.end {
            install_in(shared, held, there, spare.bytes(from + moved, part.end - there));
        }
        shared.uffd.wake(to);
    });
    add(&shared.stats.moved_in_count, RUN_PAGES_MAX - left);
    left == 0
}

/// Has pages that were fetched installed, those of a cluster under its lock.
fn by_cluster(
    shared: &SharedPager,
    pages: Range<usize>,
    mut install: impl FnMut(&HeldCluster<'_>, Range<usize>),
) {
    let mut page = pages.start;
    while page < pages.end {
        let cluster = cluster_of(page);
        let until = ((cluster + 1) * CLUSTER_PAGES).min(pages.end);
        let held = shared.table.hold(cluster);
        install(&held, page..until);
        drop(held);
        shared.enqueue(cluster);
        page = until;
    }
    add(&shared.stats.page_in_count, pages.len());
}

/// Maps a fetched page, but wakes nobody.
pub fn install_one(shared: &SharedPager, page: usize, bytes: &[u8]) {
    let held = shared.table.hold(cluster_of(page));
    let there = shared.uffd.copy_without_wake(shared.arena.span(page, 1), bytes).is_ok();
    let place = if there { PageLocation::Resident } else { PageLocation::Stored };
    held.set(page, held.get(page).at(place));
    drop(held);
    shared.enqueue(cluster_of(page));
    if !there {
        shared.give_room(1);
    }
    add(&shared.stats.page_in_count, 1);
}

fn install_in(shared: &SharedPager, held: &HeldCluster<'_>, first: usize, bytes: &[u8]) {
    let to = shared.arena.span(first, bytes.len() / PAGE_BYTES);
    let whole = shared.uffd.copy(to, bytes);
    for (page, bytes) in (first..).zip(bytes.chunks_exact(PAGE_BYTES)) {
        let to = shared.arena.span(page, 1);
        // A run that leaves its mapping is refused as a whole; then page by page.
        let there = whole.is_ok() || shared.uffd.copy(to, bytes).is_ok();
        let place = if there { PageLocation::Resident } else { PageLocation::Stored };
        held.set(page, held.get(page).at(place));
        if !there {
            shared.give_room(1);
            shared.uffd.wake(to);
        }
    }
}
