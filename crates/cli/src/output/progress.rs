//! Progress on stderr: a bar on a terminal, a plain line every few seconds elsewhere.

use super::{is_quiet, note};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Between plain lines, so that a log stays readable and a waiting person stays calm.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);
const STEPS: u64 = 1000;

/// The progress of one run.
pub struct Progress {
    what: String,
    bar: Option<ProgressBar>,
    started: Instant,
    last_line: Instant,
}

impl Progress {
    /// Begins the display of a run that `what` names.
    pub fn start(what: &str) -> Self {
        let bar = (std::io::stderr().is_terminal() && !is_quiet()).then(|| {
            let style = ProgressStyle::with_template("{msg} {wide_bar} {percent} % ETA {eta}");
            let bar = ProgressBar::new(STEPS).with_message(what.to_string());
            style.map_or(bar.clone(), |style| bar.with_style(style))
        });
        let now = Instant::now();
        Progress { what: what.into(), bar, started: now, last_line: now }
    }

    /// Shows the share that is done, 0 to 1. May be called very often.
    pub fn update(&mut self, done: f64) {
        let done = done.clamp(0.0, 1.0);
        if let Some(bar) = &self.bar {
            bar.set_position((done * STEPS as f64) as u64);
        } else if self.last_line.elapsed() >= PLAIN_INTERVAL {
            self.last_line = Instant::now();
            note(&plain_line(&self.what, done, self.started.elapsed()));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn plain_line(what: &str, done: f64, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64();
    match done > 0.0 {
        true => {
            let left = seconds / done - seconds;
            format!("{what}: {:.0} % after {seconds:.0} s, about {left:.0} s to go", done * 100.0)
        }
        false => format!("{what}: running for {seconds:.0} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_lines_tell_how_long() {
        let line = plain_line("vmtest on host", 0.25, Duration::from_secs(10));
        assert_eq!(line, "vmtest on host: 25 % after 10 s, about 30 s to go");
        let line = plain_line("vmtest on host", 0.0, Duration::from_secs(6));
        assert_eq!(line, "vmtest on host: running for 6 s");
    }
}
