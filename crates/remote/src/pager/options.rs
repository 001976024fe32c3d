//! The options of a region's pager.

use pagetax_core::network_memory::Serving;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Receives lines for the log: pages that are lost, room that cannot be made.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// The method of eviction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EvictionMethod {
    /// They are moved; only where the kernel cannot do that (before Linux 6.8) they are copied.
    #[default]
    Moved,
    /// Those that lie scattered are copied where that is cheaper: each move of one interrupts all CPUs that run
    /// the program, while many are copied between two such interruptions. Only for memory that no device
    /// writes to: what one writes to a page that it pinned before (direct I/O, io_uring's registered buffers),
    /// after the copy, is lost.
    Cheapest,
    /// All are copied under write protection, as where the kernel cannot move them, with the same loss.
    Copied,
}

impl EvictionMethod {
    /// All variants.
    pub const ALL: [EvictionMethod; 3] =
        [EvictionMethod::Moved, EvictionMethod::Cheapest, EvictionMethod::Copied];

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            EvictionMethod::Moved => "moved",
            EvictionMethod::Cheapest => "cheapest",
            EvictionMethod::Copied => "copied",
        }
    }

    /// Returns the variant of that name.
    pub fn named(name: &str) -> Option<EvictionMethod> {
        EvictionMethod::ALL.into_iter().find(|way| way.name() == name)
    }
}

/// Features of userfaultfd that the pager uses where the kernel has them, beyond those that it needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Features {
    /// Pages are moved (Linux 6.8), and lost ones poisoned.
    #[default]
    All,
    /// Lost pages are poisoned (Linux 6.6); those that leave are copied.
    NoMove,
    /// Pages that leave are copied, and an empty file is mapped in place of lost ones.
    NoMoveNoPoison,
}

impl Features {
    /// From all to none.
    pub const ALL: [Features; 3] = [Features::All, Features::NoMove, Features::NoMoveNoPoison];

    /// Returns true if pages are moved.
    pub fn can_move(self) -> bool {
        self == Features::All
    }

    /// Returns true if lost pages are poisoned.
    pub fn can_poison(self) -> bool {
        self != Features::NoMoveNoPoison
    }
}

/// The options of a region's pager.
#[derive(Clone)]
pub struct PagerOptions {
    /// Most bytes of it in this machine's memory, at least 128 KiB.
    pub resident_bytes: u64,
    /// Map even if the store could not take all of it now.
    pub overcommit: bool,
    /// How long handlers look for the next fault before they sleep. Zero is best where a handler
    /// shares the CPU of those it serves.
    pub spin: Duration,
    /// Handlers move to the CPU of the threads that they serve.
    pub follow_cpu: bool,
    /// Keep idle CPUs awake while there are many faults, which takes /dev/cpu_dma_latency.
    pub keep_awake: bool,
    /// Fetch ahead of need.
    pub prefetch: bool,
    /// How long to try before a page that no server answers for counts as lost.
    pub unreachable_limit: Duration,
    /// Make do with a userfaultfd that does not serve system calls into missing pages: they fail with
    /// EFAULT.
    pub user_mode_only: bool,
    /// The thread that serves faults.
    pub serving: Serving,
    /// The eviction method.
    pub eviction_method: EvictionMethod,
    /// Features of the kernel that may be used; for tests of what older kernels do.
    pub features: Features,
    /// Where lines for the log go. The last one before a process is ended, too, as neither a lost page nor SIGBUS
    /// could be given to a thread that waits for it.
    pub log: Option<Log>,
}

impl PagerOptions {
    /// Returns the defaults, with at most this many bytes resident.
    pub fn resident(resident_bytes: u64) -> PagerOptions {
        PagerOptions {
            resident_bytes,
            overcommit: false,
            spin: Duration::ZERO,
            follow_cpu: true,
            keep_awake: false,
            prefetch: true,
            unreachable_limit: Duration::from_secs(30),
            user_mode_only: false,
            serving: Serving::Thread,
            eviction_method: EvictionMethod::Moved,
            features: Features::All,
            log: None,
        }
    }
}

impl fmt::Debug for PagerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("resident_bytes", &self.resident_bytes)
            .field("spin", &self.spin)
            .field("follow_cpu", &self.follow_cpu)
            .field("prefetch", &self.prefetch)
            .field("serving", &self.serving)
            .field("features", &self.features)
            .finish_non_exhaustive()
    }
}
