//! The engine's constants of a machine: tables `[machine]` and `[access]` of its model.

use crate::hardware::configuration::{ProgramTimes, program_times};
use crate::model::{Model, ModelError};
use pagetax_core::plan::{Access, Pattern, Touch};
use pagetax_core::replay::ThreadTotals;
use pagetax_core::units::{Bytes, PageSize};

/// The engine's constants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The physical memory, in bytes.
    pub memory: Bytes,
    /// The machine's base page size.
    pub page: PageSize,
    /// The number of CPUs of the machine.
    pub cpus: u32,
    /// The interval of the timer, in which sleeps are counted.
    pub tick_ns: u64,
    /// The user time of an access of any size.
    access_ps: u64,
    /// The user time of a random access; none: the same.
    random_ps: Option<u64>,
    /// The user time of a dependent load; none: the same.
    dependent_ps: Option<u64>,
    /// The user time of each byte of an access, by kind.
    read_byte_ps: u64,
    write_byte_ps: u64,
    verify_byte_ps: u64,
    rewrite_byte_ps: u64,
    /// The costs of recorded programs. None: an access costs as much as a job's.
    program: Option<ProgramTimes>,
}

impl Settings {
    /// Reads `[machine]` memory, page, cpus, tick and `[access]` time. Optional in `[access]` are random and
    /// dependent, which replace `time` for those patterns, and read_byte, write_byte, verify_byte and
    /// rewrite_byte, which are added for each byte.
    ///
    /// # Errors
    /// Fails if a constant is absent or impossible.
    pub fn load(model: &Model) -> Result<Self, ModelError> {
        let byte_ps = |key| if model.has("access", key) { model.ps("access", key) } else { Ok(0) };
        let time_ps = |key| match model.ps("access", key)? {
            0 => Err(model.error("access", key, "is 0", "write a time of at least 1 ps")),
            ps => Ok(ps),
        };
        let if_given = |key| model.has("access", key).then(|| time_ps(key)).transpose();
        let cpus = model.positive("machine", "cpus")?;
        if cpus > CPUS_MAX {
            let problem = format!("is {cpus}, more than {CPUS_MAX}");
            return Err(model.error("machine", "cpus", problem, "write a smaller number"));
        }
        Ok(Settings {
            memory: Bytes(model.bytes("machine", "memory")?),
            page: model.page_size("machine", "page")?,
            cpus: cpus as u32,
            tick_ns: model.ns("machine", "tick")?.max(1),
            access_ps: time_ps("time")?,
            random_ps: if_given("random")?,
            dependent_ps: if_given("dependent")?,
            read_byte_ps: byte_ps("read_byte")?,
            write_byte_ps: byte_ps("write_byte")?,
            verify_byte_ps: byte_ps("verify_byte")?,
            rewrite_byte_ps: byte_ps("rewrite_byte")?,
            program: model.has_table("program").then(|| program_times(model)).transpose()?,
        })
    }

    /// Returns the user time of one access of this touch, in picoseconds.
    pub fn access_ps(&self, touch: &Touch) -> u64 {
        let byte_ps = match touch.access {
            Access::Read => self.read_byte_ps,
            Access::Write => self.write_byte_ps,
            Access::Verify => self.verify_byte_ps,
            Access::Rewrite => self.rewrite_byte_ps,
        };
        let access_ps = match touch.pattern {
            Pattern::Strided { .. } => None,
            Pattern::Uniform | Pattern::Zipf { .. } => self.random_ps,
            Pattern::PointerChase => self.dependent_ps.or(self.random_ps),
        };
        access_ps.unwrap_or(self.access_ps) + byte_ps * touch.grain_bytes
    }

    /// Returns the user time of a recorded thread, in picoseconds.
    pub fn replay_ps(&self, totals: &ThreadTotals) -> u64 {
        let product = |count: u64, ps: u64| count.saturating_mul(ps);
        match self.program {
            Some(ProgramTimes { instruction_ps, far_ps }) => {
                product(totals.instruction_count, instruction_ps)
                    .saturating_add(product(totals.far_count, far_ps))
            }
            None => product(totals.access_count, self.access_ps),
        }
    }

    /// Returns the end of a sleep of `ns` that begins at `now`: timers count whole ticks from the last one.
    pub fn sleep_end(&self, now: u64, ns: u64) -> u64 {
        (now / self.tick_ns).saturating_add(ns.div_ceil(self.tick_ns)).saturating_mul(self.tick_ns)
    }
}

const CPUS_MAX: u64 = 1024;

/// The limits that end a run early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caps {
    /// The limit of virtual time, in nanoseconds.
    pub wall_ns: u64,
    /// The limit of steps: kernel calls and uninterrupted touches.
    pub steps: u64,
    /// The limit of points in the series.
    pub points: u64,
}

impl Default for Caps {
    /// Returns the default limits: a week of virtual time, and steps that take some minutes.
    fn default() -> Self {
        Caps { wall_ns: 7 * 24 * 3600 * 1_000_000_000, steps: 1_000_000_000, points: 1 << 20 }
    }
}
