//! A cluster of three Redis servers, or Valkey where it is installed, to keep pages in.

use crate::shell;
use anyhow::{Context, Result, bail};
use pagetax_host::sys::process::{Child, Signal};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SERVERS: usize = 3;
const MEMORY: &str = "2gb";

/// A cluster that ends when it is dropped.
pub struct Engine {
    /// The name of the engine.
    pub name: &'static str,
    /// The address of the cluster, as `--store` takes it.
    pub url: String,
    /// The first word of the names of its programs.
    program: &'static str,
    servers: Vec<EngineServer>,
}

struct EngineServer {
    folder: PathBuf,
    port: u16,
    process: Child,
}

fn spawn(program: &str, folder: &Path, port: u16) -> Result<Child> {
    let mut server = Command::new(format!("{program}-server"));
    server.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
    server.args(["--cluster-enabled", "yes", "--maxmemory", MEMORY]);
    server.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null());
    Ok(Child::from(server.spawn()?))
}

impl Engine {
    /// Starts a cluster that keeps its files in this folder; none if no engine is installed.
    pub fn start(folder: &Path) -> Result<Option<Engine>> {
        let known = [("Valkey", "valkey"), ("Redis", "redis")];
        let is_there = |(_, program): &&(&str, &str)| shell::has(&format!("{program}-server"));
        let Some(&(name, program)) = known.iter().find(is_there) else { return Ok(None) };
        let (mut hosts, mut servers) = (Vec::new(), Vec::new());
        for number in 0..SERVERS {
            let folder = folder.join(format!("node{number}"));
            std::fs::create_dir_all(&folder)?;
            let port = free_port()?;
            let process = spawn(program, &folder, port)?;
            servers.push(EngineServer { folder, port, process });
            hosts.push(format!("127.0.0.1:{port}"));
        }
        let engine =
            Engine { name, url: format!("valkey://{}", hosts.join(",")), program, servers };
        engine.wait_until(|| {
            let mut create = Command::new(format!("{program}-cli"));
            create.args(["--cluster", "create"]).args(&hosts).arg("--cluster-yes");
            Ok(create.stdout(Stdio::null()).stderr(Stdio::null()).status()?.success())
        })?;
        // A server refuses all until it has heard of the others.
        engine.wait_until(|| {
            let states =
                engine.servers.iter().map(|server| engine.say(server, &["cluster", "info"]));
            let states: Vec<String> = states.collect::<Result<_>>()?;
            Ok(states.iter().all(|state| state.contains("cluster_state:ok")))
        })?;
        Ok(Some(engine))
    }

    fn wait_until(&self, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        let until = Instant::now() + Duration::from_secs(30);
        while !is_so()? {
            if Instant::now() > until {
                bail!("the servers of {} do not become a cluster", self.name);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    fn say(&self, server: &EngineServer, words: &[&str]) -> Result<String> {
        let mut cli = Command::new(format!("{}-cli", self.program));
        shell::output(cli.args(["-p", &server.port.to_string()]).args(words))
    }

    /// Changes a setting of all servers.
    pub fn set(&self, setting: &str, value: &str) -> Result<()> {
        for server in &self.servers {
            self.say(server, &["config", "set", setting, value])?;
        }
        Ok(())
    }

    /// Ends a server, as a crash would.
    pub fn kill(&mut self, number: usize) {
        let process = &mut self.servers[number].process;
        process.signal(Signal::KILL);
        let _ = process.wait();
    }

    /// Starts a server that was killed, without its data.
    pub fn start_again(&mut self, number: usize) -> Result<()> {
        let server = &mut self.servers[number];
        server.process = spawn(self.program, &server.folder, server.port)?;
        Ok(())
    }

    pub fn signal(&self, number: usize, signal: Signal) {
        self.servers[number].process.signal(signal);
    }
}

/// Returns a free port whose cluster bus, 10,000 above, is a port too.
fn free_port() -> Result<u16> {
    let free = || TcpListener::bind("127.0.0.1:0").ok()?.local_addr().ok().map(|at| at.port());
    let ports = std::iter::repeat_with(free).take(1000).flatten();
    let mut usable = ports.filter(|port| *port < u16::MAX - 10_000);
    usable.next().context("no free port")
}
