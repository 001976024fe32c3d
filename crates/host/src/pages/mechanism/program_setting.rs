//! Settings that a program, its allocator or its runtime has for memory of its own, and what each costs.
//!
//! They are found by a look at the programs that a command names: the libraries that they load, and the names
//! that their binaries contain. Sources: the manuals of jemalloc, gperftools, mimalloc, glibc, Redis and
//! PostgreSQL, the options of the Java launcher, Go's package runtime, and Python's command line.

use super::super::tunables::{MMAP_THRESHOLD, TOP_PAD, TRIM_THRESHOLD, tunable};
use super::thp::Thp;
use super::{Conditions, LargePages, Mechanism, Proof, Recipe, Rest, Unavailable};
use crate::launch::program::Program;
use crate::pages::settings::{Mode, Setting};
use memchr::memmem;
use pagetax_core::page_size::PartSizes;
use pagetax_core::units::PageSize;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::{env, fs};

/// Freed memory at the top of glibc's heap beyond this much is given back, as its trial sets it: 1 GiB.
const KEPT_BYTES: &str = "1073741824";
/// The size from which a block is a mapping of its own in that trial: 32 MiB, the most that glibc takes.
const MAPPED_BYTES: &str = "33554432";
/// The amount by which glibc's heap grows in that trial: 64 MiB.
const GROWTH_BYTES: &str = "67108864";

/// A setting of a program's own, as a trial.
#[derive(Debug)]
pub struct ProgramSetting {
    name: &'static str,
    /// A program has the setting if this is true.
    has: fn(&NamedProgram) -> bool,
    change: SettingChange,
    /// The large pages that it gives, and the way to them.
    pages: OwnPages,
    cost: &'static str,
}

