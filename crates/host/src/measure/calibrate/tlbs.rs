//! The TLBs of this CPU, as the CPUID instruction describes them. A hypervisor may hide them, or the unit in
//! which they are given: a guest on Zen 5 was met that does not see the bit L2TlbSIzeX32.
//!
//! Sources: Intel's manual, volume 2, CPUID, leaf 18H; AMD's manual, volume 3, functions 1 (family),
//! 8000_0005, 8000_0006 and 8000_0021. The CPUs of the tests: their registers in public lists of CPUID
//! (InstLatx64).

use crate::sys::cpuid::{Registers, cpuid};
use pagetax_core::calibration::{TlbKind, TlbUnit};

/// The family of AMD's CPUs, Zen 5, from which on the second level is given in units of 32 entries.
const FAMILY_OF_UNITS: u32 = 0x1a;
const K4: u64 = 4 << 10;
const M2: u64 = 2 << 20;
const M4: u64 = 4 << 20;
const G1: u64 = 1 << 30;

/// Returns the TLBs; none on a CPU that does not describe them.
pub(super) fn by_cpuid() -> Vec<TlbUnit> {
    let [highest, ..] = cpuid(0, 0);
    if highest >= 0x18 {
        let [last, ..] = cpuid(0x18, 0);
        // More would be nonsense: a CPU has some ten.
        let of_intel = intel((0..=last.min(31)).map(|part| cpuid(0x18, part)));
        if !of_intel.is_empty() {
            return of_intel;
        }
    }
    let [extended, ..] = cpuid(0x8000_0000, 0);
    let function = |number| match extended >= number {
        true => cpuid(number, 0),
        false => [0; 4],
    };
    let [features, ..] = function(0x8000_0021);
    let is_in_units = features >> 14 & 1 == 1 || family(cpuid(1, 0)) >= FAMILY_OF_UNITS;
    amd(function(0x8000_0005), function(0x8000_0006), is_in_units)
}

/// Returns the family that function 1 describes.
fn family([version, ..]: Registers) -> u32 {
    match version >> 8 & 0xf {
        0xf => 0xf + (version >> 20 & 0xff),
        base => base,
    }
}

fn intel(parts: impl Iterator<Item = Registers>) -> Vec<TlbUnit> {
    let unit = |[_, ebx, sets, edx]: Registers| {
        let kind = match edx & 0x1f {
            1 => TlbKind::Data,
            2 => TlbKind::Instruction,
            3 => TlbKind::Unified,
            4 => TlbKind::Load,
            5 => TlbKind::Store,
            _ => return None,
        };
        let sizes = [K4, M2, M4, G1].into_iter().enumerate();
        let page_bytes = sizes.filter(|(bit, _)| ebx >> bit & 1 == 1).map(|(_, size)| size);
        let (ways, is_full) = (ebx >> 16, edx >> 8 & 1 == 1);
        Some(TlbUnit {
            kind,
            level: edx >> 5 & 7,
            page_bytes: page_bytes.collect(),
            entries: ways.checked_mul(sets)?,
            ways: (!is_full).then_some(ways),
        })
    };
    parts.filter_map(unit).filter(|unit| unit.entries > 0).collect()
}

