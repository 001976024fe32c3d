//! `cargo xtask journey`: a newcomer's way from installation to removal, in an empty home directory. Each
//! step must end as expected; `--write` puts the transcript into docs/journey.md.

use crate::book;
use anyhow::{Context, Result, bail};
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const COMMAND: &str = "cargo xtask journey";
/// The program of the journey. With an argument it keeps its memory until its input ends.
const PROGRAM: &str = "\
import sys
names = {n: str(n) for n in range(2_000_000)}
print(sum(len(names[n * 7919 % 2_000_000]) for n in range(6_000_000)), flush=True)
if sys.argv[1:]:
    sys.stdin.read()
";
/// The most columns of the transcript; longer lines are cut with a mark.
const COLUMNS: usize = 110;

/// The home directory of the journey, and what was seen so far.
struct Journey {
    home: tempfile::TempDir,
    source: PathBuf,
    transcript: String,
}

/// Walks the whole way.
///
/// # Errors
/// Fails at the first step that does not end as a newcomer would expect.
pub fn run(is_written: bool) -> Result<()> {
    let home = tempfile::tempdir()?;
    let mut journey = Journey { home, source: env::current_dir()?, transcript: String::new() };
    journey.install()?;
    let report = journey.diagnose()?;
    journey.apply(&report)?;
    journey.change_a_running_process()?;
    journey.uninstall()?;
    if is_written {
        let head = format!("{}. Long lines are cut (…).", book::machine()?);
        book::write(COMMAND, &format!("{head}\n\n{}", journey.transcript))?;
    }
    Ok(())
}

impl Journey {
    fn install(&mut self) -> Result<()> {
        self.say("Install it from a clone:");
        let source = self.source.display().to_string();
        self.step("cargo install --locked --quiet --path crates/cli --root ~/.local", &source)?;
        self.end();
        Ok(())
    }

    /// Returns the report.
    fn diagnose(&mut self) -> Result<String> {
        fs::write(self.home.path().join("names.py"), PROGRAM)?;
        self.say("Diagnose a program, a Python script that looks up two million names:");
        let mut report = self.step("pagetax diagnose -- python3 names.py", "~")?;
        self.end();
        if report.contains("--side-by-side") {
            // The speed of this machine varies too much; a newcomer follows the report's advice.
            self.say("The answer was left open. Ask again as the report says:");
            report = self.step("pagetax diagnose --side-by-side -- python3 names.py", "~")?;
            self.end();
        }
        Ok(report)
    }

    fn apply(&mut self, report: &str) -> Result<()> {
        let line = report.lines().last().filter(|line| line.contains("ppgsz"));
        let line =
            line.with_context(|| format!("the report ends in no line to paste:\n{report}"))?;
        self.say("Apply it, by the last line of the report:");
        let expected = self.step(line, "~")?;
        self.end();
        for line in [unit_line(report), docker_line(report)] {
            let line = line.with_context(|| format!("a line to apply it is missing:\n{report}"))?;
            let output = self.shell(&line, "/").stdin(Stdio::null()).output()?;
            if text(&output.stdout) != expected {
                bail!("`{line}`: {}, {}", output.status, text(&output.stderr));
            }
        }
        Ok(())
    }

    fn change_a_running_process(&mut self) -> Result<()> {
        self.say("Or change a process that runs already:");
        let mut program = self.background("python3 names.py serve")?;
        let walked = (|| {
            let pid = program.id();
            self.step(&format!("pagetax why {pid}"), "~")?;
            self.step(&format!("pagetax ppgsz -o heap=2M,anon=2M -p {pid}"), "~")?;
            let large = self.large_bytes(pid)?;
            self.step(&format!("pagetax ppgsz --undo -p {pid}"), "~")?;
            let left = self.large_bytes(pid)?;
            if large < 100 << 20 || left > 4 << 20 {
                bail!("{large} bytes were on large pages after the change, {left} after the undo");
            }
            Ok(())
        })();
        // Its input ends here, and so does it.
        drop(program.stdin.take());
        program.wait()?;
        walked?;
        self.end();
        Ok(())
    }

