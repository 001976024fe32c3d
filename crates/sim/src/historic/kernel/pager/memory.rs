//! The client's memory as a cache of pages that live on servers: frames, victims, replicas.
//!
//! A page arrives as zeros, or from the server that holds its replica. If memory is full, a victim
//! is evicted; a dirty victim is paged out first. Invariants: a frame is free, evictable or pinned,
//! and holds at most one page. The data of a page that was ever written are in a frame, on a
//! server, or both.

use crate::historic::kernel::replacement::{EvictionOrder, FrameIndex, ReplacementPolicy};
use crate::historic::store::network::{Network, NetworkModel, Server, ServersFull, jitter_ns};
use pagetax_core::access::Rng;

/// Constants of the client. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryModel {
    /// The size of a page, in bytes.
    pub page_bytes: u64,
    /// Pages of the job that fit in the client's memory; at least 1.
    pub resident_pages_max: u32,
    /// The policy that selects victims.
    pub replacement: ReplacementPolicy,
    /// Minimum time of a zero-fill.
    pub zero_fill_ns_min: u64,
    /// Mean of the jitter that is added to `zero_fill_ns_min`.
    pub zero_fill_jitter_ns_mean: u64,
    /// The memory servers and the network to them.
    pub network: NetworkModel,
}

/// The source of a page's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The page is new and zero-filled.
    Zeros,
    /// A server held the page's replica.
    Server,
}

/// The cost of bringing in a page. The times are disjoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The source of the page's data.
    pub origin: Origin,
    /// CPU time of zero-filling the page, or of spinning for it.
    pub service_ns: u64,
    /// Time asleep until the page arrived.
    pub sleep_ns: u64,
    /// True if another page was evicted to make room.
    pub evicted: bool,
    /// Time of the victim's page-out, or None if the victim was clean or there was none.
    pub page_out_ns: Option<u64>,
    /// Time of the search for servers, before the first page-out.
    pub discovery_ns: u64,
}

/// The reasons why a page cannot be brought in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// A dirty victim has to be paged out, but all servers are full.
    #[error("page-out: {0}")]
    ServersFull(#[from] ServersFull),
    /// Every page in memory is locked; the field is the number of pages.
    #[error("all {0} pages of memory are locked, so none can make room")]
    AllLocked(u32),
}

impl MemoryError {
    /// Returns a hint for the user.
    pub fn remedy(&self) -> &'static str {
        match self {
            MemoryError::ServersFull(_) => {
                "make the job smaller, or give the machine more or larger servers"
            }
            MemoryError::AllLocked(_) => "lock less at one time",
        }
    }
}

/// A page's number, from [`ClientMemory::add`].
pub type PageNumber = u32;

/// The hardware's translations by frame.
pub trait Translations {
    /// Reads and clears the referenced bits of a frame. Returns true if one was set.
    fn take_referenced(&mut self, frame: FrameIndex) -> bool;

    /// Removes all translations of a frame. Returns true if the frame was written through any of
    /// them.
    fn unload(&mut self, frame: FrameIndex) -> bool;
}

#[derive(Debug, Clone, Copy, Default)]
struct PageState {
    frame: Option<FrameIndex>,
    copy: Option<Server>,
    /// True if the page is known to be written since it was brought in. The hardware's dirty bits
    /// may know more.
    dirty: bool,
    pins: u16,
}

/// The pages, frames and servers of one client.
#[derive(Debug, Clone)]
pub struct ClientMemory {
    model: MemoryModel,
    network: Network,
    replacement: EvictionOrder,
    pages: Vec<PageState>,
    unused_pages: Vec<PageNumber>,
    /// The page in each frame. Frames are first used in order.
    frames: Vec<PageNumber>,
    free: Vec<FrameIndex>,
    /// The number of frames that may be in use at the same time.
    frames_max: u64,
}

impl ClientMemory {
    /// Returns an empty memory. The model of its network must have passed [`NetworkModel::check`].
    pub fn new(model: MemoryModel) -> Self {
        ClientMemory {
            network: Network::new(model.network.clone(), model.page_bytes),
            replacement: EvictionOrder::new(model.replacement),
            pages: Vec::new(),
            unused_pages: Vec::new(),
            frames: Vec::new(),
            free: Vec::new(),
            frames_max: u64::from(model.resident_pages_max),
            model,
        }
    }

