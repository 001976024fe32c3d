//! Transparent huge pages below the PMD size for the heap, by the advice of glibc's malloc and the setting of
//! the size.
//!
//! The size must be on, and all larger ones off: the kernel prefers those.

use super::super::tunables::HUGETLB;
use super::{
    Conditions, LargePages, Mechanism, PageSettings, Proof, Recipe, Rest, Unavailable, heap_alone,
};
use crate::pages::settings::{Mode, Setting};
use pagetax_core::page_size::{How, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use std::sync::Arc;

/// Transparent huge pages of this size.
#[derive(Debug)]
pub struct Mthp(pub PageSize);

pub(super) fn select(sizes: &PartSizes, system: &PageSettings) -> Option<Arc<dyn Mechanism>> {
    let PageSizeRequest::Size(size, How::Preferred) = heap_alone(sizes)? else { return None };
    let is_medium = size < system.pmd_size().unwrap_or(PageSize::M2);
    (is_medium && system.sizes().contains(&size)).then(|| Arc::new(Mthp(size)) as _)
}

impl Mechanism for Mthp {
    fn name(&self) -> String {
        format!("mthp-{}", self.0)
    }

    fn page_size(&self) -> Option<PageSize> {
        Some(self.0)
    }

    fn available(&self, conditions: &Conditions) -> Result<(), Unavailable> {
        conditions.system.thp().map(|_| ()).ok_or_else(Unavailable::no_thp)
    }

    fn apply(&self, conditions: &Conditions, recipe: &mut Recipe) {
        let (system, size) = (conditions.system, self.0);
        if system.thp() == Some(Mode::Never) {
            recipe.settings.push(Setting::new(system.thp_path(), "madvise"));
        }
        if matches!(system.of_size(size), None | Some(Mode::Never)) {
            recipe.settings.push(Setting::new(system.size_path(size), "inherit"));
        }
        let larger = system.sizes().into_iter().filter(|other| *other > size);
        for other in larger.filter(|other| system.of_size(*other) != Some(Mode::Never)) {
            recipe.settings.push(Setting::new(system.size_path(other), "never"));
        }
        recipe.tunables.extend((system.thp() != Some(Mode::Always)).then(|| (HUGETLB, "1".into())));
        recipe.folio_size = Some(size);
    }

    /// Returns the growth of the system's count, which cannot be more than the command has.
    fn proof(&self, memory: &LargePages) -> Proof {
        let bytes = memory.folio_bytes.map(|bytes| bytes.min(memory.anon_bytes));
        Proof { bytes, rest: Rest::Allocator }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::settings::tests::tree;
    use super::super::recipe::tests::{recipe, values};
    use super::*;

    #[test]
    fn smaller_sizes_need_larger_ones_out_of_the_way() {
        let k64 = || Mthp(PageSize::new(64 << 10).unwrap());
        let (_keep, system) = tree("madvise", "never", "inherit", 0);
        let made = recipe(k64(), &system).unwrap();
        assert_eq!(values(&made), [("64K", "inherit"), ("2M", "never")]);
        let refused = made.permitted(false).unwrap_err();
        assert!(refused.remedy.contains("--allow-sysfs"));
        assert_eq!(made.shell_line(&["true".into()], None, "pagetax"), None);
        let (_keep, system) = tree("madvise", "madvise", "never", 0);
        assert!(recipe(k64(), &system).unwrap().settings.is_empty());
    }
}
