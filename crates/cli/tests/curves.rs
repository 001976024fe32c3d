//! `pagetax misscurve` and `pagetax whatif` end to end: on a trace whose curve is known, and on commands;
//! and what all that read traces say of those that are damaged.

use std::path::Path;
use std::process::{Command, Output, Stdio};

fn pagetax(arguments: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Reads what `--json=out.json` wrote.
fn document(folder: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(folder.join("out.json")).unwrap()).unwrap()
}

/// Writes a trace that goes ten times over 1000 pages.
fn trace(folder: &Path) {
    let lap: String = (0..1000).map(|n| format!(" L {:x},8\n", (1 << 30) + n * 4096)).collect();
    std::fs::write(folder.join("lackey"), lap.repeat(10)).unwrap();
    let import = pagetax(&["record", "--import", "lackey", "lackey", "-o", "a.ptt"], folder);
    assert!(import.status.success(), "{}", text(&import.stderr));
}

#[test]
fn the_curve_of_a_cycle_is_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    trace(at);
    let out = pagetax(&["misscurve", "a.ptt", "--pages", "4K,2M", "--reach", "89", "--json"], at);
    let document: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(
        (document["access_count"].as_u64(), document["exit"].as_u64()),
        (Some(10_000), Some(0))
    );
    let misses = |curve: usize, entries: u64| {
        let points = document["curves"][curve]["misses"].as_array().unwrap();
        let point = points.iter().find(|point| point["entries"] == entries).unwrap();
        point["tlb_miss_count"].as_u64().unwrap()
    };
    assert_eq!([512, 1024, 65_536].map(|entries| misses(0, entries)), [10_000, 1000, 1000]);
    assert_eq!([16, 1024].map(|entries| misses(1, entries)), [2, 2]);
    // Distances from 512 on are kept within 0.4 %.
    let reach = document["curves"][0]["reach"]["entries"].as_u64().unwrap();
    assert!((996..=1000).contains(&reach), "{reach}");
    let known = document["known_tlbs"].as_array().unwrap();
    let of = |cpu: &str, page_bytes: u64| {
        let tlb = known.iter().find(|tlb| tlb["cpu"] == cpu && tlb["page_bytes"] == page_bytes);
        ["entries", "tlb_miss_count"].map(|key| tlb.unwrap()[key].as_u64().unwrap())
    };
    assert_eq!(of("AMD Zen 4", 4096), [3072, 1000]);
    assert_eq!(of("Intel Sapphire Rapids", 2 << 20), [1024, 2]);
    let csv = text(&pagetax(&["misscurve", "a.ptt", "--csv"], at).stdout);
    assert!(csv.lines().any(|line| line == "4096,512,10000,10000,true"), "{csv}");
    let table = text(&pagetax(&["misscurve", "a.ptt"], at).stdout);
    assert!(table.contains("none: first touches miss more") && table.contains("100.0"), "{table}");
}

#[test]
fn bad_input_gets_a_clear_word() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    trace(at);
    std::fs::write(at.join("text.ptt"), "hello\n").unwrap();
    std::fs::create_dir(at.join("folder.ptt")).unwrap();
    for (arguments, code, word) in [
        (&["misscurve"][..], 2, "nothing to look at"),
        (&["misscurve", "text.ptt"], 2, "is no trace"),
        (&["misscurve", "missing.ptt"], 2, "missing.ptt"),
        (&["misscurve", "folder.ptt"], 2, "not a regular file"),
        (&["whatif", "text.ptt"], 2, "is no trace"),
        (&["whatif", "--pages", "5K", "a.ptt"], 2, "5K"),
        (&["whatif", "--by", "hep", "a.ptt"], 2, "names no part"),
        (&["whatif", "--by", "heap,heap", "a.ptt"], 2, "names heap twice"),
        (&["whatif", "--by", "heap", "--pages", "64K", "a.ptt"], 2, "no other size"),
        (&["misscurve", "--pages", "5K", "a.ptt"], 2, "5K"),
        (&["misscurve", "--reach", "100", "a.ptt"], 2, "between 0 and 100"),
        (&["misscurve", "--", "no-such-program"], 127, "not found"),
        (&["misscurve", "no-such-program"], 127, "not found"),
        (&["misscurve", "a.ptt", "--", "true"], 2, "cannot be used"),
    ] {
        let output = pagetax(arguments, at);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(word), "{arguments:?}: {said}");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.args(["whatif", "a.ptt"]).current_dir(at).env("XDG_CACHE_HOME", at);
    let output = command.args(["--verify"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(!at.join("pagetax").exists(), "a wrong command line is no reason to calibrate");
}

#[test]
fn whatif_calibrates_once_if_it_must() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    trace(at);
    let whatif = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
        command.args(["whatif", "a.ptt"]).current_dir(at).env("XDG_CACHE_HOME", at);
        let output = command.output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let (code, said) = whatif();
    assert!(said.contains("calibrating this machine"), "{said}");
    let kept = std::fs::read_to_string(at.join("pagetax/calibration.json")).unwrap();
    let kept: serde_json::Value = serde_json::from_str(&kept).unwrap();
    assert_eq!(kept["quick"], true);
    // Without pages of 2M there are no walks to price.
    let priced = !kept["walks"].as_array().unwrap().is_empty();
    assert_eq!(code, Some(if priced { 0 } else { 3 }), "{said}");
    // Without doubts the key is absent.
    let doubtful = kept["warnings"].as_array().is_some_and(|warnings| !warnings.is_empty());
    assert_eq!(said.contains("whatif: calibration:"), priced && doubtful, "{said}");
    let (again, said) = whatif();
    assert_eq!(again, code);
    assert!(!said.contains("calibrating"), "{said}");
}

