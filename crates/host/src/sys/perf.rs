//! perf_event_open(2): events that count or sample, and the rings that samples arrive in.
//!
//! Source: perf_event_open(2); the ring protocol as in the header linux/perf_event.h.

use perf_event_open_sys::bindings::{self, perf_event_attr, perf_event_mmap_page};
use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The type and config of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// `PERF_TYPE_SOFTWARE` with a `PERF_COUNT_SW_` value.
    Software(u32),
    /// `PERF_TYPE_HARDWARE` with a `PERF_COUNT_HW_` value.
    Hardware(u32),
    /// `PERF_TYPE_RAW`, or another type of /sys/bus/event_source/devices, with its config.
    Raw {
        /// The number of the type (`perf_event_attr.type`).
        event_type: u32,
        /// The config, which means what the type defines.
        config: u64,
    },
}

/// A page fault, counted when it begins.
pub const PAGE_FAULT: EventKind = EventKind::Software(bindings::PERF_COUNT_SW_PAGE_FAULTS);
/// A minor fault, counted when it ends.
pub const MINOR_FAULT: EventKind = EventKind::Software(bindings::PERF_COUNT_SW_PAGE_FAULTS_MIN);
/// A major fault, counted when it ends.
pub const MAJOR_FAULT: EventKind = EventKind::Software(bindings::PERF_COUNT_SW_PAGE_FAULTS_MAJ);
/// A context switch, counted when a task leaves its CPU; the call chain is the task's.
pub const CONTEXT_SWITCH: EventKind = EventKind::Software(bindings::PERF_COUNT_SW_CONTEXT_SWITCHES);
/// An event that counts nothing; its ring carries records of tasks.
pub const DUMMY: EventKind = EventKind::Software(bindings::PERF_COUNT_SW_DUMMY);
/// The instructions that a thread has finished.
pub const INSTRUCTIONS: EventKind = EventKind::Hardware(bindings::PERF_COUNT_HW_INSTRUCTIONS);
/// The nanoseconds that a task was on a CPU, in both modes.
pub const TASK_CLOCK: EventKind = EventKind::Software(bindings::PERF_COUNT_SW_TASK_CLOCK);
/// A timer that runs while the task is on a CPU.
pub const CPU_CLOCK: EventKind = EventKind::Software(bindings::PERF_COUNT_SW_CPU_CLOCK);

/// The period and the fields of an event's samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    /// The number of events between samples; for the CPU clock, nanoseconds.
    pub period: u64,
    /// The fields of a sample: `PERF_SAMPLE_` bits.
    pub fields: u64,
}

/// An event to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventSpec {
    /// The event that is counted.
    pub kind: EventKind,
    /// The thread to count, 0 for the caller; -1 counts all tasks on `cpu`, which needs privileges.
    pub pid: i32,
    /// The only CPU to count on; -1 for all.
    pub cpu: i32,
    /// The sampling; none to count only.
    pub sampling: Option<Sampling>,
    /// True to count later threads and children of the thread, too.
    pub inherit: bool,
    /// True to leave the children out of those; kernels before 5.13 refuse that with `EINVAL`.
    pub threads_only: bool,
    /// True to leave out the kernel, which unprivileged users must where perf_event_paranoid is 2.
    pub exclude_kernel: bool,
    /// True to leave out user mode.
    pub exclude_user: bool,
    /// True to leave out idle CPUs.
    pub exclude_idle: bool,
    /// True to start at the thread's next exec; else the event starts at once.
    pub enable_on_exec: bool,
    /// True to keep user frames out of call chains.
    pub exclude_callchain_user: bool,
    /// True for records of forks, exits, execs and context switches. With sampling, each record ends in
    /// the thread and the time ([`FIELD_TID`], [`FIELD_TIME`]).
    pub task_records: bool,
    /// True for records of execs and of new mappings. With sampling, each record ends in the thread and the
    /// time.
    pub mapping_records: bool,
    /// True to read the enabled and running times as well, for [`Event::scaled`].
    pub times: bool,
}

/// A count with the times that perf scales it by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Scaled {
    /// The count before any scaling.
    pub value: u64,
    /// The time during which the event was enabled.
    pub enabled_ns: u64,
    /// The time on a hardware counter: less than enabled if events share counters.
    pub running_ns: u64,
}

impl EventSpec {
    /// Returns a spec that counts the calling thread on any CPU in user mode, without samples.
    pub fn new(kind: EventKind) -> Self {
        EventSpec {
            kind,
            pid: 0,
            cpu: -1,
            sampling: None,
            inherit: false,
            threads_only: false,
            exclude_kernel: true,
            exclude_user: false,
            exclude_idle: false,
            enable_on_exec: false,
            exclude_callchain_user: false,
            task_records: false,
            mapping_records: false,
            times: false,
        }
    }