fn amd(
    [l1_huge, l1_base, ..]: Registers,
    [l2_huge, l2_base, ..]: Registers,
    is_in_units: bool,
) -> Vec<TlbUnit> {
    // From Zen 5 on, 12 bits are too few for the second level.
    let l2_unit = if is_in_units { 32 } else { 1 };
    let first = |page: u64, kind: TlbKind, bits: u32| {
        let ways = match bits >> 8 & 0xff {
            0xff => None,
            ways => Some(ways),
        };
        TlbUnit { kind, level: 1, page_bytes: vec![page], entries: bits & 0xff, ways }
    };
    let second = |page: u64, kind: TlbKind, bits: u32| {
        let ways = match bits >> 12 & 0xf {
            ways @ 1..=4 => Some(ways),
            5 => Some(6),
            6 => Some(8),
            8 => Some(16),
            10 => Some(32),
            11 => Some(48),
            12 => Some(64),
            13 => Some(96),
            14 => Some(128),
            _ => None,
        };
        TlbUnit { kind, level: 2, page_bytes: vec![page], entries: (bits & 0xfff) * l2_unit, ways }
    };
    // The data side is the upper half of each register, the larger associativity first; in level 1, it is
    // the byte above.
    let [data, code] = [TlbKind::Data, TlbKind::Instruction];
    let of_first =
        |page, bits: u32| [first(page, data, bits >> 16), first(page, code, bits & 0xffff)];
    let of_second =
        |page, bits: u32| [second(page, data, bits >> 16), second(page, code, bits & 0xffff)];
    let all = [
        of_first(K4, l1_base),
        of_first(M2, l1_huge),
        of_second(K4, l2_base),
        of_second(M2, l2_huge),
    ];
    all.into_iter().flatten().filter(|unit| unit.entries > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amd_describes_both_levels() {
        // EPYCs of Zen 3, 4 and 5.
        let milan = amd(
            [0xff40_ff40, 0xff40_ff40, 0x2008_0140, 0x2008_0140],
            [0x4800_2200, 0x6800_4200, 0x0200_6140, 0x0800_9140],
            false,
        );
        let genoa = amd(
            [0xff48_ff40, 0xff48_ff40, 0x2008_0140, 0x2008_0140],
            [0x5c00_2200, 0x6c00_4200, 0x0400_6140, 0x0c00_9140],
            false,
        );
        let turin = amd(
            [0xff60_ff40, 0xff60_ff40, 0x300c_0140, 0x2008_0140],
            [0x4080_2040, 0x6080_4040, 0x0400_8140, 0x0800_9140],
            true,
        );
        let sizes = |found: &[TlbUnit]| {
            let of = |(kind, level, page): (TlbKind, u32, u64)| {
                let is_it = |u: &&TlbUnit| {
                    (u.kind, u.level) == (kind, level) && u.page_bytes.contains(&page)
                };
                found.iter().find(is_it).map(|u| (u.entries, u.ways)).unwrap()
            };
            [
                (TlbKind::Data, 1, K4),
                (TlbKind::Instruction, 1, M2),
                (TlbKind::Data, 2, K4),
                (TlbKind::Data, 2, M2),
                (TlbKind::Instruction, 2, K4),
            ]
            .map(of)
        };
        let (full, of) = (None, Some);
        let first = |data| [(data, full), (64, full)];
        let all = |data, second: [(u32, Option<u32>); 3]| [&first(data)[..], &second[..]].concat();
        let of_milan = [(2048, of(8)), (2048, of(4)), (512, of(4))];
        assert_eq!(sizes(&milan)[..], all(64, of_milan));
        let of_genoa = [(3072, of(8)), (3072, of(6)), (512, of(4))];
        assert_eq!(sizes(&genoa)[..], all(72, of_genoa));
        let of_turin = [(4096, of(8)), (4096, of(4)), (2048, of(4))];
        assert_eq!(sizes(&turin)[..], all(96, of_turin));
    }

    #[test]
    fn intel_describes_units_one_by_one() {
        let parts = [
            [8, 0, 0, 0],
            // Loads of 4K: 16 sets of 6; a second level of two units, both with 4K.
            [0, 0x0006_0001, 16, 1 << 5 | 4],
            [0, 0x0008_0007, 128, 2 << 5 | 3],
            [0, 0x0008_0009, 128, 2 << 5 | 3],
            [0, 0x0010_000f, 1, 1 << 8 | 1 << 5 | 5],
        ];
        let found = intel(parts.into_iter());
        let entries: Vec<u32> = found.iter().map(|unit| unit.entries).collect();
        assert_eq!(entries, [96, 1024, 1024, 16]);
        assert_eq!(found[0].page_bytes, [K4]);
        assert_eq!(found[2].page_bytes, [K4, G1]);
        assert_eq!((found[3].kind, found[3].ways), (TlbKind::Store, None));
    }

    #[test]
    fn a_cpu_that_says_nothing_has_none() {
        assert!(intel([[0; 4]; 3].into_iter()).is_empty());
        assert!(amd([0; 4], [0; 4], false).is_empty());
    }

    #[test]
    fn the_family_tells_the_unit_where_a_hypervisor_hides_the_bit() {
        let [turin, genoa, xeon] = [0x00b0_0f21, 0x00a1_0f11, 0x000c_06f2];
        let of = |version| family([version, 0, 0, 0]);
        assert_eq!([turin, genoa, xeon].map(of), [0x1a, 0x19, 6]);
        assert!(of(turin) >= FAMILY_OF_UNITS && of(genoa) < FAMILY_OF_UNITS);
    }
}
