//! `stat`, `hatstat` and `top` on captured trees of older kernels, with each version of cgroups. `cargo xtask
//! kernels --only capture` writes the trees.

use crate::measure::budget::tests::calibration;
use crate::measure::hatstat::hatstat;
use crate::measure::system::{ProcessTotals, Scope, SystemWatch, cost};
use crate::measure::top::TopWatch;
use crate::procfs::Root;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

const TREES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/captured");
const NO_STACKS: &str = "a captured tree has no stacks";
/// Numbers that no file has: those of this process, and counts of the rows themselves.
const OF_NO_FILE: [&str; 4] = ["end_unix_ms", "elapsed_ns", "own_cpu_ns", "process_count"];
/// Sums over what is known. A missing part leaves them lower, and their row or their upper bound shows it.
const SUMS: [&str; 8] = [
    "cpu_total_ns",
    "cpu_unexplained_ns",
    "wall_total_ns",
    "wall_unexplained_ns",
    "vm_tax",
    "vm_cpu_ns",
    "cgroups",
    "shared",
];

/// The files of names and values. A kernel that lacks a value lacks its line.
const HAVE_NAMES: [&str; 6] = [
    "/proc/vmstat",
    "/proc/stat",
    "/memory.stat",
    "/cpu.stat",
    "/pressure/memory",
    "/memory.pressure",
];

/// Numbers by their place in the documents. A missing one is not there.
type Fields = BTreeMap<String, f64>;
/// The files of a tree by their paths.
type Files = BTreeMap<String, String>;

/// Reads the captured files.
fn files(tree: &Path) -> Files {
    let text = std::fs::read_to_string(tree).unwrap();
    let parts = text.split("== ").skip(1).filter_map(|part| part.split_once('\n'));
    parts.map(|(path, text)| (path.to_string(), text.to_string())).collect()
}

fn trees() -> Vec<PathBuf> {
    let mut trees: Vec<_> =
        std::fs::read_dir(TREES).unwrap().map(|entry| entry.unwrap().path()).collect();
    trees.retain(|path| path.to_string_lossy().contains("cgroup-v"));
    trees.sort();
    trees
}

/// Collects the numbers of a document. An element of a list is known by its name, not by its index.
fn collect(fields: &mut Fields, place: &str, value: &Value) {
    match value {
        Value::Number(number) => drop(fields.insert(place.into(), number.as_f64().unwrap())),
        Value::Object(members) => {
            let counted = members.iter().filter(|(key, _)| !OF_NO_FILE.contains(&key.as_str()));
            counted.for_each(|(key, value)| collect(fields, &format!("{place}/{key}"), value));
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                let mut names = ["id", "what", "pid", "path", "name"].iter();
                let name = names.find_map(|key| item.get(key)).map(Value::to_string);
                let name = name.unwrap_or_else(|| index.to_string());
                collect(fields, &format!("{place}/{name}"), item);
            }
        }
        _ => {}
    }
}

/// Returns what the commands make of a tree, counted from the boot of its machine.
fn fields(root: &Root) -> Fields {
    let watch = |scope| {
        SystemWatch::at(root.clone(), scope, ProcessTotals::default(), Err(NO_STACKS.into()))
    };
    let mut found = Fields::new();
    let mut keep = |name: &str, document: Value| collect(&mut found, name, &document);
    for scope in [Scope::System, Scope::Cgroup("/load".into())] {
        if let Ok(mut system) = watch(scope.clone()) {
            system.count_from_boot();
            let interval = cost(&system.interval(), Ok(&calibration()));
            keep(&format!("stat {scope}"), serde_json::to_value(interval).unwrap());
        }
    }
    if let Ok(document) = hatstat(root, Ok(&calibration())) {
        keep("hatstat", serde_json::to_value(document).unwrap());
    }
    if let Ok(mut top) = TopWatch::at(root.clone(), watch(Scope::System).unwrap(), false) {
        top.count_from_start();
        keep("top", serde_json::to_value(top.interval(Ok(&calibration()))).unwrap());
    }
    found
}

/// A tree on disk, and what the commands make of it.
struct Tree {
    folder: tempfile::TempDir,
    files: Files,
    whole: Fields,
}

impl Tree {
    fn new(captured: &Path) -> Tree {
        let (folder, files) = (tempfile::tempdir().unwrap(), files(captured));
        let mut tree = Tree { folder, files, whole: Fields::new() };
        for (path, text) in &tree.files {
            let path = tree.root().path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        tree.whole = fields(&tree.root());
        tree
    }

    fn root(&self) -> Root {
        Root::at(self.folder.path())
    }

    /// Returns what the commands make of it while a file has another text, or is not there.
    fn with(&self, path: &str, text: Option<&str>) -> Fields {
        let file = self.root().path(path);
        match text {
            Some(text) => std::fs::write(&file, text).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        let left = fields(&self.root());
        std::fs::write(file, &self.files[path]).unwrap();
        left
    }

    /// Calls `check` with what is left without each file, and without each line that matters.
    fn without_each(&self, check: &mut dyn FnMut(&str, &Fields)) {
        for (path, text) in &self.files {
            check(path, &self.with(path, None));
            let has_names = HAVE_NAMES.iter().any(|name| path.ends_with(name));
            if has_names || text.contains("VmPTE") {
                let lines: Vec<&str> = text.lines().collect();
                self.without_lines(path, &lines, 0..lines.len(), check);
            }
        }
    }

    /// Halves a range of lines until each line that matters is alone.
    fn without_lines(
        &self,
        path: &str,
        lines: &[&str],
        range: Range<usize>,
        check: &mut dyn FnMut(&str, &Fields),
    ) {
        let others = lines[..range.start].iter().chain(&lines[range.end..]);
        let others: String = others.map(|line| format!("{line}\n")).collect();
        let left = self.with(path, Some(&others));
        if left == self.whole {
            return;
        }
        if range.len() == 1 {
            return check(&format!("{path}: {}", lines[range.start]), &left);
        }
        let middle = range.start.midpoint(range.end);
        self.without_lines(path, lines, range.start..middle, check);
        self.without_lines(path, lines, middle..range.end, check);
    }
}

#[test]
fn no_number_is_made_of_what_an_older_kernel_lacks() {
    let trees = trees();
    assert_eq!(trees.len(), 8);
    for captured in trees {
        let tree = Tree::new(&captured);
        let whole = &tree.whole;
        assert!(whole.len() > 80, "{captured:?}: {whole:?}");
        let is_sum = |place: &str| SUMS.iter().any(|sum| place.contains(&format!("/{sum}")));
        let mut without_source: BTreeSet<&String> = whole.keys().collect();
        without_source.retain(|place| !is_sum(place));
        tree.without_each(&mut |what, left| {
            for (place, value) in left.iter().filter(|(place, _)| !is_sum(place)) {
                let before = whole.get(place);
                assert_eq!(before, Some(value), "{captured:?} without {what}: {place}");
            }
            without_source.retain(|place| left.contains_key(*place));
        });
        assert!(without_source.is_empty(), "{captured:?}: rest on no line: {without_source:#?}");
    }
}
