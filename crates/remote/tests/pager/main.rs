//! The pager on the real kernel: every write is read back, under every kind of pressure.

#[macro_use]
#[path = "../both_ways/mod.rs"]
mod both_ways;
mod kernel_state;
mod lost_pages;
#[path = "../turns/mod.rs"]
mod turns;

use both_ways::is_copied_out;
use kernel_state::*;
use lost_pages::*;
use pagetax_core::access::Rng;
use pagetax_core::units::Bytes;
use pagetax_remote::client::cluster::{self, Cluster};
use pagetax_remote::page::{PAGE_BYTES, PageMac, PageRun};
use pagetax_remote::pager::{
    self, EvictionMethod, Features, KeepAwake, PagerError, PagerOptions, RemoteRegion, Serving,
    StoreInChild,
};
use pagetax_remote::server::listen::{self, Server};
use pagetax_remote::server::pool::Limits;
use pagetax_remote::store::embedded::EmbeddedStore;
use pagetax_remote::store::{
    Capacity, PageReader, PageStore, PageWriter, PutRun, RegionId, StoreError,
};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use turns::turns;

const MIB: u64 = 1 << 20;

/// Makes tests for both serving modes: the pager's thread and, except for system calls, in place.
/// Each runs with all features of this kernel, without those of Linux 6.8 (`copied_out`), and
/// without those of 6.6.
macro_rules! both_servings {
    ($($name:ident),* $(,)?) => {
        both_ways! {
            the_system_writes_into_missing_pages,
            a_lost_page_that_is_dropped_is_one_again,
            both_sides_of_a_fork_have_lost_pages,
            $($name),*
        }
        mod in_place {
            use super::*;
            both_ways! { $($name),* }
        }
        mod no_poison {
            #[test] fn the_system_writes_into_missing_pages() {
                super::the_system_writes_into_missing_pages()
            }
            #[test] fn a_lost_page_that_is_dropped_is_one_again() {
                super::a_lost_page_that_is_dropped_is_one_again()
            }
            #[test] fn both_sides_of_a_fork_have_lost_pages() {
                super::both_sides_of_a_fork_have_lost_pages()
            }
            $(#[test] fn $name() { super::$name() })*
            mod in_place {
                $(#[test] fn $name() { super::super::$name() })*
            }
        }
    };
}

both_servings! {
    a_region_four_times_its_memory_keeps_every_write,
    threads_share_a_region,
    threads_share_a_region_on_servers,
    sweeps_are_fetched_ahead_and_zeros_never_travel,
    frames_go_round_where_sweeps_are_long,
    new_pages_come_in_runs_both_ways,
    neighbours_come_where_what_leaves_is_done_with,
    dropped_pages_are_zeros_and_leave_the_store,
    locked_pages_are_not_dropped,
    memory_that_may_not_be_written_to_leaves,
    a_full_store_costs_memory_not_pages,
    a_page_that_the_store_lost_is_sigbus,
    threads_write_what_is_being_evicted,
    pages_dropped_past_the_pager_keep_nobody_waiting
}

/// The tests in which scattered pages are copied and others are moved.
mod cheapest {
    #[test]
    fn a_region_four_times_its_memory_keeps_every_write() {
        super::a_region_four_times_its_memory_keeps_every_write();
    }
    #[test]
    fn threads_share_a_region_on_servers() {
        super::threads_share_a_region_on_servers();
    }
    #[test]
    fn a_full_store_costs_memory_not_pages() {
        super::a_full_store_costs_memory_not_pages();
    }
    #[test]
    fn threads_write_what_is_being_evicted() {
        super::threads_write_what_is_being_evicted();
    }
}

/// Returns the eviction method of the calling test.
fn eviction_method() -> EvictionMethod {
    let thread = std::thread::current();
    match thread.name() {
        _ if !features().can_move() => EvictionMethod::Copied,
        Some(name) if name.starts_with("cheapest::") => EvictionMethod::Cheapest,
        _ => EvictionMethod::Moved,
    }
}

/// Returns the kernel features that the calling test may use, at most those of this kernel.
fn features() -> Features {
    let asked = match std::thread::current().name() {
        Some(name) if name.contains("no_poison::") => Features::NoMoveNoPoison,
        _ if is_copied_out() => Features::NoMove,
        _ => Features::All,
    };
    match pager::probe(true, Serving::Thread) {
        Ok((_, here)) => here.max(asked),
        Err(_) => asked,
    }
}

/// Returns true if this kernel moves pages. Otherwise prints a line.
fn can_move() -> bool {
    let can_move = features().can_move();
    if !can_move {
        println!("SKIP: this kernel cannot move pages (Linux 6.8)");
    }
    can_move
}

