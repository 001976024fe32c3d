//! Facts that follow from a plan alone: sizes, locks, the order of first uses, and classes of accesses.
//!
//! Invariant: no machine derives such a fact by itself. Preflights, runs and budgets of all machines read it
//! here, so they cannot disagree.

use super::{
    Access, Advice, Backing, ClientKind, Op, Pattern, Phase, Plan, Region, RegionId, Touch,
};
use crate::page_size::PageSizeRequest;
use crate::units::Bytes;
use std::collections::BTreeMap;

/// The accesses of one kind over one working set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessClass {
    /// The order of the accesses.
    pub kind: AccessKind,
    /// The memory that they range over, in bytes.
    pub working_set_bytes: u64,
    /// The number of accesses in the class.
    pub count: u64,
}

/// An order of addresses, as far as it affects page walks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    /// Page after page in order. Caches and prefetchers hide most of the walks.
    Sweep,
    /// Random, with some pages far more often than others. The cost is between 0 and that of uniform.
    Skewed,
    /// Uniformly random; addresses do not depend on earlier loads.
    Independent,
    /// Uniformly random; each address is the result of the previous load.
    Dependent,
}

impl Plan {
    /// Returns all operations, in the order of the phases.
    pub fn ops(&self) -> impl Iterator<Item = &Op> {
        self.phases.iter().flat_map(|phase| &phase.ops)
    }

    /// Returns all advice: that of regions, then that of operations.
    pub fn advice(&self) -> impl Iterator<Item = Advice> {
        let of_ops = self.ops().filter_map(|op| match op {
            Op::Advise { advice, .. } => Some(*advice),
            _ => None,
        });
        self.regions.iter().flat_map(|region| region.advice.iter().copied()).chain(of_ops)
    }

    /// Returns true if some operation replays a recording.
    pub fn has_replay(&self) -> bool {
        self.ops().any(|op| matches!(op, Op::Replay(_)))
    }

    /// Returns the first region of network memory.
    pub fn network_region(&self) -> Option<&Region> {
        self.regions.iter().find(|region| region.backing.is_remote())
    }

    /// Returns true if some operation compares memory with the pattern.
    pub fn has_verification(&self) -> bool {
        self.ops().any(
            |op| matches!(op, Op::Touch(t) if matches!(t.access, Access::Verify | Access::Rewrite)),
        )
    }

    /// Returns true if a region or an operation asks for huge pages.
    pub fn asks_for_huge_pages(&self) -> bool {
        let has_size = |region: &Region| matches!(region.page_size, PageSizeRequest::Size(..));
        self.regions.iter().any(has_size)
            || self.advice().any(|advice| matches!(advice, Advice::Hugepage | Advice::Collapse))
    }

    /// Returns true if the file behind a region holds the pattern before the job begins: if its first use
    /// reads it.
    pub fn is_file_filled(&self, id: RegionId) -> bool {
        let mut uses = self.ops().filter_map(|op| match op {
            Op::Touch(t) if t.region == id => {
                Some(t.access != Access::Write && t.pattern != Pattern::PointerChase)
            }
            Op::Lock { region, .. } if *region == id => Some(true),
            Op::Advise { region, advice: Advice::Willneed | Advice::PopulateRead }
                if *region == id =>
            {
                Some(true)
            }
            _ => None,
        });
        matches!(self.region(id).backing, Backing::File { .. }) && uses.next().unwrap_or(false)
    }

    /// Returns true if a region must be writable. Memory always is. A file is only if the job writes to it:
    /// locking a writable private file copies all of it.
    pub fn is_written(&self, id: RegionId) -> bool {
        let writes = |op: &Op| match op {
            Op::Touch(t) => {
                t.region == id && (t.access.writes() || t.pattern == Pattern::PointerChase)
            }
            Op::Advise { region, advice } => *region == id && *advice == Advice::PopulateWrite,
            _ => false,
        };
        let region = self.region(id);
        !matches!(region.backing, Backing::File { .. })
            || region.advice.contains(&Advice::PopulateWrite)
            || (id.0 == 0 && self.native.flip_byte_at.is_some())
            || self.ops().any(writes)
    }

    /// Returns the most bytes that are mapped at one time, following the operations in order.
    pub fn mapped_bytes_max(&self) -> Bytes {
        let mut now: u64 = self.regions.iter().filter(|r| r.mapped_at_start).map(|r| r.bytes).sum();
        let mut max = now;
        for op in self.ops() {
            match op {
                Op::Map(id) => now = now.saturating_add(self.region(*id).bytes),
                Op::Unmap(id) => now = now.saturating_sub(self.region(*id).bytes),
                _ => {}
            }
            max = max.max(now);
        }
        Bytes(max)
    }

    /// Returns the most memory that the plan may hold at once, with the copies of all clients, without files
    /// and page stores.
    pub fn memory_bytes_max(&self) -> Bytes {
        let held = |region: &Region| match region.backing {
            Backing::File { private: false, .. } => 0,
            Backing::Remote { resident_bytes, .. } => resident_bytes.min(region.bytes),
            _ => region.bytes,
        };
        let elsewhere: u64 = self.regions.iter().map(|region| region.bytes - held(region)).sum();
        let copies = self.phases.iter().map(|phase| {
            let more = u64::from(phase.clients.saturating_sub(1));
            let mut copied: BTreeMap<usize, u64> = BTreeMap::new();
            for op in &phase.ops {
                let id = match op {
                    Op::Map(id) if phase.client_kind != ClientKind::Main => *id,
                    Op::Touch(touch)
                        if touch.access.writes() && phase.client_kind == ClientKind::Processes =>
                    {
                        touch.region
                    }
                    _ => continue,
                };
                if !matches!(self.region(id).backing, Backing::Shared | Backing::Memfd) {
                    copied.insert(id.0, held(self.region(id)));
                }
            }
            copied.values().sum::<u64>().saturating_mul(more)
        });
        let own = self.mapped_bytes_max().0.saturating_sub(elsewhere);
        Bytes(own.saturating_add(copies.max().unwrap_or(0)))
    }

