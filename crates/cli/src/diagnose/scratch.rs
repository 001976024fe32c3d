//! Files of a diagnosis: the saved standard input, the outputs of the runs.
//!
//! Invariant: all lie in a temporary directory that goes with the value, but for outputs that the
//! user wants to keep.

use crate::output;
use anyhow::{Context, Result};
use pagetax_host::measure::trial::Outputs;
use pagetax_host::measure::trial::rounds::Step;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::hash_map::DefaultHasher;
use std::fs::File;
use std::hash::Hasher;
use std::io::{self, IsTerminal, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

/// How much of the command's last words is quoted.
const TAIL_LINES: usize = 5;
const TAIL_BYTES: u64 = 2_000;

/// Standard input without a byte for this long is worth a word.
const IDLE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The standard input of each run.
#[derive(Debug, Default)]
pub struct Input {
    /// Opened anew for each run; none is nothing.
    pub path: Option<PathBuf>,
    /// A copy without a name, so that it goes with us however we end.
    _copy: Option<File>,
}

impl Input {
    /// Opens `given` if there is one, else our own standard input, copied if it can be read only once. A
    /// terminal gives nothing.
    pub fn new(given: Option<&Path>) -> Result<Input> {
        match given {
            Some(path) if path == Path::new("null") => Ok(Input::default()),
            Some(path) => {
                File::open(path).with_context(|| {
                    format!("cannot read --input {}; name a file, or null", path.display())
                })?;
                Ok(Input { path: Some(path.to_path_buf()), _copy: None })
            }
            None if io::stdin().is_terminal() => Ok(Input::default()),
            None => Input::of_stdin(),
        }
    }

    fn of_stdin() -> Result<Input> {
        let unreadable = "cannot read standard input; give --input FILE, or --input null";
        let own = File::from(io::stdin().as_fd().try_clone_to_owned().context(unreadable)?);
        if own.metadata().context(unreadable)?.is_file() {
            return Ok(Input { path: Some("/proc/self/fd/0".into()), _copy: None });
        }
        if is_idle(&own) {
            output::note(
                "waiting for the end of standard input, which each run is to read; \
                 --input null goes on without it",
            );
        }
        let mut copy = tempfile::tempfile().context("cannot save standard input; set TMPDIR")?;
        let bytes = io::copy(&mut &own, &mut copy).context(unreadable)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", copy.as_raw_fd()));
        Ok(Input { path: (bytes > 0).then_some(path), _copy: Some(copy) })
    }
}

/// Returns true if nothing can be read for a while: reading a pipe without a writer would block for ever.
fn is_idle(input: &File) -> bool {
    let mut fds = [PollFd::new(input, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&IDLE)), Ok(0))
}

/// The directory of one diagnosis.
#[derive(Debug)]
pub struct Scratch {
    temporary: tempfile::TempDir,
    kept: Option<PathBuf>,
    first: Option<Outputs>,
}

impl Scratch {
    /// Makes the directories of the trials.
    pub fn new(kept: Option<PathBuf>) -> Result<Scratch> {
        if let Some(directory) = &kept {
            std::fs::create_dir_all(directory).with_context(|| {
                format!("cannot make {}; name a directory you may write to", directory.display())
            })?;
        }
        let temporary = tempfile::Builder::new()
            .prefix("pagetax-")
            .tempdir()
            .context("cannot make a temporary directory; set TMPDIR to one with room")?;
        Ok(Scratch { temporary, kept, first: None })
    }

    /// Files for a run's outputs.
    pub fn outputs(&mut self, trial: &str, round: usize) -> Outputs {
        let directory = self.kept.as_deref().unwrap_or(self.temporary.path());
        let path = |ending| Some(directory.join(format!("{trial}.{round}.{ending}")));
        let outputs = Outputs { stdout: path("out"), stderr: path("err") };
        self.first.get_or_insert_with(|| outputs.clone());
        outputs
    }

