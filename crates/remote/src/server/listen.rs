//! The I/O between sockets and sessions, with a blocking thread for each connection.
//!
//! Invariants: connections stay within the limits, before the hello and after it. A connection
//! without a hello is closed after [`HELLO_PATIENCE`], or earlier if a new one needs its place.
//! Without TLS the server listens on loopback only, unless it is started as insecure.

use super::buffers::{LargeBuffer, SMALL_BYTES};
use super::client::Client;
use super::metrics::{Latencies, Metrics};
use super::pool::{Limits, Pool};
use super::region::Owner;
use super::session::{ConnectionEnd, Session};
use super::{admin, http};
use crate::affinity::{CpuChoice, ThreadAffinity};
use crate::page::PAGE_BYTES;
use crate::random;
use crate::transport::{PeerStream, is_local, prepare};
use crate::wire::header::{HEADER_BYTES, Header, Op};
use crate::wire::hello::{HELLO_BYTES, Hello, Location};
use crate::wire::inbox::Inbox;
use crate::wire::{CHECKSUM_BYTES, REPORT_BYTES_MAX, agreed_version};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use socket2::SockRef;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The timeout of TLS handshake and hello together.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// The timeout of a send to a client that does not read its replies.
const SEND_PATIENCE: Duration = Duration::from_secs(10);
/// The bytes of replies after which they are sent. They are also sent when no request is left.
pub(super) const REPLY_BYTES: usize = 256 << 10;
/// The most connections at a time that have not sent their hello. They do not count towards the
/// limits of connections, but each takes a thread.
const HANDSHAKES_MAX: usize = 64;
/// The idle time after which a connection releases its large buffer.
const IDLE: Duration = Duration::from_millis(100);
/// The timeout of a request that arrives in parts while the connection has a large buffer.
const REQUEST_PATIENCE: Duration = Duration::from_secs(10);

/// The bytes of a reply with one page.
const PAGE_REPLY_BYTES: usize = HEADER_BYTES + PAGE_BYTES;
/// The number of replies of one size after which the server's thread looks up the client's CPU.
const REPLIES_PER_LOOK: u32 = 32;

/// The settings of a server.
#[derive(Debug, Clone, Default)]
pub struct ServerOptions {
    /// The limits on memory, regions and connections.
    pub limits: Limits,
    /// The configuration of mutual TLS; `None` without TLS.
    pub tls: Option<Arc<ServerConfig>>,
    /// True to listen beyond loopback without TLS.
    pub insecure: bool,
    /// The address for HTTP; `None` without HTTP.
    pub http: Option<SocketAddr>,
    /// The name of the failure domain; `None` for the machine.
    pub failure_domain: Option<String>,
}

/// The TLS configuration for new connections, which can be replaced.
#[derive(Debug, Clone)]
pub struct Tls(Arc<RwLock<Option<Arc<ServerConfig>>>>);

impl Tls {
    fn new(config: Option<Arc<ServerConfig>>) -> Tls {
        Tls(Arc::new(RwLock::new(config)))
    }

    /// Returns the configuration, or `None` without TLS.
    pub fn config(&self) -> Option<Arc<ServerConfig>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, config: Arc<ServerConfig>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(config);
    }
}

/// The reason why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address is not on loopback, and TLS is not configured.
    #[error(
        "{0} is not on loopback, and without TLS anybody on the network could read the pages; give \
         --tls-cert, --tls-key and --tls-ca, or --insecure where the network is trusted"
    )]
    Insecure(SocketAddr),
    /// The address for HTTP is not on loopback, and TLS is not configured.
    #[error(
        "{0} is not on loopback, and without TLS anybody on the network could read over HTTP who uses this \
         server; give --tls-cert, --tls-key and --tls-ca, with which HTTP asks for a client's certificate too, \
         or --insecure where the network is trusted"
    )]
    InsecureHttp(SocketAddr),
    /// The system refuses to listen.
    #[error("cannot listen on {address}: {source}; choose another --listen address")]
    Listen {
        /// The address that was refused.
        address: SocketAddr,
        /// The error that the system returned.
        source: io::Error,
    },
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    shared: Arc<ServerContext>,
    address: SocketAddr,
    http: Option<SocketAddr>,
    can_drain: bool,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct ServerContext {
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    tls: Tls,
    started: Instant,
    stopped: AtomicBool,
    next_connection: AtomicU64,
    location: Location,
    /// The sockets of all connections, to close them at the end or without a hello in time.
    sockets: Mutex<HashMap<u64, Admitted>>,
}

