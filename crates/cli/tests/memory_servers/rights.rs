//! Who may end a server, what its signals mean, and what it keeps to itself.

use crate::pages::wait_until;
use crate::serve::{PAGETAX, Serve};
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::wire::CHECKSUM_BYTES;
use pagetax_remote::wire::header::HEADER_BYTES;
use pagetax_remote::wire::hello::{HELLO_BYTES, Hello};
use pagetax_remote::wire::request::{Lease, Request};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn is_draining(server: &Serve) -> bool {
    server.get("/health").contains("draining")
}

const HTTP: &[&str] = &["--http", "127.0.0.1:0"];

#[test]
fn another_user_cannot_drain_a_server() {
    // A copy that any user can run: the folders of the original may be closed to them.
    let folder = tempfile::Builder::new().prefix("pagetax").tempdir_in("/tmp").unwrap();
    let copy = folder.path().join("pagetax");
    fs::copy(PAGETAX, &copy).unwrap();
    let mut chmod = Command::new("chmod");
    chmod.arg("755").args([folder.path(), copy.as_path()]);
    assert!(chmod.status().unwrap().success());
    let server = Serve::start("16M", "127.0.0.1:0", HTTP);
    let mut drain = Command::new(&copy);
    drain.args(["serve", "--drain", "--listen", &server.address]).uid(4711).gid(4711);
    let output = match drain.current_dir("/").output() {
        Ok(output) => output,
        Err(error) => return println!("SKIP: only root can be another user: {error}"),
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("another user"), "{said}");
    assert!(!is_draining(&server));
}

/// Certificates of a fresh authority for loopback, as options.
fn certificates(folder: &Path) -> Vec<String> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["127.0.0.1".to_string()]).unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    let files = [
        ("--tls-cert", certificate.pem()),
        ("--tls-key", key.serialize_pem()),
        ("--tls-ca", authority.pem()),
    ];
    let written = files.into_iter().flat_map(|(option, pem)| {
        let path = folder.join(option);
        fs::write(&path, pem).unwrap();
        [option.to_string(), path.display().to_string()]
    });
    written.collect()
}

