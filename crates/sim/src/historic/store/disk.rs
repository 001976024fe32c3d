//! A disk that serves one request after the other: a seek unless the request continues the last
//! one, then the transfer.
//!
//! Invariant: requests end in the order in which they were made; the disk never serves two at once.

/// Constants of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskCosts {
    /// Sequential rate in bytes per second; above 0.
    pub bytes_per_s: u64,
    /// Time of a seek and half a rotation, before a request that does not continue the last one.
    pub seek_ns: u64,
    /// Half-width of the spread of a request's time, in percent.
    pub jitter_percent: u64,
}

/// A position on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskPosition {
    /// The file's number; swap has a number of its own.
    pub file: u32,
    /// Offset in bytes from the file's start.
    pub offset: u64,
}

/// A disk with its queue and head position.
#[derive(Debug, Clone)]
pub struct Disk {
    costs: DiskCosts,
    free_at: u64,
    head: Option<DiskPosition>,
}

impl Disk {
    /// Creates an idle disk, whose first request needs a seek.
    pub fn new(costs: DiskCosts) -> Self {
        Disk { costs, free_at: 0, head: None }
    }

    /// Reads or writes `bytes` at `place`, requested at `now`. Returns the time of completion in
    /// nanoseconds. `jitter` takes a time and the half-width of its spread in percent.
    pub fn transfer(
        &mut self,
        now: u64,
        place: DiskPosition,
        bytes: u64,
        jitter: impl FnOnce(u64, u64) -> u64,
    ) -> u64 {
        let seek = if self.head == Some(place) { 0 } else { self.costs.seek_ns };
        let took = jitter(seek + self.transfer_ns(bytes), self.costs.jitter_percent);
        self.head = Some(DiskPosition { offset: place.offset + bytes, ..place });
        self.free_at = self.free_at.max(now) + took;
        self.free_at
    }

    /// Returns the time in nanoseconds when all requests are complete.
    pub fn free_at(&self) -> u64 {
        self.free_at
    }

    /// Returns how many more requests of `bytes` may be queued at `now` if the queue holds `most`.
    pub fn room(&self, now: u64, bytes: u64, most: u64) -> u64 {
        let queued = self.free_at.saturating_sub(now).div_ceil(self.transfer_ns(bytes).max(1));
        most.saturating_sub(queued)
    }

    fn transfer_ns(&self, bytes: u64) -> u64 {
        (u128::from(bytes) * 1_000_000_000 / u128::from(self.costs.bytes_per_s)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: DiskCosts =
        DiskCosts { bytes_per_s: 1_000_000, seek_ns: 5_000, jitter_percent: 0 };

    fn at(file: u32, offset: u64) -> DiskPosition {
        DiskPosition { file, offset }
    }

    #[test]
    fn only_what_follows_saves_the_seek() {
        let mut disk = Disk::new(COSTS);
        let exact = |ns, _| ns;
        assert_eq!(disk.transfer(0, at(0, 0), 1000, exact), 1_005_000);
        assert_eq!(disk.transfer(2_000_000, at(0, 1000), 1000, exact), 3_000_000);
        assert_eq!(disk.transfer(2_000_000, at(1, 2000), 1000, exact), 4_005_000);
        assert_eq!(disk.free_at(), 4_005_000);
    }

    #[test]
    fn a_long_queue_has_no_room() {
        let mut disk = Disk::new(COSTS);
        assert_eq!(disk.room(7, 1000, 8), 8);
        disk.transfer(0, at(0, 0), 5000, |ns, _| ns);
        assert_eq!(disk.room(5_000, 1000, 8), 3);
        assert_eq!(disk.room(5_000, 1000, 4), 0);
    }
}