/// A connection's socket.
#[derive(Debug)]
struct Admitted {
    socket: TcpStream,
    address: IpAddr,
    /// The deadline of the whole hello, or `None` after it. A timeout of each read would let a
    /// client that sends byte by byte keep its place.
    hello_until: Option<Instant>,
}

impl Server {
    /// Binds the address and serves it in threads of its own.
    ///
    /// # Errors
    /// If the address needs TLS, or the system refuses it.
    pub fn start(listen: SocketAddr, options: ServerOptions) -> Result<Server, StartError> {
        if options.tls.is_none() && !options.insecure && !listen.ip().is_loopback() {
            return Err(StartError::Insecure(listen));
        }
        let has_tls = options.tls.is_some();
        let far_http = options.http.filter(|at| !at.ip().is_loopback() && !options.insecure);
        if let (Some(far), false) = (far_http, has_tls) {
            return Err(StartError::InsecureHttp(far));
        }
        let tls = Tls::new(options.tls);
        let cannot = |address| move |source| StartError::Listen { address, source };
        // Not 0, which is the epoch of clients.
        let epoch = u64::from_le_bytes(random::bytes().map_err(cannot(listen))?).max(1);
        let pool = Arc::new(Pool::new(options.limits, epoch));
        let metrics = Arc::new(Metrics::new(pool.clone()));
        let started = Instant::now();
        let listener = TcpListener::bind(listen).map_err(cannot(listen))?;
        let address = listener.local_addr().map_err(cannot(listen))?;
        let http_tls = far_http.map(|_| tls.clone());
        let start_http =
            |at| http::start(at, pool.clone(), metrics.clone(), started, http_tls.clone());
        let http = options.http.map(|at| start_http(at).map_err(cannot(at))).transpose()?;
        let can_drain = admin::start(address, pool.clone()).is_ok();
        let shared = Arc::new(ServerContext {
            pool,
            metrics,
            tls,
            started,
            stopped: AtomicBool::new(false),
            next_connection: AtomicU64::new(0),
            location: location(epoch, options.failure_domain.as_deref()),
            sockets: Mutex::default(),
        });
        let accepting = shared.clone();
        let reaping = shared.clone();
        let threads = vec![
            spawn("pagetax-accept", move || accepting.accept(&listener)).map_err(cannot(listen))?,
            spawn("pagetax-reap", move || reaping.reap()).map_err(cannot(listen))?,
        ];
        Ok(Server { shared, address, http, can_drain, threads })
    }

    /// Returns the address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address for HTTP, or `None` without HTTP.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http
    }

    /// Returns true if [`admin::drain`] reaches the server. It does not if another process took the
    /// socket's name.
    pub fn can_be_drained(&self) -> bool {
        self.can_drain
    }

    /// Uses this TLS configuration for new connections. Does nothing on a server without TLS.
    pub fn set_tls(&self, config: Arc<ServerConfig>) {
        if self.shared.tls.config().is_some() {
            self.shared.tls.replace(config);
        }
    }

    /// Returns the server's regions and counters.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.shared.pool
    }
}

impl Drop for Server {
    /// Ends all connections. HTTP goes on until the process ends.
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        // Wakes the accepting thread; an error means that it has ended.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_millis(200));
        for (_, admitted) in self.shared.sockets().drain() {
            let _ = admitted.socket.shutdown(Shutdown::Both);
        }
        self.threads.drain(..).for_each(|thread| {
            thread.thread().unpark();
            let _ = thread.join();
        });
    }
}

/// Returns the location of the server of this epoch. All containers of a machine see its boot ID. If
/// the boot ID is unreadable (no /proc), the server counts as alone on its machine.
fn location(epoch: u64, failure_domain: Option<&str>) -> Location {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let machine = boot_id.unwrap_or_else(|_| format!("{epoch:x}"));
    Location::new(machine.trim(), failure_domain)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.into()).stack_size(512 << 10).spawn(work)
}

