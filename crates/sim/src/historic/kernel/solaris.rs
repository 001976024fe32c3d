//! Solaris 9 on UltraSPARC: page sizes for heap and mappings, programmable large TLBs, and
//! fragmented physical memory with or without a kernel cage.
//!
//! Source: McDougall, 'Taming Your Emu' (Sun BluePrints, 2004). Once a process has eight or more
//! pages of a large size, one large TLB is programmed for that size. If no page of the wanted size
//! is available, a smaller one is used. Unlocked pages are relocated to make room. With the cage,
//! the kernel's own pages do not obstruct relocation.

use super::KernelReport;
use super::anon::{AddressSpace, AnonKernel, AnonMemory, Flavor, OTHERS, Placed};
use super::buddy::Owner;
use super::solaris_tools::{self, Background, Interval};
use crate::hardware::SpaceId;
use crate::hardware::cached::{CachedMmu, Refill};
use crate::hardware::configuration;
use crate::historic::cx::Cx;
use crate::model::{Model, ModelError};
use pagetax_core::access::Rng;
use pagetax_core::machine::Unmet;
use pagetax_core::page_size::PageSizeRequest;
use pagetax_core::plan::{Advice, Plan, Region, RegionId};
use pagetax_core::report::{Table, Warning};
use pagetax_core::units::{Bytes, PageSize};
use std::collections::BTreeMap;

/// Address of the heap in the report's test program, after its one page of data.
pub(super) const HEAP: u64 = 0x2_2000;
/// The job name of the report's test program.
const PUBLISHED_JOB: &str = "tlb-gather";
/// The end of the mappings, below the libraries; mappings grow down from here.
const MAPPINGS_END: u64 = 0xff00_0000;

/// The Solaris 9 policy.
#[derive(Clone)]
pub struct Solaris {
    /// Page sizes, smallest first.
    sizes: Vec<PageSize>,
    large_pages_min: u64,
    /// Miss rates of the kernel and other code, from the report. None for any job except the
    /// report's own.
    background: Option<Background>,
    placed: BTreeMap<RegionId, Placed>,
    mappings_start: u64,
    has_heap: bool,
    programmed: BTreeMap<SpaceId, PageSize>,
    /// The counts when a page was last mapped. trapstat's interval for the job's steady state
    /// starts there.
    steady_from: Reading,
    ended: Option<Reading>,
    /// The main process's pmap listing, taken when it ended.
    pmap: Option<Table>,
}

/// The hardware's miss counts at one time.
#[derive(Debug, Clone, Default)]
struct Reading {
    at_ns: u64,
    misses: Vec<u64>,
    instruction_misses: u64,
    tsb_misses: u64,
}

/// Builds the hardware and the kernel from a machine's constants.
///
/// # Errors
/// Returns an error if a constant is absent or out of range.
pub fn build(
    model: &Model,
    memory: Bytes,
    cpus: usize,
) -> Result<(CachedMmu, AnonKernel<Solaris>), ModelError> {
    let mut sizes = configuration::page_sizes(model, "paging", "page_sizes")?;
    sizes.sort();
    let mut physical = AnonMemory::new(memory, &sizes);
    occupy(model, &mut physical)?;
    let solaris = Solaris {
        large_pages_min: model.positive("tlb", "large_pages_min")?,
        background: Some(Background::load(model)?),
        placed: BTreeMap::new(),
        mappings_start: MAPPINGS_END,
        has_heap: false,
        programmed: BTreeMap::new(),
        steady_from: Reading::default(),
        ended: None,
        pmap: None,
        sizes,
    };
    let hardware = configuration::load(model, solaris.sizes[0], cpus)?;
    Ok((hardware, AnonKernel::new(model, physical, solaris)?))
}

/// Places the kernel and the other processes in memory. With the cage the kernel is in one piece,
/// otherwise scattered at random. The other processes are always scattered.
fn occupy(model: &Model, memory: &mut AnonMemory) -> Result<(), ModelError> {
    let share = |key| Ok(model.ppm("paging", key)?.min(1_000_000));
    let (kernel_ppm, others_ppm) = (share("kernel_memory")?, share("other_memory")?);
    let cage = model.flag("paging", "kernel_cage")?;
    let buddy = memory.buddy();
    let frames = buddy.frames();
    let (kernel, others) = (frames * kernel_ppm / 1_000_000, frames * others_ppm / 1_000_000);
    if kernel + others >= frames {
        let problem = "and kernel_memory leave nothing to the job";
        return Err(model.error("paging", "other_memory", problem, "make them smaller"));
    }
    let mut rng = Rng::new(frames);
    let mut strew = |buddy: &mut super::buddy::Buddy, count: u64, owner: Owner| {
        let mut left = count;
        while left > 0 {
            left -= u64::from(buddy.allocate_at(rng.below(frames), 0, owner));
        }
    };
    if cage {
        (0..kernel).for_each(|_| {
            buddy.allocate(0, Owner::Pinned);
        });
    } else {
        strew(buddy, kernel, Owner::Pinned);
    }
    strew(buddy, others, Owner::Movable(OTHERS));
    Ok(())
}

impl Solaris {
    fn base(&self) -> PageSize {
        self.sizes[0]
    }

    fn largest(&self) -> PageSize {
        self.sizes[self.sizes.len() - 1]
    }

    fn wanted(&self, request: PageSizeRequest) -> PageSize {
        let PageSizeRequest::Size(asked, _) = request else { return self.base() };
        let at_most = self.sizes.iter().rev().find(|size| **size <= asked);
        at_most.copied().unwrap_or(self.base())
    }

