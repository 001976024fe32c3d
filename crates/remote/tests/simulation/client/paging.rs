//! Writes and reads, as the real writer and reader make them.

use super::*;

impl Client {
    /// Writes a new version of a page. Returns true when it is done.
    pub async fn put(&self, links: &mut Links, page: u64, version: u64) -> bool {
        let begun = self.world.now();
        let is_done = self.try_to_put(links, page, version).await;
        self.longest_put.set(self.longest_put.get().max(self.world.now() - begun));
        is_done
    }

    async fn try_to_put(&self, links: &mut Links, page: u64, version: u64) -> bool {
        let until = self.world.now() + UNREACHABLE + 1000 * MS;
        let bytes = page_bytes(page, version);
        let (mut acked, mut wanted) = (Acked::default(), ServerSet::EMPTY);
        while self.world.now() < until {
            if wanted.is_empty() {
                let targets = self.replicator.borrow_mut().targets(at(page), &mut acked);
                match targets {
                    Ok(targets) => wanted = targets,
                    Err(PlacementError::Full) => {
                        self.full.set(self.full.get() + 1);
                        return false;
                    }
                    Err(_) => {
                        self.world.sleep(50 * MS).await;
                        continue;
                    }
                }
            }
            let mut is_refused = false;
            for server in wanted.iter() {
                // Take the lease first: a later removal of the server voids requests under it.
                let leased = self.attach(links, server, false).await;
                let is_current = self.replicator.borrow().is_current(at(page), server);
                if leased.is_ok() && !is_current && self.flaw != Flaw::CleansWithoutFence {
                    continue;
                }
                self.be_preempted().await;
                let sent = match leased {
                    Ok((wire, lease)) => {
                        let frame = put_frame(lease, page, false, &bytes);
                        let call = self.world.call_of_run(wire, frame, self.load.run_pages);
                        let reply = call.await.ok_or(Trouble::Broken);
                        reply.and_then(|reply| match parse(&reply).0 {
                            Reply::Failed(failure) => Err(Trouble::Failed(failure)),
                            _ => Ok(()),
                        })
                    }
                    Err(trouble) => Err(trouble),
                };
                match sent {
                    Ok(_) => {
                        acked.insert(server);
                        self.reset_strikes(server, RequestKind::Write);
                    }
                    Err(Trouble::Failed(Failure::Full { .. })) => {
                        if !self.replicator.borrow_mut().replace_full_server(at(page), server) {
                            self.full.set(self.full.get() + 1);
                            return false;
                        }
                        is_refused = true;
                    }
                    Err(trouble) => {
                        self.record_error(links, server, trouble, Some(RequestKind::Write)).await
                    }
                }
                self.be_preempted().await;
            }
            if is_refused {
                wanted = ServerSet::EMPTY;
                continue;
            }
            if self.flaw == Flaw::ForgetsNewcomers && wanted.minus(acked.servers()).is_empty() {
                return true;
            }
            if self.flaw == Flaw::OldAcknowledgements {
                let servers = acked.servers();
                acked = Acked::default();
                let _ = self.replicator.borrow_mut().targets(at(page), &mut acked);
                servers.iter().for_each(|server| acked.insert(server));
            }
            if self.replicator.borrow().is_settled(at(page), acked) {
                return true;
            }
            let settled = self.replicator.borrow_mut().settle(at(page), acked);
            match settled {
                Settled::Done => return true,
                Settled::Send(missing) => wanted = missing,
                Settled::Again => wanted = ServerSet::EMPTY,
            }
        }
        false
    }

    /// Reads a page. Returns false if it is lost.
    pub async fn get(&self, links: &mut Links, page: u64, version: u64) -> bool {
        let until = self.world.now() + UNREACHABLE + 1000 * MS;
        let right = page_bytes(page, version);
        while self.world.now() < until {
            let plan = self.replicator.borrow().read_plan(at(page));
            let mut unsure = !plan.waiting_for.is_empty();
            for server in plan.order() {
                let ask =
                    |on| frame(Request::Get { on, first: page, count: 1, with_checksums: false });
                match self.call_for(links, *server, 1, ask).await {
                    Ok(reply) if parse(&reply).1 == right => {
                        self.reset_strikes(*server, RequestKind::Read);
                        return true;
                    }
                    Ok(_) if self.replicator.borrow().complete(at(page)).has(*server) => {
                        self.bad_replicas.borrow_mut().push((*server, page, right.clone()));
                    }
                    Ok(_) | Err(Trouble::Failed(Failure::NotHeld { .. })) => {}
                    Err(trouble) => {
                        unsure = true;
                        self.record_error(links, *server, trouble, Some(RequestKind::Read)).await;
                    }
                }
            }
            if !unsure && plan == self.replicator.borrow().read_plan(at(page)) {
                let unreported = !self.reported.borrow().contains(&at(page));
                self.lost_unreported.set(self.lost_unreported.get() + unreported as u64);
                return false;
            }
            self.world.sleep(20 * MS).await;
        }
        false
    }
}
