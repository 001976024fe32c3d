//! The length of long tests. `cargo xtask kernels` shortens them, as its CPUs are emulated.

/// Returns how many of a test's turns are made: all, or `PAGETAX_TEST_PERCENT` of them.
pub fn turns(all: u64) -> u64 {
    match std::env::var("PAGETAX_TEST_PERCENT") {
        Ok(percent) => all * percent.parse::<u64>().expect("a percentage") / 100,
        Err(_) => all,
    }
}
