//! Curves against plain simulations of each size, and samples against exact curves.

use super::*;
use pagetax_core::access::{Offsets, Rng, Uniform, Zipf};

const SIZES: [PageSize; 2] = [PageSize::K4, PageSize::M2];

/// Misses of a fully associative LRU array, by its definition.
fn lru_misses(stream: &[VirtAddr], page_size: PageSize, entries: usize) -> u64 {
    let mut held: Vec<u64> = Vec::new();
    let mut misses = 0;
    for address in stream {
        let page = address.page(page_size);
        match held.iter().position(|&other| other == page) {
            Some(at) => drop(held.remove(at)),
            None => {
                misses += 1;
                held.truncate(entries - 1);
            }
        }
        held.insert(0, page);
    }
    misses
}

fn mixed_stream(seed: u64, accesses: u64) -> Vec<VirtAddr> {
    let mut rng = Rng::new(seed);
    let mut at = 0;
    (0..accesses)
        .map(|_| {
            at = match rng.below(10) {
                0 => rng.below(64 << 20),
                1..4 => at + 4096,
                _ => at + 8,
            };
            VirtAddr(at)
        })
        .collect()
}

fn profile_of(stream: &[VirtAddr], following: Following) -> ReuseProfile {
    let mut profile = ReuseProfile::new(&SIZES, following);
    for &address in stream {
        profile.access(address, 1);
    }
    profile.settle();
    profile
}

#[test]
fn every_size_misses_what_its_own_simulation_misses() {
    for seed in 1..4 {
        let stream = mixed_stream(seed, 6_000);
        let profile = profile_of(&stream, Following::All);
        for curve in profile.curves() {
            for entries in [1, 2, 16, 64, 96, 512] {
                assert_eq!(
                    curve.misses(entries),
                    lru_misses(&stream, curve.page_size(), entries as usize),
                    "seed {seed}, {} entries of {}",
                    entries,
                    curve.page_size()
                );
            }
        }
    }
}

#[test]
fn more_entries_never_miss_more() {
    let profile = profile_of(&mixed_stream(9, 50_000), Following::AtMost(256));
    for curve in profile.curves() {
        let misses: Vec<u64> = (1..5_000).map(|entries| curve.misses(entries)).collect();
        assert!(misses.is_sorted_by(|a, b| a >= b));
    }
}

#[test]
fn the_entries_for_a_share_of_misses_are_the_fewest() {
    let profile = profile_of(&mixed_stream(5, 200_000), Following::All);
    let curve = &profile.curves()[0];
    let allowed = (curve.accesses() as f64 * 0.2) as u64;
    let entries = curve.entries_for(0.2).expect("first touches are fewer");
    assert!(entries > 1 && curve.misses(entries) <= allowed);
    // A bucket holds distances within 0.4 % of each other.
    assert!(curve.misses(entries - entries / 128 - 1) > allowed);
    assert_eq!(curve.entries_for(0.0), None, "first touches are more than nothing");
}

#[test]
fn a_sample_is_close_to_the_whole() {
    let mut offsets = Zipf::new(3, 256 << 20, 4096, 0.9);
    let stream: Vec<_> = (0..400_000).map(|_| VirtAddr(offsets.next_offset())).collect();
    let whole = profile_of(&stream, Following::All);
    let sample = profile_of(&stream, Following::AtMost(4096));
    let (whole, sample) = (&whole.curves()[0], &sample.curves()[0]);
    assert!(whole.is_exact() && !sample.is_exact());
    for entries in [512, 1536, 4096, 16_384] {
        let rate = |curve: &MissCurve| curve.misses(entries) as f64 / curve.accesses() as f64;
        let (exact, estimate) = (rate(whole), rate(sample));
        assert!((exact - estimate).abs() < 0.05, "{entries} entries: {exact} against {estimate}");
    }
}

#[test]
fn batches_change_nothing() {
    let stream = mixed_stream(7, 30_000);
    for following in [Following::All, Following::AtMost(300)] {
        let whole = profile_of(&stream, following);
        let mut one_by_one = ReuseProfile::new(&SIZES, following);
        for &address in &stream {
            one_by_one.access(address, 1);
            one_by_one.settle();
        }
        for (whole, single) in whole.curves().iter().zip(one_by_one.curves()) {
            assert_eq!((whole.accesses(), whole.pages()), (single.accesses(), single.pages()));
            let misses = |curve: &MissCurve| [1, 16, 100, 700].map(|entries| curve.misses(entries));
            assert_eq!(misses(whole), misses(single), "{following:?}");
        }
    }
}

#[test]
fn intervals_count_the_pages_touched_in_each() {
    let mut profile = ReuseProfile::new(&SIZES, Following::All);
    let touch = |profile: &mut ReuseProfile, pages: &[u64]| {
        for page in pages {
            profile.access(VirtAddr(page * 4096), 3);
        }
    };
    touch(&mut profile, &[0, 1, 0, 1]);
    assert_eq!(profile.end_interval(), [2, 1]);
    touch(&mut profile, &[1, 2, 600, 1]);
    assert_eq!(profile.end_interval(), [3, 2]);
    touch(&mut profile, &[600]);
    assert_eq!(profile.end_interval(), [1, 1]);
    profile.settle();
    assert_eq!(profile.curves()[0].accesses(), 27);
}

#[test]
fn a_uniform_stream_misses_in_proportion_to_what_is_not_held() {
    let mut offsets = Uniform::new(2, 4 << 20, 8);
    let mut profile = ReuseProfile::new(&[PageSize::K4], Following::All);
    for _ in 0..200_000 {
        profile.access(VirtAddr(offsets.next_offset()), 1);
    }
    profile.settle();
    let curve = &profile.curves()[0];
    let rate = curve.misses(256) as f64 / curve.accesses() as f64;
    assert!((rate - 0.75).abs() < 0.01, "256 of 1024 pages held: {rate}");
}
