//! Access to regions: by tokens, leases and fences, and never to the pages of others.

use super::*;

#[test]
fn regions_of_others_cannot_be_touched() {
    let server = start(listen::ServerOptions::default());
    let (mut owner, mut thief) = (Raw::connect(&server), Raw::connect(&server));
    let token = [42; 32];
    let create = Request::Create { pages: 8, overcommit: false, token: &token };
    let on = owner.call(&create).unwrap().unwrap();
    let page = vec![3; PAGE_BYTES];
    let mut checksums = Vec::new();
    push_checksums(&mut checksums, [WireChecksum::of(&page)]);
    owner.call(&put(on, &checksums, &page)).unwrap();
    let get = Request::Get { on, first: 0, count: 1, with_checksums: false };
    let tries = [
        get,
        put(on, &checksums, &page),
        Request::Discard { on, first: 0, count: 8 },
        Request::Held { on, first: 0, count: 8 },
        Request::Drop { on, at_end: false },
        Request::Snapshot { on, token: &token },
    ];
    for request in tries {
        assert_eq!(thief.call(&request), Err(Failure::Denied), "{request:?}");
    }
    let wrong = thief.proof(on.region, &[43; 32], false);
    let attach = Request::Attach { region: on.region, fence: false, proof: &wrong };
    assert_eq!(thief.call(&attach), Err(Failure::Denied));
    assert_eq!(thief.call(&get), Err(Failure::Denied));
    assert_eq!(owner.call(&get), Ok(None));
}

#[test]
fn what_was_recorded_opens_nothing() {
    let server = start(listen::ServerOptions::default());
    let token = [42; 32];
    let mut first = Raw::connect(&server);
    let create = Request::Create { pages: 8, overcommit: false, token: &token };
    let on = first.call(&create).unwrap().unwrap();
    let mut second = Raw::connect(&server);
    let proof = second.proof(on.region, &token, false);
    second.call(&Request::Attach { region: on.region, fence: false, proof: &proof }).unwrap();
    second.call(&Request::Get { on, first: 0, count: 1, with_checksums: false }).unwrap_err();
    let page = vec![3; PAGE_BYTES];
    let mut checksums = Vec::new();
    push_checksums(&mut checksums, [WireChecksum::of(&page)]);
    second.call(&put(on, &checksums, &page)).unwrap();
    // Sends all bytes of the second connection again, on a third one.
    let mut replay = Raw::connect(&server);
    assert_ne!(replay.hello.nonce, second.hello.nonce);
    replay.stream.write_all(&second.sent).unwrap();
    for _ in 0..3 {
        assert_eq!(replay.reply().1, Some(Failure::Denied));
    }
}

#[test]
fn a_fence_voids_what_is_still_under_way() {
    let server = start(listen::ServerOptions::default());
    let (mut old, mut new) = (Raw::connect(&server), Raw::connect(&server));
    let token = [42; 32];
    let create = Request::Create { pages: 8, overcommit: false, token: &token };
    let on = old.call(&create).unwrap().unwrap();
    let proof = new.proof(on.region, &token, true);
    let attach = Request::Attach { region: on.region, fence: true, proof: &proof };
    let fresh = new.call(&attach).unwrap().unwrap();
    assert_ne!(fresh.lease, on.lease);
    let page = vec![3; PAGE_BYTES];
    let mut checksums = Vec::new();
    push_checksums(&mut checksums, [WireChecksum::of(&page)]);
    assert_eq!(old.call(&put(on, &checksums, &page)), Err(Failure::StaleLease));
    new.call(&put(fresh, &checksums, &page)).unwrap();
    let damaged = vec![4; PAGE_BYTES];
    assert_eq!(new.call(&put(fresh, &checksums, &damaged)), Err(Failure::DamagedPage { page: 0 }));
}

#[test]
fn what_one_client_discards_no_other_can_read() {
    let limits = Limits { memory: Bytes(1 << 20), ..Limits::default() };
    let server = start(listen::ServerOptions { limits, ..Default::default() });
    let (mut owner, mut next) = (Raw::connect(&server), Raw::connect(&server));
    let create = Request::Create { pages: 64, overcommit: true, token: &[1; 32] };
    let on = owner.call(&create).unwrap().unwrap();
    let secret = vec![0x5e; PAGE_BYTES];
    let mut checksums = Vec::new();
    push_checksums(&mut checksums, [WireChecksum::of(&secret)]);
    owner.call(&put(on, &checksums, &secret)).unwrap();
    owner.call(&Request::Discard { on, first: 0, count: 1 }).unwrap();
    let on = next.call(&create).unwrap().unwrap();
    let get = |first| Request::Get { on, first, count: 1, with_checksums: false };
    (0..64).for_each(|page| {
        assert_eq!(next.call(&get(page)), Err(Failure::NotHeld { page }));
    });
    // The tests of `slab` check that a freed slot is wiped.
}

