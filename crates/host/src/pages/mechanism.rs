//! Ways to give an unmodified command another page size, and what each needs of the system.
//!
//! Which mechanisms work on unmodified programs was measured on Linux 6.18 with glibc 2.36.

use super::settings::{Mode, PageSettings, Setting};
use super::tunables::{HUGETLB, tunable, with_tunable};
use pagetax_core::diagnosis::{AS_IS, BASE};
use pagetax_core::units::{PageSize, UnitError};
use std::str::FromStr;

/// A way to run a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mechanism {
    /// Nothing is changed.
    #[default]
    AsIs,
    /// Base pages, by prctl(PR_SET_THP_DISABLE), which fork and exec inherit.
    Base,
    /// Transparent huge pages below the PMD size, by glibc's malloc advice and the size's setting.
    Mthp(PageSize),
    /// Transparent huge pages of the PMD size, by glibc's malloc advice.
    Thp(PageSize),
    /// Pages of a hugetlb pool, by glibc's malloc.
    Hugetlb(PageSize),
    /// Transparent huge pages for the main thread's stack, by `pagetax ppgsz`.
    Stack(PageSize),
    /// Huge pages for code, by `pagetax ppgsz`.
    Text(PageSize),
    /// Transparent huge pages for heap, stack and code together, by `pagetax ppgsz`.
    All(PageSize),
}

/// Why a word of `--sizes` names no mechanism.
#[derive(Debug, thiserror::Error)]
pub enum MechanismError {
    /// Not a page size.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// A page size that no mechanism here gives.
    #[error(
        "no mechanism gives {0} pages here; write 4K for base pages, a size of \
         /sys/kernel/mm/transparent_hugepage (such as 64K or 2M), or hugetlb-2M or hugetlb-1G"
    )]
    NoSuchSize(PageSize),
}

/// Why a mechanism cannot be tried here, and what would help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable {
    /// What is in the way.
    pub why: String,
    /// What to do about it.
    pub remedy: String,
}

impl Unavailable {
    /// The kernel has no pages of this size.
    pub fn no_size(size: PageSize, system: &PageSettings) -> Unavailable {
        let is_medium = system.pmd_size().is_none_or(|pmd| size < pmd);
        let remedy = match is_medium && system.sizes().len() <= 1 {
            true => "Linux 6.8 and later have transparent huge pages of such sizes (mTHP)".into(),
            false => {
                let sizes = system.sizes().iter().map(ToString::to_string).collect::<Vec<_>>();
                format!("it has {}", sizes.join(", "))
            }
        };
        let since = if is_medium { " (Linux 6.8)" } else { "" };
        Unavailable { why: format!("the kernel has no {size} pages{since}"), remedy }
    }
}

/// All that a mechanism does to a command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recipe {
    /// Whose it is.
    pub mechanism: Mechanism,
    /// The value for glibc's huge-page tunable; none leaves the environment alone.
    pub malloc_hugetlb: Option<String>,
    /// prctl(PR_SET_THP_DISABLE) before exec.
    pub disable_thp: bool,
    /// System settings for the time of the run.
    pub settings: Vec<Setting>,
    /// Put before the command: a wrapper and its options, the program first.
    pub wrapper: Vec<String>,
    /// Appended to the command, for programs that take their page size themselves.
    pub arguments: Vec<String>,
}

