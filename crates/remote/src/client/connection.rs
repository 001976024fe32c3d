//! A connection to a server: requests go out, and replies come back in order.
//!
//! Invariants: a read that succeeds allocates nothing, and copies bytes only from the socket into
//! the caller's pages. A reply that nobody waits for any more is read and dropped. Its id keeps it
//! from being taken for another reply.

use super::compression::Compression;
use crate::link_rate;
use crate::page::{PAGE_BYTES, RUN_PAGES_MAX};
use crate::secret::{self, Claim};
use crate::store::StoreError;
use crate::tls::ClientTls;
use crate::transport::{PeerStream, ReplyPolling, is_local, prepare};
use crate::wire::header::{HEADER_BYTES, Header, Op, check};
use crate::wire::hello::{HELLO_BYTES, Hello, Location};
use crate::wire::inbox::Inbox;
use crate::wire::reply::Reply;
use crate::wire::request::{Request, Token};
use crate::wire::{COMPRESSED_FROM, FRAME_BYTES_MAX, VERSION, VERSION_MIN};
use rustls::{ClientConnection, StreamOwned};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// The default port of servers.
pub const PORT: u16 = 7070;

/// The address of a server, and its TLS settings.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// The host, or host and port, as named or announced.
    pub label: String,
    host: String,
    addresses: Vec<SocketAddr>,
    tls: Option<ClientTls>,
}

impl Endpoint {
    /// Parses `host`, `host:port` or `[v6]:port`, and resolves the name now, once. Later there may
    /// be no memory for that.
    ///
    /// # Errors
    /// If the name cannot be resolved.
    pub fn new(label: &str, tls: Option<ClientTls>) -> Result<Endpoint, StoreError> {
        let unreachable = |source| StoreError::Unreachable { server: label.to_string(), source };
        let with_port = match label.parse::<SocketAddr>() {
            Ok(address) => address.to_string(),
            Err(_) => match label.rsplit_once(':') {
                Some((_, port)) if port.parse::<u16>().is_ok() => label.to_string(),
                _ => format!("{label}:{PORT}"),
            },
        };
        let addresses: Vec<_> = with_port.to_socket_addrs().map_err(unreachable)?.collect();
        let host = with_port.rsplit_once(':').map_or(label, |(host, _)| host);
        let host = host.trim_matches(['[', ']']).to_string();
        Ok(Endpoint { label: label.to_string(), host, addresses, tls })
    }

    /// Returns true if all of its addresses are on this machine's loopback.
    pub fn is_loopback(&self) -> bool {
        self.addresses.iter().all(|address| address.ip().to_canonical().is_loopback())
    }

    /// Returns true if both lead to the same server: they share an address.
    pub fn is_same_place(&self, other: &Endpoint) -> bool {
        self.addresses.iter().any(|address| other.addresses.contains(address))
    }

    /// Returns the same endpoint with other TLS settings.
    pub fn with_tls(&self, tls: Option<ClientTls>) -> Endpoint {
        Endpoint { tls, ..self.clone() }
    }

    /// Returns an endpoint whose name has several addresses.
    #[cfg(test)]
    pub fn of(addresses: &[SocketAddr]) -> Endpoint {
        let (label, host) = ("name:1".into(), "name".into());
        Endpoint { label, host, addresses: addresses.to_vec(), tls: None }
    }

    /// Connects and does the handshake, in at most about `patience` for each address.
    ///
    /// # Errors
    /// If no server answers in time, or the server is full, has another protocol version or is no
    /// memory server.
    pub fn connect(&self, name: &str, patience: Duration) -> Result<Connection, StoreError> {
        self.connect_to(&self.addresses, name, patience)
    }

