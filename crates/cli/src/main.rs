//! The command line of pagetax.

fn main() {}
