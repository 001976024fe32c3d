//! Page frames in runs: neighbours of one object that lie behind each other on one list and have
//! everything in common are one entry.
//!
//! A list is a circle with a hand. The hand stands at the tail, where reclaim looks first; what it
//! has passed is at the head. Rotating pages from the tail to the head, which is most of what these
//! kernels do, moves nothing but the hand.
//!
//! Invariant: a page of an object is in exactly one run; a run is on exactly one list; the order on
//! every list is what it would be page by page (a property test holds it against a plain deque).

use std::collections::BTreeMap;

/// What a page belongs to: a file, or a process's private memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectId(pub u32);

/// What reclaim knows of a page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Page {
    /// Index of the zone that its frame is in.
    pub zone: u8,
    /// Higher is more valuable; of the kernels that have ages.
    pub age: u8,
    /// The software bit "used since last looked at".
    pub referenced: bool,
    /// Must be written before it can be freed.
    pub dirty: bool,
    /// A process has it in its page tables.
    pub mapped: bool,
    /// A process has had it in its page tables before: the next touch is its second.
    pub touched: bool,
}

/// Consecutive pages of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Whose.
    pub object: ObjectId,
    /// Page index in the object.
    pub first: u32,
    /// Pages.
    pub len: u32,
}

/// Consecutive pages of an object, where they are and what they have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Which.
    pub extent: Extent,
    /// Index of the list.
    pub list: usize,
    /// In common.
    pub page: Page,
}

#[derive(Debug, Clone, Copy)]
struct Run {
    view: View,
    /// Toward the tail.
    prev: u32,
    /// Toward the head.
    next: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct List {
    /// The run at the tail; meaningless when the list is empty.
    hand: u32,
    /// Pages of that run that have been passed and so are at the head.
    passed: u32,
    runs: u32,
    pages: u64,
}

/// All runs and the lists that they are on.
#[derive(Debug, Clone)]
pub struct Runs {
    slab: Vec<Run>,
    unused: Vec<u32>,
    lists: Vec<List>,
    /// By object, then by first page.
    index: Vec<BTreeMap<u32, u32>>,
}

impl Runs {
    /// Empty, with so many lists.
    pub fn new(lists: usize) -> Self {
        let lists = vec![List::default(); lists];
        Runs { slab: Vec::new(), unused: Vec::new(), lists, index: Vec::new() }
    }

    /// Pages on a list.
    pub fn pages(&self, list: usize) -> u64 {
        self.lists[list].pages
    }

    /// The pages at the tail of a list, as far as they are alike.
    pub fn tail(&self, list: usize) -> Option<View> {
        let List { hand, passed, runs, .. } = self.lists[list];
        (runs > 0).then(|| {
            let mut view = self.slab[hand as usize].view;
            view.extent.first += passed;
            view.extent.len -= passed;
            view
        })
    }

    /// Moves `count` pages, at most the length of [`Runs::tail`], from the tail to the head.
    pub fn rotate(&mut self, list: usize, count: u32) {
        let hand = self.lists[list].hand;
        let run = self.slab[hand as usize];
        let state = &mut self.lists[list];
        state.passed += count;
        debug_assert!(state.passed <= run.view.extent.len);
        if state.passed == run.view.extent.len {
            state.passed = 0;
            state.hand = run.next;
            self.join(run.prev, hand);
        }
    }

    /// Takes `count` pages, at most the length of [`Runs::tail`], from the tail.
    pub fn take(&mut self, list: usize, count: u32) -> Extent {
        self.settle(list);
        let hand = self.lists[list].hand;
        let extent = self.slab[hand as usize].view.extent;
        if count < extent.len {
            self.split(hand, count);
        }
        self.unlink(hand);
        Extent { len: count, ..extent }
    }

