//! The progress of processes: a number that grows as they work, from a source that costs them little.

use crate::measure::thread_events::of_threads;
use crate::pages::target::Target;
use crate::procfs::{MapsLine, Root, maps};
use crate::sys::perf::{Event, EventSpec, INSTRUCTIONS};
use object::{Object, ObjectSection, ObjectSymbol, ReadCache, SectionKind};
use rustix::process::Pid;
use std::ffi::CString;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

/// A source of progress that a user names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProgressSource {
    /// Instructions in user mode, which the CPU counts.
    Instructions,
    /// Calls that read or write, which the kernel counts for each process.
    Calls,
    /// The calls of a function, by a probe (uprobe).
    Probe {
        /// The program or library; none for any that the process has mapped.
        file: Option<PathBuf>,
        /// The name of the function, as the symbol table has it.
        symbol: String,
    },
    /// A shell command that prints a number which grows.
    Command(String),
}

/// The text names no source of progress.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no source of progress\n  hint: instructions, calls, probe:FUNCTION, probe:FILE:FUNCTION or \
     command:LINE"
)]
pub struct NoSource(String);

impl FromStr for ProgressSource {
    type Err = NoSource;

    fn from_str(text: &str) -> Result<Self, NoSource> {
        let no_source = || NoSource(text.into());
        match text.split_once(':') {
            None if text == "instructions" => Ok(ProgressSource::Instructions),
            None if text == "calls" => Ok(ProgressSource::Calls),
            Some((_, "")) => Err(no_source()),
            Some(("command", line)) => Ok(ProgressSource::Command(line.into())),
            Some(("probe", place)) => {
                let (file, symbol) = match place.rsplit_once(':') {
                    Some((file, symbol)) => (Some(PathBuf::from(file)), symbol),
                    None => (None, place),
                };
                Ok(ProgressSource::Probe { file, symbol: symbol.into() })
            }
            _ => Err(no_source()),
        }
    }
}

impl fmt::Display for ProgressSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProgressSource::Instructions => f.write_str("instructions"),
            ProgressSource::Calls => f.write_str("calls that read or write"),
            ProgressSource::Probe { symbol, .. } => write!(f, "calls of {symbol}"),
            ProgressSource::Command(line) => write!(f, "`{line}`"),
        }
    }
}

/// An open source.
#[derive(Debug)]
pub struct Progress {
    /// The source.
    pub source: ProgressSource,
    pids: Vec<u32>,
    /// The events of all threads, for instructions and probes.
    events: Vec<Event>,
}

impl Progress {
    /// Opens a source for some processes.
    ///
    /// # Errors
    /// The reason why it is not available, with a hint.
    pub fn open(source: ProgressSource, targets: &[Target]) -> Result<Progress, String> {
        let mut events = Vec::new();
        for target in targets {
            match &source {
                ProgressSource::Instructions => events.extend(instructions(target.pid())?),
                ProgressSource::Probe { file, symbol } => {
                    events.extend(probes(target.pid(), file.as_deref(), symbol)?);
                }
                ProgressSource::Calls | ProgressSource::Command(_) => {}
            }
        }
        let pids = targets.iter().map(|target| target.pid().as_raw_nonzero().get() as u32);
        let progress = Progress { source, pids: pids.collect(), events };
        progress.units()?;
        Ok(progress)
    }

    /// Opens the best source that needs no name: instructions, or else calls.
    pub fn best(targets: &[Target]) -> Result<Progress, String> {
        Progress::open(ProgressSource::Instructions, targets)
            .or_else(|_| Progress::open(ProgressSource::Calls, targets))
    }

    /// Reads the progress so far.
    pub fn units(&self) -> Result<u64, String> {
        match &self.source {
            ProgressSource::Instructions | ProgressSource::Probe { .. } => {
                let counts = self.events.iter().map(|event| event.count());
                counts.sum::<std::io::Result<u64>>().map_err(|error| error.to_string())
            }
            ProgressSource::Calls => self.pids.iter().map(|pid| calls(*pid)).sum(),
            ProgressSource::Command(line) => printed(line),
        }
    }
}

fn instructions(pid: Pid) -> Result<Vec<Event>, String> {
    let spec = EventSpec { inherit: true, ..EventSpec::new(INSTRUCTIONS) };
    of_threads(pid, |tid| Event::open(&EventSpec { pid: tid, ..spec }))
        .map_err(|error| format!("the CPU's instructions cannot be counted: {error}"))
}

fn probes(pid: Pid, file: Option<&Path>, symbol: &str) -> Result<Vec<Event>, String> {
    const TYPE: &str = "/sys/bus/event_source/devices/uprobe/type";
    let event_type = Root::default().number(TYPE);
    let event_type =
        event_type.map_err(|_| format!("this kernel has no probes: no {TYPE}"))? as u32;
    let (path, offset) = place(pid, file, symbol)?;
    let name = path.to_str().and_then(|path| CString::new(path).ok());
    let name = name.ok_or_else(|| format!("{} is no name for a probe", path.display()))?;
    let spec = EventSpec { inherit: true, ..EventSpec::new(INSTRUCTIONS) };
    let open = |tid| Event::probe(&EventSpec { pid: tid, ..spec }, event_type, &name, offset);
    of_threads(pid, open)
        .map_err(|error| format!("no probe of {symbol} in {}: {error}", path.display()))
}

