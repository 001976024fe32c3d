//! The project's own chores: `cargo xtask test`, `bench`, `install`, `page-sizes`, `man`, `bless`.

mod at_end;
mod bench;
mod book;
mod capture;
mod cases;
mod conformance;
mod dist;
mod gate;
mod install;
mod journey;
mod kernels;
mod packages;
mod pages;
mod shell;
mod simulate;
mod skips;
mod stat_document;
mod test;
mod tidy;
mod web;

use anyhow::Result;
use clap::Parser;
use std::path::PathBuf;

/// The project's own chores
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Chore {
    /// Formatting, tidy, lints, all tests, dependency policy; ends with the counted skips
    Test,
    /// Run CI's checks: test, then checks that take longer (see xtask/src/gate.rs)
    Gate,
    /// Run a benchmark, or list them
    Bench {
        /// Name of the benchmark; without it, all are listed
        name: Option<String>,
        /// Parts of it, such as programs; none is all of them
        parts: Vec<String>,
        /// Write the table into its block of docs/benchmarks.md, or of the page that has it
        #[arg(long)]
        write: bool,
    },
    /// Ask the public questions of docs/cases/ again; fails where intervals contradict those of the pages
    Cases(cases::Args),
    /// Run other people's programs and test suites, natively and under each wrapper
    Conformance(conformance::Args),
    /// Boot older kernels in QEMU, and run the pager's tests and what depends most on the kernel there
    Kernels(kernels::Args),
    /// Build everything, and put programs, libraries, header, pkg-config file, manual pages and
    /// completions under a prefix
    Install {
        /// Directory that users run it from
        #[arg(long, default_value = "/usr/local")]
        prefix: PathBuf,
        /// Directory that stands for / during the installation, for packagers
        #[arg(long)]
        destdir: Option<PathBuf>,
    },
    /// Draw the README's pictures: a diagnosis, and the published figures of 1990 on the simulated curve
    Capture,
    /// Build the page of reports from web/, or build and test it
    Web {
        /// Compare it with the one that is checked in, and test it in a browser
        #[arg(long)]
        check: bool,
    },
    /// Write a Debian package and a tarball to target/dist
    Dist {
        /// Install, try and remove both in a clean root; needs root
        #[arg(long)]
        check: bool,
    },
    /// Install, diagnose, apply, undo and uninstall in an empty home directory, as a newcomer does
    Journey {
        /// Write the transcript into docs/journey.md
        #[arg(long)]
        write: bool,
    },
    /// Write manual pages and shell completions to target/man and target/completions
    Man,
    /// Measure the tables of docs/large-pages-measured.md on this kernel, and write them there
    PageSizes,
    /// Play many clients and memory servers on a virtual clock, with a failure
    Simulate(simulate::Args),
    /// Check the countable rules of docs/internals/style.md, or count what a refactoring should lower
    Tidy(tidy::Args),
    /// Accept what the program prints now as what the transcripts, golden reports and
    /// docs/validation.md expect
    Bless,
}

fn main() -> Result<()> {
    std::env::set_current_dir(root())?;
    match Chore::parse() {
        Chore::Test => test::run(),
        Chore::Gate => gate::run(),
        Chore::Cases(args) => cases::run(&args),
        Chore::Conformance(args) => conformance::run(&args),
        Chore::Bench { name, parts, write } => bench::run(name.as_deref(), &parts, write),
        Chore::Kernels(args) => kernels::run(&args),
        Chore::Install { prefix, destdir } => install::run(&prefix, destdir.as_deref()),
        Chore::Capture => capture::run(),
        Chore::Web { check: false } => web::build(),
        Chore::Web { check: true } => web::check(),
        Chore::Dist { check: false } => dist::run().map(drop),
        Chore::Dist { check: true } => dist::check(),
        Chore::Journey { write } => journey::run(write),
        Chore::Man => man(),
        Chore::PageSizes => pages::run(),
        Chore::Simulate(args) => simulate::run(&args),
        Chore::Tidy(args) => tidy::run(&args),
        Chore::Bless => bless(),
    }
}

/// Returns the root of the workspace, from any working directory.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn man() -> Result<()> {
    let pagetax = ["run", "--quiet", "--release", "--package", "pagetax", "--"];
    shell::cargo(&[&pagetax[..], &["man", "target/man"]].concat())?;
    std::fs::create_dir_all("target/completions")?;
    for shell in ["bash", "zsh", "fish"] {
        let script = shell::cargo_output(&[&pagetax[..], &["completions", shell]].concat())?;
        std::fs::write(format!("target/completions/pagetax.{shell}"), script)?;
    }
    println!("wrote target/man and target/completions");
    Ok(())
}

/// Transcripts listen to TRYCMD, golden reports and docs/validation.md to BLESS.
fn bless() -> Result<()> {
    let mut tests = shell::cargo_command(&["test", "--workspace"]);
    shell::succeed(tests.env("TRYCMD", "overwrite").env("BLESS", "1"))?;
    println!("look at what changed: git diff");
    Ok(())
}
