//! The state of `pagetax top`: the last interval, the last minute, and the choices of the user.
//!
//! Invariant: no I/O and no clock, so that tests need no terminal.

use super::columns::{self, SORTS};
use pagetax_core::top::{SystemTop, TopFigures, TopProcess};
use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};

/// The length of the history, in nanoseconds.
const HISTORY_NS: u64 = 60_000_000_000;

/// The identity of a row over intervals.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowKey {
    /// A process, by its id and its start.
    Process(u32, u64),
    /// A cgroup, by its path.
    Cgroup(String),
}

/// A row of the table.
#[derive(Debug, Clone)]
pub struct TopRow<'a> {
    pub key: RowKey,
    pub name: &'a str,
    /// The cgroup of a process; the number of processes of a cgroup.
    pub cgroup: Option<&'a str>,
    pub process_count: u64,
    pub has_ended: bool,
    pub figures: &'a TopFigures,
}

impl TopRow<'_> {
    /// Returns the process that the row shows; none for a cgroup.
    pub fn pid(&self) -> Option<u32> {
        match self.key {
            RowKey::Process(pid, _) => Some(pid),
            RowKey::Cgroup(_) => None,
        }
    }
}

/// The rows that the table has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum View {
    Processes,
    Cgroups,
    /// The processes of one cgroup.
    Members(String),
}

/// The state.
#[derive(Debug)]
pub struct TopModel {
    pub top: SystemTop,
    pub view: View,
    /// The index in [`SORTS`].
    pub sort: usize,
    pub is_reversed: bool,
    /// The row that the user chose; none for the first one, whichever it is.
    pub selected: Option<RowKey>,
    /// The place of the chosen row, which the selection keeps when that process ends.
    pub place: usize,
    /// A message about the last key.
    pub message: Option<String>,
    pub is_help: bool,
    history: HashMap<RowKey, VecDeque<Option<f64>>>,
    history_length: usize,
}

impl TopModel {
    /// Makes the state before the first interval. The length of intervals is in nanoseconds.
    pub fn new(interval_ns: u64, sort: usize, view: View) -> TopModel {
        TopModel {
            top: SystemTop::default(),
            view,
            sort,
            is_reversed: false,
            selected: None,
            place: 0,
            message: None,
            is_help: false,
            history: HashMap::new(),
            history_length: HISTORY_NS.div_ceil(interval_ns.max(1)).clamp(1, 600) as usize,
        }
    }

    /// Returns true if times by cause are known. Then heat is CPU time, else faults.
    pub fn has_stacks(&self) -> bool {
        !self.top.missing.contains_key("vm_cpu_ns")
    }

    /// Takes the next interval.
    pub fn take(&mut self, top: SystemTop) {
        self.top = top;
        let has_stacks = self.has_stacks();
        let seconds = self.seconds();
        let heat = |figures: &TopFigures| match has_stacks {
            true => figures.vm_and_walk_ns().map(|ns| ns as f64 / 1e6 / seconds),
            false => figures.minor_fault_count.map(|count| count as f64 / seconds),
        };
        let processes = self.top.processes.iter().map(|p| (key_of(p), heat(&p.figures)));
        let cgroups =
            self.top.cgroups.iter().map(|c| (RowKey::Cgroup(c.path.clone()), heat(&c.figures)));
        let mut next = HashMap::new();
        for (key, value) in processes.chain(cgroups) {
            let mut past = self.history.remove(&key).unwrap_or_default();
            past.push_back(value);
            while past.len() > self.history_length {
                past.pop_front();
            }
            next.insert(key, past);
        }
        self.history = next;
    }

    /// Returns the length of the interval in seconds.
    pub fn seconds(&self) -> f64 {
        self.top.system.elapsed_ns.max(1) as f64 / 1e9
    }

