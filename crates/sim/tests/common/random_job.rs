//! Writes random job files, valid and invalid, over the whole language.
//!
//! Every choice is a byte of the input, so that a fuzzer can steer it and a property test can
//! shrink it. After the input's end, each choice is the first option, which is the plainest. Jobs
//! are small: tens of thousands of accesses at most, and milliseconds of sleep.

/// The optional features that a job may contain.
#[derive(Clone, Copy)]
pub struct Scope {
    /// True if jobs may have network memory.
    pub has_remote: bool,
    /// True if jobs may give advice that a real kernel refuses for some memory.
    pub has_optional_advice: bool,
    /// True if jobs may have hugetlb pages.
    pub has_pools: bool,
}

/// The choices that the input makes.
struct Choices<'a>(std::slice::Iter<'a, u8>);

impl Choices<'_> {
    fn below(&mut self, count: usize) -> usize {
        usize::from(self.0.next().copied().unwrap_or(0)) % count
    }

    fn of<'t>(&mut self, options: &[&'t str]) -> &'t str {
        options[self.below(options.len())]
    }

    /// Returns true in one of `count` cases.
    fn rarely(&mut self, count: usize) -> bool {
        self.below(count) == count - 1
    }
}

/// Writes the job that `input` chooses.
pub fn random_job(input: &[u8], scope: Scope) -> String {
    let mut writer = Writer { choices: Choices(input.iter()), scope, families: Vec::new() };
    let mut text = "name = \"random\"\n".to_string();
    for index in 0..1 + writer.choices.below(3) {
        text += &writer.region(index);
    }
    for index in 0..1 + writer.choices.below(3) {
        text += &writer.phase(index);
    }
    if writer.choices.rarely(4) {
        text += &format!(
            "[measure]\ninterval = \"{}\"\n",
            writer.choices.of(&["1ms", "100us", "20ms", "0s"])
        );
    }
    text
}

struct Writer<'a> {
    choices: Choices<'a>,
    scope: Scope,
    /// True for each region that is a family of several.
    families: Vec<bool>,
}

const SIZES: [&str; 12] =
    ["64K", "8K", "256K", "$page", "$page * 3", "4K", "20K", "100_000", "5000", "12", "8", "0"];
const ADVICE: [&str; 10] = [
    "dontneed",
    "normal",
    "random",
    "sequential",
    "willneed",
    "populate-read",
    "populate-write",
    "cold",
    "pageout",
    "free",
];
const OPTIONAL_ADVICE: [&str; 3] = ["hugepage", "nohugepage", "collapse"];

const PATTERNS: [&str; 9] = [
    "pattern = \"strided\", stride = \"4K\"",
    "pattern = \"sequential\"",
    "pattern = \"uniform\", count = 300",
    "pattern = \"zipf\", theta = 0.9, count = 200",
    "pattern = \"pointer-chase\", grain = \"64\"",
    "pattern = \"strided\", stride = \"24\", count = 1000",
    "pattern = \"strided\", stride = \"$page\", grain = \"16\"",
    "pattern = \"sequential\", grain = \"4K\"",
    "pattern = \"uniform\", grain = \"256\", count = 77",
];
const MISTAKEN_PATTERNS: [&str; 3] = [
    "pattern = \"strided\", stride = \"20\"",
    "pattern = \"zipf\", theta = 90, count = 5",
    "grain = 12",
];

