//! Progress on the terminal: a bar with the time to go, or whole lines beside a program that has it.
//!
//! A bar is redrawn, so nothing else may print on its terminal. A program that pagetax runs may print at
//! any time. Beside it there are only whole lines, and none if its stdout is the terminal too: they would
//! stand between its own lines. Without a terminal on stderr, and with `--quiet`, there is no progress.

use super::{is_quiet, say};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// The time until the first line, and between lines.
const LINE_INTERVAL: Duration = Duration::from_secs(2);
const STEPS: u64 = 1000;

/// The progress of one run.
pub struct Progress {
    what: String,
    display: Display,
    started: Instant,
    last_line: Instant,
}

/// The form of progress.
#[derive(Debug)]
enum Display {
    Hidden,
    Bar(ProgressBar),
    Lines,
}

/// A program that has the terminal.
#[derive(Debug, Clone, Copy)]
struct Program {
    prints_on_terminal: bool,
}

impl Progress {
    /// Begins the display of work that `what` names, while no program has the terminal.
    pub fn start(what: &str) -> Self {
        Progress::new(what, Display::choose(what, is_wanted(), None))
    }

    /// Begins the display of work beside a program that has our streams.
    pub fn beside_program(what: &str, stdout_to_stderr: bool) -> Self {
        let prints_on_terminal = stdout_to_stderr || std::io::stdout().is_terminal();
        let program = Some(Program { prints_on_terminal });
        Progress::new(what, Display::choose(what, is_wanted(), program))
    }

    /// Returns a progress that shows nothing, because the results do as they come.
    pub fn hidden() -> Self {
        Progress::new("", Display::Hidden)
    }

    fn new(what: &str, display: Display) -> Self {
        let now = Instant::now();
        Progress { what: what.into(), display, started: now, last_line: now }
    }

    /// Shows the share that is done, 0 to 1. May be called very often.
    pub fn update(&mut self, done: f64) {
        if let Display::Bar(bar) = &self.display {
            bar.set_position((done.clamp(0.0, 1.0) * STEPS as f64) as u64);
        }
    }

    /// Shows the records of a recording, whose length nobody knows. May be called very often.
    pub fn recorded(&mut self, record_count: u64) {
        if matches!(self.display, Display::Lines) && self.last_line.elapsed() >= LINE_INTERVAL {
            self.last_line = Instant::now();
            say(&recorded_line(&self.what, record_count, self.started.elapsed()));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Display::Bar(bar) = &self.display {
            bar.finish_and_clear();
        }
    }
}

fn is_wanted() -> bool {
    std::io::stderr().is_terminal() && !is_quiet()
}

impl Display {
    fn choose(what: &str, is_wanted: bool, program: Option<Program>) -> Display {
        match (is_wanted, program) {
            (false, _) | (true, Some(Program { prints_on_terminal: true })) => Display::Hidden,
            (true, Some(Program { prints_on_terminal: false })) => Display::Lines,
            (true, None) => {
                let style = ProgressStyle::with_template("{msg} {wide_bar} {percent} % ETA {eta}");
                let bar = ProgressBar::new(STEPS).with_message(what.to_string());
                Display::Bar(style.map_or(bar.clone(), |style| bar.with_style(style)))
            }
        }
    }
}

fn recorded_line(what: &str, record_count: u64, elapsed: Duration) -> String {
    let millions = record_count as f64 / 1e6;
    format!("{what}: {millions:.1} million records after {:.0} s", elapsed.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_of_unknown_length_states_no_end() {
        let line = recorded_line("record", 12_340_000, Duration::from_millis(6_100));
        assert_eq!(line, "record: 12.3 million records after 6 s");
    }

    #[test]
    fn progress_never_stands_between_the_lines_of_a_program() {
        let shown = |is_wanted, program| match Display::choose("x", is_wanted, program) {
            Display::Hidden => "nothing",
            Display::Bar(_) => "a bar",
            Display::Lines => "lines",
        };
        let program = |prints_on_terminal| Some(Program { prints_on_terminal });
        assert_eq!(shown(true, None), "a bar");
        assert_eq!(shown(true, program(false)), "lines");
        assert_eq!(shown(true, program(true)), "nothing");
        for program in [None, program(false), program(true)] {
            assert_eq!(shown(false, program), "nothing");
        }
    }
}
