//! The limits of a server, and of each of its clients.

use super::*;

#[test]
fn limits_hold() {
    let limits =
        Limits { memory: Bytes(1 << 20), regions_max: 2, connections_max: 3, ..Limits::default() };
    let server = start(listen::ServerOptions { limits, ..Default::default() });
    let mut raw = Raw::connect(&server);
    let create = Request::Create { pages: 8, overcommit: false, token: &[1; 32] };
    raw.call(&create).unwrap();
    let large = Request::Create { pages: 1 << 40, overcommit: false, token: &[1; 32] };
    assert!(matches!(raw.call(&large), Err(Failure::Full { .. })));
    raw.call(&create).unwrap();
    assert_eq!(raw.call(&create), Err(Failure::TooMany));
    let _others = [Raw::connect(&server), Raw::connect(&server)];
    let mut one_too_many = TcpStream::connect(server.address()).unwrap();
    one_too_many.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    one_too_many.write_all(&Hello::client("fourth").encode()).unwrap();
    let mut hello = [0; HELLO_BYTES];
    one_too_many.read_exact(&mut hello).unwrap();
    assert!(Hello::decode(&hello).unwrap().is_full(), "it says so");
    assert_eq!(one_too_many.read(&mut hello).unwrap(), 0, "and hangs up");
    raw.call(&Request::Status).unwrap();
}

#[test]
fn a_client_that_takes_all_it_may_leaves_something_to_others() {
    let limits = Limits {
        client_connections_max: 3,
        client_regions_max: 2,
        client_memory: Some(Bytes(1 << 20)),
        ..Limits::default()
    };
    let server = start(listen::ServerOptions { limits, ..Default::default() });
    let raw = |from| {
        let (stream, hello) = hello_from(from, &server);
        Raw { stream, hello, sent: Vec::new() }
    };
    let (mut greedy, _two, _three) = (raw(ONE), raw(ONE), raw(ONE));
    assert!(hello_from(ONE, &server).1.is_full());
    let create = Request::Create { pages: 1 << 20, overcommit: true, token: &[1; 32] };
    let on = greedy.call(&create).unwrap().unwrap();
    greedy.call(&create).unwrap();
    assert_eq!(greedy.call(&create), Err(Failure::TooMany));
    let page = vec![7; PAGE_BYTES];
    let mut checksums = Vec::new();
    push_checksums(&mut checksums, [WireChecksum::of(&page)]);
    let at = |on, first| Request::Put {
        on,
        first,
        if_absent: false,
        checksums: &checksums,
        pages: &page,
    };
    let taken = (0..1000).take_while(|first| greedy.call(&at(on, *first)).is_ok()).count();
    assert!((200..256).contains(&taken), "{taken} pages of at most 1 MiB with their index");
    assert_eq!(greedy.call(&at(on, 1000)), Err(Failure::Full { pages_free: 0 }));
    // Puts to held pages still work, and so do those for which a discard makes room.
    greedy.call(&at(on, 0)).unwrap();
    greedy.call(&Request::Discard { on, first: 1, count: 1 }).unwrap();
    greedy.call(&at(on, 1000)).unwrap();

    let mut modest = raw(OTHER);
    assert!(!modest.hello.is_full());
    let on = modest.call(&create).unwrap().unwrap();
    modest.call(&at(on, 0)).unwrap();
    // A region that is dropped makes room for another one.
    greedy.call(&Request::Drop { on, at_end: false }).unwrap_err();
}

#[test]
fn who_has_regions_gets_in_when_others_have_filled_the_table() {
    let limits = Limits { connections_max: 16, ..Limits::default() };
    let server = start(listen::ServerOptions { limits, ..Default::default() });
    let (stream, hello) = hello_from(ONE, &server);
    let mut owner = Raw { stream, hello, sent: Vec::new() };
    owner.call(&Request::Create { pages: 8, overcommit: true, token: &[1; 32] }).unwrap();
    let crowd: Vec<_> = (0..13).map(|_| hello_from(OTHER, &server)).collect();
    assert!(crowd.iter().all(|(_, hello)| !hello.is_full()));
    assert!(
        hello_from(OTHER, &server).1.is_full(),
        "the last two are not for those without regions"
    );
    let _second = hello_from(ONE, &server);
    let _third = hello_from(ONE, &server);
    assert!(!_second.1.is_full() && !_third.1.is_full());
    assert!(hello_from(ONE, &server).1.is_full(), "the limit is a limit");
}

