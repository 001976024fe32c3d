//! A program's misses by function and by memory.

use crate::places::Place;
use crate::simulate::{MissShare, Simulation};
use crate::symbols::{Function, SourceLine, Symbols};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// A line of a profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProfileLine {
    /// Function with its file, or segment with its file.
    pub name: String,
    /// Accesses that missed all TLB levels.
    pub misses: u64,
    /// The fraction of the configuration's misses.
    pub share: f64,
    /// The fraction of the configuration's CPU time.
    pub time_share: f64,
    /// The function's source lines that miss most. Empty without debug information, and of memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lines: Vec<LineMisses>,
}

/// The misses of one source line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LineMisses {
    /// The path of the source file, as the compiler had it.
    pub file: String,
    /// The number of the line, from 1.
    pub line: u32,
    /// Accesses that missed all TLB levels.
    pub misses: u64,
}

/// The most source lines of a function.
const LINES_MAX: usize = 10;

/// The profile of one configuration, with the largest lines first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Profile {
    /// The configuration's machine and page sizes.
    pub title: String,
    /// Misses by function of the accessing instruction.
    pub functions: Vec<ProfileLine>,
    /// Misses by segment and mapped file.
    pub memory: Vec<ProfileLine>,
}

/// Returns the `top` lines of each kind, for one configuration.
pub fn profile(simulation: &mut Simulation, config: usize, title: &str, top: usize) -> Profile {
    let clocks = simulation.threads().iter().map(|thread| thread.cpus[config].counters.clock_ps);
    let clock_ps = clocks.sum::<u64>().max(1);
    let by_instruction = simulation.by_instruction(config);
    let spaces: Vec<_> = simulation.processes().map(|(_, space)| space).collect();
    let mut symbols = Symbols::default();
    let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
    for (index, ((process, instruction), _)) in by_instruction.iter().enumerate() {
        let name = function_name(&symbols.function(spaces[*process], *instruction));
        by_name.entry(name).or_default().push(index);
    }
    let shares = by_name.iter().flat_map(|(name, its_own)| {
        its_own.iter().map(|index| (name.clone(), by_instruction[*index].1))
    });
    let mut functions = lines(shares, clock_ps, top);
    for function in &mut functions {
        let its_lines = by_name[&function.name].iter().filter_map(|index| {
            let ((process, instruction), share) = by_instruction[*index];
            Some((symbols.line(spaces[process], instruction)?, share.count))
        });
        function.lines = largest(its_lines);
    }
    let places = simulation.by_place(config).iter().enumerate();
    let memory =
        places.map(|(number, share)| (place_name(simulation.places().get(number as u16)), *share));
    Profile { title: title.into(), functions, memory: lines(memory, clock_ps, top) }
}

/// Adds up the misses of source lines, and returns those with the most, in falling order.
fn largest(misses: impl Iterator<Item = (SourceLine, u64)>) -> Vec<LineMisses> {
    let mut sums: HashMap<SourceLine, u64> = HashMap::new();
    misses.for_each(|(line, count)| *sums.entry(line).or_default() += count);
    let mut lines: Vec<LineMisses> = sums
        .into_iter()
        .filter(|(_, misses)| *misses > 0)
        .map(|(SourceLine { file, line }, misses)| LineMisses { file, line, misses })
        .collect();
    lines.sort_by(|a, b| {
        b.misses.cmp(&a.misses).then_with(|| (&a.file, a.line).cmp(&(&b.file, b.line)))
    });
    lines.truncate(LINES_MAX);
    lines
}

fn lines(
    shares: impl Iterator<Item = (String, MissShare)>,
    clock_ps: u64,
    top: usize,
) -> Vec<ProfileLine> {
    let mut sums: HashMap<String, MissShare> = HashMap::new();
    let mut all = 0;
    for (name, share) in shares {
        let sum = sums.entry(name).or_default();
        sum.count += share.count;
        sum.ps += share.ps;
        all += share.count;
    }
    let mut lines: Vec<ProfileLine> = sums
        .into_iter()
        .filter(|(_, share)| share.count > 0)
        .map(|(name, share)| ProfileLine {
            name,
            misses: share.count,
            share: share.count as f64 / all.max(1) as f64,
            time_share: share.ps as f64 / clock_ps as f64,
            lines: Vec::new(),
        })
        .collect();
    lines.sort_by(|a, b| b.misses.cmp(&a.misses).then_with(|| a.name.cmp(&b.name)));
    lines.truncate(top);
    lines
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn function_name(function: &Function) -> String {
    match (&function.name, &function.file) {
        (Some(name), Some(file)) => format!("{name} ({})", base_name(file)),
        (None, Some(file)) => format!("{} (no symbol)", base_name(file)),
        (_, None) => "generated code".into(),
    }
}

fn place_name(place: &Place) -> String {
    match &place.file {
        Some(file) => format!("{} {}", place.segment.name(), file),
        None => place.segment.name().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_one_name_are_one_and_the_largest_is_first() {
        let share = |count| MissShare { count, ps: count * 10 };
        let shares = [("a", 3), ("b", 5), ("a", 4), ("c", 0)];
        let shares = shares.into_iter().map(|(name, count)| (name.to_string(), share(count)));
        let lines = lines(shares, 1_000, 10);
        let seen: Vec<_> = lines.iter().map(|line| (line.name.as_str(), line.misses)).collect();
        assert_eq!(seen, [("a", 7), ("b", 5)]);
        assert!((lines[0].time_share - 0.07).abs() < 1e-9);
    }
}
