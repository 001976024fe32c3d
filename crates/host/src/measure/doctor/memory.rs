//! Page sizes, and the operations on pages that this machine allows.

use crate::pages::{Mode, PageSettings};
use crate::procfs::{Root, process_huge_bytes};
use crate::sys::mapping::{OwnedMapping, Request, Source};
use crate::sys::{pagemap, probe};
use pagetax_core::finding::{Feature, Finding};
use pagetax_core::units::PageSize;
use std::io::{self, Read, Seek, SeekFrom};

pub(super) fn findings(root: &Root) -> Vec<Finding> {
    let settings = PageSettings::host();
    let huge = settings.pmd_size().unwrap_or(PageSize::M2);
    let mut findings = vec![huge_pages(&settings, huge), medium_pages(&settings, huge)];
    findings.extend([PageSize::M2, PageSize::G1].map(|size| pool(&settings, size)));
    findings.extend([collapse(huge, false), collapse(huge, true), page_map(), page_flags(root)]);
    findings
}

fn anon(len: u64, align: u64, hugetlb: bool) -> io::Result<OwnedMapping> {
    let (len, align) = (len as usize, align as usize);
    let hugetlb = hugetlb.then_some(align);
    OwnedMapping::new(Request { source: Source::Anon, len, align, hugetlb })
}

fn own_huge_bytes() -> u64 {
    process_huge_bytes(&Root::default(), std::process::id()).value().unwrap_or(0)
}

fn huge_pages(settings: &PageSettings, huge: PageSize) -> Finding {
    let feature = Feature("huge_pages", "transparent huge pages (THP) for ordinary memory");
    let enable = format!("echo madvise | sudo tee {}", settings.thp_path().display());
    let Some(mode) = settings.of_size(huge) else {
        return feature.never_here("the kernel was built without transparent huge pages");
    };
    if mode == Mode::Never {
        return feature.not_here(format!("{huge} pages are switched off"), enable);
    }
    let before = own_huge_bytes();
    let touched = anon(huge.bytes() * 2, huge.bytes(), false).and_then(|mapping| {
        mapping.advise(libc::MADV_HUGEPAGE)?;
        mapping.store(0, 1);
        Ok(own_huge_bytes() > before)
    });
    match (touched, mode) {
        (Ok(true), Mode::Always) => feature.works(format!("all memory may have {huge} pages")),
        (Ok(true), _) => feature.works(format!("memory gets {huge} pages on advice (madvise)")),
        (Ok(false), _) => feature.limited(
            format!("switched on, but a new {huge} page was not to be had: memory is fragmented"),
            "echo 1 | sudo tee /proc/sys/vm/compact_memory",
        ),
        (Err(error), _) => feature.limited(format!("a {huge} page was refused: {error}"), enable),
    }
}

/// Checks the sizes between the base page and the huge page. Only enabled sizes are available.
fn medium_pages(settings: &PageSettings, huge: PageSize) -> Finding {
    let feature = Feature("medium_pages", "transparent pages of other sizes (mTHP)");
    let sizes = settings.sizes();
    let (on, off): (Vec<_>, Vec<_>) = sizes
        .into_iter()
        .filter(|s| *s != huge)
        .partition(|size| matches!(settings.of_size(*size), Some(Mode::Always | Mode::Madvise)));
    let list =
        |sizes: &[PageSize]| sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let Some(first_off) = off.iter().find(|size| size.bytes() == 64 << 10).or(off.first()) else {
        return match on.is_empty() {
            true => feature.never_here("the kernel has none (Linux 6.8 and later do)"),
            false => feature.works(format!("on: {}", list(&on))),
        };
    };
    let enable = format!("echo madvise | sudo tee {}", settings.size_path(*first_off).display());
    match on.is_empty() {
        true => feature.not_here(format!("all off: {}", list(&off)), enable),
        false => feature.limited(format!("on: {}; off: {}", list(&on), list(&off)), enable),
    }
}

