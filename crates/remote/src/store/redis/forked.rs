//! The pages of a forked child: copies that the engine makes by itself, under keys of the same slots.

use super::session::{RedisSession, expire, on_key};
use super::{BATCH, Hash, RedisRegion, RedisState, RedisStore};
use crate::store::{ChildStore, RegionId, StoreError};
use redis::Cmd;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The time for which a fork waits for copies that are moved between masters.
const PATIENCE: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(20);
/// The longest life of a child's pages that nobody renews. Many children end without notice (`_exit`), and
/// their pages take room for so long.
const LIFE_OF_CHILD: Duration = Duration::from_secs(600);
/// The longest interval between their renewals.
const RENEW_CHILD: Duration = Duration::from_secs(60);

impl RedisState {
    /// Copies a region for the child of a fork. The copies of one that is never made expire.
    ///
    /// # Errors
    /// If no copy of some pages answers, the engine has no room, or it has no COPY (before Redis 6.2).
    pub(super) fn fork(self: &Arc<Self>, region: RegionId) -> Result<ChildStore, StoreError> {
        let mut options = self.options.clone();
        options.life = options.life.min(LIFE_OF_CHILD);
        options.renew_every = options.renew_every.min(RENEW_CHILD);
        let child = RedisState::new(self.address.clone(), options, self.family);
        let mut child = child.map_err(|error| self.unreachable(error))?;
        let used = self.hold_still(region)?;
        let copied = self.copy_all(region, &used, &child);
        self.let_go(region, &used);
        copied?;
        let pages = self.region_pages(region)?;
        let used = used
            .into_iter()
            .map(|(tag, hash)| (tag, Hash { expires: true, puts: 0, earlier: None, ..hash }));
        let region_of_child = RedisRegion { pages, used: used.collect() };
        (child.engine, child.is_cluster) = (self.engine, self.is_cluster);
        child.regions = Mutex::new(HashMap::from([(region, region_of_child)]));
        child.next_region = AtomicU64::new(self.next_region.load(Ordering::Relaxed));
        child.slots = Mutex::new(self.slots());
        Ok(Box::new(move || {
            let store = RedisStore::start(child)?;
            // If it fails, the thread renews them in time.
            let _ = store.shared.renew_once();
            Ok(Arc::new(store))
        }))
    }

    /// Counts as a put to each hash of a region, so that no copy is moved until [`RedisState::let_go`].
    /// Returns the hashes.
    fn hold_still(&self, region: RegionId) -> Result<BTreeMap<u64, Hash>, StoreError> {
        let begun = Instant::now();
        loop {
            let mut regions = self.regions();
            let used = &mut regions.get_mut(&region).ok_or(StoreError::NoRegion(region))?.used;
            if used.values().all(|hash| hash.earlier.is_none()) {
                used.values_mut().for_each(|hash| hash.puts += 1);
                return Ok(used.clone());
            }
            drop(regions);
            if begun.elapsed() > PATIENCE {
                return Err(self.unreachable("its copies are being moved to other masters"));
            }
            std::thread::sleep(STEP);
        }
    }

    fn let_go(&self, region: RegionId, held: &BTreeMap<u64, Hash>) {
        if let Some(region) = self.regions().get_mut(&region) {
            for tag in held.keys() {
                region.used.entry(*tag).and_modify(|hash| hash.puts -= 1);
            }
        }
    }

    /// Copies all keys of some hashes to those of the child's store. Each hash needs one copy that answers.
    fn copy_all(
        self: &Arc<Self>,
        region: RegionId,
        used: &BTreeMap<u64, Hash>,
        child: &RedisState,
    ) -> Result<(), StoreError> {
        let mut session = RedisSession::new(self.clone());
        let copies = self.options.copies;
        let of_hash = |(tag, hash): (&u64, &Hash)| {
            let names = hash.salts.map(|salt| {
                let to = child.key(region, *tag, salt);
                (self.key(region, *tag, salt), (to, *tag))
            });
            names.into_iter().take(copies)
        };
        let names: HashMap<String, (String, u64)> = used.iter().flat_map(of_hash).collect();
        let keys: Vec<String> = names.keys().cloned().collect();
        let mut failures: HashMap<u64, usize> = HashMap::new();
        for keys in self.slots().by_master(&keys) {
            for keys in keys.chunks(BATCH) {
                let copy = |from: &&String| {
                    let to = &names[*from].0;
                    let mut copy = on_key("COPY", from);
                    copy.arg(to).arg("REPLACE");
                    [copy, expire(to, child.options.life)]
                };
                let commands: Vec<Cmd> = keys.iter().flat_map(copy).collect();
                let Err(error) = session.run(&commands) else { continue };
                for key in keys {
                    let failed = failures.entry(names[*key].1).or_default();
                    *failed += 1;
                    if *failed == copies {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }
}