impl ServerContext {
    fn sockets(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Admitted>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn reap(&self) {
        while !self.stopped.load(Ordering::Relaxed) {
            self.pool.reap(self.now_ns());
            self.close_silent_connections();
            thread::park_timeout(Duration::from_secs(1));
        }
    }

    fn close_silent_connections(&self) {
        let now = Instant::now();
        for admitted in self.sockets().values() {
            if admitted.hello_until.is_some_and(|until| until <= now) {
                // Its thread sees the end of the stream.
                let _ = admitted.socket.shutdown(Shutdown::Both);
            }
        }
    }

    fn accept(self: Arc<Self>, listener: &TcpListener) {
        while !self.stopped.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((socket, peer)) => self.clone().admit(socket, peer),
                // For example, the process is out of file descriptors. Open connections go on.
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn admit(self: Arc<Self>, socket: TcpStream, peer: SocketAddr) {
        let counters = &self.pool.counters;
        let refuse = || {
            counters.connections_refused_total.fetch_add(1, Ordering::Relaxed);
        };
        let Ok(twin) = socket.try_clone() else { return refuse() };
        let mut sockets = self.sockets();
        evict_silent_connection(&mut sockets);
        let number = self.next_connection.fetch_add(1, Ordering::Relaxed);
        let hello_until = Some(Instant::now() + HELLO_PATIENCE);
        sockets.insert(number, Admitted { socket: twin, address: peer.ip(), hello_until });
        drop(sockets);
        let shared = self.clone();
        let work = move || {
            // An error before the hello ends only this connection.
            if shared.handshake_and_serve(number, socket, peer).is_err() {
                shared.pool.counters.connections_refused_total.fetch_add(1, Ordering::Relaxed);
            }
            shared.forget(number);
        };
        if spawn("pagetax-conn", work).is_err() {
            refuse();
            self.forget(number);
        }
    }

    fn forget(&self, number: u64) {
        self.sockets().remove(&number);
    }

    /// Does the handshake, then serves the connection until its end.
    ///
    /// # Errors
    /// If the handshake fails. An error after it is a connection's normal end.
    fn handshake_and_serve(
        &self,
        number: u64,
        socket: TcpStream,
        peer: SocketAddr,
    ) -> io::Result<()> {
        prepare(&socket, SEND_PATIENCE)?;
        let mut stream = match self.tls.config() {
            None => socket.into(),
            Some(config) => {
                let tls = ServerConnection::new(config).map_err(io::Error::other)?;
                PeerStream::TlsServer(Box::new(StreamOwned::new(tls, socket.into())))
            }
        };
        let nonce = random::bytes()?;
        let mut bytes = [0; HELLO_BYTES];
        stream.read_exact(&mut bytes)?;
        let client = Hello::decode(&bytes).map_err(io::Error::other)?;
        let mut ours = Hello::server(self.pool.epoch, nonce, self.location);
        let Some(agreed) = agreed_version(client.version) else {
            stream.write_all(&ours.encode())?;
            stream.flush()?;
            return Err(io::Error::other("an older version"));
        };
        ours.version = agreed;
        let Some(permit) = ConnectionPermit::take(&self.pool, &identity(&stream, peer.ip())) else {
            stream.write_all(&ours.full().encode())?;
            stream.flush()?;
            return Err(io::Error::other("no place"));
        };
        stream.write_all(&ours.encode())?;
        stream.flush()?;
        if let Some(admitted) = self.sockets().get_mut(&number) {
            admitted.hello_until = None;
        }
        let owner = Owner { address: peer.ip().to_string(), pid: client.pid, name: client.name };
        let local = is_local(stream.socket())?;
        let client = permit.client.clone();
        let mut session = Session::of_client(self.pool.clone(), nonce, owner, client);
        let ended = match self.serve(&mut stream, &mut session, local.then(CpuPlacement::new)) {
            Err(error) if is_silence(&error) => ConnectionEnd::Silent,
            _ => ConnectionEnd::Closed,
        };
        session.close(self.now_ns(), ended);
        Ok(())
    }

    fn serve(
        &self,
        stream: &mut PeerStream,
        session: &mut Session,
        mut cpu_placement: Option<CpuPlacement>,
    ) -> io::Result<()> {
        let (mut inbox, mut replies) = (Inbox::default(), Vec::new());
        let mut large = None;
        loop {
            if large.is_none() && inbox.wanted().map_err(io::Error::other)? > SMALL_BYTES {
                large = Some(self.large(stream)?);
            }
            match self.fill(&mut inbox, stream, large.is_some())? {
                Filled::Some => {}
                Filled::End => return Ok(()),
                Filled::Idle => {
                    large = None;
                    inbox.shrink();
                    replies = Vec::new();
                    stream.socket().set_read_timeout(None)?;
                    continue;
                }
            }
            let (mut now_ns, mut frames) = (self.now_ns(), 0);
            while let Some(frame) = inbox.frame().map_err(io::Error::other)? {
                let op = frame[0];
                frames += 1;
                if large.is_none() && replies.len() + reply_bytes(frame) > SMALL_BYTES {
                    large = Some(self.large(stream)?);
                }
                session.handle(frame, now_ns, &mut replies).map_err(io::Error::other)?;
                let done_ns = self.now_ns();
                observe(&self.metrics.latencies, op, done_ns - now_ns);
                now_ns = done_ns;
                if replies.len() >= REPLY_BYTES {
                    stream.write_all(&replies)?;
                    replies.clear();
                }
            }
            stream.write_all(&replies)?;
            stream.flush()?;
            if let Some(cpu_placement) = &mut cpu_placement {
                cpu_placement.after(stream.socket(), frames, replies.len());
            }
            replies.clear();
        }
    }

    /// Waits for a large buffer. While the connection has it, its reads time out after [`IDLE`].
    fn large(&self, stream: &PeerStream) -> io::Result<LargeBuffer<'_>> {
        stream.socket().set_read_timeout(Some(IDLE))?;
        Ok(self.pool.buffers.take())
    }

    /// Reads once. A connection with a large buffer that is between requests counts as idle after
    /// [`IDLE`], and at once if another connection waits for a buffer.
    fn fill(
        &self,
        inbox: &mut Inbox,
        stream: &mut PeerStream,
        is_large: bool,
    ) -> io::Result<Filled> {
        let begun = Instant::now();
        loop {
            if is_large && inbox.is_empty() && self.pool.buffers.is_wanted() {
                return Ok(Filled::Idle);
            }
            match inbox.fill(stream) {
                Ok(0) => return Ok(Filled::End),
                Ok(_) => return Ok(Filled::Some),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_large && error.kind() == io::ErrorKind::WouldBlock => {
                    if inbox.is_empty() {
                        return Ok(Filled::Idle);
                    }
                    if begun.elapsed() > REQUEST_PATIENCE {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Returns true if a connection ended because the client was silent: it does not acknowledge, or is
/// unreachable. If only the client's process has ended, its kernel closes the connection.
fn is_silence(error: &io::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut, WouldBlock};
    // WouldBlock is the timeout of a blocking socket.
    matches!(
        error.kind(),
        TimedOut | WouldBlock | HostUnreachable | NetworkUnreachable | NetworkDown
    )
}

/// The result of a read.
enum Filled {
    Some,
    End,
    Idle,
}

/// A permit for a client's connection, which counts until it is dropped.
struct ConnectionPermit<'a> {
    pool: &'a Pool,
    client: Arc<Client>,
}

impl ConnectionPermit<'_> {
    /// Counts a connection. Returns `None` if a limit is reached.
    fn take<'a>(pool: &'a Pool, identity: &str) -> Option<ConnectionPermit<'a>> {
        let client = pool.client(identity);
        // Created only if the connection was counted, because its drop counts the end.
        pool.connect(&client).then(|| ConnectionPermit { pool, client })
    }
}

impl Drop for ConnectionPermit<'_> {
    fn drop(&mut self) {
        self.pool.disconnect(&self.client);
    }
}

/// Returns the identity that limits apply to: the certificate, or else the address. For IPv6 it is
/// the /64 network, because a host can take any address in it.
fn identity(stream: &PeerStream, address: IpAddr) -> String {
    if let PeerStream::TlsServer(tls) = stream
        && let Some([certificate, ..]) = tls.conn.peer_certificates()
    {
        let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
        return digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    }
    match address.to_canonical() {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) if address.is_loopback() => address.to_string(),
        IpAddr::V6(address) => format!("{:x?}", &address.octets()[..8]),
    }
}

