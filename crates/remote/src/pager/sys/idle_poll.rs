//! Idle CPUs that stay awake: to wake one that has halted takes longer than the rest of a page-in.
//!
//! Source: Documentation/power/pm_qos_interface.rst in the kernel's tree. What is written to the device holds as
//! long as it is open.

use super::out_of_the_way;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::time::{Duration, Instant};

const DEVICE: &str = "/dev/cpu_dma_latency";
/// How soon CPUs must be awake, in µs: at once, so that none sleeps…
const AT_ONCE: i32 = 0;
/// …or whenever it is (`PM_QOS_CPU_LATENCY_DEFAULT_VALUE`).
const ANY_TIME: i32 = 2_000_000_000;
/// From one look at the rate of faults to the next.
const LOOK: Duration = Duration::from_millis(100);
/// With so many faults a look, CPUs are to be awake.
const MANY: u64 = 50;

/// Keeps CPUs awake while there are many faults.
#[derive(Debug)]
pub struct IdlePoll {
    device: OwnedFd,
    is_held: bool,
    looked_at: Instant,
    faults: u64,
}

impl IdlePoll {
    /// Opens the device; CPUs may sleep for now.
    pub fn open() -> io::Result<IdlePoll> {
        let device = rustix::fs::open(DEVICE, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        let device = out_of_the_way(device);
        rustix::io::write(&device, &ANY_TIME.to_ne_bytes())?;
        Ok(IdlePoll { device, is_held: false, looked_at: Instant::now(), faults: 0 })
    }

    /// Checks the rate of faults. Takes the number of faults so far.
    pub fn look(&mut self, faults: u64) {
        let elapsed = self.looked_at.elapsed();
        if elapsed < LOOK {
            return;
        }
        let looks = (elapsed.as_nanos() / LOOK.as_nanos()) as u64;
        let wants = faults - self.faults >= MANY * looks;
        (self.looked_at, self.faults) = (Instant::now(), faults);
        let within = if wants { AT_ONCE } else { ANY_TIME };
        if wants != self.is_held && rustix::io::write(&self.device, &within.to_ne_bytes()).is_ok() {
            self.is_held = wants;
        }
    }
}