/// The change of a command that makes a setting.
#[derive(Debug)]
enum SettingChange {
    /// A variable of the environment. A value that is there already stays, before this one and the separator.
    Variable { name: &'static str, separator: Option<char>, value: &'static str },
    /// Tunables of glibc.
    Tunables(&'static [(&'static str, &'static str)]),
    /// The last arguments of the program.
    Arguments(&'static [&'static str]),
    /// A hugetlb pool: PostgreSQL takes pages of one if there are enough of them.
    Pool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OwnPages {
    /// None: freed memory is kept, and is not faulted in again.
    None,
    /// The program asks the kernel for them itself.
    Asked,
    /// Its memory then comes from glibc's malloc, and ppgsz gives that large pages.
    OfMalloc,
}

const fn variable(name: &'static str, separator: char, value: &'static str) -> SettingChange {
    SettingChange::Variable { name, separator: Some(separator), value }
}

const SETTINGS: &[ProgramSetting] = &[
    ProgramSetting {
        name: "jemalloc-thp",
        has: |program| program.loads("libjemalloc"),
        change: variable("MALLOC_CONF", ',', "thp:always,metadata_thp:auto"),
        pages: OwnPages::Asked,
        cost: "memory that is freed in parts stays resident in whole large pages",
    },
    ProgramSetting {
        name: "jemalloc-keep",
        has: |program| program.loads("libjemalloc"),
        change: variable("MALLOC_CONF", ',', "dirty_decay_ms:-1,muzzy_decay_ms:-1"),
        pages: OwnPages::None,
        cost: "freed memory is never given back to the system",
    },
    ProgramSetting {
        name: "rust-jemalloc-thp",
        has: |program| program.mentions("_RJEM_MALLOC_CONF"),
        change: variable("_RJEM_MALLOC_CONF", ',', "thp:always,metadata_thp:auto"),
        pages: OwnPages::Asked,
        cost: "memory that is freed in parts stays resident in whole large pages",
    },
    ProgramSetting {
        name: "tcmalloc-keep",
        has: |program| program.loads("libtcmalloc"),
        change: SettingChange::Variable {
            name: "TCMALLOC_RELEASE_RATE",
            separator: None,
            value: "0",
        },
        pages: OwnPages::None,
        cost: "freed memory is never given back to the system",
    },
    ProgramSetting {
        name: "mimalloc-large",
        has: |program| program.loads("libmimalloc") || program.mentions("mimalloc_"),
        change: SettingChange::Variable {
            name: "MIMALLOC_ALLOW_LARGE_OS_PAGES",
            separator: None,
            value: "1",
        },
        pages: OwnPages::Asked,
        cost: "memory that is freed in parts stays resident in whole large pages",
    },
    ProgramSetting {
        name: "mimalloc-keep",
        has: |program| program.loads("libmimalloc") || program.mentions("mimalloc_"),
        change: SettingChange::Variable {
            name: "MIMALLOC_PURGE_DELAY",
            separator: None,
            value: "-1",
        },
        pages: OwnPages::None,
        cost: "freed memory is never given back to the system",
    },
    ProgramSetting {
        name: "python-malloc-2M",
        has: |program| program.is_called("python3") || program.loads("libpython3"),
        change: SettingChange::Variable { name: "PYTHONMALLOC", separator: None, value: "malloc" },
        pages: OwnPages::OfMalloc,
        cost: "glibc's malloc takes longer for each small object, and more memory",
    },
    ProgramSetting {
        name: "jvm-thp",
        has: |program| program.is_called("java") || program.loads("libjvm"),
        change: variable("JAVA_TOOL_OPTIONS", ' ', "-XX:+UseTransparentHugePages"),
        pages: OwnPages::Asked,
        cost: "the heap grows by whole large pages, and the JVM prints a line about the variable",
    },
    ProgramSetting {
        name: "go-keep",
        has: |program| program.mentions(" Go buildinf:"),
        change: variable("GODEBUG", ',', "madvdontneed=0"),
        pages: OwnPages::None,
        cost: "freed memory counts as resident until the system is short of it",
    },
    ProgramSetting {
        name: "redis-thp",
        has: |program| program.is_called("redis-server") || program.is_called("valkey-server"),
        change: SettingChange::Arguments(&["--disable-thp", "no"]),
        pages: OwnPages::Asked,
        cost: "after a fork (BGSAVE) each first write copies a large page: look at the p99",
    },
    ProgramSetting {
        name: "postgres-pool",
        has: |program| program.is_called("postgres"),
        change: SettingChange::Pool,
        pages: OwnPages::Asked,
        cost: "the pool's memory is set aside, whether it is used or not",
    },
    ProgramSetting {
        name: "glibc-keep",
        has: NamedProgram::has_glibc_malloc,
        change: SettingChange::Tunables(&[
            (TRIM_THRESHOLD, KEPT_BYTES),
            (MMAP_THRESHOLD, MAPPED_BYTES),
            (TOP_PAD, GROWTH_BYTES),
        ]),
        pages: OwnPages::None,
        cost: "up to 1 GiB of freed memory is not given back to the system",
    },
];

/// Returns the settings of the programs that a command names. If they are to be tried, PostgreSQL is asked
/// for the pages that it needs.
pub fn settings_of(command: &[OsString], are_tried: bool) -> Vec<Arc<dyn Mechanism>> {
    let programs = NamedProgram::all(command);
    // A script may name small programs too, such as rm; the one with an allocator of its own counts.
    let has_other = programs.iter().any(NamedProgram::has_other_allocator);
    let has = |setting: &&ProgramSetting| {
        let is_reached = !has_other || !matches!(setting.change, SettingChange::Tunables(_));
        is_reached && programs.iter().any(|program| (setting.has)(program))
    };
    let of = |setting: &'static ProgramSetting| -> Arc<dyn Mechanism> {
        let is_first = programs.first().is_some_and(|first| (setting.has)(first));
        let needs_pool = are_tried && matches!(setting.change, SettingChange::Pool);
        let pool_pages = needs_pool.then(|| pool_pages(command)).flatten();
        Arc::new(OfCommand { setting, is_first, pool_pages })
    };
    SETTINGS.iter().filter(has).map(of).collect()
}

