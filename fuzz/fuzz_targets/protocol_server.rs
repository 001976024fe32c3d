//! A memory server gets any bytes in pieces of any length. It answers whole frames or closes the connection,
//! never panics, and never holds more than its limit.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagetax_core::units::{Bytes, Nanos};
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::server::pool::{Limits, Pool};
use pagetax_remote::server::region::Owner;
use pagetax_remote::server::session::{ConnectionEnd, Session};
use pagetax_remote::wire::header::Header;
use pagetax_remote::wire::hello::{HELLO_BYTES, Hello};
use pagetax_remote::wire::inbox::Inbox;
use pagetax_remote::wire::{WireChecksum, push_checksums};
use pagetax_remote::wire::request::{Lease, Request};
use std::sync::Arc;

/// Makes a request of a few bytes, so that the fuzzer need not find checksums.
fn request(bytes: &[u8; 6], on: Lease, out: &mut Vec<u8>) {
    let [op, first, count, flag, fill, region] = *bytes;
    let (first, count, flag) = (first as u64, 1 + (count % 3) as u16, flag % 2 == 1);
    let on = if region % 8 == 0 { Lease { region: region as u32, ..on } } else { on };
    let pages = vec![fill; count as usize * PAGE_BYTES];
    let mut checksums = Vec::new();
    push_checksums(&mut checksums, pages.chunks(PAGE_BYTES).map(WireChecksum::of));
    if flag && fill == 7 {
        checksums[0] ^= 1;
    }
    let token = &[fill; 32];
    let request = match op % 10 {
        0 => Request::Create { pages: first, overcommit: flag, token },
        1 => Request::Attach { region: on.region, fence: flag, proof: token },
        2 if fill < 16 => Request::Drop { on, at_end: fill < 8 },
        3 => Request::Discard { on, first, count: count as u64 * fill as u64 },
        4 => Request::Held { on, first, count },
        5 => Request::Status,
        6 => Request::Report,
        8 => Request::Get { on, first, count, with_checksums: flag },
        _ => Request::Put { on, first, if_absent: flag, checksums: &checksums, pages: &pages },
    };
    request.encode_head(first as u32, out);
    if let Request::Put { pages, .. } = request {
        out.extend_from_slice(pages);
    }
}

fuzz_target!(|input: (Vec<[u8; 6]>, Vec<u8>)| {
    let (script, noise) = input;
    let limits =
        Limits { memory: Bytes(256 << 10), regions_max: 4, linger: Nanos(1), ..Limits::default() };
    let pool = Arc::new(Pool::new(limits, 1));
    let owner = Owner { address: "fuzz".into(), pid: 1, name: "fuzz".into() };
    let mut session = Session::new(pool.clone(), [0; 16], owner.clone());
    let (region, on) = pool.create(64, true, [1; 32], owner, pool.client("fuzz")).expect("a first region");
    let claim = pagetax_remote::secret::Claim { nonce: [0; 16], epoch: 1, region: on.region, fence: false };
    let proof = pagetax_remote::secret::proof(&[1; 32], &claim);
    let mut stream = Vec::new();
    Request::Attach { region: on.region, fence: false, proof: &proof }.encode_head(1, &mut stream);
    script.iter().take(64).for_each(|bytes| request(bytes, on, &mut stream));
    stream.extend_from_slice(&noise);
    let (mut inbox, mut stream) = (Inbox::default(), &stream[..]);
    'open: while let Ok(1..) = inbox.fill(&mut stream) {
        loop {
            let Ok(frame) = inbox.frame() else { break 'open };
            let Some(frame) = frame else { break };
            let mut reply = Vec::new();
            if session.handle(frame, 1, &mut reply).is_err() {
                break 'open;
            }
            let header = Header::decode(reply.first_chunk().expect("a reply")).expect("a reply");
            assert_eq!(header.frame_bytes(), reply.len());
        }
        assert!(pool.pages_held() <= pool.slab.pages_max());
    }
    session.close(2, ConnectionEnd::Closed);
    drop(region);
    if let Some(hello) = noise.first_chunk::<HELLO_BYTES>() {
        let _ = Hello::decode(hello);
    }
});
