//! The memory bill of commands: readings that repeat from run to run, held against limits and against the
//! bill of another day.
//!
//! Invariants: a finding fails only if all of the reading's range is beyond the limit, or beyond all of the
//! baseline's range and the allowed growth. What another kernel counted is no baseline for what this one
//! counts; what is simulated does not depend on the kernel.

use crate::counter::{Provenance, Unit};
use crate::document::Document;
use crate::exit::Exit;
use crate::report::Environment;
use crate::threshold::{Judgement, Range, RangeThreshold};
use crate::units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Facts of a machine that change what its kernel counts for the same program.
const COUNTED_BY: &[&str] =
    &["kernel", "base_page_bytes", "thp_enabled", "thp_enabled_by_size", "page_table_isolation"];
/// Growth below these amounts is never reported: a loader that maps one file more costs as much.
const LEAST_GROWTH: [(Unit, f64); 3] =
    [(Unit::Count, 16.0), (Unit::Bytes, 131_072.0), (Unit::Ns, 0.0)];
/// A reading grew together with another one if it grew by at least this part of the other's growth.
const TOGETHER: f64 = 0.5;

/// The bills of the commands of a file, with what was found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Bill {
    /// The bill of each command, in the order of the file.
    pub commands: Vec<CommandBill>,
    /// Facts about the machine that ran them.
    pub environment: Environment,
}

impl Document for Bill {
    const KIND: &'static str = "bill";
}

/// The bill of one command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommandBill {
    /// The name in the file.
    pub name: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The end of its runs.
    pub exit: Exit,
    /// The CPU whose TLBs were simulated.
    pub cpu: String,
    /// Each reading by its id.
    pub readings: BTreeMap<String, BillReading>,
    /// The findings of limits and baseline.
    pub findings: Vec<BillFinding>,
}

/// A reading with the range in which it lay over several runs, or of its interval.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BillReading {
    /// The unit of the values.
    pub unit: Unit,
    /// The provenance of the values.
    pub provenance: Provenance,
    /// The median of the runs; null if it is missing.
    pub value: Option<f64>,
    /// The least value, or the lower end of the interval.
    pub low: Option<f64>,
    /// The largest value, or the upper end of the interval.
    pub high: Option<f64>,
    /// The reason why it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A reading that is beyond a limit, or differs from the baseline, or cannot be judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BillFinding {
    /// The meaning for the check.
    pub outcome: Outcome,
    /// The id of the reading.
    pub reading: String,
    /// The sentence with the values.
    pub text: String,
    /// The cause, as far as other readings show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
}

/// The meaning of a finding for the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is certainly beyond its limit, or larger than in the baseline.
    Failed,
    /// It could not be judged.
    NotJudged,
    /// It is certainly smaller than in the baseline.
    Better,
}

impl BillReading {
    /// Makes a reading of the values of several runs.
    pub fn of(unit: Unit, provenance: Provenance, values: &[u64]) -> BillReading {
        let bound = |value: Option<&u64>| value.map(|value| *value as f64);
        BillReading {
            unit,
            provenance,
            value: crate::stats::median(values).map(|value| value as f64),
            low: bound(values.iter().min()),
            high: bound(values.iter().max()),
            why: values.is_empty().then(|| "no run has it".into()),
        }
    }

    /// Makes a reading that is missing.
    pub fn missing(unit: Unit, why: impl Into<String>) -> BillReading {
        let why = Some(why.into());
        BillReading {
            unit,
            provenance: Provenance::Missing,
            value: None,
            low: None,
            high: None,
            why,
        }
    }

    /// Formats a value of this reading with its unit.
    pub fn in_words(&self, value: f64) -> String {
        match self.unit {
            Unit::Bytes => Bytes(value as u64).to_string(),
            Unit::Ns => Nanos(value as u64).to_string(),
            Unit::Count if value.fract() == 0.0 => value.to_string(),
            Unit::Count => format!("{value:.3}"),
        }
    }

