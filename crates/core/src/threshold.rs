//! Thresholds over a report, for scripts and CI: `p99_fault_ns>20000`; and over values with a range, such as
//! the ratios of a comparison: `wall_ns>1.05`.
//!
//! Invariant: a threshold that cannot be judged never passes. An id that no report can have is refused before
//! the run; a reading that this run lacks is a failure of its own.

use crate::cause::Account;
use crate::counter::{COUNTERS, Provenance, Unit, UnitReading, counter};
use crate::job::nearest;
use crate::quantity::{Dimension, Params, QuantityError, evaluate};
use crate::report::{Latency, Run};
use crate::units::{Bytes, Nanos};

/// Kinds of latency that machines report; `fault` is minor and major together.
const LATENCY_KINDS: &[&str] =
    &["advise", "fault", "lock", "major_fault", "minor_fault", "page_in"];
/// The share of CPU time that virtual memory takes, 0 to 1.
const VM_TAX: &str = "vm_tax";
const LATENCY_STATISTICS: &[&str] = &["min", "mean", "p50", "p90", "p99", "max"];
/// The longer operators come first, so that `<=` is not read as `<`.
const OPERATORS: &[&str] = &["<=", ">=", "==", "!=", "<", ">"];

/// A condition on a reading of a report; the run fails if it holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Threshold {
    id: String,
    condition: Condition,
    text: String,
}

/// A condition on a value with a range; it fails only if it holds for the whole range.
#[derive(Debug, Clone, PartialEq)]
pub struct RangeThreshold {
    id: String,
    condition: Condition,
    dimension: Dimension,
    text: String,
}

/// The range of a value: of its interval, or of several runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Range {
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// The unit of both.
    pub unit: Unit,
    /// The value and its range, to be read.
    pub words: String,
}

/// An operator and the limit behind it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Condition {
    operator: &'static str,
    limit: f64,
}

/// The result of a threshold for one report.
#[derive(Debug, PartialEq)]
pub enum Judgement {
    /// The condition does not hold.
    Passed,
    /// The condition holds, with a sentence that shows the value.
    Failed(String),
    /// The report has no such reading, with the reason.
    NotJudged(String),
}

/// The reason why a text is no threshold.
#[derive(Debug, thiserror::Error)]
pub enum ThresholdError {
    /// There is no operator in it.
    #[error("`{0}` compares nothing; write for example 'p99_fault_ns>20000'")]
    NoOperator(String),
    /// No report has a reading of this id.
    #[error("no reading is called `{id}`\n  hint: {remedy}")]
    UnknownId {
        /// The id, as the user wrote it.
        id: String,
        /// The nearest id, or all of them.
        remedy: String,
    },
    /// There is nothing behind the operator.
    #[error("`{0}` has no limit; write for example 'p99_fault_ns>20000'")]
    NoLimit(String),
    /// The limit cannot be evaluated.
    #[error(transparent)]
    Limit(#[from] QuantityError),
    /// The limit has another dimension than the reading.
    #[error("`{limit}` is no limit for {id}; give a plain number or one in its unit")]
    Dimension {
        /// The limit, as the user wrote it.
        limit: String,
        /// The id of the reading in the report.
        id: String,
    },
}

impl std::str::FromStr for Threshold {
    type Err = ThresholdError;

    fn from_str(text: &str) -> Result<Self, ThresholdError> {
        let (id, operator, limit) = parts(text)?;
        let unit = unit_of(id).ok_or_else(|| unknown(id))?;
        let quantity = evaluate(limit, &Params::new())?;
        if !fits(unit, quantity.dimension) {
            return Err(ThresholdError::Dimension { limit: limit.into(), id: id.into() });
        }
        let condition = Condition { operator, limit: quantity.value };
        Ok(Threshold { id: id.into(), condition, text: text.into() })
    }
}

impl std::str::FromStr for RangeThreshold {
    type Err = ThresholdError;

