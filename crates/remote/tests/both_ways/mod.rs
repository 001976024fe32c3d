//! Tests of both eviction methods, by a move and by a copy. The tests of the preloaded library use
//! it, too.

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

/// Returns true if the calling test evicts by a copy. A test's thread has the path of the test as
/// its name.
pub fn is_copied_out() -> bool {
    runs_in("copied_out")
}

/// Returns true if the calling test is in this module.
pub fn runs_in(module: &str) -> bool {
    std::thread::current().name().is_some_and(|name| name.contains(&format!("{module}::")))
}
