//! Transparent huge pages of the PMD size for the heap, by the advice of glibc's malloc.
//!
//! Malloc gives advice only where the system-wide setting is `madvise`. The kernel grants the largest size
//! whose own setting allows it.

use super::{
    Conditions, LargePages, Mechanism, PageSettings, Proof, Recipe, Rest, Unavailable, heap_alone,
};
use crate::pages::settings::{Mode, Setting};
use crate::pages::tunables::HUGETLB;
use pagetax_core::page_size::{MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use std::sync::Arc;

/// Transparent huge pages of this size, the PMD size.
#[derive(Debug)]
pub struct Thp(pub PageSize);

pub(super) fn select(sizes: &PartSizes, system: &PageSettings) -> Option<Arc<dyn Mechanism>> {
    let size = system.pmd_size().unwrap_or(PageSize::M2);
    let is_asked = heap_alone(sizes)? == PageSizeRequest::preferred(size);
    is_asked.then(|| Arc::new(Thp(size)) as _)
}

impl Mechanism for Thp {
    fn name(&self) -> String {
        format!("thp-{}", self.0)
    }

    fn page_size(&self) -> Option<PageSize> {
        Some(self.0)
    }

    fn available(&self, conditions: &Conditions) -> Result<(), Unavailable> {
        let mode = conditions.system.thp().ok_or_else(Unavailable::no_thp)?;
        if mode == Mode::Always && conditions.system.of_size(self.0) == Some(Mode::Always) {
            return Err(Unavailable {
                why: format!("THP is `always`: the command gets {} pages as it is", self.0),
                remedy: "none needed: compare `as-is` with `base`".into(),
            });
        }
        Ok(())
    }

    fn apply(&self, conditions: &Conditions, recipe: &mut Recipe) {
        let (system, size) = (conditions.system, self.0);
        if system.thp() == Some(Mode::Never) {
            recipe.settings.push(Setting::new(system.thp_path(), "madvise"));
        }
        if system.of_size(size) == Some(Mode::Never) && system.size_path(size).exists() {
            recipe.settings.push(Setting::new(system.size_path(size), "inherit"));
        }
        recipe.tunables.push((HUGETLB, "1".into()));
    }

    fn proof(&self, memory: &LargePages) -> Proof {
        Proof::huge(memory, Rest::Allocator)
    }

    fn by_ppgsz(&self) -> Option<PartSizes> {
        Some(PartSizes::of(&[MemoryPart::Heap], PageSizeRequest::preferred(self.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::settings::tests::tree;
    use super::super::recipe::tests::{recipe, values};
    use super::*;

    #[test]
    fn thp_needs_settings_only_where_they_are_in_the_way() {
        let recipe = |thp, m2| {
            let (_keep, system) = tree(thp, "never", m2, 0);
            recipe(Thp(PageSize::M2), &system)
        };
        assert!(recipe("madvise", "inherit").unwrap().settings.is_empty());
        assert!(recipe("always", "inherit").unwrap_err().why.contains("as it is"));
        assert_eq!(values(&recipe("never", "inherit").unwrap())[0], ("thp", "madvise"));
        assert_eq!(values(&recipe("madvise", "never").unwrap()), [("2M", "inherit")]);
    }
}