    fn attr(&self) -> perf_event_attr {
        let mut attr = perf_event_attr::default();
        attr.size = size_of::<perf_event_attr>() as u32;
        (attr.type_, attr.config) = match self.kind {
            EventKind::Software(id) => (bindings::PERF_TYPE_SOFTWARE, id.into()),
            EventKind::Hardware(id) => (bindings::PERF_TYPE_HARDWARE, id.into()),
            EventKind::Raw { event_type, config } => (event_type, config),
        };
        if let Some(sampling) = self.sampling {
            attr.__bindgen_anon_1.sample_period = sampling.period;
            attr.sample_type = sampling.fields;
            attr.set_use_clockid(1);
            attr.clockid = libc::CLOCK_MONOTONIC;
        }
        if self.times {
            attr.read_format = u64::from(
                bindings::PERF_FORMAT_TOTAL_TIME_ENABLED | bindings::PERF_FORMAT_TOTAL_TIME_RUNNING,
            );
        }
        attr.set_inherit(self.inherit.into());
        attr.set_inherit_thread(self.threads_only.into());
        attr.set_exclude_kernel(self.exclude_kernel.into());
        attr.set_exclude_user(self.exclude_user.into());
        attr.set_exclude_idle(self.exclude_idle.into());
        // Hardware that cannot leave the kernel out refuses to leave the hypervisor out, too.
        attr.set_exclude_hv(self.exclude_kernel.into());
        attr.set_exclude_callchain_user(self.exclude_callchain_user.into());
        let has_records = self.task_records || self.mapping_records;
        attr.set_task(self.task_records.into());
        attr.set_comm(has_records.into());
        attr.set_comm_exec(has_records.into());
        attr.set_context_switch(self.task_records.into());
        attr.set_mmap(self.mapping_records.into());
        attr.set_mmap_data(self.mapping_records.into());
        attr.set_mmap2(self.mapping_records.into());
        attr.set_sample_id_all(has_records.into());
        attr.set_disabled(self.enable_on_exec.into());
        attr.set_enable_on_exec(self.enable_on_exec.into());
        attr
    }
}

/// Returns the time by the clock that samples have.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// An open event. Dropping it stops it.
#[derive(Debug)]
pub struct Event(File);

impl Event {
    /// Opens an event, with a file descriptor of its own.
    ///
    /// # Errors
    /// `EACCES` and `EPERM` mean that perf_event_paranoid forbids the event, `ENOENT` that the machine does
    /// not have it.
    pub fn open(spec: &EventSpec) -> io::Result<Event> {
        Event::of_attr(spec.attr(), spec)
    }

    /// Opens a probe of an instruction: it counts how often threads come to `offset` in a file. `event_type`
    /// is the number in /sys/bus/event_source/devices/uprobe/type. Each time costs the thread 1 to 2 µs.
    ///
    /// # Errors
    /// As those of [`Event::open`]; `EINVAL` means that the file has no instruction there.
    pub fn probe(spec: &EventSpec, event_type: u32, file: &CStr, offset: u64) -> io::Result<Event> {
        let mut attr = spec.attr();
        (attr.type_, attr.config) = (event_type, 0);
        attr.__bindgen_anon_3.uprobe_path = file.as_ptr() as u64;
        attr.__bindgen_anon_4.probe_offset = offset;
        Event::of_attr(attr, spec)
    }

    fn of_attr(mut attr: perf_event_attr, spec: &EventSpec) -> io::Result<Event> {
        let cloexec = libc::c_ulong::from(bindings::PERF_FLAG_FD_CLOEXEC);
        // SAFETY: attr is a live, initialised perf_event_attr that states its own size.
        let fd = unsafe {
            perf_event_open_sys::perf_event_open(&mut attr, spec.pid, spec.cpu, -1, cloexec)
        };
        if fd == -1 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is fresh, so nothing else owns it.
        Ok(Event(unsafe { File::from_raw_fd(fd) }))
    }