impl Mechanism {
    /// The mechanism that a word of `--sizes` means on this system.
    pub fn parse(word: &str, system: &PageSettings) -> Result<Mechanism, MechanismError> {
        if let Some(size) = word.strip_prefix("hugetlb-") {
            let size = PageSize::from_str(size)?;
            return match system.hugetlb_sizes().contains(&size) {
                true => Ok(Mechanism::Hugetlb(size)),
                false => Err(MechanismError::NoSuchSize(size)),
            };
        }
        let pmd = system.pmd_size().unwrap_or(PageSize::M2);
        type Make = fn(PageSize) -> Mechanism;
        let by_part: [(&str, Make); 3] =
            [("stack-", Mechanism::Stack), ("text-", Mechanism::Text), ("all-", Mechanism::All)];
        for (prefix, make) in by_part {
            if let Some(size) = word.strip_prefix(prefix) {
                let size = PageSize::from_str(size)?;
                let made = (size == pmd).then(|| make(size));
                return made.ok_or(MechanismError::NoSuchSize(size));
            }
        }
        let size = PageSize::from_str(word)?;
        match size {
            _ if size.bytes() == rustix::param::page_size() as u64 => Ok(Mechanism::Base),
            _ if size == pmd => Ok(Mechanism::Thp(size)),
            _ if size < pmd && system.sizes().contains(&size) => Ok(Mechanism::Mthp(size)),
            _ => Err(MechanismError::NoSuchSize(size)),
        }
    }

    /// The name of its trial.
    pub fn name(self) -> String {
        match self {
            Mechanism::AsIs => AS_IS.into(),
            Mechanism::Base => BASE.into(),
            Mechanism::Mthp(size) => format!("mthp-{size}"),
            Mechanism::Thp(size) => format!("thp-{size}"),
            Mechanism::Hugetlb(size) => format!("hugetlb-{size}"),
            Mechanism::Stack(size) => format!("stack-{size}"),
            Mechanism::Text(size) => format!("text-{size}"),
            Mechanism::All(size) => format!("all-{size}"),
        }
    }

    /// The page size that it asks for.
    pub fn page_size(self) -> Option<PageSize> {
        match self {
            Mechanism::AsIs => None,
            Mechanism::Base => PageSize::new(rustix::param::page_size() as u64).ok(),
            Mechanism::Mthp(size) | Mechanism::Thp(size) | Mechanism::Hugetlb(size) => Some(size),
            Mechanism::Stack(size) | Mechanism::Text(size) | Mechanism::All(size) => Some(size),
        }
    }

    /// What `pagetax ppgsz -o` is told to have the same; none where it takes other means.
    pub fn options(self) -> Option<String> {
        Some(match self {
            Mechanism::Thp(size) => format!("heap={size}"),
            Mechanism::Stack(size) => format!("stack={size}"),
            Mechanism::Text(size) => format!("text={size}"),
            Mechanism::All(size) => format!("heap={size},stack={size},text={size}"),
            Mechanism::AsIs | Mechanism::Base | Mechanism::Mthp(_) | Mechanism::Hugetlb(_) => {
                return None;
            }
        })
    }

    /// Whether it leaves code in the page cache by huge pages.
    pub fn brings_text(self) -> bool {
        matches!(self, Mechanism::Text(_) | Mechanism::All(_))
    }

    /// What it takes here, given the GLIBC_TUNABLES that stand in the environment.
    pub fn recipe(
        self,
        system: &PageSettings,
        tunables: Option<&str>,
    ) -> Result<Recipe, Unavailable> {
        match self {
            Mechanism::AsIs => Ok(Recipe::default()),
            Mechanism::Base => Ok(Recipe {
                malloc_hugetlb: tunables
                    .and_then(|existing| tunable(existing, HUGETLB))
                    .map(|_| "0".into()),
                disable_thp: true,
                ..Recipe::of(self)
            }),
            Mechanism::Thp(size) => thp(size, system),
            Mechanism::Mthp(size) => mthp(size, system),
            Mechanism::Hugetlb(size) => Ok(hugetlb(size, system)),
            Mechanism::Stack(_) | Mechanism::Text(_) | Mechanism::All(_) => match system.thp() {
                Some(_) => Ok(Recipe::of(self)),
                None => Err(no_thp()),
            },
        }
    }
}

fn no_thp() -> Unavailable {
    Unavailable {
        why: "the kernel has no transparent huge pages".into(),
        remedy: "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE".into(),
    }
}

fn setting(path: std::path::PathBuf, value: &str) -> Setting {
    Setting { path, value: value.into() }
}