/// Returns two pages with the same unkeyed checksum. XXH3 multiplies the halves of each word after
/// mixing it with a constant. If one half becomes zero, the other only enters a plain sum, which
/// another word can correct.
fn alike_to_xxh3() -> (Vec<u8>, Vec<u8>) {
    // The low halves of two words of XXH3's default secret, of stripes 0 and 1.
    const HALVES: [(usize, [u8; 4]); 2] =
        [(0, [0xb8, 0xfe, 0x6c, 0x39]), (64, [0x7c, 0x01, 0x81, 0x2c])];
    let mut page = vec![7; PAGE_BYTES];
    for (at, half) in HALVES {
        page[at..at + 4].copy_from_slice(&half);
    }
    let mut forged = page.clone();
    forged[4] += 1;
    forged[68] -= 1;
    (page, forged)
}

/// Starts a server that returns other bytes than it stored, with a checksum that fits them.
fn rogue(page: Vec<u8>, forged: Vec<u8>) -> SocketAddr {
    let forge = move |replies: &mut [u8]| {
        if let Some(at) = replies.windows(PAGE_BYTES).position(|bytes| bytes == page) {
            replies[at..at + PAGE_BYTES].copy_from_slice(&forged);
        }
    };
    behind(|_| {}, forge)
}

#[test]
fn a_server_cannot_forge_a_page() {
    let (page, forged) = alike_to_xxh3();
    assert!(
        page != forged && WireChecksum::of(&page) == WireChecksum::of(&forged),
        "a forgery of XXH3"
    );
    let options = ClusterOptions::new(vec![rogue(page.clone(), forged).to_string()]);
    let store = Cluster::connect(options).unwrap();
    let region = store.create_region(64, false).unwrap();
    let macs = [PageMac::of(&page)];
    let run = PutRun { first: 5, pages: &page, macs: &macs };
    store.writer().unwrap().put(region, &[run]).unwrap();
    let mut into = vec![0; PAGE_BYTES];
    let got = store.reader().unwrap().get(region, 5, &macs, &mut into);
    assert!(matches!(got, Err(StoreError::PageLost { page: 5, .. })), "{got:?}");
    assert!(store.counters().bad_replicas_total.load(Ordering::Relaxed) > 0);
}

/// Checks that MACs do not go over the wire: an attacker who sees one could search for another page
/// with the same MAC.
#[test]
fn the_checksum_of_the_owner_is_not_that_of_the_wire() {
    let page = vec![9; PAGE_BYTES];
    assert_ne!(PageMac::of(&page).0, WireChecksum::of(&page).0);
}

/// Checks that region numbers stay unique. They come from a counter of 32 bits, which wraps around.
#[test]
fn a_region_never_gets_the_number_of_another() {
    let pool = Pool::new(Limits::default(), 1);
    let owner = || Owner { address: "a".into(), pid: 1, name: "a".into() };
    let create = || pool.create(8, true, [1; 32], owner(), pool.client("a")).unwrap();
    let (first, _) = create();
    pool.set_next_number(first.number);
    let (second, _) = create();
    assert_ne!(first.number, second.number);
    assert_eq!(pool.region_count(), 2);
}

#[test]
fn a_region_that_was_removed_takes_nothing_and_a_used_one_is_not_reaped() {
    let pool = Pool::new(Limits { linger: Nanos(0), ..Limits::default() }, 1);
    let owner = Owner { address: "a".into(), pid: 1, name: "a".into() };
    let (region, on) = pool.create(8, true, [1; 32], owner, pool.client("a")).unwrap();
    region.attached.fetch_sub(1, Ordering::Relaxed);
    let claim = Claim { nonce: [0; 16], epoch: 1, region: on.region, fence: false };
    let proof = secret::proof(&[1; 32], &claim);
    pool.open(&claim, &proof).unwrap();
    assert_eq!(pool.reap(1), 0, "a connection has just attached itself");
    // One connection finds the region while another drops it.
    pool.remove(&region);
    let page = [7; PAGE_BYTES];
    let put = |lease| {
        region.put(&pool.slab, lease, 0, false, &page, [WireChecksum::of(&page)].into_iter())
    };
    assert_eq!(put(on.lease), Err(Failure::NoRegion));
    assert_eq!(region.fence(77), Err(Failure::NoRegion));
    assert_eq!(put(77), Err(Failure::NoRegion));
    assert_eq!(pool.pages_held(), 0);
}
