//! What a job may ask of SunOS on a Sun-4, and what it may not.

use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, ClientKind, Op, PageSizeRequest, Plan, Region};
use pagetax_core::units::Bytes;

/// What of `plan` a Sun-4 with this much memory for users cannot do.
pub(super) fn check(plan: &Plan, memory: Bytes) -> Vec<Unmet> {
    let mut unmet = Vec::new();
    let mapped = plan.mapped_bytes_max();
    if mapped > memory {
        unmet.push(Unmet {
            what: format!("the job maps {mapped}; users have {memory} of memory"),
            remedy: "make the job smaller (--set size=…); this model does not page out".into(),
            fatal: true,
        });
    }
    let wants_other_pages = |region: &&Region| {
        matches!(region.page_size, PageSizeRequest::Prefer(_) | PageSizeRequest::Hugetlb(_))
    };
    if let Some(region) = plan.regions.iter().find(wants_other_pages) {
        unmet.push(Unmet {
            what: format!("region `{}` asks for a page size; a Sun-4 has one", region.name),
            remedy: "ask for the default page size".into(),
            fatal: false,
        });
    }
    let threads = plan.phases.iter().any(|p| p.client_kind == ClientKind::Threads);
    if threads {
        unmet.push(Unmet {
            what: "SunOS 4 has no threads; they are simulated as one process on one CPU".into(),
            remedy: "use processes as clients".into(),
            fatal: false,
        });
    }
    let advises = |op: &Op| matches!(op, Op::Advise { advice, .. } if *advice != Advice::Dontneed);
    if plan.phases.iter().flat_map(|phase| &phase.ops).any(advises) {
        unmet.push(Unmet {
            what: "of all advice this model knows dontneed only".into(),
            remedy: "expect the rest to be ignored".into(),
            fatal: false,
        });
    }
    unmet
}
