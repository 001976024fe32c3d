//! Physical memory as a buddy system: free blocks of powers of two of frames.
//!
//! Invariant: every frame is in exactly one block, free or held, and free buddies are merged. A
//! held block knows its owner, so that it can be relocated; the kernel's blocks cannot. Sources:
//! Knowlton 1965; for relocation and the kernel cage, McDougall, 'Taming Your Emu' (Sun BluePrints,
//! 2004).

use std::collections::{BTreeMap, BTreeSet};

/// The number of a page frame.
pub type FrameNumber = u64;

/// The holder of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The block can be relocated; the value is the owner's own key for it.
    Movable(u64),
    /// The block cannot be relocated.
    Pinned,
}

/// A held block of `2^order` frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AllocatedBlock {
    order: u32,
    owner: Owner,
}

/// A relocation of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// First frame of the block before the move.
    pub from: FrameNumber,
    /// First frame of the block after the move.
    pub to: FrameNumber,
    /// Order of the block, of `2^order` frames.
    pub order: u32,
    /// The owner's key for the block, from [`Owner::Movable`].
    pub owner: u64,
}

/// Physical memory, split into free and held blocks.
#[derive(Debug, Clone)]
pub struct Buddy {
    frames: u64,
    /// The first frames of free blocks, by order.
    free: Vec<BTreeSet<FrameNumber>>,
    held: BTreeMap<FrameNumber, AllocatedBlock>,
    free_frames: u64,
    /// True by order if no block can be cleared until a block is freed.
    hopeless: Vec<bool>,
}

impl Buddy {
    /// Returns free memory with blocks of up to `2^order_max` frames. Frames beyond the last whole
    /// block are not used.
    pub fn new(frames: u64, order_max: u32) -> Self {
        let mut free = vec![BTreeSet::new(); order_max as usize + 1];
        free[order_max as usize] = (0..frames >> order_max).map(|n| n << order_max).collect();
        let frames = (frames >> order_max) << order_max;
        let hopeless = vec![false; free.len()];
        Buddy { frames, free, held: BTreeMap::new(), free_frames: frames, hopeless }
    }

    /// Returns the number of frames, free or held.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Returns the number of free frames.
    pub fn free_frames(&self) -> u64 {
        self.free_frames
    }

    /// Allocates `2^order` frames: the lowest of the smallest free blocks that fit. Returns None if
    /// none fits.
    pub fn allocate(&mut self, order: u32, owner: Owner) -> Option<FrameNumber> {
        let from = (order as usize..self.free.len()).find(|o| !self.free[*o].is_empty())?;
        let frame = self.free[from].pop_first()?;
        self.split(frame, from as u32, order);
        self.hold(frame, order, owner);
        Some(frame)
    }

    /// Allocates the block of `2^order` frames at `frame`. Returns false if not all of it is free.
    pub fn allocate_at(&mut self, frame: FrameNumber, order: u32, owner: Owner) -> bool {
        let holds = |o: &usize| self.free[*o].contains(&(frame >> *o << *o));
        let Some(from) = (order as usize..self.free.len()).find(holds) else { return false };
        let start = frame >> from << from;
        self.free[from].remove(&start);
        let (mut start, mut size) = (start, from as u32);
        while size > order {
            size -= 1;
            let upper = start + (1 << size);
            let (kept, freed) = if frame >= upper { (upper, start) } else { (start, upper) };
            self.free[size as usize].insert(freed);
            start = kept;
        }
        self.hold(frame, order, owner);
        true
    }

    /// Frees the upper halves of a block until `2^to` frames are left.
    fn split(&mut self, frame: FrameNumber, from: u32, to: u32) {
        (to..from).rev().for_each(|o| {
            self.free[o as usize].insert(frame + (1 << o));
        });
    }

    fn hold(&mut self, frame: FrameNumber, order: u32, owner: Owner) {
        self.held.insert(frame, AllocatedBlock { order, owner });
        self.free_frames -= 1 << order;
    }

    /// Frees the block that begins at `frame`.
    ///
    /// # Panics
    /// Panics if no held block begins there, because the caller's records are then wrong.
    pub fn free(&mut self, frame: FrameNumber) {
        let AllocatedBlock { mut order, .. } =
            self.held.remove(&frame).expect("only held blocks are freed");
        self.free_frames += 1 << order;
        self.hopeless.fill(false);
        let mut frame = frame;
        while order as usize + 1 < self.free.len() {
            let buddy = frame ^ (1 << order);
            if !self.free[order as usize].remove(&buddy) {
                break;
            }
            frame = frame.min(buddy);
            order += 1;
        }
        self.free[order as usize].insert(frame);
    }

    /// Changes the owner of a held block.
    pub fn set_owner(&mut self, frame: FrameNumber, owner: Owner) {
        if let Some(held) = self.held.get_mut(&frame) {
            held.owner = owner;
        }
    }

    /// Makes a free block of `2^order` frames by relocation. It clears the aligned block that holds
    /// the fewest frames and nothing pinned. Returns the moves, or None if there is no such block
    /// or no room elsewhere.
    pub fn relocate(&mut self, order: u32) -> Option<Vec<Move>> {
        if self.hopeless[order as usize] {
            return None;
        }
        let moves = self.clear(order);
        self.hopeless[order as usize] = moves.is_none();
        moves
    }