    /// Returns the rows of the view, in their order.
    pub fn rows(&self) -> Vec<TopRow<'_>> {
        let mut rows: Vec<TopRow<'_>> = match &self.view {
            View::Cgroups => self
                .top
                .cgroups
                .iter()
                .map(|cgroup| TopRow {
                    key: RowKey::Cgroup(cgroup.path.clone()),
                    name: &cgroup.path,
                    cgroup: None,
                    process_count: cgroup.process_count,
                    has_ended: false,
                    figures: &cgroup.figures,
                })
                .collect(),
            View::Processes => self.top.processes.iter().map(row_of).collect(),
            View::Members(path) => {
                let members = self.top.processes.iter();
                members.filter(|p| p.cgroup.as_ref() == Some(path)).map(row_of).collect()
            }
        };
        let value = SORTS[self.sort].value;
        rows.sort_by(|one, other| {
            let order = match SORTS[self.sort].id {
                "name" => one.name.cmp(other.name),
                "pid" => one.key.cmp(&other.key),
                "heat" => descending(self.mean(&one.key), self.mean(&other.key)),
                _ => descending(value(one.figures), value(other.figures)),
            };
            let order = if self.is_reversed { order.reverse() } else { order };
            // Rows that are equal so far keep a useful order.
            order
                .then_with(|| descending(columns::activity(one), columns::activity(other)))
                .then_with(|| one.key.cmp(&other.key))
        });
        rows
    }

    /// Returns the mean of the last minute.
    fn mean(&self, key: &RowKey) -> Option<f64> {
        let known: Vec<f64> = self.history.get(key)?.iter().flatten().copied().collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
    }

    /// Returns the last minute in so many parts, the newest last. The outer none is a part before the first
    /// interval, the inner one a part without a figure.
    pub fn heat(&self, key: &RowKey, parts: usize) -> Vec<Option<Option<f64>>> {
        let empty = VecDeque::new();
        let past = self.history.get(key).unwrap_or(&empty);
        let blank = self.history_length - past.len().min(self.history_length);
        let at = |index: usize| index.checked_sub(blank).and_then(|index| past.get(index));
        let part = |part: usize| {
            let bound = |part: usize| part * self.history_length / parts;
            let last = bound(part + 1).max(bound(part) + 1);
            let seen: Vec<Option<f64>> = (bound(part)..last).filter_map(at).copied().collect();
            let known: Vec<f64> = seen.iter().flatten().copied().collect();
            let mean = known.iter().sum::<f64>() / known.len() as f64;
            (!seen.is_empty()).then(|| (!known.is_empty()).then_some(mean))
        };
        (0..parts.min(self.history_length)).map(part).collect()
    }

    /// Returns the place of the selected row among these.
    pub fn selected_place(&self, rows: &[TopRow<'_>]) -> usize {
        let last = rows.len().saturating_sub(1);
        match &self.selected {
            None => 0,
            Some(key) => {
                rows.iter().position(|row| row.key == *key).unwrap_or(self.place.min(last))
            }
        }
    }

    /// Moves the selection by so many rows.
    pub fn select(&mut self, step: isize) {
        let rows = self.rows();
        let last = rows.len().saturating_sub(1);
        let place = self.selected_place(&rows).saturating_add_signed(step).min(last);
        let key = rows.get(place).map(|row| row.key.clone());
        (self.place, self.selected) = (place, key);
    }

    /// Returns the selected process: its id, if it is still there.
    pub fn selected_pid(&self) -> Result<u32, String> {
        let rows = self.rows();
        let Some(row) = rows.get(self.selected_place(&rows)) else {
            return Err("there is no process".into());
        };
        match row.pid() {
            _ if row.has_ended => Err(format!("{} has ended", row.name)),
            None => Err("choose a process: Enter shows those of the cgroup".into()),
            Some(pid) => Ok(pid),
        }
    }

    /// Sorts by the next column, or by the previous one.
    pub fn sort_by_next(&mut self, is_forward: bool) {
        let step = if is_forward { 1 } else { SORTS.len() - 1 };
        (self.sort, self.is_reversed) = ((self.sort + step) % SORTS.len(), false);
    }

    /// Changes between processes and cgroups.
    pub fn turn(&mut self) {
        let next = if self.view == View::Cgroups { View::Processes } else { View::Cgroups };
        self.show(next);
    }

    /// Shows the processes of the selected cgroup.
    pub fn open(&mut self) {
        let rows = self.rows();
        let row = rows.get(self.selected_place(&rows));
        if let Some(RowKey::Cgroup(path)) = row.map(|row| row.key.clone()) {
            self.show(View::Members(path));
        }
    }

    /// Goes back from the processes of a cgroup, or to the first row.
    pub fn close(&mut self) {
        let view =
            if matches!(self.view, View::Members(_)) { View::Cgroups } else { self.view.clone() };
        self.show(view);
    }

    fn show(&mut self, view: View) {
        (self.view, self.selected, self.place) = (view, None, 0);
    }
}

fn key_of(process: &TopProcess) -> RowKey {
    RowKey::Process(process.pid, process.start_ticks)
}

fn row_of(process: &TopProcess) -> TopRow<'_> {
    TopRow {
        key: key_of(process),
        name: &process.name,
        cgroup: process.cgroup.as_deref(),
        process_count: 1,
        has_ended: process.has_ended,
        figures: &process.figures,
    }
}