/// Malloc asks only where the system-wide setting says `madvise`; the kernel grants the largest
/// size whose own setting allows it.
fn thp(size: PageSize, system: &PageSettings) -> Result<Recipe, Unavailable> {
    let mode = system.thp().ok_or_else(no_thp)?;
    if mode == Mode::Always && system.of_size(size) == Some(Mode::Always) {
        return Err(Unavailable {
            why: format!("THP is `always`: the command gets {size} pages as it is"),
            remedy: "none needed: compare `as-is` with `base`".into(),
        });
    }
    let mut settings = Vec::new();
    if mode == Mode::Never {
        settings.push(setting(system.thp_path(), "madvise"));
    }
    if system.of_size(size) == Some(Mode::Never) && system.size_path(size).exists() {
        settings.push(setting(system.size_path(size), "inherit"));
    }
    let malloc_hugetlb = Some("1".into());
    Ok(Recipe { malloc_hugetlb, settings, ..Recipe::of(Mechanism::Thp(size)) })
}

/// The size must be on, and all larger ones off, or the kernel prefers those.
fn mthp(size: PageSize, system: &PageSettings) -> Result<Recipe, Unavailable> {
    let mode = system.thp().ok_or_else(no_thp)?;
    let mut settings = Vec::new();
    if mode == Mode::Never {
        settings.push(setting(system.thp_path(), "madvise"));
    }
    if matches!(system.of_size(size), None | Some(Mode::Never)) {
        settings.push(setting(system.size_path(size), "inherit"));
    }
    let larger = system.sizes().into_iter().filter(|other| *other > size);
    for other in larger.filter(|other| system.of_size(*other) != Some(Mode::Never)) {
        settings.push(setting(system.size_path(other), "never"));
    }
    let malloc_hugetlb = (mode != Mode::Always).then(|| "1".into());
    Ok(Recipe { malloc_hugetlb, settings, ..Recipe::of(Mechanism::Mthp(size)) })
}

/// A pool without pages is filled on demand, up to half of memory.
fn hugetlb(size: PageSize, system: &PageSettings) -> Recipe {
    let mut settings = Vec::new();
    if system.hugetlb_pages(size).unwrap_or(0) == 0 {
        let pages = rustix::system::sysinfo().totalram as u64 / 2 / size.bytes();
        let path = system.pool_path(size).join("nr_overcommit_hugepages");
        settings.push(setting(path, &pages.to_string()));
    }
    let malloc_hugetlb = Some(size.bytes().to_string());
    Recipe { malloc_hugetlb, settings, ..Recipe::of(Mechanism::Hugetlb(size)) }
}

impl Recipe {
    /// One that changes nothing yet.
    pub fn of(mechanism: Mechanism) -> Recipe {
        Recipe { mechanism, ..Recipe::default() }
    }

    /// Why this cannot be done without changing the system, unless that is allowed and possible.
    pub fn permitted(&self, change_settings: bool) -> Result<(), Unavailable> {
        let Some(first) = self.settings.first() else { return Ok(()) };
        let wanted: Vec<String> =
            self.settings.iter().map(|s| format!("{} = {}", s.path.display(), s.value)).collect();
        let why = format!("this system is set otherwise; it takes {}", wanted.join(", "));
        let remedy = match (change_settings, rustix::process::geteuid().is_root()) {
            (true, true) => return Ok(()),
            (false, true) => "add --allow-sysfs: changed during its runs, then put back",
            (true, false) if std::fs::OpenOptions::new().write(true).open(&first.path).is_ok() => {
                return Ok(());
            }
            (_, false) => "run as root with --allow-sysfs: changed during its runs, then put back",
        };
        Err(Unavailable { why, remedy: remedy.into() })
    }

    /// The same by running the command under `own`'s ppgsz, where ppgsz has it: so what is tried is
    /// what the line to paste does.
    pub fn through(self, own: &str) -> Recipe {
        match self.mechanism.options() {
            None => self,
            Some(options) => Recipe {
                wrapper: [own, "ppgsz", "-o", &options].map(String::from).into(),
                settings: self.settings,
                ..Recipe::of(self.mechanism)
            },
        }
    }

