//! The suite of the store contract, for every store.

mod redis_server;
mod suite;

use pagetax_core::units::Bytes;
use pagetax_remote::client::cluster::{Cluster, ClusterOptions};
use pagetax_remote::page::{PAGE_BYTES, PageMac, PageRun};
use pagetax_remote::server::listen::{self, Server};
use pagetax_remote::server::pool::Limits;
use pagetax_remote::store::embedded::EmbeddedStore;
use pagetax_remote::store::redis::{EngineOptions, RedisStore};
use pagetax_remote::store::{PageStore, PutRun, RegionId, StoreError};
use redis_server::{RedisServer, url_of};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

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
    let macs = [PageMac::of(&pages[..PAGE_BYTES]); 64];
    writer.put(region, &[PutRun { first: 0, pages: &pages, macs: &macs }]).unwrap();
    assert!(store.used_bytes() < 64 * 200, "{}", store.used_bytes());
    writer.discard(region, &[PageRun { first: 0, count: 64 }]).unwrap();
    assert_eq!(store.used_bytes(), 0);
}

fn start_server(memory: u64) -> Server {
    let limits = Limits { memory: Bytes(memory), ..Limits::default() };
    let options = listen::ServerOptions { limits, ..listen::ServerOptions::default() };
    Server::start((Ipv4Addr::LOCALHOST, 0).into(), options).unwrap()
}

fn cluster_of(servers: &[Server], copies: usize) -> Cluster {
    let labels = servers.iter().map(|server| server.address().to_string()).collect();
    Cluster::connect(ClusterOptions { copies, ..ClusterOptions::new(labels) }).unwrap()
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
    let (bytes, macs) = suite::pages(0..64);
    for first in [0, 512] {
        writer.put(region, &[PutRun { first, pages: &bytes, macs: &macs }]).unwrap();
    }
    // The pages alternate between two chunks, which may lie on two servers.
    let wanted: Vec<_> = (0..).zip(&macs).map(|(at, mac)| (at + at % 2 * 512, *mac)).collect();
    let mut came = 0;
    reader.get_each(region, &wanted, &mut |nth, page| {
        assert_eq!(PageMac::of(page), wanted[nth].1);
        came += 1;
    });
    assert_eq!(came, 64);
}

#[test]
fn three_servers_with_two_copies_keep_their_word() {
    let servers = [start_server(8 << 20), start_server(8 << 20), start_server(8 << 20)];
    suite::all(&mut || Box::new(cluster_of(&servers, 2)));
}

/// Puts pages of these seeds from `first` on.
fn put(store: &dyn PageStore, region: RegionId, first: u64, seeds: std::ops::Range<u64>) {
    let (bytes, macs) = suite::pages(seeds);
    let run = PutRun { first, pages: &bytes, macs: &macs };
    store.writer().unwrap().put(region, &[run]).unwrap();
}

/// Returns true if the pages from `first` on are those of these seeds.
fn holds(store: &dyn PageStore, region: RegionId, first: u64, seeds: std::ops::Range<u64>) -> bool {
    let (bytes, macs) = suite::pages(seeds);
    let mut into = vec![0; bytes.len()];
    let read = store.reader().unwrap().get(region, first, &macs, &mut into);
    read.is_ok() && into == bytes
}

