//! Preflight checks that several kernels share: demands of a plan that a machine cannot meet.

use pagetax_core::machine::Unmet;
use pagetax_core::page_size::{How, PageSizeRequest};
use pagetax_core::plan::{Advice, Plan, Region};
use pagetax_core::units::{Bytes, PageSize};

/// Returns a demand without which the plan would be a different one, so the machine refuses it.
pub(super) fn fatal(what: String, remedy: impl Into<String>) -> Unmet {
    Unmet { what, remedy: remedy.into(), fatal: true }
}

/// Returns a demand that the machine ignores; the report mentions it.
pub(super) fn degraded(what: String, remedy: impl Into<String>) -> Unmet {
    Unmet { what, remedy: remedy.into(), fatal: false }
}

/// Refuses network memory on a machine without memory servers.
pub(super) fn without_servers(plan: &Plan) -> Option<Unmet> {
    let region = plan.network_region()?;
    Some(fatal(
        format!("region `{}` is network memory; this machine has no memory servers", region.name),
        "use --on sim:alpha-nms or --on host, or backing = \"anon\"",
    ))
}

/// Reports page sizes that the machine lacks. Pool pages of such a size are refused; preferred
/// sizes are ignored.
pub(super) fn other_page_sizes(plan: &Plan, sizes: &[PageSize]) -> Vec<Unmet> {
    let names: Vec<_> = sizes.iter().map(PageSize::to_string).collect();
    let names = names.join(", ");
    let unmet = |region: &Region| match region.page_size {
        PageSizeRequest::Size(size, How::Hugetlb) if !sizes.contains(&size) => Some(fatal(
            format!(
                "region `{}` asks for a pool of {size} pages; this machine's pages are {names}",
                region.name
            ),
            "leave its page_size out",
        )),
        PageSizeRequest::Size(size, _) if !sizes.contains(&size) => Some(degraded(
            format!(
                "region `{}` prefers {size} pages; this machine's pages are {names}",
                region.name
            ),
            "leave its page_size out, or use one of these",
        )),
        _ => None,
    };
    plan.regions.iter().filter_map(unmet).collect()
}

/// Reports that the machine ignores advice other than `known`.
pub(super) fn ignored_advice(plan: &Plan, known: &[Advice]) -> Option<Unmet> {
    // MADV_NORMAL requests the default, so it is never ignored.
    let ignored = |advice: &Advice| *advice != Advice::Normal && !known.contains(advice);
    plan.advice().find(ignored)?;
    let known = match known {
        [] => "no advice".to_string(),
        known => format!("only {known:?}").replace(['[', ']'], "").to_lowercase(),
    };
    Some(degraded(
        format!("of the advice in madvise(2), this model knows {known}"),
        "expect the rest to be ignored",
    ))
}

/// Refuses a plan that maps more than `room`.
pub(super) fn too_much_mapped(plan: &Plan, room: Bytes, whose: &str) -> Option<Unmet> {
    let mapped = plan.mapped_bytes_max();
    (mapped > room).then(|| {
        fatal(
            format!("the job maps {mapped}; {whose} {room}"),
            "make the job smaller (--set size=…)",
        )
    })
}