    /// Connects to the one address at which the client reached a server before: another address of
    /// its name may be another server's. `None` allows all addresses.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub fn connect_at(
        &self,
        address: Option<SocketAddr>,
        name: &str,
        patience: Duration,
    ) -> Result<Connection, StoreError> {
        self.connect_to(
            address.as_ref().map_or(&self.addresses, std::slice::from_ref),
            name,
            patience,
        )
    }

    fn connect_to(
        &self,
        addresses: &[SocketAddr],
        name: &str,
        patience: Duration,
    ) -> Result<Connection, StoreError> {
        let unreachable = |source| StoreError::Unreachable { server: self.label.clone(), source };
        let mut last = io::ErrorKind::AddrNotAvailable.into();
        for address in addresses {
            match TcpStream::connect_timeout(address, patience) {
                Ok(socket) => return self.greet(socket, name, patience),
                Err(error) => last = error,
            }
        }
        Err(unreachable(last))
    }

    fn greet(
        &self,
        socket: TcpStream,
        name: &str,
        patience: Duration,
    ) -> Result<Connection, StoreError> {
        let unreachable = |source| StoreError::Unreachable { server: self.label.clone(), source };
        let refused = |why: String| StoreError::Refused { server: self.label.clone(), why };
        prepare(&socket, patience.max(Duration::from_millis(500))).map_err(unreachable)?;
        // A handshake takes a few round trips and a signature more than a connect.
        socket.set_read_timeout(Some(patience)).map_err(unreachable)?;
        let mut stream = match &self.tls {
            None => socket.into(),
            Some(tls) => {
                let name = tls.name_of(&self.host).map_err(|error| refused(error.to_string()))?;
                let session = ClientConnection::new(tls.config(), name)
                    .map_err(|error| refused(error.to_string()))?;
                PeerStream::TlsClient(Box::new(StreamOwned::new(session, socket.into())))
            }
        };
        let mut bytes = [0; HELLO_BYTES];
        let spoken = stream
            .write_all(&Hello::client(name).encode())
            .and_then(|()| stream.flush())
            .and_then(|()| stream.read_exact(&mut bytes));
        spoken.map_err(|error| self.not_greeted(error))?;
        let hello = Hello::decode(&bytes).map_err(|_| {
            refused("what listens there is no memory server, or one that asks for TLS".into())
        })?;
        if !(VERSION_MIN..=VERSION).contains(&hello.version) {
            return Err(refused(format!(
                "it speaks version {} of the protocol and this pagetax version {VERSION}; upgrade \
                 the older one",
                hello.version
            )));
        }
        if hello.is_full() {
            return Err(StoreError::Busy { server: self.label.clone() });
        }
        Ok(Connection::new(stream, &hello))
    }

    /// Returns the error of a failed handshake. TLS errors come as I/O errors, and waiting does not
    /// help against them.
    fn not_greeted(&self, error: io::Error) -> StoreError {
        let server = self.label.clone();
        let tls = error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
        let closed = error.kind() == io::ErrorKind::UnexpectedEof
            || error.kind() == io::ErrorKind::ConnectionReset;
        match &self.tls {
            _ if tls => StoreError::Refused {
                server,
                why: format!("{error}; check that one authority signed both certificates"),
            },
            None if closed => StoreError::Refused {
                server,
                why: "it hung up without a hello: it asks for TLS, or so many \
                      connect to it at once that it turns some away"
                    .into(),
            },
            _ => StoreError::Unreachable { server, source: error },
        }
    }
}

/// The part of a reply that has arrived so far.
#[derive(Debug, Default)]
struct Incoming {
    head: [u8; HEADER_BYTES],
    head_len: usize,
    header: Option<Header>,
    body_len: usize,
    /// True if the body goes into the caller's pages instead of `scratch`.
    direct: bool,
}

/// A connection after the handshake.
#[derive(Debug)]
pub struct Connection {
    stream: PeerStream,
    /// The version of the protocol that both sides speak.
    pub version: u32,
    /// The server's epoch, drawn at its start.
    pub epoch: u64,
    /// The server's machine and failure domain, as it reports them.
    pub location: Location,
    nonce: [u8; crate::wire::hello::NONCE_BYTES],
    last_id: u32,
    /// The number of replies that have not arrived, including those that nobody waits for.
    outstanding: u32,
    out: Vec<u8>,
    scratch: Vec<u8>,
    incoming: Incoming,
    /// The bytes that [`Connection::next_reply`] has read, and nobody has used yet.
    inbox: Inbox,
    looking: ReplyPolling,
    /// True if the server is on this machine.
    is_local: bool,
    /// True if writes may be compressed with TLS, too.
    compresses_tls: bool,
    compression: Compression,
}

