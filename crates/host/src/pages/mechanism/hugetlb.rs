//! Pages of a hugetlb pool for the heap, by glibc's malloc.

use super::super::tunables::HUGETLB;
use super::{
    Conditions, LargePages, Mechanism, PageSettings, Proof, Recipe, Rest, Unavailable, heap_alone,
};
use crate::pages::settings::Setting;
use pagetax_core::page_size::PartSizes;
use pagetax_core::units::PageSize;
use std::sync::Arc;

/// Pages of the pool of this size.
#[derive(Debug)]
struct Hugetlb(PageSize);

pub(super) fn select(sizes: &PartSizes, system: &PageSettings) -> Option<Arc<dyn Mechanism>> {
    let size = heap_alone(sizes)?.hugetlb()?;
    system.hugetlb_sizes().contains(&size).then(|| Arc::new(Hugetlb(size)) as _)
}

impl Mechanism for Hugetlb {
    fn name(&self) -> String {
        format!("hugetlb-{}", self.0)
    }

    fn page_size(&self) -> Option<PageSize> {
        Some(self.0)
    }

    fn available(&self, _conditions: &Conditions) -> Result<(), Unavailable> {
        Ok(())
    }

    /// Has a pool without pages filled on demand, up to half of memory.
    fn apply(&self, conditions: &Conditions, recipe: &mut Recipe) {
        let (system, size) = (conditions.system, self.0);
        if system.hugetlb_pages(size).unwrap_or(0) == 0 {
            let pages = rustix::system::sysinfo().totalram as u64 / 2 / size.bytes();
            let path = system.pool_path(size).join("nr_overcommit_hugepages");
            recipe.settings.push(Setting::new(path, pages.to_string()));
        }
        recipe.tunables.push((HUGETLB, size.bytes().to_string()));
    }

    fn proof(&self, memory: &LargePages) -> Proof {
        let why = "the pool had no pages left, or the memory is not malloc's";
        Proof::huge(memory, Rest::Because(why))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::settings::tests::tree;
    use super::super::recipe::tests::{recipe, values};
    use super::*;

    #[test]
    fn an_empty_pool_needs_pages_on_demand() {
        let (_keep, system) = tree("madvise", "never", "inherit", 0);
        assert_eq!(values(&recipe(Hugetlb(PageSize::M2), &system).unwrap())[0].0, "pool");
        let (_keep, system) = tree("madvise", "never", "inherit", 5);
        let recipe = recipe(Hugetlb(PageSize::M2), &system).unwrap();
        assert!(recipe.settings.is_empty());
        assert_eq!(recipe.tunables, [(HUGETLB, "2097152".into())]);
    }
}
