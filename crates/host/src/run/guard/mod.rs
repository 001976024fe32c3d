//! The protection of the machine from a run: limits checked before it starts, and memory that must stay
//! free while it runs.
//!
//! Invariant: checks are fast and change nothing. Each finding has a hint.

mod pages;

use self::pages::{check_page_size, check_pools};
use crate::pages::PageSettings;
use crate::procfs::Root;
use crate::run::file_directory;
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Backing, Plan, Region};
use pagetax_core::units::Bytes;
use procfs_core::Meminfo;

/// The limits of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// The most memory that a job may lock, as a share of physical memory.
    pub lock_share_max: f64,
    /// The memory or swap that must stay available, as a share of physical memory.
    pub free_share_min: f64,
}

impl Default for Limits {
    /// Allows a quarter of memory to be locked, and keeps 2 % free.
    fn default() -> Self {
        Limits { lock_share_max: 0.25, free_share_min: 0.02 }
    }
}

/// The user address space of a 64-bit process with four levels of page tables.
const ADDRESS_SPACE_BYTES: u64 = 1 << 47;

/// Returns a finding if the plan has network memory, for a machine that was opened without any.
pub fn check_network(plan: &Plan) -> Option<Unmet> {
    let region = plan.network_region()?;
    let what =
        format!("region `{}` is network memory, and this machine was opened without", region.name);
    Some(fatal(what, "use another backing, or open it by HostMachine::with_network"))
}

/// Returns everything in a valid plan that this machine cannot do.
pub fn check(plan: &Plan, limits: &Limits, root: &Root, pages: &PageSettings) -> Vec<Unmet> {
    let mut unmet = Vec::new();
    unmet.extend(check_replays(plan));
    unmet.extend(check_sizes(plan, limits, root));
    unmet.extend(check_locks(plan, limits, root));
    for region in &plan.regions {
        unmet.extend(check_page_size(region, pages));
        unmet.extend(check_directory(region));
    }
    unmet.extend(check_pools(plan, pages));
    unmet
}

fn fatal(what: String, remedy: impl Into<String>) -> Unmet {
    Unmet { what, remedy: remedy.into(), fatal: true }
}

fn degraded(what: String, remedy: impl Into<String>) -> Unmet {
    Unmet { what, remedy: remedy.into(), fatal: false }
}

/// Refuses replays. A trace has pages, not the program's work between them, so a native replay would
/// only time a gather.
pub(crate) fn check_replays(plan: &Plan) -> Option<Unmet> {
    plan.has_replay().then(|| {
        let what = "a trace runs on simulated machines only";
        let remedy = "name one, as in --on sim:x86-64-calibrated; on this machine, run the program \
                      itself: pagetax diagnose -- COMMAND";
        fatal(what.into(), remedy)
    })
}

fn check_sizes(plan: &Plan, limits: &Limits, root: &Root) -> Vec<Unmet> {
    let mut unmet = Vec::new();
    let needed = plan.memory_bytes_max().0;
    if let Some(room) = Room::read(root) {
        let guard = room.guard_bytes(limits);
        let usable = room.available_bytes.saturating_sub(guard);
        if needed > usable {
            unmet.push(fatal(
                format!(
                    "the job needs {} of memory; {} are available, of which {} stay free",
                    Bytes(needed),
                    Bytes(room.available_bytes),
                    Bytes(guard)
                ),
                format!("use a size of at most {}, fewer clients, or add swap", Bytes(usable)),
            ));
        }
    }
    let mapped = plan.mapped_bytes_max().0;
    let allowed = rustix::process::getrlimit(rustix::process::Resource::As)
        .current
        .unwrap_or(u64::MAX)
        .min(ADDRESS_SPACE_BYTES);
    if mapped > allowed {
        unmet.push(fatal(
            format!("the job maps {}; a process here may have {}", Bytes(mapped), Bytes(allowed)),
            "map less at a time, or raise the limit (ulimit -v unlimited)",
        ));
    }
    unmet
}

