//! What a load tells about the server that it loads: throughput and latencies, read from its output.
//!
//! Invariant: what the output lacks is absent, never 0. If it has several tests, the slowest counts.
//! Latencies are those of the output or those of our own requests, never a mix of both.

use crate::units::Nanos;
use regex_lite::{Captures, Regex};
use serde::{Deserialize, Serialize};

/// The figures of one load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadFigures {
    /// Requests, transactions or I/Os in each second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throughput_per_s: Option<f64>,
    /// The median latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_ns: Option<f64>,
    /// The latency that 1 of 100 requests exceeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_ns: Option<f64>,
    /// The latency that 1 of 1,000 requests exceeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p999_ns: Option<f64>,
    /// The number that the expression of `--metric` finds, in a unit of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<f64>,
    /// The number of our own requests whose latencies these are; none if they are those of the load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_count: Option<u64>,
}

/// A figure of a load, by which trials are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum LoadFigure {
    /// [`LoadFigures::throughput_per_s`].
    Throughput,
    /// [`LoadFigures::p50_ns`].
    P50,
    /// [`LoadFigures::p99_ns`].
    P99,
    /// [`LoadFigures::p999_ns`].
    P999,
    /// [`LoadFigures::number`], of which less is better.
    Less,
    /// [`LoadFigures::number`], of which more is better.
    More,
}

use LoadFigure::{Less, More, P50, P99, P999, Throughput};

impl LoadFigure {
    /// Returns true if more of it is better.
    pub fn is_more_better(self) -> bool {
        matches!(self, Throughput | More)
    }

    /// Returns its value; none if the output lacked it.
    pub fn value(self, figures: &LoadFigures) -> Option<f64> {
        let mut figures = *figures;
        *self.slot(&mut figures)
    }

    fn slot(self, figures: &mut LoadFigures) -> &mut Option<f64> {
        match self {
            Throughput => &mut figures.throughput_per_s,
            P50 => &mut figures.p50_ns,
            P99 => &mut figures.p99_ns,
            P999 => &mut figures.p999_ns,
            Less | More => &mut figures.number,
        }
    }

    /// Returns a number of which less is better, for comparisons of whole numbers; 0 without a value.
    pub fn cost(self, figures: &LoadFigures) -> u64 {
        match self.value(figures).filter(|value| *value > 0.0) {
            None => 0,
            Some(value) if self.is_more_better() => (1e15 / value) as u64,
            Some(value) if self == Less => (value * 1e6) as u64,
            Some(ns) => ns as u64,
        }
    }

    /// Returns the column's heading.
    pub fn heading(self) -> &'static str {
        match self {
            Throughput => "requests/s",
            P50 => "p50",
            P99 => "p99",
            P999 => "p99.9",
            Less | More => "metric",
        }
    }

    /// Returns a value as text.
    pub fn text(self, value: f64) -> String {
        match self {
            P50 | P99 | P999 => Nanos(value as u64).to_string(),
            _ if value >= 100.0 => format!("{value:.0}"),
            _ => format!("{value:.3}"),
        }
    }
}

/// The figure to compare by, and how to find it.
#[derive(Debug, Clone)]
pub struct Metric {
    /// The figure.
    pub figure: LoadFigure,
    /// The expression of a figure of the user's own: its first group is the number.
    pattern: Option<Regex>,
}

impl Metric {
    /// Parses `throughput`, `p50`, `p99`, `p999`, `less:REGEX` or `more:REGEX`.
    ///
    /// # Errors
    /// A sentence with the known words.
    pub fn parse(word: &str) -> Result<Metric, String> {
        let known = [("throughput", Throughput), ("p50", P50), ("p99", P99), ("p999", P999)];
        if let Some((_, figure)) = known.iter().find(|(name, _)| *name == word) {
            return Ok(Metric { figure: *figure, pattern: None });
        }
        let (figure, expression) = match word.split_once(':') {
            Some(("less", expression)) => (Less, expression),
            Some(("more", expression)) => (More, expression),
            _ => {
                return Err(
                    "throughput, p50, p99, p999, or less:REGEX or more:REGEX with the number in \
                            brackets"
                        .into(),
                );
            }
        };
        let pattern = Regex::new(expression).map_err(|error| error.to_string())?;
        match pattern.captures_len() {
            2.. => Ok(Metric { figure, pattern: Some(pattern) }),
            _ => Err(format!("`{expression}` has no brackets around the number")),
        }
    }

    /// Reads the figures in a load's output. The latencies are `own` ones, if there are any.
    ///
    /// # Errors
    /// The figure to compare by is not there.
    pub fn read(&self, output: &str, own: Option<LoadFigures>) -> Result<LoadFigures, String> {
        let mut figures = known_figures(output);
        if let Some(own) = own {
            figures = LoadFigures { throughput_per_s: figures.throughput_per_s, ..own };
        }
        if let Some(pattern) = &self.pattern {
            figures.number = slowest(self.figure, numbers(pattern, output, 1.0));
        }
        match (self.figure.value(&figures), self.figure, figures.request_count) {
            (Some(_), ..) => Ok(figures),
            (None, P50 | P99 | P999, Some(count)) => Err(format!(
                "{count} requests of --probe are too few for a {}; load the server for longer",
                self.figure.heading()
            )),
            _ => {
                let last = output.lines().rev().find(|line| !line.trim().is_empty());
                let what = self.figure.heading();
                Err(match last {
                    Some(line) => format!("the load's output has no {what}; its last line: {line}"),
                    None => format!("the load printed nothing, so there is no {what}"),
                })
            }
        }
    }
}