    /// The wrapper by the name that it has on the PATH.
    fn wrapper_by_name(&self) -> Vec<String> {
        let options = self.wrapper.iter().skip(1).cloned();
        let name = (!self.wrapper.is_empty()).then(|| "pagetax".to_string());
        name.into_iter().chain(options).collect()
    }

    /// What it does, in a few words.
    pub fn words(&self) -> String {
        let mut words = Vec::new();
        words.extend((!self.wrapper.is_empty()).then(|| self.wrapper_by_name().join(" ")));
        words.extend(self.disable_thp.then(|| "prctl(PR_SET_THP_DISABLE)".to_string()));
        words.extend(self.malloc_hugetlb.as_ref().map(|value| format!("{HUGETLB}={value}")));
        words.extend(self.settings.iter().map(|s| format!("{} = {}", s.path.display(), s.value)));
        words.extend((!self.arguments.is_empty()).then(|| self.arguments.join(" ")));
        if words.is_empty() { "unchanged".into() } else { words.join(", ") }
    }

    /// The value of GLIBC_TUNABLES for the command; none leaves it as it is.
    pub fn glibc_tunables(&self, existing: Option<&str>) -> Option<String> {
        Some(with_tunable(existing, HUGETLB, self.malloc_hugetlb.as_deref()?))
    }

    /// One line for a shell that runs `command` under this recipe; none where a word of it cannot
    /// be written in a shell.
    pub fn shell_line(&self, command: &[String], existing: Option<&str>) -> Option<String> {
        let mut parts = Vec::new();
        for Setting { path, value } in &self.settings {
            parts.push(format!("echo {value} | sudo tee {} >/dev/null &&", path.display()));
        }
        if let Some(tunables) = self.glibc_tunables(existing) {
            parts.push(format!("GLIBC_TUNABLES={}", shlex::try_quote(&tunables).ok()?));
        }
        if self.disable_thp {
            // No tool of a plain system calls prctl, but perl is on every Debian.
            let call = format!("syscall({},41,1,0,0,0)", libc::SYS_prctl);
            parts.push(format!("perl -e '{call}; exec {{$ARGV[0]}} @ARGV'"));
        }
        for word in self.wrapper_by_name().iter().chain(command).chain(&self.arguments) {
            parts.push(quoted(word)?);
        }
        Some(parts.join(" "))
    }
}

/// A word for a shell. What would break the line is escaped as bash, zsh and ksh have it.
fn quoted(word: &str) -> Option<String> {
    if !word.contains(['\n', '\r']) {
        return Some(shlex::try_quote(word).ok()?.into_owned());
    }
    let escapes = [("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")];
    let escaped =
        escapes.iter().fold(word.to_string(), |text, (raw, escape)| text.replace(raw, escape));
    (!word.contains('\0')).then(|| format!("$'{escaped}'"))
}

#[cfg(test)]
mod tests {
    use super::super::settings::tests::tree;
    use super::*;

    fn k64() -> PageSize {
        PageSize::new(64 << 10).unwrap()
    }

    fn values(recipe: &Recipe) -> Vec<(&str, &str)> {
        let name = |s: &Setting| match () {
            () if s.path.ends_with("transparent_hugepage/enabled") => "thp",
            () if s.path.ends_with("hugepages-64kB/enabled") => "64K",
            () if s.path.ends_with("hugepages-2048kB/enabled") => "2M",
            () => "pool",
        };
        recipe.settings.iter().map(|s| (name(s), s.value.as_str())).collect()
    }

    #[test]
    fn words_mean_mechanisms() {
        let (_keep, system) = tree("madvise", "never", "inherit", 0);
        let parse = |word| Mechanism::parse(word, &system).map(Mechanism::name);
        assert_eq!(parse("4K").unwrap(), "base");
        assert_eq!(parse("64K").unwrap(), "mthp-64K");
        assert_eq!(parse("2M").unwrap(), "thp-2M");
        assert_eq!(parse("hugetlb-2M").unwrap(), "hugetlb-2M");
        assert_eq!(parse("all-2M").unwrap(), "all-2M");
        assert!(matches!(parse("stack-64K"), Err(MechanismError::NoSuchSize(_))));
        assert!(matches!(parse("32K"), Err(MechanismError::NoSuchSize(_))));
        assert!(matches!(parse("hugetlb-1G"), Err(MechanismError::NoSuchSize(_))));
        assert!(matches!(parse("3M"), Err(MechanismError::Unit(_))));
    }