/// A setting for one command.
#[derive(Debug)]
struct OfCommand {
    setting: &'static ProgramSetting,
    /// True if the command's first word is the program, so that its last arguments are the program's.
    is_first: bool,
    /// The pages that PostgreSQL takes of a pool; none if it could not be asked.
    pool_pages: Option<u64>,
}

/// Returns the number of huge pages that this command of PostgreSQL takes for its shared memory. It starts no
/// server. Only a command that surely hands on its last arguments is asked.
fn pool_pages(command: &[OsString]) -> Option<u64> {
    let is_server = |word: &OsString| Path::new(word).file_name() == Some(OsStr::new("postgres"));
    let is_starter = |word: &OsString| HANDING_ON.iter().any(|name| word == name);
    let first = command.first()?;
    let hands_on = is_starter(first) && command.iter().any(is_server);
    if !is_server(first) && !hands_on {
        return None;
    }
    let mut asking = Command::new(first);
    asking.args(&command[1..]).args(["-C", "shared_memory_size_in_huge_pages"]);
    let said = asking.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    String::from_utf8_lossy(&said.stdout).trim().parse().ok()
}

impl Mechanism for OfCommand {
    fn name(&self) -> String {
        self.setting.name.into()
    }

    fn page_size(&self) -> Option<PageSize> {
        (self.setting.pages != OwnPages::None).then_some(PageSize::M2)
    }

    fn available(&self, conditions: &Conditions) -> Result<(), Unavailable> {
        let refused =
            |why: &str, remedy: &str| Err(Unavailable { why: why.into(), remedy: remedy.into() });
        let mode = conditions.system.thp();
        match self.setting.change {
            SettingChange::Pool if self.pool_pages.is_none() => refused(
                "it does not say how many pages of a pool its shared memory takes",
                "start `postgres` 15 or later directly, with huge_pages=try",
            ),
            SettingChange::Pool => Ok(()),
            SettingChange::Arguments(_) if mode != Some(Mode::Always) => refused(
                "the program turns large pages off only where the system's setting is `always`",
                "none needed",
            ),
            SettingChange::Arguments(_) if !self.is_first => refused(
                "another program starts it, so its arguments cannot be added here",
                "start it directly",
            ),
            SettingChange::Arguments(_) => Ok(()),
            _ if self.setting.pages == OwnPages::Asked && mode == Some(Mode::Never) => refused(
                "THP is `never`, so a program that asks for large pages gets none",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
            ),
            _ if self.setting.pages == OwnPages::Asked => Thp(PageSize::M2).available(conditions),
            _ => Ok(()),
        }
    }

    fn apply(&self, conditions: &Conditions, recipe: &mut Recipe) {
        match self.setting.change {
            SettingChange::Variable { name, separator, value } => {
                let before = env::var(name).ok().filter(|before| !before.is_empty());
                let value = match before.zip(separator) {
                    Some((before, separator)) => format!("{before}{separator}{value}"),
                    None => value.into(),
                };
                recipe.environment.push((name, value));
            }
            SettingChange::Tunables(tunables) => recipe.tunables.extend(
                tunables
                    .iter()
                    // A value of the user's own is not ours to change.
                    .filter(|(name, _)| {
                        conditions.tunables.and_then(|set| tunable(set, name)).is_none()
                    })
                    .map(|(name, value)| (*name, value.to_string())),
            ),
            SettingChange::Arguments(arguments) => {
                recipe.arguments.extend(arguments.iter().map(ToString::to_string));
            }
            SettingChange::Pool => {
                let path = conditions.system.pool_path(PageSize::M2).join("nr_hugepages");
                let has = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
                let pages = has.unwrap_or(0) + self.pool_pages.unwrap_or(0) + SPARE_PAGES;
                recipe.settings.push(Setting::new(path, pages.to_string()));
            }
        }
    }

