//! What of a plan a network-memory client cannot do, before it is run.

use super::model::PagerModel;
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Backing, PageSizeRequest, Plan};
use pagetax_core::units::Bytes;

/// All that is lacking.
pub(super) fn check(model: &PagerModel, plan: &Plan) -> Vec<Unmet> {
    let mut unmet = Vec::new();
    let memory = &model.memory;
    let resident = Bytes(memory.resident_pages_max as u64 * memory.page_bytes);
    let network = memory.network.bytes();
    let mapped = plan.mapped_bytes_max();
    if mapped.0 > resident.0.saturating_add(network.0) {
        unmet.push(Unmet {
            what: format!(
                "the job maps {mapped}; the client holds {resident} and its servers {network}"
            ),
            remedy: "make the job smaller (--set size=…), or give the servers more memory".into(),
            fatal: true,
        });
    }
    let locked = plan.locked_bytes_max();
    if locked.0 > resident.0 {
        unmet.push(Unmet {
            what: format!("the job locks {locked}; the client's memory holds {resident}"),
            remedy: "lock less at one time (--set slots=…, file_size=…)".into(),
            fatal: true,
        });
    }
    if plan.regions.iter().any(|region| asks_for_other_pages(region.page_size, memory.page_bytes)) {
        unmet.push(Unmet {
            what: format!("all pages of this machine are {}", Bytes(memory.page_bytes)),
            remedy: "leave the page size out".into(),
            fatal: false,
        });
    }
    if plan.regions.iter().any(|region| matches!(region.backing, Backing::File { .. })) {
        unmet.push(Unmet {
            what: "this machine has no files: they are paged to memory servers as other memory is"
                .into(),
            remedy: "use backing = \"anon\" or \"shared\" to say the same".into(),
            fatal: false,
        });
    }
    unmet
}

fn asks_for_other_pages(request: PageSizeRequest, page_bytes: u64) -> bool {
    match request {
        PageSizeRequest::Default | PageSizeRequest::Base => false,
        PageSizeRequest::Prefer(size) | PageSizeRequest::Hugetlb(size) => {
            size.bytes() != page_bytes
        }
    }
}