    /// Removes a run's outputs, unless they are to be kept or are the first.
    pub fn discard(&self, outputs: &Outputs) {
        let first = self.first.as_ref().is_some_and(|first| first.stdout == outputs.stdout);
        if self.kept.is_none() && !first {
            for path in [&outputs.stdout, &outputs.stderr].into_iter().flatten() {
                // A file that stays goes with the directory.
                let _ = std::fs::remove_file(path);
            }
        }
    }

    /// Returns all output of the first run.
    pub fn first_output(&self) -> String {
        let outputs = self.first.clone().unwrap_or_default();
        let text = |path: Option<PathBuf>| {
            let bytes = path.and_then(|path| std::fs::read(path).ok()).unwrap_or_default();
            String::from_utf8_lossy(&bytes).trim_end().to_string()
        };
        format!("{}\n{}", text(outputs.stdout), text(outputs.stderr)).trim().to_string()
    }

    /// Returns the last lines of the first run's standard error; may be empty.
    pub fn first_words(&self) -> String {
        let tail = self.first.as_ref().and_then(|first| tail(first.stderr.as_deref()?).ok());
        tail.unwrap_or_default()
    }
}

/// Returns the last lines of a file.
fn tail(path: &Path) -> io::Result<String> {
    use std::io::{Seek, SeekFrom};
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.trim_end().lines().collect();
    Ok(lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n"))
}

/// A hash of each run's standard output.
#[derive(Debug)]
pub struct Hashes {
    by_trial: Vec<Vec<u64>>,
}

impl Hashes {
    /// Begins with no hash for so many trials.
    pub fn new(trials: usize) -> Hashes {
        Hashes { by_trial: vec![Vec::new(); trials] }
    }

    /// Hashes the standard output of a run.
    pub fn note(&mut self, step: Step, outputs: &Outputs) -> io::Result<()> {
        if let Some(path) = &outputs.stdout {
            self.by_trial[step.trial].push(hash(path)?);
        }
        Ok(())
    }

    /// Trials that printed something else than the first trial, which always printed the same.
    pub fn different(&self) -> Vec<usize> {
        let Some((first, others)) = self.by_trial.split_first() else { return Vec::new() };
        let Some(usual) = first.first().filter(|usual| first.iter().all(|hash| hash == *usual))
        else {
            return Vec::new();
        };
        let differs = |runs: &Vec<u64>| runs.iter().any(|hash| hash != usual);
        (1..=others.len()).filter(|trial| differs(&self.by_trial[*trial])).collect()
    }
}

fn hash(path: &Path) -> io::Result<u64> {
    let mut file = File::open(path)?;
    let mut hasher = DefaultHasher::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            n => hasher.write(&buffer[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_go_but_the_first_and_what_is_kept_stay() {
        let mut scratch = Scratch::new(None).unwrap();
        let runs: Vec<_> = (1..3).map(|round| scratch.outputs("as-is", round)).collect();
        let written = |run: &Outputs| run.stderr.clone().unwrap();
        for run in &runs {
            std::fs::write(written(run), "1\n2\n3\n4\n5\n6\n").unwrap();
            scratch.discard(run);
        }
        assert!(written(&runs[0]).exists() && !written(&runs[1]).exists());
        assert_eq!(scratch.first_words(), "2\n3\n4\n5\n6");
        let directory = scratch.temporary.path().to_path_buf();
        drop(scratch);
        assert!(!directory.exists());
    }

    #[test]
    fn only_a_steady_program_can_print_something_different() {
        let hashes = |by_trial: &[&[u64]]| {
            Hashes { by_trial: by_trial.iter().map(|runs| runs.to_vec()).collect() }.different()
        };
        assert_eq!(hashes(&[&[1, 1], &[1, 1], &[1, 2]]), [2]);
        assert!(hashes(&[&[1, 2], &[3, 4]]).is_empty());
        assert!(hashes(&[&[], &[3]]).is_empty());
        assert!(hashes(&[]).is_empty());
    }

    #[test]
    fn input_may_be_a_file_or_nothing() {
        assert_eq!(Input::new(Some(Path::new("null"))).unwrap().path, None);
        let missing = Input::new(Some(Path::new("/nonexistent/input"))).unwrap_err();
        assert!(missing.to_string().contains("--input"));
    }
}
