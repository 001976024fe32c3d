//! The ways to run a suite: bare, and under each wrapper of pagetax.

use crate::bench::serve::Server;
use anyhow::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Memory of each of the two servers.
const MEMORY: &str = "2G";
/// Time until the first kill: also short programs have their pages on servers by then.
const FIRST_KILL: Duration = Duration::from_secs(2);
/// Time between two kills: the pages of the server that died must have their second copy again.
const BETWEEN_KILLS: Duration = Duration::from_secs(20);

/// A way to run a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Native,
    PageSizes,
    Inside,
    Servers,
    Sample,
}

impl Way {
    /// All of them, the bare one first.
    pub const ALL: [Way; 5] = [Way::Native, Way::PageSizes, Way::Inside, Way::Servers, Way::Sample];

    /// Returns the name that the command line and the table use.
    pub fn name(self) -> &'static str {
        match self {
            Way::Native => "native",
            Way::PageSizes => "ppgsz",
            Way::Inside => "inside",
            Way::Servers => "servers",
            Way::Sample => "sample",
        }
    }

    /// Returns the command as a user types it.
    pub fn command(self) -> &'static str {
        match self {
            Way::Native => "",
            Way::PageSizes => "ppgsz -o heap=2M,stack=2M,text=2M,anon=2M",
            Way::Inside => "remote --resident 30M",
            Way::Servers => "remote --resident 30M --servers A,B --copies 2",
            Way::Sample => "trapstat --sample --engine native",
        }
    }

    /// Returns the words that a suite's script has before its program.
    pub fn tool(self, pagetax: &str, directory: &str, servers: Option<&Servers>) -> String {
        let addresses = servers.map_or("", |servers| &servers.addresses);
        let command = self.command().replace("A,B", addresses);
        match self {
            Way::Native => String::new(),
            Way::PageSizes | Way::Inside | Way::Servers => format!("{pagetax} {command} --"),
            Way::Sample => format!("{pagetax} {command} -o {directory}/trapstat.txt --"),
        }
    }
}

/// Two memory servers, of which one at a time is killed and started again.
pub struct Servers {
    pub addresses: String,
    is_over: Arc<AtomicBool>,
    killer: Option<JoinHandle<Result<u64>>>,
}

impl Servers {
    /// Starts both, and the thread that kills them.
    pub fn start(pagetax: &str) -> Result<Servers> {
        let start = |at: &str| Server::start(pagetax, MEMORY, at);
        let both = [start("127.0.0.1:0")?, start("127.0.0.1:0")?];
        let addresses = format!("{},{}", both[0].address, both[1].address);
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, program) = (is_over.clone(), pagetax.to_owned());
        let killer = Some(thread::spawn(move || kill_in_turn(both, &program, &over)));
        Ok(Servers { addresses, is_over, killer })
    }

    /// Ends both; returns how often one was killed.
    pub fn end(mut self) -> Result<u64> {
        self.is_over.store(true, Ordering::Relaxed);
        match self.killer.take().map(JoinHandle::join) {
            Some(Ok(kills)) => kills,
            _ => anyhow::bail!("the thread that kills servers panicked"),
        }
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(killer) = self.killer.take() {
            // Both servers end with the thread that holds them; its count interests nobody now.
            let _ = killer.join();
        }
    }
}

fn kill_in_turn(mut both: [Server; 2], pagetax: &str, is_over: &AtomicBool) -> Result<u64> {
    let mut kills = 0;
    loop {
        let until = Instant::now() + if kills == 0 { FIRST_KILL } else { BETWEEN_KILLS };
        while Instant::now() < until {
            if is_over.load(Ordering::Relaxed) {
                return Ok(kills);
            }
            thread::sleep(Duration::from_millis(100));
        }
        let server = &mut both[(kills % 2) as usize];
        server.kill()?;
        *server = Server::start(pagetax, MEMORY, &server.address.clone())?;
        kills += 1;
    }
}
