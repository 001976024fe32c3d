//! A simulated configuration: a machine's translation hardware, and a policy of page sizes.

use crate::places::{Place, Segment};
use pagetax_core::units::{PageSize, UnitError};
use pagetax_sim::hardware::configuration::{self, ProgramTimes};
use pagetax_sim::hardware::tlb::TlbHierarchy;
use pagetax_sim::hardware::translation::Translation;
use pagetax_sim::model::{Model, ModelError};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A policy of page sizes by segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PagePolicy {
    /// The page sizes of the recorded process on this machine.
    Real,
    /// A size for each segment; base pages where there is none.
    Sizes {
        /// The page size of the break's memory.
        heap: Option<PageSize>,
        /// The page size of the main thread's stack.
        stack: Option<PageSize>,
        /// The page size of other private memory, such as thread stacks and malloc arenas.
        anon: Option<PageSize>,
        /// The page size of mapped files, text included.
        file: Option<PageSize>,
    },
}

/// An error: not a page policy.
#[derive(Debug, thiserror::Error)]
pub enum PagePolicyError {
    /// An unknown segment.
    #[error(
        "`{0}` is no segment; write real, a size for heap, stack and anon such as 2M, or \
         SEGMENT=SIZE of heap, stack, anon, file and all, joined by +, as in heap=4M+stack=64K"
    )]
    Segment(String),
    /// An invalid page size.
    #[error(transparent)]
    Size(#[from] UnitError),
}

impl FromStr for PagePolicy {
    type Err = PagePolicyError;
    fn from_str(text: &str) -> Result<Self, PagePolicyError> {
        if text == "real" {
            return Ok(PagePolicy::Real);
        }
        let (mut heap, mut stack, mut anon, mut file) = (None, None, None, None);
        for part in text.split('+') {
            let (segment, size) = part.split_once('=').unwrap_or(("data", part));
            let size = Some(size.parse::<PageSize>()?);
            match segment {
                "heap" => heap = size,
                "stack" => stack = size,
                "anon" => anon = size,
                "file" => file = size,
                "data" => (heap, stack, anon) = (size, size, size),
                "all" => (heap, stack, anon, file) = (size, size, size, size),
                other => return Err(PagePolicyError::Segment(other.into())),
            }
        }
        Ok(PagePolicy::Sizes { heap, stack, anon, file })
    }
}

impl fmt::Display for PagePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PagePolicy::Sizes { heap, stack, anon, file } = self else {
            return f.write_str("real page sizes");
        };
        if heap == stack && stack == anon && heap.is_some() {
            match file {
                None => {
                    return write!(
                        f,
                        "data on {} pages",
                        heap.map_or(String::new(), |s| s.to_string())
                    );
                }
                Some(size) if Some(*size) == *heap => return write!(f, "all on {size} pages"),
                Some(_) => {}
            }
        }
        let named = [("heap", heap), ("stack", stack), ("anon", anon), ("file", file)];
        let known: Vec<_> = named
            .iter()
            .filter_map(|(name, size)| size.map(|s| format!("{name} on {s}")))
            .collect();
        write!(f, "{} pages", known.join(", "))
    }
}

impl PagePolicy {
    /// Returns the requested size; none for base pages.
    fn wanted(&self, place: &Place) -> Option<PageSize> {
        match self {
            PagePolicy::Real => PageSize::new(1 << place.real_shift).ok(),
            PagePolicy::Sizes { heap, stack, anon, file } => match place.segment {
                Segment::Heap => *heap,
                Segment::Stack => *stack,
                Segment::Anon | Segment::Unknown => *anon,
                Segment::File | Segment::Kernel => *file,
            },
        }
    }

    /// Returns all sizes that the policy can request.
    fn sizes(&self) -> Vec<PageSize> {
        match self {
            // PAGEMAP_SCAN distinguishes only huge pages from others.
            PagePolicy::Real => vec![PageSize::K4, PageSize::M2],
            PagePolicy::Sizes { heap, stack, anon, file } => {
                [heap, stack, anon, file].into_iter().flatten().copied().collect()
            }
        }
    }
}

/// A machine under a page policy.
#[derive(Debug, Clone)]
pub struct MachineConfig {
    /// The name as in `sim:NAME`.
    pub machine: String,
    /// The model's title.
    pub title: String,
    /// The policy of page sizes.
    pub pages: PagePolicy,
    /// The translation hardware of one CPU, with empty TLBs.
    pub cpu: Translation,
    /// The costs of instructions and of modelled cache misses.
    pub times: ProgramTimes,
    /// log2 of the machine's page sizes, in ascending order.
    pub shifts: Vec<u32>,
    data_shifts: Vec<u32>,
    code_shifts: Vec<u32>,
}

