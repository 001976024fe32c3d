//! The effects of connections on their process.

use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::transport::PeerStream;
use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{IoSlice, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

/// The variable that makes a test's child run the body of the test.
const CHILD: &str = "PAGETAX_TEST_CHILD";

/// Writes until the other side, which hangs up at once, is gone.
fn write_to_nobody(mut stream: PeerStream) {
    let page = [7; PAGE_BYTES];
    loop {
        let mut pieces = [IoSlice::new(&page[..100]), IoSlice::new(&page)];
        if stream.write_pieces(&mut pieces).is_err() {
            return;
        }
    }
}

fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (ours, listener.accept().unwrap().0)
}

fn plain() {
    let (ours, theirs) = connected();
    drop(theirs);
    write_to_nobody(ours.into());
}

fn tls() {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["localhost".to_string()]).unwrap();
    let certificate = certificate.self_signed(&key).unwrap().der().clone();
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let ours = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let theirs = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
        .unwrap();
    let (socket, theirs_socket) = connected();
    let server = std::thread::spawn(move || {
        let session = rustls::ServerConnection::new(Arc::new(theirs)).unwrap();
        let mut stream = StreamOwned::new(session, theirs_socket);
        stream.read_exact(&mut [0; 1]).unwrap();
    });
    let session = ClientConnection::new(Arc::new(ours), "localhost".try_into().unwrap()).unwrap();
    let mut stream = PeerStream::TlsClient(Box::new(StreamOwned::new(session, socket.into())));
    stream.write_all(&[1]).unwrap();
    stream.flush().unwrap();
    server.join().unwrap();
    write_to_nobody(stream);
}

/// Runs the test of this name again, in a process that SIGPIPE ends, as it ends programs in other
/// languages.
fn survives(test: &str, work: fn()) {
    if std::env::var_os(CHILD).is_some() {
        // SAFETY: the default action is no handler, and this process has no other thread that depends on it.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        return work();
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let child = child.args(["--exact", test]).env(CHILD, "1").output().unwrap();
    let signal = child.status.signal();
    assert!(
        child.status.success(),
        "signal {signal:?}: {}",
        String::from_utf8_lossy(&child.stderr)
    );
}

#[test]
fn who_hangs_up_does_not_end_the_client() {
    survives("who_hangs_up_does_not_end_the_client", plain);
}

#[test]
fn who_hangs_up_does_not_end_the_client_through_tls() {
    survives("who_hangs_up_does_not_end_the_client_through_tls", tls);
}
