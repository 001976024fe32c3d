//! Page sizes by part: the sizes that this system has, and the part that a mapping belongs to.

use super::mechanism::Unavailable;
use super::settings::{PageSettings, base_page};
use crate::pages::pagemap::{Mapping, Segment};
use pagetax_core::page_size::{How, MemoryPart, PageSizeRequest, PartSizes};

/// A page size that this system lacks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{option}`: {why}\n  hint: one of {known}")]
pub struct UnsupportedSize {
    option: String,
    why: String,
    known: String,
}

/// Checks that this system has each size.
pub fn check(sizes: &PartSizes, system: &PageSettings) -> Result<(), UnsupportedSize> {
    let pools = system.hugetlb_sizes();
    let pools = pools.iter().map(|size| PageSizeRequest::Size(*size, How::Hugetlb));
    let ordinary = [base_page()].into_iter().chain(system.sizes()).map(PageSizeRequest::preferred);
    let known: Vec<PageSizeRequest> = ordinary.chain(pools).collect();
    for (part, request) in sizes.iter() {
        let PageSizeRequest::Size(size, how) = request else { continue };
        if known.contains(&request) {
            continue;
        }
        let why = match how {
            How::Hugetlb => format!("this system has no {size} pages"),
            _ => Unavailable::no_size(size, system).why,
        };
        let same_way = |other: &&PageSizeRequest| how != How::Hugetlb || other.how() == how;
        let names: Vec<String> = known.iter().filter(same_way).map(|one| one.to_string()).collect();
        return Err(UnsupportedSize {
            option: format!("{part}={request}"),
            why,
            known: names.join(", "),
        });
    }
    Ok(())
}

/// Returns the system's choice for each part that can be changed back. Data is left out: its pages belong to
/// files that other processes map. Code is included because it may have been moved to anonymous memory.
pub fn undoable() -> PartSizes {
    use MemoryPart::{Anon, Bss, Heap, Stack, Text};
    PartSizes::of(&[Heap, Stack, Anon, Bss, Text], PageSizeRequest::Default)
}

/// Returns the part that decides about a mapping, if `sizes` names it. bss belongs to the heap unless it is
/// named itself. Anonymous memory that is executed is code: compiled at run time, or moved.
pub fn part_of(sizes: &PartSizes, mapping: &Mapping) -> Option<MemoryPart> {
    let part = match mapping.segment {
        Segment::Anon if mapping.execute && !mapping.write => MemoryPart::Text,
        Segment::Bss if sizes.get(MemoryPart::Bss).is_some() => MemoryPart::Bss,
        Segment::Heap | Segment::Bss => MemoryPart::Heap,
        Segment::Stack => MemoryPart::Stack,
        Segment::Anon => MemoryPart::Anon,
        Segment::Text => MemoryPart::Text,
        Segment::Data => MemoryPart::Data,
        Segment::ReadOnly | Segment::Shared | Segment::Kernel => return None,
    };
    sizes.get(part).map(|_| part)
}

/// Returns true if any part asks for more than base pages.
pub fn wants_large(sizes: &PartSizes) -> bool {
    let base = base_page();
    sizes.iter().any(|(_, request)| request.size(base).is_some_and(|size| size > base))
}

#[cfg(test)]
mod tests {
    use super::super::settings::tests::tree;
    use super::*;

    #[test]
    fn sizes_that_the_system_lacks_are_refused() {
        let (_keep, system) = tree("madvise", "never", "inherit", 0);
        let check = |text| check(&PartSizes::parse([text]).unwrap(), &system);
        assert_eq!(check("heap=2M,stack=64K,text=0,bss=4K,anon=hugetlb:2M"), Ok(()));
        let unsupported = check("heap=1G").unwrap_err().to_string();
        assert!(unsupported.contains("no 1G pages") && unsupported.contains("hugetlb:2M"));
        assert!(check("heap=hugetlb:1G").unwrap_err().to_string().ends_with("one of hugetlb:2M"));
    }

    #[test]
    fn bss_is_heap_unless_it_is_named() {
        let own = crate::pages::pagemap::read(std::process::id()).unwrap();
        let of = |segment| own.mappings.iter().find(|m| m.segment == segment).unwrap();
        let part = |text, mapping: &Mapping| part_of(&PartSizes::parse([text]).unwrap(), mapping);
        let mut mapping = of(Segment::Heap).clone();
        assert_eq!(part("heap=2M", &mapping), Some(MemoryPart::Heap));
        mapping.segment = Segment::Bss;
        assert_eq!(part("heap=2M", &mapping), Some(MemoryPart::Heap));
        assert_eq!(part("heap=2M,bss=4K", &mapping), Some(MemoryPart::Bss));
        assert_eq!(part("anon=2M", &mapping), None);
        mapping.segment = Segment::Anon;
        assert_eq!(part("anon=2M", &mapping), Some(MemoryPart::Anon));
        (mapping.execute, mapping.write) = (true, false);
        assert_eq!(part("anon=2M,text=2M", &mapping), Some(MemoryPart::Text));
        assert_eq!(part_of(&undoable(), of(Segment::Kernel)), None);
    }
}
