//! Real servers of Valkey, or of Redis where Valkey is not installed, started for a test and killed at
//! its end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The engines and their programs, the preferred one first.
const ENGINES: [(&str, &str); 2] = [("Valkey", "valkey-server"), ("Redis", "redis-server")];

/// Returns the engine that is installed, and its program.
pub fn engine() -> Option<(&'static str, &'static str)> {
    let is_there = |(_, program): &&(&str, &str)| {
        Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok()
    };
    ENGINES.iter().find(is_there).copied()
}

/// A running server with 48 MiB.
pub struct RedisServer {
    /// The server's process.
    pub child: Child,
    /// The port that it listens on.
    pub port: u16,
    /// The password that the server requires; empty without one.
    password: String,
    _directory: tempfile::TempDir,
}

impl RedisServer {
    /// Starts a server with these options. Returns `None`, with a line, if no engine is installed.
    pub fn start(options: &[&str]) -> Option<RedisServer> {
        // Another process may take a port between the choice and the server's start. A cluster's
        // node also needs the port 10,000 above, and it answers connections before it finds that
        // port taken.
        for _ in 0..20 {
            let mut server = RedisServer::spawn(options)?;
            if server.is_up() {
                return Some(server);
            }
        }
        panic!("the server does not start");
    }

    fn spawn(options: &[&str]) -> Option<RedisServer> {
        let directory = tempfile::tempdir().unwrap();
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let port = std::iter::repeat_with(free).find(|port| *port < u16::MAX - 10_000).unwrap();
        let Some((_, program)) = engine() else {
            println!("SKIP: redis-server is not installed");
            return None;
        };
        let spawned = Command::new(program)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .args(["--appendonly", "no", "--maxmemory", "48mb"])
            .args(options)
            .current_dir(directory.path())
            .stdout(Stdio::null())
            .spawn();
        let child = spawned.unwrap();
        let password = options.iter().skip_while(|option| **option != "--requirepass").nth(1);
        let password = password.unwrap_or(&"").to_string();
        Some(RedisServer { child, port, password, _directory: directory })
    }

    /// Waits until the server answers. Returns false if it ended instead.
    fn is_up(&mut self) -> bool {
        let own = format!("process_id:{}\r", self.child.id());
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until {
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            if self.try_say("INFO server").is_ok_and(|info| info.contains(&own)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the server does not answer");
    }

    /// Starts a cluster of servers, each with its part of the slots.
    pub fn start_cluster(count: u16) -> Option<Vec<RedisServer>> {
        RedisServer::start_cluster_with(count, "")
    }

    /// Starts a cluster whose servers require a password, unless it is empty.
    pub fn start_cluster_with(count: u16, password: &str) -> Option<Vec<RedisServer>> {
        let options = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"];
        let protect = ["--requirepass", password, "--masterauth", password];
        let options = [&options[..], if password.is_empty() { &[] } else { &protect }].concat();
        let nodes: Vec<_> = (0..count).map_while(|_| RedisServer::start(&options)).collect();
        if nodes.len() < count as usize {
            return None;
        }
        for (node, at) in nodes.iter().zip(0..count) {
            let slots = |node: u16| node as u32 * 16384 / count as u32;
            let (first, last) = (slots(at), slots(at + 1) - 1);
            node.say(&format!("CLUSTER ADDSLOTSRANGE {first} {last}"));
            node.say(&format!("CLUSTER SET-CONFIG-EPOCH {}", at + 1));
            node.say(&format!("CLUSTER MEET 127.0.0.1 {}", nodes[0].port));
        }
        let until = Instant::now() + Duration::from_secs(30);
        let is_ready = |node: &RedisServer| {
            let info = node.say("CLUSTER INFO");
            info.contains("cluster_state:ok") && info.contains(&format!("cluster_size:{count}"))
        };
        while !nodes.iter().all(is_ready) {
            assert!(Instant::now() < until, "the nodes do not become a cluster");
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(nodes)
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends an inline command and returns the reply.
    pub fn say(&self, command: &str) -> String {
        let line = self.try_say(command).unwrap();
        assert!(!line.starts_with('-'), "{command}: {line}");
        line
    }

    pub fn try_say(&self, command: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        if !self.password.is_empty() {
            stream.write_all(format!("AUTH {}\r\n", self.password).as_bytes())?;
            reader.read_line(&mut line)?;
            line.clear();
        }
        stream.write_all(format!("{command}\r\n").as_bytes())?;
        reader.read_line(&mut line)?;
        if let Some(len) = line.strip_prefix('$') {
            let mut bytes = vec![0; len.trim().parse().unwrap()];
            reader.read_exact(&mut bytes)?;
            line = String::from_utf8(bytes).unwrap();
        }
        Ok(line)
    }
}

/// Returns the address of a cluster.
pub fn url_of(nodes: &[RedisServer]) -> String {
    let hosts: Vec<String> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
    format!("valkey://{}", hosts.join(","))
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
