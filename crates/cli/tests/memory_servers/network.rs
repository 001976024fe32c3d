//! Several hosts on this machine: network namespaces, joined by a switch of our own that loses, doubles,
//! delays (so reorders) and cuts off as a test asks. TCP is the kernel's; only the wire is ours, as not
//! every kernel has netem.
//!
//! Nothing is left behind: a namespace goes with the last file, thread and process in it, a TUN device
//! with its file.

use pagetax_core::access::Rng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tappers::linux::Tun;
use tappers::{AddAddressV4, DeviceState, Interface};

/// Hosts are 10.77.0.1 and up.
const FIRST: [u8; 4] = [10, 77, 0, 1];
/// The longest packet that a TUN device hands over.
const PACKET_BYTES: usize = 1500;
/// How often the switch looks whether it should end.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The faults of a wire.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wire {
    /// Lost packets in a thousand.
    pub loss: u64,
    /// Duplicated packets in a thousand.
    pub doubled: u64,
    /// Each takes so long, and up to so much longer: a wide range reorders.
    pub delay: Duration,
    pub jitter: Duration,
}

/// Hosts and the switch between them.
pub struct Network {
    hosts: Vec<File>,
    faults: Arc<Mutex<Faults>>,
    switch: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Faults {
    wire: Wire,
    /// The hosts to and from which frames take longer.
    slow: HashSet<usize>,
    /// Pairs of sender and receiver without a connection.
    cut: HashSet<(usize, usize)>,
    ended: bool,
}

/// How much longer to and from slow hosts.
const SLOW: Duration = Duration::from_millis(25);

impl Network {
    /// Makes a network of so many hosts. Prints a skip and returns None if this user may not.
    pub fn new(hosts: usize) -> Option<Network> {
        let made: io::Result<Vec<(File, Tun)>> = (0..hosts).map(make_host).collect();
        match made {
            Ok(made) => {
                let (hosts, ports): (Vec<File>, Vec<Tun>) = made.into_iter().unzip();
                let faults = Arc::new(Mutex::new(Faults::default()));
                let switch = Switch::new(ports, faults.clone());
                Some(Network { hosts, faults, switch: Some(thread::spawn(|| switch.run())) })
            }
            Err(error) => {
                println!("SKIP: no network namespaces with TUN devices here: {error}");
                None
            }
        }
    }

    /// Runs this on a host: what it starts, threads and processes, is on that host too.
    pub fn on<T: Send>(&self, host: usize, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let there = scope.spawn(|| {
                enter(&self.hosts[host]).expect("a namespace of ours");
                work()
            });
            there.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Sets the faults between all hosts from now on.
    pub fn set_wire(&self, wire: Wire) {
        self.faults().wire = wire;
    }

    /// Slows packets to and from this host from now on.
    pub fn set_slow(&self, host: usize) {
        self.faults().slow.insert(host);
    }

    /// Drops packets in one direction from now on.
    pub fn cut_way(&self, from: usize, to: usize) {
        self.faults().cut.insert((from, to));
    }

    /// Drops packets in both directions from now on.
    pub fn cut(&self, one: usize, other: usize) {
        self.cut_way(one, other);
        self.cut_way(other, one);
    }

    /// Removes all faults from the wire.
    pub fn repair(&self) {
        *self.faults() = Faults::default();
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.faults().ended = true;
        if let Some(switch) = self.switch.take() {
            let _ = switch.join();
        }
    }
}

/// Returns the address of a host.
pub fn address(host: usize) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::from(FIRST)) + host as u32)
}

fn enter(namespace: &File) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// Makes a namespace with one device, the host's end of the wire; the file is the switch's end.
fn make_host(number: usize) -> io::Result<(File, Tun)> {
    let namespace = make_namespace()?;
    let device = || {
        enter(&namespace)?;
        let tun = Tun::new_named(Interface::new("wire")?)?;
        let mut at = AddAddressV4::new(address(number));
        at.set_netmask(24);
        tun.add_addr(at)?;
        tun.set_state(DeviceState::Up)?;
        tun.set_nonblocking(true)?;
        io::Result::Ok(tun)
    };
    let tun = thread::scope(|scope| scope.spawn(device).join().expect("no panic"))?;
    Ok((namespace, tun))
}

