//! Rules of comments in Rust.

use super::prose;
use anyhow::Result;
use proc_macro2::LineColumn;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Lit, Meta};

/// The widest line of documentation.
const COLUMNS_MAX: usize = 110;
/// Words that begin a clause, not a sentence.
const CLAUSES: [&str; 5] = ["Of", "What", "Whether", "Who", "Which"];
/// Words with which a field's documentation is a fragment, no noun phrase.
const FRAGMENTS: [&str; 19] = [
    "And", "As", "At", "By", "For", "From", "How", "If", "In", "Not", "On", "That", "To",
    "Whatever", "When", "Where", "Why", "With", "Without",
];
/// Words that end in "s" and are no verbs.
const NO_VERBS: [&str; 7] = ["Always", "As", "Its", "Less", "Plus", "This", "Thus"];

/// A documented item, as far as the rules tell items apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemKind {
    Function,
    Field,
    /// A type, constant, variant or module, for which a noun phrase is right.
    Noun,
}

/// The documentation of one item.
#[derive(Debug)]
pub struct Doc {
    /// The number of its first line, from 1.
    pub line: usize,
    pub kind: ItemKind,
    pub text: String,
}

/// Checks the comments of a file.
pub fn check(text: &str, add: &mut impl FnMut(usize, String)) -> Result<()> {
    for (line, paragraph) in comments(text) {
        prose::check(&paragraph, |found| add(line, found));
    }
    for (number, line) in text.lines().enumerate() {
        let is_doc = ["///", "//!"].iter().any(|sign| line.trim_start().starts_with(sign));
        if is_doc && line.chars().count() > COLUMNS_MAX {
            add(number + 1, format!("documentation wider than {COLUMNS_MAX} columns"));
        }
    }
    for doc in docs(text)? {
        for rule in broken_rules(doc.kind, &doc.text) {
            let begin: String = doc.text.trim().chars().take(60).collect();
            add(doc.line, format!("{rule}: {}", begin.replace('\n', " ")));
        }
    }
    Ok(())
}

fn broken_rules(kind: ItemKind, text: &str) -> Vec<&'static str> {
    let first = text.split_whitespace().next().unwrap_or("");
    let word = first.trim_matches(|c: char| !c.is_alphanumeric());
    let mut broken = Vec::new();
    if CLAUSES.contains(&word) {
        broken.push("documentation begins with a clause");
    } else if kind == ItemKind::Function && (!word.ends_with('s') || NO_VERBS.contains(&word)) {
        broken.push("documentation of a function begins without a verb (\"Returns …\")");
    } else if kind == ItemKind::Field && FRAGMENTS.contains(&word) {
        broken.push("documentation of a field begins without a noun");
    }
    let is_one_word = text.split_whitespace().count() < 2;
    if kind != ItemKind::Noun && is_one_word {
        broken.push("documentation of one word");
    }
    broken
}

/// Returns the paragraphs of all comments that begin a line, with their lines; no code blocks.
fn comments(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut block: Vec<&str> = Vec::new();
    let mut begin = 0;
    let mut end_block = |begin: usize, block: &mut Vec<&str>| {
        let paragraphs = prose::paragraphs(&block.join("\n"));
        found.extend(paragraphs.map(|(line, text)| (begin + line, text)));
        block.clear();
    };
    for (number, line) in text.lines().enumerate() {
        match line.trim_start().strip_prefix("//") {
            Some(comment) => {
                if block.is_empty() {
                    begin = number;
                }
                block.push(comment.trim_start_matches(['/', '!']));
            }
            None => end_block(begin, &mut block),
        }
    }
    end_block(begin, &mut block);
    found
}

/// Returns the documentation of all items of a file.
pub fn docs(text: &str) -> Result<Vec<Doc>> {
    let file = syn::parse_file(text)?;
    let mut docs = Docs::default();
    docs.visit_file(&file);
    Ok(docs.found)
}

#[derive(Default)]
struct Docs {
    found: Vec<Doc>,
}

impl Docs {
    fn add(&mut self, kind: ItemKind, attributes: &[Attribute]) {
        let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
            Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
                Expr::Lit(literal) => match &literal.lit {
                    Lit::Str(line) => Some((attribute.span().start(), line.value())),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        });
        let lines: Vec<(LineColumn, String)> = lines.collect();
        if let Some((start, _)) = lines.first() {
            let line = start.line;
            let text: Vec<String> = lines.into_iter().map(|(_, text)| text).collect();
            self.found.push(Doc { line, kind, text: text.join("\n") });
        }
    }
}

impl<'a> Visit<'a> for Docs {
    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        self.add(ItemKind::Function, &item.attrs);
        visit::visit_item_fn(self, item);
    }
    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        self.add(ItemKind::Function, &item.attrs);
        visit::visit_impl_item_fn(self, item);
    }
    fn visit_trait_item_fn(&mut self, item: &'a syn::TraitItemFn) {
        self.add(ItemKind::Function, &item.attrs);
        visit::visit_trait_item_fn(self, item);
    }
    fn visit_foreign_item_fn(&mut self, item: &'a syn::ForeignItemFn) {
        self.add(ItemKind::Function, &item.attrs);
    }
    fn visit_field(&mut self, item: &'a syn::Field) {
        self.add(ItemKind::Field, &item.attrs);
        visit::visit_field(self, item);
    }
    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.add(ItemKind::Noun, &item.attrs);
        visit::visit_item_struct(self, item);
    }
    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.add(ItemKind::Noun, &item.attrs);
        visit::visit_item_enum(self, item);
    }
    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.add(ItemKind::Noun, &item.attrs);
        visit::visit_item_trait(self, item);
    }
    fn visit_variant(&mut self, item: &'a syn::Variant) {
        self.add(ItemKind::Noun, &item.attrs);
        visit::visit_variant(self, item);
    }
    fn visit_item_const(&mut self, item: &'a syn::ItemConst) {
        self.add(ItemKind::Noun, &item.attrs);
        visit::visit_item_const(self, item);
    }
    fn visit_item_static(&mut self, item: &'a syn::ItemStatic) {
        self.add(ItemKind::Noun, &item.attrs);
        visit::visit_item_static(self, item);
    }
    fn visit_impl_item_const(&mut self, item: &'a syn::ImplItemConst) {
        self.add(ItemKind::Noun, &item.attrs);
    }
    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.add(ItemKind::Noun, &item.attrs);
    }
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        self.add(ItemKind::Noun, &item.attrs);
        visit::visit_item_mod(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_finds_its_breach() {
        let text = "//! What this is.\n/// Of it.\nfn a() {}\n/// The count.\nfn b() {}\n\
                    struct S {\n    /// Which.\n    a: u8,\n    /// Size.\n    b: u8,\n}\n\
                    /// Returns it.\nfn c() {}\n/// A noun.\nstruct T;\n";
        let mut lines = Vec::new();
        check(text, &mut |line, _| lines.push(line)).unwrap();
        assert_eq!(lines, [2, 4, 7, 7, 9]);
    }
}
