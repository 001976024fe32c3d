//! Trials in named states of memory, and the verdict over all of them.
//!
//! Huge pages look best on fresh memory. In practice memory is fragmented, limited or shared with a forked
//! child, and a page size that gains on fresh memory may lose there. Invariant: no trial is recommended
//! unless every state that was asked for rules out a loss of 2 % or more.

use super::{
    AS_IS, Basis, GAIN_MIN, Trial, Verdict, is_candidate, judge, on_same_pages, undecided,
};
use crate::stats::Ratio;
use crate::units::Nanos;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A state of the machine's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MemoryState {
    /// As much free memory as a run needs is touched before it, so that a hypervisor has backed it.
    #[default]
    Fresh,
    /// Nothing is prepared: free memory is as it is found.
    Found,
    /// No free block of 2M is left, and compaction cannot make one: a page in each block is pinned.
    Fragmented,
    /// No free block of 2M is left, and compaction can make some: every eighth page is in use.
    Compactable,
    /// The command has a limit of 0.9 times the most memory that it needed.
    Pressed,
    /// The largest process of the command forks at half of its time, and the child holds its memory.
    Forked,
}

impl MemoryState {
    /// All states.
    pub const ALL: [MemoryState; 6] = [
        MemoryState::Fresh,
        MemoryState::Found,
        MemoryState::Fragmented,
        MemoryState::Compactable,
        MemoryState::Pressed,
        MemoryState::Forked,
    ];

    /// Returns the name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            MemoryState::Fresh => "fresh",
            MemoryState::Found => "found",
            MemoryState::Fragmented => "fragmented",
            MemoryState::Compactable => "compactable",
            MemoryState::Pressed => "pressed",
            MemoryState::Forked => "forked",
        }
    }
}

impl fmt::Display for MemoryState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for MemoryState {
    type Err = String;

    fn from_str(word: &str) -> Result<MemoryState, String> {
        let named = MemoryState::ALL.into_iter().find(|state| state.name() == word);
        named.ok_or_else(|| {
            let names = MemoryState::ALL.map(MemoryState::name).join(", ");
            format!("no state of memory is called `{word}`; there are {names}")
        })
    }
}

/// A cause whose time a trial makes longer in a state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Growth {
    /// The id of the cause, as in the budget.
    pub id: String,
    /// The time in one run of the command as it is, in nanoseconds.
    pub before_ns: u64,
    /// The time in one run of the trial, in nanoseconds.
    pub after_ns: u64,
}

/// The trials in one state of memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StateTrials {
    /// The state of memory.
    pub state: MemoryState,
    /// The way in which it was made, in one sentence; empty if it could not be made.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub how: String,
    /// The reason why it could not be made, or why its runs ended early, with what would help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
    /// The free blocks of 2^index base pages before the first run; empty if they could not be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub free_blocks: Vec<u64>,
    /// The figure that speed-ups are ratios of; absent for elapsed time.
    #[serde(default, skip_serializing_if = "Basis::is_elapsed")]
    pub basis: Basis,
    /// The trials in this state, the command as it is first.
    pub trials: Vec<Trial>,
    /// The name of the trial whose loss [`StateTrials::growth`] explains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loser: Option<String>,
    /// The causes that take that trial longer than the command as it is, the largest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub growth: Vec<Growth>,
}

/// The result for one trial in one state.
#[derive(Debug, Clone, Copy, PartialEq)]
enum InState {
    /// A loss of 2 % or more is ruled out.
    Holds,
    /// It loses 2 % or more, or ends differently.
    Loses,
    /// Neither is shown.
    Open,
}

fn standing(trial: &Trial, as_is: Option<&Trial>) -> InState {
    if as_is.is_some_and(|as_is| as_is.exit != trial.exit) {
        return InState::Loses;
    }
    match trial.speedup {
        Some(Ratio { low, .. }) if low > 1.0 - GAIN_MIN => InState::Holds,
        Some(Ratio { value, high, .. }) if value <= 1.0 - GAIN_MIN && high < 1.0 => InState::Loses,
        _ => InState::Open,
    }
}

impl StateTrials {
    fn named(&self, name: &str) -> Option<&Trial> {
        self.trials.iter().find(|trial| trial.name == name)
    }

    fn standing(&self, trial: &Trial) -> InState {
        standing(trial, self.named(AS_IS))
    }

