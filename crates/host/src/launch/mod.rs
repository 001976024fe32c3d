//! Starting programs: their files, their environment, our libraries in them, and the signals that reach them.

mod launcher;
pub mod libraries;
pub mod preload;
pub mod program;
pub mod signals;

pub use launcher::Launcher;
