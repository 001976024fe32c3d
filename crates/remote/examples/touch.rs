//! A benchmark that fills a region of memory, reads it through and rewrites pages at random. The
//! region is plain memory, or its pages are on memory servers. Prints one line of JSON.
//!
//! ```sh
//! touch plain 1024                                    # MiB
//! touch plain 1024 0                                      # the program keeps to CPU 0
//! touch paged 1024 256 127.0.0.1:7070,127.0.0.1:7071 2    # MiB resident, servers, copies
//! touch paged 1024 256 127.0.0.1:7070 1 0                 # the program keeps to CPU 0
//! touch threads 8 1024 256 127.0.0.1:7070 1               # this many threads rewrite pages at random
//! touch cold 64 127.0.0.1:7070,127.0.0.1:7071 2
//! touch fill 64 4 127.0.0.1:7070 1                      # only writes
//! ```
//!
//! No device writes to this memory, so its pages are evicted by the cheapest method.
//! `PAGETAX_REMOTE_EVICTION=moved` or `copied` chooses that method for all pages. With
//! `PAGETAX_REMOTE_SERVING=in-place` threads serve their own faults. `PAGETAX_REMOTE_AWAKE` (auto, always,
//! never) tells when idle CPUs stay awake. With `PAGETAX_REMOTE_INSECURE` servers may be beyond loopback.

use pagetax_core::access::Rng;
use pagetax_remote::client::cluster::{self, Cluster};
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::pager::{EvictionMethod, KeepAwake, PagerOptions, RemoteRegion, Serving};
use pagetax_remote::store::PageStore;
use serde_json::{Value, json};
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

/// The number of random rewrites, unless `PAGETAX_TOUCH_REWRITES` has another.
const REWRITES: usize = 300_000;

/// Returns the number of random rewrites.
fn rewrites() -> usize {
    let set = std::env::var("PAGETAX_TOUCH_REWRITES").ok().and_then(|text| text.parse().ok());
    set.unwrap_or(REWRITES)
}
/// The number of accesses before page-ins are timed: connections and caches are warm then.
const WARM: usize = 1000;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match args[..] {
        ["plain", mib, ref cpu @ ..] if cpu.len() < 2 => {
            keep_to(cpu)?;
            phases(&mut vec![0; mib.parse::<usize>()? << 20], None)
        }
        ["paged", mib, resident_mib, servers, copies, ref cpu @ ..] if cpu.len() < 2 => {
            let before = resident_bytes();
            let region = map(mib, resident_mib, servers, copies)?;
            keep_to(cpu)?;
            let mut result = phases(memory_of(&region), Some(&region));
            let own = resident_bytes().saturating_sub(before + region.resident_bytes());
            result["own_bytes"] = json!(own);
            result["counts"] = json!(format!("{:?}", region.counts()));
            println!("{result}");
            // A caller that wants to look at the servers keeps our input open.
            std::io::stdin().read_line(&mut String::new())?;
            return Ok(());
        }
        ["threads", threads, mib, resident_mib, servers, copies, ref cpu @ ..] if cpu.len() < 2 => {
            let region = map(mib, resident_mib, servers, copies)?;
            keep_to(cpu)?;
            let before = region.counts();
            let mut result = by_threads(memory_of(&region), &region, threads.parse()?);
            result["counts"] = json!(format!("{:?}", region.counts().since(&before)));
            result
        }
        ["cold", mib, servers, copies] => {
            let mut region = map(mib, mib, servers, copies)?;
            cold(&mut region)
        }
        ["fill", mib, resident_mib, servers, copies] => {
            let region = map(mib, resident_mib, servers, copies)?;
            let (content, begun) = (Content::new(), Instant::now());
            for (number, page) in memory_of(&region).chunks_exact_mut(PAGE_BYTES).enumerate() {
                content.write(page, number, 0);
            }
            let written = region.counts().page_out_count as f64;
            json!({"written_pages_per_s": written / begun.elapsed().as_secs_f64()})
        }
        _ => {
            return Err("touch plain MIB [CPU] | paged MIB RESIDENT SERVERS COPIES [CPU] | \
                 threads N MIB RESIDENT SERVERS COPIES [CPU] | cold MIB SERVERS COPIES | \
                 fill MIB RESIDENT SERVERS COPIES"
                .into());
        }
    };
    println!("{result}");
    Ok(())
}

