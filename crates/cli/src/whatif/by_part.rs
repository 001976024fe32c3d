//! Recordings that know which part of memory each page belongs to.

use crate::recorded::EngineCommand;
use anyhow::{Context, Result, anyhow};
use pagetax_core::address_pattern::AddressPart;
use pagetax_core::page_size::{MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use pagetax_host::pages::launch::{Surroundings, plan};
use pagetax_host::pages::only::{Allocations, OnlyError};
use pagetax_recorder::predict::Predictor;
use pagetax_sim::hardware::translation::Translation;
use tempfile::NamedTempFile;

/// A pattern that names nothing: malloc orders its memory as under any pattern, on base pages.
pub const NOTHING: &str = "heap@0-0";

/// A recording by part of memory.
pub struct ByPart {
    parts: Vec<AddressPart>,
    log: NamedTempFile,
    /// The reason why only segments are known, not the order of allocation.
    pub why_no_log: Option<String>,
}

impl ByPart {
    /// Prepares a command, if one is recorded: its preload library logs what it allocates.
    pub fn prepare(parts: &[AddressPart], command: Option<&mut EngineCommand>) -> Result<ByPart> {
        let log = NamedTempFile::new().context("cannot make a file for the log of memory")?;
        let mut by_part = ByPart { parts: parts.into(), log, why_no_log: None };
        if let Some(command) = command {
            by_part.why_no_log = by_part.log_into(command).err().map(|why| format!("{why:#}"));
        }
        Ok(by_part)
    }

    fn log_into(&self, command: &mut EngineCommand) -> Result<()> {
        let heap = PartSizes::of(&[MemoryPart::Heap], PageSizeRequest::preferred(PageSize::M2));
        let around = Surroundings::here();
        let mut launch = plan(command.program.clone(), &heap, &around, false, false)?;
        launch.restrict(NOTHING, &heap, &around).map_err(|error| match error {
            // The user gave no pattern.
            OnlyError::Unavailable { why, .. } => anyhow!(why),
            OnlyError::Bad(bad) => bad.into(),
        })?;
        launch.log_allocations(self.log.path());
        command.environment = launch.environment;
        Ok(())
    }

    /// Returns the predictor for this recording. Code is not among its parts: it has no calibrated cost.
    pub fn predictor(&self, cpu: &Translation) -> Predictor {
        let parts: Vec<AddressPart> =
            self.parts.iter().filter(|part| **part != AddressPart::Text).copied().collect();
        Predictor::by_part(cpu, PageSize::M2.shift(), &parts, Allocations::at(self.log.path()))
    }
}