    /// Reads the count so far, not scaled.
    pub fn count(&self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        (&self.0).read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Reads the count and its times.
    ///
    /// # Errors
    /// Fails unless the event was opened with [`EventSpec::times`].
    pub fn scaled(&self) -> io::Result<Scaled> {
        let mut words = [[0; 8]; 3];
        (&self.0).read_exact(words.as_flattened_mut())?;
        let [value, enabled_ns, running_ns] = words.map(u64::from_ne_bytes);
        Ok(Scaled { value, enabled_ns, running_ns })
    }

    /// Stops the event, also in threads and children that inherited it.
    pub fn disable(&self) -> io::Result<()> {
        // SAFETY: an open perf event; the argument 0 means this event alone, not its group.
        super::mapping::check(unsafe {
            perf_event_open_sys::ioctls::DISABLE(self.0.as_raw_fd(), 0)
        })
    }

    /// Resumes or pauses the event, also in threads and children that inherited it.
    pub fn switch(&self, on: bool) -> io::Result<()> {
        if !on {
            return self.disable();
        }
        // SAFETY: an open perf event; the argument 0 means this event alone, not its group.
        super::mapping::check(unsafe { perf_event_open_sys::ioctls::ENABLE(self.0.as_raw_fd(), 0) })
    }

    /// Sends the event's samples to the ring of another event on the same CPU.
    pub fn redirect(&self, ring_owner: &Event) -> io::Result<()> {
        // SAFETY: both descriptors are open perf events.
        super::mapping::check(unsafe {
            perf_event_open_sys::ioctls::SET_OUTPUT(self.0.as_raw_fd(), ring_owner.0.as_raw_fd())
        })
    }
}

impl AsFd for Event {
    /// Returns a descriptor to poll: readable when the ring is half full, hung up when all tasks have ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A record of a ring.
#[derive(Debug, Clone, Copy)]
pub struct PerfRecord<'a> {
    /// The type: a `PERF_RECORD_` value.
    pub kind: u32,
    /// The `PERF_RECORD_MISC_` bits: the CPU's mode, or how a task left its CPU.
    pub misc: u16,
    /// The words after the header.
    pub words: &'a [u64],
}

/// Field of a sample: the instruction pointer.
pub const FIELD_IP: u64 = bindings::PERF_SAMPLE_IP as u64;
/// Field of a sample: process and thread.
pub const FIELD_TID: u64 = bindings::PERF_SAMPLE_TID as u64;
/// Field of a sample: nanoseconds of CLOCK_MONOTONIC.
pub const FIELD_TIME: u64 = bindings::PERF_SAMPLE_TIME as u64;
/// Field of a sample: the address that the access was to, of a page fault that of its page or in it.
pub const FIELD_ADDRESS: u64 = bindings::PERF_SAMPLE_ADDR as u64;
/// Field of a sample: number of the CPU.
pub const FIELD_CPU: u64 = bindings::PERF_SAMPLE_CPU as u64;
/// Field of a sample: the period that it was taken with.
pub const FIELD_PERIOD: u64 = bindings::PERF_SAMPLE_PERIOD as u64;
/// Field of a sample: the PMU's raw data, after its size.
pub const FIELD_RAW: u64 = bindings::PERF_SAMPLE_RAW as u64;
/// Field of a sample: the call chain.
pub const FIELD_CALLCHAIN: u64 = bindings::PERF_SAMPLE_CALLCHAIN as u64;

/// The type of [`PerfRecord`]s of a task that leaves its CPU ([`MISC_SWITCH_OUT`]) or gets one.
pub const RECORD_SWITCH: u32 = bindings::PERF_RECORD_SWITCH;
/// The type of [`PerfRecord`]s of the same, from an event that counts a CPU: the other task comes first.
pub const RECORD_SWITCH_CPU_WIDE: u32 = bindings::PERF_RECORD_SWITCH_CPU_WIDE;
/// The type of [`PerfRecord`]s of a new task.
pub const RECORD_FORK: u32 = bindings::PERF_RECORD_FORK;
/// The type of [`PerfRecord`]s of a task's end.
pub const RECORD_EXIT: u32 = bindings::PERF_RECORD_EXIT;
/// The type of [`PerfRecord`]s of a task's new name, as after an exec.
pub const RECORD_COMM: u32 = bindings::PERF_RECORD_COMM;
/// The bit of a [`RECORD_COMM`] of an exec.
pub const MISC_COMM_EXEC: u16 = bindings::PERF_RECORD_MISC_COMM_EXEC as u16;
/// The type of [`PerfRecord`]s of a new mapping, or one whose protection changed.
pub const RECORD_MMAP2: u32 = bindings::PERF_RECORD_MMAP2;
/// The bit of a [`RECORD_SWITCH`] by which the task leaves its CPU.
pub const MISC_SWITCH_OUT: u16 = bindings::PERF_RECORD_MISC_SWITCH_OUT as u16;
/// The bit of a [`RECORD_SWITCH`] by which the task was preempted.
pub const MISC_SWITCH_OUT_PREEMPT: u16 = bindings::PERF_RECORD_MISC_SWITCH_OUT_PREEMPT as u16;
/// The bits of [`PerfRecord::misc`] with the CPU's mode.
pub const MISC_CPUMODE_MASK: u16 = bindings::PERF_RECORD_MISC_CPUMODE_MASK as u16;
/// The mode of a sample in the kernel.
pub const MISC_KERNEL: u16 = bindings::PERF_RECORD_MISC_KERNEL as u16;
/// The mode of a sample in user code.
pub const MISC_USER: u16 = bindings::PERF_RECORD_MISC_USER as u16;

/// The type of [`PerfRecord`]s that are samples.
pub const RECORD_SAMPLE: u32 = bindings::PERF_RECORD_SAMPLE;
/// The type of [`PerfRecord`]s that count lost records in their second word.
pub const RECORD_LOST: u32 = bindings::PERF_RECORD_LOST;

/// The ring of an event, to which the kernel writes records.
#[derive(Debug)]
pub struct Ring {
    start: NonNull<u8>,
    data_len: usize,
    scratch: Vec<u64>,
}

// SAFETY: the mapping is owned, accessed only through `&mut self`, and independent of threads.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps a ring of `pages` data pages (a power of two) for an event.
    ///
    /// # Errors
    /// `EPERM` means that kernel.perf_event_mlock_kb and RLIMIT_MEMLOCK allow only a smaller ring.
    pub fn new(event: &Event, pages: usize) -> io::Result<Ring> {
        let page = rustix::param::page_size();
        let data_len = pages * page;
        // SAFETY: a fresh shared mapping of an open perf event, wherever there is room.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                page + data_len,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::SHARED,
                &event.0,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Ring { start, data_len, scratch: Vec::new() })
    }

    /// Returns the bytes of records that fit into the ring.
    pub fn capacity(&self) -> usize {
        self.data_len
    }

    /// Calls `each` with every record in the ring, oldest first, and frees their space.
    pub fn drain(&mut self, mut each: impl FnMut(PerfRecord<'_>)) {
        let control: *mut perf_event_mmap_page = self.start.as_ptr().cast();
        // SAFETY: the first page of the mapping is the kernel's control page. Its head and tail are aligned
        // u64s, which kernel and reader access only atomically.
        let (head, tail) = unsafe {
            (
                AtomicU64::from_ptr(&raw mut (*control).data_head),
                AtomicU64::from_ptr(&raw mut (*control).data_tail),
            )
        };
        let end = head.load(Ordering::Acquire);
        let mut at = tail.load(Ordering::Relaxed);
        while at < end {
            let header = self.word(at);
            let words = (header >> 48) as usize / 8;
            if words == 0 {
                break; // not a record: the ring is corrupt, so its content is dropped
            }
            self.scratch.clear();
            for index in 1..words as u64 {
                let word = self.word(at + index * 8);
                self.scratch.push(word);
            }
            let (kind, misc) = (header as u32, (header >> 32) as u16);
            each(PerfRecord { kind, misc, words: &self.scratch });
            at += words as u64 * 8;
        }
        fence(Ordering::SeqCst);
        tail.store(end, Ordering::Release);
    }

    /// Returns the word at a position that only grows. The lengths of records are multiples of 8, so none
    /// splits a word.
    fn word(&self, position: u64) -> u64 {
        let offset = (position as usize & (self.data_len - 1)) & !7;
        // SAFETY: offset < data_len, the data follow the control page, and offset is aligned to 8.
        unsafe {
            self.start
                .as_ptr()
                .add(rustix::param::page_size() + offset)
                .cast::<u64>()
                .read_volatile()
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let len = rustix::param::page_size() + self.data_len;
        // SAFETY: this is the mapping that `new` made, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_knows_how_long_it_ran() {
        let event = Event::open(&EventSpec { times: true, ..EventSpec::new(PAGE_FAULT) }).unwrap();
        // Larger than what malloc may keep for reuse.
        let memory = vec![1u8; 64 << 20];
        assert!(memory.iter().all(|b| *b == 1));
        let scaled = event.scaled().unwrap();
        assert!(scaled.value > 0 && scaled.running_ns > 0);
        assert_eq!(scaled.enabled_ns, scaled.running_ns, "software events share no counter");
    }

    #[test]
    fn counts_the_faults_of_this_thread() {
        let event = match Event::open(&EventSpec::new(PAGE_FAULT)) {
            Ok(event) => event,
            Err(error) => panic!("perf events are refused: {error}"),
        };
        let before = event.count().unwrap();
        // Larger than what malloc may keep for reuse.
        let memory = vec![1u8; 64 << 20];
        assert!(memory.iter().all(|b| *b == 1));
        assert!(event.count().unwrap() > before);
    }
}
