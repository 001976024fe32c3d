//! The constants of a Sun-4 under SunOS: tables `[hat]`, `[cost]`, `[image]`, `[swapper]`,
//! `[disk]`.

use super::steal::{POLICIES, StealPolicy};
use crate::hardware::sun4::Geometry;
use crate::model::{Model, ModelError};

/// The constants of pmeg and context management.
#[derive(Debug, Clone, Copy)]
pub struct HatConfig {
    /// Pmegs that the kernel keeps for itself.
    pub kernel_pmegs: usize,
    /// Contexts that users can have.
    pub user_contexts: usize,
    /// The policy that chooses the pmeg to steal.
    pub steal: StealPolicy,
    /// True with Sun's patch: the kernel saves a stolen pmeg's entries in memory and reloads them
    /// as a whole.
    pub software_cache: bool,
    /// True in a what-if: processes that map the same pages at the same addresses share the pmeg.
    pub share: bool,
}

/// CPU time of the kernel's work, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SunOsCosts {
    /// System time of a translation fault: trap, lookup, one entry loaded.
    pub fault_ns: u64,
    /// User time that a fault adds: refilling the cache and the register windows.
    pub fault_user_ns: u64,
    /// System time to load a whole pmeg from the software cache.
    pub reload_ns: u64,
    /// User time that such a reload adds.
    pub reload_user_ns: u64,
    /// Time to load the segment-map entries of a region on a three-level machine.
    pub region_load_ns: u64,
    /// The time to zero a page frame.
    pub zero_ns: u64,
    /// The time to copy a page frame.
    pub copy_ns: u64,
    /// Time to switch to another process.
    pub switch_ns: u64,
    /// System time to take a context from another process: cache flush and segment map.
    pub context_steal_ns: u64,
    /// User time that the loss of a context adds.
    pub context_steal_user_ns: u64,
    /// The mean time of a fork(2).
    pub fork_ns: u64,
    /// Half-width of the spread of a fork's time, in percent.
    pub fork_jitter_percent: u64,
    /// Time to start the program.
    pub exec_ns: u64,
    /// Time of a system call that does little.
    pub syscall_ns: u64,
}

/// A process's memory in addition to its data, and the faults of its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    /// Pages before the first region: text and initialised data.
    pub text_data_pages: u64,
    /// Segments of the C library, used when a process starts and exits and when a parent polls.
    pub libc_segments: usize,
    /// Faults of main before its first operation, without those on its regions.
    pub exec_faults: u64,
    /// Faults of a forked child before its first operation, without those on its regions.
    pub child_faults: u64,
}

/// The policy that swaps out processes without a pmeg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swapper {
    /// Swaps out, once a second, each process without translations: it seems to have no resident
    /// page.
    Eager,
    /// Never swaps a process out. This is `nosched`, or the patch in Lawrence's report of 1990
    /// (Sun-Managers) that swaps only when memory is short. An admitted job is never short of
    /// memory.
    Off,
}

/// All constants of SunOS on a Sun-4.
#[derive(Debug, Clone, Copy)]
pub struct SunOsConfig {
    /// Management of pmegs and contexts.
    pub hat: HatConfig,
    /// CPU time of the kernel's work.
    pub costs: SunOsCosts,
    /// Processes' memory besides their data.
    pub image: Image,
    /// The policy of the swapper.
    pub swapper: Swapper,
    /// CPU time to swap a process out: its pages move to the free list.
    pub swap_out_ns: u64,
    /// CPU time to swap a process in.
    pub swap_in_ns: u64,
    /// Time until the disk begins to transfer.
    pub disk_access_ns: u64,
    /// Transfer time of each page.
    pub disk_page_ns: u64,
    /// Pages that one read fetches.
    pub disk_cluster_pages: u64,
}

/// The fewest pmegs for users: with fewer, a process could not hold its text, its stack and one
/// page at once.
const USER_PMEGS_MIN: usize = 4;