/// Returns the serving mode of the calling test.
fn serving() -> Serving {
    match std::thread::current().name() {
        Some(name) if name.contains("in_place::") => Serving::InPlace,
        _ => Serving::Thread,
    }
}

fn resident(bytes: u64) -> PagerOptions {
    // If pages cannot be moved, the pager finds that itself.
    let eviction_method = if eviction_method() == EvictionMethod::Cheapest {
        EvictionMethod::Cheapest
    } else {
        EvictionMethod::Moved
    };
    PagerOptions {
        eviction_method,
        serving: serving(),
        features: features(),
        // Tests beside each other would keep CPUs awake for each other.
        keep_awake: KeepAwake::Never,
        ..PagerOptions::resident(bytes)
    }
}

/// Maps a region. Prints a line if this user may not page.
fn map(store: Arc<dyn PageStore>, bytes: u64, options: PagerOptions) -> Option<RemoteRegion> {
    match RemoteRegion::map(store, bytes, options) {
        Err(error @ PagerError::Uffd(_)) => {
            println!("SKIP: {error}");
            None
        }
        other => Some(other.unwrap()),
    }
}

fn embedded() -> Arc<dyn PageStore> {
    Arc::new(EmbeddedStore::new(Bytes(256 * MIB)))
}

/// Writes a version of a page. Half of its bytes do not compress.
fn fill(page: &mut [u8], number: u64, version: u64) {
    let mut rng = Rng::new(number << 20 | version);
    for word in page[..PAGE_BYTES / 2].chunks_exact_mut(8) {
        word.copy_from_slice(&rng.next_u64().to_le_bytes());
    }
    page[PAGE_BYTES / 2..].fill(version as u8);
}

fn assert_is(page: &[u8], number: u64, version: u64) {
    let mut wanted = [0; PAGE_BYTES];
    if version > 0 {
        fill(&mut wanted, number, version);
    }
    assert!(page == wanted, "page {number} is not what was written in round {version}");
}

fn a_region_four_times_its_memory_keeps_every_write() {
    let pages = turns(4096);
    let bytes = pages * PAGE_BYTES as u64;
    let Some(mut region) = map(embedded(), bytes, resident(bytes / 4)) else { return };
    let mut versions = vec![0u64; pages as usize];
    let (mut rng, steps) = (Rng::new(7), turns(30_000));
    for step in 1..steps {
        let number = rng.below(pages);
        let at = number as usize * PAGE_BYTES;
        let page = &mut region.as_mut_slice()[at..at + PAGE_BYTES];
        assert_is(page, number, versions[number as usize]);
        if rng.below(4) > 0 {
            versions[number as usize] = step;
            fill(page, number, step);
        }
    }
    for (number, page) in (0..).zip(region.as_slice().chunks_exact(PAGE_BYTES)) {
        assert_is(page, number, versions[number as usize]);
    }
    let counts = region.counts();
    assert!(region.resident_bytes() <= bytes / 4);
    let least = counts.demand_page_in_count.min(counts.page_out_count);
    assert!(least > steps / 3, "{counts:?}");
    assert!(counts.evicted_clean_count > steps / 300, "{counts:?}");
    // Copies are not staged.
    assert_eq!(
        counts.soft_refault_count > steps / 3000,
        eviction_method() != EvictionMethod::Copied,
        "{counts:?}"
    );
}

fn threads_share_a_region() {
    share_a_region(embedded());
}

/// Checks threads on servers. Their faults are served together: each page comes from the first of
/// its servers.
fn threads_share_a_region_on_servers() {
    let limits = Limits { memory: Bytes(64 * MIB), ..Limits::default() };
    let start = || {
        let options =
            listen::ServerOptions { limits: limits.clone(), ..listen::ServerOptions::default() };
        Server::start((Ipv4Addr::LOCALHOST, 0).into(), options).unwrap()
    };
    let servers = [start(), start(), start()];
    let labels = servers.iter().map(|server| server.address().to_string()).collect();
    let options = cluster::ClusterOptions { copies: 2, ..cluster::ClusterOptions::new(labels) };
    share_a_region(Arc::new(Cluster::connect(options).unwrap()));
}

