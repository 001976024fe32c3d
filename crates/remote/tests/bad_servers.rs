//! Servers that are alive but faulty: slow ones, and those on whose path pages are damaged.

mod behind;

use behind::behind;
use pagetax_remote::client::cluster::{Cluster, ClusterOptions};
use pagetax_remote::page::{PAGE_BYTES, PageMac};
use pagetax_remote::store::{PageStore, PutRun};
use pagetax_remote::wire::header::Op;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn honest() -> SocketAddr {
    behind(|_| {}, |_| {})
}

/// Starts a server that takes 20 ms for each put. That is far below the timeout.
fn slow() -> SocketAddr {
    let hold_up = |frame: &mut [u8]| {
        if frame[0] == Op::Put as u8 {
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    behind(hold_up, |_| {})
}

fn cluster(servers: &[SocketAddr], copies: usize) -> Cluster {
    let labels = servers.iter().map(SocketAddr::to_string).collect();
    Cluster::connect(ClusterOptions { copies, ..ClusterOptions::new(labels) }).unwrap()
}

fn round_trip(store: &Cluster) {
    let region = store.create_region(64, false).unwrap();
    let page = vec![9; PAGE_BYTES];
    let macs = [PageMac::of(&page)];
    let run = PutRun { first: 5, pages: &page, macs: &macs };
    store.writer().unwrap().put(region, &[run]).unwrap();
    let mut into = vec![0; PAGE_BYTES];
    store.reader().unwrap().get(region, 5, &macs, &mut into).unwrap();
    assert!(into == page);
}

/// Puts a page into each of 64 chunks, as evictors put many runs at once. Returns how often a
/// server was shunned.
fn put_many(store: &Cluster) -> u64 {
    let region = store.create_region(64 * 256, true).unwrap();
    let page = vec![9; PAGE_BYTES];
    let macs = [PageMac::of(&page)];
    let run = |chunk: u64| PutRun { first: chunk * 256, pages: &page, macs: &macs };
    let runs: Vec<PutRun<'_>> = (0..64).map(run).collect();
    store.writer().unwrap().put(region, &runs).unwrap();
    store.counters().servers_down_total.load(Ordering::Relaxed)
}

#[test]
fn a_server_that_is_far_slower_than_the_others_is_left() {
    let store = cluster(&[slow(), honest(), honest()], 2);
    assert_eq!(put_many(&store), 1);
    let until = Instant::now() + Duration::from_secs(10);
    while store.replicas_missing() > 0 {
        assert!(Instant::now() < until, "{} copies are missing", store.replicas_missing());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_slow_server_is_used_where_pages_would_have_fewer_copies_without_it() {
    let store = cluster(&[slow(), honest()], 2);
    assert_eq!(put_many(&store), 0);
    assert_eq!(store.replicas_missing(), 0);
}

#[test]
fn servers_that_are_slow_together_are_used() {
    let store = cluster(&[slow(), slow(), slow()], 2);
    assert_eq!(put_many(&store), 0);
}

/// Damages the last page of a put.
fn damage(frame: &mut [u8]) {
    let last = frame.len() - 1;
    if frame[0] == Op::Put as u8 {
        frame[last] ^= 1;
    }
}

#[test]
fn a_page_that_is_damaged_on_its_way_is_sent_again() {
    let is_first = AtomicBool::new(true);
    let damage_first = move |frame: &mut [u8]| {
        if frame[0] == Op::Put as u8 && is_first.swap(false, Ordering::Relaxed) {
            damage(frame);
        }
    };
    let server = behind(damage_first, |_| {});
    round_trip(&cluster(&[server], 1));
}

#[test]
fn a_server_on_whose_way_all_pages_are_damaged_is_left() {
    let store = cluster(&[behind(damage, |_| {}), honest()], 1);
    // Each round has a region of its own, because first pages are placed one by one.
    (0..8).for_each(|_| round_trip(&store));
    assert!(store.counters().servers_down_total.load(Ordering::Relaxed) > 0, "it was never asked");
}
