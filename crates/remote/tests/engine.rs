//! A store in Redis whose servers fail, move their slots, or ask for certificates.

mod redis_server;

use pagetax_remote::page::{PAGE_BYTES, PageMac, PageRun};
use pagetax_remote::pager::Log;
use pagetax_remote::store::redis::{EngineOptions, EngineTls, RedisStore};
use pagetax_remote::store::{PageReader, PageStore, PutRun, RegionId, StoreError};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use redis_server::{RedisServer, url_of};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Returns pages that no other hash has.
fn pages(hash: u64) -> (Vec<u8>, Vec<PageMac>) {
    let word = |at: usize| (hash * 1_000_003 + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bytes: Vec<u8> = (0..PAGE_BYTES).flat_map(|at| word(at).to_le_bytes()).collect();
    let macs = bytes.chunks_exact(PAGE_BYTES).map(PageMac::of).collect();
    (bytes, macs)
}

/// Puts pages into so many hashes of a new region.
fn fill(store: &RedisStore, hashes: u64) -> RegionId {
    let region = store.create_region(hashes * 64, true).unwrap();
    let mut writer = store.writer().unwrap();
    for hash in 0..hashes {
        let (bytes, macs) = pages(hash);
        writer.put(region, &[PutRun { first: hash * 64, pages: &bytes, macs: &macs }]).unwrap();
    }
    region
}

/// Returns the number of hashes whose pages cannot be read, by page lost and by store not reachable.
fn unread(reader: &mut dyn PageReader, region: RegionId, hashes: u64) -> (usize, usize) {
    let (mut lost, mut unreachable) = (0, 0);
    for hash in 0..hashes {
        let (bytes, macs) = pages(hash);
        let mut into = vec![0; bytes.len()];
        match reader.get(region, hash * 64, &macs, &mut into) {
            Ok(()) => assert!(into == bytes, "hash {hash} differs"),
            Err(StoreError::PageLost { .. }) => lost += 1,
            Err(StoreError::Unreachable { .. }) => unreachable += 1,
            Err(other) => panic!("{other}"),
        }
    }
    (lost, unreachable)
}

/// Waits for something that a cluster does by itself.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < until, "waited for {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Ends a server at once, as a crash would.
fn kill(server: &mut RedisServer) {
    server.child.kill().unwrap();
    server.child.wait().unwrap();
}

/// Ends a server of a cluster as a crash would, and starts it again at its place, without its data.
fn restart(server: &mut RedisServer) {
    let folder = std::fs::read_link(format!("/proc/{}/cwd", server.child.id())).unwrap();
    kill(server);
    server.child = Command::new(redis_server::engine().unwrap().1)
        .args(["--port", &server.port.to_string(), "--bind", "127.0.0.1", "--save", ""])
        .args(["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"])
        .current_dir(folder)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the server to be up", || server.try_say("PING").is_ok());
}

/// Starts a cluster of three masters without replicas that still serves once one has failed.
fn cluster_that_goes_on() -> Option<Vec<RedisServer>> {
    let nodes = RedisServer::start_cluster(3)?;
    nodes.iter().for_each(|node| {
        node.say("CONFIG SET cluster-require-full-coverage no");
        node.say("CONFIG SET cluster-node-timeout 1000");
    });
    Some(nodes)
}

#[test]
fn with_two_copies_a_master_of_a_redis_cluster_may_die() {
    let Some(mut nodes) = cluster_that_goes_on() else { return };
    let one = RedisStore::connect(EngineOptions::new(url_of(&nodes))).unwrap();
    let two = EngineOptions { copies: 2, ..EngineOptions::new(url_of(&nodes)) };
    let two = RedisStore::connect(two).unwrap();
    let (region_of_one, region_of_two) = (fill(&one, 60), fill(&two, 60));
    kill(&mut nodes[1]);
    let (lost, unreachable) = unread(&mut *one.reader().unwrap(), region_of_one, 60);
    assert!(lost == 0 && unreachable > 0, "a page is not lost while its master may come back");
    assert_eq!(unread(&mut *two.reader().unwrap(), region_of_two, 60), (0, 0));
}

/// Connects a store with two copies that often looks at the cluster. Returns it with the lines that it logs.
fn watchful(url: String) -> (RedisStore, Arc<Mutex<Vec<String>>>) {
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    let into = lines.clone();
    let log: Log = Arc::new(move |line: &str| into.lock().unwrap().push(line.into()));
    let options = EngineOptions {
        copies: 2,
        check_every: Duration::from_millis(100),
        answer_within: Duration::from_secs(1),
        log: Some(log),
        ..EngineOptions::new(url)
    };
    (RedisStore::connect(options).unwrap(), lines)
}

/// Returns true if a line with these words was logged.
fn logged(lines: &Mutex<Vec<String>>, words: &str) -> bool {
    lines.lock().unwrap().iter().any(|line| line.contains(words))
}

#[test]
fn copies_move_when_slots_move_onto_one_master() {
    let Some(nodes) = RedisServer::start_cluster(3) else { return };
    let (store, lines) = watchful(url_of(&nodes));
    let region = fill(&store, 60);
    // The last master gives all of its slots to the first, as a resharding does.
    let port = nodes[0].port;
    let cluster = Command::new("redis-cli")
        .args(["--cluster", "rebalance", &format!("127.0.0.1:{port}"), "--cluster-weight"])
        .arg(format!("{}=0", nodes[2].say("CLUSTER MYID").trim()))
        .args(["--cluster-threshold", "1"])
        .output()
        .unwrap();
    assert!(cluster.status.success(), "{}", String::from_utf8_lossy(&cluster.stdout));
    wait_until("copies to move", || !lines.lock().unwrap().is_empty());
    assert_eq!(unread(&mut *store.reader().unwrap(), region, 60), (0, 0));
    // Each of the two masters that are left now has a copy of each hash.
    for node in &nodes[..2] {
        wait_until("both masters to have all", || node.say("DBSIZE").trim() == ":60");
    }
    assert_eq!(nodes[2].say("DBSIZE").trim(), ":0");
}

#[test]
fn a_redis_replica_in_the_place_of_its_master_is_filled_again() {
    let Some(mut nodes) = RedisServer::start_cluster(3) else { return };
    let options = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"];
    let Some(replica) = RedisServer::start(&options) else { return };
    let failed = nodes[1].say("CLUSTER MYID");
    replica.say(&format!("CLUSTER MEET 127.0.0.1 {}", nodes[0].port));
    wait_until("the replica to know its master", || {
        replica
            .try_say(&format!("CLUSTER REPLICATE {}", failed.trim()))
            .is_ok_and(|ok| ok.starts_with('+'))
    });
    wait_until("the replica to follow", || {
        replica.say("INFO replication").contains("master_link_status:up")
    });
    nodes.iter().chain([&replica]).for_each(|node| {
        node.say("CONFIG SET cluster-node-timeout 1000");
    });
    let (store, lines) = watchful(url_of(&nodes));
    // The replica may miss the last writes.
    let stopped = replica.child.id().to_string();
    Command::new("kill").args(["-STOP", &stopped]).status().unwrap();
    let region = fill(&store, 60);
    kill(&mut nodes[1]);
    Command::new("kill").args(["-CONT", &stopped]).status().unwrap();
    wait_until("the failover", || replica.say("INFO replication").contains("role:master"));
    wait_until("all to be read", || unread(&mut *store.reader().unwrap(), region, 60) == (0, 0));
    // Each hash has two copies again, on masters that are up.
    let count = |node: &RedisServer| -> usize {
        node.say("DBSIZE").trim().trim_start_matches(':').parse().unwrap()
    };
    wait_until("copies to be made again", || !lines.lock().unwrap().is_empty());
    wait_until("all to have two copies", || {
        count(&nodes[0]) + count(&nodes[2]) + count(&replica) == 120
    });
    kill(&mut nodes[0]);
    let (lost, _) = unread(&mut *store.reader().unwrap(), region, 60);
    assert_eq!(lost, 0);
}

#[test]
fn with_two_copies_one_master_after_the_other_may_be_started_anew() {
    // A service manager starts it within a second: it keeps its slots, and has lost its pages.
    let Some(mut nodes) = RedisServer::start_cluster(3) else { return };
    let (store, lines) = watchful(url_of(&nodes));
    let region = fill(&store, 60);
    for node in &mut nodes {
        lines.lock().unwrap().clear();
        restart(node);
        wait_until("lost copies to be made again", || logged(&lines, "copied anew"));
    }
    assert_eq!(unread(&mut *store.reader().unwrap(), region, 60), (0, 0));
}

#[test]
fn an_empty_master_does_not_stand_for_one_that_is_slow() {
    let Some(mut nodes) = RedisServer::start_cluster(3) else { return };
    let (store, lines) = watchful(url_of(&nodes));
    let region = fill(&store, 60);
    let slow = nodes[1].child.id().to_string();
    let signal = |which: &str| Command::new("kill").args([which, &slow]).status().unwrap();
    signal("-STOP");
    restart(&mut nodes[0]);
    // The pages of the first master are on the stopped one, or on the last.
    wait_until("copies to be looked for", || !lines.lock().unwrap().is_empty());
    signal("-CONT");
    wait_until("lost copies to be made again", || logged(&lines, "copied anew"));
    lines.lock().unwrap().clear();
    restart(&mut nodes[1]);
    wait_until("lost copies to be made again", || logged(&lines, "copied anew"));
    assert_eq!(unread(&mut *store.reader().unwrap(), region, 60), (0, 0));
}

#[test]
fn with_two_copies_no_access_waits_for_a_master_that_hangs() {
    let Some(nodes) = cluster_that_goes_on() else { return };
    let (store, lines) = watchful(url_of(&nodes));
    let region = fill(&store, 120);
    let slow = nodes[1].child.id().to_string();
    let signal = |which: &str| Command::new("kill").args([which, &slow]).status().unwrap();
    let mut reader = store.reader().unwrap();
    let mut writer = store.writer().unwrap();
    signal("-STOP");
    // The cluster itself notices after 15 s.
    let begun = Instant::now();
    assert_eq!(unread(&mut *reader, region, 60), (0, 0));
    for hash in 0..60 {
        // Other pages than before: the last ones of the next hash.
        let (bytes, macs) = pages(hash + 1);
        let (pages, macs) = (&bytes[bytes.len() / 2..], &macs[4..]);
        writer.put(region, &[PutRun { first: hash * 64 + 4, pages, macs }]).unwrap();
        writer.discard(region, &[PageRun { first: hash * 64, count: 1 }]).unwrap();
    }
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(8), "{took:?}");
    // What was written has two copies on the others, and the rest of its hash comes after it.
    wait_until("the written hashes to be copied", || logged(&lines, "copied anew"));
    signal("-CONT");
    // For a while it refuses all, because it has not heard of the others.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        for hash in 60..120 {
            let (bytes, macs) = pages(hash);
            let put =
                writer.put(region, &[PutRun { first: hash * 64, pages: &bytes, macs: &macs }]);
            put.unwrap_or_else(|error| panic!("{error} after {:?}", begun.elapsed()));
        }
    }
    let both = |hash: u64| {
        let (old, new) = (pages(hash), pages(hash + 1));
        let half = old.0.len() / 2;
        let bytes = [&old.0[..half], &new.0[half..]].concat();
        (bytes, [&old.1[..4], &new.1[4..]].concat())
    };
    for hash in 0..60 {
        let (bytes, macs) = both(hash);
        let mut into = vec![0; bytes.len() - PAGE_BYTES];
        reader.get(region, hash * 64 + 1, &macs[1..], &mut into).unwrap();
        assert!(into == bytes[PAGE_BYTES..], "hash {hash} differs");
    }
}