    fn range(&self) -> Option<Range> {
        let (low, high, value) = (self.low?, self.high?, self.value?);
        let words = match low == high {
            true => self.in_words(value),
            false => {
                format!("{} ({}–{})", self.in_words(value), self.in_words(low), self.in_words(high))
            }
        };
        Some(Range { low, high, unit: self.unit, words })
    }
}

impl Bill {
    /// Returns true if a finding has this outcome.
    pub fn has(&self, outcome: Outcome) -> bool {
        let findings = self.commands.iter().flat_map(|command| &command.findings);
        findings.into_iter().any(|finding| finding.outcome == outcome)
    }

    /// Compares each command with the one of the same name in a baseline. A reading may grow by the share
    /// `growth`.
    pub fn compare(&mut self, baseline: &Bill, growth: f64) {
        let differs = |key: &&&str| self.environment.get(**key) != baseline.environment.get(**key);
        let counted_otherwise: Vec<&str> = COUNTED_BY.iter().filter(differs).copied().collect();
        for command in &mut self.commands {
            match baseline.commands.iter().find(|old| old.name == command.name) {
                Some(old) => command.compare(old, growth, &counted_otherwise),
                None => command.findings.push(BillFinding {
                    outcome: Outcome::NotJudged,
                    reading: String::new(),
                    text: "the baseline has no such command; add it with --update".into(),
                    cause: None,
                }),
            }
        }
    }
}

impl CommandBill {
    /// Holds the readings against limits.
    pub fn judge(&mut self, limits: &[RangeThreshold]) {
        for limit in limits {
            let ids = self.readings.keys().map(String::as_str);
            let found = self.readings.get(limit.id());
            let why = found.and_then(|reading| reading.why.clone());
            let (outcome, text) = match limit.judge(ids, found.and_then(BillReading::range), why) {
                Judgement::Passed => continue,
                Judgement::Failed(text) => (Outcome::Failed, text),
                Judgement::NotJudged(text) => (Outcome::NotJudged, text),
            };
            let reading = limit.id().to_string();
            self.findings.push(BillFinding { outcome, reading, text, cause: None });
        }
    }

    fn compare(&mut self, old: &CommandBill, growth: f64, counted_otherwise: &[&str]) {
        let mut findings = Vec::new();
        let mut skipped = Vec::new();
        for (id, reading) in &self.readings {
            let Some(before) = old.readings.get(id) else { continue };
            let (Some(now), Some(was)) = (reading.range(), before.range()) else { continue };
            let measured = reading.provenance != Provenance::Modeled;
            let Some(outcome) = change(&now, &was, growth) else { continue };
            if measured && !counted_otherwise.is_empty() {
                skipped.push(id.as_str());
                continue;
            }
            findings.push(BillFinding {
                outcome,
                reading: id.clone(),
                text: format!("{id} was {} and is {}", was.words, now.words),
                cause: (outcome == Outcome::Failed).then(|| self.cause(old, id)).flatten(),
            });
        }
        if !skipped.is_empty() {
            findings.push(BillFinding {
                outcome: Outcome::NotJudged,
                reading: skipped[0].into(),
                text: format!(
                    "{} differ, but the baseline was counted with another {}; write one here with --update",
                    skipped.join(", "),
                    counted_otherwise.join(", ")
                ),
                cause: None,
            });
        }
        self.findings.extend(findings);
    }

    /// Returns the growth of a reading: 0.1 for a tenth more.
    fn growth(&self, old: &CommandBill, id: &str) -> f64 {
        let value = |bill: &CommandBill| bill.readings.get(id)?.value;
        match (value(self), value(old)) {
            (Some(now), Some(was)) if was > 0.0 => now / was - 1.0,
            _ => 0.0,
        }
    }