impl SunOsConfig {
    /// Reads the five tables of the kernel's constants.
    ///
    /// # Errors
    /// Returns an error if a constant is absent or impossible.
    pub fn load(model: &Model, geometry: &Geometry) -> Result<Self, ModelError> {
        let swappers = [("eager", Swapper::Eager), ("off", Swapper::Off)];
        Ok(SunOsConfig {
            hat: HatConfig::load(model, geometry)?,
            costs: SunOsCosts::load(model)?,
            image: Image::load(model, geometry)?,
            swapper: model.word("swapper", "mode", &swappers)?,
            swap_out_ns: model.ns("swapper", "swap_out")?,
            swap_in_ns: model.ns("swapper", "swap_in")?,
            disk_access_ns: model.ns("disk", "access")?,
            disk_page_ns: model.ns("disk", "page")?,
            disk_cluster_pages: model.positive("disk", "cluster")?,
        })
    }
}

impl HatConfig {
    fn load(model: &Model, geometry: &Geometry) -> Result<Self, ModelError> {
        let kernel_pmegs = model.count("hat", "kernel_pmegs")? as usize;
        if kernel_pmegs + USER_PMEGS_MIN > geometry.pmegs {
            let problem = format!("is {kernel_pmegs} of {} pmegs", geometry.pmegs);
            return Err(model.error("hat", "kernel_pmegs", problem, "leave at least 4 to users"));
        }
        let user_contexts = model.positive("hat", "user_contexts")? as usize;
        if user_contexts > geometry.contexts {
            let problem = format!("is {user_contexts} of {} contexts", geometry.contexts);
            return Err(model.error("hat", "user_contexts", problem, "write a smaller number"));
        }
        Ok(HatConfig {
            kernel_pmegs,
            user_contexts,
            steal: model.word("hat", "steal", POLICIES)?,
            software_cache: model.flag("hat", "software_cache")?,
            share: model.flag("hat", "share")?,
        })
    }
}

impl SunOsCosts {
    fn load(model: &Model) -> Result<Self, ModelError> {
        let ns = |key| model.ns("cost", key);
        let fork_jitter_percent = model.ppm("cost", "fork_jitter")? / 10_000;
        if fork_jitter_percent > 100 {
            let problem = "is more than everything";
            return Err(model.error("cost", "fork_jitter", problem, "write up to 100 percent"));
        }
        Ok(SunOsCosts {
            fault_ns: ns("fault")?,
            fault_user_ns: ns("fault_user")?,
            reload_ns: ns("reload")?,
            reload_user_ns: ns("reload_user")?,
            region_load_ns: ns("region_load")?,
            zero_ns: ns("zero")?,
            copy_ns: ns("copy")?,
            switch_ns: ns("switch")?,
            context_steal_ns: ns("context_steal")?,
            context_steal_user_ns: ns("context_steal_user")?,
            fork_ns: ns("fork")?,
            fork_jitter_percent,
            exec_ns: ns("exec")?,
            syscall_ns: ns("syscall")?,
        })
    }
}

impl Image {
    fn load(model: &Model, geometry: &Geometry) -> Result<Self, ModelError> {
        let image = Image {
            text_data_pages: model.positive("image", "text_data_pages")?,
            libc_segments: model.count("image", "libc_segments")? as usize,
            exec_faults: model.count("image", "exec_faults")?,
            child_faults: model.count("image", "child_faults")?,
        };
        if image.text_data_pages > u64::from(geometry.ptes) {
            let problem = format!("is {}, more than a segment", image.text_data_pages);
            return Err(model.error("image", "text_data_pages", problem, "write a smaller number"));
        }
        if image.libc_segments > LIBC_SEGMENTS_MAX {
            let problem = format!("is {}, more than {LIBC_SEGMENTS_MAX}", image.libc_segments);
            return Err(model.error("image", "libc_segments", problem, "write a smaller number"));
        }
        Ok(image)
    }
}

const LIBC_SEGMENTS_MAX: usize = 16;