    /// Adds pages at the head of a list. They are in no run yet.
    pub fn insert(&mut self, list: usize, extent: Extent, page: Page) {
        if extent.len == 0 {
            return;
        }
        self.settle(list);
        let state = self.lists[list];
        self.lists[list].pages += u64::from(extent.len);
        if state.runs > 0 {
            let head = self.slab[state.hand as usize].prev;
            let run = &mut self.slab[head as usize].view;
            if run.page == page && follows(run.extent, extent) {
                run.extent.len += extent.len;
                return;
            }
        }
        let id = self.allocate(View { extent, list, page });
        self.link_before_hand(list, id);
    }

    /// The first pages of an object at or after `from` and before `end`, as far as they are alike.
    pub fn find(&self, object: ObjectId, from: u32, end: u32) -> Option<View> {
        let index = self.index.get(object.0 as usize)?;
        let before = index.range(..=from).next_back().map(|(_, id)| self.slab[*id as usize].view);
        let covering = before.filter(|v| v.extent.first + v.extent.len > from);
        let mut view = match covering {
            Some(view) => view,
            None => self.slab[*index.range(from..end).next()?.1 as usize].view,
        };
        let first = view.extent.first.max(from);
        let last = (view.extent.first + view.extent.len).min(end);
        (view.extent.first, view.extent.len) = (first, last - first);
        (first < last).then_some(view)
    }

    /// Takes pages that [`Runs::find`] has found, wherever they are on their list.
    pub fn detach(&mut self, extent: Extent) {
        self.isolate(extent, |runs, id| runs.unlink(id));
    }

    /// Changes pages that [`Runs::find`] has found, where they are.
    pub fn update(&mut self, extent: Extent, change: impl Fn(&mut Page)) {
        self.isolate(extent, |runs, id| {
            let run = &mut runs.slab[id as usize];
            change(&mut run.view.page);
            let (prev, next) = (run.prev, run.next);
            runs.join(id, next);
            runs.join(prev, id);
        });
    }

    /// Makes runs of exactly these pages, in one or more pieces, and hands them over.
    fn isolate(&mut self, extent: Extent, mut then: impl FnMut(&mut Self, u32)) {
        let (mut first, end) = (extent.first, extent.first + extent.len);
        while first < end {
            let mut id = self.run_at(extent.object, first);
            let list = self.slab[id as usize].view.list;
            if self.lists[list].hand == id && self.lists[list].passed > 0 {
                self.settle(list);
                id = self.run_at(extent.object, first);
            }
            let start = self.slab[id as usize].view.extent.first;
            if start < first {
                id = self.split(id, first - start);
            }
            let len = self.slab[id as usize].view.extent.len;
            if first + len > end {
                self.split(id, end - first);
            }
            first += len.min(end - first);
            then(self, id);
        }
    }

    fn run_at(&self, object: ObjectId, page: u32) -> u32 {
        let index = &self.index[object.0 as usize];
        *index.range(..=page).next_back().expect("these pages are resident").1
    }

    /// Splits the run at the hand, so that the hand stands between two runs.
    fn settle(&mut self, list: usize) {
        let List { hand, passed, .. } = self.lists[list];
        if passed > 0 {
            self.lists[list].passed = 0;
            self.lists[list].hand = self.split(hand, passed);
        }
    }

    /// Cuts a run after `count` pages; returns the rest, which stands behind it toward the head.
    /// The hand must not be inside.
    fn split(&mut self, id: u32, count: u32) -> u32 {
        let mut rest = self.slab[id as usize].view;
        rest.extent.first += count;
        rest.extent.len -= count;
        self.slab[id as usize].view.extent.len = count;
        let (list, next) = (rest.list, self.slab[id as usize].next);
        let new = self.allocate(rest);
        self.link(id, new, next);
        self.lists[list].runs += 1;
        new
    }

