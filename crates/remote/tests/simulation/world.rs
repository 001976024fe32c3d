//! The simulated world: virtual time, servers with the real logic, and a network between them and
//! their clients. The network delays, loses, repeats and cuts.
//!
//! Like TCP, a connection delivers in order or breaks. Requests on a connection that the client has
//! closed may still arrive, late and more than once.

use pagetax_core::access::Rng;
use pagetax_core::units::{Bytes, Nanos};
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::server::pool::{Limits, Pool};
use pagetax_remote::server::region::Owner;
use pagetax_remote::server::session::Session;
use pagetax_remote::wire::header::Op;
use pagetax_remote::wire::reply::Reply;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

pub const MS: u64 = 1_000_000;
/// The timeout of a call.
pub const CALL_TIMEOUT: u64 = 250 * MS;

type Shared = Rc<RefCell<State>>;

/// A scheduled event.
#[derive(Debug)]
enum Event {
    Deliver { connection: usize, frame: Vec<u8>, call: u64, stands_for: u64 },
    Reply { call: u64, frame: Vec<u8> },
    TimeOut { call: u64 },
    Wake,
}

struct Connection {
    client: usize,
    server: usize,
    epoch: u64,
    nonce: [u8; 16],
    session: Session,
    /// True if the client has closed it.
    given_up: bool,
    /// True if a frame on it was lost, so that no later frame arrives.
    cut: bool,
    /// The earliest delivery of the next frame, which keeps the order.
    delivers_at: u64,
}

struct Server {
    /// The state of a running server; `None` while it does not run.
    pool: Option<Arc<Pool>>,
    reachable: bool,
    slow: bool,
    /// True if it answers everything except puts.
    gray: bool,
    /// True if it refuses new connections.
    full: bool,
    /// True if its bitmaps are too short.
    short: bool,
    /// The end of a stall, during which nothing is lost.
    stopped_until: u64,
    /// The number of bytes that it lends.
    memory: u64,
    link: Link,
}

/// The network link of a machine. What it sends and receives waits in one queue.
#[derive(Debug, Clone, Copy, Default)]
struct Link {
    free_at: u64,
    bytes: u64,
}

/// The reason why a connect fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoWire {
    Nobody,
    TurnedAway,
}

struct State {
    now: u64,
    rng: Rng,
    sequence: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: HashMap<u64, Event>,
    servers: Vec<Server>,
    clients: Vec<Link>,
    /// The bytes that a link carries in a second; 0 if links are not the limit.
    bytes_per_s: u64,
    connections: Vec<Connection>,
    /// The calls that nothing has ended yet.
    open: HashMap<u64, Option<Waker>>,
    replies: HashMap<u64, Option<Vec<u8>>>,
    /// The tasks that sleep, by the event that ends it.
    sleepers: HashMap<u64, Waker>,
}

/// A client's handle on the world, for each of its tasks.
#[derive(Clone)]
pub struct World {
    state: Shared,
    client: usize,
    /// The server that each name leads to.
    names: Rc<RefCell<Vec<usize>>>,
}

/// The tasks that can go on.
type Ready = Arc<Mutex<VecDeque<usize>>>;

struct TaskWaker {
    task: usize,
    ready: Ready,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.ready.lock().expect("no task panics with it").push_back(self.task);
    }
}

/// An open connection, as the client knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wire {
    number: usize,
    pub epoch: u64,
    pub nonce: [u8; 16],
}

impl World {
    /// Creates a world with this many servers, each with room for this many pages.
    pub fn new(seed: u64, servers: usize, pages_each: u64) -> World {
        let state = State {
            now: 0,
            rng: Rng::new(seed),
            sequence: 0,
            queue: BinaryHeap::new(),
            events: HashMap::new(),
            servers: Vec::new(),
            clients: vec![Link::default()],
            bytes_per_s: 0,
            connections: Vec::new(),
            open: HashMap::new(),
            replies: HashMap::new(),
            sleepers: HashMap::new(),
        };
        let names = Rc::new(RefCell::new((0..servers).collect()));
        let world = World { state: Rc::new(RefCell::new(state)), client: 0, names };
        for server in 0..servers {
            let stopped = Server {
                pool: None,
                reachable: true,
                slow: false,
                gray: false,
                full: false,
                short: false,
                stopped_until: 0,
                memory: pages_each * 4300,
                link: Link::default(),
            };
            world.state.borrow_mut().servers.push(stopped);
            world.start(server);
        }
        world
    }