fn map(
    mib: &str,
    resident_mib: &str,
    servers: &str,
    copies: &str,
) -> Result<RemoteRegion, Box<dyn Error>> {
    let servers = servers.split(',').map(String::from).collect();
    let options = cluster::ClusterOptions {
        copies: copies.parse()?,
        insecure: std::env::var_os("PAGETAX_REMOTE_INSECURE").is_some(),
        ..cluster::ClusterOptions::new(servers)
    };
    let store: Arc<dyn PageStore> = Arc::new(Cluster::connect(options)?);
    // Room for the resident set, and for the pages under way.
    let resident_bytes = (resident_mib.parse::<u64>()? << 20) + (4 << 20);
    let named = std::env::var("PAGETAX_REMOTE_EVICTION").ok();
    let eviction_method =
        named.and_then(|name| EvictionMethod::named(&name)).unwrap_or(EvictionMethod::Cheapest);
    let options = PagerOptions {
        eviction_method,
        serving: serving(),
        keep_awake: keep_awake(),
        ..PagerOptions::resident(resident_bytes)
    };
    Ok(RemoteRegion::map(store, mib.parse::<u64>()? << 20, options)?)
}

/// Returns from the environment when idle CPUs are kept awake.
fn keep_awake() -> KeepAwake {
    let named = std::env::var("PAGETAX_REMOTE_AWAKE").ok();
    named.and_then(|name| KeepAwake::named(&name)).unwrap_or_default()
}

/// Returns the serving mode from the environment.
fn serving() -> Serving {
    let named = std::env::var("PAGETAX_REMOTE_SERVING").ok();
    named.and_then(|name| Serving::named(&name)).unwrap_or_default()
}

/// Returns all bytes of a region, for its only user. Not `as_mut_slice`: the region must still
/// answer which pages are resident.
#[allow(unsafe_code, clippy::mut_from_ref)]
fn memory_of(region: &RemoteRegion) -> &mut [u8] {
    // SAFETY: the region's bytes, which are valid as long as the region. This is called once, and
    // no other code reads them.
    unsafe { std::slice::from_raw_parts_mut(region.as_ptr(), region.len()) }
}

/// Pins this thread to a CPU, if one is given. The pager's threads stay free.
fn keep_to(cpu: &[&str]) -> Result<(), Box<dyn Error>> {
    let [cpu] = cpu else { return Ok(()) };
    let mut one = rustix::thread::CpuSet::new();
    one.set(cpu.parse()?);
    Ok(rustix::thread::sched_setaffinity(None, &one)?)
}

/// The content of pages, half of which does not compress.
struct Content {
    random: Vec<u8>,
}

impl Content {
    fn new() -> Content {
        let mut rng = Rng::new(1);
        Content {
            random: (0..PAGE_BYTES / 2 / 8 * 64)
                .flat_map(|_| rng.next_u64().to_le_bytes())
                .collect(),
        }
    }

    /// Writes a page, with its number and the count of its writes at both ends.
    fn write(&self, page: &mut [u8], number: usize, version: u32) {
        let from = number % 32 * (PAGE_BYTES / 2);
        page[..PAGE_BYTES / 2].copy_from_slice(&self.random[from..from + PAGE_BYTES / 2]);
        page[PAGE_BYTES / 2..].fill(number as u8);
        stamp(page, number, version);
    }
}

fn label(number: usize, version: u32) -> [u8; 8] {
    (((number as u64) << 32) | u64::from(version)).to_le_bytes()
}

