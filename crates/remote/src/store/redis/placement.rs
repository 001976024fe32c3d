//! The places of copies in a cluster: which master has which slot, and which keys lie on different masters.

use super::COPIES_MAX;
use std::collections::BTreeMap;

/// The number of slots of a cluster.
const SLOTS: usize = 16384;
/// The most keys that are tried for a copy. With two masters, half of all keys are on the right one.
const SALTS: u8 = 64;

/// The keys of the copies of one hash: the number at the end of each.
pub(super) type Salts = [u8; COPIES_MAX];

/// The masters of a cluster and their slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SlotMap {
    /// The index of the master of each slot; none for a slot that no working master has.
    owner: Vec<Option<u16>>,
    /// The host and port of each master.
    pub masters: Vec<(String, u16)>,
}

impl SlotMap {
    /// Reads the reply to `CLUSTER NODES`: `id host:port@bus[,name] flags …` and, from the ninth word on, the
    /// slots.
    pub fn parse(nodes: &str) -> SlotMap {
        let mut map = SlotMap { owner: vec![None; SLOTS], masters: Vec::new() };
        for line in nodes.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let &[_, address, flags, ..] = words.as_slice() else { continue };
            let has = |wanted: &str| flags.split(',').any(|flag| flag == wanted);
            let Some(place) = host_and_port(address) else { continue };
            if !has("master") || has("fail") || has("noaddr") {
                continue;
            }
            let index = map.masters.len() as u16;
            map.masters.push(place);
            for range in words.iter().skip(8) {
                // A slot that is on its way is in brackets, and still listed as this master's.
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
                    continue;
                };
                if let Some(slots) = map.owner.get_mut(first..=last) {
                    slots.fill(Some(index));
                }
            }
        }
        map
    }

    /// Returns the number of masters that have slots.
    pub fn masters_with_slots(&self) -> usize {
        let has_slots = |index: &usize| self.owner.contains(&Some(*index as u16));
        (0..self.masters.len()).filter(has_slots).count()
    }

    /// Returns true if each slot has a working master.
    pub fn is_whole(&self) -> bool {
        self.owner.iter().all(Option::is_some)
    }

    /// Returns the index of the master that has the slot of this key; none if no working one has it.
    pub fn master(&self, key: &str) -> Option<u16> {
        self.owner[slot(key)]
    }

    /// Returns the host and port of the master that has the slot of this key; none if no working one has it.
    pub fn place_of(&self, key: &str) -> Option<&(String, u16)> {
        self.master(key).map(|at| &self.masters[usize::from(at)])
    }

    /// Returns keys by master.
    pub fn by_master<'a>(&self, keys: &'a [String]) -> impl Iterator<Item = Vec<&'a String>> {
        let mut groups: BTreeMap<Option<u16>, Vec<&String>> = BTreeMap::new();
        for key in keys {
            groups.entry(self.master(key)).or_default().push(key);
        }
        groups.into_values()
    }

    /// Marks the slots whose master has failed since `before`. The replica in its place may lack the last
    /// writes. Returns true if one of them was not marked.
    pub fn failed_over(&self, before: &SlotMap, distrusted: &mut Vec<bool>) -> bool {
        let is_gone = |master: &&(String, u16)| !self.masters.contains(master);
        let gone: Vec<_> = before.masters.iter().filter(is_gone).cloned().collect();
        before.distrust(&gone, distrusted)
    }

    /// Marks the slots of these masters. Returns true if one of them was not marked.
    pub fn distrust(&self, masters: &[(String, u16)], distrusted: &mut Vec<bool>) -> bool {
        if masters.is_empty() {
            return false;
        }
        distrusted.resize(SLOTS, false);
        let mut any = false;
        for (slot, mark) in self.owner.iter().zip(distrusted) {
            let is_lost = slot.is_some_and(|at| masters.contains(&self.masters[usize::from(at)]));
            any |= is_lost && !*mark;
            *mark |= is_lost;
        }
        any
    }

    /// Returns keys on so many different masters. Keeps those of `before` that are on masters of their own,
    /// and whose slots are not `distrusted`. No other key was used before. None if there are too few masters
    /// that are not `avoided`.
    pub fn place(
        &self,
        copies: usize,
        before: Option<Salts>,
        distrusted: &[bool],
        avoided: &[(String, u16)],
        key: impl Fn(u8) -> String,
    ) -> Option<Salts> {
        let is_avoided = |at: &u16| avoided.contains(&self.masters[usize::from(*at)]);
        let master = |salt: u8| self.master(&key(salt)).filter(|at| !is_avoided(at));
        let is_trusted = |salt: &u8| !distrusted.get(slot(&key(*salt))).is_some_and(|lost| *lost);
        let mut taken: Vec<u16> = Vec::new();
        let mut take = |salt: u8| {
            let free = master(salt).filter(|master| !taken.contains(master))?;
            taken.push(free);
            Some(salt)
        };
        let known = before.as_ref().map_or(&[][..], |salts| &salts[..copies]);
        let kept = |salt: &u8| Some(*salt).filter(is_trusted).and_then(&mut take);
        let kept: Vec<Option<u8>> = known.iter().map(kept).collect();
        let next = known.iter().max().map_or(0, |last| last.wrapping_add(1));
        let mut others = (0..SALTS).map(|step| next.wrapping_add(step));
        let mut salts = before.unwrap_or_default();
        for (copy, salt) in salts.iter_mut().enumerate().take(copies) {
            *salt = match kept.get(copy).copied().flatten() {
                Some(kept) => kept,
                None => others.find_map(&mut take)?,
            };
        }
        Some(salts)
    }
}

