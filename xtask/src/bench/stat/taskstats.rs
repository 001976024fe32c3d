//! The delays of a task by the kernel's own account: the generic netlink family TASKSTATS.

use crate::at_end::AtEnd;
use anyhow::{Context, Result, bail, ensure};
use pagetax_core::units::Nanos;
use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, sendto, socket};
use std::fmt::{self, Display, Formatter};
use std::fs;

/// The switch of the account. A task has one if the switch was on when it started.
const SWITCH: &str = "/proc/sys/kernel/task_delayacct";

const FAMILY_CONTROLLER: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const GET_STATS: u8 = 1;
const ONE_TASK: u16 = 1;
const STATS: u16 = 3;
const OF_ONE_TASK: u16 = 4;
const MESSAGE_IS_ERROR: u16 = 2;
const REQUEST: u16 = 1;
/// The bytes before the attributes of a message: a header of netlink, and one of the generic family.
const HEADERS: usize = 20;

// Offsets in `struct taskstats`. Later versions of it only grow at the end.
const SWAP_IN_NS: usize = 56;
const TASK: usize = 128;
const RECLAIM_NS: usize = 320;
const THRASHING_NS: usize = 336;

/// The delays of a task since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskDelays {
    /// Reading pages from swap.
    pub swap_in: Nanos,
    /// Direct reclaim, with the writes to swap.
    pub reclaim: Nanos,
    /// Waits for pages that were evicted a short time ago. They overlap with `swap_in`.
    pub thrashing: Nanos,
}

impl Display for TaskDelays {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        let [swap_in, reclaim, thrashing] =
            [self.swap_in, self.reclaim, self.thrashing].map(|ns| ns.0 as f64 / 1e9);
        write!(
            out,
            "taskstats: swap-in {swap_in:.2} s (thrashing {thrashing:.2} s) + reclaim {reclaim:.2} s"
        )
    }
}

/// The account of delays, switched on until the end.
pub struct DelayAccount {
    _end: Option<AtEnd>,
}

impl DelayAccount {
    /// Switches the account on. Tasks that start from now on have one.
    pub fn switch_on() -> Result<DelayAccount> {
        let before = fs::read_to_string(SWITCH).context("the kernel has no account of delays")?;
        if before.trim() == "1" {
            return Ok(DelayAccount { _end: None });
        }
        let end = AtEnd::run(&format!("echo {} > {SWITCH}", before.trim()))?;
        fs::write(SWITCH, "1")?;
        Ok(DelayAccount { _end: Some(end) })
    }

    /// Returns the delays of a task since its start.
    pub fn delays(&self, task: u32) -> Result<TaskDelays> {
        let name = attribute(FAMILY_NAME, b"TASKSTATS\0");
        let family = exchange(FAMILY_CONTROLLER, GET_FAMILY, &name)?;
        let family = find(&family, FAMILY_ID).context("the kernel has no taskstats")?;
        let family = u16::from_ne_bytes(family.get(..2).context("a short number")?.try_into()?);
        let answer = exchange(family, GET_STATS, &attribute(ONE_TASK, &task.to_ne_bytes()))?;
        let stats = find(&answer, OF_ONE_TASK).and_then(|nested| find(nested, STATS));
        TaskDelays::parse(stats.context("the answer has no statistics")?, task)
    }
}

impl TaskDelays {
    /// Returns the delays since an earlier reading.
    pub fn since(self, before: TaskDelays) -> TaskDelays {
        let since = |of: fn(&TaskDelays) -> Nanos| Nanos(of(&self).0.saturating_sub(of(&before).0));
        TaskDelays {
            swap_in: since(|delays| delays.swap_in),
            reclaim: since(|delays| delays.reclaim),
            thrashing: since(|delays| delays.thrashing),
        }
    }

    /// Returns the time in reads from swap and in reclaim.
    pub fn seconds(&self) -> f64 {
        (self.swap_in.0 + self.reclaim.0) as f64 / 1e9
    }

