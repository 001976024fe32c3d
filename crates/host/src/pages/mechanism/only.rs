//! Huge pages for the memory that patterns name, by `pagetax ppgsz --only`.

use super::{Conditions, LargePages, Mechanism, Proof, Recipe, Rest, Unavailable};
use pagetax_core::diagnosis::PARTS;
use pagetax_core::page_size::{MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;

/// Pages of 2M for the memory that these patterns name.
#[derive(Debug)]
pub struct Only(pub String);

impl Mechanism for Only {
    fn name(&self) -> String {
        PARTS.into()
    }

    fn page_size(&self) -> Option<PageSize> {
        Some(PageSize::M2)
    }

    fn available(&self, conditions: &Conditions) -> Result<(), Unavailable> {
        conditions.system.thp().map(|_| ()).ok_or_else(Unavailable::no_thp)
    }

    fn apply(&self, _conditions: &Conditions, _recipe: &mut Recipe) {}

    fn proof(&self, memory: &LargePages) -> Proof {
        Proof::huge(
            memory,
            Rest::Because("only the memory that its patterns name was to have them"),
        )
    }

    fn by_ppgsz(&self) -> Option<PartSizes> {
        Some(PartSizes::of(&[MemoryPart::Heap], PageSizeRequest::preferred(PageSize::M2)))
    }

    fn only(&self) -> Option<&str> {
        Some(&self.0)
    }
}
