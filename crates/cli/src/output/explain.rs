//! Explanations as text.

use super::text;
use pagetax_core::explain::{Explanation, Explanations, KswapdDecision};

/// Renders them whole, or one line each.
pub fn render(document: &Explanations, is_short: bool) -> String {
    if is_short {
        let rows = document.causes.iter().map(|one| vec![one.id.clone(), one.what.clone()]);
        return text::table(&["cause", ""], &[], rows.collect());
    }
    let causes = document.causes.iter().map(explanation);
    causes.chain(document.kswapd.as_ref().map(kswapd)).collect::<Vec<_>>().join("\n")
}

fn explanation(one: &Explanation) -> String {
    let cures: String = one.cured_by.iter().map(|cure| format!("    {cure}\n")).collect();
    format!(
        "{}\n  {}\n  shown by    {}\n  cured by\n{cures}  costs       {}\n  useless if  {}\n  source      {}\n",
        one.id, one.what, one.shown_by, one.costs, one.useless_if, one.source
    )
}

fn kswapd(decision: &KswapdDecision) -> String {
    let mut out = format!("{}\n", decision.summary);
    for cause in &decision.causes {
        let certainty = if cause.is_certain { "certain" } else { "possible" };
        out += &format!(
            "\n  {} ({certainty}): {}\n    shown by  {}\n    cured by  {}\n",
            cause.id, cause.what, cause.evidence, cause.cure
        );
    }
    out.extend(decision.missing.iter().map(|why| format!("  could not be read: {why}\n")));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::explain::{KswapdCause, all};

    #[test]
    fn a_decision_names_cause_evidence_and_cure() {
        let decision = KswapdDecision {
            elapsed_ns: 1,
            cpu_share: Some(0.5),
            summary: "kswapd took 50 % of a CPU: memory is locked".into(),
            causes: vec![KswapdCause {
                id: "locked".into(),
                what: "memory is locked".into(),
                is_certain: true,
                evidence: "Unevictable: 3G".into(),
                cure: "lock less".into(),
            }],
            missing: vec!["/proc/zoneinfo: not there".into()],
        };
        let document = Explanations { causes: all().collect(), kswapd: Some(decision) };
        let text = render(&document, false);
        assert!(text.contains("locked (certain): memory is locked\n    shown by  Unevictable: 3G"));
        assert!(text.contains("could not be read: /proc/zoneinfo") && text.contains("shootdown\n"));
        assert_eq!(render(&document, true).lines().count(), 1 + document.causes.len());
    }
}