/// Compares so that the largest come first and the missing last.
fn descending(one: Option<f64>, other: Option<f64>) -> Ordering {
    let number = |value: Option<f64>| value.unwrap_or(f64::NEG_INFINITY);
    number(other).total_cmp(&number(one))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use pagetax_core::top::TopCgroup;

    pub fn process(pid: u32, name: &str, vm_ms: Option<u64>, faults: u64) -> TopProcess {
        TopProcess {
            pid,
            start_ticks: 1,
            name: name.into(),
            is_kernel: false,
            has_ended: false,
            cgroup: Some("/box".into()),
            figures: TopFigures {
                cpu_ns: Some(500_000_000),
                vm_cpu_ns: vm_ms.map(|ms| ms * 1_000_000),
                vm_cpu_low_ns: vm_ms.map(|ms| ms * 500_000),
                vm_cpu_high_ns: vm_ms.map(|ms| ms * 2_000_000),
                sample_count: vm_ms.map(|_| 3),
                touched_bytes: None,
                walk_ns: None,
                causes: vm_ms.map(|ms| ("zero_copy".into(), ms * 1_000_000)).into_iter().collect(),
                wait_ns: vm_ms.map(|_| 0),
                minor_fault_count: Some(faults),
                major_fault_count: Some(0),
                resident_bytes: Some(300 << 20),
                page_table_bytes: Some(1 << 20),
            },
        }
    }

    pub fn model(processes: Vec<TopProcess>) -> TopModel {
        let mut model = TopModel::new(2_000_000_000, 0, View::Processes);
        let cgroup = TopCgroup {
            path: "/box".into(),
            process_count: processes.len() as u64,
            figures: processes.first().map(|p| p.figures.clone()).unwrap_or_default(),
        };
        let mut top =
            SystemTop { cpu_count: 2, processes, cgroups: vec![cgroup], ..SystemTop::default() };
        top.system.elapsed_ns = 2_000_000_000;
        model.take(top);
        model
    }

    fn names(model: &TopModel) -> Vec<String> {
        model.rows().iter().map(|row| row.name.to_string()).collect()
    }

    #[test]
    fn rows_are_sorted_and_the_missing_come_last() {
        let all = vec![
            process(1, "b", None, 9),
            process(2, "a", Some(4), 1),
            process(3, "c", Some(8), 0),
        ];
        let mut model = model(all);
        assert_eq!(names(&model), ["c", "a", "b"]);
        model.sort = SORTS.iter().position(|sort| sort.id == "minor").unwrap();
        assert_eq!(names(&model), ["b", "a", "c"]);
        model.is_reversed = true;
        assert_eq!(names(&model), ["c", "a", "b"]);
    }

    #[test]
    fn the_selection_follows_a_process_and_keeps_its_place_when_that_ends() {
        let mut model = model(vec![process(1, "a", Some(9), 0), process(2, "b", Some(4), 0)]);
        model.select(1);
        assert_eq!(model.selected_pid(), Ok(2));
        let next = |processes| SystemTop { processes, ..model.top.clone() };
        let swapped = next(vec![process(1, "a", Some(1), 0), process(2, "b", Some(4), 0)]);
        let alone = next(vec![process(1, "a", Some(1), 0)]);
        model.take(swapped);
        assert_eq!(model.selected_pid(), Ok(2));
        model.take(alone);
        assert_eq!(model.selected_pid(), Ok(1));
        model.take(SystemTop::default());
        assert!(model.selected_pid().is_err());
    }

    #[test]
    fn a_cgroup_opens_and_closes() {
        let mut model = model(vec![process(1, "a", Some(9), 0)]);
        model.turn();
        assert_eq!(names(&model), ["/box"]);
        assert!(model.selected_pid().unwrap_err().contains("Enter"));
        model.open();
        assert_eq!(names(&model), ["a"]);
        model.close();
        assert_eq!(model.view, View::Cgroups);
    }

    #[test]
    fn heat_has_the_walks_that_are_known() {
        let mut hot = process(1, "a", Some(4), 0);
        hot.figures.walk_ns = Some(96_000_000);
        let model = model(vec![hot, process(2, "b", Some(4), 0)]);
        let heat = |pid| model.heat(&RowKey::Process(pid, 1), 30)[29];
        assert_eq!((heat(1), heat(2)), (Some(Some(50.0)), Some(Some(2.0))));
    }

    #[test]
    fn heat_tells_before_the_start_from_missing_and_from_zero() {
        let mut model = model(vec![process(1, "a", Some(4), 0)]);
        let quiet = SystemTop { processes: vec![process(1, "a", Some(0), 0)], ..model.top.clone() };
        model.take(quiet);
        let heat = model.heat(&RowKey::Process(1, 1), 30);
        assert_eq!(heat[27..], [None, Some(Some(2.0)), Some(Some(0.0))]);
        let unknown = SystemTop { processes: vec![process(1, "a", None, 0)], ..model.top.clone() };
        model.take(unknown);
        let heat = model.heat(&RowKey::Process(1, 1), 30);
        assert_eq!(heat[29], Some(None));
        assert_eq!(model.heat(&RowKey::Process(1, 1), 10)[9], Some(Some(1.0)));
    }
}
