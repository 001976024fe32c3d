//! `pagetax trapstat` end to end: real programs come through both engines unharmed, and bad ones get a
//! clear word.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Says so if something is not installed.
fn has_all(programs: &[&str]) -> bool {
    let missing: Vec<_> = programs.iter().filter(|program| !has(program)).collect();
    if !missing.is_empty() {
        println!("SKIP: not installed: {missing:?}");
    }
    missing.is_empty()
}

fn trapstat(arguments: &[impl AsRef<OsStr>], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.arg("trapstat").args(arguments).current_dir(folder).stdin(Stdio::null());
    command.output().unwrap()
}

/// Returns the instruction and data misses of the last row. Few short bursts on a large TLB may have none.
fn total_misses(tables: &str) -> [f64; 2] {
    let total =
        tables.lines().find(|line| line.trim_start().starts_with("ttl")).unwrap_or_default();
    let cells: Vec<&str> = total.split('|').collect();
    let count = |cell: usize| cells.get(cell)?.split_whitespace().next()?.parse().ok();
    [1, 2].map(|cell| count(cell).unwrap_or(f64::NAN))
}

/// Checks that output and status are those without us, and that tables have numbers. Native samples lack code
/// made at run time, and print so if there is no other.
fn unharmed(engine: &[&str], command: &[&str], folder: &Path) {
    let native = Command::new(command[0])
        .args(&command[1..])
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let mut arguments = vec!["--backend", "record", "-o", "tables"];
    arguments.extend(engine);
    arguments.push("--");
    arguments.extend(command);
    let ours = trapstat(&arguments, folder);
    let said = String::from_utf8_lossy(&ours.stderr);
    assert_eq!(ours.status.code(), native.status.code(), "{command:?}: {said}");
    assert_eq!(
        String::from_utf8_lossy(&ours.stdout),
        String::from_utf8_lossy(&native.stdout),
        "{command:?}: {said}"
    );
    let tables = std::fs::read_to_string(folder.join("tables")).unwrap();
    let is_sample = engine.contains(&"native");
    let has_no_misses = is_sample && total_misses(&tables) == [0.0; 2];
    let has_profile = tables.contains("misses by function") || has_no_misses;
    let has_tables = tables.contains("dtlb-miss") && has_profile;
    let has_reason = is_sample && said.contains("no bursts: ");
    assert!(has_tables || has_reason, "{command:?}: {said}{tables}");
    assert!(said.starts_with("trapstat: backend record"), "{said}");
}

fn programs(folder: &Path) -> Vec<Vec<&'static str>> {
    let numbers: String = (0..20_000u64).map(|i| format!("{}\n", i * 7_919 % 20_011)).collect();
    std::fs::write(folder.join("numbers"), numbers).unwrap();
    std::fs::write(folder.join("a.c"), "int f(int a) { return a * 3 + 1; }\n").unwrap();
    vec![
        vec!["sort", "-n", "numbers"],
        vec!["python3", "-c", "print(sum(hash(str(i)) % 1 + i for i in range(20000))); exit(3)"],
        vec![
            "sqlite3",
            ":memory:",
            "CREATE TABLE t(a); INSERT INTO t VALUES(1),(2); SELECT sum(a) FROM t;",
        ],
        vec!["gcc", "-O2", "-S", "-o", "-", "a.c"],
    ]
}

