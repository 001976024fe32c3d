//! Counts of stack distances: exact below 512, then 256 buckets an octave (within 0.4 %).
//!
//! The bounds of buckets are whole numbers. The sizes of real TLBs (multiples of 1/256 of their octave)
//! are bounds, so the misses at those sizes are exact.

const EXACT: u64 = 512;
const OCTAVE_BUCKETS: u64 = 256;
const FIRST_OCTAVE: u32 = EXACT.ilog2();

/// Weighted counts by distance.
#[derive(Clone, Debug, Default)]
pub(super) struct Distances {
    counts: Vec<u64>,
}

fn bucket(distance: u64) -> usize {
    if distance < EXACT {
        return distance as usize;
    }
    let octave = distance.ilog2();
    let within = (distance >> (octave - OCTAVE_BUCKETS.ilog2())) % OCTAVE_BUCKETS;
    (EXACT + u64::from(octave - FIRST_OCTAVE) * OCTAVE_BUCKETS + within) as usize
}

/// Returns the smallest distance that falls into a bucket.
fn bucket_start(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < EXACT {
        return bucket;
    }
    let octave = (bucket - EXACT) / OCTAVE_BUCKETS;
    let within = (bucket - EXACT) % OCTAVE_BUCKETS;
    (OCTAVE_BUCKETS + within) << (octave + 1)
}

impl Distances {
    pub fn add(&mut self, distance: u64, weight: u64) {
        let bucket = bucket(distance);
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += weight;
    }

    /// Returns the count at distances of at least `entries`, rounded up to the start of a bucket.
    pub fn at_least(&self, entries: u64) -> u64 {
        let bucket = bucket(entries);
        let from = if bucket_start(bucket) < entries { bucket + 1 } else { bucket };
        self.counts.iter().skip(from).sum()
    }

    /// Returns the smallest number of entries at which at most `allowed` counts lie at or beyond it.
    pub fn entries_for(&self, allowed: u64) -> u64 {
        let mut beyond = 0;
        for (bucket, &count) in self.counts.iter().enumerate().rev() {
            beyond += count;
            if beyond > allowed {
                return bucket_start(bucket + 1);
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_in_order_and_start_where_they_say() {
        for start in (0..40_000).chain([1 << 20, (1 << 20) + (1 << 12), 3 << 30, 1 << 40]) {
            let of_start = bucket_start(bucket(start));
            assert!(of_start <= start && start - of_start <= start / 256, "{start}: {of_start}");
            assert_eq!(bucket(of_start), bucket(start));
            assert!(bucket_start(bucket(start) + 1) > start);
        }
    }

    #[test]
    fn sizes_of_real_arrays_are_bounds() {
        for entries in [16, 64, 96, 512, 1024, 1536, 2048, 3072, 4096] {
            assert_eq!(bucket_start(bucket(entries)), entries);
        }
    }

    #[test]
    fn counts_beyond_and_entries_for_are_inverse() {
        let mut distances = Distances::default();
        for distance in [0, 0, 5, 63, 64, 1535, 1536, 5000] {
            distances.add(distance, 10);
        }
        assert_eq!(distances.at_least(0), 80);
        assert_eq!(distances.at_least(64), 40);
        assert_eq!(distances.at_least(1536), 20);
        assert_eq!(distances.entries_for(40), 64);
        assert_eq!(distances.entries_for(39), 65);
        assert_eq!(distances.entries_for(80), 0);
        assert_eq!(distances.entries_for(20), 1536);
    }
}
