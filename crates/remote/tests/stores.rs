//! One suite for every store: what the pager relies on.

mod redis_server;
mod suite;

use pagetax_core::units::Bytes;
use pagetax_remote::client::cluster::{Cluster, Options};
use pagetax_remote::page::{PAGE_BYTES, PageRun, PageSum};
use pagetax_remote::server::listen::{self, Server};
use pagetax_remote::server::pool::Limits;
use pagetax_remote::store::embedded::EmbeddedStore;
use pagetax_remote::store::redis::RedisStore;
use pagetax_remote::store::{PageStore, PutRun, StoreError};
use redis_server::RedisServer;
use std::net::Ipv4Addr;

#[test]
fn embedded_store_keeps_its_word() {
    suite::all(&mut || Box::new(EmbeddedStore::new(Bytes(4 << 20))));
}

#[test]
fn embedded_store_compresses_and_gives_back() {
    let store = EmbeddedStore::new(Bytes(1 << 20));
    let region = store.create_region(64, false).unwrap();
    let mut writer = store.writer().unwrap();
    let pages = vec![7u8; 64 * PAGE_BYTES];
    let sums = [PageSum::of(&pages[..PAGE_BYTES]); 64];
    writer.put(region, &[PutRun { first: 0, pages: &pages, sums: &sums }]).unwrap();
    assert!(store.used_bytes() < 64 * 200, "{}", store.used_bytes());
    writer.discard(region, &[PageRun { first: 0, count: 64 }]).unwrap();
    assert_eq!(store.used_bytes(), 0);
}

fn start_server(memory: u64) -> Server {
    let limits = Limits { memory: Bytes(memory), ..Limits::default() };
    let options = listen::Options { limits, ..listen::Options::default() };
    Server::start((Ipv4Addr::LOCALHOST, 0).into(), options).unwrap()
}

fn cluster_of(servers: &[Server], copies: usize) -> Cluster {
    let labels = servers.iter().map(|server| server.address().to_string()).collect();
    Cluster::connect(Options { copies, ..Options::new(labels) }).unwrap()
}

#[test]
fn one_server_keeps_its_word() {
    let servers = [start_server(8 << 20)];
    suite::all(&mut || Box::new(cluster_of(&servers, 1)));
    assert_eq!(servers[0].pool().pages_held(), 0, "clients that leave give their memory back");
}

#[test]
fn servers_hand_over_what_is_asked_for_together() {
    let servers = [start_server(8 << 20), start_server(8 << 20)];
    let store = cluster_of(&servers, 1);
    let region = store.create_region(1024, false).unwrap();
    let (mut writer, mut reader) = (store.writer().unwrap(), store.reader().unwrap());
    let (bytes, sums) = suite::pages(0..64);
    for first in [0, 512] {
        writer.put(region, &[PutRun { first, pages: &bytes, sums: &sums }]).unwrap();
    }
    // Of two chunks in turn, which may lie on two servers.
    let wanted: Vec<_> = (0..).zip(&sums).map(|(at, sum)| (at + at % 2 * 512, *sum)).collect();
    let mut came = 0;
    reader.get_each(region, &wanted, &mut |nth, page| {
        assert_eq!(PageSum::of(page), wanted[nth].1);
        came += 1;
    });
    assert_eq!(came, 64);
}

#[test]
fn three_servers_with_two_copies_keep_their_word() {
    let servers = [start_server(8 << 20), start_server(8 << 20), start_server(8 << 20)];
    suite::all(&mut || Box::new(cluster_of(&servers, 2)));
}

#[test]
fn redis_keeps_its_word() {
    let Some(redis) = RedisServer::start(&["--maxmemory-policy", "noeviction"]) else { return };
    let url = redis.url();
    suite::all(&mut || Box::new(RedisStore::connect(std::slice::from_ref(&url)).unwrap()));
}

#[test]
fn redis_cluster_keeps_its_word() {
    let Some(nodes) = RedisServer::start_cluster(3) else { return };
    let urls: Vec<String> = nodes.iter().map(RedisServer::url).collect();
    let store = RedisStore::connect(&urls).unwrap();
    assert!(store.describe().starts_with("Redis cluster at "), "{}", store.describe());
    drop(store);
    suite::all(&mut || Box::new(RedisStore::connect(&urls).unwrap()));
}

#[test]
fn redis_that_may_drop_pages_is_refused() {
    for policy in ["allkeys-lru", "allkeys-random"] {
        let Some(redis) = RedisServer::start(&["--maxmemory-policy", policy]) else { return };
        let refused = RedisStore::connect(&[redis.url()]);
        assert!(
            matches!(&refused, Err(StoreError::Refused { why, .. }) if why.contains(policy)),
            "{refused:?}"
        );
    }
}