#[test]
fn real_programs_come_through_valgrind() {
    if !has_all(&["valgrind", "cc", "sort", "python3", "sqlite3", "gcc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for command in programs(folder.path()) {
        unharmed(&["--engine", "valgrind"], &command, folder.path());
    }
}

#[test]
fn real_programs_come_through_qemu() {
    if !has_all(&["qemu-x86_64", "cc", "sort", "python3", "sqlite3", "gcc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for command in programs(folder.path()) {
        unharmed(&["--engine", "qemu"], &command, folder.path());
    }
}

/// Returns true if the native engine's library was built, as it is with the workspace; else prints a skip.
fn has_sampler() -> bool {
    let folder = Path::new(env!("CARGO_BIN_EXE_pagetax")).parent().unwrap();
    let is_built = folder.join("libpagetax_dbt.so").is_file();
    if !is_built {
        println!("SKIP: not built: libpagetax_dbt.so");
    }
    is_built
}

#[test]
fn real_programs_come_through_the_native_engine() {
    if !has_sampler() || !has_all(&["sort", "python3", "sqlite3", "gcc", "node"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut commands = programs(folder.path());
    // It handles SIGSEGV itself.
    commands.push(vec!["node", "-e", "console.log([3, 1, 2].sort().join()); process.exit(5)"]);
    for command in &commands {
        let native = Command::new(command[0])
            .args(&command[1..])
            .current_dir(&folder)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let options = ["--sample", "--engine", "native", "-o", "tables", "--"];
        let arguments: Vec<&str> = options.iter().chain(command).copied().collect();
        let ours = trapstat(&arguments, folder.path());
        let said = String::from_utf8_lossy(&ours.stderr);
        assert_eq!(ours.status.code(), native.status.code(), "{command:?}: {said}");
        assert!(ours.stdout == native.stdout, "{command:?}: {said}");
        assert!(said.contains("engine native"), "{said}");
    }
}

#[test]
fn the_native_engine_refuses_to_record_all_of_a_program() {
    if !has_sampler() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for command in [&["trapstat"][..], &["record", "-o", "a.ptt"], &["misscurve"], &["whatif"]] {
        let mut pagetax = Command::new(env!("CARGO_BIN_EXE_pagetax"));
        pagetax.args(command).args(["--engine", "native", "--", "sh", "-c", "echo started"]);
        let output = pagetax.current_dir(&folder).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{command:?}: {said}");
        assert!(said.contains("samples only") && said.contains("--sample"), "{command:?}: {said}");
        assert!(output.stdout.is_empty(), "{command:?} started the program");
    }
}

#[test]
fn programs_that_generate_code_come_through() {
    if !has_all(&["valgrind", "qemu-x86_64", "cc", "node", "java", "javac"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = "public class H { public static void main(String[] a) { long s = 0; \
                  for (int i = 0; i < 200000; i++) s += i * 7919L % 65535; \
                  System.out.println(s); System.exit(4); } }";
    std::fs::write(folder.path().join("H.java"), source).unwrap();
    let javac = Command::new("javac").arg("H.java").current_dir(&folder).status().unwrap();
    assert!(javac.success());
    let script = "let s = 0; for (let i = 0; i < 200000; i++) s += i * 7919 % 65535; \
                  console.log(s); process.exit(5)";
    let native = has_sampler().then_some(&["--sample", "--engine", "native"][..]);
    let all = [&["--engine", "valgrind"][..], &["--engine", "qemu"]];
    for engine in all.into_iter().chain(native) {
        unharmed(engine, &["node", "-e", script], folder.path());
        unharmed(engine, &["java", "-cp", ".", "H"], folder.path());
    }
}

/// Compiles a line of C by cc.
fn compiled(name: &str, source: &str, options: &[&str], folder: &Path) -> String {
    let (c, program) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&c, source).unwrap();
    let cc = Command::new("cc").args(options).arg(&c).arg("-o").arg(&program).output().unwrap();
    assert!(cc.status.success(), "{}", String::from_utf8_lossy(&cc.stderr));
    program.to_str().unwrap().into()
}

#[test]
fn static_short_and_greedy_programs_keep_their_status() {
    if !has_all(&["valgrind", "qemu-x86_64", "cc", "python3"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let linked = compiled("linked", "int main(void) { return 9; }", &["-static"], path);
    let at_once =
        "__asm__(\".globl _start\\n_start: mov $3, %edi\\n mov $231, %eax\\n syscall\\n\");";
    let at_once = compiled("at_once", at_once, &["-static", "-nostdlib"], path);
    let greedy = ["python3", "-c", "bytearray(1 << 46)"];
    for engine in ["valgrind", "qemu"] {
        for (command, status) in [(&[&*linked][..], 9), (&[&*at_once], 3), (&greedy, 1)] {
            let options = ["--backend", "record", "--engine", engine, "-o", "tables", "--"];
            let arguments: Vec<&str> = options.iter().chain(command).copied().collect();
            let output = trapstat(&arguments, path);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(status), "{command:?}, {engine}: {said}");
            assert!(said.contains("1 threads"), "{command:?}, {engine}: {said}");
        }
    }
}

/// Builds an ELF program of one segment, which begins with its code.
fn elf(machine: u16, code: &[u8]) -> Vec<u8> {
    let base = 0x40_0000u64;
    let length = 120 + code.len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for half in [2, machine] {
        file.extend(half.to_le_bytes());
    }
    file.extend(1u32.to_le_bytes());
    for word in [base + 120, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    file.extend([1u32, 5].iter().flat_map(|word| word.to_le_bytes()));
    for word in [0, base, base, length, length, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

fn executable(path: &Path, content: &[u8], mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, content).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn other_instruction_sets_run_under_qemu_or_are_refused() {
    if !has_all(&["valgrind", "qemu-aarch64", "cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // mov x0, #7; mov x8, #93; svc #0: exit(7)
    let code: Vec<u8> =
        [0xd280_00e0u32, 0xd280_0ba8, 0xd400_0001].iter().flat_map(|i| i.to_le_bytes()).collect();
    executable(&folder.path().join("arm"), &elf(183, &code), 0o755);
    executable(&folder.path().join("alpha"), &elf(0x9026, &code), 0o755);
    let run = |arguments: &[&str]| {
        let output = trapstat(arguments, folder.path());
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = run(&["--backend", "record", "-o", "tables", "--", "./arm"]);
    assert_eq!(code, Some(7), "{said}");
    assert!(said.contains("engine qemu (it runs Aarch64 programs)"), "{said}");
    assert!(said.contains("3 instructions"), "{said}");
    let (code, said) = run(&["--backend", "record", "--engine", "valgrind", "--", "./arm"]);
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("--engine qemu"), "{said}");
    let (code, said) = run(&["--backend", "record", "--", "./alpha"]);
    assert!(code == Some(3) || code == Some(126), "{said}");
    assert!(said.contains("hint:"), "{said}");
}

#[test]
fn programs_with_rights_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    executable(&folder.path().join("rights"), &std::fs::read("/bin/true").unwrap(), 0o4755);
    let output = trapstat(&["--backend", "record", "--", "./rights"], folder.path());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(said.contains("set-id"), "{said}");
}

#[test]
fn ctrl_c_ends_the_program_and_prints_what_was_seen() {
    if !has_all(&["valgrind", "cc", "env", "sh"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // The tests may have been started with SIGINT ignored.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(env!("CARGO_BIN_EXE_pagetax"));
    command.args([
        "trapstat",
        "--backend",
        "record",
        "--",
        "sh",
        "-c",
        "echo up; while :; do :; done",
    ]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.current_dir(&folder).spawn().unwrap();
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let (mut first, mut rest) = (String::new(), String::new());
    std::io::BufRead::read_line(&mut out, &mut first).unwrap();
    assert_eq!(first, "up\n");
    let asked = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(asked.success());
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 2));
    assert!(rest.contains("dtlb-miss") && rest.contains("misses by function"), "{rest}");
}

#[test]
fn listings_are_cut_by_interval_count_cpu_and_form() {
    if !has_all(&["valgrind", "cc", "sort"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    programs(folder.path());
    let printed_of = |options: &[&str], command: &[&str]| {
        let mut arguments = vec!["--backend", "record", "-o", "tables"];
        arguments.extend_from_slice(options);
        arguments.push("--");
        arguments.extend_from_slice(command);
        let output = trapstat(&arguments, folder.path());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read_to_string(folder.path().join("tables")).unwrap()
    };
    let printed = |options: &[&str]| printed_of(options, &["sort", "--parallel=1", "numbers"]);
    let listings = |text: &str| text.matches("  ttl").count();
    let rows = |text: &str, row: &str| text.lines().filter(|line| line.starts_with(row)).count();
    // Long enough to be looked at more than twice.
    let count = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done";
    let by_size = printed_of(&["-T", "0.001", "2"], &["sh", "-c", count]);
    assert_eq!(listings(&by_size), 2, "{by_size}");
    assert_eq!(
        (rows(&by_size, "  0 u    4k|"), rows(&by_size, "  0 k    2m|")),
        (2, 2),
        "{by_size}"
    );
    let brief = printed(&["-t"]);
    assert_eq!((rows(&brief, "  0 u|"), rows(&brief, "  0 k|")), (1, 1), "{brief}");
    let none = printed(&["-T", "-c", "7"]);
    assert_eq!((rows(&none, "  0 u"), listings(&none)), (0, 1), "{none}");
    let listed = printed(&["-T", "-C", "0-3,5"]);
    assert_eq!((rows(&listed, "  0 u"), listings(&listed)), (2, 1), "{listed}");
    let other = printed(&["-T", "-C", "1-3,5"]);
    assert_eq!((rows(&other, "  0 u"), listings(&other)), (0, 1), "{other}");
    let parsable = printed(&["-P", "--pages", "4K,2M"]);
    let (titles, lines): (Vec<_>, Vec<_>) =
        parsable.lines().partition(|line| line.starts_with('#'));
    assert_eq!(titles.len(), 2, "{parsable}");
    assert!(titles[0].contains("4K") && titles[1].contains("2M"), "{parsable}");
    assert_eq!(lines.len(), 8, "two views, u and k, two sizes: {parsable}");
    for line in lines {
        let fields: Vec<_> = line.split(' ').collect();
        assert_eq!(fields.len(), 12, "{line}");
        assert!(fields[0].parse::<u64>().is_ok() && fields[1] == "0", "{line}");
    }
}

/// Misses in a million instructions and half of their interval, as a sampled recording says.
fn estimated(said: &str) -> Option<(f64, f64)> {
    let line = said.lines().find(|line| line.contains(": data misses in a million"))?;
    let numbers = line.split_once("instructions: ")?.1;
    let mut words = numbers.split(' ');
    let value = words.next()?.parse().ok()?;
    Some((value, words.nth(1)?.parse().ok()?))
}

#[test]
fn sampled_recordings_state_an_error_that_holds() {
    if !has_all(&["valgrind", "cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // Far more pages than the TLB of any CPU has, whose size the simulated machine takes.
    let source = "static char m[16384][4096]; int main(void) { unsigned long s = 88172645463325252ul; \
                  for (long i = 0; i < 100000000; i++) { s ^= s << 13; s ^= s >> 7; s ^= s << 17; \
                  if (s % 64 == 0) m[(s >> 8) % 16384][s >> 52]++; } return 0; }";
    let program = compiled("draws", source, &["-O1"], folder.path());
    let options = ["--backend", "record", "--json=json", "-o", "tables"];
    let run = |more: &[&str]| {
        let arguments: Vec<&str> = options.iter().chain(more).copied().collect();
        let output = trapstat(&arguments, folder.path());
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let sampled = run(&["--sample", "--engine", "valgrind", "--", &program]);
    let (value, error) = estimated(&sampled).unwrap_or_else(|| panic!("{sampled}"));
    assert!(error < value * 0.05, "of a program that does the same all the time: {sampled}");
    run(&["--", &program]);
    let text = std::fs::read_to_string(folder.path().join("json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let all: u64 = json["profiles"][0]["memory"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line["misses"].as_u64().unwrap())
        .sum();
    let note = json["notes"][0].as_str().unwrap();
    let instructions: f64 = note.split(' ').next().unwrap().parse().unwrap();
    let truth = all as f64 / instructions * 1e6;
    // Once in twenty the interval misses; and a program that ends has its beginning in it, too.
    assert!((value - truth).abs() <= error * 2.0 + truth * 0.02, "{truth}, sampled: {sampled}");
}

#[test]
fn native_bursts_find_what_a_full_recording_does() {
    if !has_sampler() || !has_all(&["valgrind", "cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // The same all the time, so that a shorter run tells the rate; of more pages than any TLB has.
    let source = "#include <stdlib.h>\nstatic char m[16384][4096]; int main(int c, char **v) { unsigned long s = \
                  88172645463325252ul; for (long i = 0, n = atol(v[1]); i < n; i++) { s ^= s << 13; s ^= s >> 7; s ^= s \
                  << 17; if (s % 64 == 0) m[(s >> 8) % 16384][s >> 52]++; } return 0; }";
    let program = compiled("draws", source, &["-O1"], folder.path());
    let run = |options: &[&str], count: &str| {
        let command = ["-o", "tables", "--", &program, count];
        let arguments: Vec<&str> = options.iter().chain(&command).copied().collect();
        let output = trapstat(&arguments, folder.path());
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let full = run(&["--backend", "record", "--engine", "valgrind"], "60000000");
    let line = full.lines().find(|line| line.contains(": data misses in a million")).unwrap();
    let truth: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
    let sampled = run(&["--sample", "--engine", "native"], "1200000000");
    assert!(sampled.contains("engine native (asked for)"), "{sampled}");
    let (value, error) = estimated(&sampled).unwrap_or_else(|| panic!("{sampled}"));
    assert!(error < value * 0.05, "of a program that does the same all the time: {sampled}");
    assert!((value / truth - 1.0).abs() <= 0.05, "{truth}, sampled: {sampled}");
}

#[test]
fn source_lines_that_miss_are_named() {
    if !has_all(&["valgrind", "gcc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = "#include <stdlib.h>\n\
        int main(void) {\n\
        \u{20}volatile char *memory = malloc(16 << 20);\n\
        \u{20}for (long at = 0; at < 4096; at++)\n\
        \u{20} memory[at * 4096] = 1;\n\
        \u{20}return 0;\n}\n";
    let program = compiled("lines", source, &["-g", "-O0"], folder.path());
    let output =
        trapstat(&["--backend", "record", "--json=lines.json", "--", &program], folder.path());
    assert!(output.status.success(), "{output:?}");
    let tables = String::from_utf8_lossy(&output.stderr).into_owned();
    let json = std::fs::read_to_string(folder.path().join("lines.json")).unwrap();
    let document: serde_json::Value = serde_json::from_str(&json).unwrap();
    let worst = &document["profiles"][0]["functions"][0]["lines"][0];
    assert!(worst["file"].as_str().unwrap().ends_with("lines.c"), "{worst}");
    assert_eq!(worst["line"], 5, "{worst}");
    assert!(worst["misses"].as_u64().unwrap() >= 3000, "{worst}");
    assert!(tables.contains("lines.c:5"), "{tables}");
    // Without debug information there is nothing to name.
    let program = compiled("bare", source, &["-g0", "-O0"], folder.path());
    let output =
        trapstat(&["--backend", "record", "--json=bare.json", "--", &program], folder.path());
    assert!(output.status.success(), "{output:?}");
    let json = std::fs::read_to_string(folder.path().join("bare.json")).unwrap();
    let document: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(document["profiles"][0]["functions"][0].get("lines").is_none(), "{json}");
}

#[test]
fn children_are_followed_on_request() {
    if !has_all(&["valgrind", "cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let threads = |options: &[&str]| {
        let mut arguments = vec!["--backend", "record", "-o", "tables", "--json=json"];
        arguments.extend_from_slice(options);
        arguments.extend_from_slice(&["--", "sh", "-c", "cat /dev/null; (exit 4)"]);
        let output = trapstat(&arguments, folder.path());
        assert_eq!(output.status.code(), Some(4), "{}", String::from_utf8_lossy(&output.stderr));
        let text = std::fs::read_to_string(folder.path().join("json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let rows = json["listings"][0]["rows"].as_array().unwrap().clone();
        rows.iter().map(|row| row["cpu"].as_u64().unwrap()).max().unwrap() + 1
    };
    assert_eq!(threads(&[]), 1);
    assert!(threads(&["-f"]) >= 3, "the shell, cat, and the shell in brackets");
}

#[test]
fn ends_by_signals_are_kept() {
    if !has_all(&["valgrind", "cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--backend", "record", "-o", "tables", "--", "sh", "-c", "kill -TERM $$"];
    let output = trapstat(&arguments, folder.path());
    assert_eq!(output.status.code(), Some(128 + 15));
    assert!(String::from_utf8_lossy(&output.stderr).contains("ended by signal 15"));
}

#[test]
fn bad_input_gets_a_clear_word() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, code, word) in [
        (&["--backend", "record", "--", "no-such-program"][..], 127, "not found"),
        (&["--backend", "record", "--", "/etc/passwd"], 126, "execute permission"),
        (&["--backend", "record"], 2, "no command to record"),
        (&["--backend", "record", "-p", "1"], 3, "running process"),
        (&["--on", "sim:sparcstation-1", "--backend", "record", "--", "true"], 2, "no TLB"),
        (&["--on", "host", "--backend", "record", "--", "true"], 2, "no simulated machine"),
        (&["--pages", "head=2M", "--backend", "record", "--", "true"], 2, "names no part"),
        (&["0", "--", "true"], 2, "interval"),
        (&["-l"], 2, "`pagetax doctor`"),
        (&["-a", "1"], 2, "without an interval"),
        (&["-e", "dtlb-miss", "--", "true"], 2, "-T splits misses"),
        (&["-r", "100", "--", "true"], 2, "trapstat 0.1"),
        (&["-C", "3-1", "--", "true"], 2, "is no list of CPUs"),
        (&["-p", "1,4194304", "1", "1"], 2, "no process 4194304"),
    ] {
        let output = trapstat(arguments, folder.path());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(word), "{arguments:?}: {said}");
    }
}
