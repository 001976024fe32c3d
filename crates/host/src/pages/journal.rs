//! Settings of the machine that commands have changed, on disk, so that the next command can put back those
//! of a killed one.
//!
//! Invariants: a record is on disk before the setting is changed, and goes after it was put back. The
//! process that changes settings has the lock until the last one is put back, so that two commands never
//! restore each other's values. A record that the next holder of the lock finds belongs to a dead command.
//! A setting is put back only if it still stands as it was left. Both files are in /run, which ends with the
//! settings when the machine restarts.

use super::settings::selected;
use crate::cache;
use crate::procfs::StatLine;
use crate::sys::signal::asked_to_stop;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Root's, who alone can change most settings.
const SYSTEM: &str = "/run/pagetax";
const RECORDS: &str = "settings.json";
const LOCK: &str = "settings.lock";
/// How long a command waits for another one's settings to be put back: those of a run each.
const PATIENCE: Duration = Duration::from_secs(600);
const LOOK: Duration = Duration::from_millis(20);

/// A setting that was changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The file in /sys or /proc that was changed.
    pub path: PathBuf,
    /// The file's contents before the change.
    pub before: String,
    /// The contents that it was set to.
    pub value: String,
    /// The process that changed it.
    pub pid: u32,
    /// The start of that process, in clock ticks since boot: its number may be used again.
    started_ticks: u64,
    /// Tells records of a process apart.
    number: u64,
}

/// The result for a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restoration {
    /// The value from before stands again.
    Restored,
    /// Somebody else has set it since, or the file is gone.
    ChangedSince,
}

impl Record {
    fn of(path: &Path, before: String, value: &str) -> Record {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let pid = std::process::id();
        Record {
            path: path.into(),
            before,
            value: value.into(),
            pid,
            started_ticks: started_ticks(pid).unwrap_or(0),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
        }
    }

    fn is_left(&self) -> bool {
        started_ticks(self.pid) != Some(self.started_ticks)
    }

    /// Sets it back, unless it no longer stands as the record has it.
    fn put_back(&self) -> io::Result<Restoration> {
        match selected(&self.path) {
            Some(now) if now == self.before => Ok(Restoration::Restored),
            Some(now) if now == self.value => {
                let named = |error: io::Error| {
                    let path = self.path.display();
                    io::Error::new(error.kind(), format!("{path} cannot be put back: {error}"))
                };
                std::fs::write(&self.path, &self.before).map_err(named)?;
                Ok(Restoration::Restored)
            }
            _ => Ok(Restoration::ChangedSince),
        }
    }
}

/// Returns the start of a process in clock ticks; none of one that has ended.
fn started_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    StatLine::parse(&stat).filter(|stat| !stat.has_ended())?.start_ticks()
}

/// Where records are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Journal {
    folder: PathBuf,
}

/// Turns that threads of this process share: a lock of each would wait for the other.
static TURNS: Mutex<Vec<Weak<Turn>>> = Mutex::new(Vec::new());

impl Journal {
    /// Returns the one of this user: /run/pagetax for root, `$XDG_RUNTIME_DIR/pagetax` for others.
    pub fn host() -> io::Result<Journal> {
        if rustix::process::geteuid().is_root() {
            return Ok(Journal::at(SYSTEM));
        }
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let runtime = runtime.filter(|path| path.is_absolute()).ok_or_else(|| {
            let why = "no folder to note changed settings in: XDG_RUNTIME_DIR is not set; \
                       run this as root, or export XDG_RUNTIME_DIR=FOLDER, one of your own";
            io::Error::new(io::ErrorKind::NotFound, why)
        })?;
        Ok(Journal::at(runtime.join("pagetax")))
    }

    /// Returns the one in a folder.
    pub fn at(folder: impl Into<PathBuf>) -> Journal {
        Journal { folder: folder.into() }
    }

    /// Returns what killed commands have left changed, root's and this user's.
    pub fn left_on_host() -> Vec<Record> {
        let mut journals = vec![Journal::at(SYSTEM)];
        journals.extend(Journal::host().ok().filter(|journal| *journal != journals[0]));
        let records = journals.iter().flat_map(|journal| journal.records().unwrap_or_default());
        records.filter(Record::is_left).collect()
    }

    /// Puts back what killed commands have left.
    pub fn repair(&self) -> io::Result<Vec<(Record, Restoration)>> {
        if !self.folder.join(RECORDS).exists() {
            return Ok(Vec::new());
        }
        self.lock()?.put_back_what_was_left()
    }

    /// Waits until no other command has changed settings, and puts back what killed ones left.
    pub(super) fn turn(&self) -> io::Result<Arc<Turn>> {
        let turn = self.lock()?;
        // What cannot be put back stays noted.
        let _ = turn.put_back_what_was_left();
        Ok(turn)
    }

