//! The processes of a command: itself and all that descend from it, by /proc/PID/stat.

use rustix::process::Pid;
use std::collections::HashMap;

/// All descendants of a process that have not ended. Empty if /proc cannot be read.
pub fn descendants(root: Pid) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()) {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if let Some((state, parent)) = state_and_parent(&stat)
            && !matches!(state, 'Z' | 'X')
        {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = vec![root.as_raw_nonzero().get()];
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        found.extend(children.remove(pid).unwrap_or_default());
        next += 1;
    }
    found[1..].iter().filter_map(|pid| Pid::from_raw(*pid)).collect()
}

/// Fields 3 and 4; the second, a name in brackets, may hold blanks and brackets itself.
fn state_and_parent(stat: &str) -> Option<(char, i32)> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Resident bytes now, shared ones included; none if the process has ended. Cheap: no page-table
/// walk.
pub fn resident_bytes(pid: Pid) -> Option<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", pid.as_raw_nonzero())).ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_blanks_and_brackets_do_not_confuse() {
        assert_eq!(state_and_parent("7 (a) b (c) S 3 7 7"), Some(('S', 3)));
        assert_eq!(state_and_parent(""), None);
    }

    #[test]
    fn grandchildren_are_found() {
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & wait"])
            .spawn()
            .expect("sh is everywhere");
        let pid = Pid::from_child(&shell);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        let found = loop {
            let found = descendants(pid);
            if !found.is_empty() || std::time::Instant::now() > deadline {
                break found;
            }
        };
        for sleeper in &found {
            rustix::process::kill_process(*sleeper, rustix::process::Signal::KILL).unwrap();
        }
        shell.wait().unwrap();
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn this_process_is_resident() {
        assert!(resident_bytes(rustix::process::getpid()).unwrap() > 100_000);
    }
}
