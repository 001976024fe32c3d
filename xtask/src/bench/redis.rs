//! Redis that saves in the background while it is written to, with and without large pages: the p99 and the
//! throughput of its load, and what `pagetax diagnose` decides on each.

use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result, bail};
use pagetax_core::diagnosis::{AS_IS, Basis, Diagnosis};
use pagetax_core::load::LoadFigure;
use pagetax_core::stats::Ratio;
use serde_json::json;
use std::net::TcpListener;
use std::process::Command;

const SESSIONS: usize = 5;
const ROUNDS: &str = "5";
const LARGE: &str = "thp-2M";
const FIGURES: [(LoadFigure, &str); 2] =
    [(LoadFigure::P99, "p99"), (LoadFigure::Throughput, "throughput")];

/// A diagnosis on one figure.
struct Decision {
    as_is: String,
    large: String,
    speedup: Ratio,
    winner: Option<String>,
}

pub fn run() -> Result<Outcome> {
    if !shell::has("redis-server") {
        bail!("install redis-server and redis-tools");
    }
    let pagetax = pagetax()?;
    let (mut rows, mut results, mut seen) = (Vec::new(), Vec::new(), 0);
    for session in 1..=SESSIONS {
        eprintln!("session {session} of {SESSIONS}");
        let mut row = vec![session.to_string()];
        for (figure, metric) in FIGURES {
            let decision = decide(&pagetax, figure, metric)?;
            // The speed-up is above 1 for a lower latency, as for more requests.
            let is_worse = decision.speedup.high < 1.0;
            seen += usize::from(figure == LoadFigure::P99 && is_worse && decision.winner.is_none());
            results.push(json!({
                "session": session, "metric": metric, "speedup": decision.speedup,
                "winner": decision.winner,
            }));
            row.extend([decision.as_is, decision.large, decision.speedup.to_string()]);
            row.push(decision.winner.unwrap_or("nothing".into()));
        }
        rows.push(row);
    }
    Ok(Outcome {
        headings: vec![
            "session",
            "p99",
            "on 2M",
            "speed-up",
            "recommended",
            "requests/s",
            "on 2M",
            "speed-up",
            "recommended",
        ],
        rows,
        json: json!(results),
        promise: (
            format!(
                "large pages make the p99 worse, and are not recommended, in {seen} of {SESSIONS}"
            ),
            seen == SESSIONS,
        ),
    })
}

fn decide(pagetax: &str, figure: LoadFigure, metric: &str) -> Result<Decision> {
    let folder = tempfile::tempdir()?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let server = format!(
        "cd {}; rm -f dump.rdb; exec redis-server --port {port} --save '' --dir .",
        folder.path().display()
    );
    let mut diagnose = Command::new(pagetax);
    diagnose.args(["diagnose", "--json", "--pages", "2M", "--runs", ROUNDS, "--metric", metric]);
    diagnose.args(["--ready", &format!("command:redis-cli -p {port} ping | grep PONG")]);
    diagnose.args(["--event", &format!("redis-cli -p {port} bgsave")]);
    let load = format!("redis-benchmark -p {port} -t set -n 400000 -r 400000 -d 500");
    let text = shell::output(diagnose.args(["--load", &load, "--", "sh", "-c", &server]))?;
    let diagnosis: Diagnosis = serde_json::from_str(&text)?;
    let named = |name: &str| {
        let trial = diagnosis.trials.iter().find(|trial| trial.name == name);
        trial.with_context(|| format!("no trial {name}"))
    };
    let (as_is, large) = (named(AS_IS)?, named(LARGE)?);
    let basis = Basis::Load(figure);
    Ok(Decision {
        as_is: basis.median_text(as_is),
        large: basis.median_text(large),
        speedup: large.speedup.context("no speed-up")?,
        winner: diagnosis.verdict.winner.clone(),
    })
}
