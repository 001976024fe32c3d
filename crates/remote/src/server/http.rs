//! The HTTP endpoints of a server: `/health`, `/metrics` and `/report`. All are read-only, and none
//! shows a page.
//!
//! Invariants: each connection has one request, which ends within seconds. If there are too many
//! connections, the server closes the oldest, so slow clients cannot block `/health`. No error ends
//! the accepting thread.

use super::listen::Tls;
use super::metrics::Metrics;
use super::pool::Pool;
use crate::transport::PeerStream;
use pagetax_core::document::Document;
use rustls::{ServerConnection, StreamOwned};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The most clients in a report.
const CLIENTS_MAX: usize = 1000;
/// The most connections at a time.
const CONNECTIONS_MAX: usize = 16;
/// The timeout of a whole request, and of each write of the response.
const PATIENCE: Duration = Duration::from_secs(2);
/// The largest size of a request in bytes.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// The state that all HTTP connections share.
struct Web {
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    started: Instant,
    /// The TLS of the server's own port, if HTTP listens beyond loopback.
    tls: Option<Tls>,
    open: Mutex<BTreeMap<u64, TcpStream>>,
}

/// A response: status line, content type and body.
type HttpResponse = (&'static str, &'static str, String);

/// Serves HTTP until the process ends. Returns the address that was bound.
///
/// # Errors
/// If the address cannot be bound.
pub fn start(
    address: SocketAddr,
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    started: Instant,
    tls: Option<Tls>,
) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(address)?;
    let bound = listener.local_addr()?;
    let web = Arc::new(Web { pool, metrics, started, tls, open: Mutex::default() });
    let accept = move || {
        for number in 0.. {
            match listener.accept() {
                Ok((socket, _)) => web.clone().admit(number, socket),
                // For example, the process is out of file descriptors.
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    };
    thread::Builder::new().name("pagetax-http".into()).spawn(accept)?;
    Ok(bound)
}

impl Web {
    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, TcpStream>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(self: Arc<Self>, number: u64, socket: TcpStream) {
        let Ok(twin) = socket.try_clone() else { return };
        let mut open = self.open();
        while open.len() >= CONNECTIONS_MAX {
            let oldest = open.pop_first();
            oldest.iter().for_each(|(_, socket)| drop(socket.shutdown(Shutdown::Both)));
        }
        open.insert(number, twin);
        drop(open);
        let web = self.clone();
        let work = move || {
            // An error means that the client is gone or too slow.
            let _ = web.serve(socket);
            web.open().remove(&number);
        };
        if thread::Builder::new().name("pagetax-web".into()).spawn(work).is_err() {
            self.open().remove(&number);
        }
    }

    fn serve(&self, socket: TcpStream) -> io::Result<()> {
        socket.set_write_timeout(Some(PATIENCE))?;
        let config = self.tls.as_ref().and_then(Tls::config);
        let mut stream = match config {
            None => socket.into(),
            Some(config) => {
                let session = ServerConnection::new(config).map_err(io::Error::other)?;
                PeerStream::TlsServer(Box::new(StreamOwned::new(session, socket.into())))
            }
        };
        let request = read_request(&mut stream)?;
        let (status, kind, body) = self.answer(&request);
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        stream.flush()?;
        close_gracefully(stream.socket())
    }

    fn answer(&self, request: &str) -> HttpResponse {
        let text = "text/plain";
        let mut words = request.split_ascii_whitespace();
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let path = target.split('?').next().unwrap_or_default();
        match (method, path) {
            ("GET", "/metrics") => {
                let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                ("200 OK", kind, self.metrics.encode())
            }
            ("GET", "/health") if self.pool.is_draining() => {
                ("503 Service Unavailable", text, "draining\n".into())
            }
            ("GET", "/health") => ("200 OK", text, "ok\n".into()),
            ("GET", "/report") => {
                let uptime_ns = self.started.elapsed().as_nanos() as u64;
                match self.pool.report(uptime_ns, CLIENTS_MAX).to_json() {
                    Ok(report) => ("200 OK", "application/json", report),
                    Err(error) => ("500 Internal Server Error", text, format!("{error}\n")),
                }
            }
            ("GET", _) => ("404 Not Found", text, "try /health, /metrics or /report\n".into()),
            _ => ("405 Method Not Allowed", text, "only GET\n".into()),
        }
    }
}

/// Reads a request without a body. [`PATIENCE`] limits the whole request.
fn read_request(stream: &mut PeerStream) -> io::Result<String> {
    let until = Instant::now() + PATIENCE;
    let (mut bytes, mut piece) = (Vec::new(), [0; 1024]);
    while !bytes.windows(4).any(|end| end == b"\r\n\r\n") {
        if bytes.len() > REQUEST_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let left = until.saturating_duration_since(Instant::now());
        // A timeout of zero would mean no timeout.
        stream.socket().set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(came) => bytes.extend_from_slice(&piece[..came]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Ends the stream, and waits briefly until the client does. Closing a socket with unread bytes
/// resets the connection, and the response may be lost.
fn close_gracefully(mut socket: &TcpStream) -> io::Result<()> {
    socket.shutdown(Shutdown::Write)?;
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    let mut rest = [0; 1024];
    let most = REQUEST_BYTES_MAX / rest.len();
    let _ = (0..most).try_for_each(|_| match socket.read(&mut rest) {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(()),
    });
    Ok(())
}
