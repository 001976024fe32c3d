//! The changes to a command, its environment and the system that a mechanism makes.

use super::{AsIs, Conditions, Mechanism, Unavailable};
use crate::launch::program::Program;
use crate::pages::settings::Setting;
use crate::pages::tunables::{GLIBC_TUNABLES, with_tunable};
use pagetax_core::units::PageSize;
use std::sync::Arc;

/// The changes that a mechanism makes for a command.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// The mechanism that made it.
    pub mechanism: Arc<dyn Mechanism>,
    /// Tunables of glibc, by their names.
    pub tunables: Vec<(&'static str, String)>,
    /// Other variables of the environment.
    pub environment: Vec<(&'static str, String)>,
    /// True for prctl(PR_SET_THP_DISABLE) before exec.
    pub disable_thp: bool,
    /// System settings for the time of the run.
    pub settings: Vec<Setting>,
    /// The program and options that run the command; empty for none.
    pub wrapper: Vec<String>,
    /// Arguments after the command's own, for programs that take their page size themselves.
    pub arguments: Vec<String>,
    /// A page size whose memory only the system-wide count of folios shows.
    pub folio_size: Option<PageSize>,
}

impl Recipe {
    /// Returns the recipe of a mechanism.
    ///
    /// # Errors
    /// The mechanism is not available for this command on this system.
    pub fn new(
        mechanism: Arc<dyn Mechanism>,
        conditions: &Conditions,
    ) -> Result<Recipe, Unavailable> {
        mechanism.available(conditions)?;
        let mut recipe = Recipe::unchanged(mechanism.clone());
        mechanism.apply(conditions, &mut recipe);
        Ok(recipe)
    }

    /// Returns a second recipe of the command as it is, to compare it with itself.
    pub fn check() -> Recipe {
        Recipe::unchanged(Arc::new(AsIs { is_check: true }))
    }

    /// Returns a recipe without changes.
    fn unchanged(mechanism: Arc<dyn Mechanism>) -> Recipe {
        Recipe {
            mechanism,
            tunables: Vec::new(),
            environment: Vec::new(),
            disable_thp: false,
            settings: Vec::new(),
            wrapper: Vec::new(),
            arguments: Vec::new(),
            folio_size: None,
        }
    }

    /// Returns the recipe for a program that takes its page size by these arguments. It keeps the settings.
    pub fn by_arguments(self, arguments: Vec<String>) -> Recipe {
        Recipe { arguments, settings: self.settings, ..Recipe::unchanged(self.mechanism) }
    }

    /// Returns true if a setting turns large pages off for every program. That is fine for the time of a
    /// trial, but no line to paste and no hint may have it.
    pub fn turns_pages_off(&self) -> bool {
        self.settings.iter().any(|setting| setting.value == "never")
    }

    /// Checks that the system need not be changed, or may be.
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

    /// Checks that the program heeds what this recipe puts into its environment, and that ppgsz may start it.
    pub fn heeded_by(&self, program: Option<&Program>) -> Result<(), Unavailable> {
        let needs_it = !self.variables(None).is_empty() || !self.wrapper.is_empty();
        match program.is_none_or(|program| program.heeds_us().is_ok()) || !needs_it {
            true => Ok(()),
            false => Err(Unavailable {
                why: "it runs set-id or with capabilities, so its loader ignores the environment"
                    .into(),
                remedy: "run it as its owner".into(),
            }),
        }
    }

    /// Returns the recipe that runs the command under `own`'s ppgsz, if ppgsz has the mechanism. So a trial
    /// does the same as the line to paste.
    pub fn through(self, own: &str) -> Recipe {
        match self.mechanism.by_ppgsz() {
            None => self,
            Some(sizes) => Recipe {
                wrapper: [own, "ppgsz", "-o", &sizes.to_string()]
                    .into_iter()
                    .chain(self.mechanism.only().into_iter().flat_map(|only| ["--only", only]))
                    .map(String::from)
                    .collect(),
                settings: self.settings,
                environment: self.environment,
                ..Recipe::unchanged(self.mechanism)
            },
        }
    }

    /// Returns the wrapper, under the name by which this program was called.
    fn wrapper_called(&self, name: &str) -> Vec<String> {
        let options = self.wrapper.iter().skip(1).cloned();
        let name = (!self.wrapper.is_empty()).then(|| name.to_string());
        name.into_iter().chain(options).collect()
    }

    /// Returns its changes in one line.
    pub fn words(&self) -> String {
        let mut words = Vec::new();
        words.extend((!self.wrapper.is_empty()).then(|| self.wrapper_called("pagetax").join(" ")));
        words.extend(self.disable_thp.then(|| "prctl(PR_SET_THP_DISABLE)".to_string()));
        let set = self.tunables.iter().chain(&self.environment);
        words.extend(set.map(|(name, value)| format!("{name}={value}")));
        words.extend(self.settings.iter().map(|s| format!("{} = {}", s.path.display(), s.value)));
        words.extend((!self.arguments.is_empty()).then(|| self.arguments.join(" ")));
        let words = if words.is_empty() { "unchanged".into() } else { words.join(", ") };
        self.mechanism.cost().map_or(words.clone(), |cost| format!("{words} ({cost})"))
    }

    /// Returns the variables of the environment that it sets. `existing` is the value of GLIBC_TUNABLES.
    pub fn variables(&self, existing: Option<&str>) -> Vec<(&'static str, String)> {
        let tunables = self.tunables.iter().fold(None::<String>, |set, (name, value)| {
            Some(with_tunable(set.as_deref().or(existing), name, value))
        });
        let tunables = tunables.map(|tunables| (GLIBC_TUNABLES, tunables));
        tunables.into_iter().chain(self.environment.iter().cloned()).collect()
    }

    /// Returns a line for a shell that runs `command` under this recipe; none if a shell cannot spell a word,
    /// or if the line would turn large pages off for every program. `called` is the name by which the user
    /// called this program.
    pub fn shell_line(
        &self,
        command: &[String],
        existing: Option<&str>,
        called: &str,
    ) -> Option<String> {
        if self.turns_pages_off() {
            return None;
        }
        let mut parts = Vec::new();
        for Setting { path, value } in &self.settings {
            parts.push(format!("echo {value} | sudo tee {} >/dev/null &&", path.display()));
        }
        for (name, value) in self.variables(existing) {
            parts.push(format!("{name}={}", shlex::try_quote(&value).ok()?));
        }
        for word in self.argv(command, called) {
            parts.push(quoted(&word)?);
        }
        Some(parts.join(" "))
    }

    /// Returns the lines of a systemd unit that run `command` under this recipe; none if it needs settings of
    /// the system. `own` is this program's absolute path.
    pub fn systemd_lines(&self, command: &[String], own: &str) -> Option<Vec<String>> {
        if !self.settings.is_empty() {
            return None;
        }
        let quoted = |word: &String| {
            let word = word.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let word = word.replace('%', "%%").replace('$', "$$");
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "/-_.,=:+@%".contains(c);
            if !word.is_empty() && word.chars().all(is_plain) {
                word
            } else {
                format!("\"{word}\"")
            }
        };
        let variables =
            self.variables(None).into_iter().map(|(name, value)| format!("{name}={value}"));
        let environment = variables.map(|pair| format!("Environment={}", quoted(&pair)));
        let words: Vec<String> = self.absolute_argv(command, own)?.iter().map(quoted).collect();
        Some(environment.chain([format!("ExecStart={}", words.join(" "))]).collect())
    }

    /// Returns the lines of a Dockerfile, as [`Recipe::systemd_lines`] does.
    pub fn dockerfile_lines(&self, command: &[String], own: &str) -> Option<Vec<String>> {
        if !self.settings.is_empty() {
            return None;
        }
        let quoted = |value: String| {
            let escapes = [("\\", "\\\\"), ("\"", "\\\""), ("$", "\\$")];
            let value = escapes.iter().fold(value, |text, (raw, escape)| text.replace(raw, escape));
            if value.contains(' ') { format!("\"{value}\"") } else { value }
        };
        let variables = self.variables(None).into_iter();
        let environment = variables.map(|(name, value)| format!("ENV {name}={}", quoted(value)));
        let words = serde_json::to_string(&self.absolute_argv(command, own)?).ok()?;
        Some(environment.chain([format!("CMD {words}")]).collect())
    }

    /// Returns the words with the program's absolute path, as files without a PATH need it.
    fn absolute_argv(&self, command: &[String], own: &str) -> Option<Vec<String>> {
        let mut argv = self.argv(command, own);
        if !argv.first()?.starts_with('/') {
            let found = Program::find(&argv[0]).ok()?.path;
            argv[0] = std::path::absolute(found).ok()?.to_str()?.to_string();
        }
        Some(argv)
    }

    /// Returns all words of the command under this recipe.
    fn argv(&self, command: &[String], called: &str) -> Vec<String> {
        let mut words = Vec::new();
        if self.disable_thp {
            // No tool of a plain system calls prctl, but perl is on every Debian.
            let call = format!("syscall({},41,1,0,0,0); exec {{$ARGV[0]}} @ARGV", libc::SYS_prctl);
            words.extend(["perl".to_string(), "-e".into(), call]);
        }
        let wrapper = self.wrapper_called(called);
        words.extend(wrapper.iter().chain(command).chain(&self.arguments).cloned());
        words
    }
}

/// Quotes a word for a shell. Line breaks are escaped as bash, zsh and ksh read them.
fn quoted(word: &str) -> Option<String> {
    if !word.contains(['\n', '\r']) {
        return Some(shlex::try_quote(word).ok()?.into_owned());
    }
    let escapes = [("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")];
    let escaped =
        escapes.iter().fold(word.to_string(), |text, (raw, escape)| text.replace(raw, escape));
    (!word.contains('\0')).then(|| format!("$'{escaped}'"))
}

impl Default for Recipe {
    /// Returns the recipe of the command as it is.
    fn default() -> Recipe {
        Recipe::unchanged(Arc::new(AsIs::default()))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::select;
    use super::*;
    use crate::pages::PageSettings;
    use crate::pages::tunables::HUGETLB;
    use pagetax_core::page_size::PartSizes;

    pub fn recipe(
        mechanism: impl Mechanism + 'static,
        system: &PageSettings,
    ) -> Result<Recipe, Unavailable> {
        let conditions = Conditions { system, tunables: None, has_code: true };
        Recipe::new(Arc::new(mechanism), &conditions)
    }

    pub fn values(recipe: &Recipe) -> Vec<(&str, &str)> {
        let name = |s: &Setting| match () {
            () if s.path.ends_with("transparent_hugepage/enabled") => "thp",
            () if s.path.ends_with("hugepages-64kB/enabled") => "64K",
            () if s.path.ends_with("hugepages-2048kB/enabled") => "2M",
            () => "pool",
        };
        recipe.settings.iter().map(|s| (name(s), s.value.as_str())).collect()
    }

    #[test]
    fn lines_to_paste_are_quoted_and_keep_the_environment() {
        let command = ["sort".to_string(), "a file".into(), "-k1;".into()];
        let thp = Recipe { tunables: vec![(HUGETLB, "1".into())], ..Recipe::default() };
        assert_eq!(
            thp.shell_line(&command, Some("glibc.malloc.arena_max=1"), "pagetax").unwrap(),
            "GLIBC_TUNABLES='glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1' sort 'a file' '-k1;'"
        );
        assert!(thp.shell_line(&["a\0b".to_string()], None, "pagetax").is_none());
        let (_keep, system) = crate::pages::settings::tests::tree("madvise", "never", "inherit", 0);
        let sizes = PartSizes::parse(["heap=2M,stack=2M,text=2M"]).unwrap();
        let all = Recipe::unchanged(select(&sizes, &system).unwrap()).through("/somewhere/pagetax");
        assert_eq!(
            all.shell_line(&command, None, "target/release/pagetax").unwrap(),
            "target/release/pagetax ppgsz -o 'heap=2M,stack=2M,text=2M' sort 'a file' '-k1;'"
        );
        assert!(thp.through("/somewhere/pagetax").wrapper.is_empty());
        let script = ["python3".to_string(), "-c".into(), "a = 'b\\n'\nprint(a)".into()];
        assert_eq!(
            Recipe::default().shell_line(&script, None, "pagetax").unwrap(),
            r"python3 -c $'a = \'b\\n\'\nprint(a)'"
        );
    }

    #[test]
    fn lines_for_units_and_images_have_absolute_paths_and_their_own_quoting() {
        let command = ["sh".to_string(), "a \"b\" 50% $HOME".into()];
        let own = "/opt/pagetax";
        let wrapped = Recipe { wrapper: vec![own.into(), "ppgsz".into()], ..Recipe::default() };
        assert_eq!(
            wrapped.systemd_lines(&command, own).unwrap(),
            [r#"ExecStart=/opt/pagetax ppgsz sh "a \"b\" 50%% $$HOME""#]
        );
        assert_eq!(
            wrapped.dockerfile_lines(&command, own).unwrap(),
            [r#"CMD ["/opt/pagetax","ppgsz","sh","a \"b\" 50% $HOME"]"#]
        );
        let tuned = Recipe { tunables: vec![(HUGETLB, "1".into())], ..Recipe::default() };
        let lines = tuned.systemd_lines(&command, own).unwrap();
        assert_eq!(lines[0], "Environment=GLIBC_TUNABLES=glibc.malloc.hugetlb=1");
        assert!(lines[1].starts_with("ExecStart=/") && lines[1].contains("/sh "), "{lines:?}");
        let system = Setting { path: "/sys/x".into(), value: "1".into() };
        let privileged = Recipe { settings: vec![system], ..Recipe::default() };
        assert_eq!(privileged.systemd_lines(&command, own), None);
    }
}