    fn uninstall(&mut self) -> Result<()> {
        self.say("Remove it. Only its cache is left, which you may delete:");
        self.step("cargo uninstall --quiet pagetax --root ~/.local", "~")?;
        self.step("rm -rf ~/.cache/pagetax", "~")?;
        self.end();
        let mut left = Vec::new();
        files(self.home.path(), &mut left)?;
        left.retain(|path| !path.ends_with("names.py") && !path.ends_with(".crates.toml"));
        left.retain(|path| !path.ends_with(".crates2.json"));
        match left.first() {
            None => Ok(()),
            Some(first) => bail!("{} files are left, such as {}", left.len(), first.display()),
        }
    }

    fn large_bytes(&self, pid: u32) -> Result<u64> {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let line = rollup.lines().find_map(|line| line.strip_prefix("AnonHugePages:"));
        let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
        Ok(kilobytes.context("no AnonHugePages in smaps_rollup")?.trim().parse::<u64>()? << 10)
    }

    fn say(&mut self, words: &str) {
        println!("{words}");
        self.transcript += &format!("{words}\n\n```console\n");
    }

    fn end(&mut self) {
        self.transcript += "```\n\n";
    }

    /// Runs a line of a shell in a directory, and returns its standard output.
    fn step(&mut self, line: &str, directory: &str) -> Result<String> {
        println!("$ {line}");
        let output = self.shell(line, directory).stdin(Stdio::null()).output()?;
        let (out, error) = (text(&output.stdout), text(&output.stderr));
        print!("{error}{out}");
        self.transcript += &format!("$ {line}\n");
        // Progress rewrites its line, and belongs to no transcript.
        let kept = error.lines().filter(|line| !line.contains("% after")).chain(out.lines());
        kept.for_each(|line| self.transcript += &format!("{}\n", cut(line)));
        if !output.status.success() {
            bail!("`{line}`: {}", output.status);
        }
        Ok(out)
    }

    /// Starts a program, and waits for its first line.
    fn background(&mut self, line: &str) -> Result<Child> {
        self.transcript += &format!("$ {line} &\n");
        let mut child = self.shell(&format!("exec {line}"), "~");
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().context("a program without output")?;
        let mut first = String::new();
        BufReader::new(stdout).read_line(&mut first)?;
        self.transcript += &first;
        Ok(child)
    }

    fn shell(&self, line: &str, directory: &str) -> Command {
        let home = self.home.path();
        let mut command = Command::new("sh");
        command.args(["-c", line]).env_clear();
        command.current_dir(if directory == "~" { home } else { Path::new(directory) });
        command.env("HOME", home).env("LANG", "C.UTF-8").env("COLUMNS", "100");
        // Of our own environment, only what cargo needs to find itself and what is built.
        for (name, default) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")] {
            let own = env::var_os("HOME").map(|home| Path::new(&home).join(default).into());
            if let Some(value) = env::var_os(name).or(own) {
                command.env(name, value);
            }
        }
        let cargo = env::var_os("CARGO").unwrap_or("cargo".into());
        let cargo = Path::new(&cargo).parent().unwrap_or(Path::new("")).display().to_string();
        command.env("CARGO_TARGET_DIR", self.source.join("target"));
        command.env("PATH", format!("{}/.local/bin:/usr/bin:/bin:{cargo}", home.display()));
        command
    }
}

/// Returns the lines of a report for a systemd unit as a shell line. Its words need no quotes.
fn unit_line(report: &str) -> Option<String> {
    let (directory, words) = (after(report, "WorkingDirectory=")?, after(report, "ExecStart=")?);
    Some(format!("cd {directory} && exec {words}"))
}

/// Returns the lines of a report for a Dockerfile as a shell line.
fn docker_line(report: &str) -> Option<String> {
    let words: Vec<String> = serde_json::from_str(after(report, "CMD ")?).ok()?;
    Some(format!("cd {} && exec {}", after(report, "WORKDIR ")?, words.join(" ")))
}

/// Returns the rest of the line of a directive.
fn after<'a>(report: &'a str, directive: &str) -> Option<&'a str> {
    Some(report.split_once(directive)?.1.lines().next()?.trim())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn cut(line: &str) -> String {
    match line.char_indices().nth(COLUMNS) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.to_string(),
    }
}

fn files(directory: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            files(&entry.path(), found)?
        } else {
            found.push(entry.path())
        }
    }
    Ok(())
}