fn check_locks(plan: &Plan, limits: &Limits, root: &Root) -> Vec<Unmet> {
    let mut unmet = Vec::new();
    let each = plan.locked_bytes_max().0;
    let locked = plan.locked_bytes_of_clients().0;
    if locked == 0 {
        return unmet;
    }
    if let Some(room) = Room::read(root) {
        let most = (room.total_bytes as f64 * limits.lock_share_max) as u64;
        if locked > most {
            unmet.push(fatal(
                format!(
                    "the job locks {}, more than {:.0} % of this machine's {}",
                    Bytes(locked),
                    limits.lock_share_max * 100.0,
                    Bytes(room.total_bytes)
                ),
                format!("lock at most {}, or allow more: --lock-limit PERCENT", Bytes(most)),
            ));
        }
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    if let Some(limit) = limit.filter(|limit| each > *limit && !may_lock_without_limit(root)) {
        unmet.push(fatal(
            format!("the job locks {}; this user may lock {}", Bytes(each), Bytes(limit)),
            format!("ulimit -l {} (or unlimited), or run as root", each.div_ceil(1024)),
        ));
    }
    unmet
}

/// Returns true if the process has CAP_IPC_LOCK, by /proc/self/status.
fn may_lock_without_limit(root: &Root) -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    root.parse::<procfs_core::process::Status>("/proc/self/status")
        .is_ok_and(|status| status.capeff & CAP_IPC_LOCK != 0)
}

fn check_directory(region: &Region) -> Option<Unmet> {
    let Backing::File { directory, .. } = &region.backing else { return None };
    let directory = file_directory(directory.as_deref());
    let place = directory.display();
    match std::fs::metadata(&directory) {
        Err(error) => Some(fatal(
            format!("the directory `{place}` of region `{}`: {error}", region.name),
            format!("mkdir -p {place}, or name another directory"),
        )),
        Ok(meta) if !meta.is_dir() => Some(fatal(
            format!("`{place}`, for the file of region `{}`, is no directory", region.name),
            "name a directory",
        )),
        Ok(_) => {
            let room = rustix::fs::statvfs(&directory).ok()?;
            let free = room.f_bavail.saturating_mul(room.f_frsize);
            (free < region.bytes).then(|| {
                fatal(
                    format!(
                        "`{place}` has room for {}, not for {}",
                        Bytes(free),
                        Bytes(region.bytes)
                    ),
                    "name another directory, or use smaller files",
                )
            })
        }
    }
}

/// The memory that is still available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// The size of physical memory.
    pub total_bytes: u64,
    /// MemAvailable plus free swap.
    pub available_bytes: u64,
}

impl Room {
    /// Reads /proc/meminfo; `None` if it cannot be read.
    pub fn read(root: &Root) -> Option<Room> {
        let info: Meminfo = root.parse("/proc/meminfo").ok()?;
        let available = info.mem_available.unwrap_or(info.mem_free + info.cached);
        Some(Room {
            total_bytes: info.mem_total,
            available_bytes: available.saturating_add(info.swap_free),
        })
    }

    /// Returns the bytes that must stay available.
    pub fn guard_bytes(&self, limits: &Limits) -> u64 {
        (self.total_bytes as f64 * limits.free_share_min) as u64
    }

