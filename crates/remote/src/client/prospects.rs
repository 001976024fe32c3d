//! Servers that were announced on the network and have not answered yet.
//!
//! Invariants: their number is bounded. Nobody waits for one, because threads of their own try
//! several at a time. The client uses a server only after it has answered and, with TLS, proved its
//! identity.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// The most addresses that are remembered. Beyond that, the address that failed most often is
/// forgotten.
const PROSPECTS_MAX: usize = 256;
/// The most trials at a time.
const TRIALS_MAX: usize = 8;
/// The pause after a first failure. It doubles with each further failure.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// A function that returns true if a server of ours answers at an address. It may block.
pub(super) type Trial = Arc<dyn Fn(SocketAddr) -> bool + Send + Sync>;

/// The announced servers, and the state of their trials.
pub(super) struct Prospects {
    trial: Trial,
    waiting: BTreeMap<SocketAddr, Prospect>,
    verdict_of: Sender<(SocketAddr, bool)>,
    verdicts: Receiver<(SocketAddr, bool)>,
    trials: usize,
}

#[derive(Debug, Clone, Copy)]
struct Prospect {
    failures: u32,
    next_trial: Instant,
    is_tried: bool,
}

impl Prospects {
    /// Returns an empty set whose addresses are tried with `trial`.
    pub fn new(trial: Trial) -> Prospects {
        let (verdict_of, verdicts) = channel();
        Prospects { trial, waiting: BTreeMap::new(), verdict_of, verdicts, trials: 0 }
    }

    /// Remembers an address. If too many wait for their first trial, ignores it.
    pub fn announced(&mut self, address: SocketAddr, now: Instant) {
        if self.waiting.len() >= PROSPECTS_MAX && !self.waiting.contains_key(&address) {
            let failed = self.waiting.iter().filter(|(_, prospect)| prospect.failures > 0);
            let worst = failed.max_by_key(|(_, prospect)| prospect.failures).map(|(at, _)| *at);
            let Some(worst) = worst else { return };
            self.waiting.remove(&worst);
        }
        let fresh = Prospect { failures: 0, next_trial: now, is_tried: false };
        self.waiting.entry(address).or_insert(fresh);
    }

    /// Forgets an address that is no longer announced.
    pub fn withdrawn(&mut self, address: SocketAddr) {
        self.waiting.remove(&address);
    }

    /// Starts the trials that are due. Returns the addresses that have answered since the last
    /// call.
    pub fn answered(&mut self, now: Instant) -> Vec<SocketAddr> {
        let mut answered = Vec::new();
        while let Ok((address, is_good)) = self.verdicts.try_recv() {
            self.trials -= 1;
            if is_good {
                self.waiting.remove(&address);
                answered.push(address);
            } else if let Some(prospect) = self.waiting.get_mut(&address) {
                let pause = PAUSE * 2u32.saturating_pow(prospect.failures.min(10));
                prospect.failures += 1;
                prospect.next_trial = now + pause.min(PAUSE_MAX);
                prospect.is_tried = false;
            }
        }
        let due = |prospect: &Prospect| !prospect.is_tried && prospect.next_trial <= now;
        let mut next: Vec<_> =
            self.waiting.iter_mut().filter(|(_, prospect)| due(prospect)).collect();
        next.sort_by_key(|(_, prospect)| (prospect.failures, prospect.next_trial));
        for (address, prospect) in next.into_iter().take(TRIALS_MAX - self.trials) {
            let (trial, verdict_of, address) =
                (self.trial.clone(), self.verdict_of.clone(), *address);
            let work = move || {
                // The receiver is gone if the client has ended.
                let _ = verdict_of.send((address, trial(address)));
            };
            if crate::threads::spawn("pagetax-find", work).is_ok() {
                prospect.is_tried = true;
                self.trials += 1;
            }
        }
        answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    fn address(number: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], number))
    }

    #[test]
    fn dead_addresses_do_not_delay_the_one_that_lives() {
        const ALIVE: u16 = 65_000;
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (now_running, most_seen) = (running.clone(), most.clone());
        let trial = move |at: SocketAddr| {
            let now = now_running.fetch_add(1, Ordering::SeqCst) + 1;
            most_seen.fetch_max(now, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(1));
            now_running.fetch_sub(1, Ordering::SeqCst);
            at.port() == ALIVE
        };
        let mut prospects = Prospects::new(Arc::new(trial));
        let begun = Instant::now();
        (0..64).for_each(|number| prospects.announced(address(number), begun));
        prospects.announced(address(ALIVE), begun);
        let mut answered = Vec::new();
        while answered.is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(60), "nobody has answered");
            answered = prospects.answered(Instant::now());
            thread::yield_now();
        }
        assert_eq!(answered, [address(ALIVE)]);
        assert!(most.load(Ordering::SeqCst) <= TRIALS_MAX);
        assert!(!prospects.waiting.contains_key(&address(ALIVE)));
    }

    #[test]
    fn a_trial_that_hangs_holds_up_nobody_who_looks() {
        let gate = Arc::new(Mutex::new(()));
        let (closed, held) = (gate.clone(), gate.lock().unwrap());
        let trial = move |_| {
            drop(closed.lock());
            true
        };
        let mut prospects = Prospects::new(Arc::new(trial));
        let now = Instant::now();
        (0..64).for_each(|number| prospects.announced(address(number), now));
        // This returns although no trial has ended.
        assert_eq!((prospects.answered(now).len(), prospects.trials), (0, TRIALS_MAX));
        assert_eq!((prospects.answered(now).len(), prospects.trials), (0, TRIALS_MAX));
        drop(held);
    }

    #[test]
    fn there_is_a_limit_and_those_that_fail_make_room() {
        let mut prospects = Prospects::new(Arc::new(|_| false));
        let now = Instant::now();
        (0..2000).for_each(|number| prospects.announced(address(number), now));
        assert_eq!(prospects.waiting.len(), PROSPECTS_MAX);
        assert!(!prospects.waiting.contains_key(&address(1999)), "none has failed yet");
        prospects.waiting.get_mut(&address(7)).unwrap().failures = 3;
        prospects.announced(address(1999), now);
        assert!(prospects.waiting.contains_key(&address(1999)));
        assert!(!prospects.waiting.contains_key(&address(7)));
        prospects.withdrawn(address(1999));
        assert_eq!(prospects.waiting.len(), PROSPECTS_MAX - 1);
    }
}
