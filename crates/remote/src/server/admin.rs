//! Draining of a server by its own user or root, over a Unix socket. The kernel reports the user of
//! the peer (SO_PEERCRED).
//!
//! The socket's abstract name is made from the server's address. It needs no directory, leaves
//! nothing behind, and belongs to one network namespace, as the address does.

use super::pool::Pool;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const ASKED: &[u8] = b"drain\n";
/// The user ID that the kernel reports for all users of other user namespaces.
const OVERFLOW_UID: u32 = 65534;
/// The timeout of each read and write.
const PATIENCE: Duration = Duration::from_secs(2);
/// The interval between two reports of the pages that are left.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// The reason why a server does not drain.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    /// No server answers at the address.
    #[error(
        "no memory server answers a drain request at {0}; give the --listen address of a `pagetax serve` of this \
         machine and network namespace, or send it SIGTERM"
    )]
    NoServer(SocketAddr),
    /// The server belongs to another user.
    #[error("the memory server at {0} belongs to another user; drain it as that user or as root")]
    NotYours(SocketAddr),
    /// The server drains, but has not ended in time.
    #[error(
        "{0} pages have not moved yet; start other memory servers for them: the server goes on draining"
    )]
    StillThere(u64),
}

fn name(address: SocketAddr) -> io::Result<UnixAddress> {
    UnixAddress::from_abstract_name(format!("pagetax-serve-{address}"))
}

/// Returns true if `user` may end a server of `owner`.
fn may_drain(user: u32, owner: u32) -> bool {
    user == 0 || (user == owner && user != OVERFLOW_UID)
}

/// Listens until the process ends.
///
/// # Errors
/// If the name is taken, or the system has no more threads.
pub(super) fn start(address: SocketAddr, pool: Arc<Pool>) -> io::Result<()> {
    let listener = UnixListener::bind_addr(&name(address)?)?;
    let accept = move || {
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    // An error means that the peer hung up.
                    let _ = answer(stream, &pool);
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    };
    thread::Builder::new().name("pagetax-admin".into()).spawn(accept)?;
    Ok(())
}

fn answer(mut stream: UnixStream, pool: &Arc<Pool>) -> io::Result<()> {
    let user = socket_peercred(&stream)?.uid.as_raw();
    stream.set_write_timeout(Some(PATIENCE))?;
    if !may_drain(user, geteuid().as_raw()) {
        return stream.write_all(b"denied\n");
    }
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut asked = [0; ASKED.len()];
    io::Read::read_exact(&mut stream, &mut asked)?;
    if asked != *ASKED {
        return Ok(());
    }
    pool.drain();
    let pool = pool.clone();
    // The end of the process ends the stream.
    let say = move || {
        while writeln!(stream, "{}", pool.pages_held()).is_ok() {
            thread::sleep(REPORT_INTERVAL);
        }
    };
    thread::Builder::new().name("pagetax-drain".into()).spawn(say)?;
    Ok(())
}

/// Makes the server at `listen` drain, and waits until it has ended.
///
/// # Errors
/// If no server answers, this user may not end it, or it has not ended within `limit`.
pub fn drain(listen: SocketAddr, limit: Duration) -> Result<(), DrainError> {
    let until = Instant::now() + limit;
    let mut stream = connect(listen).ok_or(DrainError::NoServer(listen))?;
    let gone = |_| DrainError::NoServer(listen);
    stream.set_read_timeout(Some(PATIENCE)).map_err(gone)?;
    // A server that denies the request may have hung up already.
    let _ = stream.write_all(ASKED);
    let mut lines = BufReader::new(stream).lines();
    let mut left = match lines.next() {
        Some(Ok(line)) if line == "denied" => return Err(DrainError::NotYours(listen)),
        Some(Ok(line)) => line.parse().unwrap_or(0),
        _ => return Err(DrainError::NoServer(listen)),
    };
    for line in lines {
        match line {
            Ok(line) => left = line.parse().unwrap_or(left),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
        if Instant::now() >= until {
            return Err(DrainError::StillThere(left));
        }
    }
    Ok(())
}

/// Connects to the server at this address, or to one that listens on all addresses.
fn connect(listen: SocketAddr) -> Option<UnixStream> {
    let everywhere = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
    let mut places = vec![listen];
    if listen.ip().is_unspecified() {
        places.extend(
            [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
                .map(|ip: IpAddr| SocketAddr::new(ip, listen.port())),
        );
    }
    places.extend(everywhere.map(|ip| SocketAddr::new(ip, listen.port())));
    places.into_iter().find_map(|place| UnixStream::connect_addr(&name(place).ok()?).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_the_servers_own_user_may_drain_it() {
        assert!(may_drain(0, 0) && may_drain(0, 1000) && may_drain(1000, 1000));
        assert!(!may_drain(1000, 0) && !may_drain(1001, 1000));
        assert!(!may_drain(OVERFLOW_UID, OVERFLOW_UID), "anybody from another namespace looks so");
    }
}
