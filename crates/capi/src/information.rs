//! Information about addresses: physical address, memory node, page size.

use pagetax_core::units::{PageSize, VirtAddr};
use pagetax_host::pages::pagemap;
use pagetax_host::procfs::Root;
use pagetax_host::sys::numa;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// A property of an address, as meminfo(2) of Solaris requests it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// The physical address of a virtual one; only root sees it.
    Physical,
    /// The memory node that a virtual address lies on.
    Node,
    /// The size of the page that maps a virtual address, in bytes.
    PageBytes,
    /// The number of replicas of the page: always 0.
    ReplicaCount,
    /// A replica, or its node: never known.
    Replica,
    /// The memory node of a physical address.
    NodeOfPhysical,
}

/// The answers for one address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answers {
    /// The address is mapped and its page in memory (virtual), or is memory (physical).
    pub is_good: bool,
    /// One value for each request, in order; None if it is unknown.
    pub values: Vec<Option<u64>>,
}

/// Answers all requests for each address of this process.
pub fn information(addresses: &[u64], requests: &[Request]) -> Vec<Answers> {
    let physical = requests.iter().all(|request| *request == Request::NodeOfPhysical);
    let pages = if physical { Vec::new() } else { pages(addresses) };
    let answers = |(index, address): (usize, &u64)| {
        let page = pages.get(index).copied().flatten();
        let values: Vec<_> =
            requests.iter().map(|request| answer(*request, *address, page)).collect();
        let is_good = if physical { node_of(*address).is_some() } else { page.is_some() };
        Answers { is_good, values: if is_good { values } else { vec![None; requests.len()] } }
    };
    addresses.iter().enumerate().map(answers).collect()
}

/// Returns the page size at each address; None where no page is resident.
fn pages(addresses: &[u64]) -> Vec<Option<PageSize>> {
    let holds = |start: VirtAddr, end: VirtAddr| {
        addresses.iter().any(|address| (start.0..end.0).contains(address))
    };
    let Ok(map) = pagemap::read_where(std::process::id(), holds) else {
        return vec![None; addresses.len()];
    };
    let page = |address: &u64| {
        let runs = map.mappings.iter().flat_map(|mapping| &mapping.runs);
        let mut runs = runs.filter(|run| (run.start.0..run.end.0).contains(address));
        runs.next().and_then(|run| run.page)
    };
    addresses.iter().map(page).collect()
}

fn answer(request: Request, address: u64, page: Option<PageSize>) -> Option<u64> {
    match request {
        Request::Physical => physical(address),
        Request::Node => {
            let me = own_pid()?;
            numa::nodes(me, &[address]).ok()?.first().copied()?.map(u64::from)
        }
        Request::PageBytes => page.map(PageSize::bytes),
        Request::ReplicaCount => Some(0),
        Request::Replica => None,
        Request::NodeOfPhysical => node_of(address),
    }
}

fn own_pid() -> Option<numa::Pid> {
    numa::Pid::from_raw(std::process::id() as i32)
}

/// Reads a physical address from /proc/self/pagemap, which hides it from all but root.
fn physical(address: u64) -> Option<u64> {
    let base = pagetax_interpose::system::base_page();
    let mut entry = [0; 8];
    let pagemap = File::open("/proc/self/pagemap").ok()?;
    pagemap.read_exact_at(&mut entry, address / base * 8).ok()?;
    let entry = u64::from_ne_bytes(entry);
    let frame = entry & ((1 << 55) - 1);
    (entry >> 63 == 1 && frame != 0).then(|| frame * base + address % base)
}

/// Returns the node whose memory blocks contain a physical address.
fn node_of(physical: u64) -> Option<u64> {
    let root = Root::default();
    let block = root.text("/sys/devices/system/memory/block_size_bytes").ok()?;
    let block = physical / u64::from_str_radix(&block, 16).ok().filter(|bytes| *bytes > 0)?;
    let nodes = root.names("/sys/devices/system/node").into_iter();
    nodes
        .filter_map(|name| name.strip_prefix("node")?.parse::<u64>().ok())
        .find(|node| root.has(&format!("/sys/devices/system/node/node{node}/memory{block}")))
}
