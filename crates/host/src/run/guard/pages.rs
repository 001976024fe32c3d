//! The check that a plan gets the page sizes that it asks for.
//!
//! A size that is only preferred is dropped with a warning in the report. A reserved pool without enough
//! pages stops the run.

use super::{degraded, fatal};
use crate::pages::PageSettings;
use crate::run::memory::mapping_len;
use pagetax_core::machine::Unmet;
use pagetax_core::page_size::{How, PageSizeRequest};
use pagetax_core::plan::{Backing, Plan, Region};
use pagetax_core::units::PageSize;
use std::collections::BTreeMap;

/// Returns a finding if a region cannot get the pages that it prefers. The region runs without them.
pub(super) fn check_page_size(region: &Region, pages: &PageSettings) -> Option<Unmet> {
    use crate::pages::Mode::{Always, Madvise, Never};
    let PageSizeRequest::Size(size, How::Preferred) = region.page_size else { return None };
    if size.bytes() <= rustix::param::page_size() as u64 {
        return None;
    }
    let name = &region.name;
    if matches!(region.backing, Backing::File { .. }) {
        let what = format!("region `{name}` is a file; its page size is the file system's choice");
        return Some(degraded(what, "use backing = \"anon\" or \"memfd\""));
    }
    if region.backing.is_remote() {
        let what = format!("region `{name}` is network memory, whose pages come and go one by one");
        return Some(degraded(what, "leave its page_size out"));
    }
    if !matches!(region.backing, Backing::Anon) {
        let what =
            format!("region `{name}` is shared memory, with {size} pages only if shmem has them");
        let remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";
        let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        let off = text.is_ok_and(|text| text.contains("[never]") || text.contains("[deny]"));
        return off.then(|| degraded(what, remedy));
    }
    match pages.of_size(size) {
        None => Some(degraded(
            format!("region `{name}` prefers {size} pages, which this kernel does not have"),
            format!("use one of {}", list(&pages.sizes())),
        )),
        Some(Never) => Some(degraded(
            format!("region `{name}` prefers {size} pages, which are switched off"),
            format!("echo madvise > {}", pages.size_path(size).display()),
        )),
        Some(Always | Madvise) => larger_goes_first(region, size, pages),
    }
}

/// Returns a finding if a fault would take a larger size: it takes the largest that is enabled and fits.
fn larger_goes_first(region: &Region, size: PageSize, pages: &PageSettings) -> Option<Unmet> {
    use crate::pages::Mode::Never;
    let on = |larger: &PageSize| pages.of_size(*larger).is_some_and(|mode| mode != Never);
    let larger = pages
        .sizes()
        .into_iter()
        .filter(|larger| *larger > size && larger.bytes() <= region.bytes)
        .find(on)?;
    Some(degraded(
        format!(
            "region `{}` prefers {size} pages, but {larger} pages are on too and go first",
            region.name
        ),
        // To switch the larger ones off would take them from the whole system.
        format!(
            "ask for {larger}; pagetax diagnose --allow-sysfs --pages {size} has the others off for its trials only"
        ),
    ))
}

fn list(sizes: &[PageSize]) -> String {
    let texts: Vec<_> = sizes.iter().map(PageSize::to_string).collect();
    texts.join(", ")
}

/// Returns a finding for each reserved pool with fewer pages than all regions together need.
pub(super) fn check_pools(plan: &Plan, pages: &PageSettings) -> Vec<Unmet> {
    let mut wanted: BTreeMap<PageSize, u64> = BTreeMap::new();
    let mut unmet = Vec::new();
    for region in &plan.regions {
        let Some(size) = region.page_size.hugetlb() else { continue };
        *wanted.entry(size).or_default() += mapping_len(region) / size.bytes();
    }
    for (size, count) in wanted {
        let pool = pages.pool_path(size).join("nr_hugepages");
        match pages.hugetlb_pages(size) {
            None => unmet.push(fatal(
                format!("this kernel has no pool of {size} pages"),
                format!("use one of {}", list(&pages.hugetlb_sizes())),
            )),
            Some(free) if free < count => {
                let in_pool = std::fs::read_to_string(&pool)
                    .ok()
                    .and_then(|text| text.trim().parse::<u64>().ok());
                let target = in_pool.unwrap_or(0) + (count - free);
                unmet.push(fatal(
                    format!("the job needs {count} hugetlb pages of {size}; {free} are free"),
                    format!("echo {target} > {} (as root; put it back after)", pool.display()),
                ));
            }
            Some(_) => {}
        }
    }
    unmet
}
