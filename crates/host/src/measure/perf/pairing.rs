//! The pairing of all rings' records into times of faults.
//!
//! In a CPU's ring, the end after a begin belongs to the same fault, unless the thread left the CPU in
//! between. Only then are the two kept by thread, and paired in the order of time over all rings: the
//! thread may continue on another CPU.
//!
//! Source: the layout of records in perf_event_open(2).

use super::FaultTimes;
use crate::sys::perf::{PerfRecord, RECORD_LOST, RECORD_SAMPLE, RECORD_SWITCH};
use std::collections::HashMap;

/// The begin or the end of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edge {
    Begin,
    MinorEnd,
    MajorEnd,
}

/// The content of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Said {
    Fault(Edge, u64),
    /// A thread of the job leaves or gets the CPU.
    Switch(u32),
    Lost(u64),
}

fn said(record: &PerfRecord<'_>) -> Option<Said> {
    match (record.kind, record.words) {
        (RECORD_SAMPLE, [time_ns]) => Some(Said::Fault(Edge::Begin, *time_ns)),
        (RECORD_SAMPLE, [time_ns, _period]) => Some(Said::Fault(Edge::MinorEnd, *time_ns)),
        (RECORD_SAMPLE, [time_ns, _cpu, _period]) => Some(Said::Fault(Edge::MajorEnd, *time_ns)),
        (RECORD_SWITCH, [ids, _time]) => Some(Said::Switch((ids >> 32) as u32)),
        (RECORD_LOST, [_, count, ..]) => Some(Said::Lost(*count)),
        _ => None,
    }
}

/// The state of one CPU's ring after the records so far.
#[derive(Debug)]
pub struct Stream {
    /// The thread of the job that has the CPU or had it last; `None` after lost records.
    tid: Option<u32>,
    begun_ns: Option<u64>,
}

impl Stream {
    /// Starts on a CPU where only the watched thread has run.
    pub fn new(watched: u32) -> Stream {
        Stream { tid: Some(watched), begun_ns: None }
    }
}

/// A begin or an end whose partner is on the other side of a context switch.
#[derive(Debug, Clone, Copy)]
struct Mark {
    time_ns: u64,
    tid: u32,
    edge: Edge,
}

/// The pairs of begins and ends so far.
pub struct Pairing {
    ignored: u32,
    marks: Vec<Mark>,
    begun: HashMap<u32, u64>,
    ends_alone: bool,
    /// The fault times that were paired so far.
    pub times: FaultTimes,
}

impl Pairing {
    /// Starts without any pair. It ignores the faults of one thread.
    pub fn new(ignored: u32) -> Pairing {
        Pairing {
            ignored,
            marks: Vec::new(),
            begun: HashMap::new(),
            ends_alone: false,
            times: FaultTimes::new(),
        }
    }

    /// Stops counting an end without a begin as a loss, as from now on begins are only sampled in
    /// windows.
    pub fn expect_ends_alone(&mut self) {
        self.ends_alone = true;
    }

