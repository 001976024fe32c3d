//! The interface to network memory: memory whose pages lie in a page store, served by a pager.
//!
//! It is here because of two crates that must not depend on each other. `host` runs jobs in such memory and
//! reads its figures; `remote` has the pagers and the stores.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// The thread that serves a fault on a missing page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Serving {
    /// A thread of the pager, one for a region. It also serves system calls into missing pages, and fetches
    /// together the pages that several threads wait for.
    #[default]
    Thread,
    /// The thread that touched the page, in a handler of SIGBUS. No thread has to be woken, and the scheduler
    /// has no reason to move the program to another CPU. Several threads take turns. Only on x86-64, and only
    /// for programs that keep to these rules:
    ///
    /// - System calls into missing pages fail with EFAULT. The program touches pages itself before it passes
    ///   them to the kernel, and does not count on them to stay.
    /// - Threads that touch the region do not block SIGBUS, and have 32 KiB of stack left.
    /// - No allocator lives in the region.
    /// - An action for SIGBUS that the program installs after mapping the region passes what it does not know
    ///   to the action before it. Earlier actions still get accesses to lost pages, and all foreign signals.
    ///
    /// A thread's signals wait until its page is there.
    InPlace,
}

impl Serving {
    /// All variants.
    pub const ALL: [Serving; 2] = [Serving::Thread, Serving::InPlace];

    /// Returns its name in jobs and options.
    pub fn name(self) -> &'static str {
        match self {
            Serving::Thread => "thread",
            Serving::InPlace => "in-place",
        }
    }

    /// Returns the variant of that name.
    pub fn named(name: &str) -> Option<Serving> {
        Serving::ALL.into_iter().find(|serving| serving.name() == name)
    }
}

macro_rules! pager_counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts since a pager's start.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct PagerCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl PagerCounts {
            /// Returns the sum of both.
            pub fn plus(&self, other: &PagerCounts) -> PagerCounts {
                PagerCounts { $($name: self.$name + other.$name,)* }
            }

            /// Returns the counts since an earlier snapshot.
            pub fn since(&self, before: &PagerCounts) -> PagerCounts {
                PagerCounts { $($name: self.$name.saturating_sub(before.$name),)* }
            }
        }

        /// The counts that are not zero, as `name value, name value`.
        impl fmt::Display for PagerCounts {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut separator = "";
                for (name, value) in [$((stringify!($name), self.$name),)*] {
                    if value != 0 {
                        write!(f, "{separator}{name} {value}")?;
                        separator = ", ";
                    }
                }
                Ok(())
            }
        }
    };
}

pager_counts! {
    /// Faults that were served, of whatever kind.
    fault_count,
    /// Faults on pages that were never written, or were dropped.
    zero_fault_count,
    /// Faults on evicted pages that were still in this machine's memory.
    soft_refault_count,
    /// Faults whose page was fetched from the store.
    demand_page_in_count,
    /// Pages fetched, with those fetched ahead of need.
    page_in_count,
    /// Fetched pages whose frames were moved into place, not copied.
    moved_in_count,
    /// Pages taken out of the region.
    evicted_count,
    /// Evicted pages that were put into the store.
    page_out_count,
    /// Evicted pages of zeros, which are not put.
    evicted_zero_count,
    /// Evicted pages that were unchanged since they were last put.
    evicted_clean_count,
    /// Pages that were written while they were to be evicted by a copy, and stayed.
    cancelled_count,
    /// Pages that could not be evicted: locked, or pinned by a device.
    stuck_count,
    /// Time that faults waited for room, in nanoseconds.
    room_wait_ns_total,
    /// Time from a fault's report to its page, of demand page-ins, in nanoseconds.
    page_in_ns_total,
}

/// The network memory of one run.
pub trait NetworkMemory: Send + Sync {
    /// Maps a region of zeros, rounded up to whole pages, of which at most `resident_bytes` stay in this
    /// machine's memory.
    ///
    /// # Errors
    /// If the store has no room for the region or cannot be reached, or this user may not use userfaultfd.
    fn map(
        &self,
        bytes: u64,
        resident_bytes: u64,
        serving: Serving,
    ) -> io::Result<Arc<dyn NetworkRegion>>;

    /// Returns the names of the pagers' threads in this process, by which their CPU time is found.
    fn thread_names(&self) -> &'static [&'static str];

    /// Returns the store's description for reports, such as its kind and its servers.
    fn describe(&self) -> String;
}

/// A mapped region of network memory. Dropping the last owner unmaps it.
///
/// The declaration is the only `unsafe` word of this crate. The trait promises memory that others access by
/// raw pointers; a safe trait could not be relied on for that.
///
/// # Safety
/// From the first call until the region is dropped:
///
/// - [`NetworkRegion::start`] and [`NetworkRegion::bytes`] return the same values on every call.
/// - Each byte of that range can be loaded and stored by any thread of the process, and a load returns the
///   last stored byte, or 0 before the first store. A page whose content is lost raises SIGBUS; it never
///   reads as other bytes.
/// - The range overlaps no other mapping, and nothing else refers to its bytes.
/// - `start` is aligned to the base page, and `bytes` is a multiple of it and not 0.
#[allow(unsafe_code)]
pub unsafe trait NetworkRegion: fmt::Debug + Send + Sync {
    /// Returns the address of the first byte.
    fn start(&self) -> NonNull<u8>;

    /// Returns the length in bytes.
    fn bytes(&self) -> usize;

    /// Returns the pager's counts so far.
    fn counts(&self) -> PagerCounts;

    /// Returns the latency histogram of demand page-ins so far: nanoseconds and count.
    fn page_in_latency(&self) -> Vec<(u64, u64)>;
}
