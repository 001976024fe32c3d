//! Random jobs on every simulated machine: all machines agree on validity, make the accesses of the plan,
//! close their budgets, and end.
#![no_main]

#[path = "../../crates/sim/tests/common/every_machine.rs"]
mod every_machine;
#[path = "../../crates/sim/tests/common/random_job.rs"]
mod random_job;

use libfuzzer_sys::fuzz_target;
use random_job::{Scope, random_job};
use std::cell::RefCell;

const SCOPE: Scope = Scope { has_remote: true, has_optional_advice: true, has_pools: true };

thread_local! {
    static MACHINES: RefCell<Vec<pagetax_sim::historic::machine::SimMachine>> =
        RefCell::new(every_machine::machines());
}

fuzz_target!(|input: &[u8]| {
    let text = random_job(input, SCOPE);
    MACHINES.with_borrow_mut(|machines| {
        if let Err(why) = every_machine::check(machines, &text) {
            panic!("{why}\n{text}");
        }
    });
});