/// Returns the number of keys on all servers.
fn keys(nodes: &[RedisServer]) -> usize {
    let of = |node: &RedisServer| -> usize {
        let said = node.say("DBSIZE");
        let digits = said.trim().trim_start_matches(|c: char| !c.is_ascii_digit());
        digits.parse().unwrap_or_else(|_| panic!("{said}"))
    };
    nodes.iter().map(of).sum()
}

#[test]
fn parent_and_child_of_a_fork_have_their_pages_apart_in_redis() {
    let Some(mut nodes) = cluster_that_goes_on() else { return };
    let options = EngineOptions { copies: 2, ..EngineOptions::new(url_of(&nodes)) };
    let parent = RedisStore::connect(options).unwrap();
    let region = fill(&parent, 60);
    let child = parent.fork(region).unwrap()().unwrap();
    assert_eq!(keys(&nodes), 60 * 2 * 2);
    // Each changes a hash of its own, and the parent adds one.
    let put = |store: &dyn PageStore, hash: u64, of: u64| {
        let (bytes, macs) = pages(of);
        let run = PutRun { first: hash * 64, pages: &bytes, macs: &macs };
        store.writer().unwrap().put(region, &[run]).unwrap();
    };
    let holds = |store: &dyn PageStore, hash: u64, of: u64| {
        let (bytes, macs) = pages(of);
        let mut into = vec![0; bytes.len()];
        let read = store.reader().unwrap().get(region, hash * 64, &macs, &mut into);
        read.is_ok() && into == bytes
    };
    put(&parent, 3, 1_003);
    put(&*child, 4, 2_004);
    assert!(holds(&parent, 3, 1_003) && holds(&*child, 3, 3));
    assert!(holds(&parent, 4, 4) && holds(&*child, 4, 2_004));
    // A child of the child, and the parent ends first.
    let grandchild = child.fork(region).unwrap()().unwrap();
    drop(parent);
    assert!(holds(&*grandchild, 4, 2_004) && holds(&*child, 30, 30));
    drop(child);
    assert!(holds(&*grandchild, 3, 3) && keys(&nodes) == 60 * 2);
    // A fork while a master is down: the copies on the others are enough.
    kill(&mut nodes[1]);
    let last = grandchild.fork(region).unwrap()().unwrap();
    drop(grandchild);
    assert!((0..60).filter(|hash| ![3, 4].contains(hash)).all(|hash| holds(&*last, hash, hash)));
    drop(last);
    assert_eq!(keys(&[nodes.remove(0), nodes.remove(1)]), 0, "what nobody has any more is gone");
}

