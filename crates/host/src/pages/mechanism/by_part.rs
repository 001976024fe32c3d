//! Huge pages for stack and code, with or without the heap, by `pagetax ppgsz`.

use super::{Conditions, LargePages, Mechanism, PageSettings, Proof, Recipe, Rest, Unavailable};
use crate::pages::text;
use pagetax_core::page_size::{MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use std::path::PathBuf;
use std::sync::Arc;

/// The parts that ppgsz gives huge pages to in a command that it starts, without further options.
const PARTS: [MemoryPart; 3] = [MemoryPart::Heap, MemoryPart::Stack, MemoryPart::Text];

/// Huge pages of this size for these parts.
#[derive(Debug)]
struct ByPart(PageSize, Vec<MemoryPart>);

pub(super) fn select(sizes: &PartSizes, system: &PageSettings) -> Option<Arc<dyn Mechanism>> {
    let (size, parts) = (system.pmd_size().unwrap_or(PageSize::M2), sizes.parts());
    let is_asked = sizes.uniform()? == PageSizeRequest::preferred(size)
        && parts.iter().all(|part| PARTS.contains(part));
    is_asked.then(|| Arc::new(ByPart(size, parts)) as _)
}

impl Mechanism for ByPart {
    fn name(&self) -> String {
        let names: Vec<String> = self.1.iter().map(ToString::to_string).collect();
        let parts = if self.1 == PARTS { "all".into() } else { names.join("+") };
        format!("{parts}-{}", self.0)
    }

    fn page_size(&self) -> Option<PageSize> {
        Some(self.0)
    }

    fn available(&self, conditions: &Conditions) -> Result<(), Unavailable> {
        conditions.system.thp().ok_or_else(Unavailable::no_thp)?;
        if self.1 == [MemoryPart::Text] && !conditions.has_code {
            return Err(Unavailable {
                why: format!("it has no code that {} pages fit", self.0),
                remedy: "none needed: small programs gain nothing by it".into(),
            });
        }
        Ok(())
    }

    fn apply(&self, _conditions: &Conditions, _recipe: &mut Recipe) {}

    /// Reads the code back onto base pages: the page cache keeps it on huge pages for the next program.
    fn undo(&self, code: &[PathBuf]) {
        if self.1.contains(&MemoryPart::Text) {
            for file in code {
                // A file that cannot be read again was not brought in either.
                let _ = text::settle(file);
            }
        }
    }

    /// Says of stack and code alone that the heap, most of the memory, was not asked for.
    fn proof(&self, memory: &LargePages) -> Proof {
        let has = |part| self.1.contains(&part);
        let rest = match (has(MemoryPart::Heap), has(MemoryPart::Stack), has(MemoryPart::Text)) {
            (true, ..) => Rest::Allocator,
            (false, true, true) => Rest::Because("only its stack and its code were to have them"),
            (false, true, false) => Rest::Because("only its stack was to have them"),
            (false, false, _) => Rest::Because("only its code was to have them"),
        };
        Proof::huge(memory, rest)
    }

    fn by_ppgsz(&self) -> Option<PartSizes> {
        Some(PartSizes::of(&self.1, PageSizeRequest::preferred(self.0)))
    }
}
