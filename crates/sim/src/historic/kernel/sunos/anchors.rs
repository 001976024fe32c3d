//! Pages that a process needs besides its regions: its text, its stack, and the library code that
//! it sleeps in.

use super::SunOs;
use crate::hardware::SpaceId;
use crate::hardware::sun4::Sun4;
use crate::historic::cx::Cx;

/// The number of rounds after which a process whose pmegs steal each other gives up; it faults
/// again later.
pub(super) const ANCHOR_ROUNDS: usize = 4;

impl SunOs {
    /// Returns segment and entry of the page of text that a process runs, and of the page of its
    /// stack.
    pub(super) fn anchors(mmu: &Sun4) -> [(usize, u32); 2] {
        let geometry = mmu.geometry();
        [(0, 0), (geometry.segments - 1, geometry.ptes - 1)]
    }

    /// Loads the entry of a page outside the process's regions, with a fault if it is invalid.
    pub(super) fn load_own(
        &mut self,
        hw: &mut Sun4,
        cx: &mut Cx<'_>,
        space: SpaceId,
        at: (usize, u32),
    ) {
        let (segment, entry) = at;
        if hw.is_valid(space, segment, entry) && hw.has_region(space, segment) {
            return;
        }
        let pmeg = self.pmeg(hw, cx, space, segment);
        if hw.pmegs()[pmeg].valid >> entry & 1 == 0 {
            hw.load(pmeg, 1 << entry, 0);
            self.charge_faults(cx, 1);
        }
    }

    /// Loads the text and the stack, which a process needs whenever it has the CPU. Returns true if
    /// both were loaded already.
    #[inline]
    pub(super) fn load_anchors(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId) -> bool {
        let version = Some(hw.version(space));
        if self.processes[space.0].anchored_at == version {
            return true;
        }
        let anchors = Self::anchors(hw);
        let is_loaded =
            |(segment, entry)| hw.is_valid(space, segment, entry) && hw.has_region(space, segment);
        let all = anchors.into_iter().all(is_loaded);
        if all {
            self.processes[space.0].anchored_at = version;
        } else {
            self.fight_for(hw, cx, space, anchors);
        }
        all
    }

    /// Loads both pages in rounds, because each may steal the other's pmeg.
    pub(super) fn fight_for(
        &mut self,
        hw: &mut Sun4,
        cx: &mut Cx<'_>,
        space: SpaceId,
        anchors: [(usize, u32); 2],
    ) {
        for _ in 0..ANCHOR_ROUNDS {
            for at in anchors {
                self.load_own(hw, cx, space, at);
            }
            let stolen = |(segment, entry)| !hw.is_valid(space, segment, entry);
            if !anchors.into_iter().any(stolen) {
                return;
            }
        }
    }

    /// Loads the library code that a process sleeps in while it waits for children.
    pub(super) fn load_libc(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId) {
        let stack = hw.geometry().segments - 1;
        for segment in stack - self.config.image.libc_segments..stack {
            self.load_own(hw, cx, space, (segment, 0));
        }
    }
}