/// Closes a connection that has not sent its hello, if there are too many of them. It is the oldest
/// one of the address that has most of them. So a client that sends its hello at once gets in, even
/// if many others are silent.
fn evict_silent_connection(sockets: &mut HashMap<u64, Admitted>) {
    let silent = |admitted: &&Admitted| admitted.hello_until.is_some();
    let mut by_address = HashMap::new();
    for admitted in sockets.values().filter(silent) {
        *by_address.entry(admitted.address).or_insert(0usize) += 1;
    }
    if by_address.values().sum::<usize>() < HANDSHAKES_MAX {
        return;
    }
    let most = by_address.into_iter().max_by_key(|(_, count)| *count).map(|(address, _)| address);
    let of_most = sockets
        .iter()
        .filter(|(_, admitted)| admitted.hello_until.is_some() && Some(admitted.address) == most);
    let oldest = of_most.map(|(number, _)| *number).min();
    if let Some(admitted) = oldest.and_then(|number| sockets.remove(&number)) {
        // Its thread sees the end of the stream.
        let _ = admitted.socket.shutdown(Shutdown::Both);
    }
}

/// Returns the bytes that a request takes at most in the buffer of replies.
fn reply_bytes(frame: &[u8]) -> usize {
    let header = frame.first_chunk().and_then(|head| Header::decode(head).ok());
    match header {
        Some(header) if header.op == Op::Get => {
            HEADER_BYTES + usize::from(header.count) * (CHECKSUM_BYTES + PAGE_BYTES)
        }
        Some(header) if header.op == Op::CompressedPut => usize::from(header.count) * PAGE_BYTES,
        Some(header) if header.op == Op::Report => REPORT_BYTES_MAX,
        _ => 0,
    }
}

