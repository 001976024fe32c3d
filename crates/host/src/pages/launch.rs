//! How a command is started so that it gets the page sizes asked for.
//!
//! Invariant: planning changes nothing but, for text, what the page cache holds; a plan says all that will be
//! done ([`Launch::words`]). If the environment alone suffices, the command takes our place (exec). Otherwise
//! it is watched, and its memory collapsed as it grows.

use super::mechanism::{Conditions, Mechanism, Mthp, Recipe, Thp};
use super::parts::wants_large;
use super::settings::base_page;
use super::tunables::{HUGETLB, MMAP_THRESHOLD, tunable, with_tunable};
use super::{Mode, PageSettings, Setting};
use crate::launch::Launcher;
use crate::launch::libraries::{self, LibraryError};
use crate::launch::preload::{self, Preload};
use crate::launch::program::{Kind, Program, ProgramError};
use crate::sys::remote::Forbid;
use pagetax_core::page_size::{How, MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::{Bytes, PageSize};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;

/// The library that does what the environment alone cannot.
const PRELOAD: &str = "libpagetax_preload.so";
/// A stack limit below this has no room for huge pages.
const STACK_LIMIT_MIN: u64 = 4 << 20;

/// The reason for which a command is not started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The file cannot be started.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A requested page size is not possible for a part.
    #[error("{part}={request}: {why}\n  hint: {remedy}")]
    Unavailable {
        /// The part of the program that was named.
        part: MemoryPart,
        /// The size that was requested for it.
        request: PageSizeRequest,
        /// The obstacle, in one sentence.
        why: String,
        /// The command or option that would help.
        remedy: String,
    },
}

/// A command and what will be done about its pages.
#[derive(Debug)]
pub struct Launch {
    /// The program that the plan starts.
    pub program: Program,
    /// Variables to set in its environment.
    pub environment: Vec<(&'static str, OsString)>,
    /// The huge pages that prctl forbids; the command inherits that.
    pub forbid: Option<Forbid>,
    /// The parts to collapse while it runs; none if it need not be watched.
    pub swept: Option<PartSizes>,
    /// False to collapse only in processes with an allocator of their own: glibc's malloc takes its tunable.
    pub sweeps_all: bool,
    /// The files whose code is read into the page cache by huge pages.
    pub text: Vec<PathBuf>,
    /// Remarks that the user should see before the start.
    pub notes: Vec<String>,
}

/// The system and the environment, which a plan depends on.
#[derive(Debug)]
pub struct Surroundings {
    /// The page-size settings of the system.
    pub system: PageSettings,
    /// The value of GLIBC_TUNABLES.
    pub tunables: Option<String>,
    /// The value of LD_PRELOAD in our environment.
    pub preloads: Option<OsString>,
    /// Finds the preload library, when a plan needs it.
    pub library: fn() -> Result<PathBuf, LibraryError>,
    /// The soft limit of the stack; none is unlimited.
    pub stack_limit_bytes: Option<u64>,
}

impl Surroundings {
    /// Returns the surroundings of this process.
    pub fn here() -> Surroundings {
        Surroundings {
            system: PageSettings::host(),
            tunables: std::env::var("GLIBC_TUNABLES").ok(),
            preloads: std::env::var_os(preload::VARIABLE),
            library: || libraries::find(PRELOAD),
            stack_limit_bytes: rustix::process::getrlimit(rustix::process::Resource::Stack).current,
        }
    }
}

/// Plans how to start `program`. `force` allows risky changes; `follow` repeats them.
pub fn plan(
    program: Program,
    advice: &PartSizes,
    around: &Surroundings,
    force: bool,
    follow: bool,
) -> Result<Launch, LaunchError> {
    let mut launch = Launch {
        program,
        environment: Vec::new(),
        forbid: None,
        swept: None,
        sweeps_all: false,
        text: Vec::new(),
        notes: Vec::new(),
    };
    for (part, request) in advice.iter() {
        let refused = |(why, remedy): (String, String)| LaunchError::Unavailable {
            part,
            request,
            why,
            remedy,
        };
        let Some(size) = request.size(base_page()) else { continue };
        match (part, request.how()) {
            (MemoryPart::Heap, How::Hugetlb) => launch.heap_from_pool(size, around, force),
            (_, how) if how != How::Preferred => Err((
                "pages of a pool are for the heap of a command that is started".into(),
                "ask for 2M, which are transparent pages".into(),
            )),
            (MemoryPart::Heap, _) => launch.heap(size, advice, around),
            (MemoryPart::Stack, _) => launch.stack(size, around),
            (MemoryPart::Text, _) => launch.text(size, around, force),
            (MemoryPart::Bss, _) => launch.swept(part, size, around),
            (MemoryPart::Data, _) if force => launch.swept(part, size, around),
            (MemoryPart::Data, _) => Err((
                "private pages of a file cannot become huge pages".into(),
                "-F moves a copy there while the program stands still".into(),
            )),
            (MemoryPart::Anon, _) if follow => launch.swept(part, size, around),
            (MemoryPart::Anon, _) => {
                launch.notes.push(
                    "anon= is for memory that exists, and a new command has none: --follow asks \
                     for it as it comes"
                        .into(),
                );
                Ok(())
            }
        }
        .map_err(refused)?;
    }
    if advice.iter().any(|(_, request)| request.size(base_page()) == Some(base_page())) {
        launch.keep_to_base_pages(advice, around);
    }
    if follow {
        let also = launch.swept.take().unwrap_or_default();
        launch.sweeps_all = true;
        launch.swept = Some(advice.iter().fold(also, |all, (part, request)| all.or(part, request)));
    }
    Ok(launch)
}

type Refused = (String, String);

impl Launch {
    /// Prepares the command that this plan is for, with the arguments `argv`.
    pub fn launcher(&self, argv: &[OsString]) -> Launcher {
        let mut launcher = Launcher::found(&self.program, argv);
        launcher.command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        launcher.forbid = self.forbid;
        launcher
    }

