//! Where trapstat's numbers come from: one small trait.

use super::args::Args;
use anyhow::Result;
use pagetax_core::trapstat::Listing;
use pagetax_recorder::profile::Profile;

/// Receives listings, oldest first.
pub type Sink<'a> = dyn FnMut(Listing) -> Result<()> + 'a;

/// A source of listings.
pub trait Backend {
    /// Returns its name, as in `--backend`.
    fn name(&self) -> &'static str;

    /// Returns the reason for its choice, and the nature of its numbers.
    fn why(&self) -> String;

    /// Runs until the command, the count of listings or the user's patience ends.
    fn run(&mut self, args: &Args, sink: &mut Sink<'_>) -> Result<Finished>;
}

/// The end of a run.
#[derive(Debug, Default)]
pub struct Finished {
    /// The command's own exit code, or ours.
    pub code: u8,
    /// The elapsed time of the command.
    pub wall_ns: u64,
    /// Misses by code and by memory, for each machine configuration.
    pub profiles: Vec<Profile>,
    /// Limits of the numbers, for the reader.
    pub notes: Vec<String>,
}
