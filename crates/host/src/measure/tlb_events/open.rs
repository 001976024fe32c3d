//! The events of a family, opened on CPUs or on tasks, and their reading.

use super::{Counted, Counts, Family};
use crate::procfs::{Root, online_cpus};
use crate::sys::perf::{Event, EventKind, EventSpec, Scaled};
use pagetax_core::trapstat::Mode;
use std::io;

/// The perf event type `PERF_TYPE_RAW`.
const RAW: u32 = 4;
/// The hardware event `PERF_COUNT_HW_CPU_CYCLES`.
const CPU_CYCLES: u32 = 0;

/// The CPUs or tasks to count on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CountTarget {
    /// All tasks on these CPUs; `None` means all online CPUs.
    Cpus(Option<Vec<u32>>),
    /// All threads of these processes, and the tasks that they start.
    Processes(Vec<u32>),
    /// The next command that the calling thread starts, from its exec on.
    NextCommand,
}

/// The reason why nothing can be counted.
#[derive(Debug, thiserror::Error)]
pub enum CountError {
    /// The machine has no PMU, or this virtual machine has no access to it.
    #[error("this machine has no performance-monitoring unit that counts page walks")]
    NoUnit,
    /// The process does not exist, or no longer.
    #[error("no process {0}\n  hint: list processes with ps -e")]
    NoProcess(u32),
    /// The setting perf_event_paranoid forbids it; the number is the value that permits it.
    #[error("counting is not permitted: {0}\n  hint: sudo sysctl kernel.perf_event_paranoid={1}")]
    Forbidden(io::Error, i32),
    /// Any other error of opening the events.
    #[error("cannot open the events: {0}\n  hint: `pagetax doctor` tells what this machine counts")]
    System(io::Error),
}

impl CountError {
    pub(super) fn of(error: io::Error, is_system_wide: bool) -> CountError {
        match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => {
                CountError::Forbidden(error, if is_system_wide { -1 } else { 1 })
            }
            _ => CountError::System(error),
        }
    }
}

/// Returns true if this machine's CPUs have a PMU. The kernel checks permissions first; if it refuses
/// those, its list of PMUs decides.
pub fn has_unit() -> bool {
    let opened = Event::open(&EventSpec::new(EventKind::Hardware(CPU_CYCLES)));
    let is_of_cpus = |name: &String| name.starts_with("cpu") || name.starts_with("armv8");
    match opened.map_err(|error| error.raw_os_error()) {
        Ok(_) => true,
        Err(Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP)) => false,
        Err(_) => Root::default().names("/sys/bus/event_source/devices").iter().any(is_of_cpus),
    }
}

/// The open events of one CPU or task in one mode.
#[derive(Debug)]
struct Group {
    cpu: u32,
    mode: Mode,
    /// The events in the order of [`Family::events`]; `None` if this CPU does not have the event.
    events: Vec<Option<Event>>,
}

/// Counters that run until they are dropped.
#[derive(Debug)]
pub struct Counters {
    groups: Vec<Group>,
}

impl Counters {
    /// Opens all events of a family, in user and in kernel mode.
    pub fn open(family: &Family, target: &CountTarget) -> Result<Counters, CountError> {
        let command = *target == CountTarget::NextCommand;
        let places: Vec<(u32, i32, i32)> = match target {
            CountTarget::Cpus(cpus) => {
                cpus_of(cpus.as_ref())?.into_iter().map(|cpu| (cpu, -1, cpu as i32)).collect()
            }
            CountTarget::Processes(pids) => {
                tasks(pids)?.into_iter().map(|tid| (0, tid, -1)).collect()
            }
            CountTarget::NextCommand => vec![(0, 0, -1)],
        };
        let mut groups = Vec::new();
        for (cpu, pid, on_cpu) in places {
            for mode in [Mode::User, Mode::Kernel] {
                let spec = |counted: &Counted| EventSpec {
                    pid,
                    cpu: on_cpu,
                    inherit: on_cpu == -1,
                    exclude_kernel: mode == Mode::User,
                    exclude_user: mode == Mode::Kernel,
                    enable_on_exec: command,
                    times: true,
                    ..EventSpec::new(kind(counted))
                };
                groups.push(open_group(cpu, mode, &family.events(), spec, on_cpu != -1)?);
            }
        }
        Ok(Counters { groups })
    }