#[test]
fn parent_and_child_of_a_fork_have_the_pages_apart() {
    // Room for 400 pages of the client: shared ones count once.
    let limits = Limits { client_memory: Some(Bytes(400 * 4300)), ..Limits::default() };
    let options = || listen::ServerOptions { limits: limits.clone(), ..Default::default() };
    let start = |_| Server::start((Ipv4Addr::LOCALHOST, 0).into(), options()).unwrap();
    let servers = [0, 1].map(start);
    let held = || servers.each_ref().map(|server| server.pool().pages_held());
    let parent = cluster_of(&servers, 2);
    let region = parent.create_region(1024, true).unwrap();
    (0..5).for_each(|run| put(&parent, region, run * 64, run * 64..run * 64 + 64));
    let child = parent.fork(region).unwrap()().unwrap();
    assert_eq!(held(), [320; 2], "both share the pages");
    // Each changes pages, drops others and adds some.
    put(&parent, region, 0, 1000..1032);
    put(&*child, region, 16, 2000..2032);
    let dropped = [PageRun { first: 64, count: 32 }];
    parent.writer().unwrap().discard(region, &dropped).unwrap();
    child.writer().unwrap().discard(region, &[PageRun { first: 128, count: 32 }]).unwrap();
    put(&*child, region, 700, 3000..3010);
    assert_eq!(held(), [320 + 16 + 32 + 10; 2]);
    assert!(holds(&parent, region, 0, 1000..1032) && holds(&parent, region, 32, 32..64));
    assert!(holds(&*child, region, 0, 0..16) && holds(&*child, region, 16, 2000..2032));
    assert!(holds(&*child, region, 64, 64..128) && holds(&parent, region, 128, 128..192));
    assert!(!holds(&parent, region, 64, 64..65) && !holds(&*child, region, 128, 128..129));
    assert!(holds(&*child, region, 700, 3000..3010) && !holds(&parent, region, 700, 3000..3010));
    // A child of the child, and the parent ends first.
    let grandchild = child.fork(region).unwrap()().unwrap();
    drop(parent);
    assert!(holds(&*grandchild, region, 16, 2000..2032) && holds(&*child, region, 200, 200..256));
    drop(child);
    assert!(holds(&*grandchild, region, 256, 256..320));
    drop(grandchild);
    assert_eq!(held(), [0; 2], "what nobody has any more is free");
}