    pub fn now(&self) -> u64 {
        self.state.borrow().now
    }

    pub fn below(&self, bound: u64) -> u64 {
        self.state.borrow_mut().rng.below(bound)
    }

    /// Returns the number of server names: one for each server, unless one has several.
    pub fn name_count(&self) -> usize {
        self.names.borrow().len()
    }

    /// Returns the server of this name.
    pub fn server_of(&self, name: usize) -> usize {
        self.names.borrow()[name]
    }

    /// Adds another name for a server.
    pub fn add_name(&self, server: usize) {
        self.names.borrow_mut().push(server);
    }

    /// Restarts a server that lends room for this many pages.
    pub fn lend(&self, server: usize, pages: u64) {
        self.state.borrow_mut().servers[server].memory = pages * 4300;
        self.start(server);
    }

    pub fn set_gray(&self, server: usize, gray: bool) {
        self.state.borrow_mut().servers[server].gray = gray;
    }

    pub fn set_full(&self, server: usize, full: bool) {
        self.state.borrow_mut().servers[server].full = full;
    }

    pub fn set_short(&self, server: usize, short: bool) {
        self.state.borrow_mut().servers[server].short = short;
    }

    /// Stalls a server for a time, as SIGSTOP does.
    pub fn stop(&self, server: usize, ns: u64) {
        let mut state = self.state.borrow_mut();
        state.servers[server].stopped_until = state.now + ns;
    }

    /// Returns true if a connection is open, as far as the client can see.
    pub fn is_open(&self, wire: Wire) -> bool {
        let state = self.state.borrow();
        let connection = &state.connections[wire.number];
        let pool = state.servers[connection.server].pool.as_ref();
        !connection.cut && pool.is_some_and(|pool| pool.epoch == connection.epoch)
    }

    /// Starts a server that is not running. It has no pages.
    pub fn start(&self, server: usize) {
        let mut state = self.state.borrow_mut();
        let epoch = state.rng.next_u64();
        let memory = Bytes(state.servers[server].memory);
        let limits = Limits { memory, linger: Nanos(u64::MAX), ..Limits::default() };
        state.servers[server].pool = Some(Arc::new(Pool::new(limits, epoch)));
    }

    /// Kills a server, as `kill -9` does.
    pub fn crash(&self, server: usize) {
        self.state.borrow_mut().servers[server].pool = None;
        self.cut_connections(server);
    }

    pub fn is_running(&self, server: usize) -> bool {
        self.state.borrow().servers[server].pool.is_some()
    }

    /// Returns the state of the server of this name.
    pub fn pool(&self, name: usize) -> Option<Arc<Pool>> {
        let server = self.names.borrow()[name];
        self.state.borrow().servers[server].pool.clone()
    }

    pub fn set_reachable(&self, server: usize, reachable: bool) {
        self.state.borrow_mut().servers[server].reachable = reachable;
    }

    pub fn set_slow(&self, server: usize, slow: bool) {
        self.state.borrow_mut().servers[server].slow = slow;
    }

    /// Resets all connections to a server, as a router does that has lost its tables.
    pub fn cut_connections(&self, server: usize) {
        let mut state = self.state.borrow_mut();
        let of_server = |connection: &&mut Connection| connection.server == server;
        state.connections.iter_mut().filter(of_server).for_each(|c| c.cut = true);
    }