#[test]
fn a_hangup_has_a_server_read_its_certificates_again() {
    let folder = tempfile::tempdir().unwrap();
    let options = certificates(folder.path());
    let said = folder.path().join("stderr");
    let mut child: Child = Command::new(PAGETAX)
        .args(["serve", "--memory", "16M", "--listen", "127.0.0.1:0"])
        .args(&options)
        .stdout(Stdio::piped())
        .stderr(fs::File::create(&said).unwrap())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let stdout = child.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
    let address = line.split(" to lend on ").nth(1).unwrap().trim().to_string();
    let hear = |times: usize, what: &str| {
        wait_until(what, 60, || fs::read_to_string(&said).unwrap().matches(what).count() >= times);
    };
    let hang_up = |child: &Child| {
        let pid = child.id().to_string();
        assert!(Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
    };
    let shows = || {
        let mut servers = Command::new(PAGETAX);
        servers.args(["servers", "--once", "--servers", &address]).args(&options);
        String::from_utf8(servers.output().unwrap().stdout).unwrap()
    };
    assert!(shows().contains(" up "), "{}", shows());
    certificates(folder.path());
    hang_up(&child);
    hear(1, "as they are now");
    // With the new ones, as the old authority would not do; and it does not drain.
    assert!(shows().contains(" up "), "{}", shows());
    fs::write(folder.path().join("--tls-key"), "no key").unwrap();
    hang_up(&child);
    hear(1, "the old certificates stay in use");
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Starts a server from a shell that sets limits.
fn limited(limit: &str) -> Serve {
    let script = format!("{limit}; exec {PAGETAX} \"$@\"");
    Serve::spawn(Command::new("sh").args(["-c", &script, "sh"]), "16M", "127.0.0.1:0", HTTP)
}

#[test]
fn http_answers_again_when_file_descriptors_are_there_again() {
    let server = limited("ulimit -n 60");
    assert!(server.get("/health").ends_with("ok\n"));
    let connections: Vec<TcpStream> =
        (0..100).map(|_| TcpStream::connect(&server.address).unwrap()).collect();
    let mine = server.http().to_string();
    let waiting: Vec<TcpStream> = (0..8).map(|_| TcpStream::connect(&mine).unwrap()).collect();
    wait_until("it has run out of file descriptors", 20, || {
        fs::read_dir(format!("/proc/{}/fd", server.child.id())).unwrap().count() >= 57
    });
    drop((connections, waiting));
    assert!(server.get("/health").ends_with("ok\n"));
}

#[test]
fn pages_of_others_do_not_get_into_a_core_dump() {
    let folder = tempfile::tempdir().unwrap();
    let abort = "ulimit -c unlimited && kill -ABRT $$";
    let control = Command::new("sh").args(["-c", abort]).current_dir(folder.path()).status();
    if !control.unwrap().core_dumped() {
        return println!("SKIP: nothing dumps core here");
    }
    let mut server = limited("ulimit -c unlimited; cd /tmp");
    server.signal("-ABRT");
    let status = server.child.wait().unwrap();
    assert!(status.signal().is_some() && !status.core_dumped(), "{status}");
}

/// A memory cgroup with this limit, of version 1 or 2; removed when dropped.
struct Cgroup(String);

impl Cgroup {
    fn new(limit: &str) -> std::io::Result<Cgroup> {
        let name = format!("pagetax-serve-test-{}", std::process::id());
        let one = Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists();
        let (mount, file) = match one {
            true => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            false => ("/sys/fs/cgroup", "memory.max"),
        };
        let cgroup = Cgroup(format!("{mount}/{name}"));
        fs::create_dir(&cgroup.0)?;
        // Not created: it is there only if this is a memory cgroup.
        let mut file = fs::OpenOptions::new().write(true).open(format!("{}/{file}", cgroup.0))?;
        file.write_all(limit.as_bytes())?;
        Ok(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_cgroup_with_less_memory_than_is_to_be_lent_is_told() {
    let cgroup = match Cgroup::new("64M") {
        Ok(cgroup) => cgroup,
        Err(error) => return println!("SKIP: no memory cgroup can be made here: {error}"),
    };
    let serve = format!("exec {PAGETAX} serve --memory 256M --listen 127.0.0.1:0");
    let script = format!("echo $$ > {}/cgroup.procs && {serve}", cgroup.0);
    let output = Command::new("timeout").args(["20", "sh", "-c", &script]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("its cgroup may have"), "{said}");
}

/// Encodes a put of 64 pages to a region of another client, which is denied once all of it has arrived.
fn large_request() -> Vec<u8> {
    let (checksums, pages) = (vec![0; 64 * CHECKSUM_BYTES], vec![7; 64 * PAGE_BYTES]);
    let on = Lease { region: 1, lease: 1 };
    let put = Request::Put { on, first: 0, if_absent: false, checksums: &checksums, pages: &pages };
    let mut frame = Vec::new();
    put.encode_head(1, &mut frame);
    frame.extend_from_slice(&pages);
    frame
}

#[test]
fn memory_of_connections_is_bounded_and_given_back() {
    const MAY_GROW: u64 = 16 << 20;
    let server = Serve::start("16M", "127.0.0.1:0", &[]);
    let before = server.own_bytes();
    let request = large_request();
    // All of them stay open. Each request would keep its quarter of a MiB: 50 MiB.
    let open: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut stream = TcpStream::connect(&server.address).unwrap();
            let mut hello = [0; HELLO_BYTES];
            stream.write_all(&Hello::client("large").encode()).unwrap();
            stream.read_exact(&mut hello).unwrap();
            stream.write_all(&request).unwrap();
            let mut reply = [0; HEADER_BYTES];
            stream.read_exact(&mut reply).unwrap();
            stream
        })
        .collect();
    let grown = || server.own_bytes().saturating_sub(before);
    assert!(grown() < MAY_GROW, "{} MiB", grown() >> 20);
    drop(open);
}

#[test]
fn a_request_that_does_not_arrive_holds_up_nobody_for_long() {
    // So little memory that there is one large buffer.
    let server = Serve::start("1M", "127.0.0.1:0", &[]);
    let connect = || {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let mut hello = [0; HELLO_BYTES];
        stream.write_all(&Hello::client("large").encode()).unwrap();
        stream.read_exact(&mut hello).unwrap();
        stream
    };
    let (mut slow, mut waiting, request) = (connect(), connect(), large_request());
    slow.write_all(&request[..100_000]).unwrap();
    waiting.write_all(&request).unwrap();
    let mut reply = [0; HEADER_BYTES];
    waiting.read_exact(&mut reply).unwrap();
    // The slow one has been turned away.
    assert!(matches!(slow.read(&mut reply), Ok(0) | Err(_)));
}
