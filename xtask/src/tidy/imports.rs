//! The rule that imports between files of different folders go in no circles.

use super::{Finding, Source};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};

/// A module's path within its crate, such as `["server", "pool"]`.
type Module = Vec<String>;

/// Returns a finding for each import of another folder's file that imports the importer, directly or not.
pub fn findings(sources: &[Source]) -> Result<Vec<Finding>> {
    let mut crates: BTreeMap<PathBuf, BTreeMap<Module, &Source>> = BTreeMap::new();
    for source in sources.iter().filter(|source| source.is("rs")) {
        let directory = source.crate_directory();
        if let Ok(path) = source.path.strip_prefix(directory.join("src")) {
            crates.entry(directory).or_default().insert(module(path), source);
        }
    }
    let mut found = Vec::new();
    for files in crates.into_values() {
        let mut imports = BTreeMap::new();
        for (own, source) in &files {
            let file = syn::parse_file(&source.text);
            let mut paths = Paths::default();
            paths.visit_file(&file.with_context(|| format!("{}", source.path.display()))?);
            let is_test = own.last().is_some_and(|name| name == "tests");
            let targets = paths.found.iter().filter(|_| !is_test);
            let targets = targets.filter_map(|path| target(own, path, &files));
            imports.insert(own.clone(), targets.filter(|to| to != own).collect::<BTreeSet<_>>());
        }
        for (own, targets) in &imports {
            // `pool/mod.rs`, like `pool.rs`, belongs to the folder `pool` and to the one around it.
            let is_near = |one: &Module, other: &Module| {
                let parent = |module: &Module| module[..module.len().saturating_sub(1)].to_vec();
                parent(one) == parent(other) || parent(one) == *other || parent(other) == *one
            };
            let others = targets.iter().filter(|to| !is_near(own, to));
            found.extend(others.filter(|to| reaches(to, own, &imports)).map(|to| {
                let (path, line) = (files[own].path.clone(), 1);
                let text = format!("imports go in a circle through {}", files[to].path.display());
                Finding { path, line, text }
            }));
        }
    }
    Ok(found)
}

/// Returns the module that a file below `src` defines.
fn module(path: &Path) -> Module {
    let path = path.with_extension("");
    let mut parts: Module = path.iter().map(|part| part.to_string_lossy().into()).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        parts.pop();
    }
    parts
}

/// Returns the module of this crate that defines what a path names; none if it is another crate's.
fn target(own: &Module, path: &[String], files: &BTreeMap<Module, &Source>) -> Option<Module> {
    let (mut at, mut rest) = (own.clone(), path);
    match path.first()?.as_str() {
        "crate" => (at, rest) = (Module::new(), &path[1..]),
        "self" => rest = &path[1..],
        "super" => {}
        // The path of a child needs no `self`.
        first => {
            at.push(first.into());
            if !files.contains_key(&at) {
                return None;
            }
            rest = &path[1..];
        }
    }
    for part in rest {
        if part == "super" {
            at.pop();
            continue;
        }
        at.push(part.clone());
        if !files.contains_key(&at) {
            at.pop();
            break;
        }
    }
    Some(at)
}

fn reaches(from: &Module, to: &Module, imports: &BTreeMap<Module, BTreeSet<Module>>) -> bool {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(module) = open.pop() {
        if seen.insert(module) {
            open.extend(imports.get(module).into_iter().flatten());
        }
    }
    seen.contains(to)
}

/// The paths that a file names outside its tests.
#[derive(Default)]
struct Paths {
    found: Vec<Vec<String>>,
}

impl Paths {
    fn add_tree(&mut self, mut prefix: Vec<String>, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.add_tree(prefix, &path.tree);
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_tree(prefix.clone(), tree));
            }
            syn::UseTree::Name(name) => {
                prefix.push(name.ident.to_string());
                self.found.push(prefix);
            }
            syn::UseTree::Rename(rename) => {
                prefix.push(rename.ident.to_string());
                self.found.push(prefix);
            }
            syn::UseTree::Glob(_) => self.found.push(prefix),
        }
    }
}

impl<'a> Visit<'a> for Paths {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if item.ident != "tests" {
            visit::visit_item_mod(self, item);
        }
    }
    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        self.add_tree(Vec::new(), &item.tree);
    }
    fn visit_vis_restricted(&mut self, _: &'a syn::VisRestricted) {
        // `pub(in PATH)` imports nothing.
    }
    fn visit_path(&mut self, path: &'a syn::Path) {
        self.found.push(path.segments.iter().map(|part| part.ident.to_string()).collect());
        visit::visit_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_circles_between_folders_are_found() {
        let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
        let sources = [
            source("crates/a/src/lib.rs", "mod pool;\nmod wire;\nmod time;"),
            source("crates/a/src/pool/mod.rs", "mod page;\nuse crate::wire::{Reply, self};"),
            source("crates/a/src/pool/page.rs", "use super::Pool;\nuse crate::time::Clock;"),
            source("crates/a/src/wire/mod.rs", "mod ask;\nuse crate::time;"),
            source("crates/a/src/wire/ask.rs", "fn f(p: super::super::pool::page::Page) {}"),
            source("crates/a/src/time.rs", "mod tests { use crate::pool::Pool; }"),
        ];
        assert_eq!(findings(&sources).unwrap().len(), 0, "wire/mod.rs does not import ask.rs");
        let mut sources = Vec::from(sources);
        sources[3].text = "mod ask;\nuse ask::Ask;".into();
        let found: Vec<String> =
            findings(&sources).unwrap().iter().map(Finding::to_string).collect();
        let expected =
            "crates/a/src/wire/ask.rs:1: imports go in a circle through crates/a/src/pool/page.rs";
        assert_eq!(found, [expected], "pool/mod.rs and wire/mod.rs lie in one folder");
    }
}