/// Writes from all threads to all clusters, half of the time to few pages, so that pages are
/// written to during their eviction. Eight words of a page count its writes.
fn threads_write_what_is_being_evicted() {
    const THREADS: usize = 8;
    const HOT: u64 = 16;
    let Some(mut region) = map(embedded(), 8 * MIB, resident(MIB)) else { return };
    let steps = turns(20_000);
    let words = |page: &mut [u8], version: u64| {
        for word in page.chunks_exact_mut(512) {
            let (count, was) = (&mut word[..8], version.to_le_bytes());
            assert_eq!(count, was, "a write is lost");
            count.copy_from_slice(&(version + 1).to_le_bytes());
        }
    };
    let mut shares: Vec<Vec<&mut [u8]>> = (0..THREADS).map(|_| Vec::new()).collect();
    for (number, page) in region.as_mut_slice().chunks_exact_mut(PAGE_BYTES).enumerate() {
        shares[number % THREADS].push(page);
    }
    std::thread::scope(|scope| {
        for (seed, mut share) in (0..).zip(shares) {
            scope.spawn(move || {
                let (mut versions, mut rng) = (vec![0; share.len()], Rng::new(seed));
                for step in 0..steps {
                    let among = if step % 2 == 0 { HOT } else { share.len() as u64 };
                    let nth = rng.below(among) as usize;
                    words(share[nth], versions[nth]);
                    versions[nth] += 1;
                }
                for (page, version) in share.iter_mut().zip(versions) {
                    words(page, version);
                }
            });
        }
    });
    let counts = region.counts();
    assert!(counts.page_out_count > steps / 2, "{counts:?}");
    assert_eq!(
        counts.cancelled_count > 0,
        eviction_method() != EvictionMethod::Moved,
        "{counts:?}"
    );
}

/// Drops memory by system calls of the program's own, even pages that are being copied out. The
/// program may find its earlier bytes or zeros.
fn pages_dropped_past_the_pager_keep_nobody_waiting() {
    let Some(mut region) = map(embedded(), 8 * MIB, resident(MIB)) else { return };
    let (start, pages) = (region.as_ptr() as usize, region.len() / PAGE_BYTES);
    let rounds = turns(30);
    let (written, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut rng, mut seen) = (Rng::new(1), 0);
            while !done.load(Relaxed) {
                // Drop no faster than pages are written. Otherwise a writer that waits for a CPU
                // would find all pages dropped, and none would be evicted.
                if written.load(Relaxed) != seen {
                    seen = written.load(Relaxed);
                    drop_pages(start + rng.below(pages as u64 - 8) as usize * PAGE_BYTES, 8);
                }
                std::thread::yield_now();
            }
        });
        for version in 1..=rounds {
            for (number, page) in region.as_mut_slice().chunks_exact_mut(PAGE_BYTES).enumerate() {
                let found = u64::from_le_bytes(page[..8].try_into().unwrap());
                assert!(found == 0 || found >> 32 == number as u64, "page {number}: {found:x}");
                page[..8].copy_from_slice(&((number as u64) << 32 | version).to_le_bytes());
                written.fetch_add(1, Relaxed);
            }
        }
        done.store(true, Relaxed);
    });
    let counts = region.counts();
    assert!(counts.page_out_count > 10_000 * rounds / 30, "{counts:?}");
}

/// Drops pages past the pager, by a system call.
#[allow(unsafe_code)]
fn drop_pages(at: usize, count: usize) {
    // SAFETY: a thread reads and writes the bytes as plain integers, and accepts any value, even
    // zeros.
    let result =
        unsafe { libc::syscall(libc::SYS_madvise, at, count * PAGE_BYTES, libc::MADV_DONTNEED) };
    assert_eq!(result, 0);
}

fn share_a_region(store: Arc<dyn PageStore>) {
    let Some(mut region) = map(store, 8 * MIB, resident(2 * MIB)) else { return };
    std::thread::scope(|scope| {
        for (thread, part) in (0..8u64).zip(region.as_mut_slice().chunks_mut(MIB as usize)) {
            scope.spawn(move || {
                let mut rng = Rng::new(thread);
                let pages = part.len() / PAGE_BYTES;
                let mut versions = vec![0; pages];
                for step in 1..2000 {
                    let number = rng.below(pages as u64);
                    let at = number as usize * PAGE_BYTES;
                    let page = &mut part[at..at + PAGE_BYTES];
                    assert_is(page, number, versions[number as usize]);
                    versions[number as usize] = step;
                    fill(page, number, step);
                }
            });
        }
    });
}

