//! Servers on loopback that are killed, stopped, restarted and sent home.

use crate::pages::{page, put, try_get, wait_until};
use crate::serve::{PAGETAX, Serve};
use pagetax_core::access::Rng;
use pagetax_remote::client::cluster::{Cluster, ClusterOptions};
use pagetax_remote::page::{PAGE_BYTES, PageMac};
use pagetax_remote::store::{PageStore, PutRun, StoreError};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

fn cluster(servers: &[Serve], copies: usize) -> Cluster {
    let labels = servers.iter().map(|server| server.address.clone()).collect();
    let options = ClusterOptions {
        copies,
        repair_after: Duration::from_millis(300),
        unreachable: Duration::from_secs(3),
        ..ClusterOptions::new(labels)
    };
    Cluster::connect(options).unwrap()
}

#[test]
fn killed_one_after_the_other_nothing_is_lost() {
    const PAGES: u64 = 1500;
    let mut servers: Vec<Serve> = (0..4).map(|_| Serve::any("64M")).collect();
    let store = cluster(&servers, 2);
    let region = store.create_region(PAGES, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    let mut versions = vec![0; PAGES as usize];
    (0..PAGES).for_each(|number| put(&mut *writer, region, number, 0));
    let mut rng = Rng::new(7);
    let mut stall_max = Duration::ZERO;
    for (killed, victim) in servers[..2].iter_mut().enumerate() {
        let mut at = Instant::now();
        for step in 0..3000 {
            if step == 500 {
                victim.kill();
            }
            let number = rng.below(PAGES);
            if rng.below(2) == 0 {
                versions[number as usize] += 1;
                put(&mut *writer, region, number, versions[number as usize]);
            } else {
                try_get(&mut *reader, region, number, versions[number as usize]).unwrap();
            }
            let now = Instant::now();
            (stall_max, at) = (stall_max.max(now - at), now);
        }
        wait_until("copies are made again", 30, || {
            store.servers_up() == 3 - killed && store.replicas_missing() == 0
        });
    }
    for (number, version) in (0..).zip(&versions) {
        try_get(&mut *reader, region, number, *version).unwrap();
    }
    println!("longest stall: {stall_max:?}");
}

#[test]
fn a_server_that_stops_answering_does_not_stop_reads() {
    const PAGES: u64 = 512;
    let servers: Vec<Serve> = (0..2).map(|_| Serve::any("32M")).collect();
    let store = cluster(&servers, 2);
    let region = store.create_region(PAGES, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    (0..PAGES).for_each(|number| put(&mut *writer, region, number, 0));
    servers[0].signal("-STOP");
    let mut slowest = Duration::ZERO;
    for number in 0..PAGES {
        let at = Instant::now();
        try_get(&mut *reader, region, number, 0).unwrap();
        slowest = slowest.max(at.elapsed());
    }
    println!("slowest read while a server was stopped: {slowest:?}");
    put(&mut *writer, region, 1, 1);
    servers[0].signal("-CONT");
    wait_until("it is taken in again", 20, || {
        store.servers_up() == 2 && store.replicas_missing() == 0
    });
    put(&mut *writer, region, 2, 1);
    let versions = |number| u64::from(number == 1 || number == 2);
    for number in 0..PAGES {
        try_get(&mut *reader, region, number, versions(number)).unwrap();
    }
}

#[test]
fn a_restarted_server_is_not_taken_for_the_old_one() {
    let mut servers = vec![Serve::any("16M")];
    let store = cluster(&servers, 1);
    let region = store.create_region(64, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    (0..64).for_each(|number| put(&mut *writer, region, number, 0));
    let address = servers[0].address.clone();
    servers[0].kill();
    servers[0] = Serve::start("16M", &address, &[]);
    for number in 0..64 {
        let lost = try_get(&mut *reader, region, number, 0);
        assert!(
            matches!(lost, Err(StoreError::PageLost { page, .. }) if page == number),
            "{lost:?}"
        );
    }
    put(&mut *writer, region, 3, 1);
    try_get(&mut *reader, region, 3, 1).unwrap();
}

#[test]
fn the_owner_hears_of_losses_before_it_reads() {
    let mut server = Serve::any("16M");
    let (lines, said) = mpsc::channel();
    let log = move |line: &str| lines.send(line.to_string()).unwrap();
    let options = ClusterOptions {
        log: Some(Arc::new(log)),
        ..ClusterOptions::new(vec![server.address.clone()])
    };
    let store = Cluster::connect(options).unwrap();
    let region = store.create_region(64, false).unwrap();
    put(&mut *store.writer().unwrap(), region, 7, 0);
    assert_eq!(store.counters().chunks_damaged_total.load(Ordering::Relaxed), 0);
    let address = server.address.clone();
    server.kill();
    let _another = Serve::start("16M", &address, &[]);
    let line = said.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(line.contains(&address) && line.contains("keep more copies"), "{line}");
    assert_eq!(store.counters().chunks_damaged_total.load(Ordering::Relaxed), 1);
}

#[test]
fn a_blip_loses_nothing_of_a_single_copy() {
    let servers = [Serve::any("16M")];
    let store = cluster(&servers, 1);
    let region = store.create_region(64, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    (0..64).for_each(|number| put(&mut *writer, region, number, 0));
    servers[0].signal("-STOP");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(1200));
            servers[0].signal("-CONT");
        });
        (0..32).for_each(|number| put(&mut *writer, region, number, 1));
        for number in 0..64 {
            try_get(&mut *reader, region, number, u64::from(number < 32)).unwrap();
        }
    });
}