/// The CPU placement of a session whose client is on this machine. It depends on the replies:
///
/// - single pages: on the client's CPU, because the client only waits meanwhile;
/// - runs of pages: off that CPU, because the client uses pages meanwhile;
/// - no pages: anywhere.
struct CpuPlacement {
    placement: ThreadAffinity,
    /// The size of the last replies.
    last: ReplySize,
    count: u32,
}

/// The number of pages in each reply.
#[derive(Clone, Copy, PartialEq)]
enum ReplySize {
    None,
    One,
    Many,
}

impl CpuPlacement {
    fn new() -> CpuPlacement {
        CpuPlacement {
            placement: ThreadAffinity::of_this_thread(),
            last: ReplySize::None,
            count: 0,
        }
    }

    /// Records that `frames` requests were answered with `bytes`, and adapts the placement.
    fn after(&mut self, socket: &TcpStream, frames: usize, bytes: usize) {
        let sent = match bytes {
            bytes if bytes > 0 && bytes == frames * PAGE_REPLY_BYTES => ReplySize::One,
            bytes if bytes > frames * PAGE_REPLY_BYTES => ReplySize::Many,
            _ => ReplySize::None,
        };
        self.count = if sent == self.last { self.count + 1 } else { 1 };
        self.last = sent;
        if self.count.is_multiple_of(REPLIES_PER_LOOK) {
            // SO_INCOMING_CPU: on loopback, the CPU of the sender.
            let cpu = SockRef::from(socket).cpu_affinity().ok();
            self.placement.keep(match (sent, cpu) {
                (ReplySize::One, Some(cpu)) => CpuChoice::On(cpu),
                (ReplySize::Many, Some(cpu)) => CpuChoice::Off(cpu),
                _ => CpuChoice::Anywhere,
            });
        }
    }
}

fn observe(latencies: &Latencies, op: u8, took_ns: u64) {
    match op {
        op if op == Op::Get as u8 => latencies.get.observe(took_ns as f64 / 1e9),
        op if op == Op::Put as u8 || op == Op::CompressedPut as u8 => {
            latencies.put.observe(took_ns as f64 / 1e9)
        }
        _ => {}
    }
}