    fn parse(stats: &[u8], task: u32) -> Result<TaskDelays> {
        let bytes = stats.get(TASK..TASK + 4).context("short statistics")?;
        let of = u32::from_ne_bytes(bytes.try_into()?);
        ensure!(of == task, "the statistics are those of task {of}");
        let ns = |at: usize| -> Result<Nanos> {
            let bytes = stats.get(at..at + 8).context("short statistics")?;
            Ok(Nanos(u64::from_ne_bytes(bytes.try_into()?)))
        };
        Ok(TaskDelays {
            swap_in: ns(SWAP_IN_NS)?,
            reclaim: ns(RECLAIM_NS)?,
            thrashing: ns(THRASHING_NS)?,
        })
    }
}

/// Returns an attribute: its length, its kind, and the value up to a multiple of four bytes.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (4 + value.len()) as u16;
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Returns the value of the first attribute of a kind.
fn find(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let half =
            |at: usize| Some(u16::from_ne_bytes([*attributes.get(at)?, *attributes.get(at + 1)?]));
        let (length, kind) = (half(0)? as usize, half(2)?);
        let value = attributes.get(4..length)?;
        // The two highest bits are flags.
        if kind & 0x3fff == wanted {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

/// Sends a command to a family of generic netlink. Returns the attributes of the answer.
fn exchange(family: u16, command: u8, attributes: &[u8]) -> Result<Vec<u8>> {
    let socket = socket(AddressFamily::NETLINK, SocketType::RAW, Some(GENERIC))?;
    let mut message = ((HEADERS + attributes.len()) as u32).to_ne_bytes().to_vec();
    message.extend(family.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([command, 1, 0, 0]);
    message.extend(attributes);
    sendto(&socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = vec![0; 16 << 10];
    let (length, _) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
    answer.truncate(length);
    let kind = answer.get(4..6).context("a short answer")?;
    if kind == MESSAGE_IS_ERROR.to_ne_bytes() {
        let code = answer.get(16..20).context("a short answer")?;
        let code = i32::from_ne_bytes(code.try_into()?);
        bail!("generic netlink: {}", std::io::Error::from_raw_os_error(-code));
    }
    Ok(answer.get(HEADERS..).context("a short answer")?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_behind_others_of_any_length() {
        let first = attribute(1, b"odd");
        let nested = attribute(0x8000 | 4, &attribute(3, &7u64.to_ne_bytes()));
        let all = [first, nested].concat();
        assert_eq!(find(&all, 1), Some(&b"odd"[..]));
        assert_eq!(find(find(&all, 4).unwrap(), 3), Some(&7u64.to_ne_bytes()[..]));
        assert_eq!(find(&all, 9), None);
        assert_eq!(find(&[1, 0, 1, 0, 0, 0], 1), None);
    }

    #[test]
    fn delays_are_read_by_their_offset_and_only_of_the_task() {
        let mut stats = vec![0; 344];
        let mut put = |at: usize, bytes: &[u8]| stats[at..at + bytes.len()].copy_from_slice(bytes);
        put(SWAP_IN_NS, &5u64.to_ne_bytes());
        put(TASK, &77u32.to_ne_bytes());
        put(RECLAIM_NS, &6u64.to_ne_bytes());
        put(THRASHING_NS, &7u64.to_ne_bytes());
        let delays = TaskDelays::parse(&stats, 77).unwrap();
        assert_eq!([delays.swap_in.0, delays.reclaim.0, delays.thrashing.0], [5, 6, 7]);
        assert!(TaskDelays::parse(&stats, 78).is_err());
        assert!(TaskDelays::parse(&stats[..100], 77).is_err());
    }

    #[test]
    fn the_kernel_answers_for_this_process() {
        // The kernel lets only root ask.
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let account = DelayAccount { _end: None };
        account.delays(std::process::id()).unwrap();
        assert!(account.delays(u32::MAX).unwrap_err().to_string().contains("netlink"));
    }
}
