//! Tasks: the next action of each process, thread and kernel thread.

use crate::hardware::SpaceId;
use crate::hardware::accesses::Accesses;
use crate::historic::cx::WallRow;
use pagetax_core::plan::RegionId;

/// The role of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The job's main process.
    Main,
    /// A client of the current phase, by number; with a space of its own (a process) or not.
    Client { number: u32, process: bool },
    /// A thread of the kernel, by number.
    Kernel(usize),
}

/// The scheduling state of a task. The wall ledger counts the job's tasks in each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Ready { since: u64 },
    Running,
    Waiting { row: WallRow, since: u64 },
    Ended,
}

/// The action of a task when it next has a CPU.
#[derive(Debug, Clone)]
pub(super) enum NextAction {
    /// The kernel sets its space up.
    Begin,
    /// Main only: maps the regions that a job maps at its start, from this one on.
    MapAll(usize),
    /// Main only: starts the phase of this number, or exits after the last.
    Phase(usize),
    /// Main only: creates the phase's next client.
    Fork { made: u32 },
    /// Main only: sleeps between two polls.
    Nap,
    /// Main only: looks for an ended client.
    Poll,
    /// Main only: waits until all clients have ended.
    Join,
    /// Begins the operation that the cursor points to.
    Operation,
    /// In the middle of a touch operation.
    Touch(Box<Accesses>),
    /// In the middle of a lock operation.
    Lock { region: RegionId, chunk_bytes: u64, done_bytes: u64 },
    /// The kernel takes its space down.
    Exit,
    /// A kernel thread's work.
    Thread(usize),
}

/// A task's position in its phase's operations.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cursor {
    pub phase: usize,
    pub repeat: u64,
    pub op: usize,
    /// The time when the client began the phase.
    pub start_ns: u64,
    /// The client's accesses in the phase so far, for its rate.
    pub accesses: u64,
    /// The time when the current operation began, unless it is an access; none before the first.
    pub begun_ns: Option<u64>,
}

/// A task.
#[derive(Debug)]
pub(super) struct Task {
    pub role: Role,
    /// The address space; none for kernel threads.
    pub space: Option<SpaceId>,
    pub state: State,
    pub next_action: NextAction,
    pub cursor: Cursor,
    /// The number of the task's current wait. A wake for an earlier number has no effect.
    pub wait_number: u64,
    /// The remainders: user and translation time below a nanosecond, and page touches below an access.
    pub user_carry_ps: u64,
    pub translation_carry_ps: u64,
    pub piece_carry: u64,
}

impl Task {
    pub fn new(role: Role, space: Option<SpaceId>, next_action: NextAction, now: u64) -> Self {
        Task {
            role,
            space,
            state: State::Ready { since: now },
            next_action,
            cursor: Cursor { start_ns: now, ..Cursor::default() },
            wait_number: 0,
            user_carry_ps: 0,
            translation_carry_ps: 0,
            piece_carry: 0,
        }
    }

    /// Returns true if the task's time counts as the job's.
    pub fn is_job(&self) -> bool {
        !matches!(self.role, Role::Kernel(_))
    }

    /// Returns the task's number among the phase's clients.
    pub fn client(&self) -> u32 {
        match self.role {
            Role::Client { number, .. } => number,
            Role::Main | Role::Kernel(_) => 0,
        }
    }
}