/// A job whose budget needs prices where no hardware counts walks.
const SMALL_JOB: [&str; 5] = ["run", "tlb-gather", "--set", "size=8M,count=20000", "--json"];

/// Runs pagetax with an empty cache of its own. Returns the output and whether a calibration is kept.
fn with_empty_cache(
    arguments: &[&str],
    variable: Option<(&str, &str)>,
    at: &Path,
) -> (Output, bool) {
    let cache = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.args(arguments).current_dir(at).env("XDG_CACHE_HOME", cache.path());
    command.envs(variable).stdin(Stdio::null());
    let output = command.output().unwrap();
    (output, cache.path().join("pagetax/calibration.json").exists())
}

/// Returns true if the budget of a report has a row for translation without a value.
fn lacks_translation(output: &Output) -> bool {
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["budget"]["cpu"].as_array().unwrap();
    let row = rows.iter().find(|row| row["id"] == "translation").unwrap();
    row["provenance"] == "missing"
}

#[test]
fn run_and_trapstat_calibrate_if_they_need_prices_and_the_machine_is_quiet() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    trace(at);
    for arguments in [&SMALL_JOB[..], &["trapstat", "a.ptt"]] {
        let (output, is_kept) = with_empty_cache(arguments, None, at);
        let said = text(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        let is_busy = said.contains("not calibrated: the machine was busy");
        assert_eq!(said.contains("calibrated this machine in"), is_kept, "{arguments:?}: {said}");
        let counts = arguments[0] == "run" && !lacks_translation(&output);
        assert!(is_kept || is_busy || counts, "{arguments:?}: {said}");
    }
    let other_machine = ["trapstat", "--on", "sim:ultrasparc-3plus-900", "a.ptt"];
    let no_costs = ["run", "tlb-gather", "--set", "size=8M,count=20000", "--on", "null"];
    let in_trial = Some(("PAGETAX_TRIAL", "1"));
    for (arguments, variable) in
        [(&SMALL_JOB[..], in_trial), (&other_machine, None), (&no_costs, None)]
    {
        let (output, is_kept) = with_empty_cache(arguments, variable, at);
        let said = text(&output.stderr);
        assert!(output.status.success() && !is_kept, "{arguments:?}: {said}");
        assert!(!said.contains("calibrated"), "{arguments:?}: {said}");
    }
    // Not a test of its own: the others need a quiet machine.
    let cpus = std::thread::available_parallelism().unwrap().get();
    let spin = || Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
    let mut others: Vec<_> = (0..2 * cpus).map(|_| spin()).collect();
    let (output, is_kept) = with_empty_cache(&SMALL_JOB, None, at);
    others.iter_mut().for_each(|child| child.kill().and_then(|()| child.wait().map(drop)).unwrap());
    let said = text(&output.stderr);
    assert!(output.status.success() && !is_kept, "{said}");
    let counts = !lacks_translation(&output);
    assert!(counts || said.contains("not calibrated: the machine was busy"), "{said}");
}

/// All that reads a trace.
const READERS: &[&[&str]] =
    &[&["misscurve"], &["whatif"], &["trapstat"], &["run", "--on", "sim:x86-64-calibrated"]];

/// Returns a reader's exit code for a trace, and its messages.
fn read(reader: &[&str], trace: &str, at: &Path) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.args(reader).arg(trace).current_dir(at).env("XDG_CACHE_HOME", at);
    let output = command.stdin(Stdio::null()).output().unwrap();
    (output.status.code(), text(&output.stderr))
}

