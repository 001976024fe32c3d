//! Direct access to servers, past the client: the test damages pages and checks promises.

use super::*;

impl Client {
    /// Returns the number of distinct servers.
    pub fn servers_known(&self) -> usize {
        self.world.name_count() - self.aliases.borrow().len()
    }

    /// Changes a byte of a page on a server, if the server has the page.
    pub fn damage(&self, server: ServerId, page: u64) {
        let Some(pool) = self.world.pool(server as usize) else { return };
        let Some(remote) = self.remotes.borrow().get(&server).copied() else { return };
        let claim =
            Claim { nonce: [0; 16], epoch: pool.epoch, region: remote.number, fence: false };
        let opened = pool.open(&claim, &secret::proof(&remote.token, &claim));
        let Ok((region, lease)) = opened else { return };
        let (mut reply, run) = (Vec::new(), PageRun { first: page, count: 1 });
        if region.get(&pool.slab, lease.lease, run, true, 1, &mut reply).is_err() {
            return;
        }
        let (Reply::Pages { checksums, .. }, bytes) = parse(&reply) else { panic!("no pages") };
        let mut bytes = bytes.to_vec();
        bytes[1000] ^= 1;
        let put =
            region.put(&pool.slab, lease.lease, page, false, &bytes, wire::checksums(checksums));
        put.expect("it is held");
    }

    /// Checks that each complete server has the version of each page whose put was done last. Skips
    /// pages that are being written, and servers that have crashed unnoticed.
    pub fn broken_promise(&self) -> Option<String> {
        let (done, busy) = (self.done.borrow(), self.busy.borrow());
        for (page, version) in done.iter().filter(|(page, _)| !busy.contains(page)) {
            let complete = self.replicator.borrow().complete(at(*page));
            for server in complete.iter().filter(|server| self.is_up(*server)) {
                if let Some(bytes) = self.peek(server, *page)
                    && bytes.as_deref() != Some(&page_bytes(*page, *version)[..])
                {
                    let what = if bytes.is_some() { "other bytes" } else { "nothing" };
                    return Some(format!("page {page} on complete server {server}: {what}"));
                }
            }
        }
        None
    }

    /// Returns the bytes of a page that a server holds. Returns `None` if it is another server than
    /// the client knows.
    fn peek(&self, server: ServerId, page: u64) -> Option<Option<Vec<u8>>> {
        let pool = self.world.pool(server as usize)?;
        let is_known = pool.epoch == self.epochs.borrow()[server as usize];
        if !is_known {
            return None;
        }
        let remote = self.remotes.borrow().get(&server).copied()?;
        let claim =
            Claim { nonce: [0; 16], epoch: pool.epoch, region: remote.number, fence: false };
        let opened = pool.open(&claim, &secret::proof(&remote.token, &claim));
        let Ok((region, lease)) = opened else { return is_known.then_some(None) };
        let mut reply = Vec::new();
        let run = PageRun { first: page, count: 1 };
        let got = region.get(&pool.slab, lease.lease, run, false, 1, &mut reply);
        Some(got.ok().map(|()| parse(&reply).1.to_vec()))
    }
}
