//! The ring against a model: what a replay of its headers would give, and what a map of blocks
//! says.

use super::{
    replay::counted,
    ring::{Found, Ring, SlabKey},
};
use diskwright_format::space::cache::{Anchor, Header, HeaderPlace, RING_AT};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

const POOL: Uuid = Uuid::from_u128(5);
const SLAB_BLOCKS: u64 = 64;
const FILE_BLOCKS: u64 = 4 * SLAB_BLOCKS;

fn first_anchor() -> Anchor {
    Anchor { first: HeaderPlace { sequence: 1, ..HeaderPlace::default() }, number: 0, tail: 0 }
}

/// A log whose members are maps.
struct Log {
    ring: Ring,
    anchor: Anchor,
    /// Headers on the members, by the block of the file.
    headers: BTreeMap<u64, Box<[u8; 4096]>>,
    /// What the blocks of the file hold: the number of the write.
    contents: BTreeMap<u64, u32>,
    /// What the newest contents of each block are, if they are in the log.
    newest: BTreeMap<(SlabKey, u16), u32>,
    /// What the slabs themselves hold.
    slabs: BTreeMap<(SlabKey, u16), u32>,
    pending: Vec<(u32, SlabKey, u16, u64, u64, u32)>,
    writes: u32,
    /// Slabs that nothing may be written to past the log.
    logged: BTreeSet<SlabKey>,
}

impl Log {
    fn new() -> Self {
        Self {
            ring: Ring::new(FILE_BLOCKS, SLAB_BLOCKS, first_anchor()),
            anchor: first_anchor(),
            headers: BTreeMap::new(),
            contents: BTreeMap::new(),
            newest: BTreeMap::new(),
            slabs: BTreeMap::new(),
            pending: Vec::new(),
            writes: 0,
            logged: BTreeSet::new(),
        }
    }

    fn begin(&mut self, key: SlabKey, block: u16, count: u64) {
        // A write that overlaps one under way may end up on either side of it.
        let overlaps = |other: &(u32, SlabKey, u16, u64, u64, u32)| {
            other.1 == key
                && u64::from(other.2) < u64::from(block) + count
                && u64::from(block) < u64::from(other.2) + other.4
        };
        if self.pending.iter().any(overlaps) {
            return;
        }
        let Some((ticket, position)) = self.ring.reserve(key, block, count, 1, true) else { return };
        self.writes += 1;
        self.logged.insert(key);
        for step in 0..count {
            let at = self.ring.file_block(position + step);
            assert!(at >= RING_AT && at / SLAB_BLOCKS == self.ring.file_block(position) / SLAB_BLOCKS);
            self.headers.remove(&at);
            self.contents.insert(at, self.writes);
        }
        self.ring.note(ticket, vec![self.writes; count as usize]);
        self.pending.push((ticket, key, block, position, count, self.writes));
    }

    fn end(&mut self, which: usize, ok: bool) {
        if self.pending.is_empty() {
            return;
        }
        let (ticket, key, block, _, count, write) = self.pending.swap_remove(which % self.pending.len());
        self.ring.ended(ticket, ok);
        if ok {
            (0..count as u16).for_each(|step| {
                self.newest.insert((key, block + step), write);
            });
        }
    }

    fn flush(&mut self) {
        while let Some(taken) = self.ring.take_rows(POOL, 0) {
            let at = self.ring.file_block(taken.position);
            self.contents.remove(&at);
            self.headers.insert(at, taken.block);
        }
    }

    fn write_back(&mut self, key: SlabKey, upto: u64) {
        let mut live = self.ring.live_of(key);
        live.retain(|(_, live)| live.position < upto);
        for (block, live) in &live {
            assert_eq!(self.contents.get(&self.ring.file_block(live.position)), Some(&live.sum));
            self.slabs.insert((key, *block), live.sum);
            self.newest.remove(&(key, *block));
        }
        self.ring.destaged(key, &live);
    }

    fn is_in_use(&self, key: SlabKey) -> bool {
        self.pending.iter().any(|pending| pending.1 == key)
    }

    fn destage(&mut self, blocks: u64, is_whole: bool) {
        self.flush();
        let begun = self.ring.next_place();
        let Some(oldest) = self.ring.oldest(blocks) else { return };
        if oldest.slabs.iter().any(|&key| self.is_in_use(key)) {
            return;
        }
        let upto = if is_whole { u64::MAX } else { oldest.limit };
        oldest.slabs.iter().for_each(|&key| self.write_back(key, upto));
        let end = if is_whole { self.ring.end_of(&oldest.slabs, oldest.end, begun) } else { oldest.end };
        self.anchor = self.ring.anchor_at(end.sequence);
        let anchor = self.anchor;
        let logged = &mut self.logged;
        self.ring.advance(&anchor, |key| _ = logged.remove(&key));
    }

