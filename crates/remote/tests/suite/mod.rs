//! The contract of every page store. The stores hold at least 512 and at most 100,000 random pages.

use pagetax_core::access::{Rng, derive_seed};
use pagetax_remote::page::{PAGE_BYTES, PageMac, PageRun, RUN_PAGES_MAX};
use pagetax_remote::store::{PageReader, PageStore, PageWriter, PutRun, RegionId, StoreError};
use std::collections::BTreeMap;

/// Runs the suite, each part on a store of its own.
pub fn all(store: &mut dyn FnMut() -> Box<dyn PageStore>) {
    pages_come_back(&*store());
    pages_that_come_together_are_proven(&*store());
    the_last_put_wins(&*store());
    regions_are_apart(&*store());
    what_was_not_put_is_lost(&*store());
    a_wrong_sum_is_noticed(&*store());
    bad_requests_are_refused(&*store());
    a_full_store_says_so_and_keeps_the_rest(&*store());
    threads_work_side_by_side(&*store());
    agrees_with_a_map(&*store());
}

/// Returns a page of random bytes, half of which compress. Each seed gives another page.
pub fn page(seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(derive_seed(seed, 1, 2, 3));
    let mut bytes = vec![seed as u8; PAGE_BYTES];
    for word in bytes[..PAGE_BYTES / 2].chunks_exact_mut(8) {
        word.copy_from_slice(&rng.next_u64().to_le_bytes());
    }
    bytes
}

/// Returns the bytes and MACs of adjacent pages, from these seeds.
pub fn pages(seeds: impl IntoIterator<Item = u64>) -> (Vec<u8>, Vec<PageMac>) {
    let pages: Vec<Vec<u8>> = seeds.into_iter().map(page).collect();
    let macs = pages.iter().map(|page| PageMac::of(page)).collect();
    (pages.concat(), macs)
}

fn put(writer: &mut dyn PageWriter, region: RegionId, first: u64, seeds: &[u64]) {
    let (bytes, macs) = pages(seeds.iter().copied());
    writer.put(region, &[PutRun { first, pages: &bytes, macs: &macs }]).unwrap();
}

fn assert_holds(reader: &mut dyn PageReader, region: RegionId, first: u64, seeds: &[u64]) {
    let (bytes, macs) = pages(seeds.iter().copied());
    let mut into = vec![0xee; bytes.len()];
    reader.get(region, first, &macs, &mut into).unwrap();
    assert!(into == bytes, "pages {first}.. of region {region} differ");
}

fn get_one(reader: &mut dyn PageReader, region: RegionId, page_number: u64, seed: u64) -> bool {
    let (_, macs) = pages([seed]);
    match reader.get(region, page_number, &macs, &mut [0; PAGE_BYTES]) {
        Ok(()) => true,
        Err(StoreError::PageLost { page, .. }) => {
            assert_eq!(page, page_number);
            false
        }
        Err(other) => panic!("{other}"),
    }
}