    fn proof(&self, memory: &LargePages) -> Proof {
        Proof::huge(memory, Rest::Expected)
    }

    fn by_ppgsz(&self) -> Option<PartSizes> {
        Thp(PageSize::M2).by_ppgsz().filter(|_| self.setting.pages == OwnPages::OfMalloc)
    }

    fn cost(&self) -> Option<&'static str> {
        Some(self.setting.cost)
    }
}

/// The most programs of a command that are looked at.
const PROGRAMS_MAX: usize = 8;
/// The largest binary that is searched for names.
const SEARCHED_BYTES_MAX: u64 = 256 << 20;

/// A program that a command names: its first word, or a later one as in `sh -c 'python3 x.py'`.
struct NamedProgram {
    /// The name of its binary.
    name: String,
    /// The files that its loader lists.
    libraries: Vec<String>,
    /// The binary, if it is not too large.
    bytes: Vec<u8>,
}

impl NamedProgram {
    fn all(command: &[OsString]) -> Vec<NamedProgram> {
        let words = command.iter().filter_map(|word| word.to_str());
        // A script in an argument names programs too.
        let split = |word: &str| match word.contains(' ') {
            true => shlex::split(word).unwrap_or_default(),
            false => vec![word.to_string()],
        };
        let found = words.flat_map(split).filter_map(|word| Program::find(word).ok());
        found.take(PROGRAMS_MAX).map(|program| NamedProgram::of(&program)).collect()
    }

    fn of(program: &Program) -> NamedProgram {
        let is_small = |length: u64| length <= SEARCHED_BYTES_MAX;
        let is_searched = fs::metadata(&program.binary).is_ok_and(|file| is_small(file.len()));
        let bytes = is_searched.then(|| fs::read(&program.binary).ok()).flatten();
        let text = |path: PathBuf| path.display().to_string();
        NamedProgram {
            name: program.binary.file_name().unwrap_or_default().display().to_string(),
            libraries: program.files().into_iter().skip(1).map(text).collect(),
            bytes: bytes.unwrap_or_default(),
        }
    }

    /// Returns true for this name, also with a version after it.
    fn is_called(&self, name: &str) -> bool {
        let version = self.name.strip_prefix(name);
        version.is_some_and(|rest| rest.chars().all(|c| c == '.' || c.is_ascii_digit()))
    }

    fn loads(&self, library: &str) -> bool {
        self.libraries.iter().any(|path| path.contains(&format!("/{library}")))
    }

    fn mentions(&self, text: &str) -> bool {
        memmem::find(&self.bytes, text.as_bytes()).is_some()
    }

    fn has_other_allocator(&self) -> bool {
        let others = ["libjemalloc", "libtcmalloc", "libmimalloc", "libjvm", "libjli"];
        others.iter().any(|other| self.loads(other))
    }

    /// Returns true if its malloc is glibc's. A program that only starts others is none of those.
    fn has_glibc_malloc(&self) -> bool {
        let is_starter = SHELLS.iter().chain(&HANDING_ON).any(|name| self.name == *name);
        self.loads("libc.so.6") && !is_starter && !self.has_other_allocator()
    }
}

/// Programs that start another one with the arguments that follow its name.
const HANDING_ON: [&str; 8] =
    ["env", "nice", "pagetax", "runuser", "setpriv", "sudo", "taskset", "timeout"];
/// Shells, which start others too.
const SHELLS: [&str; 4] = ["bash", "busybox", "dash", "sh"];
/// Pages of a pool beyond what a server asks for.
const SPARE_PAGES: u64 = 2;

#[cfg(test)]
mod tests {
    use super::super::super::settings::tests::tree;
    use super::*;

