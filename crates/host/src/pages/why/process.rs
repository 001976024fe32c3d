//! Causes that lie in how the process was started: prctl, preloaded libraries, settings of allocators.

use super::facts::Facts;
use super::{CauseEvidence, Claim, Piece};
use crate::launch::preload;
use crate::launch::program::{Kind, native};
use crate::pages::Mode;
use crate::pages::pagemap::{HugePageAdvice, Segment};
use crate::pages::tunables::{HUGETLB, tunable};
use std::path::Path;

/// Claims all memory of a process that forbids itself huge pages.
pub(super) fn forbidden(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    facts.forbidden.filter(|forbidden| *forbidden)?;
    let evidence = CauseEvidence::new(format!("/proc/{}/status", facts.pid()), "THP_enabled: 0");
    Claim::certain(
        piece.inside,
        "the process forbids itself huge pages (prctl PR_SET_THP_DISABLE)",
        vec![evidence],
    )
    .hint("start it without PR_SET_THP_DISABLE, which what starts it may have set and execve(2) keeps")
}

/// Libraries that change the pages of what they are preloaded into, by a part of their file names.
const PAGE_LIBRARIES: &[&str] =
    &["libpagetax_preload", "libhugetlbfs", "libjemalloc", "libmimalloc", "libtcmalloc"];

/// Returns the memory that a library or an allocator would have advised, had it worked.
fn unadvised(facts: &Facts, piece: &Piece<'_>) -> u64 {
    let is_malloc = matches!(piece.mapping.segment, Segment::Heap | Segment::Anon | Segment::Bss);
    let is_unadvised = piece.mapping.advice != Some(HugePageAdvice::Huge);
    if is_malloc && is_unadvised && facts.mode == Some(Mode::Madvise) { piece.inside } else { 0 }
}

/// Claims unadvised memory if LD_PRELOAD names a library that is not mapped.
pub(super) fn preload_failed(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let value = facts.variable(preload::VARIABLE)?;
    let names = value.split([' ', ':']).filter(|name| !name.is_empty());
    let base = |name: &str| name.rsplit('/').next().unwrap_or(name).to_string();
    let is_mapped = |name: &str| facts.mapped_files().any(|file| base(file) == base(name));
    let is_for_pages = |name: &&str| PAGE_LIBRARIES.iter().any(|part| name.contains(part));
    let name = names.into_iter().filter(is_for_pages).find(|name| !is_mapped(name))?;
    let (why, evidence) = why_not_loaded(facts, name);
    let evidence = [
        facts.shown_by_variable(preload::VARIABLE),
        CauseEvidence::new(format!("/proc/{}/maps", facts.pid()), format!("no {}", base(name))),
    ]
    .into_iter()
    .chain(evidence)
    .collect();
    let (bytes, what) = (unadvised(facts, piece), format!("{} was not loaded{why}", base(name)));
    let claim = match why.is_empty() {
        true => Claim::possible(bytes, what, evidence),
        false => Claim::certain(bytes, what, evidence),
    };
    claim.hint(facts.collapse_line())
}

/// Returns the reason why the loader did not load a library, and what shows it.
fn why_not_loaded(facts: &Facts, name: &str) -> (&'static str, Option<CauseEvidence>) {
    let exe = |value: &str| Some(CauseEvidence::new(format!("/proc/{}/exe", facts.pid()), value));
    if facts.is_secure == Ok(true) {
        let auxv = CauseEvidence::new(format!("/proc/{}/auxv", facts.pid()), "AT_SECURE 1");
        return (": the program is set-id or has capabilities", Some(auxv));
    }
    match facts.kind {
        Ok(Kind::StaticGlibc | Kind::Own) => return (": the program is static", exe("no loader")),
        Ok(Kind::OtherLoader) => {
            return (": the program's loader is not glibc's", exe("another loader"));
        }
        _ => {}
    }
    // The process may see another root than we do.
    let path = format!("/proc/{}/root{name}", facts.pid());
    if name.starts_with('/') && !Path::new(&path).exists() {
        return (": there is no such file", Some(CauseEvidence::new(name, "no such file")));
    }
    match crate::launch::program::architecture_of(Path::new(&path)) {
        Ok(found) if found != Some(native()) => (
            ": it is for another architecture",
            Some(CauseEvidence::new(name, format!("{found:?}"))),
        ),
        _ => ("", None),
    }
}

