//! The rule that a crate defines each type name once.

use super::{Finding, Source};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};

/// Names that each module may have for itself.
const MAY_REPEAT: [&str; 2] = ["Args", "Error"];

/// The definitions of types outside tests: crate and name, with their places.
pub type Definitions = BTreeMap<(PathBuf, String), Vec<(PathBuf, usize)>>;

/// Returns the definitions of all types.
pub fn definitions(sources: &[Source]) -> Result<Definitions> {
    let mut found = Definitions::new();
    for source in sources.iter().filter(|source| source.is("rs") && !is_test(&source.path)) {
        let mut types = Types::default();
        let file = syn::parse_file(&source.text);
        types.visit_file(&file.with_context(|| format!("{}", source.path.display()))?);
        for (name, line) in types.found {
            let places = found.entry((source.crate_directory(), name)).or_default();
            places.push((source.path.clone(), line));
        }
    }
    Ok(found)
}

/// Returns true for files in a folder of tests.
pub fn is_test(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "tests")
}

/// Returns the names that a crate defines more than once.
pub fn repeated(
    definitions: &Definitions,
) -> impl Iterator<Item = (&(PathBuf, String), &Vec<(PathBuf, usize)>)> {
    let is_repeated = |((_, name), places): &(&(PathBuf, String), &Vec<_>)| {
        places.len() > 1 && !MAY_REPEAT.contains(&name.as_str())
    };
    definitions.iter().filter(is_repeated)
}

/// Returns a finding for each definition of a repeated name except for the first.
pub fn findings(definitions: &Definitions) -> Vec<Finding> {
    let mut found = Vec::new();
    for ((_, name), places) in repeated(definitions) {
        let (first, line) = &places[0];
        found.extend(places[1..].iter().map(|(path, at)| Finding {
            path: path.clone(),
            line: *at,
            text: format!("the crate defines `{name}` in {}:{line} too", first.display()),
        }));
    }
    found
}

/// Returns the number of types that ask for a page size: of a hugetlb pool, of several parts of a program, or
/// in bytes.
pub fn page_size_requests(text: &str) -> Result<usize> {
    let mut requests = PageSizeRequests::default();
    requests.visit_file(&syn::parse_file(text)?);
    Ok(requests.count)
}

#[derive(Default)]
struct PageSizeRequests {
    count: usize,
}

impl<'a> Visit<'a> for PageSizeRequests {
    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        let asks = item.variants.iter().any(|variant| variant.ident == "Hugetlb");
        let fields = item.variants.iter().flat_map(|variant| &variant.fields);
        self.count += usize::from(asks || is_by_part(fields));
    }
    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.count += usize::from(is_by_part(item.fields.iter()));
    }
    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.count += usize::from(item.ident == "PageBytes");
    }
}

/// Returns true if at least three fields are optional page sizes.
fn is_by_part<'a>(fields: impl Iterator<Item = &'a syn::Field>) -> bool {
    use syn::{GenericArgument::Type as Argument, PathArguments::AngleBracketed, Type};
    let is_size = |field: &&syn::Field| {
        let Type::Path(of) = &field.ty else { return false };
        let option = of.path.segments.last().filter(|part| part.ident == "Option");
        let Some(AngleBracketed(of)) = option.map(|part| &part.arguments) else { return false };
        matches!(of.args.first(), Some(Argument(Type::Path(of))) if of.path.is_ident("PageSize"))
    };
    fields.filter(is_size).count() >= 3
}

#[derive(Default)]
struct Types {
    found: Vec<(String, usize)>,
}

impl Types {
    fn add(&mut self, name: &syn::Ident) {
        self.found.push((name.to_string(), name.span().start().line));
    }
}

impl<'a> Visit<'a> for Types {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if item.ident != "tests" {
            visit::visit_item_mod(self, item);
        }
    }
    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.add(&item.ident);
    }
    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.add(&item.ident);
    }
    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.add(&item.ident);
    }
    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.add(&item.ident);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_repeat_within_a_crate_only_and_not_in_tests() {
        let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
        let sources = [
            source("crates/a/src/lib.rs", "struct Area;\nstruct Args;\nmod tests { enum Area {} }"),
            source("crates/a/src/other.rs", "fn f() {}\nenum Area {}\nstruct Args;"),
            source("crates/a/tests/area.rs", "struct Area;"),
            source("crates/b/src/lib.rs", "type Area = u8;"),
        ];
        let findings = findings(&definitions(&sources).unwrap());
        let found: Vec<String> = findings.iter().map(Finding::to_string).collect();
        let expected =
            "crates/a/src/other.rs:2: the crate defines `Area` in crates/a/src/lib.rs:1 too";
        assert_eq!(found, [expected]);
    }
}
