//! Why a process has no huge pages: the causes, each with what shows it and the line that cures it.
//!
//! [`CAUSES`] is the table of causes, in the order in which they claim memory: what the process or the system
//! forbids comes first, and what merely did not happen yet comes last. Each byte on small pages has one
//! cause at most.
//!
//! Invariants: a cause is certain only if a file of the kernel shows it for this memory now. What cannot be
//! read is listed as missing, and nothing is concluded from it. A process that has its huge pages gets no
//! cause.

mod facts;
mod files;
mod memory;
mod process;
mod system;
mod untouched;

use crate::pages::pagemap::{Mapping, PageMapError, Segment};
use crate::pages::verdict::small_bytes;
use facts::Facts;
use pagetax_core::counter::{Unit, UnitReading};
use pagetax_core::document::Document;
use pagetax_core::units::{Bytes, PageSize};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// A process with this share of its anonymous memory on huge pages has them: there is nothing to explain.
const ENOUGH: f64 = 0.9;
/// A cause that explains a smaller share of the small pages is left out.
const SHARE_MIN: f64 = 0.05;

/// The answers about some processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HugePageAnswers {
    /// The processes, in the order of operands.
    pub processes: Vec<HugePageAnswer>,
}

impl Document for HugePageAnswers {
    const KIND: &'static str = "huge_page_causes";
}

/// The answer about one process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HugePageAnswer {
    /// The process ID, which may have been reused since.
    pub pid: u32,
    /// The command line of the process.
    pub command: String,
    /// The answer in a sentence or two.
    pub summary: String,
    /// The resident bytes of anonymous memory, with pages of a hugetlb pool.
    pub anon_bytes: u64,
    /// The part of `anon_bytes` that is on huge pages.
    pub huge_bytes: u64,
    /// The causes, those that explain the most bytes first. None if the process has its huge pages.
    pub causes: Vec<HugePageCause>,
    /// The bytes of anonymous memory on small pages that no listed cause explains.
    pub unexplained_bytes: u64,
    /// The bytes of zeros on huge pages: memory that was probably never touched.
    pub untouched: UnitReading,
    /// The facts that could not be read; no cause rests on them.
    pub missing: Vec<MissingFact>,
}

/// A cause for which memory is on small pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HugePageCause {
    /// The cause's id: stable, in snake_case.
    pub id: Cow<'static, str>,
    /// The cause in a few words.
    pub what: String,
    /// The strength of the evidence.
    pub certainty: Certainty,
    /// The bytes on small pages that it explains.
    pub bytes: u64,
    /// The files that show it, with their values.
    pub evidence: Vec<CauseEvidence>,
    /// The line that cures it.
    pub hint: String,
}

/// The strength of the evidence for a cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Certainty {
    /// The kernel shows it for this memory.
    Certain,
    /// It fits all that is known, and so may others.
    Possible,
}

impl std::fmt::Display for Certainty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Certainty::Certain => "certain",
            Certainty::Possible => "possible",
        })
    }
}

/// A file and the value that shows a cause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CauseEvidence {
    /// The file, and the field in it.
    pub source: String,
    /// The value that was read.
    pub value: String,
}

impl CauseEvidence {
    fn new(source: impl Into<String>, value: impl Into<String>) -> CauseEvidence {
        CauseEvidence { source: source.into(), value: value.into() }
    }
}

/// A fact that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MissingFact {
    /// The file, or the question that it answers.
    pub what: String,
    /// The reason.
    pub why: String,
}

/// A row of the table of causes.
struct KnownCause {
    id: &'static str,
    find: fn(&Facts, &Piece<'_>) -> Option<Claim>,
}

/// The small pages of one mapping that still lack a cause.
struct Piece<'a> {
    mapping: &'a Mapping,
    /// Resident bytes on small pages inside whole blocks of the huge page.
    inside: u64,
    /// Resident bytes on small pages outside them.
    outside: u64,
}

/// Bytes of a piece that a cause explains.
struct Claim {
    bytes: u64,
    what: String,
    certainty: Certainty,
    evidence: Vec<CauseEvidence>,
    hint: String,
}

