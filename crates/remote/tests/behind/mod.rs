//! A server behind an observer, which may change or delay what passes.

use pagetax_remote::server::pool::{Limits, Pool};
use pagetax_remote::server::region::Owner;
use pagetax_remote::server::session::Session;
use pagetax_remote::wire::hello::{HELLO_BYTES, Hello, Location};
use pagetax_remote::wire::inbox::Inbox;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

/// Starts a server whose requests and replies are changed on their way. It serves until its clients
/// have gone.
pub fn behind(
    ask: impl Fn(&mut [u8]) + Send + Sync + 'static,
    reply: impl Fn(&mut [u8]) + Send + Sync + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let epoch = u64::from(address.port());
    let pool = Arc::new(Pool::new(Limits::default(), epoch));
    let serve = move |mut socket: TcpStream| -> std::io::Result<()> {
        let (mut hello, nonce) = ([0; HELLO_BYTES], [0; 16]);
        socket.read_exact(&mut hello)?;
        let ours = Hello::server(epoch, nonce, Location::default());
        socket.write_all(&ours.encode())?;
        let owner = Owner { address: "rogue".into(), pid: 1, name: "rogue".into() };
        let mut session = Session::new(pool.clone(), nonce, owner);
        let mut inbox = Inbox::default();
        while inbox.fill(&mut socket)? > 0 {
            let mut replies = Vec::new();
            while let Some(frame) = inbox.frame().map_err(std::io::Error::other)? {
                let mut frame = frame.to_vec();
                ask(&mut frame);
                session.handle(&frame, 0, &mut replies).map_err(std::io::Error::other)?;
            }
            reply(&mut replies);
            socket.write_all(&replies)?;
        }
        Ok(())
    };
    let serve = Arc::new(serve);
    std::thread::spawn(move || {
        while let Ok((socket, _)) = listener.accept() {
            let serve = serve.clone();
            std::thread::spawn(move || serve(socket));
        }
    });
    address
}
