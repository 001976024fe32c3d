//! The constants of a network-memory client, from its machine file.

use super::memory::MemoryModel;
use crate::historic::kernel::replacement::ReplacementPolicy;
use crate::historic::store::network::{NetworkModel, Placement};
use crate::model::{Model, ModelError};
use pagetax_core::units::PageSize;

/// The most servers that a machine file may ask for.
const SERVERS_MAX: u64 = 1024;

/// All constants of the kernel. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagerModel {
    /// The machine's only page size.
    pub page: PageSize,
    /// Constants of the client's memory and its servers.
    pub memory: MemoryModel,
    /// Time of a fault on a resident page that only lacks its translation.
    pub soft_fault_ns: u64,
    /// Time to copy a page on write, in addition to the zero-fill of its frame.
    pub copy_ns: u64,
    /// Time of a fork, without its pages.
    pub fork_ns: u64,
    /// Time of a switch to another space.
    pub switch_ns: u64,
}

impl PagerModel {
    /// Reads the tables `paging`, `network` and `process`.
    ///
    /// # Errors
    /// Returns the first constant that is absent or impossible.
    pub fn read(model: &Model, page: PageSize) -> Result<Self, ModelError> {
        let network = read_network(model)?;
        network.check(page.bytes()).map_err(|error| {
            model.error("network", "server_memory", error.to_string(), "correct the table")
        })?;
        let resident = model.positive("paging", "resident_pages")?;
        let zero_fill_ns_min = model.ns("paging", "zero_fill_min")?;
        Ok(PagerModel {
            page,
            memory: MemoryModel {
                page_bytes: page.bytes(),
                resident_pages_max: u32::try_from(resident).map_err(|_| {
                    model.error("paging", "resident_pages", "is too many", "write fewer than 2^32")
                })?,
                replacement: model.word("paging", "replacement", &ReplacementPolicy::NAMES)?,
                zero_fill_ns_min,
                zero_fill_jitter_ns_mean: above(
                    model,
                    "paging",
                    "zero_fill_mean",
                    zero_fill_ns_min,
                )?,
                network,
            },
            soft_fault_ns: model.ns("paging", "soft_fault")?,
            copy_ns: model.ns("paging", "copy")?,
            fork_ns: model.ns("process", "fork")?,
            switch_ns: model.ns("process", "switch")?,
        })
    }
}

fn read_network(model: &Model) -> Result<NetworkModel, ModelError> {
    let table = "network";
    let servers = model.positive(table, "servers")?;
    if servers > SERVERS_MAX {
        let problem = format!("is {servers}, more than {SERVERS_MAX}");
        return Err(model.error(table, "servers", problem, "write fewer"));
    }
    let page_out_ns_min = model.ns(table, "page_out_min")?;
    Ok(NetworkModel {
        server_bytes: vec![model.bytes(table, "server_memory")?; servers as usize],
        placement: model.word(table, "placement", &Placement::NAMES)?,
        discovery_ns: model.ns(table, "discovery")?,
        exchange_ns_min: model.ns(table, "exchange_min")?,
        exchange_jitter_ns_mean: model.ns(table, "exchange_jitter_mean")?,
        loss_ppm: model.ppm(table, "first_half_lost")?,
        loss_again_ppm: model.ppm(table, "retransmission_lost")?,
        spin_ns_max: model.ns(table, "spin_max")?,
        sleep_ns_min: model.ns(table, "sleep_min")?,
        sleep_ns_max: model.ns(table, "sleep_max")?,
        page_out_ns_min,
        page_out_jitter_ns_mean: above(model, table, "page_out_mean", page_out_ns_min)?,
    })
}

/// Returns the difference between a mean and its minimum in nanoseconds, or an error if the mean is
/// below.
fn above(model: &Model, table: &str, key: &str, min_ns: u64) -> Result<u64, ModelError> {
    model.ns(table, key)?.checked_sub(min_ns).ok_or_else(|| {
        model.error(table, key, "is below the minimum", "write a mean of at least the minimum")
    })
}
