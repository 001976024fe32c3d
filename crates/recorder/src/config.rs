//! A simulated configuration: a machine's translation hardware, and a policy of page sizes.

use crate::places::{Place, Segment};
use pagetax_core::page_size::{MemoryPart, PageSizeError, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use pagetax_sim::hardware::configuration::{self, ProgramTimes};
use pagetax_sim::hardware::tlb::TlbHierarchy;
use pagetax_sim::hardware::translation::Translation;
use pagetax_sim::model::{Model, ModelError};
use std::collections::BTreeSet;
use std::fmt;

/// A policy of page sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PagePolicy {
    /// The page sizes of the recorded process on this machine.
    Real,
    /// A size for each part that is named, and base pages elsewhere. `text` is for fetches from mapped files,
    /// `data` for loads and stores there.
    Sizes(PartSizes),
}

/// An error: not a page policy.
#[derive(Debug, thiserror::Error)]
pub enum PagePolicyError {
    /// The text is not in the grammar of page sizes.
    #[error(transparent)]
    Grammar(#[from] PageSizeError),
    /// A recording does not tell bss from other memory.
    #[error("`{0}`: a recording knows no bss\n  hint: name heap, stack, anon, text or data")]
    Bss(PartSizes),
}

/// The parts that a bare size is for: private memory.
const PRIVATE: [MemoryPart; 3] = [MemoryPart::Heap, MemoryPart::Stack, MemoryPart::Anon];

impl PagePolicy {
    /// Parses policies. Bare sizes are one each, for heap, stack and anon; PART=SIZE of one text go together.
    pub fn alternatives<'a>(
        texts: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<PagePolicy>, PagePolicyError> {
        let policy = |sizes: PartSizes| match sizes.uniform() {
            Some(PageSizeRequest::Default) => Ok(PagePolicy::Real),
            _ if sizes.get(MemoryPart::Bss).is_some() => Err(PagePolicyError::Bss(sizes)),
            _ => Ok(PagePolicy::Sizes(sizes)),
        };
        PartSizes::alternatives(texts, &PRIVATE)?.into_iter().map(policy).collect()
    }

    /// Returns the requested size; none for base pages.
    fn wanted(&self, place: &Place, file_part: MemoryPart) -> Option<PageSize> {
        let real = || PageSize::new(1 << place.real_shift).ok();
        let PagePolicy::Sizes(sizes) = self else { return real() };
        let part = match place.segment {
            Segment::Heap => MemoryPart::Heap,
            Segment::Stack => MemoryPart::Stack,
            Segment::Anon | Segment::Unknown => MemoryPart::Anon,
            Segment::File | Segment::Kernel => file_part,
        };
        match sizes.get(part)? {
            PageSizeRequest::Default => real(),
            PageSizeRequest::Base => None,
            PageSizeRequest::Size(size, _) => Some(size),
        }
    }

    /// Returns all sizes that the policy can request.
    fn sizes(&self) -> Vec<PageSize> {
        // PAGEMAP_SCAN distinguishes only huge pages from others.
        let real = [PageSize::K4, PageSize::M2];
        let PagePolicy::Sizes(sizes) = self else { return real.into() };
        let of = |request| match request {
            PageSizeRequest::Default => real.to_vec(),
            PageSizeRequest::Base => Vec::new(),
            PageSizeRequest::Size(size, _) => vec![size],
        };
        sizes.iter().flat_map(|(_, request)| of(request)).collect()
    }
}

impl fmt::Display for PagePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PagePolicy::Sizes(sizes) = self else { return f.write_str("real page sizes") };
        match sizes.uniform() {
            Some(size) if sizes.parts() == PRIVATE => write!(f, "data on {size} pages"),
            Some(size) if sizes.parts().len() == 5 => write!(f, "all on {size} pages"),
            _ => {
                let parts = sizes.iter().map(|(part, size)| format!("{part} on {size}"));
                write!(f, "{} pages", parts.collect::<Vec<_>>().join(", "))
            }
        }
    }
}

/// A machine under a page policy.
#[derive(Debug, Clone)]
pub struct MachineConfig {
    /// The name as in `sim:NAME`.
    pub machine: String,
    /// The title of the machine's model.
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
        at_most(&self.data_shifts, self.pages.wanted(place, MemoryPart::Data))
    }

    /// Returns log2 of a code page's size: the largest that the machine has up to the requested one.
    pub fn code_shift(&self, place: &Place) -> u32 {
        at_most(&self.code_shifts, self.pages.wanted(place, MemoryPart::Text))
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
        let read = |text: &str| -> Vec<String> {
            let policies = PagePolicy::alternatives([text]).unwrap();
            policies.iter().map(PagePolicy::to_string).collect()
        };
        for (text, shown) in [
            ("default", "real page sizes"),
            ("2M", "data on 2M pages"),
            ("heap=4K,stack=4K,anon=4K,text=4K,data=4K", "all on 4K pages"),
            ("heap=4M,stack=64K", "heap on 4M, stack on 64K pages"),
        ] {
            assert_eq!(read(text), [shown]);
        }
        assert_eq!(read("8K,heap=4M"), ["data on 8K pages", "heap on 4M pages"]);
        for (refused, words) in
            [("head=4M", "heap=2M,stack=64K"), ("real", "default"), ("bss=2M", "heap")]
        {
            let error = PagePolicy::alternatives([refused]).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(PagePolicy::alternatives(["heap=5M"]).is_err());
    }

    #[test]
    fn machines_give_the_largest_size_up_to_the_wish() {
        let model = models::find("ultrasparc-3plus-900").unwrap();
        let config =
            MachineConfig::new(&model, PagePolicy::alternatives(["heap=2M"]).unwrap().remove(0))
                .unwrap();
        assert_eq!(config.data_shift(&place(Segment::Heap, 12)), 19, "512K");
        assert_eq!(config.data_shift(&place(Segment::Stack, 12)), 13);
        let model = models::find("x86-64-calibrated").unwrap();
        let config = MachineConfig::new(&model, PagePolicy::Real).unwrap();
        assert_eq!(config.data_shift(&place(Segment::Anon, 21)), 21);
        assert_eq!(config.code_shift(&place(Segment::File, 21)), 12, "its ITLB has no 2M pages");
    }
}