#[test]
fn connections_that_say_nothing_keep_nobody_out() {
    let limits = Limits { connections_max: 16, ..Limits::default() };
    let server = start(listen::ServerOptions { limits, ..Default::default() });
    let silent = |_| TcpStream::connect(server.address()).unwrap();
    let mut crowd: Vec<TcpStream> = (0..200).map(silent).collect();
    for _ in 0..20 {
        let mut raw = Raw::connect(&server);
        raw.call(&Request::Status).unwrap();
        crowd.push(silent(0));
    }
}

#[test]
fn a_client_that_may_make_no_region_is_told_so_at_its_start() {
    let limits = Limits { regions_max: 1, ..Limits::default() };
    let server = start(listen::ServerOptions { limits, ..Default::default() });
    let first = connect(&server, None).unwrap();
    first.create_region(8, true).unwrap();
    let refused = connect(&server, None).unwrap().create_region(8, true).unwrap_err().to_string();
    assert!(refused.contains("--regions-max"), "{refused}");
    drop(first);
    connect(&server, None).unwrap().create_region(8, true).unwrap();
}

/// Checks that a server with a full table counts as alive when an open connection breaks.
#[test]
fn a_full_server_is_not_taken_for_a_dead_one() {
    let limits = Limits { client_connections_max: 2, ..Limits::default() };
    let server = start(listen::ServerOptions { limits, ..Default::default() });
    let options = ClusterOptions::new(vec![server.address().to_string()]);
    let options = ClusterOptions { unreachable: Duration::from_secs(2), ..options };
    let store = Cluster::connect(options).unwrap();
    let _reserve = std::iter::from_fn(|| Some(hello_from(Ipv4Addr::LOCALHOST, &server)))
        .take_while(|(_, hello)| !hello.is_full())
        .collect::<Vec<_>>();
    let region = store.create_region(8, true).unwrap();
    let page = vec![9; PAGE_BYTES];
    let macs = [PageMac::of(&page)];
    // The table has no room for the writer's connection.
    let run = PutRun { first: 5, pages: &page, macs: &macs };
    let _ = store.writer().unwrap().put(region, &[run]);
    assert_eq!(store.counters().servers_down_total.load(Ordering::Relaxed), 0);
    assert_eq!(store.servers_up(), 1);
}

fn eventually(what: &str, patience: Duration, is_so: impl Fn() -> bool) {
    let until = Instant::now() + patience;
    while !is_so() {
        assert!(Instant::now() < until, "{what} not after {patience:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Checks the linger time of a suspended client. The server sees a connection that falls silent,
/// even in the middle of a request, and is never closed.
#[test]
fn pages_of_a_client_that_falls_silent_are_kept_for_longer() {
    let linger = Nanos(100_000_000);
    let server = start(listen::ServerOptions {
        limits: Limits { linger, ..Limits::default() },
        ..Default::default()
    });
    let (token, pages) = ([5; 32], vec![9; 64 * PAGE_BYTES]);
    let mut checksums = Vec::new();
    push_checksums(&mut checksums, pages.chunks(PAGE_BYTES).map(WireChecksum::of));
    let create = Request::Create { pages: 64, overcommit: true, token: &token };
    let [mut silent, mut killed] = [Raw::connect(&server), Raw::connect(&server)];
    let on = silent.call(&create).unwrap().unwrap();
    silent.call(&put(on, &checksums, &pages)).unwrap();
    killed.call(&create).unwrap();
    drop(killed);
    let mut half = Vec::new();
    put(on, &checksums, &pages).encode_head(8, &mut half);
    silent.stream.write_all(&half).unwrap();
    let counters = &server.pool().counters;
    eventually("the silent connection ends", Duration::from_secs(30), || {
        counters.connections.load(Ordering::Relaxed) == 0
    });
    eventually("the killed client's region goes", Duration::from_secs(5), || {
        server.pool().region_count() == 1
    });
    // The server reaps once a second.
    std::thread::sleep(Duration::from_millis(2500));
    let mut back = Raw::connect(&server);
    let proof = back.proof(on.region, &token, true);
    let on = back.call(&Request::Attach { region: on.region, fence: true, proof: &proof });
    let on = on.expect("its region is there").unwrap();
    back.call(&Request::Get { on, first: 0, count: 64, with_checksums: false }).unwrap();
}
