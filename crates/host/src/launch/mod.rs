//! Starting programs: their files, their environment, our libraries in them, and the signals that reach them.

pub mod installed;
mod launcher;
pub mod preload;
pub mod program;
pub mod signals;

pub use launcher::Launcher;
