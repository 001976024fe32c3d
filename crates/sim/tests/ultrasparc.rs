//! The UltraSPARC machines against McDougall, 'Taming Your Emu' (Sun BluePrints, 2004): TLB misses,
//! their time, the gain from large pages, and the page sizes that a process gets.

mod common;

use common::{Ran, gather, run};
use pagetax_core::plan::{Op, Plan};
use pagetax_core::report::Table;
use pagetax_sim::model::Model;
use pagetax_sim::models;

const MIB: u64 = 1 << 20;

fn model(name: &str) -> Model {
    models::find(name).expect("a model")
}

/// Returns the report's test program: a heap of `mib` MiB, read at random.
fn heap(mib: u64, page: &str) -> Plan {
    gather("heap", mib * MIB, page, 1_000_000)
}

/// Returns the same program on a mapping that large pages cover wholly, as in the arithmetic of the
/// table.
fn mapping(mib: u64, page: &str) -> Plan {
    gather("array", mib * MIB, page, 200_000)
}

/// Appends the regions and phases of `more` to `plan`.
fn append(plan: &mut Plan, more: Plan) {
    let first = plan.regions.len();
    plan.regions.extend(more.regions);
    for mut phase in more.phases {
        for op in &mut phase.ops {
            if let Op::Touch(touch) = op {
                touch.region.0 += first;
            }
        }
        plan.phases.push(phase);
    }
}

fn cell(table: &Table, row: usize, column: usize) -> &str {
    &table.rows[row][column]
}

fn number(table: &Table, row: usize, column: usize) -> f64 {
    cell(table, row, column).parse().expect("a number")
}

fn table<'a>(ran: &'a Ran, title: &str) -> &'a Table {
    ran.report.tables.iter().find(|t| t.title == title).expect("such a table")
}

#[test]
fn trapstat_on_8k_pages_is_the_reports() {
    let ran = run(&model("ultrasparc-3plus-900"), &heap(128, "default"));
    let brief = table(&ran, "trapstat -t");
    for published in [2_171_237.0, 2_170_236.0] {
        let ratio = number(brief, 0, 6) / published;
        assert!((0.99..=1.01).contains(&ratio), "user misses {ratio} of the published");
    }
    for published in [45.7, 46.1] {
        let ratio = number(brief, 0, 10) / published;
        assert!((0.99..=1.01).contains(&ratio), "time {ratio} of the published");
    }
    assert_eq!(cell(brief, 1, 7), "0.1", "the kernel's share");
    let full = table(&ran, "trapstat -T");
    assert_eq!(full.rows.len(), 9);
    assert_eq!(full.rows[0][..3], ["0", "u", "8k"]);
    assert_eq!(full.rows[3][2], "4m");
    assert_eq!(full.rows[3][7], "0");
    assert_eq!(full.rows[8][1], "ttl");
}

#[test]
fn trapstat_on_4m_pages_has_next_to_no_user_misses() {
    let ran = run(&model("ultrasparc-3plus-900"), &heap(128, "4M"));
    let full = table(&ran, "trapstat -T");
    let user: f64 = (0..4).map(|row| number(full, row, 7)).sum();
    assert!(user < 5000.0, "{user} user misses a second");
    assert_eq!(cell(full, 8, 11), "0.1", "46.2 percent has dropped to next to nothing");
}

#[test]
fn pmap_lists_the_heap_as_the_report_does() {
    let ran = run(&model("ultrasparc-3plus-900"), &heap(128, "4M"));
    let pmap = table(&ran, "pmap -sx");
    let heap: Vec<_> = pmap.rows.iter().filter(|row| row[7] == "[ heap ]").collect();
    assert_eq!(heap[0][..7], ["00022000", "3960", "3960", "3960", "-", "8K", "rwx--"]);
    assert_eq!(heap[1][..7], ["00400000", "131072", "131072", "131072", "-", "4M", "rwx--"]);
    let total = pmap.rows.last().expect("a total");
    assert_eq!(total[..5], ["total Kb", "135968", "135944", "135112", "-"]);
}

