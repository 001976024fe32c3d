//! The pages that the busiest processes touch, sampled one process at a time, for as long as it is
//! wanted: `pagetax top`.
//!
//! Samples come from idle page tracking or DAMON, which no process can notice. DAMON is taken for a look
//! at a time, so that others can use it in between. On kernels without both there are none.

use super::damon::Damon;
use super::page_idle::PageIdle;
use super::{CPU_SHARE_MIN, RESIDENT_BYTES_MIN};
use crate::procfs::Root;
use pagetax_core::ranking::TouchWindow;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// A process: its id and the time of its start.
pub type TouchKey = (u32, u64);

/// The most processes that are looked at in turn.
const PROCESSES_MAX: usize = 16;
/// The rounds of a look by idle page tracking: 500 pages.
const IDLE_ROUNDS: usize = 5;
const IDLE_PERIOD: Duration = Duration::from_secs(1);
/// The time of a look by DAMON, whose own thread works meanwhile. So looks are rarer.
const DAMON_WATCH: Duration = Duration::from_millis(100);
const DAMON_PERIOD: Duration = Duration::from_secs(4);
const NOT_HERE: &str =
    "this kernel has neither DAMON nor idle page tracking (CONFIG_IDLE_PAGE_TRACKING) for us";

/// A thread that samples the pages that processes touch.
#[derive(Debug)]
pub struct TouchWatch {
    shared: Arc<SharedTouches>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct SharedTouches {
    looks: Mutex<TouchLooks>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct TouchLooks {
    /// The processes to look at, the busiest first.
    wanted: Vec<TouchKey>,
    /// The last look at each process, and its number.
    last: HashMap<TouchKey, (u64, Result<TouchWindow, String>)>,
    count: u64,
    /// True to look without pauses until each process was looked at once.
    is_hurried: bool,
    is_over: bool,
    /// The reason why there is no thread.
    missing: Option<String>,
}

impl TouchLooks {
    /// Returns the process whose turn it is: one without a look, or the one whose look is oldest.
    fn next(&self) -> Option<TouchKey> {
        let number = |key: &&TouchKey| self.last.get(*key).map_or(0, |(number, _)| *number);
        self.wanted.iter().min_by_key(number).copied()
    }

    fn is_complete(&self) -> bool {
        self.wanted.iter().all(|key| self.last.contains_key(key))
    }
}

/// The way to sample that the kernel offers.
enum TouchSampler {
    Idle(PageIdle),
    Damon,
}

impl TouchSampler {
    fn find(root: &Root) -> Result<TouchSampler, String> {
        if let Some(idle) = PageIdle::open(root) {
            return Ok(TouchSampler::Idle(idle));
        }
        let damon = Damon::take(root, || Ok(None))?;
        damon.map(|_| TouchSampler::Damon).ok_or_else(|| NOT_HERE.to_string())
    }

    fn period(&self) -> Duration {
        match self {
            TouchSampler::Idle(_) => IDLE_PERIOD,
            TouchSampler::Damon => DAMON_PERIOD,
        }
    }

    fn look(&self, root: &Root, pid: u32) -> Result<TouchWindow, String> {
        match self {
            TouchSampler::Idle(idle) => idle.window(root, pid, IDLE_ROUNDS),
            TouchSampler::Damon => {
                let damon = Damon::take(root, || Ok(None))?;
                damon.ok_or(NOT_HERE)?.window(root, pid, DAMON_WATCH)
            }
        }
    }
}

impl SharedTouches {
    fn lock(&self) -> MutexGuard<'_, TouchLooks> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, root: &Root, sampler: &TouchSampler) {
        let mut looks = self.lock();
        while !looks.is_over {
            let Some(key) = looks.next() else {
                looks = self.changed.wait(looks).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(looks);
            let seen = sampler.look(root, key.0);
            looks = self.lock();
            looks.count += 1;
            let number = looks.count;
            looks.last.insert(key, (number, seen));
            let is_rest = |looks: &mut TouchLooks| {
                (looks.is_complete() || !looks.is_hurried) && !looks.is_over
            };
            let rested = self.changed.wait_timeout_while(looks, sampler.period(), is_rest);
            looks = rested.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl TouchWatch {
    /// Starts to sample, if the kernel can. `is_hurried` asks for one look at each process as soon as
    /// possible.
    pub fn start(root: &Root, is_hurried: bool) -> TouchWatch {
        let shared = Arc::new(SharedTouches {
            looks: Mutex::new(TouchLooks { is_hurried, ..TouchLooks::default() }),
            changed: Condvar::new(),
        });
        let (looking, root) = (shared.clone(), root.clone());
        let thread = TouchSampler::find(&root).and_then(|sampler| {
            let run = move || looking.run(&root, &sampler);
            Builder::new()
                .name("pagetax-touch".into())
                .spawn(run)
                .map_err(|error| error.to_string())
        });
        let thread = thread.map_err(|why| shared.lock().missing = Some(why)).ok();
        TouchWatch { shared, thread }
    }

    /// Returns the reason why nothing is sampled, if so.
    pub fn missing(&self) -> Option<String> {
        self.shared.lock().missing.clone()
    }

    /// Chooses the processes to look at from these: key, share of a CPU, and resident bytes.
    pub fn choose(&self, all: impl Iterator<Item = (TouchKey, f64, u64)>) {
        let can_pay = |(_, share, bytes): &(TouchKey, f64, u64)| {
            *share >= CPU_SHARE_MIN && *bytes >= RESIDENT_BYTES_MIN
        };
        let mut busy: Vec<_> = all.filter(can_pay).collect();
        busy.sort_by(|one, other| other.1.total_cmp(&one.1));
        busy.truncate(PROCESSES_MAX);
        let mut looks = self.shared.lock();
        let TouchLooks { wanted, last, .. } = &mut *looks;
        *wanted = busy.into_iter().map(|(key, ..)| key).collect();
        last.retain(|key, _| wanted.contains(key));
        drop(looks);
        self.shared.changed.notify_all();
    }

    /// Returns the last look at a process, if it succeeded.
    pub fn seen(&self, key: TouchKey) -> Option<TouchWindow> {
        self.shared.lock().last.get(&key)?.1.clone().ok()
    }
}

impl Drop for TouchWatch {
    /// Ends the thread, which gives DAMON back.
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window() -> Result<TouchWindow, String> {
        Ok(TouchWindow { cpu_ns: 1, base_bytes: 2, touched_bytes: 3, mark_ns: 0.0 })
    }

    #[test]
    fn processes_are_looked_at_in_turn() {
        let mut looks =
            TouchLooks { wanted: vec![(1, 0), (2, 0), (3, 0)], ..TouchLooks::default() };
        let order: Vec<u32> = (1..=7)
            .map(|number| {
                let key = looks.next().unwrap();
                looks.last.insert(key, (number, window()));
                key.0
            })
            .collect();
        assert_eq!(order, [1, 2, 3, 1, 2, 3, 1]);
        assert!(looks.is_complete());
        looks.wanted.push((4, 0));
        assert_eq!(looks.next(), Some((4, 0)));
        assert!(!looks.is_complete());
    }

    #[test]
    fn a_kernel_without_samples_says_so_and_idlers_are_not_chosen() {
        let watch = TouchWatch::start(&Root::at("/nonexistent"), false);
        assert!(watch.missing().unwrap().contains("DAMON"));
        let all = [
            ((1, 0), 0.5, 1 << 30),
            ((2, 0), 0.001, 1 << 30),
            ((3, 0), 0.9, 1 << 10),
            ((4, 0), 0.9, 1 << 30),
        ];
        watch.choose(all.into_iter());
        assert_eq!(watch.shared.lock().wanted, [(4, 0), (1, 0)]);
        assert_eq!(watch.seen((4, 0)), None);
    }
}
