//! The pager on the real kernel: what is written comes back, under every kind of pressure.

#[macro_use]
mod both_ways;
mod turns;

use both_ways::is_copied_out;
use pagetax_core::access::Rng;
use pagetax_core::units::Bytes;
use pagetax_remote::client::cluster::{self, Cluster};
use pagetax_remote::page::{PAGE_BYTES, PageRun, PageSum};
use pagetax_remote::pager::{
    self, EvictionMethod, Features, PagerError, PagerOptions, RemoteRegion, Serving,
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

/// Tests of both ways of serving: by the pager's thread, and, but for system calls, in place. With all features of
/// this kernel, without what Linux 6.8 brought (`copied_out`), and without what 6.6 brought.
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

/// Where scattered pages are copied, and others moved.
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

/// How pages leave in the test that asks.
fn eviction_method() -> EvictionMethod {
    let thread = std::thread::current();
    match thread.name() {
        _ if !features().can_move() => EvictionMethod::Copied,
        Some(name) if name.starts_with("cheapest::") => EvictionMethod::Cheapest,
        _ => EvictionMethod::Moved,
    }
}

/// What the kernel of the test that asks has: no more than this one.
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

/// Whether this kernel moves pages; says so if not.
fn can_move() -> bool {
    let can_move = features().can_move();
    if !can_move {
        println!("SKIP: this kernel cannot move pages (Linux 6.8)");
    }
    can_move
}

/// Who serves faults in the test that asks.
fn serving() -> Serving {
    match std::thread::current().name() {
        Some(name) if name.contains("in_place::") => Serving::InPlace,
        _ => Serving::Thread,
    }
}

fn resident(bytes: u64) -> PagerOptions {
    // How pages leave where they cannot be moved, the pager finds itself.
    let eviction_method = if eviction_method() == EvictionMethod::Cheapest {
        EvictionMethod::Cheapest
    } else {
        EvictionMethod::Moved
    };
    PagerOptions {
        eviction_method,
        serving: serving(),
        features: features(),
        ..PagerOptions::resident(bytes)
    }
}

/// A region, unless this user may not page: then says so.
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

/// What stands at a page after so many writes to it: half of it does not compress.
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

/// Their faults are served together: each page comes from the first of its servers.
fn threads_share_a_region_on_servers() {
    let limits = Limits { memory: Bytes(64 * MIB), ..Limits::default() };
    let start = || {
        let options = listen::Options { limits: limits.clone(), ..listen::Options::default() };
        Server::start((Ipv4Addr::LOCALHOST, 0).into(), options).unwrap()
    };
    let servers = [start(), start(), start()];
    let labels = servers.iter().map(|server| server.address().to_string()).collect();
    let options = cluster::Options { copies: 2, ..cluster::Options::new(labels) };
    share_a_region(Arc::new(Cluster::connect(options).unwrap()));
}

/// All threads write to all clusters, half of the time to few pages, which so are written to while they
/// leave; eight words of a page say how often it was written.
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

/// A program may drop its memory by a system call of its own, also what is being copied out just then. It
/// may find what it wrote before, or zeros.
fn pages_dropped_past_the_pager_keep_nobody_waiting() {
    let Some(mut region) = map(embedded(), 8 * MIB, resident(MIB)) else { return };
    let (start, pages) = (region.as_ptr() as usize, region.len() / PAGE_BYTES);
    let rounds = turns(30);
    let (written, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut rng, mut seen) = (Rng::new(1), 0);
            while !done.load(Relaxed) {
                // Never faster than pages are written: a writer that had to wait for a CPU would find all of them
                // dropped, and none would leave for the store.
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

/// As a program does that knows nothing of the pager.
#[allow(unsafe_code)]
fn drop_pages(at: usize, count: usize) {
    // SAFETY: the bytes are read and written as plain integers by a thread that takes whatever it finds; zeros
    // are as good as any.
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
    // Without room, fewer pages are fetched ahead: each part of the sweep finds room, however slow the evictor is.
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
    // Some of a sweep's runs find no full spare.
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

/// Touches pages in an order of chance, each once.
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
    // One by one it would be some 15,000.
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
    let options = || PagerOptions { keep_awake: true, ..resident(MIB) };
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
}

fn dropped_pages_are_zeros_and_leave_the_store() {
    let store = Arc::new(EmbeddedStore::new(Bytes(64 * MIB)));
    let Some(mut region) = map(store.clone(), 8 * MIB, resident(MIB)) else { return };
    let mut rng = Rng::new(1);
    region.as_mut_slice().fill_with(|| rng.next_u64() as u8);
    assert!(store.used_bytes() > 6 * MIB);
    region.discard(5, 8 * MIB as usize - 5 - PAGE_BYTES);
    let bytes = region.as_slice();
    assert!(bytes[..PAGE_BYTES].iter().any(|byte| *byte != 0), "the part of a page stays");
    assert!(bytes[8 * MIB as usize - PAGE_BYTES..].iter().any(|byte| *byte != 0));
    assert!(bytes[PAGE_BYTES..8 * MIB as usize - PAGE_BYTES].iter().all(|byte| *byte == 0));
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while store.used_bytes() > MIB {
        assert!(std::time::Instant::now() < until, "{} bytes stay", store.used_bytes());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    drop(region);
    assert_eq!(store.used_bytes(), 0);
}

#[allow(unsafe_code)]
fn locked_pages_are_not_dropped() {
    let Some(mut region) = map(embedded(), 8 * MIB, resident(4 * MIB)) else { return };
    let pages = 8;
    region.as_mut_slice()[..2 * pages * PAGE_BYTES].fill(1);
    let locked = &region.as_slice()[..pages * PAGE_BYTES];
    // SAFETY: neither call changes memory.
    let lock = |call: unsafe extern "C" fn(*const libc::c_void, usize) -> i32| unsafe {
        call(locked.as_ptr().cast(), locked.len())
    };
    assert_eq!(lock(libc::mlock), 0);
    assert!(!region.discard(0, 2 * pages * PAGE_BYTES), "locked pages count as dropped");
    assert!(region.as_slice()[..pages * PAGE_BYTES].iter().all(|byte| *byte == 1));
    let locked = &region.as_slice()[..pages * PAGE_BYTES];
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munlock(locked.as_ptr().cast(), locked.len()) }, 0);
    assert!(region.discard(0, 2 * pages * PAGE_BYTES));
    assert!(region.as_slice()[..2 * pages * PAGE_BYTES].iter().all(|byte| *byte == 0));
}

#[allow(unsafe_code)]
fn memory_that_may_not_be_written_to_leaves() {
    const BYTES: usize = 8 * MIB as usize;
    let Some(mut region) = map(embedded(), BYTES as u64, resident(MIB)) else { return };
    for (number, page) in (0..).zip(region.as_mut_slice().chunks_exact_mut(PAGE_BYTES)) {
        fill(page, number, 1);
    }
    let start = region.as_ptr();
    let protect = |at: usize, bytes: usize, protection| {
        // SAFETY: pages of the region; what may not be touched is not touched.
        let result = unsafe { libc::mprotect(start.add(at).cast(), bytes, protection) };
        assert_eq!(result, 0);
    };
    let settles = |what: &str| {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while region.resident_bytes() > MIB {
            let resident = Bytes(region.resident_bytes());
            assert!(std::time::Instant::now() < until, "{resident} of {what} memory stay");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    };
    protect(0, BYTES, libc::PROT_READ);
    for _ in 0..2 {
        for (number, page) in (0..).zip(region.as_slice().chunks_exact(PAGE_BYTES)) {
            assert_is(page, number, 1);
        }
        settles("read-only");
    }
    // What is here of the first half leaves while the other one is read.
    protect(0, BYTES / 2, libc::PROT_NONE);
    for (number, page) in (0..).zip(region.as_slice().chunks_exact(PAGE_BYTES)) {
        if number as usize * PAGE_BYTES >= BYTES / 2 {
            assert_is(page, number, 1);
        }
    }
    settles("inaccessible");
    protect(0, BYTES, libc::PROT_READ | libc::PROT_WRITE);
    for (number, page) in (0..).zip(region.as_mut_slice().chunks_exact_mut(PAGE_BYTES)) {
        assert_is(page, number, 1);
        fill(page, number, 2);
    }
    for (number, page) in (0..).zip(region.as_slice().chunks_exact(PAGE_BYTES)) {
        assert_is(page, number, 2);
    }
}

fn the_system_writes_into_missing_pages() {
    let Some(mut region) = map(embedded(), 8 * MIB, resident(MIB)) else { return };
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let wanted = {
        let mut bytes = vec![0; 4 * MIB as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
        bytes
    };
    let bytes = &mut region.as_mut_slice()[100..100 + wanted.len()];
    std::os::unix::fs::FileExt::read_exact_at(&file, bytes, 0).unwrap();
    assert!(region.as_slice()[100..100 + wanted.len()] == wanted);
}

/// Pins memory for a device, as direct I/O does for as long as it takes; until what is returned is closed.
#[allow(unsafe_code)]
fn pin(bytes: &[u8]) -> std::io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    const REGISTER_BUFFERS: libc::c_int = 0;
    let checked = |result: libc::c_long| match result {
        -1 => Err(std::io::Error::last_os_error()),
        result => Ok(result as i32),
    };
    // `struct io_uring_params`: plain integers, zeros ask for nothing special.
    let mut params = [0u64; 15];
    let part = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
    // SAFETY: the first call fills `params`, which is as long as the structure, and its result is a
    // descriptor of our own. The second reads one iovec; nothing is ever read or written through it.
    unsafe {
        let ring = checked(libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()))?;
        let ring = std::os::fd::OwnedFd::from_raw_fd(ring);
        let number = std::os::fd::AsRawFd::as_raw_fd(&ring);
        checked(libc::syscall(libc::SYS_io_uring_register, number, REGISTER_BUFFERS, &part, 1))?;
        Ok(ring)
    }
}

/// What a device wrote after an eviction would be lost.
#[test]
fn a_page_that_is_pinned_for_a_device_stays() {
    if !can_move() {
        return;
    }
    let Some(mut region) = map(embedded(), 8 * MIB, resident(MIB)) else { return };
    region.as_mut_slice()[3 * PAGE_BYTES..4 * PAGE_BYTES].fill(7);
    let pinned = match pin(&region.as_slice()[3 * PAGE_BYTES..4 * PAGE_BYTES]) {
        Ok(pinned) => pinned,
        Err(error) => return println!("SKIP: io_uring: {error}"),
    };
    region.as_mut_slice()[4 * PAGE_BYTES..].fill(8);
    region.evict_all();
    let is_here = |page: usize| region.is_here(&region.as_slice()[page * PAGE_BYTES]);
    assert!(is_here(3) && !is_here(4), "{:?}", region.counts());
    assert!(region.counts().stuck_count > 0, "{:?}", region.counts());
    drop(pinned);
    // The ring lets go of its buffers in its own time.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while is_here(3) {
        assert!(std::time::Instant::now() < until, "it stays: {:?}", region.counts());
        std::thread::sleep(std::time::Duration::from_millis(10));
        region.evict_all();
    }
    assert!(region.as_slice()[3 * PAGE_BYTES..4 * PAGE_BYTES].iter().all(|byte| *byte == 7));
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

/// A store that refuses puts, and spoils bytes, when it is told to.
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

/// Another writer of the same region, which the pager knows nothing of, spoils a page.
fn spoil(store: &dyn PageStore, page: u64) {
    let sums = [PageSum::of(&[1; PAGE_BYTES])];
    let run = PutRun { first: page, pages: &[1; PAGE_BYTES], sums: &sums };
    store.writer().unwrap().put(RegionId(1), &[run]).unwrap();
}

/// Runs the body in a process of its own, with the name of a directory that is its; how it ended, or nothing if
/// this user may not page.
fn alone(body: impl FnOnce(&std::path::Path)) -> Option<std::process::Output> {
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

fn signal_of(output: &std::process::Output) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&output.status)
}

fn a_page_that_the_store_lost_is_sigbus() {
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

/// Whether the system can read a page.
fn is_readable(page: &[u8]) -> bool {
    let written = std::io::Write::write_all(&mut tempfile::tempfile().unwrap(), page);
    assert_ne!(
        written.as_ref().err().map(|error| error.raw_os_error() == Some(libc::EFAULT)),
        Some(false)
    );
    written.is_ok()
}

fn a_lost_page_that_is_dropped_is_one_again() {
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
        assert!([2, 77].iter().all(|page| !region.is_here(&region.as_slice()[page * PAGE_BYTES])));
    }
    assert!(!is_readable(&region.as_slice()[5 * PAGE_BYTES..6 * PAGE_BYTES]), "it was not dropped");
}

#[allow(unsafe_code)]
fn both_sides_of_a_fork_have_lost_pages() {
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
        assert!(region.before_fork());
        // SAFETY: the child does with locks and memory what glibc allows after fork, and ends by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let right = region.restart_in_child(None).is_ok() && are_right();
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

/// Who waits for a lost page would wait for ever where the stand-in of poison cannot be mapped any more.
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

/// Maps pages that have nothing in common with their neighbours, until the process may have no more of them.
#[allow(unsafe_code)]
fn use_up_mappings() {
    const COUNT: usize = 1 << 22;
    let map = |at: *mut libc::c_void, bytes, protection, more| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | more;
        // SAFETY: fresh mappings, or parts of one that is nobody's, of memory that nobody uses.
        unsafe { libc::mmap(at, bytes, protection, flags, -1, 0) }
    };
    let all = map(std::ptr::null_mut(), COUNT * PAGE_BYTES, libc::PROT_NONE, 0);
    assert_ne!(all, libc::MAP_FAILED);
    for page in (1..COUNT).step_by(2) {
        let at = all.wrapping_byte_add(page * PAGE_BYTES);
        if map(at, PAGE_BYTES, libc::PROT_READ, libc::MAP_FIXED) == libc::MAP_FAILED {
            // The last one, which splits nothing.
            while map(std::ptr::null_mut(), PAGE_BYTES, libc::PROT_READ, 0) != libc::MAP_FAILED
                && map(std::ptr::null_mut(), PAGE_BYTES, libc::PROT_NONE, 0) != libc::MAP_FAILED
            {
            }
            return;
        }
    }
    panic!("this process may have any number of mappings");
}

/// Pages are copied by way of /proc, which a program that changes its root directory finds no more.
#[test]
fn pages_leave_whose_program_has_another_root() {
    let ended = alone(|directory| {
        let options = PagerOptions { features: Features::NoMove, ..PagerOptions::resident(MIB) };
        let Some(mut region) = map(embedded(), 8 * MIB, options) else { return };
        if let Err(error) = std::os::unix::fs::chroot(directory) {
            return println!("SKIP: chroot: {error}");
        }
        // A page that is not there when it is to be copied is not waited for.
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