/// Finds a function: the file that has it, as seen from here, and its place there.
fn place(pid: Pid, file: Option<&Path>, symbol: &str) -> Result<(PathBuf, u64), String> {
    let number = pid.as_raw_nonzero().get() as u32;
    let lines = maps(&Root::default(), number).map_err(|error| error.to_string())?;
    let is_code = |line: &&MapsLine| line.permissions[2] == b'x' && line.inode != 0;
    // The program comes first, before a library with a function of that name.
    let mut mapped: Vec<&str> = lines.iter().filter(is_code).map(|l| l.name.as_str()).collect();
    mapped.dedup();
    // The process may see another root than we do.
    let rooted = |name: &str| PathBuf::from(format!("/proc/{number}/root{name}"));
    let files: Vec<PathBuf> = match file {
        Some(file) => vec![file.to_path_buf()],
        None => mapped.into_iter().map(rooted).collect(),
    };
    let found = files.iter().find_map(|path| Some((path.clone(), file_offset(path, symbol)?)));
    found.ok_or_else(|| {
        format!(
            "no function `{symbol}` in the symbols of {} files\n  hint: nm -D FILE lists them",
            files.len()
        )
    })
}

/// Returns the offset in a file of the function of this name.
fn file_offset(path: &Path, name: &str) -> Option<u64> {
    let cache = ReadCache::new(File::open(path).ok()?);
    let file = object::File::parse(&cache).ok()?;
    let is_it =
        |symbol: &object::Symbol<'_, '_, _>| symbol.name() == Ok(name) && symbol.is_definition();
    let symbol = file.symbols().chain(file.dynamic_symbols()).find(is_it)?;
    let section = file.section_by_index(symbol.section_index()?).ok()?;
    let (start, _) = section.file_range().filter(|_| section.kind() == SectionKind::Text)?;
    Some(start + symbol.address().checked_sub(section.address())?)
}

/// Returns the calls of a process that read or wrote.
fn calls(pid: u32) -> Result<u64, String> {
    let path = format!("/proc/{pid}/io");
    let text = Root::default().text(&path)?;
    let count = |name: &str| {
        let value =
            text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        value.ok_or_else(|| format!("{path} has no {name}"))
    };
    Ok(count("syscr:")? + count("syscw:")?)
}

/// Returns the last number that a shell command prints.
fn printed(line: &str) -> Result<u64, String> {
    let mut command = Command::new("sh");
    let output = command.args(["-c", line]).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("sh: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.split(|c: char| !c.is_ascii_digit()).rfind(|word| !word.is_empty());
    let number = last.filter(|_| output.status.success()).and_then(|word| word.parse().ok());
    number.ok_or_else(|| format!("`{line}` printed no number; it ended with {}", output.status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_named() {
        let parse = |text: &str| text.parse::<ProgressSource>();
        assert_eq!(parse("calls"), Ok(ProgressSource::Calls));
        let probe = |file: Option<&str>| ProgressSource::Probe {
            file: file.map(PathBuf::from),
            symbol: "f".into(),
        };
        assert_eq!(parse("probe:f"), Ok(probe(None)));
        assert_eq!(parse("probe:/lib/a:b.so:f"), Ok(probe(Some("/lib/a:b.so"))));
        assert_eq!(parse("command:a: b"), Ok(ProgressSource::Command("a: b".into())));
        for bad in ["", "call", "probe:", "command:", "uprobe:f", "instructions:1"] {
            assert!(parse(bad).unwrap_err().to_string().contains("hint"), "{bad}");
        }
    }

    #[test]
    fn the_last_number_of_a_command_counts() {
        assert_eq!(printed("echo served:12 of 345"), Ok(345));
        assert!(printed("echo none").unwrap_err().contains("no number"));
        assert!(printed("echo 1; exit 3").is_err(), "a command that fails has no number");
    }

    #[test]
    fn a_function_of_this_program_has_a_place_in_its_code() {
        let own = std::env::current_exe().unwrap();
        let offset = file_offset(&own, "main").unwrap();
        assert!(offset > 0 && offset < std::fs::metadata(&own).unwrap().len());
        assert_eq!(file_offset(&own, "no_such_function"), None);
        assert_eq!(file_offset(Path::new("/proc/self/stat"), "main"), None);
    }

    #[test]
    fn calls_of_this_process_are_counted() {
        let own = std::process::id();
        let before = calls(own).unwrap();
        std::fs::read("/proc/self/stat").unwrap();
        assert!(calls(own).unwrap() > before);
    }
}
