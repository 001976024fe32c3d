//! Keeps idle CPUs awake. Waking a halted CPU takes longer than the rest of a page-in.
//!
//! Source: Documentation/power/pm_qos_interface.rst in the kernel's tree. A value written to the
//! device holds as long as the device is open.

use super::move_to_high_number;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::time::{Duration, Instant};

const DEVICE: &str = "/dev/cpu_dma_latency";
/// The wake-up latency in µs that keeps every CPU awake…
const AT_ONCE: i32 = 0;
/// …and the one that allows any sleep (`PM_QOS_CPU_LATENCY_DEFAULT_VALUE`).
const ANY_TIME: i32 = 2_000_000_000;
/// The interval between two checks of the rate of faults.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The number of faults in an interval from which CPUs are kept awake.
const FAULTS_MIN: u64 = 50;

/// The open latency device, and the rate of faults at the last check.
#[derive(Debug)]
pub struct IdlePoll {
    device: OwnedFd,
    is_held: bool,
    checked_at: Instant,
    faults: u64,
}

impl IdlePoll {
    /// Opens the device; CPUs may sleep for now.
    pub fn open() -> io::Result<IdlePoll> {
        let device = rustix::fs::open(DEVICE, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        let device = move_to_high_number(device);
        rustix::io::write(&device, &ANY_TIME.to_ne_bytes())?;
        Ok(IdlePoll { device, is_held: false, checked_at: Instant::now(), faults: 0 })
    }

    /// Checks the rate of faults, and asks for CPUs that stay awake or withdraws that. `faults` is
    /// the count so far.
    pub fn update(&mut self, faults: u64) {
        let elapsed = self.checked_at.elapsed();
        if elapsed < CHECK_INTERVAL {
            return;
        }
        let intervals = (elapsed.as_nanos() / CHECK_INTERVAL.as_nanos()) as u64;
        let wants = faults - self.faults >= FAULTS_MIN * intervals;
        (self.checked_at, self.faults) = (Instant::now(), faults);
        let within = if wants { AT_ONCE } else { ANY_TIME };
        if wants != self.is_held && rustix::io::write(&self.device, &within.to_ne_bytes()).is_ok() {
            self.is_held = wants;
        }
    }
}
