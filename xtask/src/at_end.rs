//! Scripts that undo a chore's changes to the machine, even if Ctrl-C or SIGKILL ends the chore.

use anyhow::{Context, Result};
use std::io::Write;
use std::process::{Child, Command, Stdio};

/// A shell script that runs when this value is dropped or this process ends. A shell waits for the end of a
/// pipe whose other side only this process has.
pub struct AtEnd {
    shell: Child,
}

impl AtEnd {
    /// Registers a shell script for the end of this process. Quote words in it that come from outside.
    pub fn run(script: &str) -> Result<AtEnd> {
        let script = format!("trap '' HUP INT TERM; read -r word || {{ {script}; }}");
        let mut sh = Command::new("sh");
        let shell = sh.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        Ok(AtEnd { shell: shell.context("cannot start a shell")? })
    }

    /// Cancels the script, so that its shell just ends.
    pub fn forget(&mut self) {
        if let Some(mut pipe) = self.shell.stdin.take() {
            // If the shell has ended already, the script cannot run either.
            let _ = pipe.write_all(b"forget\n");
        }
        let _ = self.shell.wait();
    }
}

impl Drop for AtEnd {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        match self.shell.wait() {
            Ok(status) if status.success() => {}
            other => eprintln!("not all is put back: {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn appears(path: &std::path::Path) -> bool {
        let until = Instant::now() + Duration::from_secs(5);
        while !path.exists() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        path.exists()
    }

    #[test]
    fn a_script_runs_at_the_end_and_not_when_it_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let script = |name: &str| format!("touch {}", folder.path().join(name).display());
        let ran = AtEnd::run(&script("ran")).unwrap();
        let mut forgotten = AtEnd::run(&script("forgotten")).unwrap();
        forgotten.forget();
        drop((ran, forgotten));
        assert!(folder.path().join("ran").exists() && !folder.path().join("forgotten").exists());
    }

    /// Runs this test again as another process, which it kills in the middle.
    #[test]
    fn a_script_runs_when_its_process_is_killed() {
        const NAME: &str = "PAGETAX_TEST_AT_END";
        if let Some(path) = std::env::var_os(NAME) {
            let path = std::path::PathBuf::from(path);
            let _end = AtEnd::run(&format!("touch {}", path.join("end").display())).unwrap();
            std::fs::write(path.join("begun"), "").unwrap();
            std::thread::sleep(Duration::from_secs(60));
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "at_end::tests::a_script_runs_when_its_process_is_killed"])
            .env(NAME, folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        assert!(appears(&folder.path().join("begun")));
        assert!(!folder.path().join("end").exists());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(appears(&folder.path().join("end")));
    }
}