/// Lets a program make a namespace, since a thread needs unsafe code for it. The program keeps it until we
/// do.
fn make_namespace() -> io::Result<File> {
    let mut holder = Command::new("unshare")
        .args(["--net", "sh", "-c", "ip link set lo up && echo here && exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut line = String::new();
    let read = BufReader::new(holder.stdout.take().expect("a pipe")).read_line(&mut line);
    let file = File::open(format!("/proc/{}/ns/net", holder.id()));
    drop(holder.stdin.take());
    holder.wait()?;
    if read? == 0 {
        return Err(io::Error::other("`unshare --net ip link set lo up` does not work"));
    }
    file
}

/// A packet that waits for its time: when, a number to keep equal ones apart, to whom, its bytes.
type Waiting = Reverse<(Instant, u64, usize, Vec<u8>)>;

struct Switch {
    ports: Vec<Tun>,
    faults: Arc<Mutex<Faults>>,
    rng: Rng,
    waiting: BinaryHeap<Waiting>,
    count: u64,
}

impl Switch {
    fn new(ports: Vec<Tun>, faults: Arc<Mutex<Faults>>) -> Switch {
        Switch { ports, faults, rng: Rng::new(1), waiting: BinaryHeap::new(), count: 0 }
    }

    fn run(mut self) {
        while !self.faults().ended {
            self.wait();
            for from in 0..self.ports.len() {
                let mut packet = [0; PACKET_BYTES];
                while let Ok(len) = self.ports[from].recv(&mut packet) {
                    self.take(from, &packet[..len]);
                }
            }
            self.deliver();
        }
    }

    fn wait(&self) {
        let next = self.waiting.peek().map(|Reverse((at, ..))| *at - Instant::now().min(*at));
        let patience = next.map_or(LOOK_EVERY, |next| next.min(LOOK_EVERY));
        let patience = Timespec { tv_sec: 0, tv_nsec: patience.as_nanos() as i64 };
        let mut ports: Vec<PollFd<'_>> =
            self.ports.iter().map(|port| PollFd::new(port, PollFlags::IN)).collect();
        // If it fails, we look all the same.
        let _ = poll(&mut ports, Some(&patience));
    }

    fn take(&mut self, from: usize, packet: &[u8]) {
        // IPv4: the receiver's address begins at byte 16.
        let Some(to) = packet.get(16..20).filter(|_| packet[0] >> 4 == 4) else { return };
        let to = u32::from_be_bytes([to[0], to[1], to[2], to[3]]);
        let to = to.wrapping_sub(u32::from(Ipv4Addr::from(FIRST))) as usize;
        if to >= self.ports.len() {
            return;
        }
        let (wire, slower, is_cut) = {
            let faults = self.faults();
            let slow = faults.slow.contains(&from) || faults.slow.contains(&to);
            (
                faults.wire,
                if slow { SLOW } else { Duration::ZERO },
                faults.cut.contains(&(from, to)),
            )
        };
        let copies = match self.rng.below(1000) {
            _ if is_cut => 0,
            dice if dice < wire.loss => 0,
            dice if dice < wire.loss + wire.doubled => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let jitter = self.rng.below(wire.jitter.as_nanos() as u64 + 1);
            let at = Instant::now() + wire.delay + slower + Duration::from_nanos(jitter);
            self.count += 1;
            self.waiting.push(Reverse((at, self.count, to, packet.to_vec())));
        }
    }

    fn deliver(&mut self) {
        while let Some(Reverse((at, ..))) = self.waiting.peek()
            && *at <= Instant::now()
        {
            let Some(Reverse((_, _, to, packet))) = self.waiting.pop() else { return };
            // A full queue loses packets, as everywhere.
            let _ = self.ports[to].send(&packet);
        }
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