/// A figure, the expression that finds it in the output of a known program, and its unit in nanoseconds or
/// 1. The group `n` is the number, and `u` its unit if the output has one.
const KNOWN: &[(LoadFigure, &str, f64)] = &[
    // redis-benchmark, in its three forms.
    (Throughput, r"(?<n>[\d.]+) requests per second", 1.0),
    (P50, r"p50=(?<n>[\d.]+) msec", 1e6),
    (P50, r"p99\s+max\s+[\d.]+\s+[\d.]+\s+(?<n>[\d.]+)", 1e6),
    (P99, r"p99\s+max\s+(?:[\d.]+\s+){4}(?<n>[\d.]+)", 1e6),
    (P999, r"99\.9\d+% <= (?<n>[\d.]+) milliseconds", 1e6),
    (Throughput, r#"(?m)^"[^"]+","(?<n>[\d.]+)","[\d.]+""#, 1.0),
    (P50, r#"(?m)^"[^"]+",(?:"[\d.]+",){3}"(?<n>[\d.]+)""#, 1e6),
    (P99, r#"(?m)^"[^"]+",(?:"[\d.]+",){5}"(?<n>[\d.]+)""#, 1e6),
    // wrk --latency
    (Throughput, r"Requests/sec:\s+(?<n>[\d.]+)", 1.0),
    (P50, r"(?m)^\s+50%\s+(?<n>[\d.]+)(?<u>us|ms|s|m)$", 1.0),
    (P99, r"(?m)^\s+99%\s+(?<n>[\d.]+)(?<u>us|ms|s|m)$", 1.0),
    (P999, r"(?m)^\s+99\.9\d*%\s+(?<n>[\d.]+)(?<u>us|ms|s|m)$", 1.0),
    // pgbench
    (Throughput, r"(?m)^tps = (?<n>[\d.]+)", 1.0),
    // memtier_benchmark
    (Throughput, r"(?m)^Totals\s+(?<n>[\d.]+)", 1.0),
    (P50, r"(?m)^Totals\s+(?:\S+\s+){4}(?<n>[\d.]+)", 1e6),
    (P99, r"(?m)^Totals\s+(?:\S+\s+){5}(?<n>[\d.]+)", 1e6),
    (P999, r"(?m)^Totals\s+(?:\S+\s+){6}(?<n>[\d.]+)", 1e6),
    // fio
    (Throughput, r"IOPS=(?<n>[\d.]+)(?<u>[kM]?)", 1.0),
    (P50, r"clat percentiles \((?<u>\w+)\):[^()]*\D50\.00th=\[\s*(?<n>\d+)\]", 1.0),
    (P99, r"clat percentiles \((?<u>\w+)\):[^()]*\D99\.00th=\[\s*(?<n>\d+)\]", 1.0),
    (P999, r"clat percentiles \((?<u>\w+)\):[^()]*\D99\.90th=\[\s*(?<n>\d+)\]", 1.0),
];

fn known_figures(output: &str) -> LoadFigures {
    let mut figures = LoadFigures::default();
    for (figure, pattern, unit) in KNOWN {
        let found = Regex::new(pattern).ok().map(|pattern| numbers(&pattern, output, *unit));
        let slot = figure.slot(&mut figures);
        *slot = slot.or(slowest(*figure, found.unwrap_or_default()));
    }
    figures
}

fn numbers(pattern: &Regex, output: &str, unit: f64) -> Vec<f64> {
    let number = |found: Captures| {
        let text = found.name("n").or_else(|| found.get(1))?.as_str();
        let own = found.name("u").map_or(Some(1.0), |unit| scale(unit.as_str()));
        Some(text.parse::<f64>().ok()? * unit * own?)
    };
    pattern.captures_iter(output).filter_map(number).filter(|number| number.is_finite()).collect()
}

/// Returns the nanoseconds of a unit of time, or the factor of a prefix.
fn scale(unit: &str) -> Option<f64> {
    Some(match unit {
        "" | "nsec" => 1.0,
        "us" | "usec" | "k" => 1e3,
        "ms" | "msec" | "M" => 1e6,
        "s" => 1e9,
        "m" => 60e9,
        _ => return None,
    })
}

fn slowest(figure: LoadFigure, numbers: Vec<f64>) -> Option<f64> {
    let all = numbers.into_iter();
    if figure.is_more_better() { all.reduce(f64::min) } else { all.reduce(f64::max) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(metric: &str, output: &str) -> Result<f64, String> {
        let metric = Metric::parse(metric)?;
        metric.read(output, None).map(|figures| metric.figure.value(&figures).unwrap())
    }

    const REDIS: &str = "\
99.805% <= 4.719 milliseconds (cumulative count 2995)
99.902% <= 4.775 milliseconds (cumulative count 2998)

Summary:
  throughput summary: 37500.00 requests per second
  latency summary (msec):
          avg       min       p50       p95       p99       max
        0.823     0.064     0.743     1.327     3.319     4.823
";
    const WRK: &str = "\
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     4.01ms    3.48ms  36.69ms   92.25%
  Latency Distribution
     50%  999.00us
     90%    6.87ms
     99%   22.66ms
Requests/sec:   1083.17
";
    const FIO: &str = "\
  read: IOPS=19.0k, BW=74.1MiB/s (77.7MB/s)(4096KiB/54msec)
    clat percentiles (usec):
     |  1.00th=[   46],  5.00th=[   47], 50.00th=[   50], 60.00th=[   51],
     | 99.00th=[   92], 99.50th=[  102], 99.90th=[  137], 99.95th=[  273],
";
    const MEMTIER: &str = "\
Type         Ops/sec     Hits/sec   Misses/sec    Avg. Latency     p50 Latency     p99 Latency   p99.9 Latency       KB/sec
Sets         1000.00          ---          ---         0.39000         0.37500         0.90300         2.19100      1389.40
Totals      55000.00        21.10     49979.00         0.39200         0.38300         0.91100         2.20700      3400.10
";

    #[test]
    fn known_programs_are_read() {
        for (metric, output, value) in [
            ("throughput", REDIS, 37_500.0),
            ("p50", REDIS, 743e3),
            ("p99", REDIS, 3_319e3),
            ("p999", REDIS, 4_775e3),
            ("p50", "GET: 38961.04 requests per second, p50=0.743 msec\n", 743e3),
            ("throughput", "\"test\",\"rps\",\"avg\"\n\"GET\",\"25210.08\",\"1.433\"", 25_210.08),
            ("p99", "\"GET\",\"25210.08\",\"1.4\",\"0.1\",\"0.5\",\"7.0\",\"8.9\",\"9.6\"", 8.9e6),
            ("throughput", WRK, 1_083.17),
            ("p50", WRK, 999e3),
            ("p99", WRK, 22.66e6),
            ("throughput", "number of transactions: 9\ntps = 812.5 (without initial)", 812.5),
            ("throughput", MEMTIER, 55_000.0),
            ("p99", MEMTIER, 911e3),
            ("p999", MEMTIER, 2_207e3),
            ("throughput", FIO, 19_000.0),
            ("p50", FIO, 50e3),
            ("p99", FIO, 92e3),
            ("p999", FIO, 137e3),
        ] {
            let read = read(metric, output).unwrap();
            assert!((read - value).abs() < 1.0, "{metric} of {output}: {read}");
        }
    }

    #[test]
    fn of_several_tests_the_slowest_counts() {
        let two = "SET: 200.00 requests per second, p50=0.7 msec\rGET: 100.00 requests per second, p50=0.9 msec";
        assert_eq!(read("throughput", two), Ok(100.0));
        assert_eq!(read("p50", two).unwrap().round(), 9e5);
        assert_eq!(read("less:took ([0-9]+) s", "took 3 s\ntook 5 s"), Ok(5.0));
        assert_eq!(read("more:done ([0-9]+)", "done 3\ndone 5"), Ok(3.0));
    }

    #[test]
    fn what_is_not_there_is_said() {
        let said = read("p99", "GET: 38961.04 requests per second, p50=0.743 msec\n").unwrap_err();
        assert!(said.contains("no p99; its last line: GET"), "{said}");
        assert!(read("throughput", " \n").unwrap_err().contains("printed nothing"));
        for wrong in ["p98", "less:[", "more:tps"] {
            assert!(Metric::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn own_latencies_replace_those_of_the_load() {
        let own = |p999_ns| LoadFigures {
            p50_ns: Some(1e5),
            p99_ns: Some(2e5),
            p999_ns,
            request_count: Some(300),
            ..LoadFigures::default()
        };
        let read = |word: &str, own| Metric::parse(word).unwrap().read(REDIS, Some(own)).unwrap();
        let figures = read("p99", own(None));
        assert_eq!(figures, LoadFigures { throughput_per_s: Some(37_500.0), ..own(None) });
        let number = read("less:p99 +max\n +([0-9.]+)", own(Some(3e5)));
        assert_eq!((number.number, number.p999_ns), (Some(0.823), Some(3e5)));
        let few = Metric::parse("p999").unwrap().read(REDIS, Some(own(None))).unwrap_err();
        assert!(few.contains("300 requests of --probe are too few for a p99.9"), "{few}");
    }

    #[test]
    fn costs_are_lower_where_the_figure_is_better() {
        let with = |value| LoadFigures {
            throughput_per_s: Some(value),
            p99_ns: Some(value),
            number: Some(value),
            ..LoadFigures::default()
        };
        for figure in [Throughput, P99, Less, More] {
            let better = figure.cost(&with(1_100.0)) < figure.cost(&with(1_000.0));
            assert_eq!(better, figure.is_more_better(), "{figure:?}");
        }
        assert_eq!(P50.cost(&with(1.0)), 0, "absent");
    }
}
