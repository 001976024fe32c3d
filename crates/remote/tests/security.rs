//! Who may do what: certificates, regions of others, replays, limits, and bytes that make no sense.

mod behind;

use behind::behind;
use pagetax_core::access::Rng;
use pagetax_core::units::{Bytes, Nanos};
use pagetax_remote::client::cluster::{Cluster, ClusterOptions};
use pagetax_remote::page::{PAGE_BYTES, PageMac};
use pagetax_remote::secret::{self, Claim};
use pagetax_remote::server::listen::{self, Server, StartError};
use pagetax_remote::server::pool::{Limits, Pool};
use pagetax_remote::server::region::Owner;
use pagetax_remote::store::{PageStore, PutRun, StoreError};
use pagetax_remote::tls::{ClientTls, Files, server_config};
use pagetax_remote::wire::header::{HEADER_BYTES, Header, Op};
use pagetax_remote::wire::hello::{HELLO_BYTES, Hello};
use pagetax_remote::wire::reply::{Failure, Reply};
use pagetax_remote::wire::request::{Lease, Request};
use pagetax_remote::wire::{WireChecksum, push_checksums};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn start(options: listen::ServerOptions) -> Server {
    Server::start(loopback(), options).unwrap()
}

/// An authority, to sign certificates.
fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate for loopback, and the authority that its holder trusts.
fn files(
    directory: &Path,
    name: &str,
    signer: &CertifiedIssuer<'static, KeyPair>,
    trusted: &CertifiedIssuer<'static, KeyPair>,
) -> Files {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["127.0.0.1".to_string()]).unwrap();
    let certificate = params.signed_by(&key, signer).unwrap();
    let write = |what: &str, pem: String| {
        let path = directory.join(format!("{name}-{what}.pem"));
        std::fs::write(&path, pem).unwrap();
        path
    };
    Files {
        certificate: write("cert", certificate.pem()),
        key: write("key", key.serialize_pem()),
        authority: write("ca", trusted.pem()),
    }
}

fn connect(server: &Server, tls: Option<ClientTls>) -> Result<Cluster, StoreError> {
    let options = ClusterOptions::new(vec![server.address().to_string()]);
    Cluster::connect(ClusterOptions { tls, ..options })
}

fn round_trip(store: &Cluster) {
    let region = store.create_region(64, false).unwrap();
    let page = vec![9; PAGE_BYTES];
    let macs = [PageMac::of(&page)];
    let run = PutRun { first: 5, pages: &page, macs: &macs };
    store.writer().unwrap().put(region, &[run]).unwrap();
    let mut into = vec![0; PAGE_BYTES];
    store.reader().unwrap().get(region, 5, &macs, &mut into).unwrap();
    assert!(into == page);
}

#[test]
fn mutual_tls_and_nobody_else() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, theirs) = (authority(), authority());
    let at = directory.path();
    let config = server_config(&files(at, "server", &ours, &ours)).unwrap();
    let server = start(listen::ServerOptions { tls: Some(config), ..Default::default() });
    let client =
        |name, signer, trusted| ClientTls::new(&files(at, name, signer, trusted), None).unwrap();
    round_trip(&connect(&server, Some(client("good", &ours, &ours))).unwrap());
    let refused = |tls| {
        let error = connect(&server, tls).expect_err("it must be refused");
        assert!(
            matches!(error, StoreError::Refused { .. } | StoreError::Unreachable { .. }),
            "{error}"
        );
        error.to_string()
    };
    refused(Some(client("stranger", &theirs, &ours)));
    let error = refused(Some(client("wary", &ours, &theirs)));
    assert!(error.contains("one authority"), "{error}");
    refused(None);
    let mut named = client("x", &ours, &ours);
    named.server_name = Some("other.example".into());
    refused(Some(named));
    let roots = nameless_roots(&ours);
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    refused(Some(ClientTls::with_config(Arc::new(config), None)));
    assert_eq!(server.pool().region_count(), 0);
}

/// Trusts this authority, as one does that shows no certificate itself.
fn nameless_roots(authority: &CertifiedIssuer<'static, KeyPair>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    roots
}

#[test]
fn without_tls_only_loopback_unless_told_so() {
    let everywhere: SocketAddr = (Ipv4Addr::UNSPECIFIED, 0).into();
    let refused = Server::start(everywhere, listen::ServerOptions::default());
    assert!(matches!(refused, Err(StartError::Insecure(_))), "{refused:?}");
    let told = listen::ServerOptions { insecure: true, ..Default::default() };
    Server::start(everywhere, told).unwrap();
}