    fn from_str(text: &str) -> Result<Self, ThresholdError> {
        let (id, operator, limit) = parts(text)?;
        let quantity = evaluate(limit, &Params::new())?;
        let condition = Condition { operator, limit: quantity.value };
        let dimension = quantity.dimension;
        Ok(RangeThreshold { id: id.into(), condition, dimension, text: text.into() })
    }
}

/// Splits a text into an id, an operator and a limit.
fn parts(text: &str) -> Result<(&str, &'static str, &str), ThresholdError> {
    let no_operator = || ThresholdError::NoOperator(text.into());
    let (at, operator) = find_operator(text).ok_or_else(no_operator)?;
    match text[at + operator.len()..].trim() {
        "" => Err(ThresholdError::NoLimit(text.into())),
        limit => Ok((text[..at].trim(), operator, limit)),
    }
}

fn find_operator(text: &str) -> Option<(usize, &'static str)> {
    let at = text.find(['<', '>', '=', '!'])?;
    OPERATORS.iter().find(|op| text[at..].starts_with(**op)).map(|op| (at, *op))
}

/// Returns all ids that a threshold may name.
fn known_ids() -> Vec<String> {
    let counters = COUNTERS.iter().map(|counter| counter.id.to_string());
    let latencies = LATENCY_KINDS.iter().flat_map(|kind| {
        LATENCY_STATISTICS.iter().map(move |statistic| format!("{statistic}_{kind}_ns"))
    });
    let budget = Account::ALL.into_iter().flat_map(|account| {
        let ids = account.causes().map(|cause| cause.id).chain(["unexplained"]);
        ids.map(move |id| format!("{}_{id}_ns", account.id()))
    });
    counters.chain(latencies).chain(budget).chain([VM_TAX.to_string()]).collect()
}

/// Returns the unit of a known id.
fn unit_of(id: &str) -> Option<Unit> {
    if let Some(counter) = counter(id) {
        return Some(counter.unit);
    }
    match id {
        VM_TAX => Some(Unit::Count),
        _ => known_ids().iter().any(|known| known == id).then_some(Unit::Ns),
    }
}

fn unknown(id: &str) -> ThresholdError {
    let known = known_ids();
    let rows =
        |account: Account| account.causes().map(|cause| cause.id).collect::<Vec<_>>().join("|");
    let remedy = match nearest(id, known.iter().map(String::as_str)) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!(
            "use one of {}; {VM_TAX}; ({})_({})_ns; cpu_({}|unexplained)_ns; \
             wall_({}|unexplained)_ns",
            COUNTERS.iter().map(|counter| counter.id).collect::<Vec<_>>().join(", "),
            LATENCY_STATISTICS.join("|"),
            LATENCY_KINDS.join("|"),
            rows(Account::Cpu),
            rows(Account::Wall)
        ),
    };
    ThresholdError::UnknownId { id: id.into(), remedy }
}

impl Threshold {
    /// Returns true if it needs latencies of single faults, which are measured only on request.
    pub fn needs_fault_latency(&self) -> bool {
        self.id.ends_with("fault_ns") && split_latency(&self.id).is_some()
    }

    /// Compares the report's reading with the limit.
    pub fn judge(&self, run: &Run) -> Judgement {
        let (value, provenance) = match self.look_up(run) {
            Ok(Some(found)) => found,
            Ok(None) => return Judgement::Passed,
            Err(why) => {
                let machine = &run.machine.name;
                return Judgement::NotJudged(format!("{} on {machine}: {why}", self.text));
            }
        };
        match self.condition.holds_for(value) {
            false => Judgement::Passed,
            true => Judgement::Failed(format!(
                "{} on {}: {} is {} ({provenance})",
                self.text,
                run.machine.name,
                self.id,
                self.in_words(value)
            )),
        }
    }

    /// Formats a value in its unit, with all its digits.
    fn in_words(&self, value: f64) -> String {
        match unit_of(&self.id) {
            Some(Unit::Ns) if value >= 0.0 => format!("{}, {value} ns", Nanos(value as u64)),
            Some(Unit::Bytes) if value >= 0.0 => format!("{}, {value} bytes", Bytes(value as u64)),
            _ => value.to_string(),
        }
    }