    /// Joins two runs that stand behind each other, if they continue each other.
    fn join(&mut self, tailward: u32, headward: u32) {
        let (a, b) = (self.slab[tailward as usize].view, self.slab[headward as usize].view);
        if tailward == headward || a.page != b.page || !follows(a.extent, b.extent) {
            return;
        }
        if self.lists[a.list].hand == headward {
            return;
        }
        self.unlink(headward);
        self.slab[tailward as usize].view.extent.len += b.extent.len;
        self.lists[a.list].pages += u64::from(b.extent.len);
    }

    fn link(&mut self, prev: u32, id: u32, next: u32) {
        (self.slab[id as usize].prev, self.slab[id as usize].next) = (prev, next);
        self.slab[prev as usize].next = id;
        self.slab[next as usize].prev = id;
    }

    fn link_before_hand(&mut self, list: usize, id: u32) {
        if self.lists[list].runs == 0 {
            self.lists[list].hand = id;
            self.link(id, id, id);
        } else {
            let hand = self.lists[list].hand;
            self.link(self.slab[hand as usize].prev, id, hand);
        }
        self.lists[list].runs += 1;
    }

    fn unlink(&mut self, id: u32) {
        let Run { view, prev, next } = self.slab[id as usize];
        self.slab[prev as usize].next = next;
        self.slab[next as usize].prev = prev;
        let list = &mut self.lists[view.list];
        list.runs -= 1;
        list.pages -= u64::from(view.extent.len);
        if list.hand == id {
            list.hand = next;
        }
        self.index[view.extent.object.0 as usize].remove(&view.extent.first);
        self.unused.push(id);
    }

    fn allocate(&mut self, view: View) -> u32 {
        let run = Run { view, prev: 0, next: 0 };
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
            self.index.resize_with(object + 1, BTreeMap::new);
        }
        self.index[object].insert(view.extent.first, id);
        id
    }
}

