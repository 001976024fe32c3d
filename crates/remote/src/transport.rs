//! A stream of bytes to the other side: TCP, or TLS over TCP. Blocking.
//!
//! Invariant: nothing here raises SIGPIPE. Its default action ends the process, and programs that
//! are not written in Rust do not ignore it. A server that dies would take its client with it.

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, send, sendmsg,
};
use rustix::thread::sched_yield;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use socket2::{SockRef, TcpKeepalive};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The most pieces that the system takes at once (IOV_MAX).
const PIECES_MAX: usize = 1024;

/// A TCP socket that never raises SIGPIPE. `TcpStream` raises it in vectored writes, which rustls
/// uses too.
#[derive(Debug)]
pub struct Socket(TcpStream);

impl From<TcpStream> for Socket {
    fn from(socket: TcpStream) -> Socket {
        Socket(socket)
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.0.read_vectored(into)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(&self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(PIECES_MAX)];
        let mut nothing = SendAncillaryBuffer::default();
        Ok(sendmsg(&self.0, bytes, &mut nothing, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The byte stream of a connection.
#[derive(Debug)]
pub enum PeerStream {
    /// In the clear: loopback, or a network that is trusted with `--insecure`.
    Plain(Socket),
    /// The client's end of TLS.
    TlsClient(Box<StreamOwned<ClientConnection, Socket>>),
    /// The server's end of TLS.
    TlsServer(Box<StreamOwned<ServerConnection, Socket>>),
}

impl From<TcpStream> for PeerStream {
    fn from(socket: TcpStream) -> PeerStream {
        PeerStream::Plain(socket.into())
    }
}

impl PeerStream {
    /// Returns the TCP socket below the stream.
    pub fn socket(&self) -> &TcpStream {
        match self {
            PeerStream::Plain(socket) => &socket.0,
            PeerStream::TlsClient(tls) => &tls.sock.0,
            PeerStream::TlsServer(tls) => &tls.sock.0,
        }
    }

    /// Writes pieces in order, with as few system calls as possible.
    ///
    /// # Errors
    /// The error of the stream. Part of the bytes may be sent then.
    pub fn write_pieces(&mut self, mut pieces: &mut [IoSlice<'_>]) -> io::Result<()> {
        // Skip empty pieces: a write of zero bytes looks like a stream that takes nothing.
        IoSlice::advance_slices(&mut pieces, 0);
        while !pieces.is_empty() {
            match self.write_vectored(pieces) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => IoSlice::advance_slices(&mut pieces, written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.flush()
    }
}

impl Read for PeerStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            PeerStream::Plain(socket) => socket.read(into),
            PeerStream::TlsClient(tls) => tls.read(into),
            PeerStream::TlsServer(tls) => tls.read(into),
        }
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            PeerStream::Plain(socket) => socket.read_vectored(into),
            PeerStream::TlsClient(tls) => tls.read_vectored(into),
            PeerStream::TlsServer(tls) => tls.read_vectored(into),
        }
    }
}

impl Write for PeerStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            PeerStream::Plain(socket) => socket.write(bytes),
            PeerStream::TlsClient(tls) => tls.write(bytes),
            PeerStream::TlsServer(tls) => tls.write(bytes),
        }
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            PeerStream::Plain(socket) => socket.write_vectored(bytes),
            PeerStream::TlsClient(tls) => tls.write_vectored(bytes),
            PeerStream::TlsServer(tls) => tls.write_vectored(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            PeerStream::Plain(socket) => socket.flush(),
            PeerStream::TlsClient(tls) => tls.flush(),
            PeerStream::TlsServer(tls) => tls.flush(),
        }
    }
}

/// The number of reads that sleep at once after a poll in vain: the peer is farther away, or others
/// have the CPU.
const RESTS: u32 = 64;

/// The way that a reader waits. It polls for a time, while other threads may run, and only then
/// sleeps.
#[derive(Debug, Default)]
pub struct ReplyPolling {
    time: Duration,
    rests: u32,
}

impl ReplyPolling {
    /// Returns a reader's state that polls for at most `time`.
    pub fn with_time(time: Duration) -> ReplyPolling {
        ReplyPolling { time, rests: 0 }
    }

    /// Reads as soon as bytes arrive. With TLS it sleeps at once.
    ///
    /// # Errors
    /// The error of the stream.
    pub fn read(
        &mut self,
        stream: &mut PeerStream,
        into: &mut [IoSliceMut<'_>],
    ) -> io::Result<usize> {
        let socket = match &*stream {
            PeerStream::Plain(socket) if self.rests == 0 && !self.time.is_zero() => &socket.0,
            _ => {
                self.rests = self.rests.saturating_sub(1);
                return stream.read_vectored(into);
            }
        };
        let until = Instant::now() + self.time;
        loop {
            let mut nothing = RecvAncillaryBuffer::default();
            match recvmsg(socket, into, &mut nothing, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) if Instant::now() < until => sched_yield(),
                Err(Errno::AGAIN) => break,
                read => return Ok(read?.bytes),
            }
        }
        self.rests = RESTS;
        stream.read_vectored(into)
    }
}

/// Returns true if the other side is on this machine: on loopback, or at this side's own address.
///
/// # Errors
/// The error of getpeername(2) or getsockname(2).
pub fn is_local(socket: &TcpStream) -> io::Result<bool> {
    let (peer, own) = (socket.peer_addr()?.ip(), socket.local_addr()?.ip());
    Ok(peer.is_loopback() || peer == own)
}

/// Configures a new socket: small frames go out at once, and a peer that has vanished is noticed
/// within 30 s.
///
/// # Errors
/// The error of setsockopt(2).
pub fn prepare(socket: &TcpStream, send_timeout: Duration) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_write_timeout(Some(send_timeout))?;
    let options = SockRef::from(socket);
    // A congestion control that paces costs CPU time for each packet, and waits; servers are near.
    // If cubic may not be chosen, the system's default applies.
    let _ = options.set_tcp_congestion(b"cubic");
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(15))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    options.set_tcp_keepalive(&keepalive)?;
    options.set_tcp_user_timeout(Some(Duration::from_secs(30)))
}