    /// Returns the tax, unless it is a lower bound and the condition depends on what is missing from it.
    fn look_up_tax(&self, run: &Run) -> Result<(f64, Provenance), String> {
        let budget = run.budget.as_ref().ok_or("this run has no budget")?;
        let tax = budget.vm_tax().ok_or("the report was written without it")?;
        let why = || tax.why.as_deref().unwrap_or("?");
        let value = tax.value.ok_or_else(|| format!("the reading is missing: {}", why()))?;
        let is_settled = match self.condition.operator {
            "==" | "!=" => false,
            _ => self.condition.holds_for(value) == self.condition.holds_for(1.0),
        };
        match tax.is_lower_bound() && !is_settled {
            true => Err(format!("the tax is at least {value}; it lacks {}", why())),
            false => Ok((value, tax.provenance)),
        }
    }

    /// Returns the value; none if nothing happened that could be measured, such as no major fault.
    fn look_up(&self, run: &Run) -> Result<Option<(f64, Provenance)>, String> {
        if let Some((statistic, kind)) = split_latency(&self.id) {
            return match run.latency.get(kind) {
                Some(latency) => {
                    Ok(Some((statistic_of(latency, statistic) as f64, latency.provenance)))
                }
                None if none_happened(run, kind) => Ok(None),
                None => Err("this run measured no such latency".into()),
            };
        }
        if self.id == VM_TAX {
            return self.look_up_tax(run).map(Some);
        }
        if let Some((account, row)) = split_budget(&self.id) {
            return look_up_budget(run, account, row).map(Some);
        }
        let reading = run.counters.get(&self.id).ok_or("this machine does not count it")?;
        value_of(reading).map(Some)
    }
}

impl Condition {
    fn holds_for(&self, value: f64) -> bool {
        match self.operator {
            "<" => value < self.limit,
            "<=" => value <= self.limit,
            ">" => value > self.limit,
            ">=" => value >= self.limit,
            "==" => value == self.limit,
            _ => value != self.limit,
        }
    }
}

impl RangeThreshold {
    /// Returns the id of the value that it is about.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Judges a range. Where there is none, `why` may know the reason, or the id is none of `ids`.
    pub fn judge<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a str>,
        range: Option<Range>,
        why: Option<String>,
    ) -> Judgement {
        let Some(range) = range else {
            let near = || match nearest(&self.id, ids) {
                Some(near) if near != self.id => format!("no such value; did you mean `{near}`?"),
                _ => "no such value".into(),
            };
            return Judgement::NotJudged(format!("{}: {}", self.text, why.unwrap_or_else(near)));
        };
        if !fits(range.unit, self.dimension) {
            let why = "give a plain number or one in its unit";
            return Judgement::NotJudged(format!("{}: another unit; {why}", self.text));
        }
        match self.condition.holds_for(range.low) && self.condition.holds_for(range.high) {
            true => Judgement::Failed(format!("{}: it is {}", self.text, range.words)),
            false => Judgement::Passed,
        }
    }
}

/// Returns true if a limit of this dimension suits values of a unit.
fn fits(unit: Unit, dimension: Dimension) -> bool {
    match (unit, dimension) {
        (_, Dimension::Number) => true,
        (Unit::Ns, dimension) => dimension == Dimension::Time,
        (Unit::Bytes, dimension) => dimension == Dimension::Size,
        (Unit::Count, _) => false,
    }
}

/// Returns true if the run counted events of this kind and saw none.
fn none_happened(run: &Run, kind: &str) -> bool {
    let zero = |id: &str| run.counters.get(id).is_some_and(|reading| reading.value == Some(0));
    match kind {
        "fault" => zero("minor_fault_count") && zero("major_fault_count"),
        kind => zero(&format!("{kind}_count")),
    }
}

