//! `pagetax diagnose --parts`: a recording suggests the part of memory that deserves large pages, and trials
//! judge it.

use crate::recorded::EngineCommand;
use crate::whatif::by_part::ByPart;
use crate::{calibrate, machines, output};
use anyhow::{Context, Result, anyhow};
use pagetax_core::address_pattern::AddressPart;
use pagetax_core::diagnosis::{GAIN_SHARE_MIN, MEMORY_SHARE_MAX, PartsSearch, Verdict};
use pagetax_core::units::PageSize;
use pagetax_host::launch::program::Program;
use pagetax_host::pages::mechanism::{Conditions, Only};
use pagetax_host::pages::{PageSettings, Recipe};
use pagetax_recorder::forecast::{Forecast, Timed, address_set};
use pagetax_sim::hardware::{calibrated, configuration};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

/// The rounds: with the recording, a run to warm caches and one for the budget, they are twelve runs.
pub const ROUNDS: usize = 3;
/// The trial of all memory.
pub const ALL: &str = "thp-2M";

const BY: [AddressPart; 4] =
    [AddressPart::Heap, AddressPart::Stack, AddressPart::Arena, AddressPart::Mapping];

/// Records the command and adds a trial of the set that it suggests, before those of all memory.
pub fn search(
    argv: &[OsString],
    stdin: Option<PathBuf>,
    tunables: Option<&str>,
    recipes: &mut Vec<Recipe>,
) -> Result<PartsSearch> {
    output::note(
        "diagnose: the command is recorded once, which takes some 40 to 190 times its time",
    );
    let none = |why: String| PartsSearch { why_not: Some(why), run_count: 1, ..Default::default() };
    let mut command = EngineCommand::apart(argv, stdin, false)?;
    let by_part = ByPart::prepare(&BY, Some(&mut command))?;
    if let Some(why) = by_part.why_no_log {
        return Ok(PartsSearch { run_count: 0, ..none(why) });
    }
    let calibration = calibrate::needed()?;
    let mut model = machines::model_of(calibrated::MODEL, "this machine")?;
    calibrated::apply(&mut model, &calibration)?;
    let cpu = configuration::translation(&model)?;
    let (mut pages, _) = command.observe("diagnose: recording", by_part.predictor(&cpu))?;
    let timed = Timed::default();
    let sizes = [PageSize::M2];
    let mut forecast =
        Forecast::new(command.words().join(" "), &sizes, &pages.predicted(), &calibration, &timed)?;
    forecast.add_parts(&BY, &mut pages, &calibration, &timed)?;
    let Some(set) = address_set(&forecast.blocks, MEMORY_SHARE_MAX) else {
        let why = "by the recording, nothing is saved that a pattern names";
        return Ok(PartsSearch { predicted_gain_share: Some(0.0), ..none(why.into()) });
    };
    let mut search = PartsSearch {
        patterns: Some(set.patterns.clone()),
        touched_bytes: Some(set.touched_bytes),
        memory_share: Some(set.memory_share),
        predicted_gain_share: Some(set.gain_share),
        run_count: 1,
        ..PartsSearch::default()
    };
    if set.gain_share < GAIN_SHARE_MIN || set.memory_share > MEMORY_SHARE_MAX {
        search.patterns = None;
        search.why_not = Some(format!(
            "by the recording, {:.0} % of its memory keeps {:.0} % of the gain",
            set.memory_share * 100.0,
            set.gain_share * 100.0
        ));
        return Ok(search);
    }
    let system = PageSettings::host();
    let conditions = Conditions { system: &system, tunables, has_code: false };
    let own = std::env::current_exe().context("cannot find this program")?;
    let recipe = Recipe::new(Arc::new(Only(set.patterns)), &conditions);
    let program = argv.first().and_then(|name| Program::find(name).ok());
    match recipe.and_then(|r| r.heeded_by(program.as_ref()).map(|()| r)) {
        Ok(recipe) => recipes.insert(1.min(recipes.len()), recipe.through(&own.to_string_lossy())),
        Err(unavailable) => {
            return Err(anyhow!("{}\n  hint: {}", unavailable.why, unavailable.remedy));
        }
    }
    Ok(search)
}

/// Returns the verdict with the result of the search in its reason.
pub fn concluded(search: &PartsSearch, verdict: Verdict) -> Verdict {
    Verdict { reason: format!("{}; {}", verdict.reason, search.sentence()), ..verdict }
}
