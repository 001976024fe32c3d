//! Keeps idle CPUs awake. Waking a halted CPU takes longer than the rest of a page-in.
//!
//! Sources: Documentation/power/pm_qos_interface.rst in the kernel's tree. A value written to the
//! device holds as long as the device is open. Documentation/virt/guest-halt-polling.rst and
//! Documentation/admin-guide/pm/cpuidle.rst, for the files that tell how CPUs idle.

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
/// That number for each CPU, where nobody asked for it: all idle CPUs pay for the faults.
const FAULTS_MIN_PER_CPU: u64 = 25;
/// The name of the driver that idles CPUs. Without one they halt at once.
const IDLE_DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";
/// The driver of virtual machines that polls before a halt…
const POLLING_DRIVER: &str = "haltpoll";
/// …for at most this time in ns, which may be 0.
const POLL_TIME: &str = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";

/// The open latency device, and the rate of faults at the last check.
#[derive(Debug)]
pub struct IdlePoll {
    device: OwnedFd,
    faults_min: u64,
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
        let (faults_min, checked_at) = (FAULTS_MIN, Instant::now());
        Ok(IdlePoll { device, faults_min, is_held: false, checked_at, faults: 0 })
    }

    /// Opens the device if idle CPUs halt at once. Returns `None` if they do not, or if the device cannot be
    /// written, as in most containers.
    pub fn open_where_useful() -> Option<IdlePoll> {
        let read = |path| std::fs::read_to_string(path).ok();
        halts_at_once(&read(IDLE_DRIVER)?, read(POLL_TIME).as_deref()).then_some(())?;
        let mut opened = IdlePoll::open().ok()?;
        opened.faults_min = FAULTS_MIN_PER_CPU * online_cpus();
        Some(opened)
    }

    /// Checks the rate of faults, and asks for CPUs that stay awake or withdraws that. `faults` is
    /// the count so far.
    pub fn update(&mut self, faults: u64) {
        let elapsed = self.checked_at.elapsed();
        if elapsed < CHECK_INTERVAL {
            return;
        }
        let intervals = (elapsed.as_nanos() / CHECK_INTERVAL.as_nanos()) as u64;
        let wants = faults - self.faults >= self.faults_min * intervals;
        (self.checked_at, self.faults) = (Instant::now(), faults);
        let within = if wants { AT_ONCE } else { ANY_TIME };
        if wants != self.is_held && rustix::io::write(&self.device, &within.to_ne_bytes()).is_ok() {
            self.is_held = wants;
        }
    }
}

impl Drop for IdlePoll {
    /// Lets CPUs sleep, even if a forked child still has the device open.
    fn drop(&mut self) {
        // The close does the same otherwise.
        let _ = rustix::io::write(&self.device, &ANY_TIME.to_ne_bytes());
    }
}

/// Returns true if idle CPUs halt at once, by the name of their driver and by the driver's time of polling.
fn halts_at_once(driver: &str, poll_ns: Option<&str>) -> bool {
    match driver.trim() {
        "none" => true,
        POLLING_DRIVER => poll_ns.is_some_and(|ns| ns.trim() == "0"),
        _ => false,
    }
}

/// Returns the number of CPUs that are online, at least 1.
fn online_cpus() -> u64 {
    // SAFETY: only asks for a number.
    let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    u64::try_from(cpus).unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_that_halt_at_once_are_told_by_their_driver() {
        assert!(halts_at_once("none\n", None));
        assert!(halts_at_once("haltpoll\n", Some("0\n")));
        assert!(!halts_at_once("haltpoll\n", Some("200000\n")));
        assert!(!halts_at_once("haltpoll\n", None));
        assert!(!halts_at_once("intel_idle\n", None));
    }
}
