//! Throughput of the TLB models in accesses per second: at random, and sequential by runs.
//!
//! Random accesses go to 128 MB, far beyond the reach of any shape. Nearly each one misses every
//! level and replaces an entry of each, the worst case. Hits are random accesses to 256 KB, which
//! every first level reaches. Sequential accesses are eight bytes apart, so that one lookup serves
//! all accesses to its page.

use criterion::{Criterion, Throughput};
use pagetax_core::access::{Offsets, Uniform};
use pagetax_core::units::PageSize;
use pagetax_sim::hardware::set::Replacement;
use pagetax_sim::hardware::tlb::{ArraySpec, LevelSpec, TlbHierarchy};
use std::hint::black_box;

const REGION_BYTES: u64 = 128 << 20;
const HIT_BYTES: u64 = 256 << 10;

fn array(entries: u32, ways: Option<u32>, page_sizes: &[&str]) -> ArraySpec {
    let page_sizes = page_sizes.iter().map(|text| text.parse().expect("a page size")).collect();
    let replacement = Replacement::Lru;
    ArraySpec {
        entries,
        ways,
        page_sizes,
        locked: 0,
        replacement,
        programmable: false,
        fallback: false,
    }
}

/// Returns the shapes of the machines' TLBs: fully associative, two arrays of one size, two levels.
fn shapes() -> Vec<(&'static str, PageSize, Vec<LevelSpec>)> {
    let k8: PageSize = "8K".parse().expect("a page size");
    vec![
        ("64-entry fully associative, 8K", k8, vec![vec![array(58, None, &["8K"])]]),
        ("512-entry 2-way, 8K", k8, vec![vec![array(512, Some(2), &["8K"])]]),
        (
            "two 512-entry 2-way, 8K",
            k8,
            vec![vec![array(512, Some(2), &["8K"]), array(512, Some(2), &["8K"])]],
        ),
        (
            "96-entry 6-way + 2048-entry 16-way, 4K",
            PageSize::K4,
            vec![vec![array(96, Some(6), &["4K"])], vec![array(2048, Some(16), &["4K", "2M"])]],
        ),
    ]
}

fn random(c: &mut Criterion, group: &str, region_bytes: u64) {
    const COUNT: u64 = 1 << 18;
    let mut group = c.benchmark_group(group);
    group.throughput(Throughput::Elements(COUNT)).sample_size(20);
    for (name, page, levels) in shapes() {
        let mut tlb = TlbHierarchy::new(name, &levels).expect("a possible geometry");
        let mut offsets = Uniform::new(1, region_bytes, 8);
        group.bench_function(name, |b| {
            b.iter(|| {
                for _ in 0..COUNT {
                    black_box(tlb.access(0, offsets.next_offset(), page.shift()));
                }
            });
        });
    }
    group.finish();
}

fn sequential(c: &mut Criterion) {
    const STRIDE: u64 = 8;
    let mut group = c.benchmark_group("sequential");
    group.throughput(Throughput::Elements(REGION_BYTES / STRIDE)).sample_size(20);
    for (name, page, levels) in shapes() {
        let mut tlb = TlbHierarchy::new(name, &levels).expect("a possible geometry");
        group.bench_function(name, |b| {
            b.iter(|| {
                tlb.sweep(0, 0, STRIDE, REGION_BYTES / STRIDE, page.shift(), |missed| {
                    black_box(missed);
                });
            });
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    random(&mut criterion, "random", REGION_BYTES);
    random(&mut criterion, "hits", HIT_BYTES);
    sequential(&mut criterion);
    criterion.final_summary();
}
