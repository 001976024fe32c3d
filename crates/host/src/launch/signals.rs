//! The two rules by which our signals reach a program that we started. A terminal sends its own signals to
//! the program too, so neither rule repeats those.

use crate::sys::process::Child;
use crate::sys::signal::{PassedOn, asked_to_stop};
use rustix::process::Signal;
use std::io;
use std::time::{Duration, Instant};

/// The longest time before a signal is passed on.
const DELAY_MAX: Duration = Duration::from_millis(50);
/// The time that a program has to end after SIGINT.
const PATIENCE: Duration = Duration::from_secs(5);

/// Waits at most `timeout` for the end of a child, and returns true if it has ended. Meanwhile, passes on the
/// signals that other processes send to us: the rule of wrappers.
pub fn ends_within(child: &mut Child, timeout: Duration, signals: &PassedOn) -> io::Result<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let ended = child.ends_within(left.min(DELAY_MAX))?;
        if let Some(signal) = signals.take() {
            child.signal(signal);
        }
        if ended || left.is_zero() {
            return Ok(ended);
        }
    }
}

/// The rule of recorders: a signal to us ends the program, never us, so that what was recorded is kept.
#[derive(Debug, Default)]
pub struct StopRequest {
    since: Option<Instant>,
    is_killed: bool,
}

impl StopRequest {
    /// Sends SIGINT to the program once we are asked to stop, and SIGKILL if it has not ended 5 s later.
    pub fn pass_on(&mut self, child: &Child) {
        if !asked_to_stop() || self.is_killed {
            return;
        }
        match self.since {
            None => {
                self.since = Some(Instant::now());
                if !rustix::termios::isatty(io::stderr()) {
                    child.signal(Signal::INT);
                }
            }
            Some(since) if since.elapsed() > PATIENCE => {
                child.signal(Signal::KILL);
                self.is_killed = true;
            }
            Some(_) => {}
        }
    }
}
