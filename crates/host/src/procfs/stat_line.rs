//! Lines of /proc/PID/stat, read field by field.
//!
//! procfs-core parses all 52 fields into a value of their own. `pagetax top` reads a line of each process in
//! each second, and needs eight.

/// The flag of kernel threads, in field 9.
const IS_KERNEL: u64 = 0x0020_0000;

/// A line of /proc/PID/stat or /proc/PID/task/TID/stat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatLine<'a> {
    /// The name: at most 15 bytes, which may be blanks and brackets.
    pub name: &'a str,
    /// The fields from the third on.
    rest: &'a str,
}

impl<'a> StatLine<'a> {
    /// Finds the name in a line; none if it is cut off before.
    pub fn parse(line: &'a str) -> Option<StatLine<'a>> {
        let (head, rest) = line.rsplit_once(')')?;
        Some(StatLine { name: head.split_once('(')?.1, rest })
    }

    /// Returns a number of the fields from the fourth on, which proc_pid_stat(5) numbers.
    pub fn number(&self, field: usize) -> Option<u64> {
        self.rest.split_ascii_whitespace().nth(field - 3)?.parse().ok()
    }

    /// Returns the numbers of these fields, in their order; none if one is not there.
    pub fn numbers<const N: usize>(&self, fields: [usize; N]) -> Option<[u64; N]> {
        let (mut words, mut at) = (self.rest.split_ascii_whitespace(), 3);
        let mut numbers = [0; N];
        for (number, field) in numbers.iter_mut().zip(fields) {
            *number = words.nth(field - at)?.parse().ok()?;
            at = field + 1;
        }
        Some(numbers)
    }

    /// Returns true if the task has ended: nobody has waited for it yet.
    pub fn has_ended(&self) -> bool {
        matches!(self.state(), None | Some('Z' | 'X'))
    }

    /// Returns true if the task runs, or waits for a CPU.
    pub fn is_running(&self) -> bool {
        self.state() == Some('R')
    }

    fn state(&self) -> Option<char> {
        self.rest.trim_ascii_start().chars().next()
    }

    /// Returns the id of the parent.
    pub fn parent(&self) -> Option<u32> {
        self.number(4)?.try_into().ok()
    }

    /// Returns the time of the start, in clock ticks since the machine booted.
    pub fn start_ticks(&self) -> Option<u64> {
        self.number(22)
    }

    /// Returns true for a thread of the kernel.
    pub fn is_kernel(&self) -> bool {
        self.number(9).is_some_and(|flags| flags & IS_KERNEL != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str =
        "7 (a) b (c) S 3 7 7 0 -1 4194560 11 12 13 14 150 160 17 18 20 0 1 0 220 230 240";

    #[test]
    fn a_name_may_hold_brackets() {
        let stat = StatLine::parse(LINE).unwrap();
        assert_eq!(stat.name, "a) b (c");
        assert_eq!((stat.parent(), stat.start_ticks()), (Some(3), Some(220)));
        assert!(!stat.has_ended() && !stat.is_running() && !stat.is_kernel());
        assert_eq!(stat.numbers([10, 14, 15, 22]), Some([11, 150, 160, 220]));
        assert!(StatLine::parse("9 (kswapd0) R 2 0 0 0 -1 2097152").unwrap().is_kernel());
    }

    #[test]
    fn what_is_cut_off_or_has_ended_has_no_numbers() {
        assert_eq!(StatLine::parse(""), None);
        assert_eq!(StatLine::parse("7 (a"), None);
        let cut = StatLine::parse("7 (a) ").unwrap();
        assert!(cut.has_ended());
        assert_eq!((cut.parent(), cut.numbers([4])), (None, None));
        let stat = StatLine::parse(LINE).unwrap();
        assert_eq!((stat.number(8), stat.numbers([4, 25])), (None, None), "-1, and too short");
        assert!(StatLine::parse("7 (a) Z 3 7").unwrap().has_ended());
    }
}
