//! What a plan may not ask of network memory: its pages are the pager's, not the kernel's.

use super::fatal;
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Backing, ClientKind, Op, PageSizeRequest, Plan, RegionId};
use pagetax_core::units::Bytes;

/// A pager cannot do with less.
const RESIDENT_BYTES_MIN: u64 = 128 << 10;

/// All that stands in the way of a plan's regions of network memory.
pub(super) fn check_network(plan: &Plan) -> Vec<Unmet> {
    let regions = plan.regions.iter().enumerate().filter(|(_, region)| region.backing.is_remote());
    let why = |(index, _)| check_region(plan, RegionId(index));
    let mut unmet: Vec<Unmet> = regions.filter_map(why).collect();
    let has_any = plan.regions.iter().any(|region| region.backing.is_remote());
    let forks = plan.phases.iter().find(|phase| phase.client_kind == ClientKind::Processes);
    if let (true, Some(phase)) = (has_any, forks) {
        unmet.push(fatal(
            format!("phase `{}` forks, and children do not get network memory", phase.name),
            "use client_kind = \"threads\"",
        ));
    }
    unmet
}

fn check_region(plan: &Plan, id: RegionId) -> Option<Unmet> {
    let region = plan.region(id);
    let name = &region.name;
    if let Backing::Remote { resident_bytes, .. } = region.backing
        && resident_bytes < RESIDENT_BYTES_MIN
    {
        let what = format!("of region `{name}` only {} may be resident", Bytes(resident_bytes));
        return Some(fatal(what, format!("allow at least {}", Bytes(RESIDENT_BYTES_MIN))));
    }
    if let PageSizeRequest::Hugetlb(_) = region.page_size {
        let what = format!("region `{name}` is network memory, which no pool of pages is");
        return Some(fatal(what, "leave its page_size out"));
    }
    let by_kernel = |op: &Op| match op {
        Op::Map(region) | Op::Unmap(region) | Op::Unlock(region) => *region == id,
        Op::Lock { region, .. } | Op::Advise { region, .. } => *region == id,
        Op::Touch(_) | Op::Replay(_) | Op::Sleep(_) | Op::Barrier => false,
    };
    let asked = plan.phases.iter().flat_map(|phase| &phase.ops).any(by_kernel);
    (asked || !region.mapped_at_start || !region.advice.is_empty()).then(|| {
        fatal(
            format!("region `{name}` is network memory: it is only touched, from start to end"),
            "leave out mapping, locking and advice, or use another backing",
        )
    })
}
