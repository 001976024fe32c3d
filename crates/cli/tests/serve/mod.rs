//! `pagetax serve` as tests run it.
#![allow(dead_code, missing_docs)] // Each test file uses its part.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

pub const PAGETAX: &str = env!("CARGO_BIN_EXE_pagetax");

/// A `pagetax serve`, killed at the latest when the test ends.
pub struct Serve {
    pub child: Child,
    pub address: String,
    http: Option<String>,
}

impl Serve {
    pub fn start(memory: &str, listen: &str, more: &[&str]) -> Serve {
        Serve::spawn(&mut Command::new(PAGETAX), memory, listen, more)
    }

    /// Starts a server by a command that passes its arguments to pagetax.
    pub fn spawn(command: &mut Command, memory: &str, listen: &str, more: &[&str]) -> Serve {
        let mut child = command
            .args(["serve", "--memory", memory, "--listen", listen])
            .args(more)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (_, rest) = line.trim_end().split_once(" to lend on ").expect("its first line");
        let (address, http) = match rest.split_once(", HTTP on ") {
            Some((address, http)) => (address, Some(http.to_string())),
            None => (rest, None),
        };
        Serve { child, address: address.to_string(), http }
    }

    pub fn any(memory: &str) -> Serve {
        Serve::start(memory, "127.0.0.1:0", &[])
    }

    /// Kills the server with SIGKILL and reaps it.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// Returns the memory of the server itself in bytes: without the code that it maps, of which a
    /// first request brings in 0.5 to 1 MB, depending on what the page cache holds.
    pub fn own_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let kilobytes = |name| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse().unwrap()
        };
        (kilobytes("RssAnon:") + kilobytes("RssShmem:")) * 1024
    }

    pub fn http(&self) -> &str {
        self.http.as_ref().unwrap()
    }

    pub fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.http()).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
