//! The program on the live kernel: as an ordinary user, on a reserved pool, interrupted, calibrating.

use pagetax_core::cause::Account;
use pagetax_core::diagnosis::{AS_IS, Diagnosis};
use pagetax_core::report::Run;
use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const NOBODY: u32 = 65534;
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

fn command(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).env("NO_COLOR", "1").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn pagetax(args: &[&str]) -> Command {
    command(Path::new(env!("CARGO_BIN_EXE_pagetax")), args)
}

fn document<T: serde::de::DeserializeOwned>(output: &Output) -> T {
    let error = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {error}"))
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A number that stands in a setting, which is back when the value goes.
struct Restored(&'static str, String);

impl Restored {
    fn write(path: &'static str, value: &str) -> std::io::Result<Restored> {
        let restored = Restored(path, std::fs::read_to_string(path)?);
        std::fs::write(path, value)?;
        Ok(restored)
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        std::fs::write(self.0, &self.1).expect("the setting takes what stood in it");
    }
}

/// Copies the program to a directory that an ordinary user can reach.
fn for_everybody() -> (tempfile::TempDir, std::path::PathBuf) {
    use std::os::unix::fs::{PermissionsExt, chown};
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    chown(directory.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let program = directory.path().join("pagetax");
    std::fs::copy(env!("CARGO_BIN_EXE_pagetax"), &program).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    (directory, program)
}

/// Returns true if the system's settings let an ordinary user sample kernel stacks.
fn stacks_for_everybody() -> bool {
    let setting = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap();
        text.trim().parse::<i32>().unwrap()
    };
    setting("perf_event_paranoid") < 2 && setting("kptr_restrict") == 0
}

#[test]
fn an_ordinary_user_gets_answers_and_reasons() {
    if !is_root() {
        println!("SKIP: an ordinary user: this is one already, and all other tests run as it");
        return;
    }
    let (directory, program) = for_everybody();
    let as_nobody = |args: &[&str]| {
        let mut command = command(&program, args);
        command.uid(NOBODY).gid(NOBODY).current_dir("/").env("TMPDIR", directory.path());
        let output = command.env("HOME", directory.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output
    };
    let options = ["diagnose", "--json", "--runs", "2", "--warmup", "0", "--"];
    let script = "seq 200000 | sort -S 50M -r | tail -n 1";
    let diagnosis: Diagnosis =
        document(&as_nobody(&[&options[..], &["sh", "-c", script]].concat()));
    assert_eq!(diagnosis.trials.iter().find(|t| t.name == AS_IS).unwrap().runs_ns.len(), 2);
    assert!(diagnosis.skipped.iter().all(|s| !s.why.is_empty() && !s.remedy.is_empty()));
    let budget = diagnosis.budget.unwrap();
    let rows = Account::ALL.into_iter().flat_map(|account| budget.rows(account));
    let missing: Vec<_> = rows.filter(|row| row.ns.is_none()).collect();
    assert!(missing.iter().all(|row| !row.how.is_empty()), "{missing:?}");
    // Kernel stacks are what privileges buy here.
    let all = stacks_for_everybody();
    assert!(all || missing.iter().any(|row| row.how.contains("kernel stacks")), "{missing:?}");

    let job = ["run", "tlb-gather", "--set", "size=8M", "--set", "count=20000", "--json"];
    let run: Run = document(&as_nobody(&[&job[..], &["--fault-latency"]].concat()));
    let text = serde_json::to_value(&run).unwrap();
    let counters = text["counters"].as_object().unwrap();
    let missing = || counters.values().filter(|c| c["provenance"] == "missing");
    assert!(missing().all(|c| c.get("value").is_none() && c["why"].as_str() > Some("")), "{text}");
    // Faults are timed without privileges, or there is a word on why not.
    let timed = run.latency.get("minor_fault").is_some_and(|latency| latency.count >= 2048);
    assert!(timed || run.warnings.iter().any(|w| w.id == "no_fault_latency"), "{text}");
}

#[test]
fn a_pool_of_huge_pages_is_used_and_left_as_it_was() {
    if !is_root() || !Path::new(POOL).exists() {
        println!("SKIP: a pool of huge pages: needs root and hugetlb");
        return;
    }
    let overcommit = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";
    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    let before = [read(POOL), read(overcommit)];
    let took = |more: &[&str]| {
        let options = ["diagnose", "--json", "--runs", "2", "--pages", "hugetlb:2M"];
        let program = "x = bytearray(24 << 20); x[::4096] = b'1' * len(x[::4096]); \
                       sum(x[i % len(x)] for i in range(0, 1 << 33, 4099))";
        let args = [&options[..], more, &["--", "python3", "-c", program]].concat();
        let output = pagetax(&args).output().unwrap();
        let diagnosis: Diagnosis = document(&output);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let trial = diagnosis.trials.iter().find(|t| t.name == "hugetlb-2M").unwrap().clone();
        trial.took.bytes.unwrap_or_else(|| panic!("{:?}", trial.took))
    };
    // Filled on demand.
    assert!(took(&["--allow-sysfs"]) >= 20 << 20);
    assert_eq!([read(POOL), read(overcommit)], before);
    // Reserved by someone before.
    let reserved = Restored::write(POOL, "24").unwrap();
    if read(POOL).trim() == "24" {
        assert!(took(&[]) >= 20 << 20);
    } else {
        println!("SKIP: a reserved pool: memory is too fragmented for 24 huge pages");
    }
    drop(reserved);
    assert_eq!([read(POOL), read(overcommit)], before);
}

#[test]
fn an_interrupted_job_keeps_its_phases_and_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let files = directory.path().join("files");
    std::fs::create_dir(&files).unwrap();
    let job = directory.path().join("job.toml");
    let text = format!(
        "name = \"endless\"\n[[region]]\nname = \"f\"\nsize = \"4M\"\nbacking = \"file\"\n\
         directory = {files:?}\n\
         [[phase]]\nname = \"fill\"\nops = [{{ touch = \"f\", access = \"write\" }}]\n\
         [[phase]]\nname = \"endless\"\nclients = 2\ntime = \"10min\"\n\
         ops = [{{ touch = \"f\", pattern = \"uniform\", count = 1000 }}]\n"
    );
    std::fs::write(&job, text).unwrap();
    let mut child = pagetax(&["run", job.to_str().unwrap(), "--json"]).spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let wait_until = |what: &str, condition: &mut dyn FnMut() -> bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let working = || std::fs::read_to_string(&children).unwrap_or_default();
    wait_until("no clients", &mut || working().split_whitespace().count() == 2);
    let clients: Vec<String> = working().split_whitespace().map(String::from).collect();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    wait_until("it goes on", &mut || child.try_wait().unwrap().is_some());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    let run: Run = document(&output);
    assert!(run.warnings.iter().any(|warning| warning.id == "ended_early"));
    let fill = &run.phases[0];
    assert_eq!(fill.name, "fill");
    assert!(fill.counters["access_count"].value.unwrap() > 0);
    assert_eq!(std::fs::read_dir(&files).unwrap().count(), 0, "files are left");
    assert!(clients.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()), "clients live");
}

#[test]
fn a_calibration_is_kept_where_it_belongs_and_settings_are_put_back() {
    let sizes = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled";
    let setting = || std::fs::read_to_string(sizes).ok();
    let (cache, before) = (tempfile::tempdir().unwrap(), setting());
    let change = is_root() && before.is_some();
    let mut command = pagetax(&["calibrate", "--quick", "--json"]);
    command.env("XDG_CACHE_HOME", cache.path());
    if change {
        command.arg("--allow-sysfs");
    } else {
        println!("SKIP: page sizes that are switched off: needs root and Linux 6.8 or later");
    }
    let output = command.output().unwrap();
    let calibration: Value = document(&output);
    let kept = std::fs::read_to_string(cache.path().join("pagetax/calibration.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&kept).unwrap(), calibration);
    let of_64k = |fault: &&Value| fault["page_bytes"] == 65536 && fault["kind"] == "anon_write";
    let medium = calibration["faults"].as_array().unwrap().iter().find(of_64k);
    if change {
        let medium = medium.unwrap();
        let known = medium["cost"]["median_ns"].as_f64().is_some_and(|ns| ns > 1000.0);
        assert!(known || medium["why"].as_str().unwrap().contains("fragmented"), "{medium}");
    }
    assert_eq!(setting(), before);
}

/// A child that ends with this value.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn all_ranks_random_reads_before_a_loop_and_harms_neither() {
    let (folder, program) = for_everybody();
    let cache = folder.path().join("cache");
    let set = ["--set", "page_size=base", "--set", "size=96M", "--set", "count=20_000_000_000"];
    let mut gather = pagetax(&["run", "tlb-gather"]);
    let mut gather = Running(gather.args(set).spawn().unwrap());
    let mut spin = command(Path::new("sh"), &["-c", "while :; do :; done"]);
    let mut spin = Running(spin.spawn().unwrap());
    std::thread::sleep(Duration::from_secs(3));
    let mut all = command(&program, &["diagnose", "--all", "--for", "2s", "--json"]);
    let output = all.env("XDG_CACHE_HOME", &cache).output().unwrap();
    let ranking: pagetax_core::ranking::Ranking = document(&output);
    let row = |child: &Running| ranking.processes.iter().find(|row| row.pid == child.0.id());
    let (gather_row, spin_row) = (row(&gather).unwrap(), row(&spin).unwrap());
    let touched = gather_row.touched_bytes.value.unwrap_or_else(|| panic!("{gather_row:?}"));
    assert!(touched > 1 << 20, "{gather_row:?}");
    assert!(gather_row.tax_ns.value > spin_row.tax_ns.value, "{gather_row:?} {spin_row:?}");
    assert_eq!(spin_row.touched_bytes.value, None, "a shell has less than 4 MiB");
    for child in [&mut gather, &mut spin] {
        assert!(child.0.try_wait().unwrap().is_none(), "it goes on");
    }
    if is_root() {
        let mut blind = command(&program, &["diagnose", "--all", "--for", "1s", "--json"]);
        blind.uid(NOBODY).gid(NOBODY).env("XDG_CACHE_HOME", folder.path().join("nobody"));
        let ranking: pagetax_core::ranking::Ranking = document(&blind.output().unwrap());
        let row = ranking.processes.iter().find(|row| row.pid == gather.0.id()).unwrap();
        assert!(row.tax_ns.value.is_none() && row.tax_ns_max.value.is_some(), "{row:?}");
        assert!(row.tax_ns.why.as_ref().unwrap().contains("clear_refs"), "{row:?}");
    }
}