#[test]
fn clients_use_no_far_server_without_tls_unless_told_so() {
    let far = || ClusterOptions {
        answer_within: Duration::from_millis(1),
        ..ClusterOptions::new(vec!["192.0.2.1".into()])
    };
    let discover = || ClusterOptions { discover: true, ..ClusterOptions::new(Vec::new()) };
    for options in [far(), discover()] {
        let refused = Cluster::connect(options);
        assert!(matches!(refused, Err(StoreError::Insecure { .. })), "{refused:?}");
    }
    let told = Cluster::connect(ClusterOptions { insecure: true, ..far() });
    assert!(!matches!(told, Ok(_) | Err(StoreError::Insecure { .. })), "{told:?}");
}

/// A client by hand.
struct Raw {
    stream: TcpStream,
    hello: Hello,
    sent: Vec<u8>,
}

impl Raw {
    fn connect(server: &Server) -> Raw {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(&Hello::client("raw").encode()).unwrap();
        let mut bytes = [0; HELLO_BYTES];
        stream.read_exact(&mut bytes).unwrap();
        Raw { stream, hello: Hello::decode(&bytes).unwrap(), sent: Vec::new() }
    }

    fn send(&mut self, request: &Request<'_>) {
        let mut frame = Vec::new();
        request.encode_head(7, &mut frame);
        if let Request::Put { pages, .. } = request {
            frame.extend_from_slice(pages);
        }
        self.stream.write_all(&frame).unwrap();
        self.sent.extend_from_slice(&frame);
    }

    /// The next reply, and how the server says that it is `Failed`, if so.
    fn reply(&mut self) -> (Header, Option<Failure>, Option<Lease>) {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head).unwrap();
        let header = Header::decode(&head).unwrap();
        let mut rest = vec![0; header.meta_bytes() + header.page_bytes()];
        self.stream.read_exact(&mut rest).unwrap();
        match Reply::decode_head(&head, &rest[..header.meta_bytes()]).unwrap().1 {
            Reply::Failed(failure) => (header, Some(failure), None),
            Reply::Created(lease) | Reply::Attached(lease) => (header, None, Some(lease)),
            _ => (header, None, None),
        }
    }

    fn call(&mut self, request: &Request<'_>) -> Result<Option<Lease>, Failure> {
        self.send(request);
        let (_, failure, lease) = self.reply();
        failure.map_or(Ok(lease), Err)
    }

    fn proof(&self, region: u32, token: &[u8; 32], fence: bool) -> [u8; 32] {
        let Hello { nonce, epoch, .. } = self.hello;
        secret::proof(token, &Claim { nonce, epoch, region, fence })
    }
}

fn put<'a>(on: Lease, checksums: &'a [u8], pages: &'a [u8]) -> Request<'a> {
    Request::Put { on, first: 0, if_absent: false, checksums, pages }
}

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
    // All of the second connection again, byte for byte, on a third.
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
fn another_version_is_told_so() {
    let server = start(listen::ServerOptions::default());
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let newer = Hello { version: 99, ..Hello::client("newer") };
    stream.write_all(&newer.encode()).unwrap();
    let mut bytes = [0; HELLO_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(Hello::decode(&bytes).unwrap().version, pagetax_remote::wire::VERSION);
    assert_eq!(stream.read(&mut bytes).unwrap(), 0, "and then it hangs up");
    // The other way round: a server from the future.
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
    // Takes 12 s, were it left alone.
    let ended = hello[..40].iter().any(|byte| {
        // Broken when the server has hung up; else nothing comes, as the hello is not whole.
        slow.write_all(&[*byte]).is_err() || matches!(slow.read(&mut [0]), Ok(0))
    });
    assert!(ended);
    steady.call(&Request::Status).unwrap();
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
    // That the slot itself is wiped when it is given back is tested where the slots are: `slab`.
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
            // A known operation with a wrong rest.
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

/// Two pages of one unkeyed checksum. XXH3 multiplies the halves of each word that it has mixed with a constant:
/// where one half becomes zero, the other counts in a plain sum only, from which another word can take it away.
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

/// A server that gives out other bytes than it took, with a checksum that fits them.
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

/// The owner's checksums must not be what goes over the wire: whoever sees one could look for another page that
/// has it.
#[test]
fn the_checksum_of_the_owner_is_not_that_of_the_wire() {
    let page = vec![9; PAGE_BYTES];
    assert_ne!(PageMac::of(&page).0, WireChecksum::of(&page).0);
}

/// Says hello from this address of loopback's, and returns the server's.
fn hello_from(from: Ipv4Addr, server: &Server) -> (TcpStream, Hello) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((from, 0)).into()).unwrap();
    socket.connect(&server.address().into()).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&Hello::client("raw").encode()).unwrap();
    let mut bytes = [0; HELLO_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    (stream, Hello::decode(&bytes).unwrap())
}