fn sweeps_are_fetched_ahead_and_zeros_never_travel() {
    let Some(mut region) = map(embedded(), 32 * MIB, resident(4 * MIB)) else { return };
    for page in region.as_mut_slice().chunks_exact_mut(2 * PAGE_BYTES) {
        page[PAGE_BYTES] = 1;
    }
    let sum: u64 = region.as_slice().iter().map(|byte| u64::from(*byte)).sum();
    assert_eq!(sum, 32 * MIB / 8192);
    let counts = region.counts();
    assert!(counts.evicted_zero_count > 2000, "{counts:?}");
    assert!(counts.fault_count < 3 * counts.page_in_count, "{counts:?}");

    let Some(mut region) = map(embedded(), 32 * MIB, resident(4 * MIB)) else { return };
    region.as_mut_slice().fill(3);
    let before = region.counts();
    // Without room, the pager prefetches less. So each part of the sweep starts with room, however
    // slow the evictor is.
    for part in region.as_slice().chunks(2 * MIB as usize) {
        region.evict_all();
        assert!(part.iter().all(|byte| *byte == 3));
    }
    let counts = region.counts().since(&before);
    assert!(counts.page_in_count > 7000, "{counts:?}");
    assert!(counts.demand_page_in_count < counts.page_in_count / 16, "{counts:?}");
    assert!(counts.evicted_clean_count > 4000, "{counts:?}");
}

fn frames_go_round_where_sweeps_are_long() {
    const BYTES: u64 = 96 * MIB;
    let Some(mut region) = map(embedded(), BYTES, resident(24 * MIB)) else { return };
    let fill_all = |region: &mut RemoteRegion, version| {
        let pages = region.as_mut_slice().chunks_exact_mut(PAGE_BYTES);
        (0..).zip(pages).for_each(|(number, page)| fill(page, number, version));
    };
    let check_all = |region: &RemoteRegion, version| {
        let pages = region.as_slice().chunks_exact(PAGE_BYTES);
        (0..).zip(pages).for_each(|(number, page)| assert_is(page, number, version));
    };
    for version in 1..4 {
        fill_all(&mut region, version);
        check_all(&region, version);
    }
    let counts = region.counts();
    // Some runs of a sweep find no full spare.
    let wanted =
        if eviction_method() == EvictionMethod::Copied { 0 } else { counts.page_in_count / 16 };
    assert!(counts.moved_in_count >= wanted, "{counts:?}");
    assert!(region.resident_bytes() <= 24 * MIB, "{}", region.resident_bytes());
}

fn new_pages_come_in_runs_both_ways() {
    for goes_down in [false, true] {
        let Some(mut region) = map(embedded(), 8 * MIB, resident(4 * MIB)) else { return };
        let pages = region.as_mut_slice().chunks_exact_mut(PAGE_BYTES);
        match goes_down {
            false => pages.for_each(|page| page[0] = 1),
            true => pages.rev().for_each(|page| page[0] = 1),
        }
        let counts = region.counts();
        assert!(counts.zero_fault_count < 2048 / 8, "{counts:?}");
        assert!(region.as_slice().chunks_exact(PAGE_BYTES).all(|page| page[0] == 1));
    }
}

/// Touches pages in random order, each once.
fn touch_all(pages: &mut [u8], seed: u64) {
    let mut order: Vec<usize> = (0..pages.len() / PAGE_BYTES).collect();
    let mut rng = Rng::new(seed);
    for left in (1..order.len()).rev() {
        order.swap(left, rng.below(left as u64 + 1) as usize);
    }
    order.into_iter().for_each(|page| pages[page * PAGE_BYTES] += 1);
}

fn neighbours_come_where_what_leaves_is_done_with() {
    let Some(mut region) = map(embedded(), 24 * MIB, resident(12 * MIB)) else { return };
    region.as_mut_slice().fill(1);
    let before = region.counts();
    touch_all(&mut region.as_mut_slice()[..8 * MIB as usize], 1);
    let counts = region.counts().since(&before);
    assert!(counts.demand_page_in_count < counts.page_in_count / 4, "{counts:?}");

    let Some(mut region) = map(embedded(), 24 * MIB, resident(6 * MIB)) else { return };
    region.as_mut_slice().fill(1);
    let (before, mut rng) = (region.counts(), Rng::new(1));
    for _ in 0..20_000 {
        region.as_mut_slice()[rng.below(24 * MIB) as usize] += 1;
    }
    let counts = region.counts().since(&before);
    assert!(counts.page_in_count < counts.demand_page_in_count * 5 / 4, "{counts:?}");
}

#[test]
fn staged_pages_that_are_in_use_come_back_together() {
    if !can_move() {
        return;
    }
    let Some(mut region) = map(embedded(), 136 * MIB, resident(16 * MIB)) else { return };
    let (used, passed) = region.as_mut_slice().split_at_mut(8 * MIB as usize);
    for (seed, part) in passed.chunks_exact_mut(MIB as usize).enumerate() {
        touch_all(used, seed as u64);
        part.fill(1);
    }
    let counts = region.counts();
    // Page by page there would be some 15,000.
    assert!((1..8000).contains(&counts.soft_refault_count), "{counts:?}");
}

