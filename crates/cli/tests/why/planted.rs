//! Processes of plants.c, and the answers of `pagetax why` about them.

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Returns the mode of transparent huge pages.
pub fn thp_mode() -> String {
    let text = std::fs::read_to_string(format!("{THP}/enabled")).unwrap();
    text.split_once('[').unwrap().1.split_once(']').unwrap().0.into()
}

pub fn pool_pages() -> u64 {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    std::fs::read_to_string(path).map_or(0, |text| text.trim().parse().unwrap())
}

pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIP: needs root");
    }
    root
}

/// Makes a folder that all users may read.
pub fn readable_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).unwrap();
    folder
}

/// Returns plants.c as a program: `plants`, `plants-static` or `plants-musl`. Compiles it once.
pub fn compiled(name: &str) -> PathBuf {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = readable_folder();
        for (name, compiler, flags) in [
            ("plants", "cc", vec!["-O1"]),
            ("plants-static", "cc", vec!["-O1", "-static"]),
            ("plants-musl", "musl-gcc", vec!["-O1", "-static"]),
        ] {
            let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/why/plants.c");
            let mut cc = Command::new(compiler);
            cc.args(flags).arg(source).arg("-o").arg(folder.path().join(name));
            assert!(cc.status().unwrap().success(), "{cc:?}");
        }
        folder
    });
    folder.path().join(name)
}

/// A plant, which ends with its input.
pub struct Plant {
    child: Child,
    pid: String,
}

impl Plant {
    pub fn of(plant: &str) -> Plant {
        Plant::with(plant, "plants", &[])
    }

    /// Starts a plant of one of the programs with variables in its environment.
    pub fn with(plant: &str, program: &str, environment: &[(&str, &str)]) -> Plant {
        let mut command = Command::new(compiled(program));
        command.arg(plant);
        for name in ["GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_CONF", "MPSSHEAP"] {
            command.env_remove(name);
        }
        command.envs(environment.iter().copied());
        Plant::start(command)
    }

    pub fn start(mut command: Command) -> Plant {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let pid = line.trim().strip_prefix("up ").unwrap_or_else(|| panic!("{command:?}: {line}"));
        Plant { pid: pid.into(), child }
    }

    pub fn pid(&self) -> &str {
        &self.pid
    }

    /// Returns the answer of `pagetax why` about it.
    pub fn answer(&self) -> Value {
        document(&[&self.pid])["processes"][0].clone()
    }
}

impl Drop for Plant {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let status = self.child.wait().unwrap();
        assert!(status.success() || std::thread::panicking(), "{status}");
    }
}

fn why(args: &[&str]) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_BIN_EXE_pagetax")));
    command.arg("why").args(args).env("NO_COLOR", "1");
    command
}

pub fn document(args: &[&str]) -> Value {
    let output = why(&[args, &["--json"]].concat()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

pub fn refused(args: &[&str]) -> (Option<i32>, String) {
    let output = why(args).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}
