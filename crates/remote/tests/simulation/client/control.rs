//! The control thread: polls the servers, admits them again and repairs chunks.

use super::*;

impl Client {
    /// Runs one round of the control thread: polls the servers, then repairs chunks.
    pub async fn control(&self, links: &mut Links) {
        for server in 0..self.world.name_count() as ServerId {
            let availability = self.replicator.borrow().server(server).availability;
            let polled = match availability {
                Availability::Up | Availability::Draining => self.status(links, server).await,
                Availability::Down | Availability::Gone => {
                    self.try_to_reconnect(links, server).await
                }
            };
            if let Err(trouble) = polled {
                self.record_error(links, server, trouble, None).await;
            }
        }
        self.repair_bad_replicas(links).await;
        let mut from = ChunkAt { region: REGION, chunk: 0 };
        loop {
            let repairable = self.replicator.borrow().next_repairable(from);
            let Some(at) = repairable else { return };
            from = ChunkAt { chunk: at.chunk + 1, ..at };
            let work = self.replicator.borrow_mut().plan_repair(at);
            let Some(work) = work else { continue };
            match self.repair(links, work).await {
                Ok(()) => from = at,
                Err((server, kind, trouble)) => {
                    self.record_error(links, server, trouble, Some(kind)).await;
                }
            }
        }
    }

    async fn status(&self, links: &mut Links, server: ServerId) -> Result<(), Trouble> {
        let (wire, _) = self.attach(links, server, false).await?;
        let reply = self.world.call(wire, frame(Request::Status)).await.ok_or(Trouble::Broken)?;
        let Reply::Status(status) = parse(&reply).0 else { return Err(Trouble::Broken) };
        let used = (status.pages_total - status.pages_free) * self.load.run_pages;
        self.replicator.borrow_mut().record_status(
            server,
            status.pages_total,
            status.pages_total.saturating_sub(used),
            status.draining,
        );
        self.down_since.borrow_mut().remove(&server);
        Ok(())
    }

    /// Returns the open link to a server, if the server answers on it.
    async fn answers(&self, links: &Links, server: ServerId) -> Option<Wire> {
        let (wire, _) = links.wires.get(&server).copied()?;
        let is_same = wire.epoch == self.epochs.borrow()[server as usize];
        self.world.call(wire, frame(Request::Status)).await.filter(|_| is_same).map(|_| wire)
    }

    async fn try_to_reconnect(&self, links: &mut Links, server: ServerId) -> Result<(), Trouble> {
        if self.flaw == Flaw::ClosesLinks {
            self.close(links, server);
        }
        let now = self.world.now();
        let since = *self.down_since.borrow_mut().entry(server).or_insert(now);
        if self.is_shunned(server) {
            // A shunned server is not silent.
            self.down_since.borrow_mut().insert(server, now);
            return Ok(());
        }
        let wire = match self.answers(links, server).await {
            Some(wire) => Ok(wire),
            None => self.world.connect(server as usize).await,
        };
        let wire = match wire {
            Ok(wire) => wire,
            Err(why) => {
                if why == NoWire::TurnedAway && self.flaw != Flaw::ClosesLinks {
                    self.down_since.borrow_mut().insert(server, now);
                }
                let early = matches!(self.flaw, Flaw::GivesUpEarly | Flaw::ClosesLinks);
                let unreachable = if early { UNREACHABLE / 3 } else { UNREACHABLE };
                if self.replicator.borrow().server(server).availability == Availability::Down {
                    match now - since {
                        absent if absent >= unreachable && early => self.gone(server),
                        absent if absent >= unreachable => self.silent(server),
                        absent if absent >= REPAIR_AFTER => {
                            self.replicator.borrow_mut().give_up(server);
                        }
                        _ => {}
                    }
                }
                return Ok(());
            }
        };
        let is_other = |(other, epoch): (ServerId, &u64)| {
            other != server && *epoch == wire.epoch && !self.aliases.borrow().has(other)
        };
        if self.flaw != Flaw::TwoNamesAreTwo && (0..).zip(&*self.epochs.borrow()).any(is_other) {
            self.aliases.borrow_mut().insert(server);
            self.world.give_up(wire);
            return Ok(());
        }
        self.aliases.borrow_mut().remove(server);
        if links.wires.get(&server).is_some_and(|(known, _)| *known != wire) {
            self.close(links, server);
        }
        links.wires.insert(server, (wire, None));
        let known = self.epochs.borrow()[server as usize];
        let is_same = known == wire.epoch;
        if !is_same || !self.fence_and_discard(links, server).await? {
            self.recreate_regions(links, server, wire).await?;
        }
        self.replicator.borrow_mut().readmit_server(server);
        self.status(links, server).await
    }

    /// Repairs replicas that were found damaged.
    async fn repair_bad_replicas(&self, links: &mut Links) {
        let bad = std::mem::take(&mut *self.bad_replicas.borrow_mut());
        for (server, page, right) in bad {
            if self.flaw != Flaw::LeavesDamage {
                let put = |on| put_frame(on, page, true, &right);
                if let Err(trouble) = self.call_on(links, server, put).await {
                    self.record_error(links, server, trouble, Some(RequestKind::Write)).await;
                }
            }
        }
    }

