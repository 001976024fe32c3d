//! Runs as CSV in the long form that spreadsheets pivot and data frames read: one line a reading.

use anyhow::Result;
use pagetax_core::counter::{Counters, Provenance};
use pagetax_core::report::{Run, Runs};

const HEADINGS: [&str; 10] =
    ["job", "machine", "phase", "time_ns", "id", "provenance", "value", "low", "high", "why"];

/// Renders counters of the whole run (no phase, no time), then those of each phase, then the series. Each
/// swept parameter has a column after the machine.
pub fn render(document: &Runs) -> Result<String> {
    let Runs { swept, runs } = document;
    let mut out = csv::Writer::from_writer(Vec::new());
    let (first, rest) = HEADINGS.split_at(2);
    let swept_names = swept.iter().map(String::as_str);
    out.write_record(first.iter().copied().chain(swept_names).chain(rest.iter().copied()))?;
    for run in runs {
        let params = swept.iter().map(|name| run.job.params.get(name).cloned().unwrap_or_default());
        let names = [run.job.name.clone(), run.machine.name.clone()];
        let mut lines = Lines { out: &mut out, first: names.into_iter().chain(params).collect() };
        lines.counters("", &run.counters)?;
        for phase in &run.phases {
            lines.counters(&phase.name, &phase.counters)?;
        }
        lines.series(run)?;
    }
    Ok(String::from_utf8(out.into_inner()?)?)
}

/// The lines of one run, which begin alike.
struct Lines<'a> {
    out: &'a mut csv::Writer<Vec<u8>>,
    first: Vec<String>,
}

impl Lines<'_> {
    fn write(&mut self, rest: [&str; 8]) -> Result<()> {
        Ok(self.out.write_record(self.first.iter().map(String::as_str).chain(rest))?)
    }

    fn counters(&mut self, phase: &str, counters: &Counters) -> Result<()> {
        let number = |value: Option<u64>| value.map(|v| v.to_string()).unwrap_or_default();
        for (id, reading) in counters {
            let provenance = reading.provenance.to_string();
            let [value, low, high] = [reading.value, reading.low, reading.high].map(number);
            let why = reading.why.as_deref().unwrap_or("");
            self.write([phase, "", id, &provenance, &value, &low, &high, why])?;
        }
        Ok(())
    }

    fn series(&mut self, run: &Run) -> Result<()> {
        let provenance: Provenance = run.machine.kind.provenance();
        let Some(times) = run.series.columns.get("time_ns") else { return Ok(()) };
        for (id, values) in run.series.columns.iter().filter(|(id, _)| *id != "time_ns") {
            for (time, value) in times.iter().zip(values) {
                let (Some(time), Some(value)) = (time, value) else { continue };
                let [time, value] = [time, value].map(u64::to_string);
                self.write(["", &time, id, &provenance.to_string(), &value, "", "", ""])?;
            }
        }
        Ok(())
    }
}
