//! The one seam between a command's result and its formats.
//!
//! A command makes a [`Document`] and gives it to [`Outputs::print`] with its text. Every document is JSON
//! and a page as well. A further format is a file in documents/, and a [`Format`] in the row of each kind
//! that has it. Its option, its help and its destination follow from the row.

pub mod csv;
pub mod html;
pub mod jsonl;
pub mod prometheus;

use super::{
    bill, check_writable, comparison, misscurve, print, reproduction, trapstat, write_file,
};
use anyhow::Result;
use clap::{Arg, ArgMatches, Command};
use pagetax_core::bill::Bill;
use pagetax_core::calibration::Calibration;
use pagetax_core::catalog::{JobCatalog, MachineCatalog};
use pagetax_core::compare::Comparisons;
use pagetax_core::diagnosis::Diagnosis;
use pagetax_core::document::Document;
use pagetax_core::explain::Explanations;
use pagetax_core::hatstat::HatStat;
use pagetax_core::live_tax::LiveTax;
use pagetax_core::ranking::Ranking;
use pagetax_core::report::Runs;
use pagetax_core::system_stat::SystemStat;
use pagetax_core::top::SystemTop;
use pagetax_host::measure::doctor::Doctor;
use pagetax_host::pages::documents::{PageSizeChange, PageSizes};
use pagetax_host::pages::pagemap::{PageMapDiff, PageMaps};
use pagetax_host::pages::why::HugePageAnswers;
use pagetax_recorder::documents::{MissCurves, Trapstat, WhatIf};
use pagetax_remote::documents::{Replacement, Servers};
use pagetax_sim::historic::reproduce::Reproduction;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// A way to write documents of one kind.
pub struct Format<D> {
    /// The name of its option, without the dashes.
    pub name: &'static str,
    /// The noun phrase that the option's help is made of.
    pub what: &'static str,
    /// Returns the document in this format.
    pub render: fn(&D) -> Result<String>,
}

/// A document that a command prints.
pub trait Output: Document + Sized + 'static {
    /// The formats that it has besides text, JSON and the page.
    const FORMATS: &'static [Format<Self>];
}

macro_rules! documents {
    ($($document:ty: [$(($name:literal, $what:literal, $render:expr)),* $(,)?],)*) => {
        $(impl Output for $document {
            const FORMATS: &'static [Format<Self>] =
                &[$(Format { name: $name, what: $what, render: $render }),*];
        })*

        /// Returns what the registry's test needs of each kind.
        #[cfg(test)]
        pub fn registered() -> Vec<super::registry::Registered> {
            vec![$(super::registry::Registered::of::<$document>()),*]
        }
    };
}

documents! {
    Bill: [
        ("markdown", "the findings as Markdown", |document| Ok(bill::markdown(document))),
        ("junit", "a test case for each command as JUnit", |document| Ok(bill::junit(document))),
        ("github", "annotations of GitHub Actions", |document| Ok(bill::github(document))),
    ],
    Calibration: [],
    Comparisons: [("markdown", "the tables as Markdown", |document| Ok(comparison::markdown(document)))],
    Diagnosis: [],
    Doctor: [],
    Explanations: [],
    HatStat: [],
    HugePageAnswers: [],
    JobCatalog: [],
    LiveTax: [],
    MachineCatalog: [],
    MissCurves: [("csv", "the curves as CSV", misscurve::csv)],
    PageMapDiff: [],
    PageMaps: [],
    PageSizeChange: [],
    PageSizes: [],
    Ranking: [],
    Replacement: [],
    Reproduction: [("markdown", "the tables as Markdown, as in docs/validation.md", |document| {
        Ok(reproduction::markdown(document))
    })],
    Runs: [
        ("csv", "counters and series as CSV", csv::render),
        ("jsonl", "each point of the series as a line of JSON", jsonl::render),
        ("prometheus", "the counters as Prometheus text", prometheus::render),
    ],
    Servers: [],
    SystemStat: [],
    SystemTop: [],
    Trapstat: [("folded", "misses by function as folded stacks", |document| {
        Ok(trapstat::folded(document))
    })],
    WhatIf: [],
}

/// The formats that the user asked for, with the file of each: `--json[=FILE]` and the like.
#[derive(Debug)]
pub struct Outputs<D> {
    wanted: Vec<(&'static str, PathBuf)>,
    document: PhantomData<D>,
}

/// Returns JSON, the page and the further formats of a kind.
fn formats<D: Output>() -> impl Iterator<Item = Format<D>> {
    let json = Format { name: "json", what: "all of it as JSON", render: |d: &D| Ok(d.to_json()?) };
    let html = Format { name: "html", what: "all of it as a page for a browser", render: as_page };
    let further = D::FORMATS.iter().map(|Format { name, what, render }| Format {
        name,
        what,
        render: *render,
    });
    [json, html].into_iter().chain(further)
}

fn as_page<D: Output>(document: &D) -> Result<String> {
    html::page(&[html::NamedJson { name: D::KIND.into(), text: document.to_json()? }])
}

impl<D: Output> Outputs<D> {
    /// Makes sure, before hours of work, that each file can be written.
    pub fn check_writable(&self) -> Result<()> {
        self.wanted.iter().try_for_each(|(_, path)| check_writable(path))
    }

    /// Returns true if any format was asked for.
    pub fn is_wanted(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// Returns true if a format takes the place of the text on stdout.
    pub fn takes_stdout(&self) -> bool {
        self.wanted.iter().any(|(_, path)| path == Path::new("-"))
    }

    /// Returns the same destinations for the other kind of document that a command has.
    pub fn for_kind<E: Output>(&self) -> Outputs<E> {
        Outputs { wanted: self.wanted.clone(), document: PhantomData }
    }

    /// Writes the document in each format that was asked for.
    pub fn write(&self, document: &D) -> Result<()> {
        for (wanted, path) in &self.wanted {
            for format in formats::<D>().filter(|format| format.name == *wanted) {
                let text = (format.render)(document)?;
                if path == Path::new("-") { print(&text)? } else { write_file(path, &text)? }
            }
        }
        Ok(())
    }

    /// Writes the document as [`Outputs::write`] does, and its text to stdout unless a format takes stdout.
    pub fn print(&self, document: &D, text: impl FnOnce(&D) -> String) -> Result<()> {
        self.write(document)?;
        if self.takes_stdout() { Ok(()) } else { print(&text(document)) }
    }
}

impl<D: Output> clap::Args for Outputs<D> {
    fn augment_args(command: Command) -> Command {
        formats::<D>().fold(command, |command, Format { name, what, .. }| {
            command.arg(
                Arg::new(name)
                    .long(name)
                    .value_name("FILE")
                    .num_args(0..=1)
                    .require_equals(true)
                    .default_missing_value("-")
                    .value_parser(clap::value_parser!(PathBuf))
                    .help(format!("Print {what}, instead of text; with =FILE, write it there")),
            )
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<D: Output> clap::FromArgMatches for Outputs<D> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let wanted = formats::<D>().filter_map(|format| {
            Some((format.name, matches.get_one::<PathBuf>(format.name)?.clone()))
        });
        Ok(Outputs { wanted: wanted.collect(), document: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