    /// Returns true if a fault has begun and its end has not been read.
    pub fn has_open_fault<'a>(&self, mut streams: impl Iterator<Item = &'a Stream>) -> bool {
        let waits = self.marks.iter().any(|mark| mark.edge == Edge::Begin);
        waits || !self.begun.is_empty() || streams.any(|stream| stream.begun_ns.is_some())
    }

    /// Drops faults that began before this time. A task that is killed during a fault never ends it, and
    /// a window would stay open for it.
    pub fn give_up(&mut self, before_ns: u64) {
        let begun = self.begun.len();
        self.begun.retain(|_, begun_ns| *begun_ns >= before_ns);
        self.times.unpaired_count += (begun - self.begun.len()) as u64;
    }

    fn end_alone(&mut self) {
        self.times.unpaired_count += u64::from(!self.ends_alone);
    }

    /// Takes the next record of a CPU.
    pub fn hear(&mut self, stream: &mut Stream, record: &PerfRecord<'_>) {
        match said(record) {
            Some(Said::Fault(..)) if stream.tid == Some(self.ignored) => {}
            Some(Said::Fault(Edge::Begin, time_ns)) => stream.begun_ns = Some(time_ns),
            Some(Said::Fault(edge, time_ns)) => match (stream.begun_ns.take(), stream.tid) {
                (Some(begun_ns), _) => self.record(edge, begun_ns, time_ns),
                (None, Some(tid)) => self.marks.push(Mark { time_ns, tid, edge }),
                (None, None) => self.end_alone(),
            },
            Some(Said::Switch(tid)) => {
                if let (Some(time_ns), Some(tid)) = (stream.begun_ns.take(), stream.tid) {
                    self.marks.push(Mark { time_ns, tid, edge: Edge::Begin });
                }
                stream.tid = Some(tid);
            }
            // A lost record may have been a context switch.
            Some(Said::Lost(count)) => {
                self.times.lost_count += count;
                *stream = Stream { tid: None, begun_ns: None };
            }
            None => {}
        }
    }

    /// Pairs the marks up to this time. Later marks wait, as other rings may still hold earlier ones.
    pub fn pair_until(&mut self, horizon_ns: u64) {
        self.marks.sort_by_key(|mark| mark.time_ns);
        let settled = self.marks.partition_point(|mark| mark.time_ns <= horizon_ns);
        let later = self.marks.split_off(settled);
        for mark in std::mem::replace(&mut self.marks, later) {
            if mark.edge == Edge::Begin {
                self.begun.insert(mark.tid, mark.time_ns);
            } else if let Some(begun_ns) = self.begun.remove(&mark.tid) {
                self.record(mark.edge, begun_ns, mark.time_ns);
            } else {
                self.end_alone();
            }
        }
    }

    fn record(&mut self, edge: Edge, begun_ns: u64, time_ns: u64) {
        let histogram = match edge {
            Edge::MajorEnd => &mut self.times.major,
            Edge::Begin | Edge::MinorEnd => &mut self.times.minor,
        };
        histogram.saturating_record(time_ns.saturating_sub(begun_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WATCHED: u32 = 7;

    /// Pairs the rings of two CPUs, read one after the other as the reader does.
    fn pairing(cpus: [&[(u32, &[u64])]; 2]) -> Pairing {
        let mut pairing = Pairing::new(WATCHED);
        for records in cpus {
            let mut stream = Stream::new(WATCHED);
            for (kind, words) in records {
                pairing.hear(&mut stream, &PerfRecord { kind: *kind, misc: 0, words });
            }
        }
        pairing
    }

    fn switch(tid: u64) -> [u64; 2] {
        [tid << 32, 0]
    }

    #[test]
    fn a_fault_that_moves_to_another_cpu_is_paired_by_thread_in_the_order_of_time() {
        let mut pairing = pairing([
            // Thread 1 comes back from CPU 1, so its end is read first; then its next fault.
            &[
                (RECORD_SWITCH, &switch(1)),
                (RECORD_SAMPLE, &[900, 0, 1]),
                (RECORD_SAMPLE, &[950]),
                (RECORD_SAMPLE, &[960, 1]),
            ],
            // It begins a fault and is switched out for thread 2, which has a fault of its own.
            &[
                (RECORD_SWITCH, &switch(1)),
                (RECORD_SAMPLE, &[100]),
                (RECORD_SWITCH, &switch(1)),
                (RECORD_SWITCH, &switch(2)),
                (RECORD_SAMPLE, &[150]),
                (RECORD_SAMPLE, &[250, 1]),
            ],
        ]);
        let counts = |p: &Pairing| (p.times.minor.len(), p.times.major.len());
        pairing.pair_until(800);
        assert_eq!(counts(&pairing), (2, 0));
        pairing.pair_until(u64::MAX);
        assert_eq!(counts(&pairing), (2, 1));
        assert_eq!((pairing.times.minor.max(), pairing.times.major.max()), (100, 800));
        assert_eq!(pairing.times.unpaired_count, 0);
    }

    #[test]
    fn an_end_without_a_begin_is_counted() {
        let mut pairing = pairing([&[(RECORD_SWITCH, &switch(1)), (RECORD_SAMPLE, &[5, 1])], &[]]);
        pairing.pair_until(u64::MAX);
        assert_eq!(pairing.times.unpaired_count, 1);
        assert!(pairing.times.minor.is_empty());
    }

    #[test]
    fn a_fault_is_open_until_its_end_was_heard_wherever_that_is() {
        let mut pairing = Pairing::new(WATCHED);
        let mut cpus = [Stream::new(WATCHED), Stream::new(WATCHED)];
        let mut open_after = |cpu: usize, kind: u32, words: &[u64]| {
            pairing.hear(&mut cpus[cpu], &PerfRecord { kind, misc: 0, words });
            let unsettled = pairing.has_open_fault(cpus.iter());
            pairing.pair_until(u64::MAX);
            (unsettled, pairing.has_open_fault(cpus.iter()))
        };
        assert_eq!(open_after(0, RECORD_SWITCH, &switch(1)), (false, false));
        assert_eq!(open_after(0, RECORD_SAMPLE, &[100]), (true, true));
        assert_eq!(open_after(0, RECORD_SWITCH, &switch(1)), (true, true));
        assert_eq!(open_after(1, RECORD_SWITCH, &switch(1)), (true, true));
        assert_eq!(open_after(1, RECORD_SAMPLE, &[170, 1]), (true, false));
        // The end of a fault that began before the window.
        assert_eq!(open_after(1, RECORD_SAMPLE, &[190, 1]), (false, false));
        assert_eq!(pairing.times.minor.max(), 70);
    }

    #[test]
    fn a_fault_that_never_ends_is_given_up() {
        let begun: &[(u32, &[u64])] =
            &[(RECORD_SWITCH, &switch(1)), (RECORD_SAMPLE, &[100]), (RECORD_SWITCH, &switch(1))];
        let mut pairing = pairing([begun, &[]]);
        pairing.pair_until(u64::MAX);
        let is_open = |pairing: &Pairing| pairing.has_open_fault(std::iter::empty());
        pairing.give_up(100);
        assert!(is_open(&pairing));
        pairing.give_up(101);
        assert!(!is_open(&pairing));
        assert_eq!(pairing.times.unpaired_count, 1);
    }

    #[test]
    fn between_windows_an_end_without_a_begin_is_no_loss() {
        let mut pairing = Pairing::new(WATCHED);
        pairing.expect_ends_alone();
        let mut stream = Stream::new(1);
        pairing.hear(&mut stream, &PerfRecord { kind: RECORD_SAMPLE, misc: 0, words: &[5, 1] });
        pairing.pair_until(u64::MAX);
        assert_eq!((pairing.times.unpaired_count, pairing.times.minor.len()), (0, 0));
    }

    #[test]
    fn the_watched_threads_own_faults_are_left_out() {
        let fault: &[(u32, &[u64])] = &[(RECORD_SAMPLE, &[1]), (RECORD_SAMPLE, &[2, 1])];
        let mut pairing = pairing([fault, fault]);
        pairing.pair_until(u64::MAX);
        assert_eq!((pairing.times.minor.len(), pairing.times.unpaired_count), (0, 0));
    }

    #[test]
    fn nothing_is_paired_over_a_loss() {
        let mut pairing = pairing([
            &[
                (RECORD_SWITCH, &switch(1)),
                (RECORD_SAMPLE, &[10]),
                (RECORD_LOST, &[0, 4]),
                (RECORD_SAMPLE, &[90, 1]),
                (RECORD_SAMPLE, &[100]),
                (RECORD_SAMPLE, &[101, 1]),
            ],
            &[],
        ]);
        pairing.pair_until(u64::MAX);
        let times = &pairing.times;
        assert_eq!((times.lost_count, times.unpaired_count), (4, 1));
        assert_eq!((times.minor.len(), times.minor.max()), (1, 1));
    }
}
