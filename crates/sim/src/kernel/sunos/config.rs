//! The constants of a Sun-4 under SunOS: tables `[hat]`, `[cost]`, `[image]`, `[swapper]`, `[disk]`.

use super::steal::{POLICIES, Policy};
use crate::mmu::sun4::Geometry;
use crate::model::{Model, ModelError};

/// How pmegs and contexts are managed.
#[derive(Debug, Clone, Copy)]
pub struct HatConfig {
    /// Pmegs that the kernel keeps for itself.
    pub kernel_pmegs: usize,
    /// Contexts that users can have.
    pub user_contexts: usize,
    /// Whose pmeg is stolen.
    pub steal: Policy,
    /// Sun's patch: what a stolen pmeg held is kept in memory, and loaded back as a whole.
    pub software_cache: bool,
    /// A what-if: processes that map the same pages at the same addresses share the pmeg.
    pub share: bool,
}

/// CPU time of what the kernel does, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Costs {
    /// A translation fault: trap, lookup, one entry loaded.
    pub fault_ns: u64,
    /// What it costs the user beside: refilling the cache and the windows.
    pub fault_user_ns: u64,
    /// Loading a whole pmeg from the software cache, and what it costs the user beside.
    pub reload_ns: u64,
    /// See `reload_ns`.
    pub reload_user_ns: u64,
    /// Loading the segment-map entries of a region on a three-level machine.
    pub region_load_ns: u64,
    /// Zeroing a page.
    pub zero_ns: u64,
    /// Copying a page.
    pub copy_ns: u64,
    /// Switching to another process.
    pub switch_ns: u64,
    /// Taking a context from another process: cache flush and segment map, and what it costs the user.
    pub context_steal_ns: u64,
    /// See `context_steal_ns`.
    pub context_steal_user_ns: u64,
    /// A fork, and by how much it varies.
    pub fork_ns: u64,
    /// See `fork_ns`.
    pub fork_jitter_percent: u64,
    /// Starting the program.
    pub exec_ns: u64,
    /// A system call that does little.
    pub syscall_ns: u64,
}

/// What a process needs beside its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    /// Pages before the first region: text and initialised data.
    pub text_data_pages: u64,
    /// Segments of the C library, used when a process starts and exits and when a parent polls.
    pub libc_segments: usize,
    /// Faults of main beside those on its regions, until its first operation.
    pub exec_faults: u64,
    /// The same of a forked child.
    pub child_faults: u64,
}

/// When processes without a pmeg are swapped out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swapper {
    /// Once a second, whenever none is left to them: they seem to have no resident page.
    Eager,
    /// Never: `nosched`, or the patch of report 000 that swaps for want of memory alone, of which a
    /// job that has been admitted has none.
    Off,
}

/// All of it.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Pmegs and contexts.
    pub hat: HatConfig,
    /// CPU time.
    pub costs: Costs,
    /// Processes.
    pub image: Image,
    /// Swapping.
    pub swapper: Swapper,
    /// CPU time of swapping a process out (moving its pages to the free list), and in.
    pub swap_out_ns: u64,
    /// See `swap_out_ns`.
    pub swap_in_ns: u64,
    /// Time until the disk begins to deliver, and for each page.
    pub disk_access_ns: u64,
    /// See `disk_access_ns`.
    pub disk_page_ns: u64,
    /// Pages that are read at once.
    pub disk_cluster_pages: u64,
}

/// Fewer pmegs than this, and a process could not hold its text, its stack and one page at once.
const USER_PMEGS_MIN: usize = 4;

impl Config {
    /// Reads the tables.
    ///
    /// # Errors
    /// Constants that are absent or cannot be.
    pub fn load(model: &Model, geometry: &Geometry) -> Result<Self, ModelError> {
        let swappers = [("eager", Swapper::Eager), ("off", Swapper::Off)];
        Ok(Config {
            hat: HatConfig::load(model, geometry)?,
            costs: Costs::load(model)?,
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

impl Costs {
    fn load(model: &Model) -> Result<Self, ModelError> {
        let ns = |key| model.ns("cost", key);
        let fork_jitter_percent = model.ppm("cost", "fork_jitter")? / 10_000;
        if fork_jitter_percent > 100 {
            let problem = "is more than everything";
            return Err(model.error("cost", "fork_jitter", problem, "write up to 100 percent"));
        }
        Ok(Costs {
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