    async fn fence_and_discard(
        &self,
        links: &mut Links,
        server: ServerId,
    ) -> Result<bool, Trouble> {
        match self.attach(links, server, true).await {
            Ok(_) => {}
            Err(Trouble::Failed(Failure::NoRegion | Failure::Denied)) => return Ok(false),
            Err(trouble) => return Err(trouble),
        }
        let stale_runs = self.replicator.borrow_mut().stale_runs(server);
        if self.flaw != Flaw::NoCleaning {
            for (_, first, count) in stale_runs {
                let discard = |on| frame(Request::Discard { on, first, count });
                self.call_on(links, server, discard).await?;
            }
        }
        self.be_preempted().await;
        if self.flaw == Flaw::ForgetsLeaving {
            self.replicator.borrow_mut().stale_runs(server);
        }
        Ok(true)
    }

    async fn recreate_regions(
        &self,
        links: &mut Links,
        server: ServerId,
        wire: Wire,
    ) -> Result<(), Trouble> {
        self.gone(server);
        let mut token = [0; 32];
        token[..8].copy_from_slice(&self.world.below(u64::MAX).to_le_bytes());
        let create =
            Request::Create { pages: self.load.region_pages, overcommit: true, token: &token };
        let reply = self.world.call(wire, frame(create)).await.ok_or(Trouble::Broken)?;
        let Reply::Created(lease) = parse(&reply).0 else { return Err(Trouble::Broken) };
        self.remotes.borrow_mut().insert(server, Remote { number: lease.region, token });
        links.wires.insert(server, (wire, Some(lease)));
        self.epochs.borrow_mut()[server as usize] = wire.epoch;
        Ok(())
    }

    async fn repair(
        &self,
        links: &mut Links,
        work: Repair,
    ) -> Result<(), (ServerId, RequestKind, Trouble)> {
        match work {
            Repair::Clean { at, server } => {
                let (first, count) = (at.chunk * CHUNK_PAGES, CHUNK_PAGES);
                let discard = |on| frame(Request::Discard { on, first, count });
                let fence = self.flaw != Flaw::CleansWithoutFence;
                let fenced = self.attach(links, server, fence).await;
                fenced.map_err(|trouble| (server, RequestKind::Write, trouble))?;
                let done = self.call_on(links, server, discard).await;
                done.map_err(|trouble| (server, RequestKind::Write, trouble))?;
                self.replicator.borrow_mut().finish_clean(at, server);
            }
            Repair::Copy { at, from, to, version } => {
                let first = at.chunk * CHUNK_PAGES;
                let held = |on| frame(Request::Held { on, first, count: CHUNK_PAGES as u16 });
                let reply = self.call_on(links, from, held).await;
                let reply = reply.map_err(|trouble| (from, RequestKind::Read, trouble))?;
                let Reply::Bitmap { bits, count } = parse(&reply).0 else { panic!("no bitmap") };
                if count != CHUNK_PAGES as u16 && self.flaw != Flaw::BelievesBitmaps {
                    return Err((from, RequestKind::Read, Trouble::Broken));
                }
                let held = |page: &u64| bits[*page as usize / 8] >> (page % 8) & 1 == 1;
                for page in (0..CHUNK_PAGES).filter(held).map(|page| first + page) {
                    self.copy(links, page, from, to).await?;
                }
                self.replicator.borrow_mut().finish_copy(at, from, to, version);
            }
        }
        Ok(())
    }

    /// Fetches a page from a server. Returns `None` if it is damaged there.
    async fn fetch(
        &self,
        links: &mut Links,
        page: u64,
        from: ServerId,
    ) -> Result<Option<Vec<u8>>, (ServerId, RequestKind, Trouble)> {
        let get = |on| frame(Request::Get { on, first: page, count: 1, with_checksums: true });
        let reply = self.call_on(links, from, get).await;
        let reply = reply.map_err(|trouble| (from, RequestKind::Read, trouble))?;
        let (Reply::Pages { checksums, .. }, bytes) = parse(&reply) else { panic!("no pages") };
        let is_good = wire::checksums(checksums).eq([WireChecksum::of(bytes)]);
        Ok(is_good.then(|| bytes.to_vec()))
    }

    async fn copy(
        &self,
        links: &mut Links,
        page: u64,
        from: ServerId,
        to: ServerSet,
    ) -> Result<(), (ServerId, RequestKind, Trouble)> {
        let mut to = to;
        let mut fetched = self.fetch(links, page, from).await?;
        if fetched.is_none() {
            if self.flaw == Flaw::LeavesDamage {
                return Err((
                    from,
                    RequestKind::Read,
                    Trouble::Failed(Failure::DamagedPage { page }),
                ));
            }
            let others = self.replicator.borrow().layer_of(at(page), from);
            let others = others.minus(ServerSet::one(from));
            let up = self.replicator.borrow().up();
            for server in others.and(up).iter() {
                fetched = fetched.or(self.fetch(links, page, server).await.unwrap_or_default());
            }
            if fetched.is_none() && !others.minus(up).is_empty() {
                return Err((
                    from,
                    RequestKind::Read,
                    Trouble::Failed(Failure::DamagedPage { page }),
                ));
            }
            to.insert(from);
        }
        let Some(bytes) = fetched else { return Ok(()) };
        let if_absent = self.flaw != Flaw::RepairOverwrites;
        for server in to.iter() {
            let given = self.call_on(links, server, |on| put_frame(on, page, if_absent, &bytes));
            match given.await {
                Ok(_) => self.reset_strikes(server, RequestKind::Write),
                Err(trouble @ Trouble::Failed(Failure::Full { .. })) => {
                    self.replicator.borrow_mut().record_full_member(at(page), server);
                    return Err((server, RequestKind::Write, trouble));
                }
                Err(trouble) => return Err((server, RequestKind::Write, trouble)),
            }
        }
        Ok(())
    }
}
