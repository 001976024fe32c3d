//! A current Linux on x86-64, as far as translation goes: memory on demand, and transparent huge pages
//! by the three policies of `/sys/kernel/mm/transparent_hugepage/enabled`.
//!
//! Source: Linux, Documentation/admin-guide/mm/transhuge.rst. No khugepaged, no swap.

use super::Epilogue;
use super::anon::{AnonKernel, Flavor, Memory, Placed};
use crate::cx::Cx;
use crate::mmu::SpaceId;
use crate::mmu::cached::CachedMmu;
use crate::mmu::hardware;
use crate::model::{Model, ModelError};
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, PageSizeRequest, Region, RegionId};
use pagetax_core::units::{Bytes, PageSize};
use std::collections::BTreeMap;

/// Mappings go up from here.
const MAPPINGS_START: u64 = 1 << 32;
/// User addresses end here.
const MAPPINGS_END: u64 = 1 << 47;

/// When anonymous memory gets huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Enabled {
    Always,
    Madvise,
    Never,
}

/// The policy.
#[derive(Clone)]
pub struct Thp {
    /// Smallest first.
    sizes: Vec<PageSize>,
    enabled: Enabled,
    placed: BTreeMap<RegionId, Placed>,
    next: u64,
}

/// Builds hardware and kernel.
///
/// # Errors
/// Constants that are absent or impossible.
pub fn build(
    model: &Model,
    memory: Bytes,
    cpus: usize,
) -> Result<(CachedMmu, AnonKernel<Thp>), ModelError> {
    let mut sizes = hardware::page_sizes(model, "paging", "page_sizes")?;
    sizes.sort();
    let known =
        [("always", Enabled::Always), ("madvise", Enabled::Madvise), ("never", Enabled::Never)];
    let enabled = model.word("paging", "transparent_hugepage", &known)?;
    let hardware = hardware::load(model, sizes[0], cpus)?;
    let physical = Memory::new(memory, &sizes);
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

    /// The largest size that is no larger than this.
    fn at_most(&self, size: PageSize) -> PageSize {
        self.sizes.iter().rev().copied().find(|known| *known <= size).unwrap_or(self.base())
    }

    fn wanted(&self, request: PageSizeRequest) -> PageSize {
        match (request, self.enabled) {
            (PageSizeRequest::Hugetlb(size), _) => self.at_most(size),
            (_, Enabled::Never) | (PageSizeRequest::Base, _) => self.base(),
            (PageSizeRequest::Prefer(size), _) => self.at_most(size),
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
        // Large mappings are aligned, as the kernel has done it since 6.7.
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
        _memory: &Memory,
        _space: SpaceId,
    ) {
    }

    fn ending(&mut self, _hw: &CachedMmu, _cx: &Cx<'_>, _memory: &Memory, _space: SpaceId) {}

    fn limit(&self, region: &Region) -> Option<Unmet> {
        let room = MAPPINGS_END / 2;
        (region.bytes > room).then(|| Unmet {
            what: format!("region `{}` has {}: too much to map", region.name, Bytes(region.bytes)),
            remedy: format!("make it smaller than {}", Bytes(room)),
            fatal: true,
        })
    }

    fn epilogue(&self, _hw: &CachedMmu, _memory: &Memory) -> Epilogue {
        Epilogue::default()
    }
}
