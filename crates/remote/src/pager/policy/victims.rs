//! The queue of clusters to evict: FIFO with a second chance.

use super::super::table::ClusterMarks;
use std::collections::VecDeque;

/// The clusters with resident pages, the next victim first.
#[derive(Debug, Default)]
pub struct VictimQueue(VecDeque<u32>);

impl VictimQueue {
    /// Adds a cluster that was just marked as queued.
    pub fn push(&mut self, cluster: usize) {
        self.0.push_back(cluster as u32);
    }

    /// Takes the next cluster to evict: FIFO, but clusters with a recent soft refault get a second
    /// chance.
    pub fn take_next(&mut self, all: &impl ClusterMarks) -> Option<usize> {
        for _ in 0..self.0.len() {
            let cluster = self.0.pop_front()?;
            if !all.take_refaulted(cluster as usize) {
                all.mark_unqueued(cluster as usize);
                return Some(cluster as usize);
            }
            self.0.push_back(cluster);
        }
        let cluster = self.0.pop_front()? as usize;
        all.mark_unqueued(cluster);
        Some(cluster)
    }

    /// Takes this cluster if it is the next victim. Returns false otherwise.
    pub fn take(&mut self, cluster: usize, all: &impl ClusterMarks) -> bool {
        if !self.is_next(cluster) || all.take_refaulted(cluster) {
            return false;
        }
        self.0.pop_front();
        all.mark_unqueued(cluster);
        true
    }

    /// Returns true if a cluster is the next to evict.
    pub fn is_next(&self, cluster: usize) -> bool {
        self.0.front().is_some_and(|next| *next as usize == cluster)
    }

    /// Returns the number of queued clusters.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the queued clusters, the next victim first.
    pub fn clusters(&self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|cluster| *cluster as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::table::{CLUSTER_PAGES, PageTable};
    use super::*;

    #[test]
    fn a_refaulted_cluster_goes_round_once_more() {
        let table = PageTable::new(4 * CLUSTER_PAGES).unwrap();
        let mut queue = VictimQueue::default();
        for cluster in 0..4 {
            assert!(table.mark_queued(cluster));
            queue.push(cluster);
        }
        table.hold(0).mark_refaulted();
        table.hold(2).mark_refaulted();
        assert_eq!(queue.take_next(&table), Some(1));
        assert!(queue.is_next(2) && !queue.take(2, &table), "it was refaulted");
        assert!(queue.take(2, &table), "the mark is gone");
        assert_eq!((queue.clusters().collect::<Vec<_>>(), queue.len()), (vec![3, 0], 2));
        assert!(table.mark_queued(1) && !table.mark_queued(3));
        // If all are marked, the oldest leaves all the same.
        table.hold(3).mark_refaulted();
        table.hold(0).mark_refaulted();
        assert_eq!(queue.take_next(&table), Some(3));
        assert_eq!((queue.take_next(&table), queue.take_next(&table)), (Some(0), None));
    }
}
