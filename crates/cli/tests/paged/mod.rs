//! A paged program that fills its pages, waits, and then checks all of them.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Output, Stdio};

/// Fills pages, each with what it alone has; when told to go on, checks all, changes all, checks again.
const PAGES: &str = "
import hashlib, sys
PAGES = 5000
pages = bytearray(PAGES * 4096)
def page(number, turn):
    return hashlib.sha256(b'%d %d' % (number, turn)).digest() * 128
def put(turn):
    for n in range(PAGES): pages[n * 4096:n * 4096 + 4096] = page(n, turn)
def check(turn):
    for n in range(PAGES): assert pages[n * 4096:n * 4096 + 4096] == page(n, turn), (n, turn)
put(0)
print('filled', flush=True)
sys.stdin.readline()
check(0); put(1); check(1)
print(hashlib.sha256(pages).hexdigest(), flush=True)
";

/// A paged program that has filled its pages and waits.
pub struct Waiting {
    child: Child,
    go: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

/// Starts the program. Prints a skip and returns None if this user may not page.
pub fn start(options: &[&str]) -> Option<Waiting> {
    start_script("12M", options, PAGES)
}

/// Starts a script of Python with so much resident memory, and waits for its first line, `filled`. Prints a
/// skip and returns None if this user may not page.
pub fn start_script(resident: &str, options: &[&str], script: &str) -> Option<Waiting> {
    let mut child = command(resident, options, &["/usr/bin/python3", "-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let go = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    if line != "filled\n" {
        let errors = child.wait_with_output().unwrap().stderr;
        let errors = String::from_utf8_lossy(&errors);
        assert!(errors.contains("userfaultfd") || errors.contains("not found"), "{errors}");
        println!("SKIP: {}", errors.trim());
        return None;
    }
    Some(Waiting { child, go, output })
}

fn command(resident: &str, options: &[&str], words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.args(["remote", "--resident", resident]).args(options).arg("--").args(words);
    command.env_remove("LD_PRELOAD");
    command
}

/// Returns the output and stderr of a command with 12M resident. Prints a skip and returns None if this
/// user may not page.
pub fn remote(options: &[&str], words: &[&str]) -> Option<(Output, String)> {
    let output = command("12M", options, words).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.code() == Some(125) && errors.contains("userfaultfd:") {
        println!("SKIP: {}", errors.trim());
        return None;
    }
    Some((output, errors))
}

impl Waiting {
    /// Lets it go on, and returns its next line.
    pub fn go_on(&mut self) -> String {
        self.go.write_all(b"go\n").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().into()
    }

    /// Lets it go on; its last line and how it ended.
    pub fn finish(mut self) -> (String, Output) {
        (self.go_on(), self.child.wait_with_output().unwrap())
    }
}

/// Returns the program's output without paging.
pub fn right_answer() -> String {
    let mut child = Command::new("/usr/bin/python3")
        .args(["-c", PAGES])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let output = child.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().nth(1).unwrap().into()
}

/// Builds a program of the library's tests into a folder.
pub fn program_of_the_library(name: &str, folder: &std::path::Path) -> String {
    let program = folder.join(name).display().to_string();
    let source = format!("{}/../remote-preload/tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    let built = cc.args(["-O1", "-pthread", &source, "-o", &program, "-lutil"]).status().unwrap();
    assert!(built.success());
    program
}