    /// Returns the most bytes that one process locks at one time.
    pub fn locked_bytes_max(&self) -> Bytes {
        let (mut locked, mut max) = (BTreeMap::new(), 0);
        for op in self.ops() {
            match op {
                Op::Lock { region, .. } => {
                    locked.insert(region.0, self.region(*region).bytes);
                }
                Op::Unlock(id) | Op::Unmap(id) => {
                    locked.remove(&id.0);
                }
                _ => {}
            }
            max = max.max(locked.values().sum());
        }
        Bytes(max)
    }

    /// Returns the most bytes that all processes together lock at one time.
    pub fn locked_bytes_of_clients(&self) -> Bytes {
        let locks = |phase: &&Phase| phase.ops.iter().any(|op| matches!(op, Op::Lock { .. }));
        let processes = |phase: &Phase| match phase.client_kind {
            ClientKind::Processes => u64::from(phase.clients.max(1)),
            ClientKind::Main | ClientKind::Threads => 1,
        };
        let processes = self.phases.iter().filter(locks).map(processes).max().unwrap_or(0);
        Bytes(self.locked_bytes_max().0.saturating_mul(processes))
    }

    /// Returns the accesses to base pages by class. `access_count` is the number of accesses that really
    /// happened, for phases that end by the clock.
    pub fn access_classes(
        &self,
        base_page_bytes: u64,
        access_count: Option<u64>,
    ) -> Vec<AccessClass> {
        let mut planned = 0u64;
        let mut classes = Vec::new();
        for phase in &self.phases {
            for op in &phase.ops {
                let Op::Touch(touch) = op else { continue };
                let Some(region) = self.regions.get(touch.region.0) else { continue };
                let times = phase.repeat.saturating_mul(u64::from(phase.clients));
                let count = times.saturating_mul(touch.count);
                planned = planned.saturating_add(count);
                classes.extend(class_of(touch, region, count, base_page_bytes));
            }
        }
        if let Some(real) = access_count
            && planned > 0
        {
            for class in &mut classes {
                class.count = (u128::from(class.count) * u128::from(real) / u128::from(planned))
                    .min(u64::MAX.into()) as u64;
            }
        }
        classes
    }
}

/// Returns the class of a touch; `None` if the plan asks for huge pages there.
fn class_of(
    touch: &Touch,
    region: &Region,
    count: u64,
    base_page_bytes: u64,
) -> Option<AccessClass> {
    if let PageSizeRequest::Size(size, _) = region.page_size
        && size.bytes() >= 2 << 20
    {
        return None;
    }
    let (kind, count) = match touch.pattern {
        Pattern::Strided { stride_bytes } => {
            let pages = u128::from(count) * u128::from(stride_bytes.min(base_page_bytes))
                / u128::from(base_page_bytes.max(1));
            (AccessKind::Sweep, pages.min(u64::MAX.into()) as u64)
        }
        Pattern::Uniform => (AccessKind::Independent, count),
        Pattern::Zipf { .. } => (AccessKind::Skewed, count),
        Pattern::PointerChase => (AccessKind::Dependent, count),
    };
    Some(AccessClass { kind, working_set_bytes: region.bytes, count })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{JobIdentity, Measure, Native};
    use crate::units::PageSize;

    const SET: u64 = 64 << 20;

    #[test]
    fn accesses_are_classed_by_order_and_working_set() {
        let region = |page_size| Region {
            name: "heap".into(),
            backing: Backing::Anon,
            bytes: SET,
            page_size,
            advice: vec![],
            mapped_at_start: true,
            place: None,
        };
        let touch = |region, pattern| {
            Op::Touch(Touch {
                region: RegionId(region),
                access: Access::Read,
                pattern,
                count: 1_000,
                grain_bytes: 8,
                seed: 1,
            })
        };
        let phase = Phase {
            name: "work".into(),
            client_kind: ClientKind::Processes,
            clients: 3,
            repeat: 2,
            time: None,
            rate: None,
            parent_wake: None,
            ops: vec![
                touch(0, Pattern::Uniform),
                touch(0, Pattern::Strided { stride_bytes: 1024 }),
                touch(1, Pattern::PointerChase),
            ],
        };
        let plan = Plan {
            job: JobIdentity {
                name: "j".into(),
                params: Default::default(),
                machine_params: Default::default(),
                seed: 1,
            },
            regions: vec![
                region(PageSizeRequest::Default),
                region(PageSizeRequest::preferred(PageSize::M2)),
            ],
            phases: vec![phase],
            measure: Measure { interval: None, fault_latency: false },
            native: Native::default(),
        };
        let class = |kind, count| AccessClass { kind, working_set_bytes: SET, count };
        assert_eq!(
            plan.access_classes(4096, None),
            vec![class(AccessKind::Independent, 6_000), class(AccessKind::Sweep, 1_500)]
        );
        assert_eq!(
            plan.access_classes(4096, Some(9_000)),
            vec![class(AccessKind::Independent, 3_000), class(AccessKind::Sweep, 750)]
        );
    }
}