fn follows(a: Extent, b: Extent) -> bool {
    a.object == b.object && a.first + a.len == b.first
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[derive(Debug, Clone)]
    enum Act {
        Insert { list: usize, object: u32, first: u32, len: u32, age: u8 },
        Rotate { list: usize, count: u32 },
        Take { list: usize, count: u32 },
        Detach { object: u32, first: u32, len: u32 },
        Update { object: u32, first: u32, len: u32, age: u8 },
    }

    fn act() -> impl Strategy<Value = Act> {
        let (list, object, first, len) = (0usize..2, 0u32..2, 0u32..40, 1u32..16);
        prop_oneof![
            (list.clone(), object.clone(), first.clone(), len.clone(), 0u8..2).prop_map(
                |(list, object, first, len, age)| Act::Insert { list, object, first, len, age }
            ),
            (list.clone(), len.clone()).prop_map(|(list, count)| Act::Rotate { list, count }),
            (list, len.clone()).prop_map(|(list, count)| Act::Take { list, count }),
            (object.clone(), first.clone(), len.clone())
                .prop_map(|(object, first, len)| Act::Detach { object, first, len }),
            (object, first, len, 0u8..2).prop_map(|(object, first, len, age)| Act::Update {
                object,
                first,
                len,
                age
            }),
        ]
    }

    /// Page by page: (object, page, age), tail first.
    #[derive(Default)]
    struct Plain([VecDeque<(u32, u32, u8)>; 2]);

    impl Plain {
        fn holds(&self, object: u32, page: u32) -> bool {
            self.0.iter().flatten().any(|p| (p.0, p.1) == (object, page))
        }

        fn in_range(p: &(u32, u32, u8), object: u32, first: u32, len: u32) -> bool {
            p.0 == object && (first..first + len).contains(&p.1)
        }

        fn apply(&mut self, act: &Act) {
            match *act {
                Act::Insert { list, object, first, len, age } => {
                    for page in first..first + len {
                        if !self.holds(object, page) {
                            self.0[list].push_back((object, page, age));
                        }
                    }
                }
                Act::Rotate { list, count } => {
                    for _ in 0..count {
                        let Some(page) = self.0[list].pop_front() else { break };
                        self.0[list].push_back(page);
                    }
                }
                Act::Take { list, count } => {
                    let len = self.0[list].len().min(count as usize);
                    self.0[list].drain(..len);
                }
                Act::Detach { object, first, len } => {
                    for list in &mut self.0 {
                        list.retain(|p| !Self::in_range(p, object, first, len));
                    }
                }
                Act::Update { object, first, len, age } => {
                    for page in self.0.iter_mut().flatten() {
                        if Self::in_range(page, object, first, len) {
                            page.2 = age;
                        }
                    }
                }
            }
        }
    }

    fn in_range(
        runs: &mut Runs,
        object: u32,
        first: u32,
        len: u32,
        then: impl Fn(&mut Runs, Extent),
    ) {
        let mut from = first;
        while let Some(view) = runs.find(ObjectId(object), from, first + len) {
            from = view.extent.first + view.extent.len;
            then(runs, view.extent);
        }
    }

    fn apply(runs: &mut Runs, act: &Act) {
        match *act {
            Act::Insert { list, object, first, len, age } => {
                for page in first..first + len {
                    if runs.find(ObjectId(object), page, page + 1).is_none() {
                        let extent = Extent { object: ObjectId(object), first: page, len: 1 };
                        runs.insert(list, extent, Page { age, ..Page::default() });
                    }
                }
            }
            Act::Rotate { list, mut count } | Act::Take { list, mut count } => {
                while let (Some(tail), true) = (runs.tail(list), count > 0) {
                    let n = tail.extent.len.min(count);
                    count -= n;
                    match act {
                        Act::Rotate { .. } => runs.rotate(list, n),
                        _ => assert_eq!(runs.take(list, n).len, n),
                    }
                }
            }
            Act::Detach { object, first, len } => {
                in_range(runs, object, first, len, |runs, extent| runs.detach(extent));
            }
            Act::Update { object, first, len, age } => {
                in_range(runs, object, first, len, |runs, extent| {
                    runs.update(extent, |page| page.age = age);
                });
            }
        }
    }

    fn listed(runs: &Runs, list: usize) -> Vec<(u32, u32, u8)> {
        let (mut copy, mut pages) = (runs.clone(), Vec::new());
        while let Some(View { extent, page, .. }) = copy.tail(list) {
            pages.extend((0..extent.len).map(|i| (extent.object.0, extent.first + i, page.age)));
            copy.take(list, extent.len);
        }
        pages
    }

    proptest! {
        #[test]
        fn runs_are_a_deque_of_pages(acts in proptest::collection::vec(act(), 1..60)) {
            let (mut runs, mut plain) = (Runs::new(2), Plain::default());
            for act in &acts {
                apply(&mut runs, act);
                plain.apply(act);
                for list in 0..2 {
                    prop_assert_eq!(runs.pages(list), plain.0[list].len() as u64);
                    prop_assert_eq!(listed(&runs, list), Vec::from(plain.0[list].clone()));
                }
            }
        }
    }

    #[test]
    fn a_lap_of_the_hand_leaves_one_run() {
        let mut runs = Runs::new(1);
        runs.insert(0, Extent { object: ObjectId(0), first: 0, len: 1000 }, Page::default());
        runs.rotate(0, 300);
        runs.insert(0, Extent { object: ObjectId(1), first: 0, len: 10 }, Page::default());
        assert_eq!(runs.lists[0].runs, 3);
        runs.rotate(0, 700);
        runs.rotate(0, 300);
        runs.rotate(0, 10);
        assert_eq!(runs.tail(0).unwrap().extent.len, 700);
        runs.detach(Extent { object: ObjectId(1), first: 0, len: 10 });
        runs.rotate(0, 700);
        runs.rotate(0, 300);
        assert_eq!((runs.lists[0].runs, runs.pages(0)), (1, 1000));
    }
}