fn value_of(reading: &UnitReading) -> Result<(f64, Provenance), String> {
    match (reading.value, &reading.why) {
        (Some(value), _) => Ok((value as f64, reading.provenance)),
        (None, why) => Err(format!("the reading is missing: {}", why.as_deref().unwrap_or("?"))),
    }
}

fn look_up_budget(run: &Run, account: Account, row: &str) -> Result<(f64, Provenance), String> {
    let budget = run.budget.as_ref().ok_or("this run has no budget")?;
    if row == "unexplained" {
        return Ok((budget.unexplained_ns(account) as f64, Provenance::Derived));
    }
    let found = budget.rows(account).iter().find(|known| known.id == row);
    let row = found.ok_or("the budget has no such row")?;
    match row.ns {
        Some(ns) => Ok((ns as f64, row.provenance)),
        None => Err(format!("the reading is missing: {}", row.how)),
    }
}

/// Splits `p99_minor_fault_ns` into `p99` and `minor_fault`.
fn split_latency(id: &str) -> Option<(&str, &str)> {
    let (statistic, kind) = id.strip_suffix("_ns")?.split_once('_')?;
    let known = LATENCY_STATISTICS.contains(&statistic) && LATENCY_KINDS.contains(&kind);
    known.then_some((statistic, kind))
}

/// Splits `cpu_translation_ns` into the account and `translation`.
fn split_budget(id: &str) -> Option<(Account, &str)> {
    let (ledger, row) = id.strip_suffix("_ns")?.split_once('_')?;
    let account = Account::ALL.into_iter().find(|account| account.id() == ledger)?;
    Some((account, row))
}

