//! Preflight of SunOS on a Sun-4: demands of a job that it cannot meet.

use crate::historic::kernel::preflight::{
    degraded, ignored_advice, other_page_sizes, too_much_mapped, without_servers,
};
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, ClientKind, Plan};
use pagetax_core::units::{Bytes, PageSize};

/// Returns the demands of `plan` that a Sun-4 with this much memory for users cannot meet. It does
/// not page out.
pub(super) fn unmet_requirements(plan: &Plan, memory: Bytes, page: PageSize) -> Vec<Unmet> {
    let mut unmet = other_page_sizes(plan, &[page]);
    unmet.extend(too_much_mapped(plan, memory, "users have, without paging out,"));
    unmet.extend(without_servers(plan));
    if plan.phases.iter().any(|phase| phase.client_kind == ClientKind::Threads) {
        let what = "SunOS 4 has no threads; they are simulated as one process on one CPU";
        unmet.push(degraded(what.into(), "use processes as clients"));
    }
    unmet.extend(ignored_advice(plan, &[Advice::Dontneed]));
    unmet
}
