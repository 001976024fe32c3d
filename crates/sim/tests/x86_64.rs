//! The x86-64 model: TLB reach, walks by the location of page-table lines, huge pages,
//! calibrations.

mod common;

use common::{gather, run};
use pagetax_core::calibration::{
    CALIBRATION_VERSION, Calibration, FaultCost, FaultKind, Identity, Spread, TlbKind, TlbUnit,
    WalkCost, WalkPattern,
};
use pagetax_core::plan::{Op, Pattern};
use pagetax_sim::model::Model;
use pagetax_sim::{hardware::calibrated, models};

const MIB: u64 = 1 << 20;

fn model() -> Model {
    models::find("x86-64-calibrated").expect("a model")
}

/// Returns the nanoseconds of translation for each access of a gather, or of a chase.
fn translation_ns(model: &Model, mib: u64, page: &str, chase: bool) -> f64 {
    let count = 100_000;
    let mut plan = gather("heap", mib * MIB, page, count);
    if let (true, Op::Touch(touch)) = (chase, &mut plan.phases[1].ops[0]) {
        (touch.pattern, touch.grain_bytes) = (Pattern::PointerChase, 4096);
        touch.count = mib * MIB / 4096 * 2;
    }
    let Op::Touch(touch) = &plan.phases[1].ops[0] else { panic!("a touch") };
    let count = touch.count;
    let own = model.ps("access", if chase { "dependent" } else { "random" }).expect("a time");
    run(model, &plan).last_phase().ns as f64 / count as f64 - own as f64 / 1e3
}

#[test]
fn huge_pages_within_reach_of_the_tlb_cost_nothing() {
    assert!(translation_ns(&model(), 64, "2M", false) < 0.2);
    let gather = |mib| run(&model(), &gather("heap", mib * MIB, "default", 100_000)).last_phase();
    let (near, far) = (gather(4).miss_ratio, gather(64).miss_ratio);
    assert!(near < 0.02, "1,024 pages are within reach: {near}");
    let expected = 1.0 - 2048.0 / 16384.0;
    assert!((far - expected).abs() < 0.01, "16,384 pages are not: {far}");
}

/// Returns a walk's expected time in a chase through 64M. It has 2,048 lines of page-table entries,
/// of which the first level keeps 512.
fn chase_ns(l1_walk: f64, l2_walk: f64) -> f64 {
    l1_walk / 4.0 + l2_walk * 3.0 / 4.0
}

#[test]
fn a_chase_pays_whole_walks_and_a_gather_a_share_of_them() {
    let (chase, gather) = (
        translation_ns(&model(), 64, "default", true),
        translation_ns(&model(), 64, "default", false),
    );
    assert!((chase - chase_ns(12.0, 30.0)).abs() < 1.5, "{chase}");
    assert!((1.0..3.0).contains(&gather), "{gather}");
}

#[test]
fn it_says_that_nothing_validates_it() {
    let ran = run(&model(), &gather("heap", MIB, "default", 10));
    assert!(ran.report.warnings.iter().any(|warning| warning.id == "not_validated"));
}

fn spread(median_ns: f64) -> Spread {
    Spread { median_ns, low_ns: median_ns, high_ns: median_ns, repetitions: 5 }
}

fn walk(pattern: WalkPattern, mib: u64, base: f64, huge: f64) -> WalkCost {
    let (base, huge, extra) = (spread(base), spread(huge), spread(base - huge));
    WalkCost { pattern, working_set_bytes: mib * MIB, base, huge, extra }
}

fn calibration() -> Calibration {
    let fault = |page_bytes, ns| FaultCost {
        kind: FaultKind::AnonWrite,
        page_bytes,
        cost: Some(spread(ns)),
        why: None,
    };
    Calibration {
        version: CALIBRATION_VERSION,
        identity: Identity {
            cpu_model: "Test".into(),
            cpu_count: 2,
            kernel: "6.18".into(),
            memory_bytes: 8 << 30,
            hypervisor: "kvm".into(),
            page_table_isolation: false,
        },
        quick: false,
        taken_unix_s: 0,
        took_ns: 0,
        base_page_bytes: 4096,
        huge_page_bytes: 2 << 20,
        faults: vec![fault(4096, 2000.0), fault(2 << 20, 409_600.0)],
        tlbs: Vec::new(),
        base_reach: None,
        notes: Default::default(),
        warnings: Default::default(),
        walks: vec![
            walk(WalkPattern::Dependent, 16, 30.0, 20.0),
            walk(WalkPattern::Dependent, 256, 190.0, 140.0),
            walk(WalkPattern::Independent, 16, 12.0, 10.0),
            walk(WalkPattern::Independent, 256, 20.0, 10.0),
            walk(WalkPattern::InOrder, 16, 4.3, 1.5),
            walk(WalkPattern::InOrder, 256, 6.0, 5.0),
        ],
    }
}

#[test]
fn a_calibration_replaces_the_sizes_of_tlbs() {
    let unit = |level, page_bytes, entries, ways| TlbUnit {
        kind: TlbKind::Data,
        level,
        page_bytes: vec![page_bytes],
        entries,
        ways,
    };
    let tlbs = vec![
        unit(1, 4 << 10, 72, None),
        unit(1, 2 << 20, 72, None),
        unit(2, 4 << 10, 3072, Some(8)),
        unit(2, 2 << 20, 3072, Some(6)),
    ];
    let mut model = model();
    calibrated::apply(&mut model, &Calibration { tlbs, ..calibration() }).unwrap();
    let of = |table| ["entries", "ways"].map(|key| model.positive(table, key).unwrap());
    assert_eq!([of("dtlb_1a"), of("dtlb_1b"), of("dtlb_2a")], [[72, 72], [72, 72], [3072, 12]]);
    // It still runs.
    assert!(translation_ns(&model, 64, "default", true) > 0.0);
}

#[test]
fn a_calibration_replaces_what_it_has_measured() {
    let mut model = model();
    calibrated::apply(&mut model, &calibration()).expect("the model has a walker");
    let ns = |key| model.ps("walk", key).unwrap() as f64 / 1e3;
    assert_eq!(
        [ns("l1_walk"), model.positive("walk", "l1_lines").unwrap() as f64],
        [9.7, 512.0],
        "what a hit in the TLB takes is off"
    );
    assert!((ns("l2_walk") - (256.0 * 49.7 - 16.0 * 9.7) / 240.0).abs() < 0.01);
    assert_eq!(ns("memory_walk"), ns("l2_walk"), "farther than measured costs as the farthest");
    assert!((ns("l1_overlapped") - 3.7).abs() < 0.01, "half of 4,096 pages are in the TLB");
    assert!((ns("l1_in_order") - 2.5).abs() < 0.01 && (ns("l2_in_order") - 0.7).abs() < 0.01);
    assert_eq!(model.ps("access", "random").unwrap(), 10_000);
    assert_eq!(model.ps("access", "dependent").unwrap(), 140_000);
    assert_eq!(model.ps("fault", "zero_kib").unwrap(), 200_000);
    assert_eq!(model.ps("fault", "time").unwrap(), 1_200_000);
    // The model reproduces the calibration's measurements.
    for (mib, chased, extra_ns) in [(16, true, 10.0), (256, true, 50.0), (256, false, 10.0)] {
        let ns = translation_ns(&model, mib, "default", chased);
        assert!((ns / extra_ns - 1.0).abs() < 0.1, "{mib}M, {chased}: {ns} for {extra_ns}");
    }
}
