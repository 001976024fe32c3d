//! Ways to give an unmodified command another page size.
//!
//! Each is one implementation of [`Mechanism`], in a file of its own, and one line in [`MECHANISMS`]. Tests
//! on Linux 6.18 with glibc 2.36 showed which of them work on unmodified programs.

mod base;
mod by_part;
mod hugetlb;
mod mthp;
mod only;
mod program_setting;
mod recipe;
mod thp;

pub use base::{AsIs, Base};
pub use mthp::Mthp;
pub use only::Only;
pub use program_setting::settings_of;
pub use recipe::Recipe;
pub use thp::Thp;

use super::settings::PageSettings;
use pagetax_core::page_size::{MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;

/// A way to get pages of one size for an unmodified command.
pub trait Mechanism: Debug + Send + Sync {
    /// Returns the name of its trials in reports, such as `thp-2M`.
    fn name(&self) -> String;

    /// Returns the page size that it gives; none if it leaves that to the system.
    fn page_size(&self) -> Option<PageSize>;

    /// Checks that it works for this command on this system, and makes a difference.
    fn available(&self, conditions: &Conditions) -> Result<(), Unavailable>;

    /// Adds its changes of the environment, the system and the command line to a recipe.
    fn apply(&self, conditions: &Conditions, recipe: &mut Recipe);

    /// Undoes changes that outlive the command. `code` are the files that it maps as code. Settings of the
    /// system are not among them: [`super::Changed`] restores those.
    fn undo(&self, _code: &[PathBuf]) {}

    /// Returns the memory that it put on large pages, as far as the kernel counts it.
    fn proof(&self, memory: &LargePages) -> Proof;

    /// Returns the request by which `pagetax ppgsz -o` gives the same pages, if it can.
    fn by_ppgsz(&self) -> Option<PartSizes> {
        None
    }

    /// Returns the patterns of the memory that it is for (`ppgsz --only`), if it is not for all.
    fn only(&self) -> Option<&str> {
        None
    }

    /// Returns the price of it beyond its memory, in a few words; none if there is nothing to say.
    fn cost(&self) -> Option<&'static str> {
        None
    }
}

/// A constructor of a mechanism: none if the mechanism does not give what is requested.
type Select = fn(&PartSizes, &PageSettings) -> Option<Arc<dyn Mechanism>>;

/// The mechanisms. The first that gives the requested pages is taken.
const MECHANISMS: &[Select] =
    &[base::as_is, base::base, thp::select, mthp::select, hugetlb::select, by_part::select];

/// An error that no mechanism gives the requested pages.
#[derive(Debug, thiserror::Error)]
#[error(
    "no mechanism gives `{0}` here\n  hint: 4K or base for base pages; of the heap a size of \
     /sys/kernel/mm/transparent_hugepage (such as 64K or 2M), or hugetlb:2M or hugetlb:1G; of heap, stack and \
     text the huge page, as in stack=2M,text=2M"
)]
pub struct NoMechanism(pub PartSizes);

/// Returns the mechanism that gives the requested pages on this system.
pub fn select(sizes: &PartSizes, system: &PageSettings) -> Result<Arc<dyn Mechanism>, NoMechanism> {
    let found = MECHANISMS.iter().find_map(|select| select(sizes, system));
    found.ok_or_else(|| NoMechanism(sizes.clone()))
}

/// Returns the request for the heap, if it is for nothing else.
fn heap_alone(sizes: &PartSizes) -> Option<PageSizeRequest> {
    (sizes.parts() == [MemoryPart::Heap]).then(|| sizes.get(MemoryPart::Heap)).flatten()
}

/// The system and the command that a mechanism is for.
#[derive(Debug, Clone, Copy)]
pub struct Conditions<'a> {
    /// The settings of the system.
    pub system: &'a PageSettings,
    /// The value of GLIBC_TUNABLES in the environment.
    pub tunables: Option<&'a str>,
    /// True if the command maps code that fills huge pages.
    pub has_code: bool,
}

/// The reason why a mechanism cannot be tried here, and a remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable {
    /// The reason, in one line for the user.
    pub why: String,
    /// The command or the setting that would help.
    pub remedy: String,
}

impl Unavailable {
    /// Returns the answer for a page size that the kernel lacks.
    pub fn no_size(size: PageSize, system: &PageSettings) -> Unavailable {
        let is_medium = system.pmd_size().is_none_or(|pmd| size < pmd);
        let remedy = match is_medium && system.sizes().len() <= 1 {
            true => "Linux 6.8 and later have transparent huge pages of such sizes (mTHP)".into(),
            false => {
                let sizes = system.sizes().iter().map(ToString::to_string).collect::<Vec<_>>();
                format!("it has {}", sizes.join(", "))
            }
        };
        let since = if is_medium { " (Linux 6.8)" } else { "" };
        Unavailable { why: format!("the kernel has no {size} pages{since}"), remedy }
    }

    fn no_thp() -> Unavailable {
        Unavailable {
            why: "the kernel has no transparent huge pages".into(),
            remedy: "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE".into(),
        }
    }
}

/// Anonymous memory of a command at its peak, by the kind of its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LargePages {
    /// All anonymous memory, with hugetlb.
    pub anon_bytes: u64,
    /// Transparent huge pages of the PMD size.
    pub thp_bytes: u64,
    /// Memory on pages of a hugetlb pool.
    pub hugetlb_bytes: u64,
    /// Pages of the recipe's `folio_size`; none where the kernel does not count them.
    pub folio_bytes: Option<u64>,
}

/// The memory that a mechanism put on large pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proof {
    /// None where the kernel does not count it.
    pub bytes: Option<u64>,
    /// The explanation for the rest.
    pub rest: Rest,
}

impl Proof {
    /// Returns the proof by all huge pages.
    fn huge(memory: &LargePages, rest: Rest) -> Proof {
        Proof { bytes: Some(memory.thp_bytes + memory.hugetlb_bytes), rest }
    }
}

/// The explanation for memory that is not on large pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// The mechanism is not for all memory: there is nothing to explain.
    Expected,
    /// The same reason always.
    Because(&'static str),
    /// Fragmentation, or an allocator that the mechanism does not reach.
    Allocator,
}

#[cfg(test)]
mod tests {
    use super::super::settings::tests::tree;
    use super::*;

    #[test]
    fn requests_select_mechanisms() {
        let (_keep, system) = tree("madvise", "never", "inherit", 0);
        let name = |text| {
            let all = PartSizes::alternatives([text], &[MemoryPart::Heap]).unwrap();
            select(&all[0], &system).map(|mechanism| mechanism.name())
        };
        for (text, expected) in [
            ("default", "as-is"),
            ("4K", "base"),
            ("base", "base"),
            ("64K", "mthp-64K"),
            ("2M", "thp-2M"),
            ("heap=2M", "thp-2M"),
            ("hugetlb:2M", "hugetlb-2M"),
            ("stack=2M", "stack-2M"),
            ("text=2M", "text-2M"),
            ("stack=2M,text=2M", "stack+text-2M"),
            ("heap=2M,stack=2M,text=2M", "all-2M"),
        ] {
            assert_eq!(name(text).unwrap(), expected);
        }
        for text in ["stack=64K", "32K", "hugetlb:1G", "anon=2M", "heap=2M,stack=4K"] {
            assert!(name(text).is_err(), "{text}");
        }
    }
}