    /// Returns the trial that loses most in this state.
    pub fn worst(&self) -> Option<&Trial> {
        let lost = |trial: &&Trial| is_candidate(trial) && self.standing(trial) == InState::Loses;
        let value = |trial: &Trial| trial.speedup.map_or(0.0, |speedup| speedup.value);
        let losers = self.trials.iter().filter(lost).filter(|trial| trial.speedup.is_some());
        losers.min_by(|one, other| value(one).total_cmp(&value(other)))
    }

    /// Says how a trial stands in this state, such as `fragmented 0.52 (0.50–0.55)`.
    fn words(&self, trial: &Trial) -> String {
        let result = match (self.named(AS_IS), trial.speedup) {
            (Some(as_is), _) if as_is.exit != trial.exit => trial.exit.to_string(),
            (_, Some(speedup)) => speedup.to_string(),
            (_, None) => "too few runs".into(),
        };
        let grown = self.growth.first().filter(|_| self.loser.as_deref() == Some(&trial.name));
        let cause = grown.map_or(String::new(), |growth| {
            format!(
                ", {} {} more",
                growth.id,
                Nanos(growth.after_ns.saturating_sub(growth.before_ns))
            )
        });
        format!("{} {result}{cause}", self.state)
    }
}

/// Returns which trials need more rounds in a state, after [`super::compare_trials`]: those of [`undecided`],
/// and those for which a loss of 2 % or more is neither shown nor ruled out.
pub fn undecided_in_state(trials: &[Trial]) -> Vec<bool> {
    let as_is = trials.iter().find(|trial| trial.name == AS_IS);
    let is_open = |(trial, is_same): (&Trial, bool)| {
        is_candidate(trial) && !is_same && standing(trial, as_is) == InState::Open
    };
    let open: Vec<bool> = trials.iter().zip(on_same_pages(trials)).map(is_open).collect();
    let any = open.contains(&true);
    let needs = |((trial, more), is_open): ((&Trial, bool), bool)| {
        more || is_open || (any && !is_candidate(trial))
    };
    trials.iter().zip(undecided(trials)).zip(open).map(needs).collect()
}

/// Returns the winner over fresh memory, which `trials` are of, and all other states that were made. A trial
/// wins if it gains in one state, and a loss of 2 % or more is ruled out in all.
pub fn judge_states(
    trials: &[Trial],
    others: &[StateTrials],
    basis: Basis,
    remedies: &str,
) -> Verdict {
    let alone = judge(trials, basis, remedies);
    let made: Vec<&StateTrials> = others.iter().filter(|state| !state.trials.is_empty()).collect();
    if made.is_empty() {
        return alone;
    }
    let in_first = StateTrials { trials: trials.to_vec(), ..StateTrials::default() };
    let all: Vec<&StateTrials> = std::iter::once(&in_first).chain(made).collect();
    let holds = |trial: &&Trial| {
        let in_each =
            all.iter().filter_map(|state| Some(state.standing(state.named(&trial.name)?)));
        !is_candidate(trial) || in_each.eq(all.iter().map(|_| InState::Holds))
    };
    for state in &all {
        let safe: Vec<Trial> = state.trials.iter().filter(holds).cloned().collect();
        let verdict = judge(&safe, basis, remedies);
        if let Some(winner) = &verdict.winner {
            let others = elsewhere(winner, state.state, &all);
            let reason = format!("{} ({}){others}", verdict.reason, state.state);
            return Verdict { reason, ..verdict };
        }
    }
    Verdict { winner: None, reason: why_no_state(&alone, &all), ..Verdict::default() }
}

/// Says how the winner stands in the other states.
fn elsewhere(winner: &str, gained_in: MemoryState, all: &[&StateTrials]) -> String {
    let others = all.iter().filter(|state| state.state != gained_in);
    let words: Vec<String> =
        others.filter_map(|state| Some(state.words(state.named(winner)?))).collect();
    if words.is_empty() { String::new() } else { format!("; it holds in {}", words.join(", ")) }
}

