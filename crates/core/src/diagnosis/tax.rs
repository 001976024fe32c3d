//! The tax of a budget beside what trials saved: both are of the same command, and must agree.

use super::{AS_IS, Basis, Trial, is_candidate};
use crate::budget::Budget;
use crate::cause::Account;
use crate::report::Warning;
use crate::stats::ratio_of_pairs;
use crate::units::Nanos;

/// From this difference on, the run of the budget is unlike the trials' runs.
const RUN_DIFFERENCE: f64 = 0.1;

/// The id of the warning of [`tax_disagreement`].
pub const TAX_DISAGREES: &str = "tax_disagrees";

/// Returns a warning if a trial saved more CPU time than the budget's tax, with the reason. The saving is a
/// lower bound of the tax, because the trial does the same work.
pub fn tax_disagreement(trials: &[Trial], budget: &Budget, seed: u64) -> Option<Warning> {
    let cpu_ns = |trial: &Trial| Basis::Cpu.times_ns(trial);
    let as_is = trials.iter().find(|t| t.name == AS_IS)?;
    let like_it = trials.iter().filter(|t| is_candidate(t) && t.exit == as_is.exit);
    let saved_min = |t: &Trial| {
        let ratio = ratio_of_pairs(&cpu_ns(t), &cpu_ns(as_is), seed)?;
        Some((t.name.clone(), 1.0 - ratio.high))
    };
    let (name, saved) = like_it.filter_map(saved_min).max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    let tax = budget.vm_tax()?;
    let most = tax.high.or(tax.value).unwrap_or(0.0);
    if saved <= most {
        return None;
    }
    let share = |ns: u64| ns as f64 / budget.total_ns(Account::Cpu).max(1) as f64;
    let other = budget.row("other_kernel").and_then(|row| row.ns).map_or(0.0, share);
    let usual_ns = Basis::Cpu.median_ns(as_is);
    let why = match &tax.why {
        Some(why) => format!("no row for {why}"),
        None if saved <= most + other => {
            format!("other_kernel ({:.0} %) contains freeing pages", other * 100.0)
        }
        None if (share(usual_ns) - 1.0).abs() > RUN_DIFFERENCE => format!(
            "the budget is of one run of {}, the median is {}",
            Nanos(budget.total_ns(Account::Cpu)),
            Nanos(usual_ns)
        ),
        None => "compute may contain cache misses that large pages save".into(),
    };
    let text = format!("`{name}` saved at least {:.0} % of CPU time: {why}", saved * 100.0);
    let remedy = format!("take {:.0} % as the tax's lower bound", saved * 100.0);
    Some(Warning { id: TAX_DISAGREES.into(), text, remedy })
}

#[cfg(test)]
mod tests {
    use super::super::CHECK;
    use super::super::tests::trial;
    use super::*;
    use crate::budget::Ledger;
    use crate::counter::Reading;

    #[test]
    fn a_tax_below_what_trials_saved_says_why() {
        // The check saves most, but it is the command as it is: a disturbance, not a saving.
        let check = trial(CHECK, 500, 100, 0.0);
        let trials = [trial(AS_IS, 1_000, 100, 0.0), trial("thp-2M", 700, 100, 0.98), check];
        let text = |walks_ms: u64, other_ms: u64, total_ms: u64, swap: Reading| {
            let mut cpu = Ledger::new(Account::Cpu, total_ms * 1_000_000);
            cpu.row("translation", Reading::Measured(walks_ms * 1_000_000), "trials");
            for id in ["minor_fault", "zero_copy", "reclaim", "compaction"] {
                cpu.row(id, Reading::Measured(0), "stacks");
            }
            cpu.row("swap", swap, "stacks");
            cpu.row("other_kernel", Reading::Measured(other_ms * 1_000_000), "stacks");
            let budget = Budget::new(cpu, Ledger::new(Account::Wall, 1), Vec::new());
            tax_disagreement(&trials, &budget, 1).map(|warning| warning.text)
        };
        let none = || Reading::Measured(0);
        assert_eq!(text(310, 0, 1_000, none()), None);
        let why = |text: Option<String>| text.expect("the trials saved more");
        let freeing = why(text(50, 400, 1_000, none()));
        assert!(freeing.starts_with("`thp-2M` saved at least 29 % of CPU time"), "{freeing}");
        assert!(freeing.contains("other_kernel (40 %) contains freeing"), "{freeing}");
        let missing = why(text(50, 0, 1_000, Reading::Missing("no samples".into())));
        assert!(missing.contains("no row for swap (no samples)"), "{missing}");
        let short = why(text(50, 0, 500, none()));
        assert!(short.contains("one run of 500 ms, the median is 1.00 s"), "{short}");
        let rest = why(text(50, 0, 1_000, none()));
        assert!(rest.contains("cache misses"), "{rest}");
    }
}
