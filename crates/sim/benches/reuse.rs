//! Throughput of the miss-curve pass in accesses per second: exact and sampled, with one page size
//! and with four. Every access changes the page (random), or one in twelve does (as in programs).

use criterion::{Criterion, Throughput};
use pagetax_core::access::{Offsets, Uniform, Zipf};
use pagetax_core::units::{PageSize, VirtAddr};
use pagetax_sim::hardware::reuse::{Following, ReuseProfile};

const REGION_BYTES: u64 = 1 << 30;
const COUNT: usize = 1 << 20;
/// Accesses to a page before the next one: recorded programs change the page on 0.2 to 8 % of
/// accesses.
const REPEATS: u64 = 12;

fn stream(mut offsets: impl Offsets) -> Vec<VirtAddr> {
    (0..COUNT).map(|_| VirtAddr(offsets.next_offset())).collect()
}

fn pass(c: &mut Criterion, name: &str, sizes: &[PageSize], stream: &[VirtAddr], repeats: u64) {
    let mut group = c.benchmark_group(name);
    group.throughput(Throughput::Elements(COUNT as u64 * repeats)).sample_size(10);
    for (kind, following) in [("exact", Following::All), ("sampled", Following::AtMost(4096))] {
        let mut profile = ReuseProfile::new(sizes, following);
        group.bench_function(kind, |b| {
            b.iter(|| {
                for &address in stream {
                    profile.access(address, repeats);
                }
            });
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let sizes: Vec<PageSize> =
        ["4K", "64K", "2M", "1G"].iter().map(|size| size.parse().expect("a page size")).collect();
    let uniform = stream(Uniform::new(1, REGION_BYTES, 8));
    let zipf = stream(Zipf::new(1, REGION_BYTES, 8, 0.99));
    pass(&mut criterion, "uniform 1 GiB, 4K", &sizes[..1], &uniform, 1);
    pass(&mut criterion, "uniform 1 GiB, 4K to 1G", &sizes, &uniform, 1);
    pass(&mut criterion, "zipf 1 GiB, 4K to 1G, one change in 12", &sizes, &zipf, REPEATS);
    criterion.final_summary();
}