    /// Names the cause of a reading's growth by the readings that grew with it.
    fn cause(&self, old: &CommandBill, id: &str) -> Option<String> {
        let own = self.growth(old, id);
        let with = |other: &str| self.growth(old, other) >= own * TOGETHER;
        let cause = match id {
            FAULTS_4K => "it touches more memory",
            MINOR_FAULTS | FAULTS_2M | MISSES_4K | MISSES_2M | PAGE_TABLES
                if with(FAULTS_4K) || with(PEAK) =>
            {
                "it touches more memory"
            }
            MINOR_FAULTS => {
                "it touches as much memory as before, but more often anew: pages are given back and \
                 faulted in again, or copied after a fork"
            }
            FAULTS_2M => {
                "less of its memory fills whole 2M pages: mappings became smaller, sparse or unaligned"
            }
            MISSES_4K | MISSES_2M if with(ACCESSES) => "it accesses memory more often",
            MISSES_4K | MISSES_2M => {
                "its accesses go to more pages than the TLB holds: a larger or sparser working set, or \
                 another order"
            }
            PAGE_TABLES => "its memory is spread more thinly over its addresses",
            INSTRUCTIONS | ACCESSES => "it does more work",
            PEAK => "it keeps more memory at a time",
            _ => return None,
        };
        Some(cause.into())
    }
}

/// Faults without I/O of the command and its children, as the kernel counted them.
pub const MINOR_FAULTS: &str = "minor_fault_count";
/// Faults that waited for I/O, as the kernel counted them.
pub const MAJOR_FAULTS: &str = "major_fault_count";
/// The largest resident set of one of its processes.
pub const PEAK: &str = "peak_resident_bytes";
/// The page tables of all processes when they held most memory.
pub const PAGE_TABLES: &str = "page_table_bytes";
/// Instructions of its first process.
pub const INSTRUCTIONS: &str = "instruction_count";
/// Loads and stores of its first process.
pub const ACCESSES: &str = "access_count";
/// Page walks for data with 4K pages on the simulated CPU.
pub const MISSES_4K: &str = "tlb_miss_4k_count";
/// Page walks for data on the simulated CPU if private memory lay on 2M pages.
pub const MISSES_2M: &str = "tlb_miss_2m_count";
/// Pages of 4K that it touches of private memory.
pub const FAULTS_4K: &str = "touched_4k_count";
/// Pages that it touches if each 2M block of private memory of which half is used is one page.
pub const FAULTS_2M: &str = "touched_2m_count";
/// The share of CPU time that virtual memory takes. Measured if a limit names it.
pub const VM_TAX: &str = "vm_tax";
/// The speed-up that the best page size has. Measured if a limit names it.
pub const SPEEDUP_LEFT: &str = "speedup_left";