#[test]
fn what_is_no_trace_gets_a_clear_word_from_all_that_read_one() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    trace(at);
    let whole = std::fs::read(at.join("a.ptt")).unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(at.join(name), bytes).unwrap();
    write("empty.ptt", b"");
    write("version.ptt", &[&whole[..8], &[9, 0, 0, 0], &whole[12..]].concat());
    write("head.ptt", &whole[..20]);
    let block = (0..whole.len()).find(|at| whole[*at..].starts_with(b"PTbl")).expect("a block");
    write("begin.ptt", &whole[..block + 12]);
    for reader in READERS {
        // To run something, a file that is no trace is a job.
        if reader[0] != "run" {
            let (code, said) = read(reader, "empty.ptt", at);
            assert!(code == Some(2) && said.contains("is no trace"), "{reader:?}: {said}");
        }
        for (name, word) in [
            ("version.ptt", "version 9"),
            ("head.ptt", "head is damaged"),
            ("begin.ptt", "nothing in begin.ptt is whole"),
        ] {
            let (code, said) = read(reader, name, at);
            assert!(code == Some(2) && said.contains(word), "{reader:?} {name}: {said}");
            assert!(said.contains("hint:"), "{reader:?} {name}: {said}");
        }
    }
}

#[test]
fn of_a_damaged_trace_what_is_whole_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    trace(at);
    // Two blocks and some, of which the second is damaged.
    let list = std::fs::read_to_string(at.join("lackey")).unwrap().repeat(15);
    std::fs::write(at.join("long"), list).unwrap();
    let import = pagetax(&["record", "--import", "lackey", "long", "-o", "a.ptt"], at);
    assert!(import.status.success(), "{}", text(&import.stderr));
    let mut bytes = std::fs::read(at.join("a.ptt")).unwrap();
    let magic = |at: &usize| bytes[*at..].starts_with(b"PTbl");
    let second = (0..bytes.len()).filter(magic).nth(1).expect("a second block");
    bytes[second + 60] ^= 0x20;
    std::fs::write(at.join("a.ptt"), &bytes).unwrap();
    std::fs::write(at.join("cut.ptt"), &bytes[..second]).unwrap();
    for reader in READERS.iter().filter(|reader| !["whatif", "record"].contains(&reader[0])) {
        let (code, said) = read(reader, "a.ptt", at);
        assert!(code == Some(0) && said.contains("damaged"), "{reader:?}: {code:?} {said}");
        let (code, said) = read(reader, "cut.ptt", at);
        assert!(code == Some(0) && said.contains("cut or damaged"), "{reader:?}: {code:?} {said}");
    }
    let json = pagetax(&["misscurve", "cut.ptt", "--json"], at);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let count = json["access_count"].as_u64().unwrap();
    assert!((60_000..150_000).contains(&count), "the first block: {count}");
}

#[test]
fn page_ins_are_simulated_with_less_memory() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    trace(at);
    let arguments = ["remote", "--resident", "2M", "--simulate", "a.ptt", "--json=out.json"];
    let output = pagetax(&arguments, at);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("optimum") && table.contains("With 2M resident"), "{table}");
    let json = document(at);
    assert_eq!(
        [&json["page_count"], &json["access_count"]].map(|n| n.as_u64().unwrap()),
        [1_000, 10_000]
    );
    let page_ins = |limit: usize| {
        let policies = json["limits"][limit]["policies"].as_array().unwrap();
        let of = |policy: &serde_json::Value| policy["page_in_count"].as_u64().unwrap();
        policies.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(json["limits"].as_array().unwrap().len(), 2, "1M and 2M: 4M would hold all");
    // Of 1,000 pages in turn, the optimum keeps all but one of the 512 from lap to lap.
    let [pager, lru, _, optimum] = page_ins(1)[..] else { panic!("{json}") };
    assert_eq!(lru, 9_000);
    assert!((4_300..4_500).contains(&optimum), "{optimum}");
    assert!(pager < 1_200, "runs of a stream: {pager}");
    assert!(json["page_in"]["median_ns"].as_u64().unwrap() > 1_000, "{json}");

    let none = pagetax(&["remote", "--resident", "2M", "--simulate", "none.ptt"], at);
    assert!(none.status.code() == Some(2) && text(&none.stderr).contains("none.ptt"));
    let json = pagetax(&["remote", "--resident", "2M", "--json", "--", "true"], at);
    assert!(json.status.code() == Some(2) && text(&json.stderr).contains("--simulate"));
}