#[test]
fn copies_for_a_fork_that_fails_do_not_stay() {
    let Some(redis) = RedisServer::start(&[]) else { return };
    let options = EngineOptions { life: Duration::from_secs(2), ..EngineOptions::new(redis.url()) };
    let parent = RedisStore::connect(options.clone()).unwrap();
    let region = fill(&parent, 5);
    drop(parent.fork(region).unwrap());
    let nodes = [redis];
    assert_eq!(keys(&nodes), 10);
    drop(parent);
    wait_until("the copies to expire", || keys(&nodes) == 0);
}

#[test]
fn redis_beyond_loopback_needs_tls() {
    let far = RedisStore::connect(EngineOptions::new("valkey://192.0.2.1"));
    assert!(matches!(far, Err(StoreError::Insecure { .. })), "{far:?}");
    let few = ["--maxmemory-policy", "noeviction"];
    let Some(redis) = RedisServer::start(&few) else { return };
    let two = EngineOptions { copies: 2, ..EngineOptions::new(redis.url()) };
    let refused = RedisStore::connect(two).unwrap_err().to_string();
    assert!(refused.contains("1 masters"), "{refused}");
}

/// Writes a certificate for 127.0.0.1 and its key.
fn certificate(at: &Path, name: &str, signer: &CertifiedIssuer<'_, KeyPair>) -> (PathBuf, PathBuf) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(["127.0.0.1".to_string()]).unwrap();
    // OpenSSL takes a certificate with its signer's name for self-signed.
    params.distinguished_name.push(DnType::CommonName, name);
    let certificate = params.signed_by(&key, signer).unwrap();
    let files = (at.join(format!("{name}.pem")), at.join(format!("{name}.key")));
    std::fs::write(&files.0, certificate.pem()).unwrap();
    std::fs::write(&files.1, key.serialize_pem()).unwrap();
    files
}

