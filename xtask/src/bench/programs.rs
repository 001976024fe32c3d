//! Programs that nobody here wrote, with something to do for a second or two: what benchmarks of the
//! wrappers run. Each prints something that tells whether it did its work.

use crate::shell;
use anyhow::{Context, Result, bail};
use pagetax_host::sys::process::Child;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// A program and a shell script that runs it; `SIZE` says how much it has to do, `FILE` is a text of
/// random numbers, `DIR` a directory.
pub struct Program {
    /// The name of the program in the table.
    pub name: &'static str,
    size: u32,
    script: &'static str,
}

/// 14 MB of them are sorted and compressed.
const NUMBERS: u32 = 1_500_000;
/// The number of C functions to compile.
const FUNCTIONS: u32 = 150;

const PROGRAMS: &[Program] = &[
    Program {
        name: "python3",
        size: 1_000_000,
        script: "/usr/bin/python3 -c 'd = {i: str(i) for i in range(SIZE)}; print(sum(len(d[k * 7919 % SIZE]) \
                 for k in range(SIZE)))'",
    },
    Program {
        name: "sort",
        size: NUMBERS,
        script: "LC_ALL=C sort -S 1G --parallel=1 FILE | tail -n 1",
    },
    Program {
        name: "sqlite3",
        size: 400_000,
        script: "sqlite3 :memory: 'CREATE TABLE t(a); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL \
                 SELECT n+1 FROM c LIMIT SIZE) INSERT INTO t SELECT n*7919%1000003 FROM c; CREATE \
                 INDEX i ON t(a); SELECT count(*) FROM t x JOIN t y ON x.a = y.a;'",
    },
    Program {
        name: "gcc",
        size: FUNCTIONS,
        script: "gcc -O2 -x c -c -o DIR/o FILE.c && cksum < DIR/o",
    },
    Program { name: "xz", size: 3_000_000, script: "head -c SIZE FILE | xz -9 -T1 | cksum" },
    Program {
        name: "redis-server",
        size: 200_000,
        script: "redis-server --port 0 --unixsocket DIR/s --save '' --enable-debug-command local \
                 >/dev/null & until redis-cli -s DIR/s ping >/dev/null 2>&1; do sleep 0.02; done; \
                 redis-cli -s DIR/s debug populate SIZE key 64; redis-benchmark -s DIR/s -t get \
                 -n 60000 -r SIZE -q >/dev/null; redis-cli -s DIR/s debug digest; redis-cli -s \
                 DIR/s shutdown nosave; wait",
    },
];

/// Returns the programs of these names, or all.
pub fn chosen(names: &[String]) -> Result<Vec<&'static Program>> {
    if let Some(unknown) = names.iter().find(|name| PROGRAMS.iter().all(|p| p.name != **name)) {
        let known: Vec<_> = PROGRAMS.iter().map(|program| program.name).collect();
        bail!("no program is called `{unknown}`; there are {}", known.join(", "));
    }
    let wanted = |program: &&Program| names.is_empty() || names.iter().any(|n| n == program.name);
    Ok(PROGRAMS.iter().filter(wanted).collect())
}

/// Where programs find their input and put their output.
pub struct Workshop {
    directory: tempfile::TempDir,
    part: u32,
}

/// A compiler that runs again and again, until this is dropped.
pub struct Compiler {
    process: std::process::Child,
    /// The directory of what it compiles.
    _workshop: Workshop,
}

impl Compiler {
    /// Starts it.
    pub fn start() -> Result<Compiler> {
        let workshop = Workshop::new(1)?;
        let script =
            workshop.script(chosen(&["gcc".into()])?[0])?.context("gcc is not installed")?;
        let mut process = Command::new("sh");
        process.args(["-c", &format!("while :; do {script}; done")]).stdout(Stdio::null());
        Ok(Compiler { process: process.process_group(0).spawn()?, _workshop: workshop })
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        // The negative id names its process group: the shell and what it has started.
        let group = format!("-{}", self.process.id());
        let _ = Command::new("kill").args(["--", &group]).status();
        let _ = self.process.wait();
    }
}

/// One run.
pub struct ProgramRun {
    /// The wall time, from before the start to after the end.
    pub wall_ns: u64,
    /// The user and kernel time of all its processes.
    pub cpu_ns: u64,
    /// The bytes of its standard output.
    pub output: Vec<u8>,
}

impl Workshop {
    /// Makes random numbers and a C file, of this fraction of their usual size.
    pub fn new(part: u32) -> Result<Workshop> {
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("numbers");
        let mut rng = pagetax_core::access::Rng::new(1);
        let numbers: String =
            (0..NUMBERS / part).map(|_| format!("{}\n", rng.below(1 << 30))).collect();
        std::fs::write(&file, numbers)?;
        let function = |i: u32| {
            format!(
                "int f{i}(int a) {{ int s = {i}; for (int j = 0; j < a; j++) s += s % (j + {i} + \
                 1); return s; }}\n"
            )
        };
        let functions: String = (0..FUNCTIONS / part).map(function).collect();
        std::fs::write(file.with_extension("c"), functions)?;
        Ok(Workshop { directory, part })
    }

    /// Returns the path of a file that is removed with the workshop.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the script for `sh -c`, or `None` if the program is not installed.
    pub fn script(&self, program: &Program) -> Result<Option<String>> {
        let text = |path: &Path| path.to_str().map(String::from).context("a path that is no text");
        let file = text(&self.path("numbers"))?;
        let size = (program.size / self.part).to_string();
        let script = program.script.replace("SIZE", &size).replace("FILE", &file);
        let script = script.replace("DIR", &text(self.directory.path())?);
        Ok(shell::has(program.name).then_some(script))
    }

    /// Runs a script without a wrapper, with these variables.
    pub fn run(&self, script: &str, variables: &[(&str, &str)]) -> Result<ProgramRun> {
        let out = self.path("out");
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).stderr(Stdio::null());
        command.stdout(File::create(&out)?).envs(variables.iter().copied());
        let start = Instant::now();
        let (exit, usage) = Child::from(command.spawn()?).wait()?;
        let wall_ns = start.elapsed().as_nanos() as u64;
        if !exit.success() {
            bail!("`{script}` fails");
        }
        let cpu_ns = usage.user_ns + usage.kernel_ns;
        Ok(ProgramRun { wall_ns, cpu_ns, output: std::fs::read(&out)? })
    }
}
