//! Page frames in runs. Neighbouring pages of one object form one entry if they are adjacent on a
//! list and in the same state.
//!
//! A list is a circle with a hand. The hand stands at the tail, where reclaim looks first; pages
//! that it has passed are at the head. These kernels mostly rotate pages from the tail to the head,
//! which moves only the hand.
//!
//! Invariants: a page of an object is in exactly one run, and a run is on exactly one list. Every
//! list has the order that it would have page by page; a property test compares it with a plain
//! deque.

use super::groups::{GROUP_RUNS, Group, Kinds};
use super::index::Index;

/// The owner of a page: a file, or a process's private memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectId(pub u32);

/// The page state that reclaim uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReclaimState {
    /// Index of the zone that its frame is in.
    pub zone: u8,
    /// Page age; higher is more valuable. Only kernels with page aging use it.
    pub age: u8,
    /// The software referenced bit: used since the last scan.
    pub referenced: bool,
    /// True if the page must be written before it can be freed.
    pub dirty: bool,
    /// True if a process has the page in its page tables.
    pub mapped: bool,
    /// True if a process has had the page in its page tables before, so the next touch is its
    /// second.
    pub touched: bool,
}

/// Consecutive pages of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The object that the pages belong to.
    pub object: ObjectId,
    /// Index of the first page in the object.
    pub first: u32,
    /// Number of consecutive pages.
    pub len: u32,
}

/// Consecutive pages of an object on one list, all in the same state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunView {
    /// The pages and their object.
    pub extent: Extent,
    /// Index of the list that they are on.
    pub list: usize,
    /// The state that all of them share.
    pub page: ReclaimState,
}

/// A run of pages. It is small, so that two fit in a cache line: scans visit many.
#[derive(Debug, Clone, Copy)]
struct PageRun {
    extent: Extent,
    page: ReclaimState,
    list: u8,
    /// The neighbour toward the tail.
    prev: u32,
    /// The neighbour toward the head.
    next: u32,
    group: u32,
}

impl PageRun {
    /// Returns a run that is not linked into a list yet.
    fn new(view: RunView) -> Self {
        let RunView { extent, list, page } = view;
        PageRun { extent, page, list: list as u8, prev: 0, next: 0, group: 0 }
    }

    fn list(&self) -> usize {
        usize::from(self.list)
    }

