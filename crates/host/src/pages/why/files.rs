//! Causes of file mappings and shared memory. Pages of files are huge only if the page cache has them so.

use super::facts::Facts;
use super::{CauseEvidence, Claim, Piece};
use crate::pages::pagemap::{Mapping, Segment};

fn line(facts: &Facts, mapping: &Mapping) -> CauseEvidence {
    let range = format!("{:x}-{:x}", mapping.start.0, mapping.end.0);
    let offset = format!("offset {:x}, {}", mapping.offset_bytes, mapping.name);
    CauseEvidence::new(format!("/proc/{}/maps, {range}", facts.pid()), offset)
}

/// Claims private pages of a file, which cannot become huge pages.
pub(super) fn private(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    (piece.mapping.segment == Segment::Data).then_some(())?;
    Claim::certain(
        piece.inside,
        "private pages of a file cannot become huge pages",
        vec![line(facts, piece.mapping)],
    )
    .hint(format!("pagetax ppgsz -F -o data=2M -p {}, which moves a copy there", facts.pid()))
}

/// The mount of a path: its file system and its options.
struct Mount {
    kind: String,
    options: String,
}

/// Returns the mount of a mapped file, as the process sees it.
fn mount_of(facts: &Facts, mapping: &Mapping) -> Option<Mount> {
    let text = facts.root.text(&format!("/proc/{}/mountinfo", facts.pid())).ok()?;
    mount_in(&text, &mapping.name)
}

/// Finds the mount with the longest path that holds the file; of equal paths the last, which hides the
/// others.
fn mount_in(mountinfo: &str, file: &str) -> Option<Mount> {
    let parsed = mountinfo.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let point = left.split(' ').nth(4)?;
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?.to_string(), right.nth(1)?.to_string());
        let rest = file.strip_prefix(point.trim_end_matches('/'))?;
        rest.starts_with('/').then_some((point.len(), Mount { kind, options }))
    });
    parsed.max_by_key(|(length, _)| *length).map(|(_, mount)| mount)
}

/// Returns true for memory without a file system of its own: memfd, System V, MAP_SHARED | MAP_ANONYMOUS.
fn is_of_kernel(mapping: &Mapping) -> bool {
    ["/memfd:", "/SYSV", "/dev/zero"].iter().any(|part| mapping.name.starts_with(part))
}

/// Claims shared memory and tmpfs if no setting gives them huge pages.
pub(super) fn shared_memory(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let own = is_of_kernel(piece.mapping);
    if own {
        let text = facts.root.text(path).ok()?;
        let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'))?.0;
        ["never", "deny", "advise"].contains(&word).then_some(())?;
        let what = match word {
            "advise" => "shared memory gets huge pages on advice only",
            _ => "shared memory gets no huge pages on this system",
        };
        return Claim::certain(piece.inside, what, vec![CauseEvidence::new(path, text)]).hint(
            format!(
                "echo advise | sudo tee {path}; then madvise(MADV_HUGEPAGE) before the first touch"
            ),
        );
    }
    let mount = mount_of(facts, piece.mapping).filter(|mount| mount.kind == "tmpfs")?;
    let huge = mount.options.split(',').find_map(|option| option.strip_prefix("huge="));
    matches!(huge, None | Some("never" | "advise")).then_some(())?;
    let evidence = CauseEvidence::new(
        format!("/proc/{}/mountinfo", facts.pid()),
        format!("tmpfs {}", mount.options),
    );
    Claim::certain(
        piece.inside,
        "its tmpfs is mounted without huge pages",
        vec![line(facts, piece.mapping), evidence],
    )
    .hint("mount it with huge=within_size")
}

/// Claims a file whose address and place in the file differ modulo the huge page.
pub(super) fn unaligned(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let (mapping, huge) = (piece.mapping, facts.huge);
    let is_aligned =
        mapping.start.0.wrapping_sub(mapping.offset_bytes).is_multiple_of(huge.bytes());
    if is_aligned {
        return None;
    }
    let hint = match mapping.segment {
        Segment::Text => format!("pagetax ppgsz -F -o text=2M -p {}", facts.pid()),
        _ => format!("map it at an address that is its offset plus a multiple of {huge}"),
    };
    let what = format!("address and place in the file differ modulo {huge}");
    Claim::certain(piece.inside, what, vec![line(facts, mapping)]).hint(hint)
}

/// Claims a file that the page cache has on small pages.
pub(super) fn page_cache(facts: &Facts, piece: &Piece<'_>) -> Option<Claim> {
    let mapping = piece.mapping;
    let mount = mount_of(facts, mapping)?;
    let hint = match mapping.segment {
        Segment::Text => format!("pagetax ppgsz -F -o text=2M -p {}", facts.pid()),
        _ => "keep it on tmpfs with huge=within_size, or on a file system with large folios".into(),
    };
    let evidence = CauseEvidence::new(format!("/proc/{}/mountinfo", facts.pid()), mount.kind);
    Claim::possible(
        piece.inside,
        "the page cache has the file on small pages: read in small steps, or no large folios",
        vec![line(facts, mapping), evidence],
    )
    .hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTINFO: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
30 22 0:25 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,size=65536k,huge=advise
31 22 0:26 / /data rw - xfs /dev/vdb rw
32 22 0:27 / /data rw - tmpfs hidden rw,huge=always
";

    #[test]
    fn the_longest_mount_holds_a_file() {
        let of = |file| mount_in(MOUNTINFO, file).map(|mount| (mount.kind, mount.options));
        assert_eq!(of("/usr/bin/x").unwrap().0, "ext4");
        assert_eq!(of("/dev/shm/x").unwrap().1, "rw,size=65536k,huge=advise");
        assert_eq!(of("/dev/shmx/y").unwrap().0, "ext4");
        assert_eq!(of("/data/x").unwrap().0, "tmpfs", "the later mount hides the earlier");
        assert!(of("memfd:x").is_none());
    }
}
