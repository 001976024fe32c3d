use super::published::{names, parse, table};
use super::*;
use std::sync::Mutex;

const SMALL: &str = r#"
title = "A small thing"
source = "here"
[run.small]
machine = "alpha-nms"
job = "mmap3"
params = { size = "1M", random = "10" }
[[check]]
figure = "page-ins"
published = 2
value = "2 + small.page_in_count"
ratio = [0.9, 1.1]
status = "predicted"
[[check]]
figure = "zero-filled pages"
published = 100
value = "small.minor_fault_count(initialise)"
range = [128, 128]
status = "calibrated"
[[check]]
figure = "colour"
published = 0
status = "not_reproducible"
why = "models have none"
"#;

fn compared(text: &str) -> Compared {
    compare::compare("small", &parse("small", text).unwrap(), SEEDS_MIN, &|_| ()).unwrap()
}

#[test]
fn rows_pass_within_their_tolerance_alone() {
    let rows = compared(SMALL).rows;
    assert!(rows.iter().all(|row| row.ok));
    let spread = rows[1].simulated.unwrap();
    assert_eq!((spread.median, spread.low, spread.high), (128.0, 128.0, 128.0));
    assert_eq!(rows[1].ratio, Some(1.28));
    assert_eq!((rows[2].simulated, rows[2].status), (None, Status::NotReproducible));
    let narrow = SMALL.replace("range = [128, 128]", "ratio = [0.9, 1.2]");
    assert_eq!(compared(&narrow).rows[1].verdict, Verdict::Miss);
}

#[test]
fn few_seeds_assert_nothing() {
    let narrow = SMALL.replace("range = [128, 128]", "ratio = [0.9, 1.2]");
    let file = parse("small", &narrow).unwrap();
    for seeds in [1, SEEDS_MIN - 1] {
        let shares = Mutex::new(Vec::new());
        let on_progress = |done| shares.lock().unwrap().push(done);
        let rows = compare::compare("small", &file, seeds, &on_progress).unwrap().rows;
        let shares = shares.into_inner().unwrap();
        assert_eq!(shares.iter().copied().reduce(f64::max), Some(1.0), "{shares:?}");
        assert!(shares.len() as u64 >= seeds, "a share for each run: {shares:?}");
        assert!(rows[..2].iter().all(|row| row.ok && row.verdict == Verdict::Reported), "{rows:?}");
    }
}

#[test]
fn the_least_of_several_runs_counts_with_all_its_figures() {
    let several = SMALL.replace("params", "least_of = 4\nparams");
    let wall = several.replace("2 + small.page_in_count", "small.wall_s");
    let every = |seed: u64| {
        let text = SMALL.replace("2 + small.page_in_count", "small.wall_s");
        let file = parse("small", &text).unwrap();
        compare::compare("small", &file, seed, &|_| ()).unwrap().rows[0].simulated.unwrap()
    };
    let least = compared(&wall).rows[0].clone();
    assert_eq!((least.value_count, least.least_of), (2, 4), "8 of 9 seeds fill groups");
    assert_eq!(least.simulated.unwrap().low, every(8).low);
    assert!(least.simulated.unwrap().high < every(8).high);
    let mut elapsed: Vec<f64> = Vec::new();
    for count in 1..=4 {
        elapsed.push(every(count).low);
    }
    assert!(elapsed.is_sorted_by(|a, b| a >= b), "the least of more runs is no more: {elapsed:?}");
}

#[test]
fn what_no_wrong_model_can_miss_is_never_asserted() {
    let derived = |text: &str| SMALL.replace("status = \"predicted\"", text);
    let refused = |text: &str| parse("small", &derived(text)).unwrap_err().to_string();
    assert!(refused("status = \"derived\"").contains("does not say why"));
    let with_why = "status = \"derived\"\nwhy = \"arithmetic\"";
    assert!(refused(with_why).contains("no model can miss"));
    let shown = derived(with_why).replace("ratio = [0.9, 1.1]\n", "");
    let row = &compared(&shown).rows[0];
    assert_eq!((row.verdict, row.ok), (Verdict::Derived, true));
    assert!(refused("status = \"consistency\"").contains("does not say why"));
}

#[test]
fn figures_that_are_not_there_fail_with_their_reason() {
    let lacking = SMALL.replace("small.page_in_count", "small.pmeg_steal_count");
    let row = &compared(&lacking).rows[0];
    assert!(!row.ok && row.simulated.is_none() && row.why.contains("does not count"), "{row:?}");
}

#[test]
fn files_that_contradict_themselves_are_refused() {
    let refuse = |from: &str, to: &str| parse("small", &SMALL.replace(from, to)).unwrap_err();
    assert!(refuse("small.page", "other.page").to_string().contains("no run `other`"));
    assert!(refuse("why = \"models have none\"", "").to_string().contains("and why"));
    assert!(refuse("2 + small", "2 + + small").to_string().contains("RUN.FIGURE"));
    let unknown = published::find("alpha").unwrap_err().to_string();
    assert!(unknown.contains("alpha-nms"), "{unknown}");
}

#[test]
fn every_file_parses_and_every_table_has_numbers() {
    for name in names() {
        let file = published::find(name).unwrap();
        assert!(!file.source.is_empty(), "{name}");
        for check in file.check {
            let asserted = check.ratio.is_some() || check.range.is_some();
            assert!(asserted || !check.why.is_empty(), "{name}: `{}` says nothing", check.figure);
        }
    }
    let vmtest = table("sparcstation1-pmeg-patch-vmtest.csv").unwrap();
    assert_eq!(vmtest.rows.len(), 18);
    assert_eq!(vmtest.rows[17].get("old_elapsed_s"), None);
    assert_eq!(vmtest.rows[17]["new_elapsed_s"], 159.8);
}

#[test]
fn medians_are_in_the_middle() {
    let median = |values: &[f64]| Spread::of(values).unwrap().median;
    assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0])), (2.0, 2.5));
    assert_eq!(Spread::of(&[1.0, f64::NAN]), None);
}