    /// Adds a page of zeros that is not resident, and returns its number.
    pub fn add(&mut self) -> PageNumber {
        self.unused_pages.pop().unwrap_or_else(|| {
            self.pages.push(PageState::default());
            self.pages.len() as PageNumber - 1
        })
    }

    /// Frees a page with its frame and its replica. The caller must have removed its translations.
    pub fn remove(&mut self, page: PageNumber) {
        let state = std::mem::take(&mut self.pages[page as usize]);
        if let Some(frame) = state.frame {
            if state.pins == 0 {
                self.replacement.remove(frame);
            }
            self.free.push(frame);
        }
        if let Some(server) = state.copy {
            self.network.release(server);
        }
        self.unused_pages.push(page);
    }

    /// Returns the frame of a page, or None if the page is not resident.
    pub fn frame(&self, page: PageNumber) -> Option<FrameIndex> {
        self.pages[page as usize].frame
    }

    /// Marks a page dirty, in addition to the hardware's dirty bits.
    pub fn mark_dirty(&mut self, page: PageNumber) {
        self.pages[page as usize].dirty = true;
    }

    /// Pins a resident page. Each pin needs one [`ClientMemory::unpin`].
    pub fn pin(&mut self, page: PageNumber) {
        let state = &mut self.pages[page as usize];
        let frame = state.frame.expect("only resident pages are pinned");
        if state.pins == 0 {
            self.replacement.remove(frame);
        }
        state.pins += 1;
    }

    /// Removes one pin; after the last, the page is evictable again.
    pub fn unpin(&mut self, page: PageNumber) {
        let state = &mut self.pages[page as usize];
        let frame = state.frame.expect("pinned pages are resident");
        state.pins -= 1;
        if state.pins == 0 {
            self.replacement.insert(frame);
        }
    }

    /// Returns the number of resident pages.
    pub fn resident_pages(&self) -> u64 {
        (self.frames.len() - self.free.len()) as u64
    }

    /// Returns each server's stored pages and its capacity in pages.
    pub fn server_pages(&self) -> Vec<(u64, u64)> {
        self.network.pages()
    }

    /// Brings in a page that is not resident. `rng` decides jitter, losses and random victims.
    ///
    /// # Errors
    /// Returns an error if all pages are pinned, or if a dirty victim finds no room on a server.
    pub fn bring_in(
        &mut self,
        page: PageNumber,
        translations: &mut impl Translations,
        rng: &mut Rng,
    ) -> Result<Arrival, MemoryError> {
        let mut arrival = Arrival {
            origin: Origin::Zeros,
            service_ns: 0,
            sleep_ns: 0,
            evicted: false,
            page_out_ns: None,
            discovery_ns: 0,
        };
        let frame = match self.unused_frame(page) {
            Some(frame) => frame,
            None => self.reclaim(page, translations, rng, &mut arrival)?,
        };
        self.pages[page as usize].frame = Some(frame);
        self.replacement.insert(frame);
        if self.pages[page as usize].copy.is_some() {
            let page_in = self.network.page_in(rng);
            arrival.origin = Origin::Server;
            (arrival.service_ns, arrival.sleep_ns) = (page_in.spin_ns, page_in.sleep_ns);
        } else {
            let jitter_ns = jitter_ns(rng, self.model.zero_fill_jitter_ns_mean);
            arrival.service_ns = self.model.zero_fill_ns_min + jitter_ns;
        }
        Ok(arrival)
    }

    /// Limits resident pages to `pages`, at least 1 and at most the model's maximum. Pages that are
    /// already resident stay until other pages need their frames.
    pub fn limit(&mut self, pages: u64) {
        self.frames_max = pages.clamp(1, u64::from(self.model.resident_pages_max));
    }

    fn unused_frame(&mut self, page: PageNumber) -> Option<FrameIndex> {
        if self.resident_pages() >= self.frames_max {
            return None;
        }
        if let Some(frame) = self.free.pop() {
            self.frames[frame as usize] = page;
            return Some(frame);
        }
        let room = self.frames.len() < self.model.resident_pages_max as usize;
        room.then(|| {
            self.frames.push(page);
            self.frames.len() as FrameIndex - 1
        })
    }

