//! Recordings of `pagetax stat`: gzip of JSON lines, the document without intervals, each interval, and the
//! total.
//!
//! Invariant: whatever ends the recorder, all but the last minute can be read.

use crate::output::cannot_write;
use anyhow::{Context, Result, anyhow};
use flate2::Compression;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;
use pagetax_core::document::{self, Document};
use pagetax_core::system_stat::{SystemInterval, SystemStat};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest time for which intervals are not in the file. Each flush costs some compression.
const FLUSH_EVERY: Duration = Duration::from_secs(60);

/// A recording that is being written.
pub struct Recording {
    lines: GzEncoder<File>,
    flushed: Instant,
}

impl Recording {
    /// Creates the file.
    pub fn create(path: &Path, stat: &SystemStat) -> Result<Recording> {
        let file = File::create(path).with_context(|| cannot_write(path))?;
        let mut recording =
            Recording { lines: GzEncoder::new(file, Compression::best()), flushed: Instant::now() };
        let head: serde_json::Value = serde_json::from_str(&stat.to_json()?)?;
        recording.line(&head)?;
        recording.lines.flush()?;
        Ok(recording)
    }

    /// Adds an interval.
    pub fn write(&mut self, interval: &SystemInterval) -> Result<()> {
        self.line(interval)?;
        if self.flushed.elapsed() >= FLUSH_EVERY {
            self.lines.flush().context("cannot write the recording")?;
            self.flushed = Instant::now();
        }
        Ok(())
    }

    /// Writes the total and the rest.
    pub fn finish(mut self, total: Option<&SystemInterval>) -> Result<()> {
        self.line(&RecordedTotal { total: total.cloned() })?;
        self.lines.finish().context("cannot write the recording")?;
        Ok(())
    }

    fn line(&mut self, value: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(value)? + "\n";
        self.lines.write_all(line.as_bytes()).context("cannot write the recording")
    }
}

/// The last line.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordedTotal {
    total: Option<SystemInterval>,
}

/// Reads a recording. One that was cut off is read as far as it goes.
pub fn read(path: &Path) -> Result<SystemStat> {
    let name = path.display();
    let file = File::open(path).with_context(|| {
        format!(
            "cannot read {name}\n  hint: an interval is a number of seconds, and a recording a file"
        )
    })?;
    let mut lines = BufReader::new(MultiGzDecoder::new(BufReader::new(file))).lines();
    let not_ours =
        || format!("{name} is no recording of pagetax stat\n  hint: --record writes one");
    let head = lines.next().ok_or_else(|| anyhow!(not_ours()))?.with_context(not_ours)?;
    let mut stat: SystemStat = document::from_json(&head).with_context(not_ours)?;
    for line in lines {
        let Ok(line) = line else { break };
        if let Ok(last) = serde_json::from_str::<RecordedTotal>(&line) {
            stat.total = last.total;
            break;
        }
        stat.intervals.push(serde_json::from_str(&line).with_context(|| {
            format!("{name}: interval {} cannot be read", stat.intervals.len() + 1)
        })?);
    }
    Ok(stat)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat() -> SystemStat {
        SystemStat { scope: "system".into(), cpu_count: 2, ..SystemStat::default() }
    }

    #[test]
    fn a_recording_reads_back_also_when_it_was_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.stat.gz");
        let mut recording = Recording::create(&path, &stat()).unwrap();
        for end_unix_ms in 0..50 {
            recording.write(&SystemInterval { end_unix_ms, ..Default::default() }).unwrap();
        }
        let total = SystemInterval { elapsed_ns: 50, ..Default::default() };
        recording.finish(Some(&total)).unwrap();
        let whole = read(&path).unwrap();
        assert_eq!((whole.cpu_count, whole.intervals.len()), (2, 50));
        assert_eq!((whole.intervals[49].end_unix_ms, whole.total), (49, Some(total)));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 20]).unwrap();
        let part = read(&path).unwrap();
        assert!(part.intervals.len() <= 50 && part.total.is_none());
        std::fs::write(&path, "not gzip").unwrap();
        assert!(format!("{:#}", read(&path).unwrap_err()).contains("--record"));
    }
}
