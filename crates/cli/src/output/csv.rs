//! Runs as CSV in the long form that spreadsheets pivot and data frames read: one line a reading.

use anyhow::Result;
use pagetax_core::counter::{Counters, Provenance};
use pagetax_core::report::Run;

const HEADINGS: [&str; 10] =
    ["job", "machine", "phase", "time_ns", "id", "provenance", "value", "low", "high", "why"];

/// Whole-run counters (no phase, no time), then those of each phase, then the series.
pub fn render(runs: &[Run]) -> Result<String> {
    let mut out = csv::Writer::from_writer(Vec::new());
    out.write_record(HEADINGS)?;
    for run in runs {
        write_counters(&mut out, run, "", &run.counters)?;
        for phase in &run.phases {
            write_counters(&mut out, run, &phase.name, &phase.counters)?;
        }
        write_series(&mut out, run)?;
    }
    Ok(String::from_utf8(out.into_inner()?)?)
}

type Writer = csv::Writer<Vec<u8>>;

fn write_counters(out: &mut Writer, run: &Run, phase: &str, counters: &Counters) -> Result<()> {
    let number = |value: Option<u64>| value.map(|v| v.to_string()).unwrap_or_default();
    for (id, reading) in counters {
        out.write_record([
            &run.job.name,
            &run.machine.name,
            phase,
            "",
            id,
            &reading.provenance.to_string(),
            &number(reading.value),
            &number(reading.low),
            &number(reading.high),
            reading.why.as_deref().unwrap_or(""),
        ])?;
    }
    Ok(())
}

fn write_series(out: &mut Writer, run: &Run) -> Result<()> {
    let provenance: Provenance = run.machine.kind.provenance();
    let Some(times) = run.series.columns.get("time_ns") else { return Ok(()) };
    for (id, values) in run.series.columns.iter().filter(|(id, _)| *id != "time_ns") {
        for (time, value) in times.iter().zip(values) {
            let (Some(time), Some(value)) = (time, value) else { continue };
            let [time, value] = [time, value].map(u64::to_string);
            let provenance = provenance.to_string();
            let (job, machine) = (&run.job.name, &run.machine.name);
            out.write_record([job, machine, "", &time, id, &provenance, &value, "", "", ""])?;
        }
    }
    Ok(())
}