    /// Returns the counts so far. The counts of a process's tasks are added.
    pub fn read(&self) -> Vec<Counts> {
        let mut all: Vec<Counts> = Vec::new();
        for group in &self.groups {
            let read = |event: &Option<Event>| event.as_ref().and_then(|e| e.scaled().ok());
            let values: Vec<_> = group.events.iter().map(read).collect();
            match all.iter_mut().find(|c| (c.cpu, c.mode) == (group.cpu, group.mode)) {
                Some(sum) => {
                    sum.values.iter_mut().zip(values).for_each(|(sum, v)| *sum = plus(*sum, v))
                }
                None => all.push(Counts { cpu: group.cpu, mode: group.mode, values }),
            }
        }
        all
    }
}

/// Returns the difference from the counts `before`.
pub fn since(now: &[Counts], before: &[Counts]) -> Vec<Counts> {
    let less = |now: Option<Scaled>, before: Option<Scaled>| {
        let (now, before) = (now?, before.unwrap_or_default());
        Some(Scaled {
            value: now.value.saturating_sub(before.value),
            enabled_ns: now.enabled_ns.saturating_sub(before.enabled_ns),
            running_ns: now.running_ns.saturating_sub(before.running_ns),
        })
    };
    let counts = |now: &Counts| {
        let before = before.iter().find(|b| (b.cpu, b.mode) == (now.cpu, now.mode));
        let old = |nth: usize| before.and_then(|b| b.values.get(nth).copied().flatten());
        let values = now.values.iter().enumerate().map(|(nth, value)| less(*value, old(nth)));
        Counts { values: values.collect(), ..*now }
    };
    now.iter().map(counts).collect()
}

fn plus(a: Option<Scaled>, b: Option<Scaled>) -> Option<Scaled> {
    let (a, b) = (a?, b?);
    Some(Scaled {
        value: a.value + b.value,
        enabled_ns: a.enabled_ns + b.enabled_ns,
        running_ns: a.running_ns + b.running_ns,
    })
}

fn kind(counted: &Counted) -> EventKind {
    match counted.code {
        Some(code) => EventKind::Raw { event_type: RAW, config: code.0 },
        None => EventKind::Hardware(CPU_CYCLES),
    }
}

/// Returns these CPUs, or all online ones.
pub(super) fn cpus_of(cpus: Option<&Vec<u32>>) -> Result<Vec<u32>, CountError> {
    let all = || online_cpus(&Root::default());
    let unknown = |why| CountError::System(io::Error::other(why));
    cpus.map_or_else(all, |cpus| Ok(cpus.clone())).map_err(unknown)
}

/// Returns the threads of a process.
pub(super) fn tasks(pids: &[u32]) -> Result<Vec<i32>, CountError> {
    let mut tasks = Vec::new();
    for pid in pids {
        let entries = std::fs::read_dir(format!("/proc/{pid}/task"));
        let entries = entries.map_err(|_| CountError::NoProcess(*pid))?;
        tasks.extend(
            entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()),
        );
    }
    Ok(tasks)
}

/// Opens the events of one CPU or task. A CPU may lack an event, but without cycles there is no PMU.
fn open_group(
    cpu: u32,
    mode: Mode,
    events: &[Counted],
    spec: impl Fn(&Counted) -> EventSpec,
    system_wide: bool,
) -> Result<Group, CountError> {
    let mut opened = Vec::new();
    for counted in events {
        match Event::open(&spec(counted)) {
            Ok(event) => opened.push(Some(event)),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT | libc::EOPNOTSUPP) if counted.code.is_none() => {
                    return Err(CountError::NoUnit);
                }
                Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EINVAL) => opened.push(None),
                _ => return Err(CountError::of(error, system_wide)),
            },
        }
    }
    Ok(Group { cpu, mode, events: opened })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_by_cpu_and_mode_and_unknown_stays_unknown() {
        let counts = |cpu, value: Option<u64>| Counts {
            cpu,
            mode: Mode::User,
            values: vec![value.map(|v| Scaled { value: v, enabled_ns: v, running_ns: v })],
        };
        let since = since(&[counts(1, Some(9)), counts(2, None)], &[counts(1, Some(4))]);
        assert_eq!(since[0].values[0].unwrap().value, 5);
        assert_eq!(since[1].values[0], None);
    }

    #[test]
    fn an_open_fails_with_a_reason_or_counts() {
        let family = Family::all().unwrap().remove(0);
        match Counters::open(&family, &CountTarget::NextCommand) {
            Ok(counters) => assert_eq!(counters.read().len(), 2),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}