/// Writes the certificate of a new authority.
fn authority(at: &Path, name: &str) -> (CertifiedIssuer<'static, KeyPair>, PathBuf) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let file = at.join(format!("{name}-ca.pem"));
    std::fs::write(&file, authority.pem()).unwrap();
    (authority, file)
}

#[test]
fn redis_by_tls_and_nobody_else() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let ((ours, our_file), (_, their_file)) = (authority(at, "ours"), authority(at, "theirs"));
    let ((certificate_file, key_file), client) =
        (certificate(at, "server", &ours), certificate(at, "client", &ours));
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let text = |path: &PathBuf| path.to_str().unwrap().to_string();
    let files = [text(&certificate_file), text(&key_file), text(&our_file)];
    let mut options = vec!["--tls-port", &port, "--tls-cert-file", &files[0]];
    options.extend(["--tls-key-file", &files[1], "--tls-ca-cert-file", &files[2]]);
    options.extend(["--tls-auth-clients", "no"]);
    let Some(redis) = RedisServer::start(&options) else { return };
    let connect = |host: &str, authority: &PathBuf, client: Option<&(PathBuf, PathBuf)>| {
        let tls = EngineTls { authority: Some(authority.clone()), client: client.cloned() };
        let url = format!("valkeys://{host}:{port}");
        RedisStore::connect(EngineOptions { tls, ..EngineOptions::new(url) })
    };
    let store = connect("127.0.0.1", &our_file, None).unwrap();
    let region = fill(&store, 2);
    assert_eq!(unread(&mut *store.reader().unwrap(), region, 2), (0, 0));
    drop(store);
    let refused = |result: Result<RedisStore, StoreError>, words: &str| match result.unwrap_err() {
        StoreError::Refused { why, .. } => assert!(why.contains(words), "{why}"),
        other => panic!("{other}"),
    };
    refused(connect("127.0.0.1", &their_file, None), "certificate");
    refused(connect("localhost", &our_file, None), "127.0.0.1");
    let missing = connect("127.0.0.1", &at.join("missing.pem"), None).unwrap_err().to_string();
    assert!(missing.contains("missing.pem"), "{missing}");
    redis.say("CONFIG SET tls-auth-clients yes");
    refused(connect("127.0.0.1", &our_file, None), "--tls-cert");
    let store = connect("127.0.0.1", &our_file, Some(&client)).unwrap();
    let region = fill(&store, 2);
    assert_eq!(unread(&mut *store.reader().unwrap(), region, 2), (0, 0));
}
