//! The registry of JSON documents: each kind is unique, is described, has its schema, and reads back as
//! written.
//!
//! docs/schema has a JSON Schema for each kind, and docs/schema/examples a document. If BLESS is set, as by
//! `cargo xtask bless`, the test writes the schemas. Invariant: a schema only gains keys. The test refuses to
//! write one that lost any.

use super::documents::registered;
use pagetax_core::compare::Comparison;
use pagetax_core::document::{self, Document, SCHEMA};
use pagetax_core::report::Run;
use pagetax_remote::server::pool::ServerReport;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// A kind of document, with its type erased.
pub struct Registered {
    kind: &'static str,
    schema: Value,
    /// Reads a document and writes it again.
    rewrite: fn(&str) -> anyhow::Result<String>,
}

impl Registered {
    pub fn of<D: Document + DeserializeOwned + JsonSchema>() -> Registered {
        let settings = SchemaSettings::draft2020_12().for_serialize();
        let mut schema = settings.into_generator().into_root_schema_for::<D>().to_value();
        let properties = schema["properties"].as_object_mut().expect("a document is an object");
        properties.insert("schema".into(), json!({"const": SCHEMA}));
        properties.insert("kind".into(), json!({"const": D::KIND}));
        let required = schema["required"].as_array_mut().expect("a document has keys");
        required.extend(["schema".into(), "kind".into()]);
        let rewrite = |text: &str| Ok(document::from_json::<D>(text)?.to_json()?);
        Registered { kind: D::KIND, schema, rewrite }
    }
}

/// Returns the documents of all commands, and those that are parts or single entries of others.
fn all() -> Vec<Registered> {
    let mut all = registered();
    all.extend([Registered::of::<Run>(), Registered::of::<Comparison>()]);
    all.push(Registered::of::<ServerReport>());
    all
}

fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// Collects the path of each key of `schema`, a part of the schema `root`. Definitions count where they are
/// referred to: their names are those of Rust types, which may change.
fn keys(root: &Value, schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    match schema {
        Value::Object(map) => {
            if let Some(reference) = map.get("$ref").and_then(Value::as_str) {
                let definition = root.pointer(reference.trim_start_matches('#'));
                keys(root, definition.expect("a definition"), path, found);
            }
            for (name, value) in map.iter().filter(|(name, _)| *name != "$defs") {
                let path = format!("{path}/{name}");
                if path.ends_with(&format!("/properties/{name}")) {
                    found.insert(path.clone());
                }
                keys(root, value, &path, found);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| keys(root, value, path, found)),
        _ => {}
    }
}

#[test]
fn each_kind_is_unique_and_described() {
    let report = std::fs::read_to_string(docs().join("report.md")).unwrap();
    let mut seen = BTreeSet::new();
    for Registered { kind, .. } in all() {
        assert!(seen.insert(kind), "two documents are of kind {kind}");
        let heading = format!("## `kind: \"{kind}\"`");
        assert!(report.contains(&heading), "docs/report.md does not describe {kind}");
    }
}

#[test]
fn each_schema_is_committed_and_only_gains_keys() {
    for Registered { kind, schema, .. } in all() {
        let path = docs().join(format!("schema/{kind}.json"));
        let text = format!("{schema:#}\n");
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        if text == committed {
            continue;
        }
        let bless = std::env::var_os("BLESS").is_some();
        assert!(bless, "{} is out of date; `cargo xtask bless` writes it", path.display());
        let [mut before, mut after] = [BTreeSet::new(), BTreeSet::new()];
        let committed = serde_json::from_str(&committed).unwrap_or_default();
        keys(&committed, &committed, "", &mut before);
        keys(&schema, &schema, "", &mut after);
        let lost: Vec<_> = before.difference(&after).collect();
        assert!(lost.is_empty(), "{kind} lost {lost:?}; keys are only ever added");
        std::fs::write(&path, text).unwrap();
    }
}

#[test]
fn each_example_is_read_back_as_written() {
    for Registered { kind, rewrite, .. } in all() {
        let path = docs().join(format!("schema/examples/{kind}.json"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{kind}: {error}"));
        let again = rewrite(&text).unwrap_or_else(|error| panic!("{kind}: {error:#}"));
        assert_eq!(again, text, "{kind}");
    }
}
