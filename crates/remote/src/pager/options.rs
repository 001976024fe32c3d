//! The options of a region's pager.

use pagetax_core::network_memory::Serving;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A receiver of log lines, such as those on lost pages and on a full store.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// The method of eviction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EvictionMethod {
    /// Pages are moved. Kernels that cannot do that (before Linux 6.8) copy them.
    #[default]
    Moved,
    /// Scattered pages are copied where that is cheaper. A move of one page interrupts all CPUs
    /// that run the program, while many are copied between two such interruptions. Only for memory
    /// that no device writes to: a device's write to a page that it has pinned (direct I/O,
    /// io_uring's registered buffers) is lost if it comes after the copy.
    Cheapest,
    /// All pages are copied under write protection, as on kernels that cannot move them, with the
    /// same loss.
    Copied,
}

impl EvictionMethod {
    /// All variants.
    pub const ALL: [EvictionMethod; 3] =
        [EvictionMethod::Moved, EvictionMethod::Cheapest, EvictionMethod::Copied];

    /// Returns the name that settings and commands use.
    pub fn name(self) -> &'static str {
        match self {
            EvictionMethod::Moved => "moved",
            EvictionMethod::Cheapest => "cheapest",
            EvictionMethod::Copied => "copied",
        }
    }

    /// Returns the variant of that name.
    pub fn named(name: &str) -> Option<EvictionMethod> {
        EvictionMethod::ALL.into_iter().find(|method| method.name() == name)
    }
}

/// The time for which the pager keeps idle CPUs of the machine awake. That takes /dev/cpu_dma_latency,
/// and costs power.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KeepAwake {
    /// While there are 250 faults a second for each CPU, where idle CPUs halt at once, the device can be
    /// written, and the pager's thread serves the faults. In place there is no thread to wake.
    #[default]
    Auto,
    /// While there are 500 faults a second. Without the device no region is mapped.
    Always,
    /// Not at all.
    Never,
}

impl KeepAwake {
    /// All variants.
    pub const ALL: [KeepAwake; 3] = [KeepAwake::Auto, KeepAwake::Always, KeepAwake::Never];

    /// Returns the name that settings and commands use.
    pub fn name(self) -> &'static str {
        match self {
            KeepAwake::Auto => "auto",
            KeepAwake::Always => "always",
            KeepAwake::Never => "never",
        }
    }

    /// Returns the variant of that name.
    pub fn named(name: &str) -> Option<KeepAwake> {
        KeepAwake::ALL.into_iter().find(|awake| awake.name() == name)
    }
}

/// The optional features of userfaultfd that the pager may use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Features {
    /// Pages are moved (Linux 6.8), and lost pages are poisoned.
    #[default]
    All,
    /// Lost pages are poisoned (Linux 6.6), and evicted pages are copied.
    NoMove,
    /// Evicted pages are copied, and an empty file is mapped in place of lost pages.
    NoMoveNoPoison,
}

impl Features {
    /// All variants, from most features to fewest.
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
    /// The most bytes in this machine's memory, at least 128 KiB.
    pub resident_bytes: u64,
    /// True to map even if the store has no room for all of it now.
    pub overcommit: bool,
    /// The time for which a handler polls for the next fault before it sleeps. Zero is best if the
    /// handler shares the CPU of the threads that it serves.
    pub spin: Duration,
    /// True to move handlers to the CPU of the threads that they serve.
    pub follow_cpu: bool,
    /// The time for which idle CPUs are kept awake.
    pub keep_awake: KeepAwake,
    /// True to prefetch streams and strides, and to fetch around faults.
    pub prefetch: bool,
    /// The time after which a page counts as lost if no server answers.
    pub unreachable_limit: Duration,
    /// True to accept a userfaultfd that serves no system calls into missing pages: they fail with
    /// EFAULT.
    pub user_mode_only: bool,
    /// The thread that serves faults.
    pub serving: Serving,
    /// The method by which pages are evicted.
    pub eviction_method: EvictionMethod,
    /// The features that may be used. Tests hide some, to behave as on older kernels.
    pub features: Features,
    /// The receiver of log lines. It also gets the last line before the pager aborts the process,
    /// because a waiting thread can get neither its page nor SIGBUS.
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
            keep_awake: KeepAwake::Auto,
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
