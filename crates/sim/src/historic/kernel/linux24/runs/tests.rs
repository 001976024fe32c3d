//! Runs and groups against a plain deque of pages.

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

#[derive(Debug, Clone)]
enum Act {
    Insert {
        list: usize,
        object: u32,
        first: u32,
        len: u32,
        age: u8,
    },
    Rotate {
        list: usize,
        count: u32,
    },
    /// Passes pages of age 0 if `settled`, otherwise all others.
    Pass {
        list: usize,
        count: u32,
        settled: bool,
    },
    Take {
        list: usize,
        count: u32,
    },
    Detach {
        object: u32,
        first: u32,
        len: u32,
    },
    Update {
        object: u32,
        first: u32,
        len: u32,
        age: u8,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let (list, object, first, len) = (0usize..2, 0u32..2, 0u32..40, 1u32..16);
    prop_oneof![
        (list.clone(), object.clone(), first.clone(), len.clone(), 0u8..2).prop_map(
            |(list, object, first, len, age)| Act::Insert { list, object, first, len, age }
        ),
        (list.clone(), len.clone()).prop_map(|(list, count)| Act::Rotate { list, count }),
        (list.clone(), 1u32..80, any::<bool>()).prop_map(|(list, count, settled)| Act::Pass {
            list,
            count,
            settled
        }),
        (list, len.clone()).prop_map(|(list, count)| Act::Take { list, count }),
        (object.clone(), first.clone(), len.clone()).prop_map(|(object, first, len)| Act::Detach {
            object,
            first,
            len
        }),
        (object, first, len, 0u8..2).prop_map(|(object, first, len, age)| Act::Update {
            object,
            first,
            len,
            age
        }),
    ]
}

/// The reference, page by page: (object, page, age), tail first.
#[derive(Default)]
struct PlainLists([VecDeque<(u32, u32, u8)>; 2]);

impl PlainLists {
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
            Act::Pass { list, count, settled } => {
                for _ in 0..self.0[list].len().min(count as usize) {
                    if (self.0[list][0].2 == 0) == settled {
                        self.0[list].rotate_left(1);
                    } else {
                        break;
                    }
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

fn in_range(runs: &mut Runs, object: u32, first: u32, len: u32, then: impl Fn(&mut Runs, Extent)) {
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
                    runs.insert(list, extent, ReclaimState { age, ..ReclaimState::default() });
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
        Act::Pass { list, count, settled } => {
            runs.pass(
                list,
                u64::from(count),
                if settled { Kinds::SETTLED } else { !Kinds::SETTLED },
            );
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

/// Checks that each group's counts are the sums over its runs, on both lists.
fn check_groups(runs: &Runs) {
    for List { hand, runs: count, .. } in runs.lists.iter().filter(|list| list.runs > 0) {
        let group = runs.slab[*hand as usize].group as usize;
        let (mut id, mut left) = (runs.groups[group].first, *count);
        while left > 0 {
            let number = runs.slab[id as usize].group;
            let group = &runs.groups[number as usize];
            let mut sum = Group::at(id);
            while sum.runs < group.runs {
                let run = runs.slab[id as usize];
                assert_eq!(run.group, number);
                sum.add(run.page, run.extent.len);
                (sum.last, id) = (id, run.next);
            }
            assert_eq!(&sum, group);
            left -= group.runs;
        }
    }
}

fn listed(runs: &Runs, list: usize) -> Vec<(u32, u32, u8)> {
    let (mut copy, mut pages) = (runs.clone(), Vec::new());
    while let Some(RunView { extent, page, .. }) = copy.tail(list) {
        pages.extend((0..extent.len).map(|i| (extent.object.0, extent.first + i, page.age)));
        copy.take(list, extent.len);
    }
    pages
}

proptest! {
    #[test]
    fn runs_are_a_deque_of_pages(acts in proptest::collection::vec(act(), 1..60)) {
        let (mut runs, mut plain) = (Runs::new(2), PlainLists::default());
        for act in &acts {
            apply(&mut runs, act);
            plain.apply(act);
            check_groups(&runs);
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
    runs.insert(0, Extent { object: ObjectId(0), first: 0, len: 1000 }, ReclaimState::default());
    runs.rotate(0, 300);
    runs.insert(0, Extent { object: ObjectId(1), first: 0, len: 10 }, ReclaimState::default());
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