    fn clear(&mut self, order: u32) -> Option<Vec<Move>> {
        let start = self.cheapest_to_clear(order)?;
        let end = start + (1 << order);
        let blocks: Vec<_> = self.held.range(start..end).map(|(f, held)| (*f, *held)).collect();
        let mut free_inside = Vec::new();
        // Free blocks inside must not become the new places.
        for list in &mut self.free {
            let inside: Vec<_> = list.range(start..end).copied().collect();
            list.retain(|frame| !(start..end).contains(frame));
            free_inside.push(inside);
        }
        let mut moves = Vec::new();
        for (from, held) in blocks {
            let Owner::Movable(owner) = held.owner else { break };
            let Some(to) = self.allocate(held.order, held.owner) else { break };
            moves.push(Move { from, to, order: held.order, owner });
        }
        let complete = moves.len() == self.held.range(start..end).count();
        for (list, inside) in self.free.iter_mut().zip(free_inside) {
            list.extend(inside);
        }
        // On success the old places become free, otherwise the new ones.
        moves.iter().for_each(|m| self.free(if complete { m.from } else { m.to }));
        complete.then_some(moves)
    }

    /// Returns the aligned block of this order with the fewest held frames, without a pinned block
    /// in it. Of equals, it returns the lowest.
    fn cheapest_to_clear(&self, order: u32) -> Option<FrameNumber> {
        let mut held: BTreeMap<u64, Option<u64>> = BTreeMap::new();
        for (frame, block) in &self.held {
            let sum = held.entry(frame >> order).or_insert(Some(0));
            let larger = block.order >= order;
            *sum = match (block.owner, *sum) {
                (Owner::Movable(_), Some(sum)) if !larger => Some(sum + (1 << block.order)),
                _ => None,
            };
        }
        let clearable = held.iter().filter_map(|(block, frames)| Some(((*frames)?, *block)));
        clearable.min().map(|(_, block)| block << order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns true if each frame is in exactly one block, free or held, and free buddies are
    /// merged.
    fn is_sound(buddy: &Buddy) -> bool {
        let mut covered = vec![0; buddy.frames as usize];
        let mut cover = |frame: FrameNumber, order: u32| {
            (frame..frame + (1 << order)).for_each(|f| covered[f as usize] += 1);
        };
        for (order, list) in buddy.free.iter().enumerate() {
            for frame in list {
                cover(*frame, order as u32);
                let mergeable = order + 1 < buddy.free.len();
                if mergeable && list.contains(&(frame ^ (1 << order))) {
                    return false;
                }
            }
        }
        buddy.held.iter().for_each(|(frame, held)| cover(*frame, held.order));
        let free: u64 = buddy.free.iter().enumerate().map(|(o, l)| (l.len() as u64) << o).sum();
        covered.iter().all(|n| *n == 1) && free == buddy.free_frames
    }

    proptest! {
        #[test]
        fn no_frame_is_both_free_and_held(
            steps in proptest::collection::vec((0u32..5, 0u8..10, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut buddy = Buddy::new(70, 4);
            let mut blocks: BTreeMap<u64, FrameNumber> = BTreeMap::new();
            for (id, (order, kind, pick)) in steps.into_iter().enumerate() {
                let id = id as u64;
                match kind {
                    0..5 => {
                        let owner = if id.is_multiple_of(5) { Owner::Pinned } else { Owner::Movable(id) };
                        if let Some(frame) = buddy.allocate(order, owner) {
                            prop_assert_eq!(frame % (1 << order), 0);
                            blocks.insert(id, frame);
                        }
                    }
                    5..8 if !blocks.is_empty() => {
                        let id = *pick.get(&blocks.keys().copied().collect::<Vec<_>>());
                        buddy.free(blocks.remove(&id).unwrap());
                    }
                    8 => {
                        let frame = (pick.index(64) as u64) >> order << order;
                        if buddy.allocate_at(frame, order, Owner::Movable(id)) {
                            blocks.insert(id, frame);
                        }
                    }
                    _ => {
                        for m in buddy.relocate(order).unwrap_or_default() {
                            prop_assert_eq!(blocks.insert(m.owner, m.to), Some(m.from));
                        }
                    }
                }
                prop_assert!(is_sound(&buddy));
                prop_assert!(blocks.values().all(|frame| buddy.held.contains_key(frame)));
            }
        }
    }

    #[test]
    fn relocation_makes_room_unless_something_is_pinned() {
        let mut buddy = Buddy::new(32, 4);
        assert!(buddy.allocate_at(3, 0, Owner::Movable(7)));
        assert!(buddy.allocate_at(20, 0, Owner::Pinned));
        assert_eq!(buddy.allocate(4, Owner::Pinned), None);
        let moves = buddy.relocate(4).unwrap();
        assert_eq!((moves.len(), moves[0].from, moves[0].owner), (1, 3, 7));
        assert!(moves[0].to >= 16);
        assert_eq!(buddy.allocate(4, Owner::Movable(8)), Some(0));
        assert_eq!(
            buddy.relocate(4),
            None,
            "one block is held whole, the other has a pinned frame"
        );
    }
}
