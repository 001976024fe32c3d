//! Bytes on the wire that no client sends: other versions, slow hellos, frames beyond the limits, noise.

use super::*;

#[test]
fn another_version_is_told_so() {
    let server = start(listen::ServerOptions::default());
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let newer = Hello { version: 99, ..Hello::client("newer") };
    stream.write_all(&newer.encode()).unwrap();
    let mut bytes = [0; HELLO_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(Hello::decode(&bytes).unwrap().version, pagetax_remote::wire::VERSION);
    assert_eq!(stream.read(&mut bytes).unwrap(), 0, "and then it hangs up");
    // The other direction: a server of a newer version.
    let listener = std::net::TcpListener::bind(loopback()).unwrap();
    let address = listener.local_addr().unwrap();
    let future = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&Hello { version: 99, ..Hello::client("") }.encode()).unwrap();
        let _ = stream.read(&mut [0; HELLO_BYTES]);
    });
    let error =
        Cluster::connect(ClusterOptions::new(vec![address.to_string()])).unwrap_err().to_string();
    assert!(error.contains("version 99") && error.contains("install the same"), "{error}");
    future.join().unwrap();
}

#[test]
fn frames_beyond_the_limit_end_the_connection() {
    let server = start(listen::ServerOptions::default());
    for (op, count) in [(Op::Put, 65), (Op::Get, 65), (Op::Put, u16::MAX), (Op::Held, 4097)] {
        let mut raw = Raw::connect(&server);
        let header = Header { count, ..Header::new(op, 1) };
        raw.stream.write_all(&header.encode(&[])).unwrap();
        assert_eq!(raw.stream.read(&mut [0; HEADER_BYTES]).unwrap(), 0, "{op:?} of {count} pages");
    }
    // A reply is no request, whatever its size.
    let mut raw = Raw::connect(&server);
    let header = Header { page: u64::MAX, ..Header::new(Op::ReportIs, 1) };
    raw.stream.write_all(&header.encode(&[])).unwrap();
    assert_eq!(raw.stream.read(&mut [0; HEADER_BYTES]).unwrap(), 0);
}

#[test]
fn who_says_hello_byte_by_byte_is_turned_away() {
    let server = start(listen::ServerOptions::default());
    let mut steady = Raw::connect(&server);
    let mut slow = TcpStream::connect(server.address()).unwrap();
    slow.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let hello = Hello::client("slow").encode();
    // This would take 12 s if the server did not hang up.
    let ended = hello[..40].iter().any(|byte| {
        // The write fails after the server has hung up. Before that, no reply comes, because the
        // hello is incomplete.
        slow.write_all(&[*byte]).is_err() || matches!(slow.read(&mut [0]), Ok(0))
    });
    assert!(ended);
    steady.call(&Request::Status).unwrap();
}

#[test]
fn noise_ends_only_its_own_connection() {
    let server = start(listen::ServerOptions::default());
    let mut steady = Raw::connect(&server);
    let mut rng = Rng::new(1);
    for round in 0..60 {
        let mut noisy = Raw::connect(&server);
        let mut noise: Vec<u8> = (0..200).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
        if round % 2 == 0 {
            // A known operation with an invalid rest.
            noise[0] = 1 + (round / 2 % 10) as u8;
        }
        let _ = noisy.stream.write_all(&noise);
        let _ = noisy.stream.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let _ = noisy.stream.read_to_end(&mut rest);
    }
    steady.call(&Request::Status).unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while server.pool().counters.connections.load(std::sync::atomic::Ordering::Relaxed) > 1 {
        assert!(Instant::now() < until, "connections are left over");
        std::thread::sleep(Duration::from_millis(10));
    }
}
