//! Real Redis servers, started for a test and killed at its end.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running redis-server with 48 MiB.
pub struct RedisServer {
    child: Child,
    port: u16,
    /// For `say`; empty where none is wanted.
    password: String,
    _directory: tempfile::TempDir,
}

impl RedisServer {
    /// With more options; none where Redis is not installed, which is said.
    pub fn start(options: &[&str]) -> Option<RedisServer> {
        let directory = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let spawned = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .args(["--appendonly", "no", "--maxmemory", "48mb"])
            .args(options)
            .current_dir(directory.path())
            .stdout(Stdio::null())
            .spawn();
        let Ok(child) = spawned else {
            println!("SKIP: redis-server is not installed");
            return None;
        };
        let server = RedisServer { child, port, password: String::new(), _directory: directory };
        let until = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < until, "redis-server does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(server)
    }

    /// Several, each with its part of the slots.
    pub fn start_cluster(count: u16) -> Option<Vec<RedisServer>> {
        RedisServer::start_cluster_with(count, "")
    }

    /// The same, with a password that all of them want; none if it is empty.
    pub fn start_cluster_with(count: u16, password: &str) -> Option<Vec<RedisServer>> {
        let options = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"];
        let protect = ["--requirepass", password, "--masterauth", password];
        let options = [&options[..], if password.is_empty() { &[] } else { &protect }].concat();
        let start = || {
            let mut server = RedisServer::start(&options)?;
            server.password = password.into();
            Some(server)
        };
        let nodes: Vec<_> = (0..count).map_while(|_| start()).collect();
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

    /// Where it is.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// An inline command and what comes back.
    pub fn say(&self, command: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut line = String::new();
        if !self.password.is_empty() {
            stream.write_all(format!("AUTH {}\r\n", self.password).as_bytes()).unwrap();
            reader.read_line(&mut line).unwrap();
            line.clear();
        }
        stream.write_all(format!("{command}\r\n").as_bytes()).unwrap();
        reader.read_line(&mut line).unwrap();
        assert!(!line.starts_with('-'), "{command}: {line}");
        if let Some(len) = line.strip_prefix('$') {
            let mut bytes = vec![0; len.trim().parse().unwrap()];
            std::io::Read::read_exact(&mut reader, &mut bytes).unwrap();
            line = String::from_utf8(bytes).unwrap();
        }
        line
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
