//! Moves bytes between sockets and sessions: a thread for each connection, blocking.
//!
//! Invariants: no more connections than the limits, before hello and after; whoever has not said hello in
//! time is turned away, or earlier where another needs the place; without TLS nobody but this machine is
//! listened to, unless told so.

use super::buffers::{Large, SMALL_BYTES};
use super::client::Client;
use super::metrics::{Latencies, Metrics};
use super::pool::{Limits, Pool};
use super::region::Owner;
use super::session::{Ended, Session};
use super::{admin, http};
use crate::page::PAGE_BYTES;
use crate::placement::{Keep, Placement};
use crate::secret;
use crate::transport::{Stream, is_local, prepare};
use crate::wire::header::{HEADER_BYTES, Header, Op};
use crate::wire::hello::{HELLO_BYTES, Hello, Location};
use crate::wire::inbox::Inbox;
use crate::wire::{REPORT_BYTES_MAX, SUM_BYTES, VERSION};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use socket2::SockRef;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// For TLS and hello together.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// For a client that does not read its replies.
const SEND_PATIENCE: Duration = Duration::from_secs(10);
/// Replies are sent when they come to this, or when nothing more is to be answered.
pub(super) const REPLY_BYTES: usize = 256 << 10;
/// Connections that have not said hello, at a time. They cost a thread each, and take no place from others.
const LOBBY_MAX: usize = 64;
/// A connection with a large buffer that is idle for so long gives it back.
const IDLE: Duration = Duration::from_millis(100);
/// A request for which a large buffer is kept must be whole after this time.
const REQUEST_PATIENCE: Duration = Duration::from_secs(10);

/// A reply with one page.
const PAGE_REPLY_BYTES: usize = HEADER_BYTES + PAGE_BYTES;
/// Alike ones from one look at where the client runs to the next.
const REPLIES_PER_LOOK: u32 = 32;

/// How a server is started.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// What it lends.
    pub limits: Limits,
    /// Mutual TLS.
    pub tls: Option<Arc<ServerConfig>>,
    /// Listen to the network without TLS.
    pub insecure: bool,
    /// Where to answer HTTP.
    pub http: Option<SocketAddr>,
    /// What fails as a whole with this server, by name; none for the machine.
    pub failure_domain: Option<String>,
}

/// The TLS configuration for connections that begin now; it can be replaced.
#[derive(Debug, Clone)]
pub struct Tls(Arc<RwLock<Option<Arc<ServerConfig>>>>);

impl Tls {
    fn new(config: Option<Arc<ServerConfig>>) -> Tls {
        Tls(Arc::new(RwLock::new(config)))
    }

    /// Returns the configuration, if TLS is spoken.
    pub fn config(&self) -> Option<Arc<ServerConfig>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, config: Arc<ServerConfig>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(config);
    }
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Neither TLS nor loopback.
    #[error(
        "{0} is not on loopback, and without TLS anybody on the network could read the pages; give \
         --tls-cert, --tls-key and --tls-ca, or --insecure where the network is trusted"
    )]
    Insecure(SocketAddr),
    /// Neither TLS nor loopback, for HTTP.
    #[error(
        "{0} is not on loopback, and without TLS anybody on the network could read over HTTP who uses this \
         server; give --tls-cert, --tls-key and --tls-ca, with which HTTP asks for a client's certificate too, \
         or --insecure where the network is trusted"
    )]
    InsecureHttp(SocketAddr),
    /// The system's reason.
    #[error("cannot listen on {address}: {source}; choose another --listen address")]
    Listen {
        /// Where to.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    http: Option<SocketAddr>,
    can_drain: bool,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    tls: Tls,
    started: Instant,
    stopped: AtomicBool,
    next_connection: AtomicU64,
    location: Location,
    /// To be shut down at the end, or when they are not greeted in time.
    sockets: Mutex<HashMap<u64, Admitted>>,
}

/// A connection's socket.
#[derive(Debug)]
struct Admitted {
    socket: TcpStream,
    address: IpAddr,
    /// None when the client has said hello. A limit on all of it: one on each read would let a client
    /// keep its place for long that sends byte by byte.
    hello_until: Option<Instant>,
}