    fn named(name: &str, library: &str, bytes: &[u8]) -> Vec<&'static str> {
        let libraries = vec![format!("/usr/lib/{library}")];
        let program = NamedProgram { name: name.into(), libraries, bytes: bytes.into() };
        let has = |setting: &&ProgramSetting| (setting.has)(&program);
        SETTINGS.iter().filter(has).map(|setting| setting.name).collect()
    }

    #[test]
    fn settings_follow_what_a_program_is() {
        let libc = "libc.so.6";
        assert_eq!(named("sort", libc, b""), ["glibc-keep"]);
        assert_eq!(named("sh", libc, b""), [""; 0]);
        assert_eq!(named("python3.11", libc, b""), ["python-malloc-2M", "glibc-keep"]);
        assert_eq!(named("python3-config", "x.so", b""), [""; 0]);
        assert_eq!(
            named("redis-server", "libjemalloc.so.2", b""),
            ["jemalloc-thp", "jemalloc-keep", "redis-thp"]
        );
        assert_eq!(named("java", "libjli.so", b""), ["jvm-thp"]);
        assert_eq!(named("x", "x.so", b"\xff Go buildinf:"), ["go-keep"]);
        assert_eq!(named("x", "x.so", b"a _RJEM_MALLOC_CONF b"), ["rust-jemalloc-thp"]);
    }

    #[test]
    fn a_script_of_a_shell_names_programs_too() {
        let command = ["sh", "-c", "exec sort /dev/null | tail -n 1"].map(OsString::from);
        let programs = NamedProgram::all(&command);
        let names: Vec<&str> = programs.iter().map(|program| program.name.as_str()).collect();
        assert_eq!(names[1..], ["sort", "tail"]);
    }

    /// Returns the recipe of a setting. A server is asked for its pages if no tunables are given.
    fn recipe(name: &str, thp: &str, tunables: Option<&str>) -> Result<Recipe, Unavailable> {
        let (_keep, system) = tree(thp, "never", "inherit", 0);
        let setting = SETTINGS.iter().find(|setting| setting.name == name).unwrap();
        let conditions = Conditions { system: &system, tunables, has_code: false };
        let pool_pages = Some(70).filter(|_| tunables.is_none());
        Recipe::new(Arc::new(OfCommand { setting, is_first: true, pool_pages }), &conditions)
    }

    #[test]
    fn settings_are_tried_only_where_they_change_something() {
        assert!(recipe("jemalloc-thp", "never", None).unwrap_err().why.contains("never"));
        assert!(recipe("jemalloc-thp", "always", None).unwrap_err().why.contains("as it is"));
        assert!(recipe("redis-thp", "madvise", None).is_err());
        assert_eq!(recipe("redis-thp", "always", None).unwrap().arguments, ["--disable-thp", "no"]);
        assert_eq!(recipe("postgres-pool", "madvise", None).unwrap().settings[0].value, "72");
        assert!(recipe("postgres-pool", "madvise", Some("")).unwrap_err().why.contains("say how"));
        let jvm = recipe("jvm-thp", "madvise", None).unwrap();
        let line = jvm.shell_line(&["java".into(), "-jar".into(), "a.jar".into()], None, "pagetax");
        let line = line.unwrap().replace('\'', "");
        assert!(line.ends_with("-XX:+UseTransparentHugePages java -jar a.jar"), "{line}");
    }

    #[test]
    fn tunables_of_the_user_stay() {
        let existing = "glibc.malloc.top_pad=4096";
        let keep = recipe("glibc-keep", "madvise", Some(existing)).unwrap();
        let tunables = keep.variables(Some(existing)).remove(0).1;
        assert!(tunables.starts_with("glibc.malloc.top_pad=4096:"), "{tunables}");
        assert_eq!(tunables.matches("top_pad").count(), 1);
    }

    #[test]
    fn python_runs_under_ppgsz_with_its_own_setting() {
        let python = recipe("python-malloc-2M", "madvise", None).unwrap().through("/opt/pagetax");
        let line = python.shell_line(&["python3".into()], None, "pagetax").unwrap();
        assert_eq!(line, "PYTHONMALLOC=malloc pagetax ppgsz -o 'heap=2M' python3");
    }
}