    /// Returns everything that will be done, a line each.
    pub fn words(&self) -> Vec<String> {
        let kind = self.program.kind.words();
        let mut words = vec![format!("{}: {kind}", self.program.path.display())];
        let set = |(name, value): &(&str, OsString)| format!("{name}={}", value.to_string_lossy());
        words.extend(self.environment.iter().map(set));
        words.extend(self.forbid.map(|forbid| match forbid {
            Forbid::All => "prctl(PR_SET_THP_DISABLE): no huge pages".into(),
            Forbid::Unadvised => "prctl(PR_SET_THP_DISABLE): huge pages on advice only".to_string(),
        }));
        let text = |path: &PathBuf| format!("code of {} by huge pages", path.display());
        words.extend(self.text.iter().map(text));
        let whose = if self.sweeps_all { "" } else { " where it is not glibc's malloc" };
        let swept = |advice| format!("watched and collapsed{whose}: {advice}");
        words.extend(self.swept.as_ref().map(swept));
        words
    }

    /// Returns the value that a variable will have.
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        self.environment.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_ref())
    }

    fn set(&mut self, name: &'static str, value: impl Into<OsString>) {
        self.environment.retain(|(known, _)| *known != name);
        self.environment.push((name, value.into()));
    }

    fn set_malloc(&mut self, value: &str, around: &Surroundings) {
        self.set("GLIBC_TUNABLES", with_tunable(around.tunables.as_deref(), HUGETLB, value));
    }

    /// Adds our library to LD_PRELOAD. Returns false if the program cannot have it, with a note that says
    /// why, and what happens `without` it.
    fn preload(&mut self, around: &Surroundings, without: &str) -> Result<bool, Refused> {
        let library = match self.program.takes_preload() {
            Ok(()) => (around.library)().map_err(|error| error.to_string()),
            Err(refusal) => Err(refusal.to_string()),
        };
        let library = match library {
            Ok(library) => library,
            Err(why) => {
                match self.notes.iter_mut().find(|note| note.ends_with(&why)) {
                    Some(note) => *note = format!("{without}, and {note}"),
                    None => self.notes.push(format!("{without}: {why}")),
                }
                return Ok(false);
            }
        };
        let library = Preload::new(library).map_err(|error| (error.why, error.remedy))?;
        self.set(preload::VARIABLE, library.before(around.preloads.as_deref()));
        Ok(true)
    }

    fn heap(
        &mut self,
        size: PageSize,
        advice: &PartSizes,
        around: &Surroundings,
    ) -> Result<(), Refused> {
        let glibc = matches!(self.program.kind, Kind::DynamicGlibc | Kind::StaticGlibc);
        if size == base_page() {
            if around.tunables.as_deref().is_some_and(|text| tunable(text, HUGETLB).is_some()) {
                self.set_malloc("0", around);
            }
            return Ok(());
        }
        let huge = around.system.pmd_size().unwrap_or(PageSize::M2);
        let switched_off = around.system.of_size(size) == Some(Mode::Never) && size == huge;
        if !glibc || size == huge {
            self.swept(MemoryPart::Heap, size, around)?;
            if advice.get(MemoryPart::Anon).is_none() {
                self.swept(MemoryPart::Anon, size, around)?;
            }
        }
        if !glibc || switched_off {
            if !glibc {
                self.preload(around, "its heap is collapsed while it runs")?;
            }
            self.sweeps_all = true;
            return Ok(());
        }
        settings_allow(size, &around.system)?;
        self.set_malloc("1", around);
        if self.preload(around, "heaps of its threads keep base pages")? {
            self.set("MPSSHEAP", size.to_string());
        }
        Ok(())
    }

    /// Has malloc take the heap from a pool. malloc reserves pages for each mapping, or takes base pages.
    /// Copies on write in a forked child are not reserved: they kill the child if the pool is empty.
    fn heap_from_pool(
        &mut self,
        size: PageSize,
        around: &Surroundings,
        force: bool,
    ) -> Result<(), Refused> {
        if !matches!(self.program.kind, Kind::DynamicGlibc | Kind::StaticGlibc) {
            return Err((
                format!("{} does not take pages of a pool", self.program.kind.words()),
                format!("ask for {size}, which are transparent pages"),
            ));
        }
        let free = around.system.hugetlb_pages(size).unwrap_or(0);
        if free == 0 {
            let pool = around.system.pool_path(size).join("nr_hugepages");
            return Err((
                format!("the pool of {size} pages is empty"),
                format!("echo 64 | sudo tee {}", pool.display()),
            ));
        }
        if !force {
            return Err((
                "a child that the program forks would be killed (SIGBUS) when the pool is empty"
                    .into(),
                format!("-F if it forks none; or ask for {size}, which are transparent pages"),
            ));
        }
        self.notes.push(format!(
            "{free} pages of {size} can be had; beyond them malloc takes base pages"
        ));
        // Else chunks between malloc's usual threshold and this size would be mappings of base pages.
        let bytes = size.bytes().to_string();
        let existing = around.tunables.as_deref();
        let untold = existing.and_then(|text| tunable(text, MMAP_THRESHOLD)).is_none();
        let told = untold.then(|| with_tunable(existing, MMAP_THRESHOLD, &bytes));
        let existing = told.as_deref().or(existing);
        self.set("GLIBC_TUNABLES", with_tunable(existing, HUGETLB, &bytes));
        Ok(())
    }

    fn stack(&mut self, size: PageSize, around: &Surroundings) -> Result<(), Refused> {
        if size == base_page() {
            return Ok(());
        }
        if let Some(limit) = around.stack_limit_bytes.filter(|limit| *limit < STACK_LIMIT_MIN) {
            return Err((
                format!("the stack may only grow to {}, too little for such pages", Bytes(limit)),
                "ulimit -s 8192".into(),
            ));
        }
        let huge = around.system.pmd_size().unwrap_or(PageSize::M2);
        // Collapsing makes huge pages also where they are switched off.
        let never = around.system.of_size(size) == Some(Mode::Never) && size == huge;
        if never || !self.preload(around, "its stack is collapsed while it runs")? {
            return self.swept(MemoryPart::Stack, size, around);
        }
        settings_allow(size, &around.system)?;
        self.set("MPSSSTACK", size.to_string());
        Ok(())
    }

    fn text(&mut self, size: PageSize, around: &Surroundings, force: bool) -> Result<(), Refused> {
        if size == base_page() {
            return Ok(());
        }
        only_huge(size, around)?;
        self.text = self.program.files();
        if force { self.swept(MemoryPart::Text, size, around) } else { Ok(()) }
    }

    /// Has a part collapsed while the command runs. The kernel collapses to one size only.
    fn swept(
        &mut self,
        part: MemoryPart,
        size: PageSize,
        around: &Surroundings,
    ) -> Result<(), Refused> {
        if size != base_page() {
            only_huge(size, around)?;
        }
        self.swept =
            Some(self.swept.take().unwrap_or_default().or(part, PageSizeRequest::preferred(size)));
        self.sweeps_all |= !matches!(part, MemoryPart::Heap | MemoryPart::Anon);
        Ok(())
    }

    /// Forbids huge pages if the system gives them without advice.
    fn keep_to_base_pages(&mut self, advice: &PartSizes, around: &Surroundings) {
        let sizes = around.system.sizes();
        if sizes.iter().any(|size| around.system.of_size(*size) == Some(Mode::Always)) {
            self.forbid = Some(if wants_large(advice) { Forbid::Unadvised } else { Forbid::All });
        }
    }
}

