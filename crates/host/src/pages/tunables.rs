//! GLIBC_TUNABLES: a colon-separated list of `name=value`, read by the loader of each program.

/// The variable of the environment.
pub const GLIBC_TUNABLES: &str = "GLIBC_TUNABLES";

/// The tunable of glibc's malloc: 0 base pages, 1 advice for transparent huge pages, 2 hugetlb, or
/// a size of hugetlb pages in bytes. Source: the glibc manual, "Memory Allocation Tunables".
pub const HUGETLB: &str = "glibc.malloc.hugetlb";

/// The tunable for the size from which a chunk is a mapping of its own.
pub const MMAP_THRESHOLD: &str = "glibc.malloc.mmap_threshold";

/// The tunable for the free memory at the top of the heap from which on it is given back.
pub const TRIM_THRESHOLD: &str = "glibc.malloc.trim_threshold";

/// The tunable for the memory that the heap grows by beyond what is needed.
pub const TOP_PAD: &str = "glibc.malloc.top_pad";

/// Returns `existing` with `name` set to `value`; all other tunables stay as they are.
pub fn with_tunable(existing: Option<&str>, name: &str, value: &str) -> String {
    let is_other = |entry: &&str| {
        !entry.is_empty() && entry.split('=').next().is_none_or(|known| known.trim() != name)
    };
    let set = format!("{name}={value}");
    let kept = existing.unwrap_or("").split(':').filter(is_other);
    kept.chain([set.as_str()]).collect::<Vec<_>>().join(":")
}

/// Returns the value of `name` in `existing`; of several the last, as the loader does.
pub fn tunable<'a>(existing: &'a str, name: &str) -> Option<&'a str> {
    existing
        .split(':')
        .filter_map(|entry| entry.split_once('='))
        .filter(|(known, _)| known.trim() == name)
        .map(|(_, value)| value)
        .next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_there_is_kept() {
        assert_eq!(with_tunable(None, HUGETLB, "1"), "glibc.malloc.hugetlb=1");
        assert_eq!(
            with_tunable(Some("glibc.malloc.arena_max=1:"), HUGETLB, "1"),
            "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"
        );
        assert_eq!(
            with_tunable(Some("glibc.malloc.hugetlb=2:glibc.cpu.x86_shstk=off"), HUGETLB, "0"),
            "glibc.cpu.x86_shstk=off:glibc.malloc.hugetlb=0"
        );
    }

    #[test]
    fn values_are_found() {
        assert_eq!(tunable("a=1:glibc.malloc.hugetlb=2", HUGETLB), Some("2"));
        assert_eq!(tunable("a=1", HUGETLB), None);
    }
}