fn host_and_port(address: &str) -> Option<(String, u16)> {
    let (place, names) = address.split_once(',').unwrap_or((address, ""));
    let (host, port) = place.split('@').next()?.rsplit_once(':')?;
    // A certificate has the name that the server announces, if it announces one.
    let name = names.split(',').next().filter(|name| !name.is_empty() && !name.contains('='));
    let host = name.unwrap_or(host);
    (!host.is_empty()).then_some((host.to_string(), port.parse().ok()?))
}

/// Returns the slot of a key: that of the part between braces, if there is one.
fn slot(key: &str) -> usize {
    let inside = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    let key = inside.map_or(key, |(part, _)| if part.is_empty() { key } else { part });
    usize::from(crc16::State::<crc16::XMODEM>::calculate(key.as_bytes())) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: &str = "\
07c3 10.0.0.1:30004@31004,hostname4 slave e7d1 0 1426238317239 4 connected\n\
67ed 10.0.0.2:30002@31002,hostname2 master - 0 1426238316232 2 connected 5461-10922\n\
292f 10.0.0.3:30003@31003 master - 0 1426238318243 3 connected 10923-16382 16383 [100->-67ed]\n\
6ec2 10.0.0.5:30005@31005 master,fail - 0 1 5 connected 5461\n\
e7d1 10.0.0.1:30001@31001 myself,master - 0 0 1 connected 0-5460\n";

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot("123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12182);
    }

    #[test]
    fn a_map_has_the_masters_and_their_slots() {
        let map = SlotMap::parse(NODES);
        let places: Vec<_> =
            map.masters.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        assert_eq!(places, ["hostname2:30002", "10.0.0.3:30003", "10.0.0.1:30001"]);
        assert_eq!(map.masters_with_slots(), 3);
        assert!(map.owner.iter().all(Option::is_some));
        assert_eq!([0, 5461, 16383].map(|slot| map.owner[slot]), [Some(2), Some(0), Some(1)]);
    }

    #[test]
    fn copies_are_on_different_masters_and_stay_where_they_are() {
        let map = SlotMap::parse(NODES);
        let masters = |salts: Salts, copies: usize, tag: usize| -> Vec<_> {
            (0..copies)
                .map(|copy| map.owner[slot(&format!("{tag}:{}", salts[copy]))].unwrap())
                .collect()
        };
        for tag in 0..100 {
            let key = |salt: u8| format!("{tag}:{salt}");
            let placed = map.place(3, None, &[], &[], key).unwrap();
            let mut of = masters(placed, 3, tag);
            of.sort_unstable();
            assert_eq!(of, [0, 1, 2]);
            assert_eq!(map.place(3, Some(placed), &[], &[], key), Some(placed));
            // All of one master's slots move to another: only the copy that is no longer alone moves.
            let mut moved = map.clone();
            moved
                .owner
                .iter_mut()
                .filter(|owner| **owner == Some(1))
                .for_each(|owner| *owner = Some(0));
            // A copy leaves a master that is avoided, and the other stays.
            let off = [map.masters[usize::from(map.master(&key(placed[0])).unwrap())].clone()];
            let other = map.place(2, Some(placed), &[], &off, key).unwrap();
            assert!(other[1] == placed[1] && other[0] != placed[0], "{placed:?} {other:?}");
            assert_eq!(map.place(3, Some(placed), &[], &off, key), None, "two masters are left");
            let again = moved.place(2, Some(placed), &[], &[], key).unwrap();
            let [one, other] = [again[0], again[1]].map(|salt| moved.owner[slot(&key(salt))]);
            assert_ne!(one, other);
            assert_eq!(again[0], placed[0]);
            assert_eq!(moved.place(3, Some(placed), &[], &[], key), None, "two masters are left");
        }
    }
    #[test]
    fn a_replica_in_the_place_of_a_failed_master_is_not_trusted() {
        let before = SlotMap::parse(NODES);
        let after = SlotMap::parse(
            &NODES.replace("10.0.0.3:30003@31003 master", "10.0.0.9:30003@31003 master"),
        );
        let mut lost = Vec::new();
        assert!(!before.failed_over(&before, &mut lost) && lost.is_empty());
        assert!(after.failed_over(&before, &mut lost) && lost[10923] && !lost[0]);
        assert!(!after.failed_over(&before, &mut lost), "it is marked already");
        for tag in 0..100 {
            let key = |salt: u8| format!("{tag}:{salt}");
            let placed = before.place(2, None, &[], &[], key).unwrap();
            let again = after.place(2, Some(placed), &lost, &[], key).unwrap();
            for copy in 0..2 {
                let was_lost = lost[slot(&key(placed[copy]))];
                assert_eq!(was_lost, again[copy] != placed[copy], "{placed:?} {again:?}");
            }
        }
        // Slots that move between masters which are up keep what they have.
        let moved =
            SlotMap::parse(&NODES.replace("0-5460", "0-5459").replace("5461-10922", "5460-10922"));
        assert!(!moved.failed_over(&before, &mut lost));
    }
}
