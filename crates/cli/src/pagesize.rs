//! `pagetax pagesize`: the page sizes of this system.

use crate::{exit, output};
use anyhow::{Result, anyhow};
use pagetax_core::document::Document;
use pagetax_core::units::PageSize;
use pagetax_host::pages::{Mode, PageSettings};
use serde::Serialize;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax pagesize                the base page, in bytes
  pagetax pagesize -a             all page sizes that the kernel knows
  pagetax pagesize -a --json      and how each can be had now";

/// Print the page sizes of this system, in bytes
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// All of them: the base page, transparent huge pages of each size, hugetlb pages
    #[arg(short)]
    all: bool,

    /// Print sizes, and how each can be had, as JSON
    #[arg(long)]
    json: bool,
}

/// A size, and how it can be had now.
#[derive(Debug, Serialize)]
struct Offer {
    page_bytes: PageSize,
    base: bool,
    /// `always`, `madvise` or `never`; none where no transparent page has this size.
    transparent: Option<&'static str>,
    /// Pages that the pool could give now; none where there is no pool of this size.
    hugetlb_page_count: Option<u64>,
}

/// The page sizes of this system.
#[derive(Serialize)]
struct PageSizes {
    sizes: Vec<Offer>,
}

impl Document for PageSizes {
    const KIND: &'static str = "page_sizes";
}

/// `pagetax pagesize [-a]`
pub fn run(args: Args) -> Result<ExitCode> {
    let base = PageSize::new(rustix::param::page_size() as u64)
        .map_err(|error| exit::with(exit::UNMET, anyhow!(error)))?;
    let mut sizes = offers(base, &PageSettings::host());
    sizes.retain(|offer| args.all || offer.base);
    if args.json {
        output::print_json(&PageSizes { sizes })?;
    } else {
        let line = |offer: &Offer| format!("{}\n", offer.page_bytes.bytes());
        output::print(&sizes.iter().map(line).collect::<String>())?;
    }
    Ok(exit::FINE.into())
}

/// Smallest first.
fn offers(base: PageSize, settings: &PageSettings) -> Vec<Offer> {
    let mut sizes = [vec![base], settings.sizes(), settings.hugetlb_sizes()].concat();
    sizes.sort();
    sizes.dedup();
    let offer = |page_bytes| Offer {
        page_bytes,
        base: page_bytes == base,
        transparent: settings.of_size(page_bytes).map(|mode| match mode {
            Mode::Always => "always",
            Mode::Madvise => "madvise",
            Mode::Never => "never",
        }),
        hugetlb_page_count: settings.hugetlb_pages(page_bytes),
    };
    sizes.into_iter().map(offer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_is_listed_once_with_its_ways() {
        let directory = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("transparent_hugepage/enabled", "always [madvise] never\n");
        write("transparent_hugepage/hugepages-64kB/enabled", "always inherit madvise [never]\n");
        write("transparent_hugepage/hugepages-2048kB/enabled", "always [inherit] madvise never\n");
        write("hugepages/hugepages-2048kB/free_hugepages", "3\n");
        write("hugepages/hugepages-1048576kB/free_hugepages", "0\n");
        let offers = offers(PageSize::K4, &PageSettings::at(directory.path()));
        let seen: Vec<_> = offers
            .iter()
            .map(|o| (o.page_bytes.to_string(), o.transparent, o.hugetlb_page_count))
            .collect();
        let expected = [
            ("4K", None, None),
            ("64K", Some("never"), None),
            ("2M", Some("madvise"), Some(3)),
            ("1G", None, Some(0)),
        ];
        assert_eq!(seen, expected.map(|(size, mode, pool)| (size.to_string(), mode, pool)));
    }
}