impl Claim {
    fn certain(bytes: u64, what: impl Into<String>, evidence: Vec<CauseEvidence>) -> Claim {
        let (certainty, what, hint) = (Certainty::Certain, what.into(), String::new());
        Claim { bytes, what, certainty, evidence, hint }
    }

    fn possible(bytes: u64, what: impl Into<String>, evidence: Vec<CauseEvidence>) -> Claim {
        Claim { certainty: Certainty::Possible, ..Claim::certain(bytes, what, evidence) }
    }

    fn hint(self, hint: impl Into<String>) -> Option<Claim> {
        Some(Claim { hint: hint.into(), ..self }).filter(|claim| claim.bytes > 0)
    }
}

/// The causes, in the order in which they claim memory.
const CAUSES: &[KnownCause] = &[
    KnownCause { id: "no_thp", find: system::no_thp },
    KnownCause { id: "no_mapping_of_2m", find: memory::too_small },
    KnownCause { id: "unaligned", find: memory::unaligned },
    KnownCause { id: "hugetlb_pool", find: system::hugetlb_pool },
    KnownCause { id: "prctl", find: process::forbidden },
    KnownCause { id: "no_huge_page_advice", find: memory::refused },
    KnownCause { id: "user_faults", find: memory::user_faults },
    KnownCause { id: "mthp_only", find: system::smaller_only },
    KnownCause { id: "switched_off", find: system::switched_off },
    KnownCause { id: "preload_failed", find: process::preload_failed },
    KnownCause { id: "allocator_setting_ignored", find: process::allocator_ignored },
    KnownCause { id: "advice_only", find: system::advice_only },
    KnownCause { id: "merged", find: memory::merged },
    KnownCause { id: "copy_on_write", find: memory::copied },
    KnownCause { id: "cgroup_limit", find: system::cgroup_limit },
    KnownCause { id: "no_free_block", find: system::too_few_free_blocks },
    KnownCause { id: "not_eligible", find: memory::not_eligible },
    KnownCause { id: "khugepaged", find: system::khugepaged },
];

/// The causes of file mappings and shared memory.
const FILE_CAUSES: &[KnownCause] = &[
    KnownCause { id: "private_file", find: files::private },
    KnownCause { id: "shared_memory", find: files::shared_memory },
    KnownCause { id: "file_unaligned", find: files::unaligned },
    KnownCause { id: "page_cache", find: files::page_cache },
];

/// Explains a process's small pages.
///
/// # Errors
/// Fails if the process has gone, has no memory, or may not be looked at.
pub fn explain(pid: u32) -> Result<HugePageAnswer, PageMapError> {
    let map = crate::pages::pagemap::read_huge(pid)?;
    Ok(answer(&Facts::read(map)))
}

fn answer(facts: &Facts) -> HugePageAnswer {
    let anonymous: Vec<&Mapping> = facts.map.mappings.iter().filter(|m| is_anonymous(m)).collect();
    let files: Vec<&Mapping> = facts.map.mappings.iter().filter(|m| is_of_file(m)).collect();
    let anon_bytes: u64 = anonymous.iter().map(|m| m.resident_bytes()).sum();
    let pieces = anonymous.iter().map(|mapping| Piece::of(mapping, facts.huge));
    let (mut causes, small) = explained(facts, pieces, CAUSES);
    let huge_bytes = anon_bytes.saturating_sub(small);
    let has_huge_pages = huge_bytes as f64 >= anon_bytes as f64 * ENOUGH;
    causes.retain(|cause| !has_huge_pages && cause.bytes as f64 >= small as f64 * SHARE_MIN);
    let explained_bytes: u64 = causes.iter().map(|cause| cause.bytes).sum();
    let of_anonymous = causes.first().cloned();
    // What lies outside whole blocks of a file could never be huge.
    let pieces = files.iter().map(|file| Piece { outside: 0, ..Piece::of(file, facts.huge) });
    let (mut of_files, _) = explained(facts, pieces, FILE_CAUSES);
    let all = anon_bytes + files.iter().map(|m| m.resident_bytes()).sum::<u64>();
    let matters = |cause: &HugePageCause| {
        cause.bytes >= facts.huge.bytes() && cause.bytes as f64 >= all as f64 * SHARE_MIN
    };
    of_files.retain(matters);
    let summary =
        summary((anon_bytes, huge_bytes, has_huge_pages), of_anonymous.as_ref(), of_files.first());
    causes.extend(of_files);
    causes.sort_by_key(|cause| std::cmp::Reverse(cause.bytes));
    HugePageAnswer {
        pid: facts.map.pid,
        command: facts.map.command.clone(),
        summary,
        anon_bytes,
        huge_bytes,
        unexplained_bytes: if has_huge_pages { 0 } else { small - explained_bytes },
        causes,
        untouched: UnitReading::new(Unit::Bytes, untouched::read(facts)),
        missing: facts.missing(),
    }
}