    /// Opens a connection to the server of this name.
    pub async fn connect(&self, name: usize) -> Result<Wire, NoWire> {
        let server = self.names.borrow()[name];
        self.sleep(self.delay(server)).await;
        let is_silent = {
            let state = self.state.borrow();
            let there = &state.servers[server];
            !there.reachable || there.stopped_until > state.now
        };
        if is_silent {
            self.sleep(100 * MS).await;
            return Err(NoWire::Nobody);
        }
        let (pool, full) = {
            let state = self.state.borrow();
            (state.servers[server].pool.clone(), state.servers[server].full)
        };
        let pool = pool.ok_or(NoWire::Nobody)?;
        if full {
            return Err(NoWire::TurnedAway);
        }
        let mut state = self.state.borrow_mut();
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&state.rng.next_u64().to_le_bytes());
        let owner = Owner { address: "sim".into(), pid: 1, name: "sim".into() };
        let epoch = pool.epoch;
        let session = Session::new(pool, nonce, owner);
        let number = state.connections.len();
        state.connections.push(Connection {
            client: self.client,
            server,
            epoch,
            nonce,
            session,
            given_up: false,
            cut: false,
            delivers_at: 0,
        });
        let connection = &state.connections[number];
        Ok(Wire { number, epoch: connection.epoch, nonce: connection.nonce })
    }

    /// Closes a connection for the client. Its requests under way may arrive late, or never.
    pub fn give_up(&self, wire: Wire) {
        self.state.borrow_mut().connections[wire.number].given_up = true;
    }

    /// Sends a frame. Returns its reply, or `None` if the connection breaks or the call times out.
    pub fn call(&self, wire: Wire, frame: Vec<u8>) -> Call {
        self.call_of_run(wire, frame, 1)
    }

    /// Sends a frame, as [`World::call`]. Its page, or that of the reply, takes as long on the links as a
    /// run of this many.
    pub fn call_of_run(&self, wire: Wire, frame: Vec<u8>, pages: u64) -> Call {
        let mut state = self.state.borrow_mut();
        state.sequence += 1;
        let call = state.sequence;
        state.open.insert(call, None);
        state.post(wire.number, frame, call, pages);
        let times_out = state.now + CALL_TIMEOUT;
        state.schedule(times_out, Event::TimeOut { call });
        Call { state: self.state.clone(), call }
    }

    pub fn sleep(&self, ns: u64) -> Sleep {
        let mut state = self.state.borrow_mut();
        let until = state.now + ns;
        let event = state.schedule(until, Event::Wake);
        Sleep { state: self.state.clone(), until, event }
    }

    fn delay(&self, server: usize) -> u64 {
        self.state.borrow_mut().delay(server)
    }

    /// Returns the handle of another client, which knows these servers.
    pub fn for_client(&self, names: Vec<usize>) -> World {
        let mut state = self.state.borrow_mut();
        state.clients.push(Link::default());
        let client = state.clients.len() - 1;
        World { state: self.state.clone(), client, names: Rc::new(RefCell::new(names)) }
    }

    /// Limits the links of all machines to this many bytes in a second.
    pub fn limit_links(&self, bytes_per_s: u64) {
        self.state.borrow_mut().bytes_per_s = bytes_per_s;
    }

    /// Returns the bytes that went over the links of the servers.
    pub fn bytes_carried(&self) -> u64 {
        self.state.borrow().servers.iter().map(|server| server.link.bytes).sum()
    }

    /// Runs tasks until the first of them ends. Panics after `events_max` events.
    pub fn run(&self, tasks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>>, events_max: u64) {
        let ready: Ready = Arc::new(Mutex::new((0..tasks.len()).collect()));
        let waker = |task| Waker::from(Arc::new(TaskWaker { task, ready: ready.clone() }));
        let mut tasks: Vec<_> =
            tasks.into_iter().enumerate().map(|(nth, task)| Some((task, waker(nth)))).collect();
        for _ in 0..events_max {
            loop {
                let next = ready.lock().expect("no task panics with it").pop_front();
                let Some(next) = next else { break };
                let Some((task, waker)) = &mut tasks[next] else { continue };
                if task.as_mut().poll(&mut Context::from_waker(waker)).is_ready() {
                    if next == 0 {
                        return;
                    }
                    tasks[next] = None;
                }
            }
            self.state.borrow_mut().step();
        }
        panic!("the world does not come to rest");
    }
}

impl State {
    /// Returns the number of the event.
    fn schedule(&mut self, at: u64, event: Event) -> u64 {
        self.sequence += 1;
        self.queue.push(Reverse((at, self.sequence)));
        self.events.insert(self.sequence, event);
        self.sequence
    }

    /// Returns the time after which this many bytes are through the links of both ends.
    fn carry(&mut self, number: usize, bytes: u64) -> u64 {
        let Connection { client, server, .. } = self.connections[number];
        self.servers[server].link.bytes += bytes;
        if self.bytes_per_s == 0 {
            return 0;
        }
        let takes = bytes * 1_000_000_000 / self.bytes_per_s;
        let through = |link: &mut Link| {
            link.free_at = link.free_at.max(self.now) + takes;
            link.free_at
        };
        let ends = [&mut self.servers[server].link, &mut self.clients[client]].map(through);
        ends[0].max(ends[1]) - self.now
    }