fn statistic_of(latency: &Latency, statistic: &str) -> u64 {
    match statistic {
        "min" => latency.min_ns,
        "mean" => latency.mean_ns,
        "p50" => latency.p50_ns,
        "p90" => latency.p90_ns,
        "p99" => latency.p99_ns,
        _ => latency.max_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::{Budget, Ledger};
    use crate::counter::{Reading, put};
    use serde_json::json;

    fn small_run() -> Run {
        let latency = json!({
            "count": 100, "min_ns": 1_000, "mean_ns": 50_000, "p50_ns": 50_000, "p90_ns": 90_000,
            "p99_ns": 99_000, "max_ns": 100_000, "provenance": "measured",
        });
        let run = json!({
            "job": {"name": "j", "params": {}, "seed": 1},
            "machine": {"name": "null", "kind": "null", "validated": true},
            "wall_ns": 1_000_000, "counters": {}, "phases": [],
            "series": {"interval_ns": 0, "columns": {}},
            "latency": {"fault": latency, "minor_fault": latency},
            "environment": {}, "warnings": [],
        });
        let mut run: Run = serde_json::from_value(run).unwrap();
        put(&mut run.counters, "minor_fault_count", Reading::Measured(3));
        put(&mut run.counters, "resident_bytes_max", Reading::Measured(2 << 20));
        put(&mut run.counters, "tlb_miss_count", Reading::Missing("no PMU here".into()));
        let mut cpu = Ledger::new(Account::Cpu, 900_000);
        cpu.row("compute", Reading::Measured(600_000), "getrusage");
        cpu.row("swap", Reading::Missing("no samples".into()), "");
        run.budget = Some(Budget::new(cpu, Ledger::new(Account::Wall, 1_000_000), Vec::new()));
        run
    }

    fn judge(text: &str) -> Judgement {
        text.parse::<Threshold>().unwrap().judge(&small_run())
    }

    #[test]
    fn counters_latency_and_budget_rows_are_judged() {
        assert_eq!(judge("minor_fault_count < 3"), Judgement::Passed);
        assert!(matches!(judge("minor_fault_count>=3"), Judgement::Failed(_)));
        assert!(matches!(judge("p99_fault_ns>1us"), Judgement::Failed(_)));
        assert_eq!(judge("p99_fault_ns>1s"), Judgement::Passed);
        assert!(matches!(judge("cpu_compute_ns>100us"), Judgement::Failed(_)));
        assert!(matches!(judge("cpu_unexplained_ns!=0"), Judgement::Failed(_)));
        let Judgement::Failed(text) = judge("resident_bytes_max>1M") else { panic!() };
        assert!(text.contains("is 2M, 2097152 bytes (measured)"), "{text}");
    }

    #[test]
    fn what_is_missing_does_not_pass() {
        let Judgement::NotJudged(why) = judge("tlb_miss_count>0") else { panic!() };
        assert!(why.contains("no PMU"), "{why}");
        assert!(matches!(judge("p99_page_in_ns>0"), Judgement::NotJudged(_)));
        assert!(matches!(judge("cpu_swap_ns>0"), Judgement::NotJudged(_)));
        assert!(matches!(judge("page_out_count>0"), Judgement::NotJudged(_)));
        assert!(matches!(judge("max_major_fault_ns>0"), Judgement::NotJudged(_)));
    }

    #[test]
    fn a_tax_that_lacks_rows_is_judged_only_where_they_change_nothing() {
        let with_tax = |translation: Reading, others: Reading| {
            let mut cpu = Ledger::new(Account::Cpu, 1_000);
            for cause in Account::Cpu.causes().filter(|cause| cause.is_tax) {
                let is_walk = cause.id == "translation";
                let reading = if is_walk { translation.clone() } else { others.clone() };
                cpu.row(cause.id, reading, "test");
            }
            let wall = Ledger::new(Account::Wall, 1_000);
            Run { budget: Some(Budget::new(cpu, wall, Vec::new())), ..small_run() }
        };
        let judge = |run: &Run, text: &str| text.parse::<Threshold>().unwrap().judge(run);
        let whole = with_tax(Reading::Measured(300), Reading::Measured(0));
        assert_eq!(judge(&whole, "vm_tax>0.3"), Judgement::Passed);
        let Judgement::Failed(text) = judge(&whole, "vm_tax>=0.3") else { panic!() };
        assert!(text.contains("vm_tax is 0.3 (measured)"), "{text}");
        let part = with_tax(Reading::Measured(300), Reading::Missing("no samples".into()));
        assert!(matches!(judge(&part, "vm_tax>0.2"), Judgement::Failed(_)));
        assert_eq!(judge(&part, "vm_tax<0.2"), Judgement::Passed);
        let undecided = ["vm_tax>0.4", "vm_tax<0.4", "vm_tax==0.3", "vm_tax!=0.3"];
        for text in undecided {
            let Judgement::NotJudged(why) = judge(&part, text) else { panic!("{text}") };
            assert!(why.contains("at least 0.3") && why.contains("no samples"), "{why}");
        }
        let none = with_tax(Reading::Missing("no PMU".into()), Reading::Missing("no PMU".into()));
        assert!(matches!(judge(&none, "vm_tax>0"), Judgement::NotJudged(_)));
        let of_time = "vm_tax>1s".parse::<Threshold>();
        assert!(matches!(of_time, Err(ThresholdError::Dimension { .. })), "{of_time:?}");
    }

    #[test]
    fn no_fault_was_no_slow_fault() {
        let mut run = small_run();
        put(&mut run.counters, "major_fault_count", Reading::Measured(0));
        let threshold = "max_major_fault_ns>0".parse::<Threshold>().unwrap();
        assert_eq!(threshold.judge(&run), Judgement::Passed);
    }

    #[test]
    fn mistakes_are_refused_with_a_remedy() {
        let refuse = |text: &str| text.parse::<Threshold>().unwrap_err().to_string();
        assert!(refuse("p99_falt_ns>1").contains("did you mean `p99_fault_ns`?"));
        assert!(refuse("nonsense>1").contains("use one of access_count"));
        assert!(refuse("wall_ns").contains("compares nothing"));
        assert!(refuse("wall_ns>2M").contains("no limit for wall_ns"));
        assert!(refuse("wall_ns>-1").contains("`-1`"));
        assert!(refuse("wall_ns=1").contains("compares nothing"));
    }
}
