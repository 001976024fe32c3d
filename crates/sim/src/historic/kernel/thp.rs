//! Address translation in current Linux on x86-64: demand paging, and transparent huge pages with
//! the three policies of `/sys/kernel/mm/transparent_hugepage/enabled`.
//!
//! Source: Linux, Documentation/admin-guide/mm/transhuge.rst. There is no khugepaged and no swap.

use super::KernelReport;
use super::anon::{AnonKernel, AnonMemory, Flavor, Placed};
use crate::hardware::SpaceId;
use crate::hardware::cached::CachedMmu;
use crate::hardware::configuration;
use crate::historic::cx::Cx;
use crate::model::{Model, ModelError};
use pagetax_core::machine::Unmet;
use pagetax_core::page_size::{How, PageSizeRequest};
use pagetax_core::plan::{Advice, Region, RegionId};
use pagetax_core::units::{Bytes, PageSize};
use std::collections::BTreeMap;

/// The start of the mappings, which grow up from here.
const MAPPINGS_START: u64 = 1 << 32;
/// The end of the user addresses.
const MAPPINGS_END: u64 = 1 << 47;

/// The policy of `enabled`: the anonymous memory that gets huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Enabled {
    Always,
    Madvise,
    Never,
}

/// The policy of current Linux, with transparent huge pages.
#[derive(Clone)]
pub struct Thp {
    /// Page sizes, smallest first.
    sizes: Vec<PageSize>,
    enabled: Enabled,
    placed: BTreeMap<RegionId, Placed>,
    next: u64,
}

/// Builds the hardware and the kernel from a machine's constants.
///
/// # Errors
/// Returns an error if a constant is absent or out of range.
pub fn build(
    model: &Model,
    memory: Bytes,
    cpus: usize,
) -> Result<(CachedMmu, AnonKernel<Thp>), ModelError> {
    let mut sizes = configuration::page_sizes(model, "paging", "page_sizes")?;
    sizes.sort();
    let known =
        [("always", Enabled::Always), ("madvise", Enabled::Madvise), ("never", Enabled::Never)];
    let enabled = model.word("paging", "transparent_hugepage", &known)?;
    let hardware = configuration::load(model, sizes[0], cpus)?;
    let physical = AnonMemory::new(memory, &sizes);
    let thp = Thp { sizes, enabled, placed: BTreeMap::new(), next: MAPPINGS_START };
    Ok((hardware, AnonKernel::new(model, physical, thp)?))
}

impl Thp {
    fn base(&self) -> PageSize {
        self.sizes[0]
    }

    fn largest(&self) -> PageSize {
        self.sizes[self.sizes.len() - 1]
    }

    /// Returns the largest page size that is at most `size`, or the base page.
    fn at_most(&self, size: PageSize) -> PageSize {
        self.sizes.iter().rev().copied().find(|known| *known <= size).unwrap_or(self.base())
    }

    fn wanted(&self, request: PageSizeRequest) -> PageSize {
        match (request, self.enabled) {
            (PageSizeRequest::Size(size, How::Hugetlb), _) => self.at_most(size),
            (_, Enabled::Never) | (PageSizeRequest::Base, _) => self.base(),
            (PageSizeRequest::Size(size, _), _) => self.at_most(size),
            (PageSizeRequest::Default, Enabled::Always) => self.largest(),
            (PageSizeRequest::Default, Enabled::Madvise) => self.base(),
        }
    }
}

impl Flavor for Thp {
    fn place(&mut self, _space: SpaceId, id: RegionId, region: &Region) -> Placed {
        if let Some(placed) = self.placed.get(&id) {
            return *placed;
        }
        // Since 6.7, the kernel aligns large mappings.
        let base = self.next.next_multiple_of(self.largest().bytes());
        let bytes = region.bytes.next_multiple_of(self.base().bytes());
        self.next = base + bytes;
        let placed = Placed { base, bytes, page: self.wanted(region.page_size) };
        self.placed.insert(id, placed);
        placed
    }

    fn advised(&self, advice: Advice) -> Option<PageSize> {
        match (advice, self.enabled) {
            (Advice::Hugepage, Enabled::Always | Enabled::Madvise) => Some(self.largest()),
            (Advice::Nohugepage, _) => Some(self.base()),
            _ => None,
        }
    }

    fn pages_changed(
        &mut self,
        _hw: &mut CachedMmu,
        _cx: &mut Cx<'_>,
        _memory: &AnonMemory,
        _space: SpaceId,
    ) {
    }

    fn ending(&mut self, _hw: &CachedMmu, _cx: &Cx<'_>, _memory: &AnonMemory, _space: SpaceId) {}

    fn limit(&self, region: &Region) -> Option<Unmet> {
        let room = MAPPINGS_END / 2;
        (region.bytes > room).then(|| Unmet {
            what: format!("region `{}` has {}: too much to map", region.name, Bytes(region.bytes)),
            remedy: format!("make it smaller than {}", Bytes(room)),
            fatal: true,
        })
    }

    fn kernel_report(&self, _hw: &CachedMmu, _memory: &AnonMemory) -> KernelReport {
        KernelReport::default()
    }
}