/// A setting that makes an allocator ask for huge pages.
struct AllocatorSetting {
    variable: &'static str,
    asks: fn(&str) -> bool,
    /// A part of the file names of libraries that obey it; empty for glibc's malloc.
    library: &'static str,
    /// A text in programs that contain the allocator.
    mark: &'static [u8],
}

const ALLOCATOR_SETTINGS: &[AllocatorSetting] = &[
    AllocatorSetting {
        variable: "GLIBC_TUNABLES",
        asks: |value| tunable(value, HUGETLB).is_some_and(|value| value != "0"),
        library: "",
        mark: HUGETLB.as_bytes(),
    },
    AllocatorSetting {
        variable: "MALLOC_CONF",
        asks: |value| value.contains("thp:always"),
        library: "/libjemalloc",
        mark: b"opt.metadata_thp",
    },
    AllocatorSetting {
        variable: "MIMALLOC_ALLOW_LARGE_OS_PAGES",
        asks: |value| value != "0",
        library: "/libmimalloc",
        mark: b"mimalloc",
    },
    AllocatorSetting {
        variable: "MPSSHEAP",
        asks: |value| value != "0",
        library: "/libpagetax_preload",
        mark: b"MPSSHEAP",
    },
];

/// Claims unadvised memory if the environment asks an allocator for huge pages that the program does not use.
pub(super) fn allocator_ignored(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let set =
        |setting: &&AllocatorSetting| facts.variable(setting.variable).is_some_and(setting.asks);
    let (setting, (what, evidence)) = ALLOCATOR_SETTINGS
        .iter()
        .filter(set)
        .find_map(|setting| Some((setting, why_ignored(facts, setting)?)))?;
    let evidence = vec![facts.shown_by_variable(setting.variable), evidence];
    Claim::certain(
        unadvised(facts, piece),
        format!("{} is ignored: {what}", setting.variable),
        evidence,
    )
    .hint(facts.collapse_line())
}

fn why_ignored(facts: &Facts, setting: &AllocatorSetting) -> Option<(String, CauseEvidence)> {
    let pid = facts.pid();
    let exe = format!("/proc/{pid}/exe");
    if facts.is_secure == Ok(true) {
        let evidence = CauseEvidence::new(format!("/proc/{pid}/auxv"), "AT_SECURE 1");
        return Some(("the program is set-id or has capabilities".into(), evidence));
    }
    let maps = |part: &str| facts.mapped_files().find(|file| file.contains(part));
    if !setting.library.is_empty() {
        let is_inside = maps(setting.library).is_some() || contains(&exe, setting.mark);
        return (!is_inside).then(|| {
            let name = setting.library.trim_start_matches('/');
            let evidence = CauseEvidence::new(format!("/proc/{pid}/maps"), format!("no {name}"));
            (format!("the program does not use {name}"), evidence)
        });
    }
    let other = ["/libjemalloc", "/libtcmalloc", "/libmimalloc"].into_iter().find_map(maps);
    match facts.kind {
        Ok(kind @ (Kind::Own | Kind::OtherLoader)) => {
            Some((format!("it is {}", kind.words()), CauseEvidence::new(exe, kind.words())))
        }
        Ok(_) if other.is_some() => {
            let file = other.unwrap_or_default();
            let evidence = CauseEvidence::new(format!("/proc/{pid}/maps"), file);
            Some(("another library takes malloc's place".into(), evidence))
        }
        // glibc before 2.35 does not know the tunable, so its loader does not contain the name.
        Ok(Kind::DynamicGlibc) => {
            let loader = maps("/ld-linux")?.to_string();
            let path = format!("/proc/{pid}/root{loader}");
            let knows = std::fs::read(&path).ok().map(|bytes| holds(&bytes, setting.mark))?;
            let evidence = CauseEvidence::new(loader, "the tunable is not known");
            (!knows).then(|| ("its glibc is older than 2.35".into(), evidence))
        }
        _ => None,
    }
}

fn contains(path: &str, text: &[u8]) -> bool {
    std::fs::read(path).is_ok_and(|bytes| holds(&bytes, text))
}

fn holds(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}
