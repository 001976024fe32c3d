//! Preflight of a network-memory client: demands of a plan that it cannot meet.

use super::model::PagerModel;
use crate::historic::kernel::preflight::{
    degraded, fatal, ignored_advice, other_page_sizes, too_much_mapped,
};
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, Backing, Plan};
use pagetax_core::units::Bytes;

/// Returns all demands of `plan` that the client cannot meet.
pub(super) fn unmet_requirements(model: &PagerModel, plan: &Plan) -> Vec<Unmet> {
    let memory = &model.memory;
    let resident = Bytes(u64::from(memory.resident_pages_max) * memory.page_bytes);
    let room = Bytes(resident.0.saturating_add(memory.network.bytes().0));
    let mut unmet = other_page_sizes(plan, &[model.page]);
    unmet.extend(too_much_mapped(plan, room, "the client and its servers together hold"));
    let locked = plan.locked_bytes_max();
    if locked > resident {
        unmet.push(fatal(
            format!("the job locks {locked}; the client's memory holds {resident}"),
            "lock less at one time (--set slots=…, file_size=…)",
        ));
    }
    for region in &plan.regions {
        match region.backing {
            Backing::File { .. } => unmet.push(fatal(
                format!("region `{}` is a file; this machine has no files", region.name),
                "use backing = \"anon\" or \"shared\", or another machine",
            )),
            Backing::Remote { resident_bytes, .. } if resident_bytes < region.bytes => {
                unmet.push(degraded(
                    format!(
                        "of region `{}` {} are to be resident; this client keeps what fits its \
                         {resident} of memory",
                        region.name,
                        Bytes(resident_bytes)
                    ),
                    "set the client's memory (paging.resident_pages of its machine file)",
                ));
            }
            _ => {}
        }
    }
    unmet.extend(ignored_advice(plan, &[Advice::Dontneed]));
    unmet
}
