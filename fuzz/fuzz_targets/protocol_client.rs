//! A client gets any bytes as replies. It parses them, or closes the connection, and never panics. A read
//! succeeds only by a frame with the right id.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagetax_remote::client::connection::Connection;
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::transport::PeerStream;
use pagetax_remote::wire::header::HEADER_BYTES;
use pagetax_remote::wire::hello::Hello;
use pagetax_remote::wire::reply::{Failure, Reply, Status};
use pagetax_remote::wire::request::{Lease, Request};
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Makes a reply of a few bytes, so that the fuzzer need not find checksums.
fn reply(bytes: &[u8; 4], out: &mut Vec<u8>) {
    let [kind, id, value, cut] = *bytes;
    let (lease, count) = (Lease { region: value as u32, lease: 1 }, 1 + (value % 3) as u16);
    let before = out.len();
    let checksums = [value; 24];
    let reply = match kind % 9 {
        0 => Reply::Done,
        1 => Reply::Created(lease),
        2 => Reply::Attached(lease),
        3 => Reply::Pages { count, checksums: &[] },
        4 => Reply::Pages { count, checksums: &checksums[..count as usize * 8] },
        5 => Reply::Bitmap { count: 9, bits: &[value, 1] },
        6 => Reply::Status(Status { pages_free: value as u64, ..Status::default() }),
        7 => Reply::Report(&[b'{', value]),
        _ => Reply::Failed(Failure::NotHeld { page: value as u64 }),
    };
    reply.encode_head(id as u32 % 4, out);
    if let Reply::Pages { count, .. } = reply {
        out.resize(out.len() + count as usize * PAGE_BYTES, value);
    }
    if cut == 1 {
        out.truncate(before + HEADER_BYTES / 2);
    }
}

fuzz_target!(|input: (Vec<[u8; 4]>, Vec<u8>, [u8; 6])| {
    let (script, noise, ways) = input;
    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    let mut bytes = Vec::new();
    script.iter().take(6).for_each(|four| reply(four, &mut bytes));
    bytes.extend_from_slice(&noise[..noise.len().min(8192)]);
    theirs.write_all(&bytes).expect("room in the socket");
    theirs.shutdown(Shutdown::Write).expect("a socket");
    let stream = PeerStream::from(TcpStream::from(OwnedFd::from(ours)));
    let mut connection = Connection::new(stream, &Hello::client("fuzz"));
    let on = Lease { region: 1, lease: 1 };
    let mut into = [0; PAGE_BYTES];
    for (turn, way) in ways.into_iter().enumerate() {
        let get = Request::Get { on, first: 0, count: 1, with_checksums: turn % 2 == 1 };
        // One read, several reads, or several of which only some are waited for.
        if way % 3 > 0 && connection.is_between_replies() {
            let (asked, waited_for) = (1 + way / 3 % 8, way / 3 / 8);
            if connection.send_small((0..asked).map(|_| get)).is_err() {
                return;
            }
            for _ in 0..asked.min(waited_for) {
                match connection.next_reply() {
                    Ok((_, Reply::Pages { count, .. }, pages)) => {
                        assert_eq!(pages.len(), count as usize * PAGE_BYTES);
                    }
                    Ok((_, _, pages)) => assert!(pages.is_empty()),
                    Err(_) => return,
                }
            }
            continue;
        }
        let Ok(id) = connection.send(&get) else { return };
        match connection.wait(id, &mut into) {
            Ok(Reply::Pages { count, checksums }) if !checksums.is_empty() => {
                assert_eq!(connection.pages_with_checksums(count).len(), count as usize * PAGE_BYTES);
            }
            Ok(_) => {}
            Err(_) => connection.leave(&into),
        }
    }
});
