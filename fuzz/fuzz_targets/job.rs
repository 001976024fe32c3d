//! Any text is a job that resolves, or is refused with a place and a hint. Nothing panics.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagetax_core::job::Job;
use pagetax_core::machine::{MachineKind, MachineSpec};
use pagetax_core::quantity::Params;
use pagetax_core::units::{Bytes, PageSize};

fuzz_target!(|text: &str| {
    let machine = MachineSpec {
        name: "fuzz".into(),
        kind: MachineKind::Null,
        validated_jobs: Vec::new(),
        memory: Bytes(1 << 30),
        base_page: PageSize::K4,
        page_sizes: vec![PageSize::K4],
        cpus: 1,
        job_params: Default::default(),
    };
    let refused = match Job::parse(text, "fuzz.toml") {
        Ok(job) => job.resolve(&Params::new(), &machine, None).err(),
        Err(error) => Some(error),
    };
    if let Some(error) = refused {
        assert!(!error.remedy.is_empty() && error.place.contains("fuzz.toml"));
    }
});
