//! What other programs read of a server over HTTP: `/health`, `/metrics`, `/report`.
//!
//! Nothing can be changed here, and no page can be read. Invariants: a request is answered or given up within
//! seconds, one for each connection; of too many connections the oldest is closed, so that `/health` answers
//! whatever slow clients do; no error ends the thread that accepts.

use super::listen::Tls;
use super::metrics::Metrics;
use super::pool::Pool;
use crate::transport::Stream;
use rustls::{ServerConnection, StreamOwned};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Clients in a report.
const CLIENTS_MAX: usize = 1000;
/// At the same time.
const CONNECTIONS_MAX: usize = 16;
/// For a whole request, and for a client that does not read the answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longer ones are none that we answer.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// What is answered, and who asks.
struct Web {
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    started: Instant,
    /// Beyond loopback, as on the server's own port.
    tls: Option<Tls>,
    open: Mutex<BTreeMap<u64, TcpStream>>,
}

/// An answer: status line, type, body.
type Answer = (&'static str, &'static str, String);

/// Answers until the process ends; returns the address that was bound.
///
/// # Errors
/// When the address cannot be bound.
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
                // Out of file descriptors, say, which others give back.
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
            // If this fails, the client has gone, or is too slow.
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
                Stream::TlsServer(Box::new(StreamOwned::new(session, socket.into())))
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
        hang_up(stream.socket())
    }

    fn answer(&self, request: &str) -> Answer {
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
                match serde_json::to_string(&self.pool.report(uptime_ns, CLIENTS_MAX)) {
                    Ok(report) => ("200 OK", "application/json", report + "\n"),
                    Err(error) => ("500 Internal Server Error", text, format!("{error}\n")),
                }
            }
            ("GET", _) => ("404 Not Found", text, "try /health, /metrics or /report\n".into()),
            _ => ("405 Method Not Allowed", text, "only GET\n".into()),
        }
    }
}

/// Reads a request without a body, in [`PATIENCE`] for all of it.
fn read_request(stream: &mut Stream) -> io::Result<String> {
    let until = Instant::now() + PATIENCE;
    let (mut bytes, mut piece) = (Vec::new(), [0; 1024]);
    while !bytes.windows(4).any(|end| end == b"\r\n\r\n") {
        if bytes.len() > REQUEST_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let left = until.saturating_duration_since(Instant::now());
        // A time-out of zero would be none.
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

/// Ends our side and waits briefly for the client's: a socket that is closed with something unread resets the
/// connection, and the answer may be lost with it.
fn hang_up(mut socket: &TcpStream) -> io::Result<()> {
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
