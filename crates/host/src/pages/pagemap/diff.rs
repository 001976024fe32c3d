//! The differences between two maps of a process.

use super::{Mapping, PageMap, Run};
use pagetax_core::document::Document;
use pagetax_core::units::{PageSize, VirtAddr};
use serde::{Deserialize, Serialize};

/// The page at an address, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", tag = "state", content = "page")]
pub enum Pages {
    /// The address is in no mapping.
    Unmapped,
    /// The address is in a mapping, but has no page.
    None,
    /// A page of this size maps the address.
    Of(PageSize),
}

impl std::fmt::Display for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Pages::Unmapped => f.write_str("unmapped"),
            Pages::None => f.write_str("no page"),
            Pages::Of(size) => write!(f, "{size}"),
        }
    }
}

/// A range of addresses with the same change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Change {
    /// The first address of the range.
    pub start: VirtAddr,
    /// The first address after the range.
    pub end: VirtAddr,
    /// The pages in the first map.
    pub before: Pages,
    /// The pages in the second map.
    pub after: Pages,
    /// The mapping's name in the second map, or in the first if it is gone.
    pub name: String,
}

/// The changes of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProcessChanges {
    /// The process id, the same in both maps.
    pub pid: u32,
    /// The ranges whose pages differ, by address.
    pub changes: Vec<Change>,
}

/// The changes between two maps of the same processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PageMapDiff {
    /// The processes, in the order of the maps.
    pub processes: Vec<ProcessChanges>,
}

impl PageMapDiff {
    /// Compares the maps pair by pair.
    pub fn new(before: &[PageMap], after: &[PageMap]) -> PageMapDiff {
        let changes = |(before, after): (&PageMap, &PageMap)| ProcessChanges {
            pid: after.pid,
            changes: diff(before, after),
        };
        PageMapDiff { processes: before.iter().zip(after).map(changes).collect() }
    }
}

impl Document for PageMapDiff {
    const KIND: &'static str = "page_map_diff";
}

/// Returns the changes by address; none for equal maps.
pub fn diff(before: &PageMap, after: &PageMap) -> Vec<Change> {
    let (mut one, mut two) = (Cursor::of(before), Cursor::of(after));
    let mut changes: Vec<Change> = Vec::new();
    let mut at = 0;
    while let Some(end) = [one.border_after(at), two.border_after(at)].into_iter().flatten().min() {
        let ((was, old_name), (is, new_name)) = (one.at(at), two.at(at));
        if was != is {
            let name = new_name.or(old_name).unwrap_or_default();
            let joins = changes.last().is_some_and(|last| {
                last.end.0 == at && (last.before, last.after) == (was, is) && last.name == name
            });
            match changes.last_mut().filter(|_| joins) {
                Some(last) => last.end = VirtAddr(end),
                None => changes.push(Change {
                    start: VirtAddr(at),
                    end: VirtAddr(end),
                    before: was,
                    after: is,
                    name: name.into(),
                }),
            }
        }
        at = end;
    }
    changes
}

/// A walk over the runs of a map in the order of addresses.
struct Cursor<'a> {
    runs: Vec<(&'a Run, &'a Mapping)>,
    next: usize,
}

impl<'a> Cursor<'a> {
    fn of(map: &'a PageMap) -> Cursor<'a> {
        let runs = |mapping: &'a Mapping| mapping.runs.iter().map(move |run| (run, mapping));
        Cursor { runs: map.mappings.iter().flat_map(runs).collect(), next: 0 }
    }

    /// Returns the next address after `at` at which a run begins or ends. `at` must not decrease between
    /// calls.
    fn border_after(&mut self, at: u64) -> Option<u64> {
        while self.runs.get(self.next).is_some_and(|(run, _)| run.end.0 <= at) {
            self.next += 1;
        }
        let (run, _) = self.runs.get(self.next)?;
        Some(if run.start.0 > at { run.start.0 } else { run.end.0 })
    }

    /// Returns the page and the mapping's name at the address that `border_after` was last called with.
    fn at(&self, at: u64) -> (Pages, Option<&'a str>) {
        match self.runs.get(self.next).filter(|(run, _)| run.start.0 <= at) {
            None => (Pages::Unmapped, None),
            Some((run, mapping)) => {
                (run.page.map_or(Pages::None, Pages::Of), Some(mapping.name.as_str()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::smaps;
    use super::*;

    /// Makes runs of `(pages, page size in pages)` from page `first` on, with one mapping for each
    /// group.
    fn map(groups: &[(u64, &[(u64, u64)])]) -> PageMap {
        let mut text = String::new();
        for (first, runs) in groups {
            let pages: u64 = runs.iter().map(|(pages, _)| pages).sum();
            text += &format!("{first:x}000-{:x}000 rw-p 0 0:0 0\n", first + pages);
        }
        let mut mappings = smaps::parse(text.as_bytes()).unwrap();
        for (mapping, (first, runs)) in mappings.iter_mut().zip(groups) {
            let mut at = first << 12;
            for (pages, size) in *runs {
                let end = at + (pages << 12);
                let page = PageSize::new(size << 12).ok();
                let bytes = if page.is_some() { end - at } else { 0 };
                let (start, end_address) = (VirtAddr(at), VirtAddr(end));
                mapping.runs.push(Run {
                    start,
                    end: end_address,
                    page,
                    resident_bytes: bytes,
                    anon_bytes: bytes,
                });
                at = end;
            }
        }
        PageMap {
            pid: 1,
            command: "x".into(),
            base_page: PageSize::K4,
            folios_missing: None,
            unsettled: false,
            mappings,
        }
    }

    fn changes(before: &PageMap, after: &PageMap) -> Vec<(u64, u64, Pages, Pages)> {
        let page = |address: VirtAddr| address.0 >> 12;
        let changes = diff(before, after);
        changes.iter().map(|c| (page(c.start), page(c.end), c.before, c.after)).collect()
    }

    #[test]
    fn equal_maps_do_not_differ() {
        let one = map(&[(16, &[(4, 1), (2, 0)])]);
        assert_eq!(changes(&one, &one), []);
    }

    #[test]
    fn what_came_went_and_grew() {
        let before = map(&[(16, &[(4, 1), (4, 0)]), (64, &[(2, 1)])]);
        let after = map(&[(16, &[(2, 1), (4, 4), (2, 0)]), (80, &[(1, 1)])]);
        let (base, four) = (Pages::Of(PageSize::K4), Pages::Of(PageSize::new(4 << 12).unwrap()));
        assert_eq!(
            changes(&before, &after),
            [
                (18, 20, base, four),
                (20, 22, Pages::None, four),
                (64, 66, base, Pages::Unmapped),
                (80, 81, Pages::Unmapped, base),
            ]
        );
    }

    #[test]
    fn cutting_keeps_shares() {
        let mut map = map(&[(16, &[(4, 1), (4, 4)])]);
        map.cut(VirtAddr(18 << 12), VirtAddr(22 << 12));
        let runs: Vec<_> = map.mappings[0].runs.iter().map(|r| r.resident_bytes >> 12).collect();
        assert_eq!((runs, map.mappings[0].start.0 >> 12), (vec![2, 2], 18));
    }
}