#[test]
fn a_drained_server_leaves_its_pages_with_others() {
    const PAGES: u64 = 1024;
    let mut servers: Vec<Serve> = (0..2).map(|_| Serve::any("32M")).collect();
    let store = cluster(&servers, 1);
    let region = store.create_region(PAGES, false).unwrap();
    let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
    (0..PAGES).for_each(|number| put(&mut *writer, region, number, 0));
    let drained = Command::new(PAGETAX)
        .args(["serve", "--drain", "--listen", &servers[0].address])
        .output()
        .unwrap();
    assert!(drained.status.success(), "{drained:?}");
    wait_until("it has ended", 5, || servers[0].child.try_wait().unwrap().is_some());
    for number in 0..PAGES {
        try_get(&mut *reader, region, number, 0).unwrap();
    }
}

#[test]
fn overhead_health_metrics_and_what_people_see() {
    const PAGES: u64 = 48 << 8;
    let server = Serve::start("64M", "127.0.0.1:0", &["--http", "127.0.0.1:0"]);
    let servers = [server];
    let before = servers[0].own_bytes();
    let store = cluster(&servers, 1);
    let region = store.create_region(PAGES, false).unwrap();
    let mut writer = store.writer().unwrap();
    for first in (0..PAGES).step_by(64) {
        let pages: Vec<u8> = (first..first + 64).flat_map(|number| page(number, 0)).collect();
        let macs: Vec<PageMac> = pages.chunks(PAGE_BYTES).map(PageMac::of).collect();
        writer.put(region, &[PutRun { first, pages: &pages, macs: &macs }]).unwrap();
    }
    let (held, grown) = (PAGES * PAGE_BYTES as u64, servers[0].own_bytes() - before);
    let overhead = grown as f64 / held as f64 - 1.0;
    println!("overhead over {} MiB held: {:.2} %", held >> 20, overhead * 100.0);
    assert!(overhead <= 0.015, "{overhead}");
    assert!(servers[0].get("/health").contains("\r\n\r\nok"));
    let metrics = servers[0].get("/metrics");
    for line in [
        format!("pagetax_pages_held {PAGES}"),
        format!("pagetax_pages_in_total {PAGES}"),
        "pagetax_put_seconds_count 192".into(),
        "pagetax_regions 1".into(),
    ] {
        assert!(metrics.contains(&line), "no `{line}` in {metrics}");
    }
    let seen = Command::new(PAGETAX)
        .args(["servers", "--json", "--servers", &servers[0].address])
        .output()
        .unwrap();
    let seen: serde_json::Value = serde_json::from_slice(&seen.stdout).unwrap();
    let client = &seen["servers"][0]["report"]["clients"][0];
    assert_eq!(client["pages_held"], PAGES, "{seen:#}");
    assert_eq!(client["pid"], std::process::id(), "{seen:#}");
    drop(writer);
    drop(store);
    assert!(servers[0].get("/metrics").contains("pagetax_pages_held 0"));
}

#[test]
fn mistakes_are_answered_with_a_remedy() {
    let tries: [(&[&str], &str); 8] = [
        (&["serve", "--listen", "0.0.0.0:0"], "--insecure"),
        (&["serve", "--memory", "1K"], "--memory 1M"),
        (&["serve", "--memory", "900T", "--listen", "127.0.0.1:0"], "give --memory less"),
        (&["serve", "--listen", "127.0.0.1:0", "--tls-cert", "x"], "--tls-key"),
        (&["serve", "--drain", "--listen", "127.0.0.1:1"], "pagetax serve"),
        (&["servers", "--servers", "127.0.0.1:1", "--once"], "pagetax serve"),
        (&["servers", "--servers", "a,,b", "--once"], "a value is required"),
        (&["servers", "--servers", "no.such.host.invalid", "--once"], "no.such.host.invalid"),
    ];
    for (args, remedy) in tries {
        let output = Command::new(PAGETAX).args(args).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(!output.status.success() && said.contains(remedy), "{args:?}: {said}");
    }
}
