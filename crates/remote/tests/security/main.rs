//! The security of servers: certificates, access to regions, replays, limits, and invalid bytes.

#[path = "../behind/mod.rs"]
mod behind;
mod certificates;
mod frames;
mod http;
mod limits;
mod regions;

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
use pagetax_remote::wire::{VERSION, VERSION_MIN, WireChecksum, push_checksums};
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
use twox_hash::XxHash3_64;

fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn start(options: listen::ServerOptions) -> Server {
    Server::start(loopback(), options).unwrap()
}

/// Creates an authority that signs certificates.
fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Writes a certificate for loopback, its key, and the authority that its holder trusts.
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

/// A client of raw frames.
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
        if let Request::Put { pages: bytes, .. } | Request::CompressedPut { block: bytes, .. } =
            request
        {
            frame.extend_from_slice(bytes);
        }
        self.stream.write_all(&frame).unwrap();
        self.sent.extend_from_slice(&frame);
    }

    /// Reads the next reply: its header, the failure if it is one, and the lease if it has one.
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

/// Connects from an address of loopback and sends a hello. Returns the server's hello.
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