#[test]
fn a_child_outlives_a_server_and_a_fork_without_a_page_is_refused() {
    let servers = [start_server(8 << 20), start_server(8 << 20), start_server(8 << 20)];
    let parent = cluster_of(&servers, 2);
    let region = parent.create_region(1024, false).unwrap();
    (0..16).for_each(|run| put(&parent, region, run * 64, run * 64..run * 64 + 64));
    let child = parent.fork(region).unwrap()().unwrap();
    let [first, second, third] = servers;
    drop(first);
    let all = |store: &dyn PageStore| {
        (0..16).all(|run| holds(store, region, run * 64, run * 64..run * 64 + 64))
    };
    assert!(all(&*child) && all(&parent));
    // The child makes its copies anew, without the parent's help.
    drop(parent);
    let until = Instant::now() + Duration::from_secs(30);
    let copies = || [&second, &third].map(|server| server.pool().pages_held());
    while copies() != [1024; 2] {
        assert!(Instant::now() < until, "{:?}", copies());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(all(&*child));
    drop((second, third));
    let refused = child.fork(region).err().expect("no server is left").to_string();
    assert!(refused.contains("cannot "), "{refused}");
}

#[test]
fn two_names_of_one_server_hold_one_copy() {
    let options = listen::ServerOptions { insecure: true, ..listen::ServerOptions::default() };
    let server = Server::start((Ipv4Addr::UNSPECIFIED, 0).into(), options).unwrap();
    let port = server.address().port();
    let names = [1, 2].map(|last| format!("127.0.0.{last}:{port}"));
    let connect =
        |copies| Cluster::connect(ClusterOptions { copies, ..ClusterOptions::new(names.to_vec()) });
    let refused = connect(2).unwrap_err().to_string();
    assert!(refused.contains("the same memory server as 127.0.0.1"), "{refused}");
    assert_eq!(connect(1).unwrap().servers_up(), 1);
    // A second server joins.
    let other = start_server(8 << 20);
    let servers = [names[0].clone(), names[1].clone(), other.address().to_string()];
    let store =
        Cluster::connect(ClusterOptions { copies: 2, ..ClusterOptions::new(servers.to_vec()) })
            .unwrap();
    let region = store.create_region(64, false).unwrap();
    let (bytes, macs) = suite::pages(0..64);
    let run = PutRun { first: 0, pages: &bytes, macs: &macs };
    store.writer().unwrap().put(region, &[run]).unwrap();
    assert_eq!([&server, &other].map(|server| server.pool().pages_held()), [64, 64]);
}

#[test]
fn redis_keeps_its_word() {
    let Some(redis) = RedisServer::start(&["--maxmemory-policy", "noeviction"]) else { return };
    let url = redis.url();
    suite::all(&mut || Box::new(RedisStore::connect(EngineOptions::new(url.clone())).unwrap()));
}

#[test]
fn redis_cluster_keeps_its_word() {
    let Some(nodes) = RedisServer::start_cluster(3) else { return };
    let store = RedisStore::connect(EngineOptions::new(url_of(&nodes))).unwrap();
    let (name, _) = redis_server::engine().unwrap();
    let described = store.describe();
    assert!(described.starts_with(&format!("{name} cluster at ")), "{described}");
    drop(store);
    for copies in 1..=3 {
        let options = EngineOptions { copies, ..EngineOptions::new(url_of(&nodes)) };
        suite::all(&mut || Box::new(RedisStore::connect(options.clone()).unwrap()));
    }
    let too_many = EngineOptions { copies: 2, ..EngineOptions::new(nodes[0].url()) };
    assert!(RedisStore::connect(too_many).is_ok(), "one address leads to all masters");
    let count = |node: &RedisServer| node.say("DBSIZE").trim() == ":0";
    assert!(nodes.iter().all(count), "stores that end leave no keys");
}

/// Checks the rights that docs/remote.md names.
#[test]
fn a_user_of_few_rights_can_keep_pages_in_a_cluster() {
    let Some(nodes) = RedisServer::start_cluster(3) else { return };
    let rights = "~pagetax:* +@hash +@keyspace +@connection +info +cluster|nodes";
    for node in &nodes {
        let said = node.say(&format!("ACL SETUSER pages on >word {rights}"));
        assert_eq!(said.trim(), "+OK");
    }
    let url = url_of(&nodes).replace("://", "://pages:word@");
    let options = EngineOptions { copies: 2, ..EngineOptions::new(url) };
    suite::all(&mut || Box::new(RedisStore::connect(options.clone()).unwrap()));
    let missing = "-info";
    nodes.iter().for_each(|node| drop(node.say(&format!("ACL SETUSER pages {missing}"))));
    let refused = RedisStore::connect(options).unwrap_err().to_string();
    assert!(refused.contains("'info'"), "{refused}");
}

#[test]
fn redis_that_may_drop_pages_is_refused() {
    for policy in ["allkeys-lru", "allkeys-random", "volatile-ttl"] {
        let Some(redis) = RedisServer::start(&["--maxmemory-policy", policy]) else { return };
        let refused = RedisStore::connect(EngineOptions::new(redis.url()));
        assert!(
            matches!(&refused, Err(StoreError::Refused { why, .. }) if why.contains(policy)),
            "{refused:?}"
        );
    }
}

#[test]
fn redis_passwords_are_used_and_never_shown() {
    let with_password = |url: String| url.replace("redis://", "redis://:secret@");
    let protect = ["--requirepass", "secret", "--maxmemory-policy", "noeviction"];
    let Some(redis) = RedisServer::start(&protect) else { return };
    let store = RedisStore::connect(EngineOptions::new(with_password(redis.url()))).unwrap();
    let said = format!("{} {store:?}", store.describe());
    assert!(said.contains("127.0.0.1") && !said.contains("secret"), "{said}");
    let refused = [
        redis.url().replace("redis://", "redis://:wrong-secret@"),
        "redis://:wrong-secret@127.0.0.1:1".to_string(),
        "no://wrong-secret@x".to_string(),
    ];
    for refused in refused {
        let said = RedisStore::connect(EngineOptions::new(refused)).unwrap_err().to_string();
        assert!(!said.contains("wrong-secret"), "{said}");
    }
    // Every node of a cluster requires the password.
    let Some(nodes) = RedisServer::start_cluster_with(3, "secret") else { return };
    let url = url_of(&nodes).replace("valkey://", "valkey://:secret@");
    let store = RedisStore::connect(EngineOptions::new(url)).unwrap();
    let region = store.create_region(4096, false).unwrap();
    let (bytes, macs) = suite::pages(0..64);
    let mut writer = store.writer().unwrap();
    for first in (0..1024).step_by(64) {
        writer.put(region, &[PutRun { first, pages: &bytes, macs: &macs }]).unwrap();
    }
}

#[test]
fn redis_pages_expire_unless_their_owner_lives() {
    let Some(redis) = RedisServer::start(&["--maxmemory-policy", "noeviction"]) else { return };
    let (bytes, macs) = suite::pages(0..64);
    let put = |store: &RedisStore| {
        let region = store.create_region(64, false).unwrap();
        let mut writer = store.writer().unwrap();
        writer.put(region, &[PutRun { first: 0, pages: &bytes, macs: &macs }]).unwrap();
        // This empties the hash, which deletes it. The next hash must expire as well.
        writer.discard(region, &[PageRun { first: 0, count: 64 }]).unwrap();
        writer.put(region, &[PutRun { first: 0, pages: &bytes, macs: &macs }]).unwrap();
        region
    };
    let (life, never) = (Duration::from_secs(1), Duration::from_secs(3600));
    // This acts as a crash: no thread renews or deletes pages.
    let connect = |life, renew_every| {
        let options = EngineOptions { life, renew_every, ..EngineOptions::new(redis.url()) };
        RedisStore::connect(options).unwrap()
    };
    let crashed = connect(life, never);
    put(&crashed);
    std::mem::forget(crashed);
    let living = connect(8 * life, life / 2);
    let region = put(&living);
    let until = Instant::now() + Duration::from_secs(60);
    while redis.say("DBSIZE").trim() != ":1" {
        assert!(Instant::now() < until, "{}", redis.say("DBSIZE"));
        std::thread::sleep(Duration::from_millis(50));
    }
    // This is longer than the life of pages that are not renewed.
    let until = Instant::now() + 9 * life;
    while Instant::now() < until {
        std::thread::sleep(life / 2);
        let mut into = vec![0; bytes.len()];
        living.reader().unwrap().get(region, 0, &macs, &mut into).unwrap();
        assert!(into == bytes);
    }
}

/// Starts an engine that returns one page less than was asked for.
fn one_page_less() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let serve = |socket: TcpStream| -> Option<()> {
        let mut from = BufReader::new(socket.try_clone().ok()?);
        let mut to = socket;
        let mut line = || {
            let mut line = String::new();
            from.read_line(&mut line).ok().filter(|len| *len > 0)?;
            Some(line.trim_end().to_string())
        };
        loop {
            // A request is *COUNT, then $LENGTH and a line for each word. All words are text,
            // because this test puts no pages.
            let count: usize = line()?.strip_prefix('*')?.parse().ok()?;
            let words: Option<Vec<String>> =
                (0..count).map(|_| line().and_then(|_| line())).collect();
            let words = words?;
            let answer = match words[0].to_ascii_uppercase().as_str() {
                "INFO" => {
                    let text =
                        "maxmemory_policy:noeviction\r\nmaxmemory:99999999\r\nused_memory:1\r\n";
                    format!("${}\r\n{text}\r\n", text.len())
                }
                "HMGET" | "MGET" => {
                    let pages = words.len() - 3;
                    let page = format!("$4096\r\n{}\r\n", "a".repeat(PAGE_BYTES));
                    format!("*{pages}\r\n{}", page.repeat(pages))
                }
                _ => "+OK\r\n".to_string(),
            };
            to.write_all(answer.as_bytes()).ok()?;
        }
    };
    std::thread::spawn(move || {
        while let Ok((socket, _)) = listener.accept() {
            std::thread::spawn(move || serve(socket));
        }
    });
    url
}

#[test]
fn an_engine_that_answers_too_few_pages_is_an_error() {
    let store = RedisStore::connect(EngineOptions::new(one_page_less())).unwrap();
    let region = store.create_region(64, true).unwrap();
    let macs = [PageMac::of(&[b'a'; PAGE_BYTES]); 4];
    let mut into = vec![0; 4 * PAGE_BYTES];
    let got = store.reader().unwrap().get(region, 0, &macs, &mut into);
    assert!(got.is_err(), "the last page is {:?}", &into[3 * PAGE_BYTES..][..4]);
}