impl Server {
    /// Binds and serves in threads of its own.
    ///
    /// # Errors
    /// When it may not or cannot listen there.
    pub fn start(listen: SocketAddr, options: Options) -> Result<Server, StartError> {
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
        // Clients say 0.
        let epoch = u64::from_le_bytes(secret::random().map_err(cannot(listen))?).max(1);
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
        let shared = Arc::new(Shared {
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it answers HTTP.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http
    }

    /// Whether [`admin::drain`] reaches it: false where another process has taken the name.
    pub fn can_be_drained(&self) -> bool {
        self.can_drain
    }

    /// Uses this configuration for connections that begin from now on. Only for a server that speaks TLS.
    pub fn set_tls(&self, config: Arc<ServerConfig>) {
        if self.shared.tls.config().is_some() {
            self.shared.tls.replace(config);
        }
    }

    /// What it holds.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.shared.pool
    }
}

impl Drop for Server {
    /// Ends all connections. HTTP goes on until the process ends.
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        // Wakes the accepting thread; if that fails it has ended.
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

/// Where the server of this epoch runs. All containers of a machine have its boot id; where it cannot be read (no
/// /proc), the server counts as alone on its machine.
fn location(epoch: u64, failure_domain: Option<&str>) -> Location {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let machine = boot_id.unwrap_or_else(|_| format!("{epoch:x}"));
    Location::new(machine.trim(), failure_domain)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.into()).stack_size(512 << 10).spawn(work)
}

impl Shared {
    fn sockets(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Admitted>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn reap(&self) {
        while !self.stopped.load(Ordering::Relaxed) {
            self.pool.reap(self.now_ns());
            self.turn_silent_ones_away();
            thread::park_timeout(Duration::from_secs(1));
        }
    }

    fn turn_silent_ones_away(&self) {
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
                // Out of file descriptors, say. Those who are served go on.
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn admit(self: Arc<Self>, socket: TcpStream, peer: SocketAddr) {
        let tally = &self.pool.tally;
        let refuse = || {
            tally.connections_refused_total.fetch_add(1, Ordering::Relaxed);
        };
        let Ok(twin) = socket.try_clone() else { return refuse() };
        let mut sockets = self.sockets();
        make_room(&mut sockets);
        let number = self.next_connection.fetch_add(1, Ordering::Relaxed);
        let hello_until = Some(Instant::now() + HELLO_PATIENCE);
        sockets.insert(number, Admitted { socket: twin, address: peer.ip(), hello_until });
        drop(sockets);
        let shared = self.clone();
        let work = move || {
            // However it ends, by the peer's leaving or misbehaving: others are not concerned.
            if shared.greet_and_serve(number, socket, peer).is_err() {
                shared.pool.tally.connections_refused_total.fetch_add(1, Ordering::Relaxed);
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

    /// Errors are those before service: what comes after is a connection's normal end.
    fn greet_and_serve(&self, number: u64, socket: TcpStream, peer: SocketAddr) -> io::Result<()> {
        prepare(&socket, SEND_PATIENCE)?;
        let mut stream = match self.tls.config() {
            None => socket.into(),
            Some(config) => {
                let tls = ServerConnection::new(config).map_err(io::Error::other)?;
                Stream::TlsServer(Box::new(StreamOwned::new(tls, socket.into())))
            }
        };
        let nonce = secret::random()?;
        let mut bytes = [0; HELLO_BYTES];
        stream.read_exact(&mut bytes)?;
        let client = Hello::decode(&bytes).map_err(io::Error::other)?;
        let ours = Hello::server(self.pool.epoch, nonce, self.location);
        if client.version != VERSION {
            stream.write_all(&ours.encode())?;
            stream.flush()?;
            return Err(io::Error::other("another version"));
        }
        let Some(place) = Place::take(&self.pool, &identity(&stream, peer.ip())) else {
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
        let client = place.client.clone();
        let mut session = Session::of_client(self.pool.clone(), nonce, owner, client);
        let ended = match self.serve(&mut stream, &mut session, local.then(Follow::new)) {
            Err(error) if is_silence(&error) => Ended::Silent,
            _ => Ended::Closed,
        };
        session.close(self.now_ns(), ended);
        Ok(())
    }

    fn serve(
        &self,
        stream: &mut Stream,
        session: &mut Session,
        mut follow: Option<Follow>,
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
            if let Some(follow) = &mut follow {
                follow.after(stream.socket(), frames, replies.len());
            }
            replies.clear();
        }
    }

    /// Waits for a large buffer. While the connection has it, its reads end after a moment.
    fn large(&self, stream: &Stream) -> io::Result<Large<'_>> {
        stream.socket().set_read_timeout(Some(IDLE))?;
        Ok(self.pool.buffers.take())
    }

    /// Reads once. A connection with a large buffer that is between requests is idle after a moment, and at
    /// once where another connection waits for a buffer.
    fn fill(&self, inbox: &mut Inbox, stream: &mut Stream, is_large: bool) -> io::Result<Filled> {
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

/// Whether a connection ended because nothing is heard of the client: it does not acknowledge what is sent, or
/// cannot be reached. The kernel of a machine whose client has ended says so.
fn is_silence(error: &io::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut, WouldBlock};
    // WouldBlock: a time-out of ours, on a socket that blocks.
    matches!(
        error.kind(),
        TimedOut | WouldBlock | HostUnreachable | NetworkUnreachable | NetworkDown
    )
}

/// What came of a read.
enum Filled {
    Some,
    End,
    Idle,
}

/// A client's connection, counted until this is dropped.
struct Place<'a> {
    pool: &'a Pool,
    client: Arc<Client>,
}

impl Place<'_> {
    /// None where there is no place for another one of this client.
    fn take<'a>(pool: &'a Pool, identity: &str) -> Option<Place<'a>> {
        let client = pool.client(identity);
        // Not made where it is not counted: its end would be.
        pool.connect(&client).then(|| Place { pool, client })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.pool.disconnect(&self.client);
    }
}

/// Who a client is to limits: its certificate, else its address. Of IPv6 the network, as a host can take any
/// address in it.
fn identity(stream: &Stream, address: IpAddr) -> String {
    if let Stream::TlsServer(tls) = stream
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

/// Turns one of those away that have not said hello, where they are too many: of the address that has most of
/// them the one that has waited longest. Who greets at once gets in, however many others say nothing.
fn make_room(sockets: &mut HashMap<u64, Admitted>) {
    let silent = |admitted: &&Admitted| admitted.hello_until.is_some();
    let mut by_address = HashMap::new();
    for admitted in sockets.values().filter(silent) {
        *by_address.entry(admitted.address).or_insert(0usize) += 1;
    }
    if by_address.values().sum::<usize>() < LOBBY_MAX {
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

/// How long the reply to a request may be.
fn reply_bytes(frame: &[u8]) -> usize {
    let header = frame.first_chunk().and_then(|head| Header::decode(head).ok());
    match header {
        Some(header) if header.op == Op::Get => {
            HEADER_BYTES + usize::from(header.count) * (SUM_BYTES + PAGE_BYTES)
        }
        Some(header) if header.op == Op::Report => REPORT_BYTES_MAX,
        _ => 0,
    }
}

/// Where a session runs whose client is on this machine: on the client's CPU while it asks for single
/// pages, as it does nothing else meanwhile; off that CPU while it is sent runs of them, as it uses
/// them meanwhile; anywhere while it sends.
struct Follow {
    placement: Placement,
    /// What the last replies were, and how many in a row.
    last: Sent,
    count: u32,
}

/// Pages that are sent with each reply.
#[derive(Clone, Copy, PartialEq)]
enum Sent {
    None,
    One,
    Many,
}

impl Follow {
    fn new() -> Follow {
        Follow { placement: Placement::of_this_thread(), last: Sent::None, count: 0 }
    }

    /// Some frames have been answered, with so many bytes.
    fn after(&mut self, socket: &TcpStream, frames: usize, bytes: usize) {
        let sent = match bytes {
            bytes if bytes > 0 && bytes == frames * PAGE_REPLY_BYTES => Sent::One,
            bytes if bytes > frames * PAGE_REPLY_BYTES => Sent::Many,
            _ => Sent::None,
        };
        self.count = if sent == self.last { self.count + 1 } else { 1 };
        self.last = sent;
        if self.count.is_multiple_of(REPLIES_PER_LOOK) {
            // On loopback, where the sender ran.
            let cpu = SockRef::from(socket).cpu_affinity().ok();
            self.placement.keep(match (sent, cpu) {
                (Sent::One, Some(cpu)) => Keep::On(cpu),
                (Sent::Many, Some(cpu)) => Keep::Off(cpu),
                _ => Keep::Anywhere,
            });
        }
    }
}

fn observe(latencies: &Latencies, op: u8, took_ns: u64) {
    match op {
        op if op == Op::Get as u8 => latencies.get.observe(took_ns as f64 / 1e9),
        op if op == Op::Put as u8 => latencies.put.observe(took_ns as f64 / 1e9),
        _ => {}
    }
}
