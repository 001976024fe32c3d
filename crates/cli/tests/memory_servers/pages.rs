//! Pages whose bytes follow from their number and version, put and read back.

use pagetax_core::access::Rng;
use pagetax_remote::page::{PAGE_BYTES, PageMac};
use pagetax_remote::store::{PageReader, PageWriter, PutRun, RegionId, StoreError};
use std::time::{Duration, Instant};

pub fn page(number: u64, version: u64) -> Vec<u8> {
    let mut rng = Rng::new(number << 32 | version);
    (0..PAGE_BYTES / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect()
}

pub fn put(writer: &mut dyn PageWriter, region: RegionId, number: u64, version: u64) {
    try_put(writer, region, number, version).unwrap();
}

pub fn try_put(
    writer: &mut dyn PageWriter,
    region: RegionId,
    number: u64,
    version: u64,
) -> Result<(), StoreError> {
    let pages = page(number, version);
    let macs = [PageMac::of(&pages)];
    writer.put(region, &[PutRun { first: number, pages: &pages, macs: &macs }])
}

pub fn try_get(
    reader: &mut dyn PageReader,
    region: RegionId,
    number: u64,
    version: u64,
) -> Result<(), StoreError> {
    let right = page(number, version);
    let mut into = vec![0; PAGE_BYTES];
    reader.get(region, number, &[PageMac::of(&right)], &mut into)?;
    assert!(into == right, "page {number} is not what was put");
    Ok(())
}

pub fn wait_until(what: &str, seconds: u64, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(seconds);
    while !is_so() {
        assert!(Instant::now() < until, "not within {seconds} s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
