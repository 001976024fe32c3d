//! The answers of `pagetax why` as text: a sentence, then each cause with what shows it and its hint.

use pagetax_core::units::Bytes;
use pagetax_host::pages::why::{HugePageAnswer, HugePageCause};

/// Longer command lines are cut.
const COMMAND_CHARS: usize = 70;

/// Renders the answers, one after the other.
pub fn render(answers: &[HugePageAnswer]) -> String {
    answers.iter().map(answer).collect::<Vec<_>>().join("\n")
}

fn answer(answer: &HugePageAnswer) -> String {
    let summary = answer.summary.replace(" For ", "\n  For ");
    let mut out = format!("{}: {}\n  {summary}\n", answer.pid, cut(&answer.command));
    for (number, each) in answer.causes.iter().enumerate() {
        out += &cause(number + 1, each);
    }
    if answer.unexplained_bytes > 0 {
        out += &format!(
            "\n  {} on small pages have no listed cause\n",
            Bytes(answer.unexplained_bytes)
        );
    }
    let untouched = &answer.untouched;
    match (untouched.value, &untouched.why) {
        (Some(0), _) if answer.huge_bytes == 0 => {}
        (Some(bytes), _) => {
            let bounds = match (untouched.low, untouched.high) {
                (Some(low), Some(high)) => format!(" ({} to {})", Bytes(low), Bytes(high)),
                _ => String::new(),
            };
            let bytes = Bytes(bytes);
            out += &format!("\n  never touched, but resident on huge pages: {bytes}{bounds}\n");
        }
        (None, Some(why)) if answer.huge_bytes > 0 => {
            out += &format!("\n  never touched, but resident on huge pages: unknown; {why}\n");
        }
        _ => {}
    }
    for missing in &answer.missing {
        out += &format!("  missing: {}: {}\n", missing.what, missing.why);
    }
    out
}

fn cause(number: usize, cause: &HugePageCause) -> String {
    let HugePageCause { what, certainty, bytes, evidence, hint, .. } = cause;
    let mut out = format!("\n  {number}. {certainty}, {}: {what}\n", Bytes(*bytes));
    for shown in evidence {
        out += &format!("     {}: {}\n", shown.source, cut(&shown.value));
    }
    out + &format!("     hint: {hint}\n")
}

/// Names are what other programs chose: control characters do not reach the terminal.
fn cut(text: &str) -> String {
    let printable = text.chars().map(|c| if c.is_control() { '?' } else { c });
    let mut short: String = printable.take(COMMAND_CHARS + 1).collect();
    if short.chars().count() > COMMAND_CHARS {
        short = short.chars().take(COMMAND_CHARS - 1).chain(['…']).collect();
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::counter::{Reading, Unit, UnitReading};
    use pagetax_host::pages::why::{CauseEvidence, Certainty, MissingFact};

    #[test]
    fn each_cause_has_its_evidence_and_hint() {
        let text = render(&[HugePageAnswer {
            pid: 7,
            command: "a\u{1b}[31m program".into(),
            summary: "0B of its 4M of anonymous memory is on huge pages (0 %).".into(),
            anon_bytes: 4 << 20,
            huge_bytes: 0,
            causes: vec![HugePageCause {
                id: "prctl".into(),
                what: "the process forbids itself huge pages".into(),
                certainty: Certainty::Certain,
                bytes: 3 << 20,
                evidence: vec![CauseEvidence {
                    source: "/proc/7/status".into(),
                    value: "THP_enabled: 0".into(),
                }],
                hint: "start it without".into(),
            }],
            unexplained_bytes: 1 << 20,
            untouched: UnitReading::new(Unit::Bytes, Reading::Measured(0)),
            missing: vec![MissingFact { what: "/proc/7/auxv".into(), why: "refused".into() }],
        }]);
        let expected = "\
7: a?[31m program
  0B of its 4M of anonymous memory is on huge pages (0 %).

  1. certain, 3M: the process forbids itself huge pages
     /proc/7/status: THP_enabled: 0
     hint: start it without

  1M on small pages have no listed cause
  missing: /proc/7/auxv: refused
";
        assert_eq!(
            text,
            expected
                .replace("3M", &Bytes(3 << 20).to_string())
                .replace("1M", &Bytes(1 << 20).to_string())
        );
    }
}
