//! TLBs and their refill from a model's tables: `[dtlb_1a]` is the first array of the first level for
//! data, `[itlb_2a]` one of the second level for instructions.

use super::cached::{CachedMmu, Refill};
use super::set::Replacement;
use super::tlb::{ArraySpec, GeometryError, LevelSpec, MAX_ARRAYS, TlbHierarchy};
use super::translation::{Translation, hit_times};
use super::tsb::{HandlerSpec, SoftwareRefill};
use super::walk::{LineCacheSpec, NestedSpec, PageWalker, StructureCacheSpec, WalkNs, WalkerSpec};
use crate::model::{Model, ModelError};
use pagetax_core::units::PageSize;

/// The most levels of a TLB.
const LEVELS_MAX: u32 = 4;

/// Reads the hardware of a model with `page_sizes`, for `cpus`: a software handler if there is a
/// table `[handler]`, a page walker otherwise.
///
/// # Errors
/// Fails if a constant is absent or a geometry impossible.
pub fn load(model: &Model, base: PageSize, cpus: usize) -> Result<CachedMmu, ModelError> {
    let (data, instructions) = (tlb(model, "dtlb")?, tlb(model, "itlb")?);
    let refill = refill(model, cpus)?;
    let level_ps = level_ps(model, &data)?;
    // Jobs have their own costs. This call only checks the table's constants.
    program_times(model)?;
    Ok(CachedMmu::new(base, data, instructions, cpus, refill, &level_ps))
}

/// Reads the hardware of one CPU, for accesses from outside of the simulation.
///
/// # Errors
/// Fails if the model has no TLBs, a constant is absent or a geometry impossible.
pub fn translation(model: &Model) -> Result<Translation, ModelError> {
    let (data, instructions) = (tlb(model, "dtlb")?, tlb(model, "itlb")?);
    let level_ps = hit_times(&data, &level_ps(model, &data)?);
    Ok(Translation { data, instructions, refill: refill(model, 1)?, level_ps })
}

/// The costs of a recorded program without translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramTimes {
    /// The time of an instruction whose operands are in the nearest cache, in picoseconds.
    pub instruction_ps: u64,
    /// The added time of a load or store far from recent ones, in picoseconds.
    pub far_ps: u64,
}

/// Reads table `[program]`. The cost of a job's random access includes the instructions of its loop. A
/// recording counts instructions separately, so they are subtracted here from the cost of a far access.
///
/// # Errors
/// Fails if a constant is absent.
pub fn program_times(model: &Model) -> Result<ProgramTimes, ModelError> {
    let instruction_ps = model.ps("program", "instruction")?;
    let loop_ps = model.count("program", "loop")?.saturating_mul(instruction_ps);
    let far_ps = model.ps("access", "random")?.saturating_sub(loop_ps);
    Ok(ProgramTimes { instruction_ps, far_ps })
}

fn refill(model: &Model, cpus: usize) -> Result<Refill, ModelError> {
    if model.has_table("handler") { handler(model) } else { walker(model, cpus) }
}

fn level_ps(model: &Model, data: &TlbHierarchy) -> Result<Vec<u64>, ModelError> {
    let hit = |level: u32| model.ps("tlb", &format!("level_{level}_hit"));
    (2..=data.levels() as u32).map(hit).collect()
}

fn tlb(model: &Model, side: &str) -> Result<TlbHierarchy, ModelError> {
    let mut levels: Vec<LevelSpec> = Vec::new();
    for level in 1..=LEVELS_MAX {
        let names = ('a'..='z').take(MAX_ARRAYS).map(|array| format!("{side}_{level}{array}"));
        let tables = names.take_while(|table| model.has_table(table));
        let arrays = tables.map(|table| array(model, &table)).collect::<Result<LevelSpec, _>>()?;
        if arrays.is_empty() {
            break;
        }
        levels.push(arrays);
    }
    TlbHierarchy::new(side, &levels).map_err(|error| impossible(model, side, &error))
}

fn impossible(model: &Model, side: &str, error: &GeometryError) -> ModelError {
    model.error(&format!("{side}_1a"), "entries", error.to_string(), "mend the geometry of the TLB")
}

fn array(model: &Model, table: &str) -> Result<ArraySpec, ModelError> {
    let optional = |key| if model.has(table, key) { model.count(table, key) } else { Ok(0) };
    let flag = |key| if model.has(table, key) { model.flag(table, key) } else { Ok(false) };
    let ways = model.has(table, "ways").then(|| model.positive(table, "ways")).transpose()?;
    let replacement = match model.has(table, "replacement") {
        true => {
            let known = [("lru", Replacement::Lru), ("random", Replacement::Random)];
            model.word(table, "replacement", &known)?
        }
        false => Replacement::Lru,
    };
    Ok(ArraySpec {
        entries: small(model, table, "entries", model.positive(table, "entries")?)?,
        ways: ways.map(|ways| small(model, table, "ways", ways)).transpose()?,
        page_sizes: page_sizes(model, table, "page_sizes")?,
        locked: small(model, table, "locked", optional("locked")?)?,
        replacement,
        programmable: flag("programmable")?,
        fallback: flag("fallback")?,
    })
}

