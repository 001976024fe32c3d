//! The queue of future events.
//!
//! Invariant: events leave in the order of their times; events of the same time, in the order of insertion.

use crate::historic::sched::TaskId;

/// Something that happens at a point of virtual time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A task's wait of this number is over.
    Wake { task: TaskId, wait_number: u64 },
    /// The scheduler's event of each second.
    Second,
    /// A point of the series.
    Sample,
}

/// The future events, the next one last. There are few of them, and most are due soon.
#[derive(Debug, Default)]
pub(super) struct EventQueue(Vec<(u64, Event)>);

impl EventQueue {
    /// Inserts an event behind those of the same time.
    pub fn add(&mut self, time: u64, event: Event) {
        let place = self.0.partition_point(|(other, _)| *other > time);
        self.0.insert(place, (time, event));
    }

    /// Returns the time of the next event; `u64::MAX` if there is none.
    #[inline(always)]
    pub fn next_ns(&self) -> u64 {
        self.0.last().map_or(u64::MAX, |(time, _)| *time)
    }

    /// Takes the next one, if it is due at `now`.
    #[inline(always)]
    pub fn due(&mut self, now: u64) -> Option<(u64, Event)> {
        self.0.pop_if(|(time, _)| *time <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_the_order_of_times_and_then_of_arrival() {
        let mut events = EventQueue::default();
        let wake = |task| Event::Wake { task: TaskId(task), wait_number: 0 };
        for (time, event) in
            [(20, wake(0)), (10, wake(1)), (20, wake(2)), (30, Event::Second), (10, Event::Sample)]
        {
            events.add(time, event);
        }
        assert_eq!(events.next_ns(), 10);
        let due: Vec<_> = std::iter::from_fn(|| events.due(20)).collect();
        assert_eq!(due, [(10, wake(1)), (10, Event::Sample), (20, wake(0)), (20, wake(2))]);
        assert_eq!((events.next_ns(), events.due(29)), (30, None));
    }
}
