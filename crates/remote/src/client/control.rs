//! The control thread: it polls the servers and repairs chunks until the client stops.

use super::monitor::{POLL_INTERVAL, ServerMonitor};
use super::state::ClusterState;
use crate::threads;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time for repairs before the servers are polled again.
const REPAIR_SLICE: Duration = Duration::from_millis(50);

/// The control thread's body. Threads that create or drop regions lock `watch` too.
pub(super) struct Control {
    pub shared: Arc<ClusterState>,
    pub monitor: Arc<Mutex<ServerMonitor>>,
}

impl Control {
    /// Runs the thread, and aborts the process if it panics. Without this thread, failed servers go
    /// unnoticed and no replica is made: the pages would be unprotected.
    pub fn run_or_abort(self) {
        let shared = self.shared.clone();
        let log = || {
            shared.log_line(
                "the thread that watches the memory servers has panicked: the process ends, as its pages would be \
                 protected no more; please report this",
            );
        };
        threads::run_or_abort(|| self.run(), log);
    }

    pub fn run(self) {
        while !self.shared.stopped.load(Ordering::Relaxed) {
            let seen = self.shared.change_count();
            let more = {
                let mut monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
                monitor.poll_servers();
                monitor.repair_bad_replicas();
                monitor.repair(REPAIR_SLICE)
            };
            // Yield for 1 ms even if repairs remain: `create_region` needs the same lock.
            let pause = if more { Duration::from_millis(1) } else { POLL_INTERVAL };
            self.shared.wait_for_change(seen, Instant::now() + pause);
        }
    }
}