#[test]
fn cpus_are_kept_awake_as_long_as_a_region_lives() {
    const DEVICE: &str = "/dev/cpu_dma_latency";
    let is_open = || {
        let files = std::fs::read_dir("/proc/self/fd").unwrap();
        let targets = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
        targets.into_iter().any(|target| target.as_os_str() == DEVICE)
    };
    let options = || PagerOptions { keep_awake: KeepAwake::Always, ..resident(MIB) };
    if std::fs::OpenOptions::new().write(true).open(DEVICE).is_err() {
        let refused = RemoteRegion::map(embedded(), 2 * MIB, options()).unwrap_err();
        assert!(refused.to_string().contains(DEVICE), "{refused}");
        return;
    }
    let Some(mut region) = map(embedded(), 2 * MIB, options()) else { return };
    region.as_mut_slice().fill(1);
    assert!(is_open());
    drop(region);
    assert!(!is_open());
    let region = map(embedded(), 2 * MIB, resident(MIB));
    assert!(region.is_some() && !is_open());
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let options = || resident(MIB);
    let refused = |bytes| RemoteRegion::map(embedded(), bytes, options()).unwrap_err();
    assert!(matches!(refused(0), PagerError::Size { .. }));
    assert!(matches!(refused(u64::MAX), PagerError::Size { .. }));
    assert!(matches!(refused(1 << 40), PagerError::Store(StoreError::Full { .. })));
    let overcommitted = PagerOptions { overcommit: true, ..options() };
    map(embedded(), 1 << 40, overcommitted);
}

/// A switch that makes a store full.
#[derive(Default)]
struct Moody {
    is_full: Arc<AtomicBool>,
}

struct MoodyWriter(Box<dyn PageWriter>, Arc<AtomicBool>);

impl PageWriter for MoodyWriter {
    fn put(&mut self, region: RegionId, runs: &[PutRun<'_>]) -> Result<(), StoreError> {
        match self.1.load(Relaxed) {
            true => Err(StoreError::Full { pages_asked: 1, pages_free: 0 }),
            false => self.0.put(region, runs),
        }
    }

    fn discard(&mut self, region: RegionId, runs: &[PageRun]) -> Result<(), StoreError> {
        self.0.discard(region, runs)
    }
}

struct MoodyStore(EmbeddedStore, Moody);

impl PageStore for MoodyStore {
    fn describe(&self) -> String {
        "moody".into()
    }
    fn capacity(&self) -> Result<Capacity, StoreError> {
        self.0.capacity()
    }
    fn create_region(&self, pages: u64, overcommit: bool) -> Result<RegionId, StoreError> {
        self.0.create_region(pages, overcommit)
    }
    fn drop_region(&self, region: RegionId) -> Result<(), StoreError> {
        self.0.drop_region(region)
    }
    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError> {
        self.0.reader()
    }
    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError> {
        Ok(Box::new(MoodyWriter(self.0.writer()?, self.1.is_full.clone())))
    }
}

fn a_full_store_costs_memory_not_pages() {
    let moody = Moody::default();
    let is_full = moody.is_full.clone();
    let lines = Arc::new(Mutex::new(Vec::<String>::new()));
    let log = lines.clone();
    let options = PagerOptions {
        log: Some(Arc::new(move |line: &str| log.lock().unwrap().push(line.into()))),
        ..resident(MIB)
    };
    let store = Arc::new(MoodyStore(EmbeddedStore::new(Bytes(64 * MIB)), moody));
    let Some(mut region) = map(store, 8 * MIB, options) else { return };
    let mut write_all = |version| {
        for (number, page) in (0..).zip(region.as_mut_slice().chunks_exact_mut(PAGE_BYTES)) {
            if version > 1 {
                assert_is(page, number, version - 1);
            }
            fill(page, number, version);
        }
    };
    write_all(1);
    is_full.store(true, Relaxed);
    write_all(2);
    is_full.store(false, Relaxed);
    write_all(3);
    write_all(4);
    let lines = lines.lock().unwrap();
    assert!(lines.iter().any(|line| line.contains("resident limit")), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("is full")), "{lines:?}");
    let copies = lines.iter().filter(|line| line.contains("under write protection")).count();
    assert_eq!(copies, usize::from(eviction_method() == EvictionMethod::Copied), "{lines:?}");
}
