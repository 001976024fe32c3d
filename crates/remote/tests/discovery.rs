//! Announced servers are found, if the network has multicast.

use pagetax_remote::discovery::{Finder, announce};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

#[test]
fn an_announced_server_is_found_until_it_goes() {
    let name = format!("pagetax-test-{}", std::process::id());
    // No client connects: the port only identifies this announcement.
    let port = 20_000 + (std::process::id() % 20_000) as u16;
    let listen = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let (mut finder, announcement) = match (Finder::new(), announce(listen, &name)) {
        (Ok(finder), Ok(announcement)) => (finder, announcement),
        (Err(error), _) | (_, Err(error)) => {
            println!("SKIP: {error}");
            return;
        }
    };
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        let found = finder.poll(Duration::from_millis(200));
        if found.announced.iter().any(|address| address.port() == port) {
            drop(announcement);
            return;
        }
    }
    println!("SKIP: no multicast on this network");
}
