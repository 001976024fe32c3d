//! Traces: the pages that a program went to, in a file that runs on machines like a job.
//!
//! ```text
//!  file    "pttrace\n" version:u32   head   block…   index?   trailer?
//!  frame   magic:u32 raw_bytes:u32 packed_bytes:u32 xxh3-64 of what is packed:u64   packed (lz4)
//!          head, block and index are frames; numbers are little-endian
//!  head    JSON ([`Head`])
//!  block   one thread's next changes of page ([`code`]), readable by itself
//!  index   where the blocks are and what is in each ([`index`])
//!  trailer offset of the index:u64 "pttindex"
//! ```
//!
//! Invariants: what was dropped while recording is the repeats of the page just used, by thread and
//! side, and nothing else, so that every TLB and every stack distance comes out exactly; the head says
//! so. Whole frames are all that is ever read: a file that is cut or damaged gives what is whole, with
//! a note of what is not. The index says nothing that the blocks do not.

pub mod code;
mod frame;
pub mod import;
mod index;
mod read;
mod replay;
mod write;

pub use index::{BlockInfo, PageRun};
pub use read::{Block, Trace};
pub use replay::Replayable;
pub use write::TraceWriter;

use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

/// The version of the format that is written.
pub const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"pttrace\n";

/// Files that begin like a trace.
pub fn is_trace(path: &Path) -> bool {
    let mut begin = [0; 8];
    let read =
        std::fs::File::open(path).and_then(|mut file| io::Read::read_exact(&mut file, &mut begin));
    read.is_ok() && begin == *MAGIC
}

/// What a trace is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// The command, or the file that was imported.
    pub command: Vec<String>,
    /// How it came about: an engine, or the format of the file.
    pub recorded_by: String,
    /// Of the instructions.
    pub architecture: String,
    /// What was left out.
    pub dropped: String,
}

impl Head {
    /// In one line.
    pub fn title(&self) -> String {
        format!("{}, recorded by {}", self.command.join(" "), self.recorded_by)
    }
}

/// For [`Head::dropped`].
pub const DROPPED: &str = "repeats of the 4K page just used, by thread, of data and of code";

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The system's word.
    #[error(
        "cannot {0} {1}: {2}\n  remedy: check the path, its permissions and the room on its disk"
    )]
    System(&'static str, PathBuf, #[source] io::Error),
    /// Something else.
    #[error(
        "{0} is no trace: {1}\n  remedy: make one with `pagetax record -o FILE.ptt -- COMMAND`"
    )]
    NoTrace(PathBuf, &'static str),
    /// Of the future, or of the past.
    #[error(
        "{0} is a trace of version {1}, and this pagetax reads version {VERSION}\n  remedy: read it \
         with the pagetax that wrote it, or record it again"
    )]
    Version(PathBuf, u32),
    /// A block.
    #[error("{0}: block {1} is damaged\n  remedy: copy the file again, or record it again")]
    Damaged(PathBuf, usize),
    /// A line of somebody else's trace.
    #[error("{place}:{line}: {problem}\n  remedy: {remedy}")]
    Import {
        /// The file.
        place: PathBuf,
        /// From 1.
        line: u64,
        /// What is wrong.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
}

#[cfg(test)]
mod tests;