    /// Returns the large page size that the process uses most, if it has at least `large_pages_min`
    /// such pages.
    fn most_common(&self, space: &AddressSpace) -> Option<PageSize> {
        let large = self.sizes[1..]
            .iter()
            .map(|size| (space.page_counts.get(size).copied().unwrap_or(0), *size));
        large.filter(|(count, _)| *count >= self.large_pages_min).max().map(|(_, size)| size)
    }

    /// Reads the hardware's counts and reuses the allocation of `reading`.
    fn read(&self, hw: &CachedMmu, at_ns: u64, mut reading: Reading) -> Reading {
        reading.misses.clear();
        reading.misses.extend(self.sizes.iter().map(|size| hw.misses(*size)));
        let tsb_misses = match hw.refill() {
            Refill::Software(refill) => refill.tsb_misses(),
            Refill::Hardware { .. } => 0,
        };
        Reading { at_ns, tsb_misses, instruction_misses: hw.instruction_misses(), ..reading }
    }
}

impl Flavor for Solaris {
    /// Drops the report's background rates for any job except its own: they do not apply to others.
    fn prepare(&mut self, plan: &Plan) {
        if plan.job.name != PUBLISHED_JOB {
            self.background = None;
        }
    }

    fn place(&mut self, _space: SpaceId, id: RegionId, region: &Region) -> Placed {
        if let Some(placed) = self.placed.get(&id) {
            return *placed;
        }
        let page = self.wanted(region.page_size);
        let is_heap = !self.has_heap && region.name == "heap";
        let placed = if is_heap {
            self.has_heap = true;
            // The break moves to the end of a large page.
            let end = (HEAP + region.bytes).next_multiple_of(page.bytes());
            Placed { base: HEAP, bytes: end - HEAP, page }
        } else {
            let bytes = region.bytes.next_multiple_of(page.bytes());
            self.mappings_start = (self.mappings_start - bytes) & !(page.bytes() - 1);
            Placed { base: self.mappings_start, bytes, page }
        };
        self.placed.insert(id, placed);
        placed
    }

    fn advised(&self, advice: Advice) -> Option<PageSize> {
        match advice {
            Advice::Hugepage => Some(self.largest()),
            Advice::Nohugepage => Some(self.base()),
            _ => None,
        }
    }

    fn pages_changed(
        &mut self,
        hw: &mut CachedMmu,
        cx: &mut Cx<'_>,
        memory: &AnonMemory,
        space: SpaceId,
    ) {
        let wanted = self.most_common(memory.space(space));
        if self.programmed.get(&space).copied() != wanted {
            hw.program(space, wanted);
            match wanted {
                Some(size) => self.programmed.insert(space, size),
                None => self.programmed.remove(&space),
            };
        }
        let steady_from = std::mem::take(&mut self.steady_from);
        self.steady_from = self.read(hw, cx.now(), steady_from);
    }

    fn ending(&mut self, hw: &CachedMmu, cx: &Cx<'_>, memory: &AnonMemory, space: SpaceId) {
        if space == SpaceId(0) {
            self.ended = Some(self.read(hw, cx.now(), Reading::default()));
            let listing = self.background.is_some();
            self.pmap = Some(solaris_tools::pmap(memory.space(space), &self.placed, listing));
        }
    }

    fn limit(&self, region: &Region) -> Option<Unmet> {
        let room = MAPPINGS_END / 4 * 3;
        (region.bytes > room).then(|| Unmet {
            what: format!(
                "region `{}` has {}: more than a 32-bit process can map",
                region.name,
                Bytes(region.bytes)
            ),
            remedy: format!("make it smaller than {}", Bytes(room)),
            fatal: true,
        })
    }

    fn kernel_report(&self, hw: &CachedMmu, memory: &AnonMemory) -> KernelReport {
        let Some(end) = &self.ended else { return KernelReport::default() };
        let nothing = Reading { misses: vec![0; self.sizes.len()], ..Reading::default() };
        let start = match &self.steady_from {
            steady if steady.at_ns < end.at_ns && !steady.misses.is_empty() => steady,
            _ => &nothing,
        };
        let handler_ps = match hw.refill() {
            Refill::Software(refill) => refill.handler_ps(),
            Refill::Hardware { .. } => 0,
        };
        let misses = end.misses.iter().zip(&start.misses).map(|(end, start)| end - start);
        let interval = Interval {
            elapsed_ns: end.at_ns - start.at_ns,
            handler_ps,
            data_misses: self.sizes.iter().copied().zip(misses).collect(),
            instruction_misses: end.instruction_misses - start.instruction_misses,
            tsb_misses: end.tsb_misses - start.tsb_misses,
        };
        let mut tables = solaris_tools::trapstat(&interval, self.background.as_ref());
        tables.extend(self.pmap.clone());
        let mut warnings: Vec<_> = self.background.iter().map(Background::warning).collect();
        if memory.fallback_count > 0 {
            warnings.push(Warning {
                id: "page_size_fallback".into(),
                text: format!(
                    "{} pages are smaller than asked for: memory is fragmented ({} pages were relocated)",
                    memory.fallback_count, memory.relocated_pages
                ),
                remedy: "enable the kernel cage (paging.kernel_cage), or leave more memory free".into(),
            });
        }
        KernelReport { tables, memory: Vec::new(), warnings }
    }
}