/// The most entries of a TLB or of a cache of translations.
const ENTRIES_MAX: u64 = 1 << 24;

fn small(model: &Model, table: &str, key: &str, value: u64) -> Result<u32, ModelError> {
    if value > ENTRIES_MAX {
        let problem = format!("is {value}, more than {ENTRIES_MAX}");
        return Err(model.error(table, key, problem, "write a smaller number"));
    }
    Ok(value as u32)
}

/// Reads a list of page sizes, separated by blanks.
///
/// # Errors
/// Fails if a size is no power of two, or the list is empty.
pub fn page_sizes(model: &Model, table: &str, key: &str) -> Result<Vec<PageSize>, ModelError> {
    let remedy = "write sizes with blanks between them, as in \"8K 4M\"";
    let size = |text: &str| {
        text.parse::<PageSize>().map_err(|error| model.error(table, key, error.to_string(), remedy))
    };
    let sizes =
        model.text(table, key)?.split_whitespace().map(size).collect::<Result<Vec<_>, _>>()?;
    if sizes.is_empty() {
        return Err(model.error(table, key, "names no page size", remedy));
    }
    Ok(sizes)
}

fn handler(model: &Model) -> Result<Refill, ModelError> {
    let count = |key| small(model, "handler", key, model.positive("handler", key)?);
    let spec = HandlerSpec {
        handler_cycles: count("cycles")?,
        tsb_miss_cycles: count("tsb_miss_cycles")?,
        tsb_entries: count("tsb_entries")?,
    };
    let refill = SoftwareRefill::new(&spec, count("clock_mhz")?).map_err(|error| {
        model.error("handler", "tsb_entries", error.to_string(), "write a power of two")
    })?;
    Ok(Refill::Software(refill))
}

/// The caches that may hold page-table lines.
const PLACES: [&str; 3] = ["l1", "l2", "l3"];

fn walker(model: &Model, cpus: usize) -> Result<Refill, ModelError> {
    let ns = |key: &str| Ok(model.ps("walk", key)? as f64 / 1e3);
    let walk = |place: &str| -> Result<WalkNs, ModelError> {
        let alone = ns(&format!("{place}_walk"))?;
        let [overlapped, in_order] =
            ["overlapped", "in_order"].map(|key| ns(&format!("{place}_{key}")));
        Ok(WalkNs { alone, overlapped: overlapped?, in_order: in_order? })
    };
    let place = |name: &&str| {
        Ok(LineCacheSpec {
            name: name.to_uppercase(),
            lines: small(
                model,
                "walk",
                "lines",
                model.power_of_two("walk", &format!("{name}_lines"))?,
            )?,
            walk: walk(name)?,
        })
    };
    let upper = |name: &&str| ns(&format!("{name}_upper_read"));
    let line_caches = PLACES.iter().map(place).collect::<Result<Vec<_>, ModelError>>()?;
    let spec = WalkerSpec {
        levels: model.positive("walk", "levels")? as u32,
        structure_caches: structure_caches(model, "walk")?,
        nested: model.has_table("nested").then(|| nested(model)).transpose()?,
        line_caches,
        memory_walk: walk("memory")?,
        upper_read_ns: PLACES
            .iter()
            .chain(&["memory"])
            .map(upper)
            .collect::<Result<Vec<_>, ModelError>>()?,
    };
    let walker = PageWalker::new(&spec).map_err(|error| {
        model.error("walk", "levels", error.to_string(), "mend the walker's constants")
    })?;
    Ok(Refill::Hardware { walkers: vec![walker; cpus] })
}

fn structure_caches(model: &Model, table: &str) -> Result<Vec<StructureCacheSpec>, ModelError> {
    let mut caches = Vec::new();
    for level in 2..=5 {
        let key = format!("level_{level}_entries");
        if model.has(table, &key) {
            let entries = small(model, table, &key, model.positive(table, &key)?)?;
            caches.push(StructureCacheSpec { level, entries });
        }
    }
    Ok(caches)
}

fn nested(model: &Model) -> Result<NestedSpec, ModelError> {
    Ok(NestedSpec {
        levels: model.positive("nested", "levels")? as u32,
        page_size: model.page_size("nested", "page_size")?,
        tlb_entries: small(
            model,
            "nested",
            "tlb_entries",
            model.positive("nested", "tlb_entries")?,
        )?,
        structure_caches: structure_caches(model, "nested")?,
    })
}