const ONE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);

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
    // Pages that are held already, and those that make room, can be put.
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

/// The table of connections is full, and an open one breaks: the server lives all the same.
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
    // There is no place for the writer's connection.
    let run = PutRun { first: 5, pages: &page, macs: &macs };
    let _ = store.writer().unwrap().put(region, &[run]);
    assert_eq!(store.counters().servers_down_total.load(Ordering::Relaxed), 0);
    assert_eq!(store.servers_up(), 1);
}

#[test]
fn certificates_are_read_again_and_no_session_outlives_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let (old, new) = (authority(), authority());
    let ours = files(directory.path(), "server", &old, &old);
    let server = start(listen::ServerOptions {
        tls: Some(server_config(&ours).unwrap()),
        ..Default::default()
    });
    let tls = |files: &Files| ClientTls::new(files, None).unwrap();
    let theirs = files(directory.path(), "client", &old, &old);
    let (client, stays) = (tls(&theirs), tls(&theirs));
    round_trip(&connect(&server, Some(client.clone())).unwrap());
    // The server's change, and it is told to read them.
    let ours = files(directory.path(), "server", &new, &new);
    server.set_tls(server_config(&ours).unwrap());
    let refused = connect(&server, Some(stays));
    assert!(matches!(refused, Err(StoreError::Refused { .. })), "{refused:?}");
    // The client's change.
    files(directory.path(), "client", &new, &new);
    round_trip(&connect(&server, Some(client)).unwrap());
}

#[test]
fn the_certificate_that_expires_first_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(directory.path(), "x", &authority(), &authority());
    let (_, never) = files.first_expiry().unwrap();
    assert!(never > std::time::SystemTime::now() + Duration::from_secs(1 << 30));
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.not_after = rcgen::date_time_ymd(2031, 2, 3);
    std::fs::write(&files.authority, params.self_signed(&key).unwrap().pem()).unwrap();
    let (path, expires) = files.first_expiry().unwrap();
    let expires = expires.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!((path, expires.as_secs()), (files.authority.as_path(), 1_927_843_200));
}

#[test]
fn http_beyond_loopback_asks_for_tls_too() {
    let everywhere: SocketAddr = (Ipv4Addr::UNSPECIFIED, 0).into();
    let far = listen::ServerOptions { http: Some(everywhere), ..Default::default() };
    let refused = Server::start(loopback(), far.clone());
    assert!(matches!(refused, Err(StartError::InsecureHttp(_))), "{refused:?}");
    Server::start(loopback(), listen::ServerOptions { insecure: true, ..far.clone() }).unwrap();
    // With TLS, the plain request of a stranger is not answered.
    let directory = tempfile::tempdir().unwrap();
    let authority = authority();
    let ours = files(directory.path(), "server", &authority, &authority);
    let tls = Some(server_config(&ours).unwrap());
    let server = Server::start(loopback(), listen::ServerOptions { tls, ..far }).unwrap();
    let port = server.http_address().unwrap().port();
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut answer = Vec::new();
    stream.write_all(b"GET /health HTTP/1.1\r\n\r\n").unwrap();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.windows(2).any(|text| text == b"ok"), "{answer:?}");
}

#[test]
fn slow_clients_of_http_do_not_keep_others_from_an_answer() {
    let http = Some(loopback());
    let server = start(listen::ServerOptions { http, ..Default::default() });
    let to = server.http_address().unwrap();
    let mut greedy: Vec<TcpStream> = Vec::new();
    for _ in 0..40 {
        // Says nothing, or asks for much and reads none of it.
        greedy.push(TcpStream::connect(to).unwrap());
        let mut pipelining = TcpStream::connect(to).unwrap();
        pipelining.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let _ = pipelining.write_all(&b"GET /metrics HTTP/1.1\r\n\r\n".repeat(2000));
        greedy.push(pipelining);
    }
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nok\n"),
        "{answer}"
    );
}

/// The numbers of regions come from a counter of 32 bits, which wraps around in the end.
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
    // Found by one connection while another one drops it.
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

fn eventually(what: &str, patience: Duration, is_so: impl Fn() -> bool) {
    let until = Instant::now() + patience;
    while !is_so() {
        assert!(Instant::now() < until, "{what} not after {patience:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// To its server, a client whose machine is suspended is one that says no more, also in the middle of a request, and
/// closes nothing.
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
    // Reapers look once a second.
    std::thread::sleep(Duration::from_millis(2500));
    let mut back = Raw::connect(&server);
    let proof = back.proof(on.region, &token, true);
    let on = back.call(&Request::Attach { region: on.region, fence: true, proof: &proof });
    let on = on.expect("its region is there").unwrap();
    back.call(&Request::Get { on, first: 0, count: 64, with_checksums: false }).unwrap();
}
