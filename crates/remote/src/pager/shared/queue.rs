//! The queue of clusters to evict, under its lock.

use super::*;
use crate::pager::table::ClusterMarks;

impl SharedPager {
    /// Queues a cluster with a resident page for eviction, unless it is queued.
    pub fn enqueue(&self, cluster: usize) {
        if self.table.mark_queued(cluster) {
            lock(&self.queue).push(cluster);
        }
    }

    /// Takes the next cluster to evict.
    pub fn next_victim(&self) -> Option<usize> {
        lock(&self.queue).take_next(&self.table)
    }

    /// Returns true if a cluster is the next to evict.
    pub fn is_next_victim(&self, cluster: usize) -> bool {
        lock(&self.queue).is_next(cluster)
    }

    /// Takes this cluster if it is the next victim. Returns false otherwise.
    pub fn take_victim(&self, cluster: usize) -> bool {
        lock(&self.queue).take(cluster, &self.table)
    }

    /// Returns the number of queued clusters.
    pub fn queued(&self) -> usize {
        lock(&self.queue).len()
    }
}
