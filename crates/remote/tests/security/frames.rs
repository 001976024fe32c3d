//! Bytes on the wire that no client sends: other versions, slow hellos, frames beyond the limits, noise.

use super::*;
use lz4_flex::block::compress;

/// Says hello in a version. Returns the connection, and the version in which the server answers.
fn hello_in(version: u32, server: &Server) -> (TcpStream, u32) {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&Hello { version, ..Hello::client("other") }.encode()).unwrap();
    let mut bytes = [0; HELLO_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    (stream, Hello::decode(&bytes).unwrap().version)
}

#[test]
fn a_newer_client_is_served_in_our_version_and_one_that_is_too_old_is_told_so() {
    let server = start(listen::ServerOptions::default());
    let (mut newer, version) = hello_in(99, &server);
    assert_eq!(version, VERSION);
    newer.write_all(&Header::new(Op::Status, 1).encode(&[])).unwrap();
    let mut head = [0; HEADER_BYTES];
    newer.read_exact(&mut head).unwrap();
    assert_eq!(Header::decode(&head).unwrap().op, Op::StatusIs);
    let (mut older, version) = hello_in(VERSION_MIN - 1, &server);
    assert_eq!(version, VERSION);
    assert_eq!(older.read(&mut head).unwrap(), 0, "and then it hangs up");
    // The other direction: a server that speaks no version of ours.
    let listener = std::net::TcpListener::bind(loopback()).unwrap();
    let address = listener.local_addr().unwrap();
    let future = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&Hello { version: 99, ..Hello::client("") }.encode()).unwrap();
        let _ = stream.read(&mut [0; HELLO_BYTES]);
    });
    let error =
        Cluster::connect(ClusterOptions::new(vec![address.to_string()])).unwrap_err().to_string();
    assert!(error.contains("version 99") && error.contains("upgrade the older"), "{error}");
    future.join().unwrap();
}

/// Returns a frame of protocol 3, by its bytes. It shares no code with the server, and never changes.
fn frame_3(op: u8, flags: u8, count: u16, lease: [u32; 2], page: u64, meta: &[u8]) -> Vec<u8> {
    let mut frame = vec![op, flags];
    frame.extend(count.to_le_bytes());
    frame.extend([7, 0, 0, 0]);
    frame.extend(lease.iter().flat_map(|number| number.to_le_bytes()));
    frame.extend(page.to_le_bytes());
    let of_meta = if meta.is_empty() { 0 } else { XxHash3_64::oneshot(meta) };
    frame.extend(XxHash3_64::oneshot_with_seed(of_meta, &frame).to_le_bytes());
    frame.extend(meta);
    frame
}

#[test]
fn a_client_of_protocol_3_is_served_by_each_later_server() {
    let server = start(listen::ServerOptions::default());
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut hello = b"pagetax\n\x03\0\0\0\x2a\0\0\0".to_vec();
    hello.resize(40, 0);
    hello.extend(b"sort");
    hello.resize(56, 0);
    hello.extend(XxHash3_64::oneshot(&hello).to_le_bytes());
    stream.write_all(&hello).unwrap();
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).unwrap();
    assert!(theirs.starts_with(b"pagetax\n\x03\0\0\0\0\0\0\0"), "{theirs:?}");
    let mut call = |frame: &[u8], reply: usize| {
        stream.write_all(frame).unwrap();
        let mut bytes = vec![0; reply];
        stream.read_exact(&mut bytes).unwrap();
        bytes
    };
    let number =
        |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let created = call(&frame_3(1, 0, 0, [0; 2], 64, &[9; 32]), 32);
    assert_eq!((created[0], number(&created, 4)), (129, 7));
    let on = [number(&created, 8), number(&created, 12)];
    let page = [5; 4096];
    let checksum = XxHash3_64::oneshot(&page).to_le_bytes();
    let mut put = frame_3(5, 0, 1, on, 3, &checksum);
    put.extend(page);
    assert_eq!(call(&put, 32), frame_3(128, 0, 0, [0; 2], 0, &[]));
    let got = call(&frame_3(4, 1, 1, on, 3, &[]), 32 + 8 + 4096);
    assert_eq!((got[0], got[1], number(&got, 2) & 0xffff), (131, 1, 1));
    assert!(got[32..40] == checksum && got[40..] == page);
    let held = call(&frame_3(7, 0, 8, on, 0, &[]), 33);
    assert_eq!((held[0], held[32]), (132, 1 << 3));
    assert_eq!(call(&frame_3(6, 0, 0, on, 3, &1u64.to_le_bytes()), 32)[0], 128);
    let gone = call(&frame_3(4, 0, 1, on, 3, &[]), 32);
    assert_eq!((gone[0], gone[1], number(&gone, 16)), (135, 4, 3), "page 3 is not held");
    assert_eq!(call(&frame_3(8, 0, 0, [0; 2], 0, &[]), 32 + 48)[0], 133);
    assert_eq!(call(&frame_3(3, 0, 0, on, 0, &[]), 32)[0], 128);
}

#[test]
fn compressed_pages_are_kept_only_if_they_are_the_pages_of_the_checksums() {
    let server = start(listen::ServerOptions::default());
    let mut raw = Raw::connect(&server);
    let create = Request::Create { pages: 64, overcommit: false, token: &[9; 32] };
    let on = raw.call(&create).unwrap().unwrap();
    let pages = [[5u8; PAGE_BYTES], [6; PAGE_BYTES]].concat();
    let mut checksums = Vec::new();
    push_checksums(&mut checksums, pages.chunks_exact(PAGE_BYTES).map(WireChecksum::of));
    let put = |checksums, block| Request::CompressedPut {
        on,
        first: 3,
        if_absent: false,
        checksums,
        block,
    };
    let block = compress(&pages);
    let first_alone = compress(&pages[..PAGE_BYTES]);
    let mut other = block.clone();
    other[2] ^= 1;
    // Damaged, cut off, a page too few, a page too many, and nothing at all.
    for (checksums, block) in [
        (&checksums[..], &other[..]),
        (&checksums, &block[..block.len() - 1]),
        (&checksums, &first_alone),
        (&checksums[..8], &block),
        (&checksums, &[]),
    ] {
        let damaged = Failure::DamagedPage { page: 3 };
        assert_eq!(raw.call(&put(checksums, block)).unwrap_err(), damaged);
    }
    raw.call(&put(&checksums, &block)).unwrap();
    raw.send(&Request::Get { on, first: 3, count: 2, with_checksums: false });
    let mut got = vec![0; HEADER_BYTES + 2 * PAGE_BYTES];
    raw.stream.read_exact(&mut got).unwrap();
    assert!(got[HEADER_BYTES..] == pages);
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
    // A block is shorter than its pages.
    for bytes in [2 * PAGE_BYTES as u64, u64::MAX] {
        let mut raw = Raw::connect(&server);
        let header = Header { count: 2, page: bytes, ..Header::new(Op::CompressedPut, 1) };
        raw.stream.write_all(&header.encode(&[])).unwrap();
        assert_eq!(raw.stream.read(&mut [0; HEADER_BYTES]).unwrap(), 0, "a block of {bytes} bytes");
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