/// Returns true if a program listens there that takes no new connection: a server that has as many
/// as it may have is not dead.
pub fn is_turned_away(error: &StoreError) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    match error {
        StoreError::Refused { .. } | StoreError::Busy { .. } => true,
        StoreError::Unreachable { source, .. } => {
            matches!(
                source.kind(),
                BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof
            )
        }
        _ => false,
    }
}

/// Turns a timeout into a broken pipe: a request that was sent in part makes its connection
/// useless.
fn went_out(sent: io::Result<()>) -> io::Result<()> {
    sent.map_err(|error| match is_timeout(&error) {
        true => io::Error::new(io::ErrorKind::BrokenPipe, error),
        false => error,
    })
}

/// Returns true if the error is a timeout.
pub fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

impl Connection {
    /// Wraps a stream on which both sides have said hello.
    pub fn new(stream: PeerStream, server: &Hello) -> Connection {
        let is_local = is_local(stream.socket()).unwrap_or(false);
        Connection {
            stream,
            version: server.version,
            epoch: server.epoch,
            location: server.location,
            nonce: server.nonce,
            last_id: 0,
            outstanding: 0,
            out: Vec::new(),
            scratch: Vec::new(),
            incoming: Incoming::default(),
            inbox: Inbox::with_room(RUN_PAGES_MAX * (HEADER_BYTES + PAGE_BYTES)),
            looking: ReplyPolling::default(),
            is_local,
            compresses_tls: false,
            compression: Compression::new(),
        }
    }

    /// Returns the server's address, or `None` if the system does not know it.
    pub fn address(&self) -> Option<SocketAddr> {
        self.stream.socket().peer_addr().ok()
    }

