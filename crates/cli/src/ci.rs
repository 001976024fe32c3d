//! `pagetax ci`: the memory bill of the commands in a file, held against limits and a baseline.

mod measure;

use crate::exit;
use crate::output::documents::Outputs;
use crate::output::{self, bill, write_file};
use anyhow::{Context, Result, bail};
use pagetax_core::bill::{Bill, Outcome};
use pagetax_core::document::{self, Document};
use pagetax_core::threshold::RangeThreshold;
use pagetax_host::measure::environment::environment;
use pagetax_host::procfs::Root;
use pagetax_host::sys::process::{keep_addresses, keep_hashes};
use pagetax_sim::hardware::calibrated;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax ci --update                          write the baseline of the commands in pagetax.toml
  pagetax ci                                   exit code 1 if one of them certainly takes more now
  pagetax ci --markdown=summary.md --github    for a pull request: a table, and annotations
  pagetax ci sort --junit=memory.xml           one command, as a test report";

/// Check the memory bill of commands against limits and a baseline
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Names of commands in the file; all by default
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// The file with commands and limits
    #[arg(long, value_name = "FILE", default_value = "pagetax.toml")]
    config: PathBuf,

    /// The bill to compare with, as --update or --json wrote it [default: that of the file]
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,

    /// Write the baseline anew, and judge limits only
    #[arg(long)]
    update: bool,

    #[command(flatten)]
    outputs: Outputs<Bill>,
}

/// The file pagetax.toml.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Config {
    /// The baseline's file, beside this one.
    #[serde(default = "default_baseline")]
    baseline: PathBuf,
    /// The share by which a reading may grow.
    #[serde(default = "default_growth")]
    growth: f64,
    #[serde(rename = "command")]
    commands: Vec<CommandConfig>,
}

/// A command in pagetax.toml.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct CommandConfig {
    name: String,
    /// The program and its arguments.
    run: Vec<String>,
    /// The file that it reads as standard input.
    input: Option<PathBuf>,
    /// The runs that the kernel counts.
    #[serde(default = "default_runs")]
    runs: usize,
    /// The model of the CPU whose TLBs are simulated.
    #[serde(default = "default_cpu")]
    cpu: String,
    /// True if its children are recorded, too.
    #[serde(default)]
    follow: bool,
    /// Conditions that fail the check, as in `--fail-if`.
    #[serde(default, deserialize_with = "limits")]
    fail_if: Vec<RangeThreshold>,
}

fn default_baseline() -> PathBuf {
    "pagetax-baseline.json".into()
}

fn default_growth() -> f64 {
    0.01
}

fn default_runs() -> usize {
    5
}

fn default_cpu() -> String {
    calibrated::MODEL.into()
}

fn limits<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<RangeThreshold>, D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    texts.iter().map(|text| text.parse().map_err(serde::de::Error::custom)).collect()
}

impl Config {
    fn read(path: &Path) -> Result<Config> {
        let text = std::fs::read_to_string(path).with_context(|| {
            format!("cannot read {}\n  hint: docs/ci.md has one to start from", path.display())
        })?;
        let config: Config = toml::from_str(&text).with_context(|| path.display().to_string())?;
        config.check().with_context(|| path.display().to_string())?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.growth) {
            bail!("growth = {} is not from 0 to 1\n  hint: 0.01 allows 1 %", self.growth);
        }
        for command in &self.commands {
            let twice = self.commands.iter().filter(|other| other.name == command.name).count() > 1;
            match command {
                _ if twice => bail!("two commands are called `{}`", command.name),
                CommandConfig { run, .. } if run.is_empty() => {
                    bail!("`{}` runs nothing\n  hint: run = [\"sort\", \"big.txt\"]", command.name)
                }
                CommandConfig { runs: 0, .. } => {
                    bail!("`{}` is run 0 times\n  hint: runs = 5", command.name)
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the commands of these names, or all.
    fn chosen(&self, names: &[String]) -> Result<Vec<&CommandConfig>> {
        let known =
            || self.commands.iter().map(|one| one.name.as_str()).collect::<Vec<_>>().join(", ");
        let find = |name: &String| {
            let found = self.commands.iter().find(|command| command.name == *name);
            found.with_context(|| format!("no command `{name}`\n  hint: one of {}", known()))
        };
        match names {
            [] => Ok(self.commands.iter().collect()),
            names => names.iter().map(find).collect(),
        }
    }
}

/// Runs `pagetax ci [NAME…]`.
pub fn run(args: Args) -> Result<ExitCode> {
    let config = Config::read(&args.config)?;
    let chosen = config.chosen(&args.names)?;
    let beside = args.config.parent().unwrap_or(Path::new("")).join(&config.baseline);
    let path = args.baseline.as_ref().unwrap_or(&beside);
    let baseline = if args.update { None } else { read_baseline(path)? };
    args.outputs.check_writable()?;
    if !keep_hashes() {
        output::note("hashes of Python and Perl differ from run to run, and so may counts");
    }
    if let Err(error) = keep_addresses() {
        output::note(&format!("addresses differ from run to run ({error}), and so may counts"));
    }
    let commands = chosen.iter().map(|command| measure::bill(command)).collect::<Result<_>>()?;
    let mut bill = Bill { commands, environment: environment(&Root::default()) };
    for (bill, config) in bill.commands.iter_mut().zip(&chosen) {
        bill.judge(&config.fail_if);
    }
    match &baseline {
        Some(baseline) => bill.compare(baseline, config.growth),
        None if args.update => update(path, &bill)?,
        None => output::note(&format!(
            "no baseline {}: limits alone are judged; write one with --update",
            path.display()
        )),
    }
    args.outputs.print(&bill, |bill| bill::render(bill, baseline.as_ref()))?;
    Ok(code(&bill).into())
}

/// Returns the exit code. What could not be judged fails nothing.
fn code(bill: &Bill) -> u8 {
    match bill.has(Outcome::Failed) {
        true => exit::THRESHOLD_FAILED,
        false => exit::FINE,
    }
}

fn read_baseline(path: &Path) -> Result<Option<Bill>> {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let bill = document::from_json(&text).with_context(|| path.display().to_string())?;
            Ok(Some(bill))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Writes a baseline. Commands of the old one that were not run stay.
fn update(path: &Path, new: &Bill) -> Result<()> {
    let mut bill = new.clone();
    bill.commands.iter_mut().for_each(|command| command.findings.clear());
    for old in read_baseline(path)?.map(|old| old.commands).unwrap_or_default() {
        if bill.commands.iter().all(|command| command.name != old.name) {
            bill.commands.push(old);
        }
    }
    write_file(path, &bill.to_json()?)?;
    output::note(&format!("wrote {}", path.display()));
    Ok(())
}