/// Says why no trial is recommended over all states.
fn why_no_state(alone: &Verdict, all: &[&StateTrials]) -> String {
    let Some(name) = &alone.winner else { return alone.reason.clone() };
    let of = |wanted: InState| {
        let seen = all.iter().filter_map(|state| Some((state, state.named(name)?)));
        let words: Vec<String> = seen
            .filter(|(state, trial)| state.standing(trial) == wanted)
            .map(|(state, trial)| state.words(trial))
            .collect();
        words.join(", ")
    };
    let gains = format!("`{name}` gains in {}", of(InState::Holds));
    let (lost, open) = (of(InState::Loses), of(InState::Open));
    match lost.is_empty() {
        false => format!("{gains}, but loses in {lost}: not recommended"),
        true => format!(
            "{gains}, but a loss is not ruled out in {open}: not recommended; give it more time (--time 10min)"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::trial;
    use super::super::{BASE, compare_trials};
    use super::*;
    use crate::exit::Exit;
    use crate::sequential::Stopping;

    fn trials_in(state: MemoryState, times: &[(&str, u64)]) -> StateTrials {
        let mut trials: Vec<Trial> =
            times.iter().map(|(name, ms)| trial(name, *ms, 100, 0.9)).collect();
        trials.iter_mut().for_each(|trial| trial.took.fraction = Some(0.1));
        compare_trials(&mut trials, Stopping::Fixed, Basis::Elapsed);
        StateTrials { state, trials, ..StateTrials::default() }
    }

    fn verdict(fresh: &[(&str, u64)], others: &[StateTrials]) -> Verdict {
        let first = trials_in(MemoryState::Fresh, fresh);
        judge_states(&first.trials, others, Basis::Elapsed, "wait")
    }

    const GAINS: [(&str, u64); 3] = [(AS_IS, 1_300), (BASE, 1_300), ("thp-2M", 1_000)];

    #[test]
    fn a_winner_holds_in_every_state() {
        let forked =
            trials_in(MemoryState::Forked, &[(AS_IS, 1_400), (BASE, 1_400), ("thp-2M", 1_390)]);
        let told = verdict(&GAINS, &[forked]);
        assert_eq!(told.winner.as_deref(), Some("thp-2M"), "{}", told.reason);
        assert!(told.reason.contains("(fresh)") && told.reason.contains("holds in forked 1.0"));
    }

    #[test]
    fn what_loses_in_a_state_is_not_recommended_and_the_cause_is_named() {
        let mut fragmented =
            trials_in(MemoryState::Fragmented, &[(AS_IS, 1_300), (BASE, 1_300), ("thp-2M", 2_600)]);
        fragmented.loser = Some("thp-2M".into());
        let growth = Growth { id: "compaction".into(), before_ns: 0, after_ns: 1_200_000_000 };
        fragmented.growth = vec![growth];
        assert_eq!(fragmented.worst().map(|trial| trial.name.as_str()), Some("thp-2M"));
        let told = verdict(&GAINS, &[fragmented]);
        assert_eq!(told.winner, None);
        let words = ["loses in fragmented 0.50", "compaction 1.20 s more"];
        assert!(words.iter().all(|words| told.reason.contains(words)), "{}", told.reason);
    }

    #[test]
    fn a_state_can_have_another_winner() {
        let same = [(AS_IS, 1_000), (BASE, 1_000), ("thp-2M", 1_000)];
        let fragmented =
            trials_in(MemoryState::Fragmented, &[(AS_IS, 2_000), (BASE, 1_000), ("thp-2M", 2_000)]);
        let told = verdict(&same, &[fragmented]);
        assert_eq!(told.winner.as_deref(), Some(BASE), "{}", told.reason);
        assert!(told.reason.contains("(fragmented)"), "{}", told.reason);
    }

    #[test]
    fn a_state_that_could_not_be_made_or_another_exit_does_not_recommend() {
        let missing = StateTrials {
            state: MemoryState::Pressed,
            why_not: Some("no swap".into()),
            ..StateTrials::default()
        };
        assert_eq!(verdict(&GAINS, &[missing]).winner.as_deref(), Some("thp-2M"));
        let mut pressed = trials_in(MemoryState::Pressed, &GAINS);
        pressed.trials[2].exit = Exit::Signal(9);
        let told = verdict(&GAINS, &[pressed]);
        assert!(
            told.winner.is_none() && told.reason.contains("killed by signal 9"),
            "{}",
            told.reason
        );
    }

    #[test]
    fn rounds_go_on_while_a_loss_is_open() {
        let mut open = trials_in(MemoryState::Forked, &GAINS).trials;
        let speedup = |low, value, high| Some(Ratio { low, value, high });
        open[1].speedup = speedup(0.99, 1.0, 1.01);
        open[2].speedup = speedup(0.9, 0.97, 1.01);
        assert_eq!(undecided_in_state(&open), [true, false, true]);
        open[2].speedup = speedup(0.9, 0.92, 0.95);
        assert_eq!(undecided_in_state(&open), [false; 3]);
    }

    #[test]
    fn states_are_named() {
        for state in MemoryState::ALL {
            assert_eq!(state.name().parse(), Ok(state));
        }
        assert!("frsh".parse::<MemoryState>().unwrap_err().contains("there are fresh, found"));
    }
}
