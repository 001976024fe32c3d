//! Tests of both ways in which pages leave, by a move and by a copy; of the preloaded library, too.

/// Makes two tests of each function.
macro_rules! both_ways {
    ($($name:ident),* $(,)?) => {
        mod moved {
            $(#[test] fn $name() { super::$name() })*
        }
        mod copied_out {
            $(#[test] fn $name() { super::$name() })*
        }
    };
}

/// Whether the test that asks is one of those by a copy: each thread of a test has its path for a name.
pub fn is_copied_out() -> bool {
    std::thread::current().name().is_some_and(|name| name.contains("copied_out::"))
}
