//! The command as it is, and on base pages.

use super::super::tunables::{HUGETLB, tunable};
use super::{
    Conditions, LargePages, Mechanism, PageSettings, Proof, Recipe, Rest, Unavailable, heap_alone,
};
use crate::pages::settings::base_page;
use pagetax_core::diagnosis::{AS_IS, BASE, CHECK};
use pagetax_core::page_size::{How, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use std::sync::Arc;

/// No change.
#[derive(Debug, Default)]
pub struct AsIs {
    /// True for the second trial of the command as it is.
    pub is_check: bool,
}

/// Base pages, by prctl(PR_SET_THP_DISABLE), which fork and exec inherit.
#[derive(Debug)]
pub struct Base;

pub(super) fn as_is(sizes: &PartSizes, _system: &PageSettings) -> Option<Arc<dyn Mechanism>> {
    (sizes.uniform()? == PageSizeRequest::Default).then(|| Arc::new(AsIs::default()) as _)
}

pub(super) fn base(sizes: &PartSizes, _system: &PageSettings) -> Option<Arc<dyn Mechanism>> {
    let request = heap_alone(sizes)?;
    let is_base = request.how() == How::Preferred && request.size(base_page()) == Some(base_page());
    is_base.then(|| Arc::new(Base) as _)
}

impl Mechanism for AsIs {
    fn name(&self) -> String {
        if self.is_check { CHECK } else { AS_IS }.into()
    }

    fn page_size(&self) -> Option<PageSize> {
        None
    }

    fn available(&self, _conditions: &Conditions) -> Result<(), Unavailable> {
        Ok(())
    }

    fn apply(&self, _conditions: &Conditions, _recipe: &mut Recipe) {}

    fn proof(&self, memory: &LargePages) -> Proof {
        Proof::huge(memory, Rest::Expected)
    }
}

impl Mechanism for Base {
    fn name(&self) -> String {
        BASE.into()
    }

    fn page_size(&self) -> Option<PageSize> {
        Some(base_page())
    }

    fn available(&self, _conditions: &Conditions) -> Result<(), Unavailable> {
        Ok(())
    }

    fn apply(&self, conditions: &Conditions, recipe: &mut Recipe) {
        let set = conditions.tunables.and_then(|existing| tunable(existing, HUGETLB));
        recipe.tunables.extend(set.map(|_| (HUGETLB, "0".into())));
        recipe.disable_thp = true;
    }

    fn proof(&self, memory: &LargePages) -> Proof {
        Proof::huge(memory, Rest::Expected)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::settings::tests::tree;
    use super::*;

    #[test]
    fn base_undoes_a_tunable_only_where_there_is_one() {
        let (_keep, system) = tree("always", "never", "inherit", 0);
        let recipe = |tunables| {
            let conditions = Conditions { system: &system, tunables, has_code: true };
            Recipe::new(Arc::new(Base), &conditions).unwrap()
        };
        assert!(recipe(None).tunables.is_empty());
        assert_eq!(recipe(Some("glibc.malloc.hugetlb=2")).tunables, [(HUGETLB, "0".into())]);
        assert!(recipe(None).disable_thp);
    }
}
