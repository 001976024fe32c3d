//! The page: documents inside one HTML file that shows them. `web/` has its sources.
//!
//! Invariant: the page is the data. It holds the bytes of each document, and [`documents`] gives them back.

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use pagetax_core::document;
use serde_json::Value;
use std::io::{Read, Write};

/// The page without documents, which `npm run build` in `web/` makes.
const SHELL: &str = include_str!("../../../assets/report.html");
/// The place of the documents in it.
const MARKER: &str = "<!--pagetax:documents-->";
const ELEMENT: &str = r#"<script type="application/gzip;base64" class="document" data-name=""#;
/// The most JSON that a page holds, and that a document of a page may unpack to, in bytes.
pub const MOST_BYTES: usize = 50_000_000;

/// A document as a page holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedJson {
    /// The name of its file, or its kind.
    pub name: String,
    /// Its JSON, with all white space.
    pub text: String,
}

/// Returns the page that shows these documents.
///
/// # Errors
/// If they have more than [`MOST_BYTES`].
pub fn page(documents: &[NamedJson]) -> Result<String> {
    let bytes: usize = documents.iter().map(|document| document.text.len()).sum();
    if bytes > MOST_BYTES {
        bail!(
            "{} MB of JSON are more than a page holds, which is {} MB\n  hint: give each document a page of its \
             own, or record fewer runs or longer intervals",
            bytes.div_ceil(1_000_000),
            MOST_BYTES / 1_000_000
        );
    }
    let (before, after) =
        SHELL.split_once(MARKER).context("the page has no place for documents")?;
    let elements: Vec<String> = documents.iter().map(element).collect::<Result<_>>()?;
    Ok(format!("{before}{}{after}", elements.join("\n")))
}

fn element(document: &NamedJson) -> Result<String> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(document.text.as_bytes())?;
    let content = STANDARD.encode(encoder.finish()?);
    Ok(format!("{ELEMENT}{}\">{content}</script>", escaped(&document.name)))
}

/// Returns true if a text is a page that [`page`] made.
pub fn is_page(text: &str) -> bool {
    text.starts_with("<!doctype html>") && text.contains(ELEMENT)
}

/// Returns the documents of a page that [`page`] made, in their order.
///
/// # Errors
/// If the text is cut, or was changed.
pub fn documents(page: &str) -> Result<Vec<NamedJson>> {
    page.split(ELEMENT).skip(1).map(read_element).collect()
}

/// Reads an element from its name on.
fn read_element(text: &str) -> Result<NamedJson> {
    let damaged = "the page is damaged\n  hint: copy it again, or make it again from its documents";
    let (name, rest) = text.split_once("\">").context(damaged)?;
    let (content, _) = rest.split_once("</script>").context(damaged)?;
    let content = STANDARD.decode(content).context(damaged)?;
    let mut text = String::new();
    let limit = MOST_BYTES as u64 + 1;
    GzDecoder::new(&content[..]).take(limit).read_to_string(&mut text).context(damaged)?;
    match text.len() > MOST_BYTES {
        true => bail!(damaged),
        false => Ok(NamedJson { name: unescaped(name), text }),
    }
}

/// Splits the text of a file into the JSON documents that stand in it one after another.
///
/// # Errors
/// If one of them is not a document of pagetax, or of a newer one.
pub fn split(name: &str, text: &str) -> Result<Vec<NamedJson>> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let mut documents = Vec::new();
    let mut start = 0;
    while let Some(value) = values.next() {
        let value = value.map_err(document::DocumentError::from)?;
        if document::kind_of(&value)?.is_none() {
            bail!(
                "not a document of pagetax: it states no kind\n  hint: write one with --json=FILE"
            );
        }
        let end = values.byte_offset();
        // The newline that ends a document belongs to it.
        let end = end + usize::from(text[end..].starts_with('\n'));
        documents.push(NamedJson { name: name.into(), text: text[start..end].into() });
        start = end;
    }
    match documents.is_empty() {
        true => bail!("an empty file\n  hint: write a document with --json=FILE"),
        false => Ok(documents),
    }
}

const ESCAPES: [(&str, &str); 4] = [("&", "&amp;"), ("\"", "&quot;"), ("<", "&lt;"), (">", "&gt;")];

fn escaped(text: &str) -> String {
    ESCAPES.iter().fold(text.into(), |text: String, (plain, escape)| text.replace(plain, escape))
}

fn unescaped(text: &str) -> String {
    ESCAPES
        .iter()
        .rev()
        .fold(text.into(), |text: String, (plain, escape)| text.replace(escape, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, text: &str) -> NamedJson {
        NamedJson { name: name.into(), text: text.into() }
    }

    #[test]
    fn a_page_gives_its_documents_back() {
        let hostile = "\"><script>alert('&lt;')</script>";
        let json = "{\"schema\": 1,\n \"kind\": \"song\", \"name\": \"</script>\"}\n";
        let documents = [named(hostile, json), named("b.json", "{}\n")];
        let page = page(&documents).unwrap();
        assert!(is_page(&page));
        assert!(!page.contains("<script>alert"));
        assert_eq!(super::documents(&page).unwrap(), documents);
    }

    #[test]
    fn documents_that_follow_each_other_are_split_without_losing_a_byte() {
        let song = "{\"schema\": 1, \"kind\": \"song\"}";
        let text = format!("{song}\n\n  {song}{song}\n");
        let documents = split("f", &text).unwrap();
        assert_eq!(documents.len(), 3);
        assert_eq!(documents.iter().map(|one| &*one.text).collect::<String>(), text);
    }

    #[test]
    fn what_is_no_document_is_refused() {
        let error = |text: &str| format!("{:#}", split("f", text).unwrap_err());
        assert!(error("").contains("an empty file"));
        assert!(error("{\"kind\": ").contains("not a document"));
        assert!(error("{}").contains("no kind"));
        assert!(error("{\"schema\": 9, \"kind\": \"song\"}").contains("newer"));
        let page = page(&[named("f", "{}")]).unwrap();
        let cut = &page[..page.len() - MARKER.len() - 20];
        assert!(documents(&page.replace("H4s", "!!!")).is_err(), "{cut}");
        let large = named("f", &" ".repeat(MOST_BYTES + 1));
        assert!(super::page(&[large]).unwrap_err().to_string().contains("51 MB"));
    }
}
