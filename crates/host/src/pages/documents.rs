//! The JSON documents about page sizes: `pagetax pagesize` and `pagetax ppgsz`.

use super::change::Outcome;
use super::text::FileText;
use super::{Mode, PageSettings, Verdict};
use pagetax_core::document::Document;
use pagetax_core::page_size::PartSizes;
use pagetax_core::units::PageSize;
use serde::{Deserialize, Serialize};

/// The page sizes of a system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PageSizes {
    /// The sizes, smallest first.
    pub sizes: Vec<PageSizeOffer>,
}

/// A page size, and the ways to get such pages now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PageSizeOffer {
    /// The size of such a page in bytes.
    pub page_bytes: PageSize,
    /// True for the base page of the architecture.
    pub base: bool,
    /// The setting of transparent pages; `None` if none has this size.
    pub transparent: Option<Mode>,
    /// Free pages of the pool; `None` if there is no pool of this size.
    pub hugetlb_page_count: Option<u64>,
}

impl Document for PageSizes {
    const KIND: &'static str = "page_sizes";
}

impl PageSizes {
    /// Lists the base page and all sizes that the settings know.
    pub fn new(base: PageSize, settings: &PageSettings) -> PageSizes {
        let mut sizes = [vec![base], settings.sizes(), settings.hugetlb_sizes()].concat();
        sizes.sort();
        sizes.dedup();
        let offer = |page_bytes| PageSizeOffer {
            page_bytes,
            base: page_bytes == base,
            transparent: settings.of_size(page_bytes),
            hugetlb_page_count: settings.hugetlb_pages(page_bytes),
        };
        PageSizes { sizes: sizes.into_iter().map(offer).collect() }
    }
}

/// The page sizes that were asked for, and the pages that each process has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PageSizeChange {
    /// The page size of each part.
    #[cfg_attr(feature = "schema", schemars(with = "std::collections::BTreeMap<String, String>"))]
    pub asked: PartSizes,
    /// The processes, in the order of operands or of their start.
    pub processes: Vec<ProcessChange>,
    /// The code files; absent for running processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<FileText>>,
}

impl Document for PageSizeChange {
    const KIND: &'static str = "page_size_change";
}

/// A process whose page sizes were to change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProcessChange {
    /// The process ID; `None` if the operand names no process.
    pub pid: Option<u32>,
    /// The operand, or the command line.
    pub operand: String,
    /// The reason why nothing was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The pages after the change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Bytes whose pages were changed from outside the process.
    pub changed_bytes: u64,
    /// The number of stops of the process.
    pub stop_count: usize,
    /// The longest stop of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_ns_max: Option<u64>,
    /// The part of the longest stop in which other threads had the CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_cpu_wait_ns: Option<u64>,
}

impl ProcessChange {
    /// Returns the change of a process that was judged.
    pub fn new(operand: String, verdict: Verdict, outcome: &Outcome) -> ProcessChange {
        let longest = outcome.stops.longest();
        ProcessChange {
            pid: Some(verdict.pid),
            operand,
            error: None,
            verdict: Some(verdict),
            changed_bytes: outcome.total_bytes(),
            stop_count: outcome.stops.all.len(),
            stop_ns_max: longest.map(|stop| stop.wall_ns),
            stop_cpu_wait_ns: longest.map(|stop| stop.cpu_wait_ns),
        }
    }

    /// Returns the entry of a process that was left alone.
    pub fn refused(operand: String, pid: Option<u32>, error: String) -> ProcessChange {
        ProcessChange {
            pid,
            operand,
            error: Some(error),
            verdict: None,
            changed_bytes: 0,
            stop_count: 0,
            stop_ns_max: None,
            stop_cpu_wait_ns: None,
        }
    }
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
        let offers = PageSizes::new(PageSize::K4, &PageSettings::at(directory.path()));
        let seen: Vec<_> = offers
            .sizes
            .iter()
            .map(|o| (o.page_bytes.to_string(), o.transparent, o.hugetlb_page_count))
            .collect();
        let expected = [
            ("4K", None, None),
            ("64K", Some(Mode::Never), None),
            ("2M", Some(Mode::Madvise), Some(3)),
            ("1G", None, Some(0)),
        ];
        assert_eq!(seen, expected.map(|(size, mode, pool)| (size.to_string(), mode, pool)));
    }
}
