//! Counts of a tree, to compare before and after a refactoring.

use super::rust::{self, ItemKind};
use super::{FILE_LINES_MAX, Source, findings, types};
use crate::shell;
use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The first line of documentation below which it says little.
const DOC_CHARACTERS_MIN: usize = 25;

/// Prints a row for each count.
pub fn print(tree: &Path, sources: &[Source]) -> Result<()> {
    let lines = |is_counted: &dyn Fn(&Source) -> bool| -> usize {
        sources.iter().filter(|s| is_counted(s)).map(|s| s.text.lines().count()).sum()
    };
    let rust: Vec<&Source> = sources.iter().filter(|source| source.is("rs")).collect();
    let mut docs = Vec::new();
    for source in &rust {
        docs.extend(rust::docs(&source.text)?.into_iter().map(|doc| (&source.path, doc)));
    }
    let begins = |text: &str| text.split_whitespace().next().unwrap_or("").to_string();
    let is_short = |(_, doc): &&(&PathBuf, rust::Doc)| {
        let first = doc.text.trim().lines().next().unwrap_or("");
        doc.kind != ItemKind::Noun && first.chars().count() < DOC_CHARACTERS_MIN
    };
    let clauses = ["Of", "What", "Whether", "Who", "Which"];
    let is_clause =
        |(_, doc): &&(&PathBuf, rust::Doc)| clauses.contains(&begins(&doc.text).trim_matches('.'));
    let types = types::definitions(sources)?;
    let twice: Vec<_> = types::repeated(&types).map(|(named, _)| named).collect();
    let exits = types.iter().filter(|((_, name), _)| name == "Exit");
    let code: Vec<(&PathBuf, &str)> = rust.iter().filter_map(|source| code(source)).collect();
    // Messages and comments name files too, so a reader shows by the path that it composes.
    let containing = |words: &[&str]| {
        code.iter().filter(|(_, text)| words.iter().any(|word| text.contains(word))).count()
    };
    let maps = containing(&["{pid}/maps\"))", "self/maps\\0\"", "(\"maps\")", "self/maps\")"]);
    let grammars = containing(&["strip_prefix(\"hugetlb", "\"heap\" =>", "Hugetlb, \"hugetlb\")"]);
    let mut requests = 0;
    for (path, text) in &code {
        requests +=
            types::page_size_requests(text).with_context(|| format!("{}", path.display()))?;
    }
    let is_long =
        |source: &&Source| !source.is("md") && source.text.lines().count() > FILE_LINES_MAX;
    let long = sources.iter().filter(is_long);
    let list = ["tree", "--package", "pagetax", "--edges", "normal", "--prefix", "none"];
    let packages = shell::output(Command::new("cargo").args(list).current_dir(tree))?;
    let packages: BTreeSet<&str> =
        packages.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    let rows = [
        ("lines of Rust", lines(&|source| source.is("rs"))),
        ("lines of C", lines(&|source| source.is("c") || source.is("h"))),
        ("packages that pagetax is built of", packages.len()),
        ("type names defined more than once in a crate", twice.len()),
        (
            "documentation under 25 characters (functions, fields)",
            docs.iter().filter(is_short).count(),
        ),
        (
            "documentation that begins with Of, What, Whether, Who, Which",
            docs.iter().filter(is_clause).count(),
        ),
        ("files that read /proc/PID/maps", maps),
        ("types named Exit", exits.map(|(_, places)| places.len()).sum()),
        ("types that ask for page sizes", requests),
        ("files that parse what asks for page sizes", grammars),
        ("files over 600 lines", long.count()),
        ("findings of tidy", findings(tree, sources)?.len()),
    ];
    rows.iter().for_each(|(name, count)| println!("| {name} | {count} |"));
    twice.iter().for_each(|(directory, name)| println!("twice: {} {name}", directory.display()));
    for (path, doc) in docs.iter().filter(is_short) {
        println!("short: {}:{}: {}", path.display(), doc.line, doc.text.trim());
    }
    Ok(())
}

/// Returns the text of a source of a crate before its tests; none for a test.
fn code(source: &Source) -> Option<(&PathBuf, &str)> {
    let is_code = source.path.starts_with("crates") && !types::is_test(&source.path);
    let text = source.text.split("#[cfg(test)]\nmod tests").next()?;
    is_code.then_some((&source.path, text))
}
