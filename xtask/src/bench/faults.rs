//! The cost of a fault under pagetax: against a bare C loop, and with latencies measured.
//!
//! Compares CPU time, so other programs on the machine do not count. Rounds are interleaved, so a machine
//! that becomes slower affects both sides.

use super::{Outcome, number, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use pagetax_core::stats::{median_of_ratios, quantiles};
use serde_json::{Value, json};
use std::process::Command;

const JOB: &str = "xtask/src/bench/anon_fault.toml";
const C_SOURCE: &str = "xtask/src/bench/anon_fault.c";
const C_PROGRAM: &str = "target/anon_fault";
const RATE_LIMIT: f64 = 0.03;
const LATENCY_LIMIT_NS: f64 = 250.0;

/// Compares a job's anonymous faults with those of a C program that does nothing else. The machine's speed
/// varies by a tenth between runs, so rounds are short and many.
pub fn against_c() -> Result<Outcome> {
    const ROUNDS: usize = 201;
    let faults = Faults::prepare(32 << 20, 8)?;
    let (mut c, mut ours) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        // The order alternates.
        if round % 2 == 0 {
            c.push(faults.in_c(&[])?);
        }
        ours.push(faults.in_job()?);
        if round % 2 != 0 {
            c.push(faults.in_c(&[])?);
        }
    }
    let ps = |ns: &[f64]| ns.iter().map(|ns| (ns * 1000.0) as u64).collect::<Vec<_>>();
    let ratio = median_of_ratios(&ps(&ours), &ps(&c), 1).context("faults without a time")?;
    Ok(Outcome {
        headings: vec!["CPU time for each fault, ns", "median (quartiles)"],
        rows: vec![row("in C".into(), quartiles(&c)), row("in a job".into(), quartiles(&ours))],
        json: json!({"c_ns": c, "job_ns": ours, "ratio": ratio}),
        promise: (
            format!("job ÷ C {ratio} over {ROUNDS} rounds, at most {} %", RATE_LIMIT * 100.0),
            (ratio.value - 1.0).abs() <= RATE_LIMIT,
        ),
    })
}

/// Compares the cost of latencies in a job with the kernel's cost of two samples a fault. A short run
/// measures each fault; a long one measures those in its windows.
pub fn latency_cost() -> Result<Outcome> {
    // Rounds are short and many, because the machine's speed changes from second to second.
    const ROUNDS: usize = 101;
    let (few, many) = (Faults::prepare(16 << 20, 2)?, Faults::prepare(16 << 20, 32)?);
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let fault_ns = many.in_c(&[])?;
        let floor_ns = many.in_c(&["pair"])? - fault_ns;
        rounds.push(FaultRound { fault_ns, floor_ns, few: few.watched()?, many: many.watched()? });
    }
    let of = |of: fn(&FaultRound) -> f64| quartiles(&rounds.iter().map(of).collect::<Vec<_>>());
    let cost = of(|round| round.many.cost_ns);
    let latencies = |of: &Faults, share: [f64; 3]| {
        format!("latencies of {:.0} % of {} faults", share[1] * 100.0, of.count())
    };
    Ok(Outcome {
        headings: vec!["CPU time for each fault, ns", "median (quartiles)"],
        rows: vec![
            row("a fault, in C".into(), of(|round| round.fault_ns)),
            row("two samples of each without a reader, in C".into(), of(|round| round.floor_ns)),
            row(latencies(&few, of(|round| round.few.seen_share)), of(|round| round.few.cost_ns)),
            row(latencies(&many, of(|round| round.many.seen_share)), cost),
        ],
        json: json!(rounds.iter().map(FaultRound::json).collect::<Vec<_>>()),
        promise: (
            format!(
                "median {:.0} ns a fault in a run of {}, at most {LATENCY_LIMIT_NS} ns",
                cost[1],
                many.count()
            ),
            cost[1] <= LATENCY_LIMIT_NS,
        ),
    })
}

fn quartiles(values: &[f64]) -> [f64; 3] {
    quantiles(values, [0.25, 0.5, 0.75])
}

fn row(what: String, [low, median, high]: [f64; 3]) -> Vec<String> {
    vec![what, format!("{median:.0} ({low:.0}–{high:.0})")]
}

/// The CPU time of each fault, in nanoseconds.
struct FaultRound {
    fault_ns: f64,
    floor_ns: f64,
    few: LatencyCost,
    many: LatencyCost,
}

impl FaultRound {
    fn json(&self) -> Value {
        let FaultRound { fault_ns, floor_ns, few, many } = self;
        json!({"fault_ns": fault_ns, "floor_ns": floor_ns,
            "few": few.json(), "many": many.json()})
    }
}

/// The added time of latencies in a job, and the share of its faults that they cover.
struct LatencyCost {
    cost_ns: f64,
    seen_share: f64,
}

impl LatencyCost {
    fn json(&self) -> Value {
        json!({"cost_ns": self.cost_ns, "seen_share": self.seen_share})
    }
}

/// The same faults in C and in a job, each as CPU nanoseconds a fault.
struct Faults {
    pagetax: String,
    bytes: u64,
    repeats: u64,
}

impl Faults {
    fn prepare(bytes: u64, repeats: u64) -> Result<Faults> {
        let compile = ["-O2", "-o", C_PROGRAM, C_SOURCE];
        shell::succeed(Command::new("cc").args(compile)).context("install a C compiler: gcc")?;
        Ok(Faults { pagetax: pagetax()?, bytes, repeats })
    }

    fn count(&self) -> u64 {
        self.bytes / 4096 * self.repeats
    }

    fn each(&self, ns: f64) -> f64 {
        ns / self.count() as f64
    }

    fn in_c(&self, more: &[&str]) -> Result<f64> {
        let args = [self.bytes.to_string(), self.repeats.to_string()];
        let text = shell::output(Command::new(C_PROGRAM).args(args).args(more))?;
        Ok(self.each(text.trim().parse()?))
    }

    /// Returns the CPU time of the job's only phase.
    fn in_job(&self) -> Result<f64> {
        self.cpu_ns(&self.report(&[])?)
    }

    fn watched(&self) -> Result<LatencyCost> {
        let bare_ns = self.in_job()?;
        let report = self.report(&["--fault-latency"])?;
        let seen = |key: &str| {
            let number = number(&report, &format!("/latency/minor_fault/{key}"));
            number.context("no latencies: ask `pagetax doctor` why")
        };
        Ok(LatencyCost {
            cost_ns: self.cpu_ns(&report)? - bare_ns,
            seen_share: seen("count")? / seen("of_count")?,
        })
    }

    fn report(&self, more: &[&str]) -> Result<Value> {
        let size = format!("size={}", self.bytes);
        let repeat = format!("repeat={}", self.repeats);
        let args = [JOB, "--set", &size, "--set", &repeat];
        super::report(&self.pagetax, &[&args, more].concat())
    }

    fn cpu_ns(&self, report: &Value) -> Result<f64> {
        let ns = |id: &str| number(report, &format!("/phases/0/counters/{id}/value"));
        Ok(self.each(ns("user_ns")? + ns("kernel_ns")?))
    }
}
