//! `pagetax top` on a terminal.

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::OpenOptions;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time enough for a program that ends.
const PATIENCE: Duration = Duration::from_secs(30);

/// A program that ends with this.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn top_ends_when_its_terminal_is_gone() {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
    let end = || Stdio::from(OpenOptions::new().read(true).write(true).open(&name).unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.arg("top").env("TERM", "xterm").stdin(end()).stdout(end()).stderr(Stdio::null());
    let mut top = Ended(command.spawn().unwrap());
    drop(command);
    // It draws its first screen.
    let mut screen = [0; 4096];
    assert!(rustix::io::read(&terminal, &mut screen).unwrap() > 0);
    drop(terminal);
    let begun = Instant::now();
    while top.0.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < PATIENCE, "it goes on without a terminal");
        std::thread::sleep(Duration::from_millis(50));
    }
}