fn pool(settings: &PageSettings, size: PageSize) -> Finding {
    let feature = match size {
        PageSize::G1 => Feature("hugetlb_1g", "reserved 1G pages (hugetlb)"),
        _ => Feature("hugetlb_2m", "reserved 2M pages (hugetlb)"),
    };
    let Some(pages) = settings.hugetlb_pages(size) else {
        return feature.never_here(format!("neither CPU nor kernel have {size} hugetlb pages"));
    };
    let count = if size == PageSize::G1 { 1 } else { 64 };
    let enable = format!(
        "echo {count} | sudo tee {}",
        settings.pool_path(size).join("nr_hugepages").display()
    );
    match anon(size.bytes(), size.bytes(), true) {
        Ok(_) => feature.works(format!("one was mapped; {pages} can be had")),
        Err(_) if pages == 0 => {
            feature.not_here(format!("the pool of {size} pages is empty"), enable)
        }
        Err(error) => feature.limited(format!("{pages} pages, but: {error}"), enable),
    }
}

/// Checks MADV_COLLAPSE, or the same for another process.
fn collapse(huge: PageSize, remotely: bool) -> Finding {
    let done = anon(huge.bytes(), huge.bytes(), false).and_then(|mapping| {
        mapping.store(0, 1);
        match remotely {
            false => mapping.advise(libc::MADV_COLLAPSE),
            true => probe::collapse_remotely(&mapping),
        }
    });
    collapse_finding(done, remotely)
}

fn collapse_finding(done: io::Result<()>, remotely: bool) -> Finding {
    const RIGHT: &str = "sudo setcap cap_sys_nice=ep \"$(command -v pagetax)\"";
    let feature = match remotely {
        false => Feature("collapse", "turning existing memory into huge pages (MADV_COLLAPSE)"),
        true => Feature("collapse_remotely", "the same to a running program (process_madvise)"),
    };
    match done {
        Ok(()) if remotely && !rustix::process::geteuid().is_root() => {
            feature.limited("of one's own processes, but other processes need CAP_SYS_NICE", RIGHT)
        }
        Ok(()) => feature.works("a piece of memory was collapsed"),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => feature.never_here(
            "the kernel does not know it (Linux 6.1 and later do), or huge pages are forbidden to \
             this process",
        ),
        // Older kernels require it even for the calling process.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => feature.limited(
            format!("{error}: this kernel needs CAP_SYS_NICE, for one's own processes as well"),
            RIGHT,
        ),
        Err(error) => {
            let compact = "echo 1 | sudo tee /proc/sys/vm/compact_memory";
            feature.limited(format!("refused: {error}"), compact)
        }
    }
}

fn page_map() -> Finding {
    let feature = Feature("page_map", "which pages of a program are huge (PAGEMAP_SCAN)");
    let scanned = anon(4096, 4096, false).and_then(|mapping| {
        mapping.store(0, 1);
        let file = std::fs::File::open("/proc/self/pagemap")?;
        let end = mapping.address() + mapping.len() as u64;
        pagemap::scan(&file, mapping.address(), end, pagemap::PAGE_IS_PRESENT)
    });
    match scanned {
        Ok(ranges) if !ranges.is_empty() => feature.works("a page was found"),
        Ok(_) => feature.never_here("the scan does not find a page that is there"),
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => feature.never_here(
            "the kernel has no PAGEMAP_SCAN (Linux 6.7 and later do): page sizes are known by mapping, from \
             smaps",
        ),
        Err(error) => feature.never_here(format!("/proc/self/pagemap: {error}")),
    }
}

fn page_flags(root: &Root) -> Finding {
    let feature = Feature("page_flags", "medium pages, page by page (/proc/kpageflags)");
    let read = std::fs::File::open(root.path("/proc/kpageflags")).and_then(|mut file| {
        file.seek(SeekFrom::Start(0))?;
        file.read_exact(&mut [0; 8])
    });
    match read {
        Ok(()) => feature.works("flags were read"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            feature.never_here("the kernel was built without CONFIG_PROC_PAGE_MONITOR")
        }
        Err(error) => feature.not_here(format!("{error}"), "sudo pagetax doctor"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collapse_that_takes_a_right_is_remedied_by_the_right() {
        let refused = |errno| {
            let done = Err(io::Error::from_raw_os_error(errno));
            collapse_finding(done, true).enable.unwrap_or_default()
        };
        assert!(refused(libc::EPERM).contains("cap_sys_nice"));
        assert!(refused(libc::ENOMEM).contains("compact_memory"));
    }
}
