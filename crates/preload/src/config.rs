//! The configuration file of mpss.so.1: lines of `exec [argpattern]:heap:stack`.
//!
//! Lines are split from the right, so that a pattern may contain colons. The first line that matches wins. An
//! empty field means "do not set" and overrides even the environment's value. There are no comments; blank
//! lines are skipped. Invariant: nothing here allocates or fails. A broken line is reported to `complain`,
//! and reading goes on.

use pagetax_core::page_size::page_bytes;

/// The length of the longest valid line, in bytes: PATH_MAX and room for the rest.
pub const LINE_BYTES_MAX: usize = libc::PATH_MAX as usize + 64;

/// The page sizes to ask for, in bytes; 0 is the system's choice, none: leave alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The page size for bss, the brk heap and malloc's mappings.
    pub heap: Option<u64>,
    /// The page size for the main thread's stack.
    pub stack: Option<u64>,
}

/// An error in a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// The line is longer than [`LINE_BYTES_MAX`].
    LineTooLong,
    /// The line has fewer than two colons.
    NoDelimiter,
    /// A field is not a page size.
    BadSize,
}

impl Mistake {
    /// Returns the message for the log.
    pub fn text(self) -> &'static [u8] {
        match self {
            Mistake::LineTooLong => b"line too long",
            Mistake::NoDelimiter => b"missing delimiter, expected exec:heap:stack",
            Mistake::BadSize => b"invalid page size",
        }
    }
}

/// The program to match lines with.
pub trait Program {
    /// Returns true if the pattern globs the full path (if it begins with `/`) or the basename.
    fn is(&self, pattern: &[u8]) -> bool;
    /// Returns true if the pattern globs one whole argument.
    fn has_argument(&self, pattern: &[u8]) -> bool;
}

/// Returns the page sizes of the first line in `text` that matches the program. None if no line does.
pub fn lookup(
    text: &[u8],
    program: &impl Program,
    complain: &mut impl FnMut(usize, Mistake),
) -> Option<Wanted> {
    for (index, line) in text.split(|byte| *byte == b'\n').enumerate() {
        match read_line(line, program) {
            Ok(Some(wanted)) => return Some(wanted),
            Ok(None) => {}
            Err(mistake) => complain(index + 1, mistake),
        }
    }
    None
}

/// Returns the page sizes of a line, if it matches the program.
fn read_line(line: &[u8], program: &impl Program) -> Result<Option<Wanted>, Mistake> {
    if line.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    if line.len() > LINE_BYTES_MAX {
        return Err(Mistake::LineTooLong);
    }
    let (rest, stack) = rsplit(line, b':').ok_or(Mistake::NoDelimiter)?;
    let (pattern, heap) = rsplit(rest, b':').ok_or(Mistake::NoDelimiter)?;
    let wanted = Wanted { heap: field(heap)?, stack: field(stack)? };
    let (exec, argument) = match rsplit(pattern.trim_ascii(), b' ') {
        Some((exec, argument)) => (exec.trim_ascii(), Some(argument)),
        None => (pattern.trim_ascii(), None),
    };
    let matches = program.is(exec) && argument.is_none_or(|a| program.has_argument(a));
    Ok(matches.then_some(wanted))
}

fn rsplit(text: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let position = text.iter().rposition(|byte| *byte == at)?;
    Some((text.get(..position)?, text.get(position + 1..)?))
}

fn field(text: &[u8]) -> Result<Option<u64>, Mistake> {
    match text.trim_ascii() {
        [] => Ok(None),
        text => page_bytes(text).map(Some).ok_or(Mistake::BadSize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A fake program: equality and a trailing `*` suffice to test precedence, as libc does the globbing.
    struct Fake(&'static str, &'static [&'static str]);

    fn glob(pattern: &[u8], text: &str) -> bool {
        match pattern.split_last() {
            Some((b'*', start)) => text.as_bytes().starts_with(start),
            _ => pattern == text.as_bytes(),
        }
    }

    impl Program for Fake {
        fn is(&self, pattern: &[u8]) -> bool {
            let base = self.0.rsplit('/').next().unwrap_or(self.0);
            glob(pattern, if pattern.starts_with(b"/") { self.0 } else { base })
        }
        fn has_argument(&self, pattern: &[u8]) -> bool {
            self.1.iter().any(|argument| glob(pattern, argument))
        }
    }

    const JAVA: Fake = Fake("/usr/bin/java", &["-server", "App"]);

    fn wanted(text: &str) -> (Option<Wanted>, Vec<(usize, Mistake)>) {
        let mut mistakes = Vec::new();
        let found =
            lookup(text.as_bytes(), &JAVA, &mut |line, mistake| mistakes.push((line, mistake)));
        (found, mistakes)
    }

    fn both(heap: u64, stack: u64) -> Option<Wanted> {
        Some(Wanted { heap: Some(heap), stack: Some(stack) })
    }

    #[test]
    fn the_first_match_wins() {
        assert_eq!(wanted("java:4M:64K\njava:2M:4K\n").0, both(4 << 20, 64 << 10));
        assert_eq!(wanted("sort:4M:64K\n/usr/bin/java:2M:4K").0, both(2 << 20, 4096));
        assert_eq!(wanted("/bin/java:4M:64K").0, None);
        assert_eq!(wanted("ja*:4M:64K").0, both(4 << 20, 64 << 10));
        assert_eq!(wanted("\n  \n java : 4M : 64K \n").0, both(4 << 20, 64 << 10));
    }

    #[test]
    fn an_argument_pattern_must_glob_a_whole_argument() {
        assert_eq!(wanted("java App:4M:4K").0, both(4 << 20, 4096));
        assert_eq!(wanted("java Ap:4M:4K").0, None);
        assert_eq!(wanted("java -s*:4M:4K").0, both(4 << 20, 4096));
    }

    #[test]
    fn an_empty_field_is_an_answer() {
        assert_eq!(wanted("java::\njava:4M:4M").0, Some(Wanted::default()));
        assert_eq!(wanted("java:2M:").0, Some(Wanted { heap: Some(2 << 20), stack: None }));
    }

    #[test]
    fn broken_lines_are_reported_and_skipped() {
        let long = format!("{}:4M:4M\n", "x".repeat(LINE_BYTES_MAX));
        let text = format!("java\njava:4M\n{long}java:3M:4K\n# no comment:::\njava:4M:4K");
        let (found, mistakes) = wanted(&text);
        assert_eq!(found, both(4 << 20, 4096));
        let (n, l, b) = (Mistake::NoDelimiter, Mistake::LineTooLong, Mistake::BadSize);
        assert_eq!(mistakes, [(1, n), (2, n), (3, l), (4, b)]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(text in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut mistakes = 0;
            lookup(&text, &JAVA, &mut |_, _| mistakes += 1);
            prop_assert!(mistakes <= text.len() + 1);
        }
    }
}