/// Checks that a running process can get the requested sizes. Sizes between the base page and the huge page
/// come with faults alone. Where they are off, advice would bring others.
pub fn sizes_are_on(advice: &PartSizes, system: &PageSettings) -> Result<(), LaunchError> {
    let huge = system.pmd_size().unwrap_or(PageSize::M2);
    for (part, request) in advice.iter() {
        match request {
            PageSizeRequest::Size(size, How::Preferred) if size > base_page() && size < huge => {
                settings_allow(size, system).map_err(|(why, remedy)| LaunchError::Unavailable {
                    part,
                    request,
                    why,
                    remedy,
                })?;
            }
            _ => {}
        }
    }
    Ok(())
}

fn only_huge(size: PageSize, around: &Surroundings) -> Result<(), Refused> {
    let huge = around.system.pmd_size().unwrap_or(PageSize::M2);
    match size == huge {
        true => Ok(()),
        false => Err((
            format!(
                "here only {huge} pages can be made of memory that is not malloc's or is there already"
            ),
            format!("ask for {huge}"),
        )),
    }
}

/// Checks that settings allow a size. The kernel takes the largest that is on, so smaller ones need others
/// off.
fn settings_allow(size: PageSize, system: &PageSettings) -> Result<(), Refused> {
    let huge = system.pmd_size().unwrap_or(PageSize::M2);
    let mechanism: Arc<dyn Mechanism> =
        if size == huge { Arc::new(Thp(size)) } else { Arc::new(Mthp(size)) };
    let conditions = Conditions { system, tunables: None, has_code: true };
    match Recipe::new(mechanism, &conditions) {
        Ok(recipe) => match recipe.settings.first() {
            None => Ok(()),
            Some(_) => Err(("this system is set otherwise".into(), way_to_set(size, &recipe))),
        },
        // What all memory has anyway needs no settings.
        Err(_) if system.of_size(size) == Some(Mode::Always) => Ok(()),
        Err(unavailable) => Err((unavailable.why, unavailable.remedy)),
    }
}