/// Returns what the change of a reading means; none if it may be none.
fn change(now: &Range, was: &Range, growth: f64) -> Option<Outcome> {
    let least =
        LEAST_GROWTH.iter().find(|(unit, _)| *unit == now.unit).map_or(0.0, |(_, least)| *least);
    let allowed = |value: f64| (value * growth).max(least);
    if now.low > was.high + allowed(was.high) {
        Some(Outcome::Failed)
    } else if now.high < was.low - allowed(was.low) {
        Some(Outcome::Better)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(readings: &[(&str, &[u64])]) -> CommandBill {
        let reading = |(id, values): &(&str, &[u64])| {
            let provenance = match id.contains("tlb") || id.contains("touched") {
                true => Provenance::Modeled,
                false => Provenance::Measured,
            };
            let unit = if id.ends_with("bytes") { Unit::Bytes } else { Unit::Count };
            (id.to_string(), BillReading::of(unit, provenance, values))
        };
        CommandBill {
            name: "c".into(),
            command: vec!["c".into()],
            exit: Exit::Code(0),
            cpu: "x".into(),
            readings: readings.iter().map(reading).collect(),
            findings: Vec::new(),
        }
    }

    fn bill(readings: &[(&str, &[u64])]) -> Bill {
        Bill { commands: vec![command(readings)], environment: Environment::default() }
    }

    fn compared(old: &[(&str, &[u64])], new: &[(&str, &[u64])]) -> Vec<BillFinding> {
        let mut new = bill(new);
        new.compare(&bill(old), 0.01);
        new.commands.remove(0).findings
    }

    #[test]
    fn only_what_is_certainly_larger_fails() {
        let of =
            |values: &[u64]| compared(&[(MINOR_FAULTS, &[1000, 1010])], &[(MINOR_FAULTS, values)]);
        assert_eq!(of(&[1000, 1100]), [], "the ranges touch");
        assert_eq!(of(&[1024, 1030]), [], "within the growth that is always allowed");
        let grown = of(&[1030, 1040]);
        assert_eq!((grown.len(), grown[0].outcome), (1, Outcome::Failed));
        assert_eq!(grown[0].text, "minor_fault_count was 1005 (1000–1010) and is 1035 (1030–1040)");
        assert_eq!(of(&[900, 910])[0].outcome, Outcome::Better);
    }

    #[test]
    fn causes_follow_from_what_grew_together() {
        let cause = |old: &[(&str, &[u64])], new: &[(&str, &[u64])], id: &str| {
            let findings = compared(old, new);
            let found = findings.iter().find(|finding| finding.reading == id).unwrap();
            found.cause.clone().unwrap()
        };
        let old: &[(&str, &[u64])] = &[
            (MINOR_FAULTS, &[1000]),
            (PEAK, &[100 << 20]),
            (FAULTS_4K, &[900]),
            (FAULTS_2M, &[100]),
            (MISSES_4K, &[5000]),
            (ACCESSES, &[100_000]),
        ];
        let changed = |id: &str, value: &'static [u64]| {
            let mut new = old.to_vec();
            new.iter_mut().find(|(known, _)| *known == id).unwrap().1 = value;
            cause(old, &new, id)
        };
        assert!(changed(MINOR_FAULTS, &[2000]).contains("copied after a fork"));
        assert!(changed(FAULTS_2M, &[300]).contains("unaligned"));
        assert!(changed(MISSES_4K, &[6000]).contains("more pages than the TLB holds"));
        let more: &[(&str, &[u64])] = &[(MINOR_FAULTS, &[2000]), (PEAK, &[190 << 20])];
        assert_eq!(cause(&old[..2], more, MINOR_FAULTS), "it touches more memory");
    }

    #[test]
    fn another_kernel_is_no_baseline_for_what_was_counted() {
        let readings = |faults, misses| -> [(&str, &'static [u64]); 2] {
            [(MINOR_FAULTS, faults), (MISSES_4K, misses)]
        };
        let mut old = bill(&readings(&[1000], &[1000]));
        old.environment.insert("kernel".into(), "6.1".into());
        let mut new = bill(&readings(&[2000], &[2000]));
        new.environment.insert("kernel".into(), "6.18".into());
        new.compare(&old, 0.01);
        let outcomes: Vec<_> = new.commands[0].findings.iter().map(|one| one.outcome).collect();
        assert_eq!(outcomes, [Outcome::Failed, Outcome::NotJudged]);
        assert_eq!(new.commands[0].findings[0].reading, MISSES_4K);
    }

    #[test]
    fn limits_hold_for_the_whole_range() {
        let mut command = command(&[(PEAK, &[90 << 20, 110 << 20]), (MINOR_FAULTS, &[7])]);
        command.readings.insert(VM_TAX.into(), BillReading::missing(Unit::Count, "no samples"));
        let limits =
            ["peak_resident_bytes>100M", "peak_resident_bytes > 80M", "vm_tax>0.3", "vm_task>1"];
        command.judge(&limits.map(|limit| limit.parse().unwrap()));
        let outcomes: Vec<_> = command.findings.iter().map(|one| one.outcome).collect();
        assert_eq!(outcomes, [Outcome::Failed, Outcome::NotJudged, Outcome::NotJudged]);
        assert!(command.findings[1].text.contains("no samples"));
        assert!(command.findings[2].text.contains("did you mean `vm_tax`"));
    }
}