fn pages_come_back(store: &dyn PageStore) {
    let region = store.create_region(512, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    let seeds: Vec<u64> = (0..256).collect();
    let parts: Vec<_> = seeds.chunks(RUN_PAGES_MAX).map(|part| pages(part.to_vec())).collect();
    let runs: Vec<_> = (0..)
        .zip(&parts)
        .map(|(at, (pages, macs))| PutRun { first: 100 + at * 64, pages, macs })
        .collect();
    writer.put(region, &runs).unwrap();
    assert_holds(&mut *reader, region, 100, &seeds[..64]);
    assert_holds(&mut *reader, region, 130, &seeds[30..94]);
    assert_holds(&mut *reader, region, 355, &seeds[255..]);
    store.drop_region(region).unwrap();
    assert!(matches!(store.drop_region(region), Err(StoreError::NoRegion(_))));
}

/// Reads pages from all over a region. Some were never put, or differ from their MAC. A store may
/// return none of them; those that it returns must match.
fn pages_that_come_together_are_proven(store: &dyn PageStore) {
    let region = store.create_region(512, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    let numbers: Vec<u64> = (0..40).map(|nth| nth * 311 % 512).collect();
    for (nth, number) in numbers.iter().enumerate().filter(|(nth, _)| nth % 8 != 7) {
        put(&mut *writer, region, *number, &[nth as u64]);
    }
    let is_known = |nth: usize| nth % 8 != 7 && nth % 8 != 3;
    let wanted: Vec<(u64, PageMac)> = (0..40)
        .map(|nth| (numbers[nth], PageMac::of(&page(nth as u64 + u64::from(nth % 8 == 3)))))
        .collect();
    for round in 0..3 {
        let mut came = [false; 40];
        reader.get_each(region, &wanted, &mut |nth, bytes| {
            assert!(bytes == page(nth as u64), "page {} in round {round}", numbers[nth]);
            assert!(is_known(nth) && !std::mem::replace(&mut came[nth], true));
        });
        let all = (0..40).filter(|nth| came[*nth]).count();
        assert!(all == 0 || all == (0..40).filter(|nth| is_known(*nth)).count(), "{all} came");
        // The pages can still be read one by one.
        assert_holds(&mut *reader, region, numbers[12], &[12]);
        assert!(!get_one(&mut *reader, region, numbers[7], 7));
    }
    store.drop_region(region).unwrap();
}

fn the_last_put_wins(store: &dyn PageStore) {
    let region = store.create_region(8, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    put(&mut *writer, region, 0, &[1, 2, 3]);
    put(&mut *writer, region, 1, &[20]);
    assert_holds(&mut *reader, region, 0, &[1, 20, 3]);
    writer.discard(region, &[PageRun { first: 0, count: 2 }]).unwrap();
    assert!(!get_one(&mut *reader, region, 0, 1));
    assert_holds(&mut *reader, region, 2, &[3]);
    put(&mut *writer, region, 0, &[4]);
    assert_holds(&mut *reader, region, 0, &[4]);
}

fn regions_are_apart(store: &dyn PageStore) {
    let (a, b) = (store.create_region(8, false).unwrap(), store.create_region(8, false).unwrap());
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    put(&mut *writer, a, 3, &[1]);
    assert!(!get_one(&mut *reader, b, 3, 1));
    put(&mut *writer, b, 3, &[2]);
    assert_holds(&mut *reader, a, 3, &[1]);
    store.drop_region(a).unwrap();
    assert_holds(&mut *reader, b, 3, &[2]);
    let gone = reader.get(a, 3, &pages([1]).1, &mut [0; PAGE_BYTES]);
    assert!(matches!(gone, Err(StoreError::NoRegion(_))), "{gone:?}");
}

fn what_was_not_put_is_lost(store: &dyn PageStore) {
    let region = store.create_region(64, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    put(&mut *writer, region, 10, &[1, 2]);
    let (_, macs) = pages([1, 2, 3]);
    let result = reader.get(region, 10, &macs, &mut [0; 3 * PAGE_BYTES]);
    assert!(matches!(result, Err(StoreError::PageLost { page: 12, .. })), "{result:?}");
    assert_holds(&mut *reader, region, 10, &[1, 2]);
}

fn a_wrong_sum_is_noticed(store: &dyn PageStore) {
    let region = store.create_region(64, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    put(&mut *writer, region, 0, &[1]);
    assert!(!get_one(&mut *reader, region, 0, 2), "other bytes than were put");
    assert!(get_one(&mut *reader, region, 0, 1));
}

fn bad_requests_are_refused(store: &dyn PageStore) {
    let region = store.create_region(64, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    let (bytes, macs) = pages(0..65);
    let mut into = bytes.clone();
    let bad = |result: Result<(), StoreError>| {
        assert!(matches!(result, Err(StoreError::BadRequest(_))), "{result:?}");
    };
    bad(reader.get(region, 0, &macs, &mut into));
    bad(reader.get(region, 0, &macs[..0], &mut into[..0]));
    bad(reader.get(region, 0, &macs[..2], &mut into[..PAGE_BYTES]));
    bad(reader.get(region, 64, &macs[..1], &mut into[..PAGE_BYTES]));
    bad(reader.get(region, u64::MAX, &macs[..1], &mut into[..PAGE_BYTES]));
    bad(writer.put(region, &[PutRun { first: 0, pages: &bytes, macs: &macs }]));
    let outside = PutRun { first: 64, pages: &bytes[..PAGE_BYTES], macs: &macs[..1] };
    bad(writer.put(region, &[outside]));
    let uneven = PutRun { first: 0, pages: &bytes[..PAGE_BYTES - 1], macs: &macs[..1] };
    bad(writer.put(region, &[uneven]));
    bad(writer.discard(region, &[PageRun { first: 2, count: u64::MAX }]));
}

fn a_full_store_says_so_and_keeps_the_rest(store: &dyn PageStore) {
    const PAGES_MAX: u64 = 100_000;
    assert!(matches!(store.create_region(PAGES_MAX, false), Err(StoreError::Full { .. })));
    let region = store.create_region(PAGES_MAX, true).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    let (bytes, macs) = pages(0..64);
    let mut stored = 0;
    let error = loop {
        assert!(stored < PAGES_MAX, "it never becomes full");
        match writer.put(region, &[PutRun { first: stored, pages: &bytes, macs: &macs }]) {
            Ok(()) => stored += 64,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, StoreError::Full { .. }), "{error}");
    assert!(stored >= 512, "full at {stored} pages");
    for first in (0..stored).step_by(64) {
        assert_holds(&mut *reader, region, first, &(0..64).collect::<Vec<_>>());
    }
    writer.discard(region, &[PageRun { first: 0, count: PAGES_MAX }]).unwrap();
    put(&mut *writer, region, 0, &[9]);
    assert_holds(&mut *reader, region, 0, &[9]);
}

fn threads_work_side_by_side(store: &dyn PageStore) {
    let region = store.create_region(512, false).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
                for round in 0..20 {
                    let seeds: Vec<u64> =
                        (0..16).map(|at| thread << 32 | round << 8 | at).collect();
                    put(&mut *writer, region, thread * 100, &seeds);
                    assert_holds(&mut *reader, region, thread * 100, &seeds);
                }
            });
        }
    });
}

fn agrees_with_a_map(store: &dyn PageStore) {
    const PAGES: u64 = 256;
    let region = store.create_region(PAGES, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    let mut model: BTreeMap<u64, u64> = BTreeMap::new();
    let mut rng = Rng::new(42);
    for step in 0..1500 {
        let first = rng.below(PAGES);
        let count = (1 + rng.below(8)).min(PAGES - first);
        match rng.below(10) {
            0..5 => {
                let seeds: Vec<u64> = (0..count).map(|at| step * 100 + at).collect();
                put(&mut *writer, region, first, &seeds);
                model.extend((first..).zip(seeds));
            }
            5..9 => {
                let want: Vec<Option<u64>> =
                    (first..first + count).map(|page| model.get(&page).copied()).collect();
                if let Some(seeds) = want.iter().copied().collect::<Option<Vec<u64>>>() {
                    assert_holds(&mut *reader, region, first, &seeds);
                } else {
                    let hole = want.iter().position(Option::is_none).unwrap() as u64;
                    assert!(!get_one(&mut *reader, region, first + hole, 0));
                }
            }
            _ => {
                writer.discard(region, &[PageRun { first, count }]).unwrap();
                model.retain(|page, _| !(first..first + count).contains(page));
            }
        }
    }
}
