//! Installs fetched pages: maps their bytes, or moves the frames of a spare into place.
//!
//! Invariants: a page is installed under its cluster's lock, and the cluster is queued for eviction
//! after that. If a page cannot be installed, it becomes [`PageLocation::Stored`] again and its
//! room is given back. The threads that wait for it fault again.

use super::shared::SharedPager;
use super::stats::add;
use super::sys::memory::Pages;
use super::table::{CLUSTER_PAGES, HeldCluster, PageLocation, cluster_of};
use crate::page::{PAGE_BYTES, RUN_PAGES_MAX};
use std::ops::Range;

/// Maps the bytes of fetched pages.
pub fn install(shared: &SharedPager, first: usize, bytes: &[u8]) {
    let count = bytes.len() / PAGE_BYTES;
    by_cluster(shared, first..first + count, |held, part| {
        let bytes = &bytes[(part.start - first) * PAGE_BYTES..(part.end - first) * PAGE_BYTES];
        install_in(shared, held, part.start, bytes);
    });
}

/// Moves the frames of a full spare into place. Returns true if no frame is left in it.
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

/// Installs fetched pages, those of each cluster under its lock.
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
    shared.count_made_resident(pages.len());
}

/// Maps a fetched page, but wakes no thread.
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
    shared.count_made_resident(1);
}

fn install_in(shared: &SharedPager, held: &HeldCluster<'_>, first: usize, bytes: &[u8]) {
    let to = shared.arena.span(first, bytes.len() / PAGE_BYTES);
    let whole = shared.uffd.copy(to, bytes);
    for (page, bytes) in (first..).zip(bytes.chunks_exact(PAGE_BYTES)) {
        let to = shared.arena.span(page, 1);
        // A run that crosses the end of a mapping is refused as a whole; then install page by page.
        let there = whole.is_ok() || shared.uffd.copy(to, bytes).is_ok();
        let place = if there { PageLocation::Resident } else { PageLocation::Stored };
        held.set(page, held.get(page).at(place));
        if !there {
            shared.give_room(1);
            shared.uffd.wake(to);
        }
    }
}