fn stamp(page: &mut [u8], number: usize, version: u32) {
    page[..8].copy_from_slice(&label(number, version));
    page[PAGE_BYTES - 8..].copy_from_slice(&label(number, version));
}

fn check(page: &[u8], number: usize, version: u32) {
    let wanted = label(number, version);
    let (head, tail) = (&page[..8], &page[PAGE_BYTES - 8..]);
    assert!(
        head == wanted && tail == wanted,
        "page {number} holds {head:x?} and {tail:x?}, not {wanted:x?}"
    );
}

fn phases(memory: &mut [u8], region: Option<&RemoteRegion>) -> Value {
    let pages = memory.len() / PAGE_BYTES;
    let content = Content::new();
    let rate = |begun: Instant, count: usize| count as f64 / begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    for (number, page) in memory.chunks_exact_mut(PAGE_BYTES).enumerate() {
        content.write(page, number, 0);
    }
    let fill = rate(begun, pages);
    let begun = Instant::now();
    for (number, page) in memory.chunks_exact(PAGE_BYTES).enumerate() {
        check(page, number, 0);
    }
    let sequential = rate(begun, pages);
    let (mut versions, mut rng) = (vec![0; pages], Rng::new(2));
    let mut faulting = Faulting::new(rewrites(), region);
    let begun = Instant::now();
    for _ in 0..rewrites() {
        let number = rng.below(pages as u64) as usize;
        let page = &mut memory[number * PAGE_BYTES..][..PAGE_BYTES];
        let at = page.as_ptr();
        faulting.time(at, || {
            check(page, number, versions[number]);
            versions[number] += 1;
            stamp(page, number, versions[number]);
        });
    }
    let seconds = begun.elapsed().as_secs_f64();
    for (number, page) in memory.chunks_exact(PAGE_BYTES).enumerate() {
        check(page, number, versions[number]);
    }
    json!({
        "fill_pages_per_s": fill,
        "sequential_pages_per_s": sequential,
        "rewrite": rewritten(faulting.took_ns, seconds),
    })
}

/// The times of accesses that faulted. The thread's count of faults tells them apart. The kernel
/// does not count faults that the thread serves itself: those are accesses to pages that were not
/// resident.
struct Faulting<'a> {
    took_ns: Vec<u64>,
    faults: u64,
    in_place: Option<&'a RemoteRegion>,
}

impl Faulting<'_> {
    /// Returns an empty state for `accesses` accesses by this thread.
    fn new(accesses: usize, region: Option<&RemoteRegion>) -> Faulting<'_> {
        let in_place = region.filter(|_| serving() == Serving::InPlace);
        Faulting { took_ns: Vec::with_capacity(accesses), faults: fault_count(), in_place }
    }

    fn time(&mut self, address: *const u8, access: impl FnOnce()) {
        let will_fault = self.in_place.is_some_and(|region| !region.is_resident(address));
        let at = Instant::now();
        access();
        let took_ns = at.elapsed().as_nanos() as u64;
        if will_fault || self.in_place.is_none() && self.has_faulted() {
            self.took_ns.push(took_ns);
        }
    }

    /// Returns true if the kernel has counted a fault of this thread since the last call.
    fn has_faulted(&mut self) -> bool {
        let before = std::mem::replace(&mut self.faults, fault_count());
        self.faults > before
    }
}

/// Returns the number of accesses that faulted, each counted once, and how long they took.
fn rewritten(mut took_ns: Vec<u64>, seconds: f64) -> Value {
    took_ns.sort_unstable();
    json!({
        "accesses": rewrites(),
        "faults": took_ns.len(),
        "faults_per_s": took_ns.len() as f64 / seconds,
        "p50_ns": took_ns[took_ns.len() / 2],
        "p99_ns": took_ns[took_ns.len() * 99 / 100],
    })
}

