//! Snapshots of the region for the child of a fork, as the real monitor makes them.

use super::*;

impl Client {
    /// Makes a snapshot on each server that is up. Returns the client of the child, or `None` if no
    /// snapshot has some of the pages. Nothing is written meanwhile.
    pub async fn fork(&self, links: &mut Links) -> Option<Client> {
        let mut remotes = HashMap::new();
        let up = self.replicator.borrow().up();
        for server in up.iter() {
            if let Some(remote) = self.snapshot(links, server).await {
                remotes.insert(server, remote);
            }
        }
        if self.flaw == Flaw::ForksBesideRepairs {
            self.world.sleep(self.world.below(500 * MS)).await;
        }
        let mut replicator = self.replicator.borrow().of_region(REGION);
        let servers = 0..self.world.name_count() as ServerId;
        let without = servers.filter(|server| !remotes.contains_key(server));
        let damaged: usize = without.map(|server| replicator.mark_gone(server).len()).sum();
        (damaged == 0).then(|| Client {
            replicator: RefCell::new(replicator),
            epochs: self.epochs.clone(),
            remotes: RefCell::new(remotes),
            aliases: self.aliases.clone(),
            done: self.done.clone(),
            ..Client::new(self.world.clone(), self.copies, self.flaw, self.load)
        })
    }

    /// Drops the region on each server, as a child does that ends.
    pub async fn end(&self, links: &mut Links) {
        let up = self.replicator.borrow().up();
        for server in up.iter() {
            let dropped =
                self.call_on(links, server, |on| frame(Request::Drop { on, at_end: false }));
            // A server without the region has nothing to drop.
            let _ = dropped.await;
        }
    }

    async fn snapshot(&self, links: &mut Links, server: ServerId) -> Option<Remote> {
        let mut token = [0; 32];
        token[..8].copy_from_slice(&self.world.below(u64::MAX).to_le_bytes());
        // Twice: another task's fence may have voided the lease.
        for _ in 0..2 {
            let asked =
                self.call_on(links, server, |on| frame(Request::Snapshot { on, token: &token }));
            match asked.await {
                Ok(reply) => {
                    let Reply::Created(lease) = parse(&reply).0 else { panic!("no region") };
                    return Some(Remote { number: lease.region, token });
                }
                Err(trouble @ Trouble::Failed(Failure::StaleLease)) => {
                    self.record_error(links, server, trouble, None).await;
                }
                Err(Trouble::Broken | Trouble::Restarted) => {
                    self.close(links, server);
                    return None;
                }
                Err(Trouble::Failed(_)) => return None,
            }
        }
        None
    }
}
