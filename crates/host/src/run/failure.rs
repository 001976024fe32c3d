//! Failures in terms of the job: the operation, the system's error, and a hint.

use pagetax_core::exit::Exit;
use pagetax_core::machine::RunError;
use pagetax_core::plan::{Backing, Op, Plan, RegionId};
use pagetax_core::units::Bytes;
use std::io;

/// Describes an operation that the system refused.
pub fn op_error(plan: &Plan, op: &Op, errno: i32) -> RunError {
    let name = |id: &RegionId| {
        let region = plan.region(*id);
        format!("region `{}` ({})", region.name, Bytes(region.bytes))
    };
    let (text, remedy) = match op {
        Op::Map(id) => (format!("map of {}", name(id)), MAP),
        Op::Unmap(id) => (format!("unmap of {}", name(id)), REPORT),
        Op::Lock { region, .. } => (format!("lock of {}", name(region)), LOCK),
        Op::Unlock(id) => (format!("unlock of {}", name(id)), REPORT),
        Op::Advise { region, advice } => {
            let advice = format!("{advice:?}").to_lowercase();
            (format!("advice `{advice}` on {}", name(region)), ADVISE)
        }
        Op::Touch(touch) => (format!("touch of {}", name(&touch.region)), MAP),
        Op::Replay(replay) => (format!("replay in {}", name(&replay.region)), REPORT),
        Op::Sleep(_) => ("sleep".into(), REPORT),
        Op::Barrier => ("barrier".into(), REPORT),
    };
    let why = io::Error::from_raw_os_error(errno).to_string();
    RunError::Op { op: text, why, remedy: remedy.into() }
}

const MAP: &str = "make the regions smaller, or allow more address space (ulimit -v unlimited)";
const LOCK: &str = "lock less, or allow more (ulimit -l unlimited, or run as root)";
const ADVISE: &str =
    "take this advice out of the job: this kernel or this backing does not have it";
const REPORT: &str = "run it again; if it fails again, report it with this job and `uname -r`";

/// Describes a region that could not be made or mapped at the start.
pub fn region_error(plan: &Plan, id: RegionId, error: io::Error) -> RunError {
    if error.kind() == io::ErrorKind::Interrupted {
        return RunError::Interrupted;
    }
    let region = plan.region(id);
    let remedy = match &region.backing {
        Backing::File { .. } => {
            "name a directory that can be written to and has room, with its directory parameter"
        }
        Backing::Remote { .. } => {
            "look at /dev/userfaultfd (`pagetax doctor`) and at the servers (`pagetax servers`), or make \
             the region smaller"
        }
        _ => MAP,
    };
    let op = format!("set-up of region `{}` ({})", region.name, Bytes(region.bytes));
    RunError::Op { op, why: error.to_string(), remedy: remedy.into() }
}

/// Describes a refusal of something that the harness itself needs.
pub fn refusal(what: &str, error: &io::Error) -> RunError {
    let remedy = "allow more processes and memory (ulimit -u, ulimit -v), or use fewer clients";
    RunError::Op { op: what.into(), why: error.to_string(), remedy: remedy.into() }
}

/// Describes a client that died or ended with a status other than 0.
pub fn died(exit: Exit) -> RunError {
    let (why, remedy) = match exit {
        Exit::Signal(libc::SIGKILL) => (
            "it was killed by SIGKILL, as the kernel does when memory runs out".to_string(),
            "use fewer clients or smaller regions; `dmesg` tells whether it was the OOM killer",
        ),
        Exit::Signal(libc::SIGBUS) => (
            "it was killed by SIGBUS: a page could not be had from its file or pool".to_string(),
            "check the room on the file system and in the hugetlb pool",
        ),
        Exit::Signal(signal) => (format!("it was killed by signal {signal}"), REPORT),
        Exit::Code(status) => (format!("it ended with status {status}"), REPORT),
    };
    RunError::Op { op: "a client".into(), why, remedy: remedy.into() }
}

/// Describes a run that the free-memory guard ended.
pub fn short_of_memory() -> RunError {
    RunError::Op {
        op: "the run".into(),
        why: "almost no memory is left on this machine, so it was stopped".into(),
        remedy: "use smaller regions or fewer clients, or add swap".into(),
    }
}
