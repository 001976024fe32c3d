//! The second-level data TLBs of known CPUs, to mark on miss curves. Source: what the CPUs themselves report,
//! in the dumps of <https://github.com/InstLatx64/InstLatx64> (2026): CPUID leaf 0x18 of Intel's (before Ice
//! Lake leaf 2), 0x8000_0006 of AMD's.

use pagetax_core::units::PageSize;
use serde::{Deserialize, Serialize};

/// A second-level TLB for pages of one size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KnownTlb {
    /// The CPUs that have it.
    pub cpu: String,
    /// The page size in bytes.
    pub page_bytes: u64,
    /// The translations of such pages that it holds at most.
    pub entries: u64,
    /// Accesses that a fully associative TLB of this size could not translate.
    pub tlb_miss_count: u64,
    /// The place where the entries are found.
    pub source: String,
}

/// A family of CPUs, its entries for pages of 4K and of 2M, and the source. From Ice Lake on, half of Intel's
/// entries take pages of 4K and 1G only.
const KNOWN: [(&str, u64, u64, &str); 5] = [
    ("Intel Cascade Lake", 1536, 1536, "CPUID leaf 2: descriptor C3"),
    ("Intel Ice Lake-SP", 2048, 1024, "CPUID leaf 18 of a Xeon Gold 6330"),
    ("Intel Sapphire Rapids", 2048, 1024, "CPUID leaf 18 of a Xeon w7-2475X"),
    ("AMD Zen 2 and 3", 2048, 2048, "CPUID leaf 80000006 of an EPYC 7742 and a 7713"),
    ("AMD Zen 4", 3072, 3072, "CPUID leaf 80000006 of an EPYC 9654"),
];

/// Returns the TLBs for pages of this size, with the misses for their entries. There are none where no source
/// gives the entries.
pub fn known_tlbs(size: PageSize, misses: impl Fn(u64) -> u64) -> Vec<KnownTlb> {
    let known = KNOWN.iter().filter_map(|(cpu, of_4k, of_2m, source)| {
        let entries = match size {
            PageSize::K4 => *of_4k,
            PageSize::M2 => *of_2m,
            _ => return None,
        };
        let source = format!("{source}, in InstLatx64's dumps");
        let (cpu, tlb_miss_count) = ((*cpu).into(), misses(entries));
        Some(KnownTlb { cpu, page_bytes: size.bytes(), entries, tlb_miss_count, source })
    });
    known.collect()
}
