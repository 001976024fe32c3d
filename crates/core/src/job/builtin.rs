//! The built-in jobs: programs of four historic reports, as job files in `jobs/`.

use super::document::Job;

const BUILTIN: &[(&str, &str)] = &[
    ("mlock-cycle", include_str!("../../../../jobs/mlock-cycle.toml")),
    ("mmap3", include_str!("../../../../jobs/mmap3.toml")),
    ("tlb-gather", include_str!("../../../../jobs/tlb-gather.toml")),
    ("vmtest", include_str!("../../../../jobs/vmtest.toml")),
];

/// Returns the names of the built-in jobs, sorted.
pub fn builtin_names() -> impl Iterator<Item = &'static str> {
    BUILTIN.iter().map(|(name, _)| *name)
}

impl Job {
    /// Returns the built-in job with this name.
    pub fn builtin(name: &str) -> Option<Job> {
        let (_, text) = BUILTIN.iter().find(|(known, _)| *known == name)?;
        let place = format!("built-in job {name}");
        Some(Job::parse(text, &place).unwrap_or_else(|e| panic!("{e}")))
    }
}