/// Returns the lines that set the system so, or the command that does it for its own trials alone.
fn way_to_set(size: PageSize, recipe: &Recipe) -> String {
    let paths = recipe.settings.iter().map(|s| s.path.display().to_string());
    if recipe.turns_pages_off() {
        return format!(
            "pagetax diagnose --allow-sysfs --pages {size} -- COMMAND sets {} for its trials, and puts all back",
            paths.collect::<Vec<_>>().join(" and ")
        );
    }
    let line = |s: &Setting| format!("echo {} | sudo tee {}", s.value, s.path.display());
    recipe.settings.iter().map(line).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::super::settings::tests::tree;
    use super::*;
    use crate::launch::program::native;

    fn program(kind: Kind) -> Program {
        let (path, runs) = ("/bin/x".into(), vec!["/bin/x".into()]);
        Program {
            path,
            runs,
            binary: "/bin/x".into(),
            kind,
            loader: None,
            architecture: Some(native()),
        }
    }

    fn planned(
        kind: Kind,
        options: &str,
        thp: &str,
        pool: u64,
        force: bool,
    ) -> Result<Launch, LaunchError> {
        let (_keep, system) = tree(thp, "never", "inherit", pool);
        let advice = PartSizes::parse([options]).unwrap();
        plan(program(kind), &advice, &around(system), force, false)
    }

    fn around(system: PageSettings) -> Surroundings {
        Surroundings {
            system,
            tunables: Some("glibc.malloc.arena_max=1".into()),
            preloads: Some("/lib/other.so".into()),
            library: || Ok("/lib/libpagetax_preload.so".into()),
            stack_limit_bytes: Some(8 << 20),
        }
    }

    #[test]
    fn patterns_that_are_not_possible_give_the_reason() {
        let why = |kind, thp, library: fn() -> Result<PathBuf, LibraryError>| {
            let (_keep, system) = tree(thp, "never", "inherit", 0);
            let advice = PartSizes::parse(["heap=2M"]).unwrap();
            let around = Surroundings { library, ..around(system) };
            let mut launch = plan(program(kind), &advice, &around, false, false).unwrap();
            launch.restrict("heap", &advice, &around).map_err(|error| error.to_string())
        };
        let there = || Ok("/lib/libpagetax_preload.so".into());
        let absent = || Err(LibraryError::Unsupported("libpagetax_preload.so".into()));
        assert_eq!(why(Kind::DynamicGlibc, "madvise", there), Ok(()));
        for (kind, thp, library, reason) in [
            (Kind::StaticGlibc, "madvise", there as fn() -> _, "no library can see"),
            (Kind::DynamicGlibc, "madvise", absent, "pagetax has no libpagetax_preload.so"),
            (Kind::DynamicGlibc, "never", there, "turns transparent large pages off"),
        ] {
            let text = why(kind, thp, library).unwrap_err();
            assert!(text.contains(reason) && text.contains("hint: "), "{text}");
        }
    }

    #[test]
    fn dynamic_programs_take_it_from_the_environment() {
        let launch = planned(Kind::DynamicGlibc, "heap=2M,stack=2M", "madvise", 0, false).unwrap();
        let variable = |name| launch.variable(name).map(|value| value.to_str().unwrap());
        assert_eq!(
            variable("GLIBC_TUNABLES"),
            Some("glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1")
        );
        assert_eq!(variable("LD_PRELOAD"), Some("/lib/libpagetax_preload.so:/lib/other.so"));
        assert_eq!((variable("MPSSHEAP"), variable("MPSSSTACK")), (Some("2M"), Some("2M")));
        assert!(!launch.sweeps_all);
    }

    #[test]
    fn others_are_watched() {
        for (kind, why) in
            [(Kind::Own, "is linked statically"), (Kind::OtherLoader, "another C library")]
        {
            let launch = planned(kind, "heap=2M,stack=2M", "madvise", 0, false).unwrap();
            let [note] = &launch.notes[..] else { panic!("{:?}", launch.notes) };
            assert!(note.contains(why) && note.contains("heap is collapsed"), "{note}");
            assert!(launch.environment.is_empty() && launch.sweeps_all);
            assert_eq!(launch.swept.unwrap().to_string(), "heap=2M,stack=2M,anon=2M");
        }
        let launch = planned(Kind::DynamicGlibc, "heap=2M", "never", 0, false).unwrap();
        assert_eq!(launch.swept.unwrap().to_string(), "heap=2M,anon=2M");
        let launch = planned(Kind::StaticGlibc, "heap=2M", "madvise", 0, false).unwrap();
        assert!(!launch.sweeps_all && launch.variable("LD_PRELOAD").is_none());
    }

    #[test]
    fn a_pool_is_reserved_from_or_refused() {
        let of =
            |pool, force| planned(Kind::DynamicGlibc, "heap=hugetlb:2M", "madvise", pool, force);
        assert!(of(0, true).unwrap_err().to_string().contains("is empty"));
        assert!(of(5, false).unwrap_err().to_string().contains("SIGBUS"));
        let launch = of(5, true).unwrap();
        let tunables = launch.variable("GLIBC_TUNABLES").unwrap().to_str().unwrap();
        assert!(tunables.ends_with("glibc.malloc.hugetlb=2097152"), "{tunables}");
        assert!(planned(Kind::Own, "heap=hugetlb:2M", "madvise", 5, true).is_err());
        assert!(planned(Kind::DynamicGlibc, "stack=hugetlb:2M", "madvise", 5, true).is_err());
    }

    #[test]
    fn base_pages_turn_away_what_all_get() {
        let forbid =
            |options, thp| planned(Kind::DynamicGlibc, options, thp, 0, false).unwrap().forbid;
        assert_eq!(forbid("heap=4K", "madvise"), None);
        assert_eq!(forbid("heap=4K", "always"), Some(Forbid::All));
        assert_eq!(forbid("heap=2M,stack=4K", "always"), Some(Forbid::Unadvised));
    }

    #[test]
    fn what_cannot_be_had_has_a_remedy() {
        let refused = |options| {
            planned(Kind::DynamicGlibc, options, "madvise", 0, false).unwrap_err().to_string()
        };
        assert!(refused("heap=64K").contains("hugepages-64kB"));
        assert!(!refused("heap=64K").contains("never"), "other programs would pay");
        assert!(refused("stack=64K").contains("hugepages-64kB"));
        assert!(refused("data=2M").contains("-F"));
        assert!(refused("bss=64K").contains("only 2M"));
        let launch = planned(Kind::DynamicGlibc, "anon=2M", "madvise", 0, false).unwrap();
        assert_eq!(launch.notes.len(), 1);
    }
}