/// Rewrites pages at random in several threads at once. Each thread has its own pages all over the
/// memory: page p belongs to thread p modulo their number.
fn by_threads(memory: &mut [u8], region: &RemoteRegion, threads: usize) -> Value {
    let content = Content::new();
    for (number, page) in memory.chunks_exact_mut(PAGE_BYTES).enumerate() {
        content.write(page, number, 0);
    }
    let mut shares: Vec<Vec<(usize, &mut [u8])>> = (0..threads).map(|_| Vec::new()).collect();
    for (number, page) in memory.chunks_exact_mut(PAGE_BYTES).enumerate() {
        shares[number % threads].push((number, page));
    }
    let begun = Instant::now();
    let done: Vec<Rewritten> = std::thread::scope(|scope| {
        let mut started = Vec::with_capacity(threads);
        for (seed, share) in (0..).zip(&mut shares) {
            started.push(scope.spawn(move || rewrite(share, region, seed, rewrites() / threads)));
        }
        started.into_iter().map(|thread| thread.join().expect("pages as written")).collect()
    });
    let seconds = begun.elapsed().as_secs_f64();
    let took = done.iter().flat_map(|one| one.took_ns.iter().copied()).collect();
    drop(shares);
    for (number, page) in memory.chunks_exact(PAGE_BYTES).enumerate() {
        check(page, number, done[number % threads].versions[number / threads]);
    }
    json!({ "threads": threads, "rewrite": rewritten(took, seconds) })
}

/// The result of one thread's rewrites.
struct Rewritten {
    /// The number of writes to each of its pages.
    versions: Vec<u32>,
    /// The time of each rewrite that faulted.
    took_ns: Vec<u64>,
}

/// Rewrites `times` of these pages, chosen at random.
fn rewrite(
    pages: &mut [(usize, &mut [u8])],
    region: &RemoteRegion,
    seed: u64,
    times: usize,
) -> Rewritten {
    let (mut versions, mut rng) = (vec![0; pages.len()], Rng::new(seed));
    let mut faulting = Faulting::new(times, Some(region));
    for _ in 0..times {
        let nth = rng.below(pages.len() as u64) as usize;
        let (number, page) = &mut pages[nth];
        let at = page.as_ptr();
        faulting.time(at, || {
            check(page, *number, versions[nth]);
            versions[nth] += 1;
            stamp(page, *number, versions[nth]);
        });
    }
    Rewritten { versions, took_ns: faulting.took_ns }
}

/// Measures page-ins alone: all pages are evicted, and there is room for all of them.
fn cold(region: &mut RemoteRegion) -> Value {
    let content = Content::new();
    let memory = region.as_mut_slice();
    let pages = memory.len() / PAGE_BYTES;
    for (number, page) in memory.chunks_exact_mut(PAGE_BYTES).enumerate() {
        content.write(page, number, 0);
    }
    region.evict_all();
    let mut order: Vec<usize> = (0..pages).collect();
    let mut rng = Rng::new(3);
    for at in (1..pages).rev() {
        order.swap(at, rng.below(at as u64 + 1) as usize);
    }
    let memory = region.as_slice();
    let touch = |number: &usize| {
        let at = Instant::now();
        std::hint::black_box(memory[number * PAGE_BYTES]);
        at.elapsed().as_nanos() as u64
    };
    let mut took: Vec<u64> = order.iter().map(touch).skip(WARM).collect();
    took.sort_unstable();
    order.iter().for_each(|number| check(&memory[number * PAGE_BYTES..][..PAGE_BYTES], *number, 0));
    json!({
        "p50_ns": took[took.len() / 2],
        "p99_ns": took[took.len() * 99 / 100],
        "counts": format!("{:?}", region.counts()),
    })
}

/// Returns the resident set of this process in bytes.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * PAGE_BYTES as u64
}

/// Returns the number of page faults of this thread so far, of any kind.
#[allow(unsafe_code)]
fn fault_count() -> u64 {
    // SAFETY: zeros are a valid `rusage`, and getrusage(2) fills in the one that it is given.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage
    };
    (usage.ru_minflt + usage.ru_majflt) as u64
}