/// Returns true for memory that transparent huge pages of anonymous memory could back.
fn is_anonymous(mapping: &Mapping) -> bool {
    matches!(mapping.segment, Segment::Heap | Segment::Bss | Segment::Stack | Segment::Anon)
}

fn is_of_file(mapping: &Mapping) -> bool {
    let of_file = matches!(
        mapping.segment,
        Segment::Text | Segment::ReadOnly | Segment::Data | Segment::Shared
    );
    of_file && mapping.hugetlb.is_none()
}

/// Distributes the small pages of some mappings over causes. Returns these, largest first, and the bytes on
/// small pages.
fn explained<'a>(
    facts: &Facts,
    pieces: impl Iterator<Item = Piece<'a>>,
    table: &[KnownCause],
) -> (Vec<HugePageCause>, u64) {
    let (mut causes, mut small): (Vec<HugePageCause>, u64) = (Vec::new(), 0);
    // The largest mapping of a cause comes first, and gives it its words and evidence.
    let mut pieces: Vec<Piece<'_>> = pieces.collect();
    pieces.sort_by_key(|piece| std::cmp::Reverse(piece.inside + piece.outside));
    for mut piece in pieces {
        small += piece.inside + piece.outside;
        for cause in table {
            if piece.inside + piece.outside == 0 {
                break;
            }
            let Some(claim) = (cause.find)(facts, &piece) else { continue };
            let bytes = piece.take(claim.bytes);
            let same = |known: &&mut HugePageCause| {
                known.id == cause.id && known.certainty == claim.certainty
            };
            match causes.iter_mut().find(same) {
                Some(known) => known.bytes += bytes,
                None => causes.push(HugePageCause {
                    id: cause.id.into(),
                    what: claim.what,
                    certainty: claim.certainty,
                    bytes,
                    evidence: claim.evidence,
                    hint: claim.hint,
                }),
            }
        }
    }
    causes.sort_by_key(|cause| std::cmp::Reverse(cause.bytes));
    (causes, small)
}

impl Piece<'_> {
    fn of(mapping: &Mapping, huge: PageSize) -> Piece<'_> {
        let (inside, outside) = match mapping.hugetlb {
            Some(_) => (0, 0),
            None => small_bytes(mapping, huge),
        };
        Piece { mapping, inside, outside }
    }

    /// Takes bytes outside whole blocks first: only causes of those claim before they are gone.
    fn take(&mut self, bytes: u64) -> u64 {
        let outside = bytes.min(self.outside);
        let inside = (bytes - outside).min(self.inside);
        self.outside -= outside;
        self.inside -= inside;
        outside + inside
    }
}