    #[test]
    fn thp_needs_settings_only_where_they_are_in_the_way() {
        let recipe = |thp, m2| {
            let (_keep, system) = tree(thp, "never", m2, 0);
            Mechanism::Thp(PageSize::M2).recipe(&system, None)
        };
        assert!(recipe("madvise", "inherit").unwrap().settings.is_empty());
        assert!(recipe("always", "inherit").unwrap_err().why.contains("as it is"));
        assert_eq!(values(&recipe("never", "inherit").unwrap())[0], ("thp", "madvise"));
        assert_eq!(values(&recipe("madvise", "never").unwrap()), [("2M", "inherit")]);
    }

    #[test]
    fn smaller_sizes_need_larger_ones_out_of_the_way() {
        let (_keep, system) = tree("madvise", "never", "inherit", 0);
        let recipe = Mechanism::Mthp(k64()).recipe(&system, None).unwrap();
        assert_eq!(values(&recipe), [("64K", "inherit"), ("2M", "never")]);
        let refused = recipe.permitted(false).unwrap_err();
        assert!(refused.remedy.contains("--allow-sysfs"));
        let (_keep, system) = tree("madvise", "madvise", "never", 0);
        assert!(Mechanism::Mthp(k64()).recipe(&system, None).unwrap().settings.is_empty());
    }

    #[test]
    fn an_empty_pool_needs_pages_on_demand() {
        let mechanism = Mechanism::Hugetlb(PageSize::M2);
        let (_keep, system) = tree("madvise", "never", "inherit", 0);
        assert_eq!(values(&mechanism.recipe(&system, None).unwrap())[0].0, "pool");
        let (_keep, system) = tree("madvise", "never", "inherit", 5);
        let recipe = mechanism.recipe(&system, None).unwrap();
        assert!(recipe.settings.is_empty());
        assert_eq!(recipe.malloc_hugetlb.as_deref(), Some("2097152"));
    }

    #[test]
    fn lines_to_paste_are_quoted_and_keep_the_environment() {
        let command = ["sort".to_string(), "a file".into(), "-k1;".into()];
        let thp = Recipe { malloc_hugetlb: Some("1".into()), ..Recipe::default() };
        assert_eq!(
            thp.shell_line(&command, Some("glibc.malloc.arena_max=1")).unwrap(),
            "GLIBC_TUNABLES='glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1' sort 'a file' '-k1;'"
        );
        assert!(thp.shell_line(&["a\0b".to_string()], None).is_none());
        let all = Recipe::of(Mechanism::All(PageSize::M2)).through("/somewhere/pagetax");
        assert_eq!(
            all.shell_line(&command, None).unwrap(),
            "pagetax ppgsz -o 'heap=2M,stack=2M,text=2M' sort 'a file' '-k1;'"
        );
        assert_eq!(thp.clone().through("/somewhere/pagetax"), thp);
        let script = ["python3".to_string(), "-c".into(), "a = 'b\\n'\nprint(a)".into()];
        assert_eq!(
            Recipe::default().shell_line(&script, None).unwrap(),
            r"python3 -c $'a = \'b\\n\'\nprint(a)'"
        );
    }

    #[test]
    fn base_undoes_a_tunable_only_where_there_is_one() {
        let (_keep, system) = tree("always", "never", "inherit", 0);
        let recipe = |tunables| Mechanism::Base.recipe(&system, tunables).unwrap();
        assert_eq!(recipe(None).malloc_hugetlb, None);
        assert_eq!(recipe(Some("glibc.malloc.hugetlb=2")).malloc_hugetlb.as_deref(), Some("0"));
        assert!(recipe(None).disable_thp);
    }
}
