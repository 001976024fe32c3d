//! `pagetax remote` with real servers and real programs: servers die while they run.

mod serve;

use serve::{PAGETAX, Serve};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
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
struct Waiting {
    child: Child,
    go: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

/// None where this user may not page, and says so.
fn start(options: &[&str]) -> Option<Waiting> {
    let mut child = Command::new(PAGETAX)
        .args(["remote", "--resident", "12M"])
        .args(options)
        .args(["--", "/usr/bin/python3", "-c", PAGES])
        .env_remove("LD_PRELOAD")
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

impl Waiting {
    /// Lets it go on; its last line and how it ended.
    fn finish(mut self) -> (String, Output) {
        self.go.write_all(b"go\n").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        (line.trim().into(), self.child.wait_with_output().unwrap())
    }
}

/// What the program says in the end when it is not paged.
fn right_answer() -> String {
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

#[test]
fn a_program_outlives_one_of_two_servers() {
    let mut servers = [Serve::any("64M"), Serve::any("64M")];
    let both = format!("{},{}", servers[0].address, servers[1].address);
    let options = ["--servers", &both, "--copies", "2", "--stats"];
    let Some(program) = start(&options) else { return };
    servers[0].kill();
    let (answer, output) = program.finish();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {errors}", output.status);
    assert_eq!(answer, right_answer());
    assert!(!errors.contains("demand_page_in_count: 0,"), "nothing was paged: {errors}");
}

#[test]
fn a_lost_page_is_sigbus_and_a_line_that_names_it() {
    let mut server = Serve::any("64M");
    let address = server.address.clone();
    let Some(program) = start(&["--servers", &address]) else { return };
    server.kill();
    // Another in its place: the client need not wait to see whether the pages come back.
    let _other = Serve::start("64M", &address, &[]);
    let (answer, output) = program.finish();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{errors}");
    assert_eq!(answer, "");
    assert!(errors.contains("SIGBUS at 0x") && errors.contains("is lost"), "{errors}");
}

#[test]
fn servers_that_will_not_do_are_told_before_the_program_starts() {
    let server = Serve::any("16M");
    let tries: [(&[&str], &str); 4] = [
        (&["--servers", "127.0.0.1:1"], "pagetax serve"),
        (&["--servers", &server.address, "--copies", "2"], "2 memory servers for 2 copies"),
        (&["--copies", "2"], "--servers"),
        (&["--servers", "no-such-host.invalid"], "no-such-host.invalid"),
    ];
    for (options, remedy) in tries {
        let output = Command::new(PAGETAX)
            .args(["remote", "--resident", "12M"])
            .args(options)
            .args(["--", "echo", "it ran"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(remedy), "{options:?}: {said}");
        assert!(!output.status.success() && output.stdout.is_empty(), "{options:?}: {output:?}");
    }
}