/// Compares miss ratios on each page size, and the gain, with values computed from the geometry and
/// the two constants.
#[test]
fn the_three_machines_gain_as_their_tlbs_let_them() {
    for (name, mib, misses_8k, misses_4m, gain) in [
        ("ultrasparc-2-450", 128, 0.9965, 0.0, 2.79),
        ("ultrasparc-3-750", 128, 0.969, 0.625, 1.22),
        ("ultrasparc-3-750", 256, 0.984, 0.8125, 1.10),
        ("ultrasparc-3-750", 512, 0.992, 0.906, 1.05),
        ("ultrasparc-3plus-900", 128, 0.938, 0.0, 1.84),
    ] {
        let model = model(name);
        let small = run(&model, &mapping(mib, "default")).last_phase();
        let large = run(&model, &mapping(mib, "4M")).last_phase();
        let found = small.ns as f64 / large.ns as f64;
        println!("{name} {mib}M: {:.4} {:.4} {found:.3}", small.miss_ratio, large.miss_ratio);
        assert!((small.miss_ratio - misses_8k).abs() < 0.002, "{name}: {}", small.miss_ratio);
        assert!((large.miss_ratio - misses_4m).abs() < 0.005, "{name}: {}", large.miss_ratio);
        assert!((found / gain - 1.0).abs() < 0.01, "{name}: {found} instead of {gain}");
    }
}

#[test]
fn a_heap_of_4m_pages_is_almost_twice_as_fast_on_900_mhz() {
    let model = model("ultrasparc-3plus-900");
    let (small, large) = (run(&model, &heap(128, "default")), run(&model, &heap(128, "4M")));
    let gain = small.last_phase().ns as f64 / large.last_phase().ns as f64;
    assert!((1.7..=1.95).contains(&gain), "{gain}");
}

#[test]
fn the_large_tlb_is_programmed_from_eight_large_pages_on() {
    let model = model("ultrasparc-3plus-900");
    // The small TLB's 12 entries hold up to 12 large pages, so large pages alone never miss. The
    // effect shows on 8K pages, which lose half of their entries.
    let seven = run(&model, &gather("array", 28 * MIB, "4M", 100_000)).last_phase();
    assert!(seven.miss_ratio < 0.001, "{}", seven.miss_ratio);
    for (mib, expected) in [(28, 1.0 - 1024.0 / 1792.0), (36, 1.0 - 512.0 / 1792.0)] {
        let mut plan = gather("array", mib * MIB, "4M", 1);
        let small = gather("small", 14 * MIB, "default", 200_000);
        append(&mut plan, small);
        let found = run(&model, &plan).last_phase().miss_ratio;
        assert!((found - expected).abs() < 0.01, "{mib}M of large pages: {found}, {expected}");
    }
}

#[test]
fn fragmented_memory_falls_back_and_the_cage_helps() {
    let mut model = model("ultrasparc-3plus-900");
    model.set("machine", "memory", 0.5).expect("set");
    let large_kib = |cage: bool| {
        // The kernel, half a percent of memory, is scattered: 327 frames over 128 blocks of 4M.
        let share = toml::Value::Float(0.5);
        let mut model = model.clone();
        model.set("paging", "kernel_memory", share).expect("set");
        model.set("paging", "other_memory", toml::Value::Integer(20)).expect("set");
        model.set("paging", "kernel_cage", cage).expect("set");
        let ran = run(&model, &heap(128, "4M"));
        let pmap = table(&ran, "pmap -sx").clone();
        let kib = pmap
            .rows
            .iter()
            .filter(|r| r[5] == "4M")
            .map(|r| r[1].parse::<u64>().expect("a number"));
        assert_eq!(cage, !ran.report.warnings.iter().any(|w| w.id == "page_size_fallback"));
        let resident = pmap.rows.iter().filter(|r| r[7] == "[ heap ]" && r[2] != "-");
        let resident: u64 = resident.map(|r| r[2].parse::<u64>().expect("a number")).sum();
        assert!(resident >= 128 << 10, "the heap is there, on pages of whatever size");
        kib.sum::<u64>()
    };
    assert!(large_kib(false) < 64 << 10);
    assert_eq!(large_kib(true), 128 << 10);
}
