//! Starting programs: their files, their environment and our libraries in them.

pub mod installed;
pub mod preload;
pub mod program;
