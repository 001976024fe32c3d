//! Jobs: the TOML language, and its resolution into a [`Plan`].
//!
//! A job has parameters, regions of memory, and phases that touch them. Invariant: a job that parses
//! names nothing unknown. A job that resolves is complete. Each error has file, line, column and a hint.
//! There is no scripting: quantities may use `$parameters` and the four operations
//! ([`crate::quantity`]).

mod builtin;
mod document;
mod recorded;
mod resolve;

pub use builtin::builtin_names;
pub use document::{Job, Param};

/// An error in a job or in the parameters given to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}\n  hint: {remedy}")]
pub struct JobError {
    /// The place, such as `jobs/mine.toml:12:8` or `--set size`.
    pub place: String,
    /// The error, with the offending value.
    pub message: String,
    /// The hint: a way to fix the job file.
    pub remedy: String,
}

/// Returns the line and column (both from 1) of a byte offset.
fn line_and_column(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    (line, column)
}

/// Returns the known word nearest to a misspelt one, if one is near.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|candidate| (edit_distance(word, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min()
        .map(|(_, candidate)| candidate)
}

/// Returns Levenshtein's distance.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests;