    fn lock(&self) -> io::Result<Arc<Turn>> {
        let folder = cache::folder_of_ours(&self.folder, 0o755).map_err(io::Error::other)?;
        let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|turn| turn.strong_count() > 0);
        let shared = turns.iter().filter_map(Weak::upgrade).find(|turn| turn.folder == folder);
        if let Some(turn) = shared {
            return Ok(turn);
        }
        let mut options = File::options();
        // For its owner alone: who could open it could keep it locked.
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.custom_flags(libc::O_NOFOLLOW).open(folder.join(LOCK))?;
        wait_for(&mut file)?;
        file.set_len(0)?;
        let pid = std::process::id();
        file.write_all_at(pid.to_string().as_bytes(), 0)?;
        let turn = Arc::new(Turn { folder, lock: file, pid, writing: Mutex::new(()) });
        turns.push(Arc::downgrade(&turn));
        Ok(turn)
    }

    fn records(&self) -> io::Result<Vec<Record>> {
        read(&self.folder)
    }
}

fn wait_for(file: &mut File) -> io::Result<()> {
    let limit = Instant::now() + PATIENCE;
    while let Err(error) = flock(&*file, FlockOperation::NonBlockingLockExclusive) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(error.into());
        }
        let mut holder = String::new();
        file.rewind()?;
        file.read_to_string(&mut holder)?;
        let holder = holder.parse().unwrap_or(0);
        let busy = |why: &str| {
            let text = format!(
                "another pagetax (process {holder}) has changed settings of this machine{why}"
            );
            Err(io::Error::new(io::ErrorKind::ResourceBusy, text))
        };
        if is_ancestor(holder) {
            return busy(
                ", and runs this one: it would wait for ever; run them one after the other",
            );
        }
        if asked_to_stop() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if Instant::now() > limit {
            return busy("; wait for its end");
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn is_ancestor(pid: u32) -> bool {
    let parent = |pid: u32| -> Option<u32> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        StatLine::parse(&stat)?.parent()
    };
    let parents = std::iter::successors(parent(std::process::id()), |pid| parent(*pid));
    parents.take_while(|pid| *pid != 0).any(|ancestor| ancestor == pid)
}

fn read(folder: &Path) -> io::Result<Vec<Record>> {
    let path = folder.join(RECORDS);
    match std::fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The right to change settings, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    folder: PathBuf,
    lock: File,
    pid: u32,
    writing: Mutex<()>,
}

impl Drop for Turn {
    /// Unlocks the file. Closing it is not enough: children that were forked meanwhile have it too.
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        // What fails here, the closing of the file does as well.
        let _ = self.lock.set_len(0);
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

impl Turn {
    /// Sets a file, after it is noted what stood there.
    pub(super) fn change(&self, path: &Path, value: &str) -> io::Result<Record> {
        let before = selected(path).ok_or(io::ErrorKind::NotFound)?;
        let mut record = Record::of(path, before, value);
        self.edit(|records| records.push(record.clone()))?;
        if let Err(error) = std::fs::write(path, value) {
            self.edit(|records| records.retain(|known| *known != record))?;
            return Err(error);
        }
        // A pool may take less than it is asked to.
        let now = selected(path).unwrap_or_else(|| value.into());
        if now != record.value {
            let noted = record.clone();
            record.value = now;
            self.edit(|records| {
                records
                    .iter_mut()
                    .filter(|known| **known == noted)
                    .for_each(|r| *r = record.clone());
            })?;
        }
        Ok(record)
    }

    /// Sets a file back, and then forgets it.
    pub(super) fn undo(&self, record: &Record) -> io::Result<Restoration> {
        let outcome = record.put_back()?;
        self.edit(|records| records.retain(|known| known != record))?;
        Ok(outcome)
    }

    fn put_back_what_was_left(&self) -> io::Result<Vec<(Record, Restoration)>> {
        let left: Vec<Record> = read(&self.folder)?.into_iter().filter(Record::is_left).collect();
        let last_first = left.into_iter().rev();
        last_first.map(|record| self.undo(&record).map(|outcome| (record, outcome))).collect()
    }

    fn edit(&self, edit: impl FnOnce(&mut Vec<Record>)) -> io::Result<()> {
        let _writing: MutexGuard<'_, ()> =
            self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut records = read(&self.folder)?;
        edit(&mut records);
        let path = self.folder.join(RECORDS);
        if records.is_empty() {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        } else {
            let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
            file.write_all(&serde_json::to_vec_pretty(&records)?)?;
            // `doctor` tells every user.
            file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|error| error.error)?;
        }
        File::open(&self.folder)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// Folders that a child of the test works on.
    const CHILD: &str = "PAGETAX_TEST_JOURNAL";