    /// A write that passes the log.
    fn pass(&mut self, key: SlabKey, block: u16) {
        if self.is_in_use(key) {
            return;
        }
        self.write_back(key, u64::MAX);
        if !self.ring.forget(&[key]) {
            return;
        }
        self.flush();
        self.ring.remove(key);
        self.logged.remove(&key);
        self.writes += 1;
        self.slabs.insert((key, block), self.writes);
    }

    /// What the disk shows, by the ring and by a replay.
    fn check(&mut self) {
        assert!(self.ring.used() <= self.ring.len());
        assert!(self.newest.keys().all(|(key, _)| self.logged.contains(key)));
        let shown = |ring: &Ring, slabs: &BTreeMap<(SlabKey, u16), u32>| {
            let mut shown = slabs.clone();
            for key in ring.slabs() {
                shown.extend(ring.live_of(key).into_iter().map(|(block, live)| ((key, block), live.sum)));
            }
            shown
        };
        let mut expected = self.slabs.clone();
        expected.extend(self.newest.clone());
        assert_eq!(shown(&self.ring, &self.slabs), expected);
        for (key, block, live) in self.ring.clean() {
            assert_eq!(self.contents.get(&self.ring.file_block(live.position)), Some(&live.sum), "not used again");
            assert_eq!(self.slabs.get(&(key, block)), Some(&live.sum), "the slab has it too");
            assert!(live.position >= self.ring.tail());
        }
        let places: Vec<u64> =
            self.ring.slabs().flat_map(|key| self.ring.live_of(key)).map(|(_, live)| live.position).collect();
        assert_eq!(places.iter().collect::<BTreeSet<_>>().len(), places.len());
        self.flush();
        let mut again = Ring::new(FILE_BLOCKS, SLAB_BLOCKS, self.anchor);
        let (mut place, mut headers) = (self.anchor.first, Vec::new());
        while let Some(header) = self
            .headers
            .get(&self.ring.file_block(place.position))
            .and_then(|block| Header::parse(&block[..], POOL, place))
        {
            let next = header.next;
            headers.push((place, header));
            place = next;
        }
        assert_eq!(place, self.ring.next_place(), "the headers lead to the next one");
        let rows = counted(&headers, |_, row| {
            assert!(row.position >= self.anchor.tail, "the tail has not passed it");
            Ok(true)
        });
        rows.unwrap().iter().zip(&headers).for_each(|(rows, (_, header))| again.replay(rows, header.next));
        assert_eq!(shown(&again, &self.slabs), expected, "a replay shows the same");
        for key in again.slabs().collect::<Vec<_>>() {
            for (block, live) in again.live_of(key) {
                assert_eq!(self.contents.get(&again.file_block(live.position)), Some(&live.sum));
                let found = again.find(key, block);
                assert!(matches!(found, Found::Logged { position, .. } if position == live.position));
                assert!(self.ring.slabs().any(|known| known == key), "a replay would apply it, so nothing may pass");
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Begin(SlabKey, u16, u64),
    End(usize, bool),
    Flush,
    Destage(u64, bool),
    Pass(SlabKey, u16),
}

fn step() -> impl Strategy<Value = Step> {
    let key = (1..3_u32, 0..3_u32);
    prop_oneof![
        6 => (key.clone(), 0..48_u16, 1..9_u64).prop_map(|(key, block, count)| Step::Begin(key, block, count)),
        6 => (any::<usize>(), prop::bool::weighted(0.9)).prop_map(|(which, ok)| Step::End(which, ok)),
        1 => Just(Step::Flush),
        1 => (0..80_u64, any::<bool>()).prop_map(|(blocks, is_whole)| Step::Destage(blocks, is_whole)),
        1 => (key, 0..48_u16).prop_map(|(key, block)| Step::Pass(key, block)),
    ]
}

proptest! {
    #[test]
    fn a_replay_gives_what_the_ring_has(steps in prop::collection::vec(step(), 1..120)) {
        let mut log = Log::new();
        for step in steps {
            match step {
                Step::Begin(key, block, count) => log.begin(key, block, count),
                Step::End(which, ok) => log.end(which, ok),
                Step::Flush => log.flush(),
                Step::Destage(blocks, is_whole) => log.destage(blocks, is_whole),
                Step::Pass(key, block) => log.pass(key, block),
            }
            log.check();
        }
    }
}

#[test]
fn a_log_that_is_low_admits_as_much_as_was_destaged() {
    let mut log = Log::new();
    let mut block = 0;
    while !log.ring.is_low() {
        log.begin((1, block / 32), (block % 32) as u16, 1);
        log.end(0, true);
        block += 1;
    }
    assert!(log.ring.reserve((1, 0), 0, 1, 1, false).is_none() && !log.ring.admit(1));
    log.ring.grant(3);
    assert!(log.ring.admit(2) && !log.ring.admit(2) && log.ring.admit(1) && !log.ring.admit(1));
    log.destage(u64::MAX, true);
    assert!(!log.ring.is_low() && log.ring.admit(100));
}
