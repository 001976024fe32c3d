//! A proxy in front of a memory server that makes it gray or corrupted. It passes frames on, and delays
//! replies or damages pages on command.
//!
//! A damaged page stays damaged until it is put again, as in a server with failed memory: its bytes differ,
//! its checksum on the server does not.

use anyhow::Result;
use pagetax_core::access::Rng;
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::wire::header::{HEADER_BYTES, Header, IF_ABSENT, Op};
use pagetax_remote::wire::hello::HELLO_BYTES;
use pagetax_remote::wire::{WireChecksum, checksums};
use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// The damage that the proxy does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Harm {
    Nothing,
    /// Delays this share of the replies, each by 20 to 50 ms, one after the other.
    Delays {
        share: f64,
    },
    /// Damages this share of the pages that are put.
    Damages {
        share: f64,
    },
}

/// The percentage of damaged pages that are damaged on their way, so that the server refuses them. The others
/// are damaged after the server has stored them.
const ON_THE_WAY_PERCENT: u64 = 10;

/// A page of a region, as the server numbers them.
type Page = (u32, u64);

/// A proxy before one server. It lives until the process ends.
pub struct Proxy {
    pub address: String,
    shared: Arc<Shared>,
}

struct Shared {
    server: String,
    harm: Mutex<Harm>,
    rng: Mutex<Rng>,
    /// The damaged pages, each with the checksum that came with it.
    damaged: Mutex<HashMap<Page, WireChecksum>>,
}

/// The meaning of a reply for damaged pages, by its request.
enum Asked {
    Get { region: u32, first: u64 },
    Put(Put),
    Other,
}

struct Put {
    region: u32,
    first: u64,
    if_absent: bool,
    /// The checksum of each page, and true if it is damaged from now on.
    pages: Vec<(WireChecksum, bool)>,
}

/// Requests of a connection that are not answered yet; replies come in their order.
type Open = Mutex<VecDeque<Asked>>;

impl Proxy {
    pub fn start(server: &str, seed: u64) -> Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let shared = Arc::new(Shared {
            server: server.into(),
            harm: Mutex::new(Harm::Nothing),
            rng: Mutex::new(Rng::new(seed)),
            damaged: Mutex::default(),
        });
        let accepting = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // A client whose connection ends connects again.
                let _ = accepting.clone().connect(client);
            }
        });
        Ok(Proxy { address, shared })
    }

    pub fn set(&self, harm: Harm) {
        *self.shared.harm.lock().unwrap() = harm;
    }
}

impl Shared {
    fn connect(self: Arc<Self>, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect(&self.server)?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let open = Arc::new(Open::default());
        let (there, back) = ((client.try_clone()?, server.try_clone()?), (server, client));
        let (shared, asked) = (self.clone(), open.clone());
        thread::spawn(move || {
            pass_on(there.0, there.1, |frame| shared.ask(frame, &asked));
        });
        thread::spawn(move || pass_on(back.0, back.1, |frame| self.reply(frame, &open)));
        Ok(())
    }

    fn ask(&self, frame: &mut Frame, open: &Open) {
        let Header { region, page: first, flags, .. } = frame.header;
        let asked = match frame.header.op {
            Op::Get => Asked::Get { region, first },
            Op::Put => {
                let if_absent = flags & IF_ABSENT != 0;
                let share = match *self.harm.lock().unwrap() {
                    Harm::Damages { share } if !if_absent => share,
                    _ => 0.0,
                };
                let pages: Vec<_> =
                    checksums(frame.meta()).map(|checksum| (checksum, self.hits(share))).collect();
                let is_refused = self.rng.lock().unwrap().below(100) < ON_THE_WAY_PERCENT;
                if let (true, Some(nth)) = (is_refused, pages.iter().position(|page| page.1)) {
                    frame.damage(nth);
                }
                Asked::Put(Put { region, first, if_absent, pages })
            }
            // Also a discard: its pages are put again before they are read again.
            _ => Asked::Other,
        };
        open.lock().unwrap().push_back(asked);
    }

    fn reply(&self, frame: &mut Frame, open: &Open) {
        let asked = open.lock().unwrap().pop_front();
        match (asked, frame.header.op) {
            (Some(Asked::Put(put)), Op::Done) => self.has_put(put),
            (Some(Asked::Get { region, first }), Op::Pages) => {
                let damaged = self.damaged.lock().unwrap();
                let count = frame.header.count as usize;
                let is_damaged = |nth: &usize| damaged.contains_key(&(region, first + *nth as u64));
                (0..count).filter(is_damaged).for_each(|nth| frame.damage(nth));
            }
            _ => {}
        }
        let harm = *self.harm.lock().unwrap();
        if let Harm::Delays { share } = harm
            && self.hits(share)
        {
            let delay = 20 + self.rng.lock().unwrap().below(31);
            thread::sleep(Duration::from_millis(delay));
        }
    }

    fn has_put(&self, put: Put) {
        let mut damaged = self.damaged.lock().unwrap();
        for (page, (checksum, is_damaged)) in (put.first..).zip(put.pages) {
            let page = (put.region, page);
            // A server keeps a page that it has, unless it has the same checksum.
            if put.if_absent && damaged.get(&page).is_some_and(|held| *held != checksum) {
                continue;
            }
            match is_damaged {
                true => damaged.insert(page, checksum),
                false => damaged.remove(&page),
            };
        }
    }

    fn hits(&self, share: f64) -> bool {
        const WHOLE: u64 = 1 << 20;
        (self.rng.lock().unwrap().below(WHOLE) as f64) < share * WHOLE as f64
    }
}

/// A frame as it passes.
struct Frame {
    header: Header,
    bytes: Vec<u8>,
}

impl Frame {
    fn read(from: &mut TcpStream) -> io::Result<Frame> {
        let mut head = [0; HEADER_BYTES];
        from.read_exact(&mut head)?;
        let header = Header::decode(&head).map_err(io::Error::other)?;
        let mut bytes = head.to_vec();
        bytes.resize(header.frame_bytes(), 0);
        from.read_exact(&mut bytes[HEADER_BYTES..])?;
        Ok(Frame { header, bytes })
    }

    fn meta(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES..][..self.header.meta_bytes()]
    }

    /// Flips a bit of its nth page.
    fn damage(&mut self, nth: usize) {
        let pages = HEADER_BYTES + self.header.meta_bytes();
        self.bytes[pages + nth * PAGE_BYTES + PAGE_BYTES / 2] ^= 0x10;
    }
}

/// Passes a hello and then frames on, until one side ends; then the other side's end is passed on, too.
fn pass_on(mut from: TcpStream, mut to: TcpStream, mut look: impl FnMut(&mut Frame)) {
    let mut pass = || -> io::Result<()> {
        let mut hello = [0; HELLO_BYTES];
        from.read_exact(&mut hello)?;
        to.write_all(&hello)?;
        loop {
            let mut frame = Frame::read(&mut from)?;
            look(&mut frame);
            to.write_all(&frame.bytes)?;
        }
    };
    let _ended = pass();
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