    struct Place {
        keep: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Place {
            let keep = tempfile::tempdir().unwrap();
            std::fs::write(keep.path().join("setting"), "always [madvise] never\n").unwrap();
            Place { keep }
        }

        fn setting(&self) -> PathBuf {
            self.keep.path().join("setting")
        }

        fn journal(&self) -> Journal {
            Journal::at(self.keep.path().join("run"))
        }

        fn value(&self) -> String {
            selected(&self.setting()).unwrap()
        }
    }

    fn waits_for(what: &str, mut done: impl FnMut() -> bool) {
        let limit = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(Instant::now() < limit, "not within a minute: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Changes the setting, as a child, and holds it until it is killed.
    fn hold_as_child() {
        let Some(folder) = std::env::var_os(CHILD).map(PathBuf::from) else { return };
        let turn = Journal::at(folder.join("run")).turn().unwrap();
        turn.change(&folder.join("setting"), "never").unwrap();
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    fn holder(place: &Place) -> std::process::Child {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "pages::journal::tests::what_a_killed_command_left_is_put_back"])
            .env(CHILD, place.keep.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        waits_for("the child's change", || place.value() == "never");
        child
    }

    #[test]
    fn what_a_killed_command_left_is_put_back() {
        hold_as_child();
        let place = Place::new();
        let mut child = holder(&place);
        let records = place.journal().records().unwrap();
        assert_eq!((&*records[0].before, &*records[0].value), ("madvise", "never"));
        assert!(!records[0].is_left(), "it lives");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(place.value(), "never");
        assert!(place.journal().records().unwrap()[0].is_left());
        // The next command that changes settings begins with what stood there at first.
        let turn = place.journal().turn().unwrap();
        assert_eq!(place.value(), "madvise");
        let record = turn.change(&place.setting(), "always").unwrap();
        assert_eq!(record.before, "madvise");
        turn.undo(&record).unwrap();
        assert_eq!(place.value(), "madvise");
        assert!(place.journal().records().unwrap().is_empty());

        drop(turn);
        let mut child = holder(&place);
        child.kill().unwrap();
        child.wait().unwrap();
        let repaired = place.journal().repair().unwrap();
        assert_eq!((repaired.len(), repaired[0].1), (1, Restoration::Restored));
        assert_eq!(place.value(), "madvise");
        assert!(place.journal().repair().unwrap().is_empty());
    }

    #[test]
    fn a_turn_is_over_though_a_child_has_its_lock_file() {
        let place = Place::new();
        let turn = place.journal().turn().unwrap();
        let inherited = turn.lock.try_clone().unwrap();
        drop(turn);
        let mut child = holder(&place);
        child.kill().unwrap();
        child.wait().unwrap();
        drop(inherited);
    }

    #[test]
    fn two_commands_take_turns() {
        let place = Place::new();
        let mut child = holder(&place);
        let (journal, setting) = (place.journal(), place.setting());
        let next = std::thread::spawn(move || {
            let turn = journal.turn().unwrap();
            let record = turn.change(&setting, "always").unwrap();
            turn.undo(&record).unwrap();
            record
        });
        // It has no turn while the child lives: its value would be put back by the child, or lost.
        let taken = || std::fs::read_to_string(place.keep.path().join("run").join(LOCK)).unwrap();
        assert_eq!(taken(), child.id().to_string());
        assert_eq!(place.value(), "never");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(next.join().unwrap().before, "madvise");
        assert_eq!(place.value(), "madvise");
    }

    #[test]
    fn what_somebody_else_has_set_since_stays() {
        let place = Place::new();
        let turn = place.journal().turn().unwrap();
        let record = turn.change(&place.setting(), "never").unwrap();
        std::fs::write(place.setting(), "[always] madvise never").unwrap();
        assert_eq!(turn.undo(&record).unwrap(), Restoration::ChangedSince);
        assert_eq!(place.value(), "always");
        assert!(place.journal().records().unwrap().is_empty());
    }

    #[test]
    fn a_record_is_there_before_the_change() {
        let place = Place::new();
        let turn = place.journal().turn().unwrap();
        let folder = place.keep.path().join("setting is no file");
        std::fs::create_dir(&folder).unwrap();
        assert!(turn.change(&folder, "never").is_err());
        assert!(turn.change(Path::new("/nowhere/setting"), "never").is_err());
        assert!(place.journal().records().unwrap().is_empty(), "and not if there was none");
        // Threads of a process share its turn.
        let again = place.journal().turn().unwrap();
        assert!(Arc::ptr_eq(&turn, &again));
    }
}
