//! Causes that lie in the memory itself: its place, its size, its advice, and who shares it.

use super::facts::Facts;
use super::{CauseEvidence, Claim, Piece};
use crate::pages::pagemap::{HugePageAdvice, Mapping};
use crate::pages::verdict::shared_bytes;
use pagetax_core::units::Bytes;

/// Returns the source of evidence about a mapping.
fn smaps(facts: &Facts, mapping: &Mapping) -> String {
    format!("/proc/{}/smaps, {:x}-{:x}", facts.pid(), mapping.start.0, mapping.end.0)
}

/// Claims a mapping that is smaller than a huge page.
pub(super) fn too_small(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let (bytes, huge) = (piece.mapping.bytes(), facts.huge);
    if bytes >= huge.bytes() {
        return None;
    }
    let evidence =
        CauseEvidence::new(smaps(facts, piece.mapping), format!("Size: {}", Bytes(bytes)));
    Claim::certain(piece.outside, format!("its mappings are smaller than {huge}"), vec![evidence])
        .hint(format!("allocate in larger pieces; for malloc: {}", facts.start_line()))
}

/// Claims bytes outside the whole blocks of their mapping.
pub(super) fn unaligned(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let (mapping, huge) = (piece.mapping, facts.huge);
    let first = mapping.start.0.next_multiple_of(huge.bytes());
    let has_block = first + huge.bytes() <= mapping.end.0;
    let what = match has_block {
        true => format!("the ends of its mappings are not aligned to {huge}"),
        false => format!("no aligned block of {huge} fits into its mappings"),
    };
    let evidence = CauseEvidence::new(
        format!("/proc/{}/maps", facts.pid()),
        format!("{:x}-{:x}", mapping.start.0, mapping.end.0),
    );
    Claim::certain(piece.outside, what, vec![evidence]).hint(format!(
        "map {huge} more and begin at a multiple of {huge}, as aligned_alloc(3) does"
    ))
}

/// Claims memory for which the program refuses huge pages (MADV_NOHUGEPAGE).
pub(super) fn refused(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    (piece.mapping.advice == Some(HugePageAdvice::NoHuge)).then_some(())?;
    let evidence = CauseEvidence::new(smaps(facts, piece.mapping), "VmFlags: nh");
    Claim::certain(
        piece.inside,
        "the program refuses huge pages here (MADV_NOHUGEPAGE, or a thread's stack)",
        vec![evidence],
    )
    .hint("remove the program's madvise(MADV_NOHUGEPAGE), or its option that sets it")
}

/// Claims memory whose faults a userfaultfd handles, page by page.
pub(super) fn user_faults(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    piece.mapping.has_user_faults.then_some(())?;
    let evidence = CauseEvidence::new(smaps(facts, piece.mapping), "VmFlags: um, uw or ui");
    Claim::certain(
        piece.inside,
        "a userfaultfd handles the faults here, page by page",
        vec![evidence],
    )
    .hint("none while it does: `pagetax remote`, snapshots and migration of virtual machines do so")
}

/// Claims memory that KSM has merged, or may have.
pub(super) fn merged(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    const HINT: &str = "remove the program's madvise(MADV_MERGEABLE) or prctl(PR_SET_MEMORY_MERGE)";
    piece.mapping.mergeable.then_some(())?;
    let flag = CauseEvidence::new(smaps(facts, piece.mapping), "VmFlags: mg");
    let run = facts.root.number("/sys/kernel/mm/ksm/run").ok()?;
    let running = CauseEvidence::new("/sys/kernel/mm/ksm/run", run.to_string());
    match piece.mapping.merged_bytes() {
        Some(0) => None,
        // One merged page keeps its whole block on base pages.
        Some(merged) => {
            let kilobytes = format!("KSM: {} kB", merged >> 10);
            let evidence =
                vec![CauseEvidence::new(smaps(facts, piece.mapping), kilobytes), running];
            let what = "KSM has merged its pages with equal ones";
            Claim::certain(piece.inside, what, evidence).hint(HINT)
        }
        None if run == 1 => {
            let what = "KSM may have merged its pages with equal ones";
            Claim::possible(piece.inside, what, vec![flag, running]).hint(HINT)
        }
        None => None,
    }
}

/// Claims memory that a fork shares or has copied: copy-on-write makes base pages.
pub(super) fn copied(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let hint = match facts.collapse_line() {
        line if line.contains(" -p ") => line.replace(" -p ", " --follow -p "),
        line => line,
    };
    let shared = shared_bytes(&facts.map, piece.mapping, facts.huge);
    if shared > 0 {
        let pages = shared / facts.map.base_page.bytes();
        let evidence = CauseEvidence::new(
            format!("/proc/{}/pagemap, bit 56", facts.pid()),
            format!("{pages} pages of another process too"),
        );
        let what =
            "its pages are shared with a forked process until one of them writes (copy-on-write)";
        return Claim::certain(piece.inside.min(shared), what, vec![evidence]).hint(hint);
    }
    let start = piece.mapping.start.0;
    let (relative, _) = facts.relatives.iter().find(|(_, starts)| starts.contains(&start))?;
    let evidence = CauseEvidence::new(
        format!("/proc/{relative}/maps"),
        format!("{start:x}, as in {}, and the same program", facts.pid()),
    );
    Claim::possible(
        piece.inside,
        "it was copied after a fork: copy-on-write makes base pages",
        vec![evidence],
    )
    .hint(hint)
}

/// Claims memory that the kernel does not consider, for a reason that no file shows.
pub(super) fn not_eligible(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    (piece.mapping.thp_eligible == Some(false)).then_some(())?;
    let evidence = CauseEvidence::new(smaps(facts, piece.mapping), "THPeligible: 0");
    Claim::possible(
        piece.inside,
        "the kernel does not consider it: prctl(PR_THP_DISABLE_EXCEPT_ADVISED), or special memory",
        vec![evidence],
    )
    .hint(format!("have it advised: {}", facts.start_line()))
}
