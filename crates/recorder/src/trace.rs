//! Traces: a program's pages in a file, which machines replay like a job.
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
//! Invariants: a trace lacks only repeats of the page just used, by thread and side. Every TLB and every
//! stack distance is therefore exact. The head states this. Readers use whole frames only: of a cut or
//! damaged file they read the whole frames and note the rest. The index has nothing that the blocks do
//! not have.

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

/// The version of the format. The second one also has what system calls use, the third one pages of zeros.
pub const VERSION: u32 = 3;
/// The first version that can be read.
const FIRST_VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"pttrace\n";

/// Returns true if the file begins like a trace.
pub fn is_trace(path: &Path) -> bool {
    let mut begin = [0; 8];
    let read =
        std::fs::File::open(path).and_then(|mut file| io::Read::read_exact(&mut file, &mut begin));
    read.is_ok() && begin == *MAGIC
}

/// The head of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// The command, or the file that was imported.
    pub command: Vec<String>,
    /// The engine that recorded it, or the format of the imported file.
    pub recorded_by: String,
    /// The program's instruction set.
    pub architecture: String,
    /// The accesses that were left out.
    pub dropped: String,
    /// The allocator that placed the program's memory, if it was not the program's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocator: Option<String>,
}

impl Head {
    /// Returns a title of one line.
    pub fn title(&self) -> String {
        format!("{}, recorded by {}", self.command.join(" "), self.recorded_by)
    }
}

/// The value of [`Head::dropped`].
pub const DROPPED: &str = "repeats of the 4K page just used, by thread, of data and of code";

/// An error: a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A system call failed.
    #[error(
        "cannot {0} {1}: {2}\n  hint: check the path, its permissions and the room on its disk"
    )]
    System(&'static str, PathBuf, #[source] io::Error),
    /// The file is not a trace.
    #[error("{0} is no trace: {1}\n  hint: make one with `pagetax record -o FILE.ptt -- COMMAND`")]
    NoTrace(PathBuf, &'static str),
    /// The file has another version.
    #[error(
        "{0} is a trace of version {1}, and this pagetax reads versions up to {VERSION}\n  hint: read it \
         with the pagetax that wrote it, or record it again"
    )]
    Version(PathBuf, u32),
    /// A block is damaged.
    #[error("{0}: block {1} is damaged\n  hint: copy the file again, or record it again")]
    Damaged(PathBuf, usize),
    /// A line of an imported trace is invalid.
    #[error("{place}:{line}: {problem}\n  hint: {remedy}")]
    Import {
        /// The path of the trace, or a name for it.
        place: PathBuf,
        /// The number of the line, from 1.
        line: u64,
        /// A description of the error.
        problem: String,
        /// The hint: a way to get a valid trace.
        remedy: &'static str,
    },
}

#[cfg(test)]
mod tests;