    /// Evicts a victim and returns its frame. A dirty victim is paged out first.
    fn reclaim(
        &mut self,
        page: PageNumber,
        translations: &mut impl Translations,
        rng: &mut Rng,
        arrival: &mut Arrival,
    ) -> Result<FrameIndex, MemoryError> {
        let frame = self
            .replacement
            .victim(rng, |frame| translations.take_referenced(frame))
            .ok_or(MemoryError::AllLocked(self.model.resident_pages_max))?;
        let victim = std::mem::replace(&mut self.frames[frame as usize], page);
        let state = &mut self.pages[victim as usize];
        state.frame = None;
        arrival.evicted = true;
        if translations.unload(frame) | std::mem::take(&mut state.dirty) {
            arrival.discovery_ns = self.network.discover_ns();
            if state.copy.is_none() {
                state.copy = Some(self.network.place()?);
            }
            arrival.page_out_ns = Some(self.network.page_out_ns(rng));
        }
        Ok(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::historic::kernel::replacement::tests::any_policy;
    use crate::historic::store::network::tests::model as network;
    use pagetax_core::access::Rng;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::ops::Range;

    const PAGE: u64 = 8192;

    fn bring_in(
        memory: &mut ClientMemory,
        page: PageNumber,
        hw: &mut Written,
    ) -> Result<Arrival, MemoryError> {
        let mut rng = Rng::new(page.into());
        memory.bring_in(page, hw, &mut rng)
    }

    /// Hardware that records the frames that were written.
    #[derive(Default)]
    struct Written(BTreeSet<FrameIndex>);

    impl Translations for Written {
        fn take_referenced(&mut self, _: FrameIndex) -> bool {
            false
        }

        fn unload(&mut self, frame: FrameIndex) -> bool {
            self.0.remove(&frame)
        }
    }

    fn memory(
        resident_pages_max: u32,
        server_pages: u64,
        replacement: ReplacementPolicy,
    ) -> ClientMemory {
        let model = MemoryModel {
            page_bytes: PAGE,
            resident_pages_max,
            replacement,
            zero_fill_ns_min: 30_000,
            zero_fill_jitter_ns_mean: 20_000,
            network: network(&[server_pages * PAGE]),
        };
        ClientMemory::new(model)
    }

    /// Touches each page. Returns the origin of each page that arrived, and true if its victim was
    /// paged out.
    fn sweep(
        memory: &mut ClientMemory,
        hw: &mut Written,
        pages: Range<PageNumber>,
        write: bool,
    ) -> Vec<(Origin, bool)> {
        let mut arrivals = Vec::new();
        for page in pages {
            if memory.frame(page).is_none() {
                let arrival = bring_in(memory, page, hw).unwrap();
                arrivals.push((arrival.origin, arrival.page_out_ns.is_some()));
            }
            if write {
                hw.0.extend(memory.frame(page));
            }
        }
        arrivals
    }

    #[test]
    fn written_pages_go_out_once_and_come_back_clean() {
        use Origin::{Server, Zeros};
        let (mut memory, mut hw) = (memory(2, 4, ReplacementPolicy::Fifo), Written::default());
        (0..4).for_each(|page| assert_eq!(memory.add(), page));
        let first = sweep(&mut memory, &mut hw, 0..4, true);
        assert_eq!(first, [(Zeros, false), (Zeros, false), (Zeros, true), (Zeros, true)]);
        let second = sweep(&mut memory, &mut hw, 0..4, false);
        assert_eq!(second, [(Server, true), (Server, true), (Server, false), (Server, false)]);
        assert!(sweep(&mut memory, &mut hw, 2..4, true).is_empty());
        assert_eq!(sweep(&mut memory, &mut hw, 0..2, false), [(Server, true), (Server, true)]);
        assert_eq!(memory.server_pages(), [(4, 4)]);
    }

    #[test]
    fn servers_are_looked_for_once() {
        let (mut memory, mut hw) = (memory(1, 4, ReplacementPolicy::Fifo), Written::default());
        let discovery = (0..3).map(|_| {
            let page = memory.add();
            let arrival = bring_in(&mut memory, page, &mut hw).unwrap();
            assert!((30_000..=70_000).contains(&arrival.service_ns));
            hw.0.extend(memory.frame(page));
            arrival.discovery_ns
        });
        assert_eq!(discovery.collect::<Vec<_>>(), [0, 4_000_000_000, 0]);
    }

    #[test]
    fn pages_that_were_only_read_are_dropped() {
        let (mut memory, mut hw) = (memory(1, 1, ReplacementPolicy::Fifo), Written::default());
        for _ in 0..5 {
            memory.add();
        }
        assert_eq!(sweep(&mut memory, &mut hw, 0..5, false), [(Origin::Zeros, false); 5]);
        assert_eq!(memory.server_pages(), [(0, 1)]);
    }

    #[test]
    fn full_servers_and_locked_memory_are_errors() {
        let (mut full, mut hw) = (memory(1, 1, ReplacementPolicy::Fifo), Written::default());
        for _ in 0..3 {
            full.add();
        }
        sweep(&mut full, &mut hw, 0..2, true);
        assert!(matches!(bring_in(&mut full, 2, &mut hw), Err(MemoryError::ServersFull(_))));
        let mut locked = memory(2, 1, ReplacementPolicy::SecondChance);
        for _ in 0..3 {
            locked.add();
        }
        for page in 0..2 {
            bring_in(&mut locked, page, &mut hw).unwrap();
            locked.pin(page);
        }
        assert_eq!(bring_in(&mut locked, 2, &mut hw), Err(MemoryError::AllLocked(2)));
        locked.unpin(1);
        assert!(bring_in(&mut locked, 2, &mut hw).is_ok() && locked.frame(0).is_some());
    }

    fn check(memory: &ClientMemory, hw: &Written, written: &BTreeSet<PageNumber>) {
        let resident = memory.pages.iter().filter(|state| state.frame.is_some()).count() as u64;
        assert_eq!(resident, memory.resident_pages());
        for (frame, page) in memory.frames.iter().enumerate() {
            let here = memory.pages[*page as usize].frame == Some(frame as FrameIndex);
            assert!(
                here != memory.free.contains(&(frame as FrameIndex)),
                "no frame is free and in use"
            );
        }
        let copies = memory.pages.iter().filter(|state| state.copy.is_some()).count() as u64;
        assert_eq!(memory.server_pages(), [(copies, 30)]);
        for (page, state) in memory.pages.iter().enumerate() {
            let dirty = state.dirty || state.frame.is_some_and(|frame| hw.0.contains(&frame));
            assert_eq!(state.copy.is_some() || dirty, written.contains(&(page as PageNumber)));
            assert!(!dirty || state.frame.is_some(), "what is written is in memory or copied");
            assert!(state.pins == 0 || state.frame.is_some());
        }
    }

    proptest! {
        #[test]
        fn frames_and_copies_are_conserved(
            steps in proptest::collection::vec((0u8..5, 0u32..30), 1..300),
            policy in any_policy(),
        ) {
            let (mut memory, mut hw) = (memory(8, 30, policy), Written::default());
            for _ in 0..30 {
            memory.add();
        }
            let (mut written, mut pinned) = (BTreeSet::new(), BTreeSet::new());
            for (step, page) in steps {
                if step <= 2 && memory.frame(page).is_none() {
                    let arrival = bring_in(&mut memory, page, &mut hw).unwrap();
                    prop_assert_eq!(arrival.origin == Origin::Server, written.contains(&page));
                }
                match step {
                    1 => { hw.0.extend(memory.frame(page)); written.insert(page); }
                    2 if pinned.len() < 7 && pinned.insert(page) => memory.pin(page),
                    3 if pinned.remove(&page) => memory.unpin(page),
                    4 => {
                        memory.frame(page).map(|frame| hw.unload(frame));
                        memory.remove(page);
                        prop_assert_eq!(memory.add(), page);
                        written.remove(&page);
                        pinned.remove(&page);
                    }
                    _ => {}
                }
                check(&memory, &hw, &written);
            }
        }
    }
}
