//! The queue of clusters to evict: FIFO with a second chance.

use super::*;

impl SharedPager {
    /// Queues a cluster with a resident page for eviction, unless it is queued.
    pub fn enqueue(&self, cluster: usize) {
        if self.table.mark_queued(cluster) {
            lock(&self.queue).push_back(cluster as u32);
        }
    }

    /// Returns the next cluster to evict: FIFO, but clusters with a recent soft refault get a second
    /// chance.
    pub fn next_victim(&self) -> Option<usize> {
        let mut queue = lock(&self.queue);
        for _ in 0..queue.len() {
            let cluster = queue.pop_front()?;
            if !self.table.take_refaulted(cluster as usize) {
                self.table.mark_unqueued(cluster as usize);
                return Some(cluster as usize);
            }
            queue.push_back(cluster);
        }
        let cluster = queue.pop_front()? as usize;
        self.table.mark_unqueued(cluster);
        Some(cluster)
    }

    /// Returns true if a cluster is the next to evict.
    pub fn is_next_victim(&self, cluster: usize) -> bool {
        lock(&self.queue).front().is_some_and(|next| *next as usize == cluster)
    }

    /// Takes this cluster if it is the next victim. Returns false otherwise.
    pub fn take_victim(&self, cluster: usize) -> bool {
        let mut queue = lock(&self.queue);
        let is_next = queue.front().is_some_and(|next| *next as usize == cluster);
        if !is_next || self.table.take_refaulted(cluster) {
            return false;
        }
        queue.pop_front();
        self.table.mark_unqueued(cluster);
        true
    }

    /// Returns the number of queued clusters.
    pub fn queued(&self) -> usize {
        lock(&self.queue).len()
    }
}
