//! Moves bytes between sockets and sessions: a thread for each connection, blocking.
//!
//! Invariants: no more connections than the limit; whoever has not said hello in time is turned
//! away; without TLS nobody but this machine is listened to, unless told so.

use super::http;
use super::metrics::{Latencies, Metrics};
use super::pool::{Limits, Pool};
use super::region::Owner;
use super::session::Session;
use crate::page::PAGE_BYTES;
use crate::placement::{Keep, Placement};
use crate::secret;
use crate::transport::{Stream, is_local, prepare};
use crate::wire::VERSION;
use crate::wire::header::{HEADER_BYTES, Op};
use crate::wire::hello::{HELLO_BYTES, Hello, Location};
use crate::wire::inbox::Inbox;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use socket2::SockRef;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// For TLS and hello together.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// For a client that does not read its replies.
const SEND_PATIENCE: Duration = Duration::from_secs(10);
/// Replies are sent when they come to this, or when nothing more is to be answered.
const REPLY_BYTES: usize = 256 << 10;

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

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Neither TLS nor loopback.
    #[error(
        "{0} is not on loopback, and without TLS anybody on the network could read the pages; give \
         --tls-cert, --tls-key and --tls-ca, or --insecure where the network is trusted"
    )]
    Insecure(SocketAddr),
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
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    tls: Option<Arc<ServerConfig>>,
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
        let cannot = |address| move |source| StartError::Listen { address, source };
        // Clients say 0.
        let epoch = u64::from_le_bytes(secret::random().map_err(cannot(listen))?).max(1);
        let pool = Arc::new(Pool::new(options.limits, epoch));
        let metrics = Arc::new(Metrics::new(pool.clone()));
        let started = Instant::now();
        let listener = TcpListener::bind(listen).map_err(cannot(listen))?;
        let address = listener.local_addr().map_err(cannot(listen))?;
        let start_http = |at| http::start(at, pool.clone(), metrics.clone(), started);
        let http = options.http.map(|at| start_http(at).map_err(cannot(at))).transpose()?;
        let shared = Arc::new(Shared {
            pool,
            metrics,
            tls: options.tls,
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
        Ok(Server { shared, address, http, threads })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it answers HTTP.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http
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
        if sockets.len() >= self.pool.limits.connections_max as usize {
            return refuse();
        }
        let number = self.next_connection.fetch_add(1, Ordering::Relaxed);
        let hello_until = Some(Instant::now() + HELLO_PATIENCE);
        sockets.insert(number, Admitted { socket: twin, hello_until });
        drop(sockets);
        tally.connections.fetch_add(1, Ordering::Relaxed);
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
        if self.sockets().remove(&number).is_some() {
            self.pool.tally.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Errors are those before service: what comes after is a connection's normal end.
    fn greet_and_serve(&self, number: u64, socket: TcpStream, peer: SocketAddr) -> io::Result<()> {
        prepare(&socket, SEND_PATIENCE)?;
        let mut stream = match &self.tls {
            None => socket.into(),
            Some(config) => {
                let tls = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
                Stream::TlsServer(Box::new(StreamOwned::new(tls, socket.into())))
            }
        };
        let nonce = secret::random()?;
        let mut bytes = [0; HELLO_BYTES];
        stream.read_exact(&mut bytes)?;
        let client = Hello::decode(&bytes).map_err(io::Error::other)?;
        let ours = Hello::server(self.pool.epoch, nonce, self.location);
        stream.write_all(&ours.encode())?;
        stream.flush()?;
        if client.version != VERSION {
            return Err(io::Error::other("another version"));
        }
        if let Some(admitted) = self.sockets().get_mut(&number) {
            admitted.hello_until = None;
        }
        let owner = Owner { address: peer.ip().to_string(), pid: client.pid, name: client.name };
        let local = is_local(stream.socket())?;
        let mut session = Session::new(self.pool.clone(), nonce, owner, local);
        let _ended = self.serve(&mut stream, &mut session, local.then(Follow::new));
        session.close(self.now_ns());
        Ok(())
    }

    fn serve(
        &self,
        stream: &mut Stream,
        session: &mut Session,
        mut follow: Option<Follow>,
    ) -> io::Result<()> {
        let (mut inbox, mut replies) = (Inbox::default(), Vec::new());
        while inbox.fill(stream)? > 0 {
            let (mut now_ns, mut frames) = (self.now_ns(), 0);
            while let Some(frame) = inbox.frame().map_err(io::Error::other)? {
                let op = frame[0];
                frames += 1;
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
        Ok(())
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
