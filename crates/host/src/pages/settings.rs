//! The system's page-size settings under /sys/kernel/mm: read, changed for a while, put back.
//!
//! Sources: Documentation/admin-guide/mm/transhuge.rst and hugetlbpage.rst of Linux 6.18.

use super::journal::{Journal, Record, Turn};
use pagetax_core::units::PageSize;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the base page of this machine.
pub fn base_page() -> PageSize {
    PageSize::new(rustix::param::page_size() as u64).unwrap_or(PageSize::K4)
}

/// The condition on which the kernel gives anonymous memory large pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Wherever they fit.
    Always,
    /// Where the program asked by madvise(MADV_HUGEPAGE).
    Madvise,
    /// Nowhere.
    Never,
}

/// Reads the settings; the root directory is given so that captured trees test it.
#[derive(Debug, Clone)]
pub struct PageSettings {
    root: PathBuf,
}

/// A file and its intended contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The file, under /sys/kernel/mm.
    pub path: PathBuf,
    /// The text to write to the file.
    pub value: String,
}

impl Setting {
    /// Returns the setting of a file to a value.
    pub fn new(path: PathBuf, value: impl Into<String>) -> Setting {
        Setting { path, value: value.into() }
    }
}

impl PageSettings {
    /// Returns the settings of this machine.
    pub fn host() -> PageSettings {
        PageSettings::at("/sys/kernel/mm")
    }

    /// Returns the settings in a tree laid out like /sys/kernel/mm.
    pub fn at(root: impl Into<PathBuf>) -> PageSettings {
        PageSettings { root: root.into() }
    }

    /// Returns the system-wide setting; none on a kernel without transparent huge pages.
    pub fn thp(&self) -> Option<Mode> {
        mode_of(&selected(&self.thp_path())?)
    }

    /// Returns the mode for pages of this size, with `inherit` resolved; none if the kernel lacks the size.
    /// Before Linux 6.8 only the PMD size exists, under the system-wide setting.
    pub fn of_size(&self, size: PageSize) -> Option<Mode> {
        match selected(&self.size_path(size)).as_deref() {
            Some("inherit") => self.thp(),
            Some(word) => mode_of(word),
            None if Some(size) == self.pmd_size() => self.thp(),
            None => None,
        }
    }

    /// Returns the size of a transparent huge page that one page-table level maps: 2M on x86-64.
    pub fn pmd_size(&self) -> Option<PageSize> {
        let path = self.root.join("transparent_hugepage/hpage_pmd_size");
        PageSize::new(read_number(&path)?).ok()
    }

    /// Returns the sizes that anonymous memory can have, smallest first, without the base page.
    pub fn sizes(&self) -> Vec<PageSize> {
        let mut sizes = sizes_in(&self.root.join("transparent_hugepage"));
        // Some have a directory for shared memory alone.
        sizes.retain(|size| self.size_path(*size).exists());
        sizes.extend(self.pmd_size().filter(|_| sizes.is_empty()));
        sizes
    }

    /// Returns the sizes of hugetlb pages, smallest first.
    pub fn hugetlb_sizes(&self) -> Vec<PageSize> {
        sizes_in(&self.root.join("hugepages"))
    }

    /// Returns the number of pages that a program could get from the pool of this size now: free ones, and
    /// those that may be made on demand.
    pub fn hugetlb_pages(&self, size: PageSize) -> Option<u64> {
        let pool = self.pool_path(size);
        let read = |name: &str| read_number(&pool.join(name));
        Some(read("free_hugepages")? + read("nr_overcommit_hugepages").unwrap_or(0))
    }

    /// Returns the path of the system-wide setting.
    pub fn thp_path(&self) -> PathBuf {
        self.root.join("transparent_hugepage/enabled")
    }

    /// Returns the path of the setting of one size.
    pub fn size_path(&self, size: PageSize) -> PathBuf {
        self.root.join(format!("transparent_hugepage/{}/enabled", directory_of(size)))
    }

    /// Returns the directory of a hugetlb pool.
    pub fn pool_path(&self, size: PageSize) -> PathBuf {
        self.root.join("hugepages").join(directory_of(size))
    }

    /// Returns the number of anonymous folios of this size on the whole system; none if the kernel does not
    /// count.
    pub fn folios(&self, size: PageSize) -> Option<u64> {
        let stats = format!("transparent_hugepage/{}/stats/nr_anon", directory_of(size));
        read_number(&self.root.join(stats))
    }
}

fn directory_of(size: PageSize) -> String {
    format!("hugepages-{}kB", size.bytes() / 1024)
}

fn sizes_in(directory: &Path) -> Vec<PageSize> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut sizes: Vec<PageSize> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let kilobytes = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?;
            PageSize::new(kilobytes.parse::<u64>().ok()?.checked_mul(1024)?).ok()
        })
        .collect();
    sizes.sort();
    sizes
}

fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the selected word of a file: the one in brackets, or all of a file without them.
pub(crate) fn selected(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    Some(word.map_or(text.trim(), |(word, _)| word).to_string())
}

fn mode_of(word: &str) -> Option<Mode> {
    Some(match word {
        "always" => Mode::Always,
        "madvise" => Mode::Madvise,
        "never" => Mode::Never,
        _ => return None,
    })
}

/// Settings that are changed for as long as this lives.
#[derive(Debug)]
pub struct Changed {
    /// None: nothing was to be changed.
    turn: Option<Arc<Turn>>,
    records: Vec<Record>,
}

impl Changed {
    /// Changes all settings, or none and returns an error that names the file. Waits while another command
    /// has changed some.
    pub fn apply(settings: &[Setting]) -> io::Result<Changed> {
        match settings {
            [] => Ok(Changed { turn: None, records: Vec::new() }),
            _ => Changed::noted_in(&Journal::host()?, settings),
        }
    }

    fn noted_in(journal: &Journal, settings: &[Setting]) -> io::Result<Changed> {
        let turn = journal.turn()?;
        let mut changed = Changed { turn: Some(Arc::clone(&turn)), records: Vec::new() };
        for Setting { path, value } in settings {
            let named = |error: io::Error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            };
            changed.records.push(turn.change(path, value).map_err(named)?);
        }
        Ok(changed)
    }
}

impl Drop for Changed {
    /// Puts everything back, last change first.
    fn drop(&mut self) {
        let Some(turn) = &self.turn else { return };
        for record in self.records.iter().rev() {
            // What cannot be put back stays noted: the next command tries, and `doctor` tells of it.
            let _ = turn.undo(record);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a tree like /sys/kernel/mm with 64K and 2M, in a temporary directory.
    pub(crate) fn tree(
        thp: &str,
        k64: &str,
        m2: &str,
        free: u64,
    ) -> (tempfile::TempDir, PageSettings) {
        let directory = tempfile::tempdir().unwrap();
        let choices = |chosen: &str, all: &str| all.replace(chosen, &format!("[{chosen}]"));
        let write = |path: &str, text: String| {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text + "\n").unwrap();
        };
        let sizes = "always inherit madvise never";
        write("transparent_hugepage/enabled", choices(thp, "always madvise never"));
        write("transparent_hugepage/hpage_pmd_size", "2097152".into());
        write("transparent_hugepage/hugepages-64kB/enabled", choices(k64, sizes));
        write("transparent_hugepage/hugepages-2048kB/enabled", choices(m2, sizes));
        write("transparent_hugepage/hugepages-8kB/shmem_enabled", "never".into());
        write("hugepages/hugepages-2048kB/free_hugepages", free.to_string());
        write("hugepages/hugepages-2048kB/nr_overcommit_hugepages", "0".into());
        let settings = PageSettings::at(directory.path());
        (directory, settings)
    }

    #[test]
    fn settings_are_read() {
        let (_keep, settings) = tree("madvise", "never", "inherit", 3);
        assert_eq!(settings.thp(), Some(Mode::Madvise));
        assert_eq!(settings.of_size(PageSize::M2), Some(Mode::Madvise));
        assert_eq!(settings.of_size(PageSize::new(64 << 10).unwrap()), Some(Mode::Never));
        assert_eq!(settings.of_size(PageSize::K4), None);
        assert_eq!(settings.sizes(), [PageSize::new(64 << 10).unwrap(), PageSize::M2]);
        assert_eq!(settings.hugetlb_pages(PageSize::M2), Some(3));
        assert_eq!(settings.hugetlb_pages(PageSize::G1), None);
    }

    #[test]
    fn a_kernel_without_huge_pages_has_no_modes() {
        let empty = tempfile::tempdir().unwrap();
        let settings = PageSettings::at(empty.path());
        assert_eq!((settings.thp(), settings.of_size(PageSize::M2)), (None, None));
        assert!(settings.sizes().is_empty());
    }

    #[test]
    fn changes_are_put_back_also_when_a_later_one_fails() {
        let (keep, settings) = tree("madvise", "never", "inherit", 0);
        let path = settings.size_path(PageSize::M2);
        let setting = Setting { path: path.clone(), value: "never".into() };
        let journal = Journal::at(keep.path().join("run"));
        let changed = Changed::noted_in(&journal, std::slice::from_ref(&setting)).unwrap();
        assert_eq!(settings.of_size(PageSize::M2), Some(Mode::Never));
        drop(changed);
        assert_eq!(settings.of_size(PageSize::M2), Some(Mode::Madvise));

        let missing = Setting { path: keep.path().join("nothing"), value: "1".into() };
        let error = Changed::noted_in(&journal, &[setting, missing]).unwrap_err();
        assert!(error.to_string().contains("nothing"));
        assert_eq!(settings.of_size(PageSize::M2), Some(Mode::Madvise));
    }
}
