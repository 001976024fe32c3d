//! The header and the library from C: compiled with all warnings, run on the real kernel.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Links the library, which is built beside this test, under the names that linker and loader look for.
fn libraries(directory: &Path) -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let built = here.with_file_name("libpagetax.so");
    assert!(built.exists(), "libpagetax.so is not built");
    for name in ["libpagetax.so", "libpagetax.so.0"] {
        // A second program of the same test finds them there.
        let _ = std::os::unix::fs::symlink(&built, directory.join(name));
    }
    directory.to_path_buf()
}

fn compile(compiler: &[&str], source: &str, program: &Path) {
    let libraries = libraries(program.parent().unwrap());
    let mut command = Command::new(compiler[0]);
    command.args(&compiler[1..]).args(["-Wall", "-Wextra", "-Werror", "-O1", "-I"]);
    command.arg(format!("{HERE}/include")).arg("-o").arg(program);
    command.arg(format!("{HERE}/{source}")).arg("-L").arg(&libraries);
    command.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-lpagetax");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn run(program: &Path) -> Output {
    Command::new(program).env_remove("LD_PRELOAD").output().unwrap()
}

#[test]
fn arguments_and_errno_values() {
    let directory = tempfile::tempdir().unwrap();
    for (name, compiler) in [("c", &["cc", "-std=gnu99"]), ("c++", &["c++", "-xc++"])] {
        if Command::new(compiler[0]).arg("--version").output().is_err() {
            println!("SKIP: {} is not installed", compiler[0]);
            continue;
        }
        let program = directory.path().join(name);
        compile(compiler, "tests/errors.c", &program);
        let status = run(&program).status;
        assert!(status.success(), "{name}: line {status} of errors.c");
    }
}

#[test]
fn code_that_asks_where_it_can_gets_large_pages() {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if !enabled.is_ok_and(|text| !text.contains("[never]")) {
        println!("SKIP: transparent huge pages are switched off");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("large");
    compile(&["cc", "-std=gnu99", "-include", "pagetax.h"], "tests/large.c", &program);
    let output = run(&program);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("size 2097152 2097152"));
    for line in lines {
        let words: Vec<_> = line.split(' ').collect();
        let (large, all): (u64, u64) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        // All begin and end where they like: up to 2 MiB at each end are outside whole huge pages.
        let percent = if words[0] == "heap" { 90 } else { 80 };
        assert!(large * 100 >= all * percent, "{text}");
    }
}

#[test]
fn rust_has_the_same() {
    use pagetax::{AdviceError, Part, Request, advise, information, page_sizes};
    assert_eq!(page_sizes()[0], 4096);
    assert_eq!(advise(Part::Heap, 12345), Err(AdviceError::Invalid));
    assert_eq!(advise(Part::Range(4096, 0), 4096), Err(AdviceError::Invalid));
    let value = Box::new(7u64);
    let address = &raw const *value as u64;
    let answers = information(&[address, 4096], &[Request::PageBytes, Request::Replica]);
    assert!(answers[0].is_good && answers[0].values[0] >= Some(4096));
    assert_eq!((answers[0].values[1], answers[1].is_good), (None, false));
}

#[test]
fn network_memory_from_c() {
    use pagetax_remote::server::listen::{Server, ServerOptions};
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("remote");
    compile(&["cc", "-std=gnu99"], "tests/remote.c", &program);
    let start = || Server::start("127.0.0.1:0".parse().unwrap(), ServerOptions::default()).unwrap();
    let servers = [start(), start()];
    let both = format!("{},{}", servers[0].address(), servers[1].address());
    let in_place = "8"; // PAGETAX_REMOTE_IN_PLACE
    for args in [vec!["0"], vec!["0", &both], vec![in_place], vec![in_place, &both]] {
        let output = Command::new(&program).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        match said.strip_prefix("SKIP:") {
            Some(why) => println!("SKIP:{why}"),
            None => assert_eq!(said, "right\n"),
        }
    }
}

#[test]
fn the_example_of_network_memory() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("example");
    compile(&["cc", "-std=gnu99"], "examples/remote.c", &program);
    let output = Command::new(&program).args(["24", "6"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("userfaultfd") {
        println!("SKIP: {}", errors.trim());
        return;
    }
    let count = 24u64 << 17;
    let sum = format!("sum {}\n", count * (count - 1) / 2);
    assert_eq!(String::from_utf8_lossy(&output.stdout), sum, "{errors}");
    let pages = errors.split(' ').next().and_then(|pages| pages.parse::<u64>().ok());
    assert!(output.status.success() && pages > Some(18 * 256), "{errors}");
}
