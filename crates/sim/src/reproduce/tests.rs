use super::published::{names, parse, table};
use super::*;

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
    compare::compare("small", &parse("small", text).unwrap(), 2).unwrap()
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
    assert!(!compared(&narrow).rows[1].ok);
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
    let median = |values: &[f64]| Spread::of(values.to_vec()).unwrap().median;
    assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0])), (2.0, 2.5));
    assert_eq!(Spread::of(vec![1.0, f64::NAN]), None);
}