#[test]
fn trapstat_reads_traces_too() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    trace(at);
    let arguments = ["trapstat", "-T", "--pages", "4K,2M", "--json=out.json", "a.ptt"];
    let output = pagetax(&arguments, at);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("lackey, recorded by valgrind lackey"));
    assert!(text(&output.stdout).contains("dtlb-miss"), "{}", text(&output.stdout));
    let json = document(at);
    let misses = |view: usize| json["profiles"][view]["memory"][0]["misses"].as_u64().unwrap();
    // 1,000 pages fit the second level.
    assert_eq!([misses(0), misses(1)], [1_000, 2]);
    assert_eq!(json["profiles"][0]["functions"], serde_json::json!([]));
    for (arguments, word) in [
        (&["trapstat", "a.ptt", "--", "true"][..], "leave one of them out"),
        (&["trapstat", "a.ptt", "x"], "no interval"),
        (&["trapstat", "--backend", "perf", "a.ptt"], "do not read traces"),
    ] {
        let output = pagetax(arguments, at);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(word), "{arguments:?}: {said}");
    }
}

#[test]
fn a_command_is_predicted_beside_its_trials() {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|folder| folder.join("valgrind").is_file()) {
        println!("SKIP: not installed: [\"valgrind\"]");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    trace(at);
    let whatif = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
        command.args(["whatif", "--json"]).args(arguments).current_dir(at);
        command.env("XDG_CACHE_HOME", at).stdin(Stdio::null()).output().unwrap()
    };
    let mut calibrate = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    calibrate.args(["calibrate", "--quick", "--json"]).env("XDG_CACHE_HOME", at);
    let calibration = calibrate.output().unwrap();
    let calibration: serde_json::Value = serde_json::from_slice(&calibration.stdout).unwrap();
    let faults = calibration["faults"].as_array().unwrap();
    if !faults.iter().any(|fault| fault["page_bytes"] == 2 << 20 && fault["cost"].is_object()) {
        println!("SKIP: no 2M pages to calibrate");
        return;
    }
    let output = whatif(&["--runs", "2", "--verify", "--", "sort", "lackey", "--foreign"]);
    assert_eq!(output.status.code(), Some(2), "sort's own: {}", text(&output.stderr));
    let output = whatif(&["--runs", "2", "--verify", "--", "sort", "lackey", "-o", "sorted"]);
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let size = &document["sizes"][0];
    let bounds = ["low", "value", "high"].map(|key| size["speedup"][key].as_f64().unwrap());
    assert!(bounds.is_sorted() && bounds[0] > 0.0, "{size}");
    assert!(size["measured_speedup"]["value"].as_f64().unwrap() > 0.0, "{size}");
    assert!(size["error_percent"].is_f64(), "{size}");
    let parts = size["saved_parts_ns"].as_object().unwrap();
    let sum: f64 = parts.values().map(|part| part["value"].as_f64().unwrap()).sum();
    assert!(parts.len() == 4 && (sum - size["saved_ns"]["value"].as_f64().unwrap()).abs() < 1.0);
    let saves = |count: &str| {
        document["base"]["why"][count].as_u64().unwrap() >= size["why"][count].as_u64().unwrap()
    };
    assert!(document["base"]["why"]["base_fault_count"].as_u64().unwrap() > 50, "{document}");
    assert!(saves("base_fault_count") && saves("other_walk_count"), "{document}");
    let by = whatif(&["--by", "heap,stack,text,mapping", "a.ptt"]);
    let by: serde_json::Value = serde_json::from_slice(&by.stdout).unwrap();
    let parts = by["parts"].as_array().unwrap();
    let saved = |part: usize| parts[part]["saved_ns"]["value"].as_f64();
    assert_eq!(parts.len(), 4, "{by}");
    assert!(saved(2).is_none() && parts[2]["part"] == "text", "code has no calibrated cost: {by}");
    let whole = by["sizes"][0]["saved_ns"]["value"].as_f64().unwrap();
    let sum = saved(0).unwrap() + saved(1).unwrap() + saved(3).unwrap();
    assert!((sum / whole - 1.0).abs() < 0.05, "{sum} of {whole}: {by}");
    let of_trace: serde_json::Value = serde_json::from_slice(&whatif(&["a.ptt"]).stdout).unwrap();
    assert!(of_trace["base"]["time_ns"].is_null() && of_trace["sizes"][0]["speedup"].is_null());
    assert!(of_trace["sizes"][0]["saved_ns"]["value"].as_f64().unwrap() > 0.0, "{of_trace}");
}