impl Writer<'_> {
    fn region(&mut self, index: usize) -> String {
        let mut text = format!("[[region]]\nname = \"r{index}\"\n");
        let size = match self.choices.rarely(6) {
            true => self.choices.of(&SIZES),
            false => self.choices.of(&SIZES[..8]),
        };
        text += &format!("size = \"{size}\"\n");
        let backings = ["anon", "anon", "shared", "memfd", "file", "file", "remote"];
        let backings = &backings[..backings.len() - usize::from(!self.scope.has_remote)];
        let backing = match self.choices.rarely(3) {
            true => self.choices.of(backings),
            false => "anon",
        };
        text += &format!("backing = \"{backing}\"\n");
        match backing {
            "file" => text += self.choices.of(&["", "private = false\n"]),
            "remote" => {
                text += self.choices.of(&["resident = \"128K\"\n", "resident = \"4K\"\n", ""])
            }
            _ => {}
        }
        let is_family = self.choices.rarely(5);
        if is_family {
            text += &format!("count = {}\n", 1 + self.choices.below(4));
        }
        self.families.push(is_family);
        if self.choices.rarely(4) {
            let sizes = ["default", "base", "64K", "2M", "hugetlb:2M"];
            let sizes = &sizes[..sizes.len() - usize::from(!self.scope.has_pools)];
            text += &format!("page_size = \"{}\"\n", self.choices.of(sizes));
        }
        if self.choices.rarely(6) {
            text += &format!("advice = [\"{}\"]\n", self.advice());
        }
        text + self.choices.of(&["", "", "", "mapped = false\n", "mapped = true\n"])
    }

    fn advice(&mut self) -> &'static str {
        let given = self.choices.of(&ADVICE);
        match self.scope.has_optional_advice && self.choices.rarely(6) {
            true => self.choices.of(&OPTIONAL_ADVICE),
            false => given,
        }
    }

    fn phase(&mut self, index: usize) -> String {
        let mut text = format!("[[phase]]\nname = \"p{index}\"\n");
        if self.choices.rarely(3) {
            text += &format!("clients = {}\n", 1 + self.choices.below(3));
            text += self.choices.of(&["client_kind = \"threads\"\n", ""]);
        }
        if self.choices.rarely(4) {
            text += &format!("time = \"{}\"\n", self.choices.of(&["100us", "10us", "0s", "300us"]));
        }
        if self.choices.rarely(3) {
            text +=
                &format!("repeat = {}\n", self.choices.of(&["2", "3", "7", "1", "4", "5", "0"]));
        }
        if self.choices.rarely(8) {
            let rates = ["1_000_000", "5_000_000", "20_000_000", "0", "5_000_000_000"];
            text += &format!("rate = \"{}\"\n", self.choices.of(&rates));
        }
        if self.choices.rarely(8) {
            let rates = ["1000", "50_000", "1_000_000_000", "4_000_000_000"];
            text += &format!("switch_rate = \"{}\"\n", self.choices.of(&rates));
        }
        let family = self.families.iter().position(|is_family| *is_family);
        let mut target = None;
        if let Some(family) = family
            && !self.choices.rarely(3)
        {
            text += &format!("for_each = \"r{family}\"\n");
            target = Some(family);
            if self.choices.rarely(2) {
                text += &format!("window = {}\n", self.choices.below(4));
                text += &format!(
                    "undo = [{}]\n",
                    self.choices
                        .of(&[
                            "{ unmap = \"F\" }",
                            "{ unlock = \"F\" }, { unmap = \"F\" }",
                            "{ touch = \"F\", access = \"write\" }",
                        ])
                        .replace('F', &format!("r{family}"))
                );
            }
        }
        let mut ops = Vec::new();
        for _ in 0..1 + self.choices.below(4) {
            self.operations(target, &mut ops);
        }
        text + &format!("ops = [{}]\n", ops.join(", "))
    }

    /// Writes one operation, or a few that belong together.
    fn operations(&mut self, family: Option<usize>, ops: &mut Vec<String>) {
        let single = self.choices.below(self.families.len());
        let region = format!("r{}", family.filter(|_| single % 4 < 3).unwrap_or(single));
        match self.choices.below(16) {
            0..5 => ops.push(self.touch(&region)),
            5 => ops.push(format!("{{ touch = \"{region}\", access = \"write\" }}")),
            6 => {
                ops.push(format!("{{ touch = \"{region}\", access = \"write\" }}"));
                let access = self.choices.of(&["verify", "rewrite"]);
                let pattern = self.choices.of(&["", ", pattern = \"uniform\", count = 50"]);
                ops.push(format!("{{ touch = \"{region}\", access = \"{access}\"{pattern} }}"));
            }
            7 => {
                ops.push(format!("{{ map = \"{region}\" }}"));
                ops.push(self.touch(&region));
                ops.push(format!("{{ unmap = \"{region}\" }}"));
            }
            8 => {
                let chunk = self.choices.of(&["", ", chunk = \"4K\"", ", chunk = \"100B\""]);
                ops.push(format!("{{ lock = \"{region}\"{chunk} }}"));
                ops.push(format!("{{ unlock = \"{region}\" }}"));
            }
            9 => ops.push(format!("{{ lock = \"{region}\" }}")),
            10 => {
                let verb = self.choices.of(&["unlock", "map", "unmap"]);
                ops.push(format!("{{ {verb} = \"{region}\" }}"));
            }
            11 | 12 => ops.push(format!("{{ touch = \"{region}\" }}")),
            13 => ops.push(format!("{{ advise = \"{region}\", advice = \"{}\" }}", self.advice())),
            14 => {
                ops.push(format!("{{ sleep = \"{}\" }}", self.choices.of(&["1us", "0s", "2ms"])));
            }
            _ => ops.push("{ barrier = true }".into()),
        }
    }

    fn touch(&mut self, region: &str) -> String {
        let accesses = ["read", "write", "write", "verify", "rewrite"];
        let known = if self.choices.rarely(5) { 5 } else { 3 };
        let access = self.choices.of(&accesses[..known]);
        let pattern = match self.choices.rarely(12) {
            true => self.choices.of(&MISTAKEN_PATTERNS),
            false => self.choices.of(&PATTERNS),
        };
        format!("{{ touch = \"{region}\", access = \"{access}\", {pattern} }}")
    }
}
