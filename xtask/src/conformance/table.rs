//! Results on disk, and the table of docs/support.md that they make.

use crate::book;
use anyhow::Result;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::suites::SUITES;
use super::ways::Way;

/// Folder of the results, a file each, as several chores may run at once.
const RESULTS: &str = "results";

/// Keeps one result, in place of an earlier one of the same suite, locale and way.
pub fn keep(folder: &Path, key: &str, entry: &Value) -> Result<()> {
    let results = folder.join(RESULTS);
    fs::create_dir_all(&results)?;
    Ok(fs::write(results.join(format!("{key}.json")), serde_json::to_string_pretty(entry)?)?)
}

/// Returns all results, in the order of their keys.
fn read(folder: &Path) -> Result<Vec<Value>> {
    let mut files: Vec<_> =
        fs::read_dir(folder.join(RESULTS))?.map(|file| Ok(file?.path())).collect::<Result<_>>()?;
    files.sort();
    files.iter().map(|file| Ok(serde_json::from_slice(&fs::read(file)?)?)).collect()
}

/// Writes the table of all results into the document.
pub fn write(folder: &Path) -> Result<()> {
    book::write("cargo xtask conformance", &table(&read(folder)?))
}

fn table(all: &[Value]) -> String {
    let mut out = String::from("| Suite | Locales | Lines |");
    let ways = &Way::ALL[1..];
    ways.iter().for_each(|way| out += &format!(" `{}` |", way.command()));
    out += &format!("\n|{}\n", "---|".repeat(3 + ways.len()));
    let mut notes = Vec::new();
    for suite in SUITES {
        let of_suite: Vec<&Value> = all.iter().filter(|e| e["suite"] == suite.name).collect();
        if of_suite.is_empty() {
            continue;
        }
        let locales: BTreeSet<&str> =
            of_suite.iter().filter_map(|e| e["locale"].as_str()).collect();
        let locales = Vec::from_iter(locales).join(", ");
        out += &format!("| {} | {locales} | {} |", suite.name, of_suite[0]["lines"]);
        for way in ways {
            let entries: Vec<&&Value> =
                of_suite.iter().filter(|e| e["way"] == way.name()).collect();
            out += &format!(" {} |", cell(&entries));
            notes.extend(entries.iter().flat_map(|entry| note(entry)));
        }
        out += "\n";
    }
    if !notes.is_empty() {
        out += &format!("\n{}\n", notes.join("\n"));
    }
    out
}

/// Formats a cell: the differences of all locales together.
fn cell(entries: &[&&Value]) -> String {
    let count = |key: &str| -> usize {
        entries.iter().map(|entry| entry[key].as_array().map_or(0, Vec::len)).sum()
    };
    match (entries.is_empty(), count("limits"), count("differences")) {
        (true, ..) => "not run".into(),
        (_, 0, 0) => "as natively".into(),
        (_, _, 0) => "a limit".into(),
        (_, _, more) => format!("**{more} differ**"),
    }
}

/// Returns the notes on a result for below the table: reasons of limits, and each line that differs.
fn note(entry: &Value) -> Vec<String> {
    let place = ["suite", "locale", "way"].map(|key| entry[key].as_str().unwrap_or_default());
    let texts = |key: &str| -> Vec<&str> {
        entry[key].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
    };
    let differing = texts("differences").into_iter().map(|line| format!("`{line}`"));
    let all = texts("limits").into_iter().map(String::from).chain(differing);
    all.map(|text| format!("- {}: {text}", place.join(", "))).collect()
}
