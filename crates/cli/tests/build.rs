//! Programs that carry their page sizes themselves, in C, C++ and Rust: no library at run time.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Fills 40 MB of heap in small pieces, and prints how much of it is on huge pages, in percent.
const C: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(void)
{
	for (int i = 0; i < 8000; i++)
		memset(malloc(5000), 1, 5000);
	unsigned long kb, resident = 0, huge = 0;
	int inside = 0;
	char line[512];
	FILE *maps = fopen("/proc/self/smaps", "r");
	while (fgets(line, sizeof line, maps)) {
		if (strchr(line, '-') && strchr(line, '-') < line + 20)
			inside = strstr(line, "[heap]") != NULL;
		if (inside && sscanf(line, "Rss: %lu", &kb) == 1)
			resident += kb;
		if (inside && sscanf(line, "AnonHugePages: %lu", &kb) == 1)
			huge += kb;
	}
	printf("%lu %lu\n", huge * 100 / resident, resident >> 10);
	return 0;
}
"#;

const RUST: &str = r#"
fn main() {
    let keep: Vec<Vec<u8>> = (0..8000).map(|_| vec![1; 5000]).collect();
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut resident, mut huge) = (false, 0, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let key = words.next().unwrap();
        let kb = words.next().unwrap().parse::<u64>().unwrap_or(0);
        match key {
            "Rss:" if inside => resident += kb,
            "AnonHugePages:" if inside => huge += kb,
            _ if !key.ends_with(':') => inside = line.ends_with("[heap]"),
            _ => {}
        }
    }
    println!("{} {}", huge * 100 / resident.max(1), resident >> 10);
    drop(keep);
}
"#;

fn pagetax() -> Command {
    Command::new(env!("CARGO_BIN_EXE_pagetax"))
}

/// Builds the archive where `pagetax build` looks for it first: cargo builds it for those who ask.
fn with_archive() {
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let build = ["build", "--quiet", "--package", "pagetax-interpose", "--profile", profile];
    let status = Command::new(env!("CARGO")).args(build).status().unwrap();
    assert!(status.success());
}

/// Runs a program, and returns the percentage on huge pages and the resident MB.
fn run(program: &Path) -> (u64, u64) {
    let output = Command::new(program).env_remove("LD_PRELOAD").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut numbers = text.split_whitespace().map(|word| word.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

fn build(driver: &str, sizes: &[&str], source: &Path, program: &Path) {
    let output = pagetax()
        .args(["build", "--", driver])
        .args(sizes)
        .arg("-o")
        .arg(program)
        .arg(source)
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn programs_carry_their_page_sizes() {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if !enabled.is_ok_and(|text| text.contains("[madvise]")) {
        println!("SKIP: needs transparent_hugepage/enabled to be madvise, to tell");
        return;
    }
    with_archive();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let sources: [(&str, PathBuf, &str); 3] =
        [("cc", path("fill.c"), C), ("c++", path("fill.cc"), C), ("rustc", path("fill.rs"), RUST)];
    for (driver, source, text) in &sources {
        if Command::new(driver).arg("--version").output().is_err() {
            println!("SKIP: {driver} is not installed");
            continue;
        }
        let text = if *driver == "c++" {
            text.replace("malloc(", "(char *)malloc(")
        } else {
            text.to_string()
        };
        std::fs::write(source, text).unwrap();
        let (plain, sized) = (path("plain"), path("sized"));
        build(driver, &[], source, &plain);
        build(driver, &["-xpagesize=2M"], source, &sized);
        let (none, all) = (run(&plain), run(&sized));
        assert!(none.0 == 0 && none.1 >= 30, "{driver}: {none:?}");
        assert!(all.0 >= 95 && all.1 >= 30, "{driver}: {all:?}");
    }
}

#[test]
fn the_compilers_word_is_ours() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("wrong.c");
    std::fs::write(&source, "int main(void) { return }\n").unwrap();
    let output =
        pagetax().args(["build", "cc", "-xpagesize=2M", "-c"]).arg(&source).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let output = pagetax().args(["build", "--", "cc", "-xpagesize=3M", "x.c"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let missing = pagetax().args(["build", "--", "/nonexistent/cc", "x.c"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(127), "{missing:?}");
}
