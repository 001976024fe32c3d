//! Counters of a simulated run, by their place in core's table.
//!
//! Invariant: a constant with an id that is not in the table does not compile.

use pagetax_core::counter::COUNTERS;

/// A counter's place in [`COUNTERS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CounterId(usize);

impl CounterId {
    /// Returns the counter of this id, as in `const FAULTS: CounterId = CounterId::of("minor_fault_count")`.
    ///
    /// # Panics
    /// If the table has no such counter.
    pub const fn of(id: &str) -> Self {
        let mut index = 0;
        while index < COUNTERS.len() {
            if same(COUNTERS[index].id.as_bytes(), id.as_bytes()) {
                return CounterId(index);
            }
            index += 1;
        }
        panic!("no such counter in core's table")
    }

    /// Returns the id in reports.
    pub fn id(self) -> &'static str {
        COUNTERS[self.0].id
    }
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut index = 0;
    while index < a.len() {
        if a[index] != b[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// A value for each counter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tally([u64; COUNTERS.len()]);

impl Tally {
    /// Creates a tally of zeros.
    pub fn new() -> Self {
        Tally([0; COUNTERS.len()])
    }

    /// Adds `n` events, nanoseconds or bytes.
    pub fn add(&mut self, counter: CounterId, n: u64) {
        self.0[counter.0] += n;
    }

    /// Raises a high-water mark to `n`.
    pub fn at_least(&mut self, counter: CounterId, n: u64) {
        let value = &mut self.0[counter.0];
        *value = (*value).max(n);
    }

    /// Returns the count so far.
    pub fn get(&self, counter: CounterId) -> u64 {
        self.0[counter.0]
    }
}

impl Default for Tally {
    fn default() -> Self {
        Tally::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_find_their_counters() {
        const STEALS: CounterId = CounterId::of("pmeg_steal_count");
        let mut tally = Tally::new();
        tally.add(STEALS, 3);
        tally.at_least(STEALS, 2);
        assert_eq!(tally.get(STEALS), 3);
        assert_eq!(STEALS.id(), "pmeg_steal_count");
        assert!(COUNTERS.iter().all(|c| CounterId::of(c.id).id() == c.id));
    }
}