fn summary(
    (all, huge, has_huge_pages): (u64, u64, bool),
    of_anonymous: Option<&HugePageCause>,
    of_files: Option<&HugePageCause>,
) -> String {
    // Rounded down: 100 % is all of it.
    let percent = (u128::from(huge) * 100).checked_div(u128::from(all));
    let share = percent.map_or("It has no anonymous memory.".into(), |percent| {
        let lead = if has_huge_pages { "It has its huge pages: " } else { "" };
        let (huge, all) = (Bytes(huge), Bytes(all));
        format!("{lead}{huge} of its {all} of anonymous memory is on huge pages ({percent} %).")
    });
    let because = |cause: &HugePageCause, of_what: &str| {
        let verb = match cause.certainty {
            Certainty::Certain => "is",
            Certainty::Possible => "may be",
        };
        format!(" For {}{of_what} the cause {verb}: {}.", Bytes(cause.bytes), cause.what)
    };
    let bytes = |cause: Option<&HugePageCause>| cause.map_or(0, |cause| cause.bytes);
    share
        + &match (of_anonymous, of_files) {
            (_, Some(cause)) if bytes(of_files) > bytes(of_anonymous) => {
                because(cause, " of files and shared memory")
            }
            (Some(cause), _) => because(cause, ""),
            _ => String::new(),
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::pagemap;
    use crate::sys::mapping::{OwnedMapping as Memory, Request, Source};
    use pagetax_core::units::VirtAddr;

    /// Returns the answer about a piece of this process's memory alone.
    fn answer_about(memory: &Memory) -> HugePageAnswer {
        let mut map = pagemap::read_huge(std::process::id()).unwrap();
        let start = memory.address();
        map.cut(VirtAddr(start), VirtAddr(start + memory.len() as u64));
        answer(&Facts::read(map))
    }

    #[test]
    fn each_byte_has_one_cause_at_most() {
        let huge = 2 << 20;
        let len = 4 * huge;
        let memory =
            Memory::new(Request { source: Source::Anon, len, align: huge, hugetlb: None }).unwrap();
        memory.advise(libc::MADV_NOHUGEPAGE).unwrap();
        (0..len as u64 >> 12).for_each(|page| memory.store(page << 12, 1));
        let found = answer_about(&memory);
        assert_eq!((found.anon_bytes, found.huge_bytes), (len as u64, 0), "{found:#?}");
        let ids: Vec<_> = found.causes.iter().map(|cause| &*cause.id).collect();
        assert_eq!(ids, ["no_huge_page_advice"], "{found:#?}");
        assert_eq!((found.causes[0].bytes, found.unexplained_bytes), (len as u64, 0));
        assert_eq!(found.causes[0].certainty, Certainty::Certain);
    }

    #[test]
    fn blocks_that_became_free_later_explain_no_more_than_they_hold() {
        let map = pagemap::read_huge(std::process::id()).unwrap();
        let mapping = map.mappings[0].clone();
        let piece = Piece { mapping: &mapping, inside: 4 << 21, outside: 0 };
        let mut facts = Facts::read(map);
        let mut claimed = |free| {
            facts.free_blocks = Ok(free);
            system::too_few_free_blocks(&facts, &piece).map_or(0, |claim| claim.bytes)
        };
        assert_eq!([0, 1, 3, 4, 5].map(|free| claimed(free) >> 21), [4, 3, 1, 0, 0]);
    }

    #[test]
    fn ids_are_unique_and_empty_memory_has_no_cause() {
        let ids: std::collections::BTreeSet<_> =
            CAUSES.iter().chain(FILE_CAUSES).map(|cause| cause.id).collect();
        assert_eq!(ids.len(), CAUSES.len() + FILE_CAUSES.len());
        let request = Request { source: Source::Anon, len: 8 << 20, align: 2 << 20, hugetlb: None };
        let found = answer_about(&Memory::new(request).unwrap());
        assert_eq!((found.anon_bytes, found.causes.len()), (0, 0), "{found:#?}");
        assert_eq!(found.summary, "It has no anonymous memory.");
    }

    #[test]
    fn a_possible_cause_is_not_stated_as_a_fact() {
        let cause = |certainty| HugePageCause {
            id: "x".into(),
            what: "x was not done".into(),
            certainty,
            bytes: 3 << 20,
            evidence: Vec::new(),
            hint: "do x".into(),
        };
        let memory = (4 << 20, 1 << 20, false);
        let of = |certainty| summary(memory, Some(&cause(certainty)), None);
        assert!(of(Certainty::Certain).ends_with("For 3M the cause is: x was not done."));
        assert!(of(Certainty::Possible).contains("(25 %). For 3M the cause may be: x"));
        let of_files = summary(memory, None, Some(&cause(Certainty::Certain)));
        assert!(of_files.contains("For 3M of files and shared memory the cause is"), "{of_files}");
        let all = summary((4 << 20, (4 << 20) - 4096, true), None, None);
        assert!(
            all.starts_with("It has its huge pages: 4.0M of its 4M") && all.ends_with("(99 %).")
        );
    }
}