impl MachineConfig {
    /// Combines a model and a policy.
    ///
    /// # Errors
    /// The model has no TLBs or no `[program]`.
    pub fn new(model: &Model, pages: PagePolicy) -> Result<MachineConfig, ModelError> {
        let mut cpu = configuration::translation(model)?;
        let times = configuration::program_times(model)?;
        let mut sizes = configuration::page_sizes(model, "paging", "page_sizes")?;
        sizes.sort();
        let shifts: Vec<u32> = sizes.iter().map(|size| size.shift()).collect();
        let base = sizes[0];
        let wanted = pages.sizes();
        // The system programs the large arrays for the large pages that a process has.
        let supported = wanted.iter().filter_map(|w| sizes.iter().rev().find(|s| **s <= *w));
        if let Some(large) = supported.max().filter(|size| **size > base) {
            cpu.program(*large);
        }
        let held = |tlb: &TlbHierarchy| -> Vec<u32> {
            shifts.iter().copied().filter(|shift| tlb.nearest_arrays(*shift).is_some()).collect()
        };
        let (data_shifts, code_shifts) = (held(cpu.data()), held(cpu.instructions()));
        Ok(MachineConfig {
            machine: format!("sim:{}", model.name),
            title: model.title.clone(),
            pages,
            cpu,
            times,
            shifts,
            data_shifts,
            code_shifts,
        })
    }

    /// Returns the machine and its page sizes, for headings.
    pub fn name(&self) -> String {
        format!("{}, {}", self.machine, self.pages)
    }

    /// Returns log2 of a data page's size: the largest that the machine has up to the requested one.
    pub fn data_shift(&self, place: &Place) -> u32 {
        at_most(&self.data_shifts, self.pages.wanted(place))
    }

    /// Returns log2 of a code page's size: the largest that the machine has up to the requested one.
    pub fn code_shift(&self, place: &Place) -> u32 {
        at_most(&self.code_shifts, self.pages.wanted(place))
    }

    /// Returns log2 of all possible sizes of data pages.
    pub fn data_shifts(&self) -> BTreeSet<u32> {
        self.possible(&self.data_shifts)
    }

    /// Returns log2 of all possible sizes of code pages.
    pub fn code_shifts(&self) -> BTreeSet<u32> {
        self.possible(&self.code_shifts)
    }

    fn possible(&self, held: &[u32]) -> BTreeSet<u32> {
        let wanted = self.pages.sizes().into_iter().map(Some).chain([None]);
        wanted.map(|size| at_most(held, size)).collect()
    }
}

/// Returns the largest of the sorted `shifts` up to `wanted`, or else the smallest.
fn at_most(shifts: &[u32], wanted: Option<PageSize>) -> u32 {
    let wanted = wanted.map_or(0, |size| size.shift());
    let fitting = shifts.iter().rev().find(|shift| **shift <= wanted);
    fitting.or(shifts.first()).copied().unwrap_or(crate::filter::PAGE_SHIFT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_sim::models;

    fn place(segment: Segment, real_shift: u32) -> Place {
        Place { segment, file: None, real_shift }
    }

    #[test]
    fn policies_are_written_and_read() {
        for (text, shown) in [
            ("real", "real page sizes"),
            ("2M", "data on 2M pages"),
            ("all=4K", "all on 4K pages"),
            ("heap=4M+stack=64K", "heap on 4M, stack on 64K pages"),
        ] {
            assert_eq!(text.parse::<PagePolicy>().unwrap().to_string(), shown);
        }
        assert!("head=4M".parse::<PagePolicy>().unwrap_err().to_string().contains("SEGMENT=SIZE"));
        assert!("heap=5M".parse::<PagePolicy>().is_err());
    }

    #[test]
    fn machines_give_the_largest_size_up_to_the_wish() {
        let model = models::find("ultrasparc-3plus-900").unwrap();
        let config = MachineConfig::new(&model, "heap=2M".parse().unwrap()).unwrap();
        assert_eq!(config.data_shift(&place(Segment::Heap, 12)), 19, "512K");
        assert_eq!(config.data_shift(&place(Segment::Stack, 12)), 13);
        let model = models::find("x86-64-calibrated").unwrap();
        let config = MachineConfig::new(&model, PagePolicy::Real).unwrap();
        assert_eq!(config.data_shift(&place(Segment::Anon, 21)), 21);
        assert_eq!(config.code_shift(&place(Segment::File, 21)), 12, "its ITLB has no 2M pages");
    }
}