    /// Sets the timeout of one wait for a reply.
    ///
    /// # Errors
    /// The error of setsockopt(2).
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.stream.socket().set_read_timeout(Some(patience))
    }

    /// Sets the time to poll for a reply before sleeping. It counts only if the server is on this
    /// machine.
    pub fn set_poll_time(&mut self, time: Duration) {
        let time = if self.is_local { time } else { Duration::ZERO };
        self.looking = ReplyPolling::with_time(time);
    }

    /// Sets whether writes may be compressed with TLS, too: see [`ClusterOptions::compress_tls`].
    ///
    /// [`ClusterOptions::compress_tls`]: super::options::ClusterOptions::compress_tls
    pub fn set_compress_tls(&mut self, is_allowed: bool) {
        self.compresses_tls = is_allowed;
    }

    fn may_compress(&self) -> bool {
        let may_tell_sizes = self.compresses_tls || matches!(self.stream, PeerStream::Plain(_));
        may_tell_sizes && !self.is_local && self.version >= COMPRESSED_FROM
    }

    /// Sends a request. Returns the id of its reply.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn send(&mut self, request: &Request<'_>) -> io::Result<u32> {
        match pages_of(request) {
            [] => self.send_small(std::iter::once(*request)),
            _ => self.send_all(std::slice::from_ref(request)),
        }
    }

    /// Sends requests that have no pages, with one write. Returns the id of the first reply; the
    /// other ids follow it.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn send_small<'a>(&mut self, all: impl Iterator<Item = Request<'a>>) -> io::Result<u32> {
        let first = self.last_id.wrapping_add(1);
        self.out.clear();
        for request in all {
            debug_assert!(pages_of(&request).is_empty());
            self.last_id = self.last_id.wrapping_add(1);
            self.outstanding += 1;
            request.encode_head(self.last_id, &mut self.out);
        }
        went_out(self.stream.write_all(&self.out).and_then(|()| self.stream.flush()))?;
        Ok(first)
    }

    /// Returns false if a wait timed out after it had read part of a reply.
    pub fn is_between_replies(&self) -> bool {
        self.incoming.head_len == 0
    }

    /// Reads the next reply to any request: its id, the reply and its pages. One read takes as many
    /// replies as have arrived. Callers use it only between replies
    /// ([`Connection::is_between_replies`]).
    ///
    /// # Errors
    /// As [`Connection::wait`].
    pub fn next_reply(&mut self) -> io::Result<(u32, Reply<'_>, &[u8])> {
        while !self.inbox.is_whole().map_err(io::Error::other)? {
            match self.inbox.fill(&mut self.stream) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
        self.outstanding = self.outstanding.saturating_sub(1);
        let frame = self.inbox.frame().map_err(io::Error::other)?;
        let (head, rest) =
            frame.and_then(|frame| frame.split_first_chunk()).ok_or(io::ErrorKind::InvalidData)?;
        let (meta, pages) =
            rest.split_at(Header::decode(head).map_err(io::Error::other)?.meta_bytes());
        let (header, reply) = Reply::decode_head(head, meta).map_err(io::Error::other)?;
        Ok((header.id, reply, pages))
    }

    /// Sends requests. Over a link that is slower than the compressor, writes go as LZ4 blocks, each of
    /// which is compressed while those before it are on the way. Returns the id of the first reply; the
    /// other ids follow it.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn send_all(&mut self, requests: &[Request<'_>]) -> io::Result<u32> {
        let link = self.may_compress().then(|| link_rate::ns_per_byte(self.stream.socket()));
        let Some(link_ns_per_byte) = link.flatten() else { return self.send_together(requests) };
        let first = self.last_id.wrapping_add(1);
        for request in requests {
            let pays = self.compression.pays(link_ns_per_byte);
            let block = if pays { self.compression.compress(pages_of(request)) } else { None };
            self.send_together(&[block
                .as_ref()
                .map_or(*request, |block| request.with_block(block))])?;
        }
        Ok(first)
    }

    /// Sends requests with as few writes as possible. Returns the id of the first reply.
    fn send_together(&mut self, requests: &[Request<'_>]) -> io::Result<u32> {
        let first = self.last_id.wrapping_add(1);
        self.out.clear();
        let mut ends = Vec::with_capacity(requests.len());
        for request in requests {
            self.last_id = self.last_id.wrapping_add(1);
            request.encode_head(self.last_id, &mut self.out);
            ends.push(self.out.len());
        }
        let (mut pieces, mut start) = (Vec::with_capacity(2 * requests.len()), 0);
        for (request, end) in requests.iter().zip(ends) {
            pieces.push(IoSlice::new(&self.out[start..end]));
            pieces.push(IoSlice::new(pages_of(request)));
            start = end;
        }
        went_out(self.stream.write_pieces(&mut pieces))?;
        self.outstanding += requests.len() as u32;
        Ok(first)
    }

    /// Proves that this client knows the token of a region, and asks for a lease on it for this
    /// connection.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub fn send_attach(&mut self, region: u32, fence: bool, token: &Token) -> io::Result<u32> {
        let claim = Claim { nonce: self.nonce, epoch: self.epoch, region, fence };
        let proof = secret::proof(token, &claim);
        self.send(&Request::Attach { region, fence, proof: &proof })
    }

    /// Waits for the reply to `id`. Pages without checksums go to `into`, which must have their
    /// size. [`Connection::pages_with_checksums`] returns pages with checksums. After a timeout, the
    /// caller may call it again with the same `into`. To wait with other memory, it must call
    /// [`Connection::leave`] first.
    ///
    /// # Errors
    /// A timeout; after any other error the connection is of no use any more.
    pub fn wait(&mut self, id: u32, into: &mut [u8]) -> io::Result<Reply<'_>> {
        loop {
            self.arrive(id, into)?;
            let header = self.incoming.header.take().expect("a reply has arrived");
            let direct = std::mem::take(&mut self.incoming.direct);
            (self.incoming.head_len, self.incoming.body_len) = (0, 0);
            self.outstanding = self.outstanding.saturating_sub(1);
            if header.id == id {
                let meta = if direct { &[][..] } else { &self.scratch[..header.meta_bytes()] };
                let head = &self.incoming.head;
                let (_, reply) = Reply::decode_head(head, meta).map_err(io::Error::other)?;
                if let (false, Reply::Pages { checksums: [], .. }) = (direct, &reply) {
                    let pages = &self.scratch[..header.page_bytes()];
                    let fits = pages.len() == into.len();
                    let target = fits.then_some(into).ok_or(io::ErrorKind::InvalidData)?;
                    target.copy_from_slice(pages);
                }
                return Ok(reply);
            }
        }
    }

    /// Stops a wait with `into` for now, and saves the bytes that have arrived.
    pub fn leave(&mut self, into: &[u8]) {
        if std::mem::take(&mut self.incoming.direct) {
            let arrived = self.incoming.body_len;
            let all = self.incoming.header.map_or(arrived, |header| header.page_bytes());
            self.scratch.resize(self.scratch.len().max(all), 0);
            self.scratch[..arrived].copy_from_slice(&into[..arrived]);
        }
    }

    /// Returns the pages of a reply that came with checksums: they follow its meta.
    pub fn pages_with_checksums(&self, count: u16) -> &[u8] {
        let header = Header { count, flags: 1, ..Header::new(Op::Pages, 0) };
        &self.scratch[header.meta_bytes()..][..header.page_bytes()]
    }

    /// Reads until the current reply is complete.
    fn arrive(&mut self, id: u32, into: &mut [u8]) -> io::Result<()> {
        while self.incoming.header.is_none() {
            self.arrive_head(id, into)?;
        }
        let header = self.incoming.header.expect("its head has arrived");
        let all = header.meta_bytes() + header.page_bytes();
        while self.incoming.body_len < all {
            let rest = self.incoming.body_len..all;
            let target =
                if self.incoming.direct { &mut into[rest] } else { &mut self.scratch[rest] };
            let target = &mut [IoSliceMut::new(target)];
            let (inbox, stream) = (&mut self.inbox, &mut self.stream);
            self.incoming.body_len += read_some(inbox, stream, &mut self.looking, target)?;
        }
        let meta = if self.incoming.direct { 0 } else { header.meta_bytes() };
        check(&self.incoming.head, &self.scratch[..meta]).map_err(io::Error::other)
    }

    fn arrive_head(&mut self, id: u32, into: &mut [u8]) -> io::Result<()> {
        let incoming = &mut self.incoming;
        let head = &mut incoming.head[incoming.head_len..];
        let head_room = head.len();
        // If no reply can follow the awaited one, the same read takes its body.
        let mut parts = [IoSliceMut::new(head), IoSliceMut::new(into)];
        let parts = if self.outstanding == 1 { &mut parts[..] } else { &mut parts[..1] };
        let came = read_some(&mut self.inbox, &mut self.stream, &mut self.looking, parts)?;
        incoming.head_len += came.min(head_room);
        incoming.body_len = came - came.min(head_room);
        if incoming.head_len < HEADER_BYTES {
            return Ok(());
        }
        let header = Header::decode(&incoming.head).map_err(io::Error::other)?;
        let all = header.meta_bytes() + header.page_bytes();
        if all > FRAME_BYTES_MAX || incoming.body_len > all {
            return Err(io::Error::other("more bytes than the reply has"));
        }
        incoming.direct = header.id == id
            && header.op == Op::Pages
            && header.meta_bytes() == 0
            && header.page_bytes() == into.len();
        if !incoming.direct {
            self.scratch.resize(self.scratch.len().max(all), 0);
            self.scratch[..incoming.body_len].copy_from_slice(&into[..incoming.body_len]);
        }
        incoming.header = Some(header);
        Ok(())
    }
}

/// Returns the pages that follow a request's head.
fn pages_of<'a>(request: &Request<'a>) -> &'a [u8] {
    match request {
        Request::Put { pages, .. } => pages,
        Request::CompressedPut { block, .. } => block,
        _ => &[],
    }
}

fn read_some(
    inbox: &mut Inbox,
    stream: &mut PeerStream,
    looking: &mut ReplyPolling,
    into: &mut [IoSliceMut<'_>],
) -> io::Result<usize> {
    let came = inbox.take(into);
    if came > 0 {
        return Ok(came);
    }
    loop {
        match looking.read(stream, into) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
