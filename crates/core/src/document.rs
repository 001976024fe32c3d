//! The envelope of all JSON documents: `schema` and `kind` first, then the keys of the kind.
//!
//! Invariant: within a schema, keys are only ever added. Each kind is one type, and each type one kind.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The version of every document.
pub const SCHEMA: u32 = 1;

/// A type that is written as a JSON document.
pub trait Document: Serialize {
    /// The `kind` of the document, in snake_case. No other type has it.
    const KIND: &'static str;

    /// Returns the document as indented JSON that ends in a newline.
    ///
    /// # Errors
    /// If a map has keys that JSON cannot hold.
    fn to_json(&self) -> Result<String, serde_json::Error>
    where
        Self: Sized,
    {
        write(self)
    }
}

/// The reason why a text is not the wanted document.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// Not JSON, or a key is absent or has the wrong type.
    #[error("not a document of pagetax: {0}; write one with --json")]
    Malformed(#[from] serde_json::Error),
    /// A later version of pagetax wrote it.
    #[error("schema {0} is newer than this pagetax, which knows {SCHEMA}; use a newer pagetax")]
    Newer(u64),
    /// The document is of another kind, or of none.
    #[error("a document of kind `{found}`, not `{wanted}`")]
    Kind {
        /// The kind that the text states, or `none`.
        found: String,
        /// The kind that the caller reads.
        wanted: &'static str,
    },
}

#[derive(Serialize)]
struct Envelope<'a, D> {
    schema: u32,
    kind: &'static str,
    #[serde(flatten)]
    body: &'a D,
}

/// Writes the envelope of a document and its body.
pub(crate) fn write<D: Document>(document: &D) -> Result<String, serde_json::Error> {
    let envelope = Envelope { schema: SCHEMA, kind: D::KIND, body: document };
    Ok(serde_json::to_string_pretty(&envelope)? + "\n")
}

/// Reads a document of one kind. Keys that this version does not know are ignored.
///
/// # Errors
/// See [`DocumentError`].
pub fn from_json<D: Document + DeserializeOwned>(text: &str) -> Result<D, DocumentError> {
    from_value(serde_json::from_str(text)?)
}

/// Does the same as [`from_json`] for JSON that is already parsed.
///
/// # Errors
/// See [`DocumentError`].
pub fn from_value<D: Document + DeserializeOwned>(value: Value) -> Result<D, DocumentError> {
    match kind_of(&value)? {
        Some(kind) if kind == D::KIND => Ok(D::deserialize(value)?),
        kind => {
            Err(DocumentError::Kind { found: kind.unwrap_or("none").to_string(), wanted: D::KIND })
        }
    }
}

/// Returns the kind that a document states, if this version knows its schema.
///
/// # Errors
/// [`DocumentError::Newer`]
pub fn kind_of(value: &Value) -> Result<Option<&str>, DocumentError> {
    match value["schema"].as_u64() {
        Some(schema) if schema > u64::from(SCHEMA) => Err(DocumentError::Newer(schema)),
        _ => Ok(value["kind"].as_str()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, serde::Deserialize)]
    struct Song {
        length_ns: u64,
    }

    impl Document for Song {
        const KIND: &'static str = "song";
    }

    #[test]
    fn schema_and_kind_come_first_and_the_document_is_read_back() {
        let text = Song { length_ns: 7 }.to_json().unwrap();
        assert_eq!(text, "{\n  \"schema\": 1,\n  \"kind\": \"song\",\n  \"length_ns\": 7\n}\n");
        assert_eq!(from_json::<Song>(&text).unwrap(), Song { length_ns: 7 });
    }

    #[test]
    fn another_document_is_refused_with_the_reason() {
        let error = |text: &str| from_json::<Song>(text).unwrap_err().to_string();
        assert!(error("{").contains("not a document"));
        assert!(error(r#"{"schema":2,"kind":"song"}"#).contains("newer"));
        assert!(error(r#"{"schema":1,"kind":"run"}"#).contains("kind `run`, not `song`"));
        assert!(error(r#"{"schema":1}"#).contains("kind `none`"));
        assert!(error(r#"{"schema":1,"kind":"song"}"#).contains("length_ns"));
    }
}