    fn view(&self) -> RunView {
        RunView { extent: self.extent, list: self.list(), page: self.page }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct List {
    /// The run at the tail; meaningless when the list is empty.
    hand: u32,
    /// Pages of the run at the tail that the hand has passed, and so are at the head.
    passed: u32,
    runs: u32,
    pages: u64,
}

/// All runs and the lists that they are on.
#[derive(Debug, Clone, Default)]
pub struct Runs {
    slab: Vec<PageRun>,
    unused: Vec<u32>,
    lists: Vec<List>,
    groups: Vec<Group>,
    unused_groups: Vec<u32>,
    /// Runs by first page, one index per object.
    index: Vec<Index>,
}

impl Runs {
    /// Returns `lists` empty lists.
    pub fn new(lists: usize) -> Self {
        let lists = vec![List::default(); lists];
        Runs { lists, ..Runs::default() }
    }

    /// Returns the number of pages on a list.
    pub fn pages(&self, list: usize) -> u64 {
        self.lists[list].pages
    }

    /// Returns the longest stretch of equal pages at the tail of a list, or None if the list is
    /// empty.
    pub fn tail(&self, list: usize) -> Option<RunView> {
        let List { hand, passed, runs, .. } = self.lists[list];
        (runs > 0).then(|| {
            let mut view = self.slab[hand as usize].view();
            view.extent.first += passed;
            view.extent.len -= passed;
            view
        })
    }

    /// Moves `count` pages from the tail to the head. `count` is at most the length of
    /// [`Runs::tail`].
    pub fn rotate(&mut self, list: usize, count: u32) {
        let (hand, prev) = (self.lists[list].hand, self.slab[self.lists[list].hand as usize].prev);
        self.turn(list, count);
        if self.lists[list].hand != hand {
            self.join(prev, hand);
        }
    }

    /// Rotates like [`Runs::rotate`], but does not join the runs before and after the hand.
    fn turn(&mut self, list: usize, count: u32) {
        let state = &mut self.lists[list];
        let run = &self.slab[state.hand as usize];
        state.passed += count;
        debug_assert!(state.passed <= run.extent.len);
        if state.passed == run.extent.len {
            (state.hand, state.passed) = (run.next, 0);
        }
    }

    /// Moves up to `most` pages of `kinds` from the tail to the head, and stops at the first page
    /// of another kind. Returns the number of pages moved.
    pub fn pass(&mut self, list: usize, most: u64, kinds: Kinds) -> u64 {
        let mut left = most.min(self.lists[list].pages);
        let most = left;
        while left > 0 {
            let List { hand, passed, .. } = self.lists[list];
            let run = &self.slab[hand as usize];
            let group = &self.groups[run.group as usize];
            let at_group = passed == 0 && group.first == hand;
            if at_group && group.pages <= left && group.is_of(kinds) {
                left -= group.pages;
                self.lists[list].hand = self.slab[group.last as usize].next;
            } else if kinds.contains(run.page) {
                let count = u64::from(run.extent.len - passed).min(left);
                // Only the first run had the hand between it and a neighbour, so only it may need a
                // join.
                if left == most {
                    self.rotate(list, count as u32);
                } else {
                    self.turn(list, count as u32);
                }
                left -= count;
            } else {
                break;
            }
        }
        most - left
    }

    /// Removes `count` pages from the tail. `count` is at most the length of [`Runs::tail`].
    pub fn take(&mut self, list: usize, count: u32) -> Extent {
        let id = self.cut_tail(list, count);
        self.unlink(id);
        self.forget(id)
    }

    /// Moves `count` pages from the tail of a list to the head of `to` and sets their state to
    /// `page`. `count` is at most the length of [`Runs::tail`].
    pub fn move_tail(&mut self, list: usize, count: u32, to: usize, page: ReclaimState) {
        let id = self.cut_tail(list, count);
        self.unlink(id);
        self.settle(to);
        let extent = self.slab[id as usize].extent;
        if self.extend_head(to, extent, page) {
            self.forget(id);
        } else {
            self.slab[id as usize] = PageRun { list: to as u8, page, ..self.slab[id as usize] };
            self.link_before_hand(to, id);
        }
    }

    /// Adds pages at the head of a list. The pages must not be in a run.
    pub fn insert(&mut self, list: usize, extent: Extent, page: ReclaimState) {
        if extent.len == 0 {
            return;
        }
        self.settle(list);
        if !self.extend_head(list, extent, page) {
            let id = self.allocate(RunView { extent, list, page });
            self.link_before_hand(list, id);
        }
    }

    /// Adds pages to the run at the head of a list if they continue it, and returns true if so. The
    /// hand must be between runs.
    fn extend_head(&mut self, list: usize, extent: Extent, page: ReclaimState) -> bool {
        let List { hand, runs, .. } = self.lists[list];
        if runs == 0 {
            return false;
        }
        let head = self.slab[hand as usize].prev;
        let run = &mut self.slab[head as usize];
        let extends = follows(run.extent, extent) && run.page == page;
        if extends {
            run.extent.len += extent.len;
            self.groups[run.group as usize].pages += u64::from(extent.len);
            self.lists[list].pages += u64::from(extent.len);
        }
        extends
    }

    /// Returns the first resident pages of an object in `from..end`, as many as are in one run.
    pub fn find(&self, object: ObjectId, from: u32, end: u32) -> Option<RunView> {
        let index = self.index.get(object.0 as usize)?;
        let before = index.at_or_before(from).map(|id| self.slab[id as usize].view());
        let covering = before.filter(|v| v.extent.first + v.extent.len > from);
        let mut view = match covering {
            Some(view) => view,
            None => self.slab[index.after(from)? as usize].view(),
        };
        let first = view.extent.first.max(from);
        let last = (view.extent.first + view.extent.len).min(end);
        (view.extent.first, view.extent.len) = (first, last.saturating_sub(first));
        (first < last).then_some(view)
    }

    /// Removes pages that [`Runs::find`] has found, wherever they are on their list.
    pub fn detach(&mut self, extent: Extent) {
        self.isolate(extent, |runs, id| {
            runs.unlink(id);
            runs.forget(id);
        });
    }

    /// Changes the state of pages that [`Runs::find`] has found; they stay in place on their list.
    pub fn update(&mut self, extent: Extent, change: impl Fn(&mut ReclaimState)) {
        self.isolate(extent, |runs, id| {
            let run = &mut runs.slab[id as usize];
            let (group, len) = (&mut runs.groups[run.group as usize], run.extent.len);
            group.remove(run.page, len);
            change(&mut run.page);
            group.add(run.page, len);
            let (prev, next) = (run.prev, run.next);
            runs.join(id, next);
            runs.join(prev, id);
        });
    }

    /// Splits runs so that exactly these pages are in runs of their own, and passes each run to
    /// `then`.
    fn isolate(&mut self, extent: Extent, mut then: impl FnMut(&mut Self, u32)) {
        let (mut first, end) = (extent.first, extent.first + extent.len);
        while first < end {
            let mut id = self.run_at(extent.object, first);
            let list = self.slab[id as usize].list();
            if self.lists[list].hand == id && self.lists[list].passed > 0 {
                self.settle(list);
                id = self.run_at(extent.object, first);
            }
            let start = self.slab[id as usize].extent.first;
            if start < first {
                id = self.split(id, first - start);
            }
            let len = self.slab[id as usize].extent.len;
            if first + len > end {
                self.split(id, end - first);
            }
            first += len.min(end - first);
            then(self, id);
        }
    }

    fn run_at(&self, object: ObjectId, page: u32) -> u32 {
        let index = &self.index[object.0 as usize];
        index.at_or_before(page).expect("these pages are resident")
    }

    /// Splits the run at the tail to exactly `count` pages and returns it.
    fn cut_tail(&mut self, list: usize, count: u32) -> u32 {
        self.settle(list);
        let hand = self.lists[list].hand;
        if count < self.slab[hand as usize].extent.len {
            self.split(hand, count);
        }
        hand
    }

    /// Splits the run at the hand, so that the hand stands between two runs.
    fn settle(&mut self, list: usize) {
        let List { hand, passed, .. } = self.lists[list];
        if passed > 0 {
            self.lists[list].passed = 0;
            self.lists[list].hand = self.split(hand, passed);
        }
    }

    /// Cuts a run after `count` pages and returns the rest, its new neighbour toward the head. The
    /// hand must not be inside the run.
    fn split(&mut self, id: u32, count: u32) -> u32 {
        let mut rest = self.slab[id as usize].view();
        rest.extent.first += count;
        rest.extent.len -= count;
        let run = &mut self.slab[id as usize];
        run.extent.len = count;
        self.groups[run.group as usize].pages -= u64::from(rest.extent.len);
        let (list, next) = (rest.list, run.next);
        let new = self.allocate(rest);
        self.link(id, new, next);
        self.lists[list].runs += 1;
        new
    }

    /// Joins two adjacent runs if the second continues the first and the hand is not between them.
    fn join(&mut self, tailward: u32, headward: u32) {
        let (a, b) = (&self.slab[tailward as usize], &self.slab[headward as usize]);
        if !follows(a.extent, b.extent) || a.page != b.page {
            return;
        }
        let (list, len) = (a.list(), b.extent.len);
        if self.lists[list].hand == headward {
            return;
        }
        self.unlink(headward);
        self.forget(headward);
        let run = &mut self.slab[tailward as usize];
        run.extent.len += len;
        self.groups[run.group as usize].pages += u64::from(len);
        self.lists[list].pages += u64::from(len);
    }

    /// Links a run after `prev` and adds it to the group of `prev`.
    fn link(&mut self, prev: u32, id: u32, next: u32) {
        (self.slab[id as usize].prev, self.slab[id as usize].next) = (prev, next);
        self.slab[prev as usize].next = id;
        self.slab[next as usize].prev = id;
        let number = self.slab[prev as usize].group;
        let PageRun { page, extent, .. } = self.slab[id as usize];
        self.slab[id as usize].group = number;
        let group = &mut self.groups[number as usize];
        group.add(page, extent.len);
        if group.last == prev {
            group.last = id;
        }
        if group.runs > GROUP_RUNS {
            self.halve(number);
        }
    }

    /// Moves the headward half of a group to a new group, so that groups stay small.
    fn halve(&mut self, number: u32) {
        let old = &self.groups[number as usize];
        let (last, count) = (old.last, old.runs / 2);
        let half = self.new_group(last);
        let mut id = last;
        for moved in 1..=count {
            let run = &mut self.slab[id as usize];
            run.group = half;
            let (page, len) = (run.page, run.extent.len);
            self.groups[number as usize].remove(page, len);
            self.groups[half as usize].add(page, len);
            if moved == count {
                self.groups[half as usize].first = id;
                self.groups[number as usize].last = run.prev;
            }
            id = run.prev;
        }
    }

    fn new_group(&mut self, run: u32) -> u32 {
        let group = Group::at(run);
        match self.unused_groups.pop() {
            Some(number) => {
                self.groups[number as usize] = group;
                number
            }
            None => {
                self.groups.push(group);
                (self.groups.len() - 1) as u32
            }
        }
    }

    fn leave_group(&mut self, id: u32) {
        let PageRun { page, extent, prev, next, group: number, .. } = self.slab[id as usize];
        let group = &mut self.groups[number as usize];
        group.remove(page, extent.len);
        if group.runs == 0 {
            self.unused_groups.push(number);
        } else if group.first == id {
            group.first = next;
        } else if group.last == id {
            group.last = prev;
        }
    }

    /// Links a run at the head of the list.
    fn link_before_hand(&mut self, list: usize, id: u32) {
        if self.lists[list].runs == 0 {
            self.lists[list].hand = id;
            self.slab[id as usize].group = self.new_group(id);
            self.link(id, id, id);
        } else {
            let hand = self.lists[list].hand;
            self.link(self.slab[hand as usize].prev, id, hand);
        }
        self.lists[list].runs += 1;
        self.lists[list].pages += u64::from(self.slab[id as usize].extent.len);
    }

    /// Unlinks a run from its list and group.
    fn unlink(&mut self, id: u32) {
        self.leave_group(id);
        let run = self.slab[id as usize];
        let (prev, next) = (run.prev, run.next);
        let list = &mut self.lists[run.list()];
        list.runs -= 1;
        list.pages -= u64::from(run.extent.len);
        if list.hand == id {
            list.hand = next;
        }
        self.slab[prev as usize].next = next;
        self.slab[next as usize].prev = prev;
    }

    /// Frees a run that is on no list, and returns its pages.
    fn forget(&mut self, id: u32) -> Extent {
        let extent = self.slab[id as usize].extent;
        self.index[extent.object.0 as usize].remove(extent.first);
        self.unused.push(id);
        extent
    }

    fn allocate(&mut self, view: RunView) -> u32 {
        let run = PageRun::new(view);
        let id = match self.unused.pop() {
            Some(id) => {
                self.slab[id as usize] = run;
                id
            }
            None => {
                self.slab.push(run);
                (self.slab.len() - 1) as u32
            }
        };
        let object = view.extent.object.0 as usize;
        if self.index.len() <= object {
            self.index.resize_with(object + 1, Index::default);
        }
        self.index[object].insert(view.extent.first, id);
        id
    }
}

fn follows(a: Extent, b: Extent) -> bool {
    a.object == b.object && a.first + a.len == b.first
}

#[cfg(test)]
mod tests;