    /// Returns true if less than [`Room::guard_bytes`] is available.
    pub fn is_short(&self, limits: &Limits) -> bool {
        self.available_bytes < self.guard_bytes(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::job::Job;
    use pagetax_core::machine::Machine;
    use pagetax_core::quantity::Params;

    fn plan(region: &str, phase: &str) -> Plan {
        let text = format!(
            "name = \"t\"\n[[region]]\nname = \"r\"\n{region}\n[[phase]]\nname = \"p\"\n{phase}\n"
        );
        let spec = crate::run::NullMachine.spec();
        Job::parse(&text, "t.toml").unwrap().resolve(&Params::new(), &spec, None).unwrap()
    }

    /// Makes a tree with 8 GiB of memory, 6 GiB of it available, and pages of 64K and 2M.
    fn machine() -> (tempfile::TempDir, Root, PageSettings) {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let kib = |name: &str, gib: u64| format!("{name}: {} kB\n", gib << 20);
        let names = "MemFree Buffers Cached SwapCached Active Inactive SwapTotal SwapFree Dirty \
                     Writeback Mapped Slab Committed_AS VmallocTotal VmallocUsed VmallocChunk";
        let rest: String = names.split_whitespace().map(|name| kib(name, 0)).collect();
        write("proc/meminfo", &(kib("MemTotal", 8) + &kib("MemAvailable", 6) + &rest));
        let thp = "sys/kernel/mm/transparent_hugepage";
        write(&format!("{thp}/enabled"), "always [madvise] never\n");
        write(&format!("{thp}/hpage_pmd_size"), "2097152\n");
        let sizes = "always [inherit] madvise never\n";
        write(&format!("{thp}/hugepages-2048kB/enabled"), sizes);
        write(&format!("{thp}/hugepages-64kB/enabled"), "always inherit madvise [never]\n");
        let pool = "sys/kernel/mm/hugepages/hugepages-2048kB";
        write(&format!("{pool}/free_hugepages"), "3\n");
        write(&format!("{pool}/nr_hugepages"), "5\n");
        let root = Root::at(folder.path());
        let pages = PageSettings::at(folder.path().join("sys/kernel/mm"));
        (folder, root, pages)
    }

    fn findings(plan: &Plan) -> Vec<Unmet> {
        let (_folder, root, pages) = machine();
        check(plan, &Limits::default(), &root, &pages)
    }

    const WRITE: &str = "ops = [{ touch = \"r\", access = \"write\" }]";

    #[test]
    fn a_plan_that_fits_has_nothing_against_it() {
        assert_eq!(findings(&plan("size = \"5G\"", WRITE)), []);
    }

    #[test]
    fn copies_of_clients_count() {
        let written = format!("clients = 4\n{WRITE}");
        assert!(findings(&plan("size = \"2G\"", &written))[0].what.contains("needs 8G"));
        assert_eq!(findings(&plan("size = \"2G\"\nbacking = \"shared\"", &written)), []);
        assert_eq!(findings(&plan("size = \"2G\"", "clients = 4\nops = [{ touch = \"r\" }]")), []);
    }

    #[test]
    fn a_quarter_of_memory_may_be_locked() {
        let lock = "ops = [{ lock = \"r\" }]";
        let lines = |size: &str| findings(&plan(&format!("size = \"{size}\""), lock));
        assert!(lines("3G").iter().any(|u| u.what.contains("25 %") && u.remedy.contains("2G")));
        assert!(!lines("2G").iter().any(|u| u.what.contains("25 %")));
    }

    #[test]
    fn pools_are_filled_by_the_exact_number() {
        let unmet = findings(&plan("size = \"8M\"\npage_size = \"hugetlb:2M\"", WRITE));
        assert!(unmet[0].fatal && unmet[0].what.contains("4 hugetlb pages of 2M; 3 are free"));
        assert!(unmet[0].remedy.contains("echo 6 >"), "{}", unmet[0].remedy);
        assert_eq!(findings(&plan("size = \"6M\"\npage_size = \"hugetlb:2M\"", WRITE)), []);
    }

    #[test]
    fn preferences_that_cannot_be_met_are_not_fatal() {
        let wants =
            |size: &str| findings(&plan(&format!("size = \"8M\"\npage_size = \"{size}\""), WRITE));
        assert_eq!(wants("2M"), []);
        let off = &wants("64K")[0];
        assert!(!off.fatal && off.what.contains("switched off") && off.remedy.contains("64kB"));
        assert!(wants("256K")[0].remedy.contains("2M"));
    }

    #[test]
    fn what_is_short_is_told() {
        let limits = Limits::default();
        let room = |available_bytes| Room { total_bytes: 1000, available_bytes };
        assert!(room(19).is_short(&limits) && !room(20).is_short(&limits));
    }
}