    fn delay(&mut self, server: usize) -> u64 {
        let usual = 20_000 + self.rng.below(200_000);
        let slow = self.servers[server].slow && self.rng.below(4) == 0;
        usual + if slow { self.rng.below(400 * MS) } else { 0 }
    }

    fn post(&mut self, number: usize, frame: Vec<u8>, call: u64, stands_for: u64) {
        let server = self.connections[number].server;
        let mut delay = self.delay(server) + self.carry(number, carried_bytes(&frame, stands_for));
        if !self.servers[server].reachable {
            // The network delays the frame, or loses it.
            if self.rng.below(2) == 0 {
                self.connections[number].cut = true;
            }
            delay += self.rng.below(3000 * MS);
        }
        let at = (self.now + delay).max(self.connections[number].delivers_at);
        self.connections[number].delivers_at = at;
        self.schedule(at, Event::Deliver { connection: number, frame, call, stands_for });
    }

    fn step(&mut self) {
        let Reverse((at, event)) = self.queue.pop().expect("timers keep the world going");
        self.now = at;
        match self.events.remove(&event).expect("every entry has its event") {
            Event::Deliver { connection, frame, call, stands_for } => {
                self.deliver(connection, frame, call, stands_for);
            }
            Event::Reply { call, frame } => self.finish(call, Some(frame)),
            Event::TimeOut { call } => self.finish(call, None),
            Event::Wake => self.sleepers.remove(&event).into_iter().for_each(Waker::wake),
        }
    }

    fn finish(&mut self, call: u64, reply: Option<Vec<u8>>) {
        if let Some(waker) = self.open.remove(&call) {
            self.replies.insert(call, reply);
            waker.into_iter().for_each(Waker::wake);
        }
    }

    fn deliver(&mut self, number: usize, frame: Vec<u8>, call: u64, stands_for: u64) {
        let now = self.now;
        let connection = &self.connections[number];
        let (server, epoch, given_up) = (connection.server, connection.epoch, connection.given_up);
        let stopped_until = self.servers[server].stopped_until;
        if stopped_until > now {
            let at = stopped_until.max(self.connections[number].delivers_at);
            self.connections[number].delivers_at = at;
            self.schedule(at, Event::Deliver { connection: number, frame, call, stands_for });
            return;
        }
        let current = self.servers[server].pool.as_ref().map(|pool| pool.epoch);
        if connection.cut && !given_up || current != Some(epoch) {
            // The client sees the connection break.
            return self.finish(call, None);
        }
        if connection.cut {
            return;
        }
        if self.servers[server].gray && frame[0] == Op::Put as u8 {
            return;
        }
        let mut reply = Vec::new();
        let handled = self.connections[number].session.handle(&frame, now, &mut reply);
        handled.expect("the client sends whole frames");
        if self.servers[server].short && frame[0] == Op::Held as u8 {
            reply.clear();
            Reply::Bitmap { count: 1, bits: &[1] }.encode_head(1, &mut reply);
        }
        if given_up && self.rng.below(2) == 0 {
            let again = now + self.rng.below(2000 * MS);
            let at = again.max(self.connections[number].delivers_at);
            let again = Event::Deliver { connection: number, frame, call: 0, stands_for };
            self.schedule(at, again);
        }
        let back = now + self.delay(server) + self.carry(number, carried_bytes(&reply, stands_for));
        if self.servers[server].reachable {
            self.schedule(back, Event::Reply { call, frame: reply });
        }
    }
}

/// Returns the bytes that a frame stands for, where a page in it stands for so many.
fn carried_bytes(frame: &[u8], stands_for: u64) -> u64 {
    let bytes = frame.len() as u64;
    if bytes < PAGE_BYTES as u64 { bytes } else { bytes * stands_for }
}

/// The reply to a call.
pub struct Call {
    state: Shared,
    call: u64,
}

impl Future for Call {
    type Output = Option<Vec<u8>>;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.state.borrow_mut();
        if let Some(reply) = state.replies.remove(&self.call) {
            return Poll::Ready(reply);
        }
        state.open.insert(self.call, Some(context.waker().clone()));
        Poll::Pending
    }
}

/// A sleep until a point in time.
pub struct Sleep {
    state: Shared,
    until: u64,
    event: u64,
}

impl Future for Sleep {
    type Output = ();
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.borrow_mut();
        if state.now >= self.until && !state.events.contains_key(&self.event) {
            return Poll::Ready(());
        }
        state.sleepers.insert(self.event, context.waker().clone());
        Poll::Pending
    }
}
