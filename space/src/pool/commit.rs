//! Commits: appended changes are written to the journals, made durable, and applied.
//!
//! ```text
//!   append (under `state`) ─▶ ticket ─▶ wait ─┬─ another thread commits: sleep
//!                                             └─ commit all that is pending, for everybody
//! ```

use super::{Pool, State, apply::Taking, lock};
use crate::{
    log::{OpenArea, Ticket, pack},
    slab_table::Slab,
};
use diskwright_format::space::{
    BLOCK_BYTES, COPIES_MAX, Copy,
    change::{Change, Changes, SlabRun, SlabState},
    journal::{CHANGES_BYTES_MAX, Checkpoint},
};
use std::{collections::BTreeSet, io, sync::PoisonError, sync::atomic::Ordering};

/// Slabs in a change of a checkpoint. Each change then fits into a block, as in the journal.
const RUN_SLABS: u32 = 256;

/// Slabs of an extent: shorter ones take more bytes than their slabs one by one.
const EXTENT_SLABS_MIN: u32 = 8;

impl Pool {
    /// Appends a change, which the next commit makes durable.
    pub(crate) fn append(&self, state: &mut State, change: &Change<'_>) -> Ticket {
        self.append_together(state, std::slice::from_ref(change))
    }

    /// Appends changes of which a power cut leaves all or none. They are short.
    pub(crate) fn append_together(&self, _state: &mut State, changes: &[Change<'_>]) -> Ticket {
        let mut log = lock(&self.log);
        changes.iter().for_each(|change| change.put(&mut log.pending));
        let end = log.pending.len();
        log.ends.push(end);
        log.appended += 1;
        Ticket::new(log.appended)
    }

    /// Returns when a change is durable and in the map.
    pub(crate) fn wait(&self, ticket: Ticket) -> io::Result<()> {
        loop {
            let mut log = lock(&self.log);
            loop {
                if log.durable >= ticket.number() {
                    return Ok(());
                }
                if let Some(failed) = &log.failed {
                    return Err(io::Error::other(failed.clone()));
                }
                if !log.is_committing {
                    break;
                }
                log = self.log_moved.wait(log).unwrap_or_else(PoisonError::into_inner);
            }
            log.is_committing = true;
            let (pending, ends) = (std::mem::take(&mut log.pending), std::mem::take(&mut log.ends));
            let upto = log.appended;
            drop(log);
            let result = self.commit_in_parts(&pending, &ends);
            if let Err(error) = &result {
                self.fail_journal(error.to_string());
            }
            let mut log = lock(&self.log);
            log.is_committing = false;
            if result.is_ok() {
                log.durable = upto;
            }
            self.log_moved.notify_all();
        }
    }

    /// Commits everything that was appended before.
    pub(crate) fn commit_all(&self) -> io::Result<()> {
        let ticket = Ticket::new(lock(&self.log).appended);
        self.wait(ticket)
    }

    /// Commits changes, in several steps if the journal cannot take all at once.
    fn commit_in_parts(&self, pending: &[u8], ends: &[usize]) -> io::Result<()> {
        let blocks = self.areas().iter().map(|(_, area)| area.blocks()).min().unwrap_or(0);
        // Half of the journal; a block may be half empty.
        let most_bytes = (blocks as usize / 4).max(1) * CHANGES_BYTES_MAX;
        let (mut start, mut from) = (0, 0);
        for (place, &end) in ends.iter().enumerate() {
            let is_last = place + 1 == ends.len();
            if is_last || ends[place + 1] - start > most_bytes {
                let part: Vec<usize> = ends[from..=place].iter().map(|end| end - start).collect();
                self.commit(&pending[start..end], &part)?;
                (start, from) = (end, place + 1);
            }
        }
        if ends.is_empty() { self.commit(pending, ends) } else { Ok(()) }
    }

    /// Writes changes to every journal, and applies them.
    fn commit(&self, pending: &[u8], ends: &[usize]) -> io::Result<()> {
        let mut place = lock(&self.place);
        let blocks_max = self.areas().iter().map(|(_, area)| area.blocks()).min().unwrap_or(0);
        let (blocks, next) = pack(self.id, place.position, pending, ends);
        let needed = (blocks.len() / BLOCK_BYTES) as u64;
        if needed > blocks_max {
            return Err(io::Error::other("too many changes at once for the pool's journal"));
        }
        // The blocks since the newest checkpoint must all stay.
        if place.position.sequence - place.checkpoint + needed > blocks_max {
            self.write_checkpoint(&mut place)?;
        }
        let sequence = place.position.sequence;
        self.on_every_area(|area, member| area.write_blocks(member, sequence, &blocks))?;
        place.position = next;
        let mut state = lock(&self.state);
        for change in Changes::new(pending) {
            self.is_closed.store(matches!(change, Ok(Change::Closed)), Ordering::Release);
            let applied = change.map_err(|error| error.to_string());
            applied.and_then(|change| self.apply(&mut state, &change, Taking::Taken)).map_err(io::Error::other)?;
        }
        drop(state);
        if place.position.sequence - place.checkpoint > blocks_max / 2 {
            self.write_checkpoint(&mut place)?;
        }
        Ok(())
    }

    /// Carries something out on all areas of live members. A member that fails is lost, as long as
    /// another one has it; its loss is recorded before this returns.
    fn on_every_area(&self, act: impl Fn(&OpenArea, &crate::member::Member) -> io::Result<()>) -> io::Result<()> {
        let (mut done, mut failed) = (0, Vec::new());
        for (number, area) in &self.areas() {
            let Some(member) = self.live_member(*number) else { continue };
            match act(area, member) {
                Ok(()) => done += 1,
                Err(error) => failed.push((*number, error)),
            }
        }
        if done == 0 {
            let error = failed.into_iter().next().map(|(_, error)| error);
            let error = error.unwrap_or_else(|| io::Error::other("no member with a journal is left"));
            return Err(io::Error::new(error.kind(), format!("pool {}: cannot write its journal: {error}", self.name)));
        }
        for (number, error) in failed {
            self.lose(number, &error)?;
        }
        Ok(())
    }

    /// Writes the map as a checkpoint to every area. Called by the thread that commits.
    pub(super) fn write_checkpoint(&self, place: &mut crate::log::LogPlace) -> io::Result<()> {
        let changes = self.whole_map();
        let room_bytes = self.areas().iter().map(|(_, area)| area.checkpoint_bytes()).min().unwrap_or(0);
        if changes.len() as u64 > room_bytes {
            let what = format!(
                "pool {}: its map needs {} bytes, and the places for it have {room_bytes}; remove disks",
                self.name,
                changes.len()
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, what));
        }
        let header = Checkpoint {
            position: place.position,
            changes_bytes: changes.len() as u64,
            changes_checksum: crc32c::crc32c(&changes),
        };
        let number = place.next_place;
        self.on_every_area(|area, member| area.write_checkpoint(member, self.id, number, &header, &changes))?;
        place.checkpoint = place.position.sequence;
        place.next_place = number + 1;
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn write_checkpoint_now(&self) {
        self.write_checkpoint(&mut lock(&self.place)).unwrap();
    }

    /// The changes that lead from an empty map to the present one.
    pub(super) fn whole_map(&self) -> Vec<u8> {
        let state = lock(&self.state);
        let mut out = Vec::new();
        let names = state.names.iter().filter_map(|(name, number)| Some((name.clone(), self.file(*number)?)));
        let named: BTreeSet<u32> = state.names.values().copied().collect();
        // A file without a name that is still open needs one to be described.
        let unnamed = self.all_files().into_iter().filter(|file| !named.contains(&file.number));
        let unnamed = unnamed.map(|file| (format!("/{}", file.number), file));
        let mut known = BTreeSet::new();
        for (name, file) in names.chain(unnamed) {
            let name = &name[..];
            if !known.insert(file.number) {
                Change::Named { file: file.number, name }.put(&mut out);
                continue;
            }
            let (number, len_bytes) = (file.number, file.len_bytes.load(Ordering::Acquire));
            let (copies, columns, tier) = (file.copies, file.columns, file.tier());
            Change::File { file: number, len_bytes, copies, columns, tier, name }.put(&mut out);
            let mut map = MapWriter { file: number, ..MapWriter::default() };
            for (index, entry) in file.table.mapped(0..1 << 32) {
                map.add(index, entry.load(), &mut out);
            }
            map.end(&mut out);
            if !named.contains(&number) {
                Change::Unnamed { name }.put(&mut out);
            }
        }
        // After the slabs: what was dirty then is stale already where it has to be.
        let lost = state.lost_in_map;
        (0..64).filter(|member| lost >> member & 1 == 1).for_each(|member| Change::Lost { member }.put(&mut out));
        out
    }
}

/// Writes the slabs of a file: pieces whose copies follow one another as extents if they are long,
/// the others one by one.
#[derive(Default)]
struct MapWriter {
    file: u32,
    /// The present piece.
    first: u32,
    count: u32,
    state: Option<SlabState>,
    copies: [u32; COPIES_MAX],
    /// Short pieces before it, which follow one another in the file.
    run_first: u32,
    run_count: u32,
    run_copies: u8,
    run: Vec<u8>,
}

impl MapWriter {
    fn add(&mut self, index: u32, slab: Slab, out: &mut Vec<u8>) {
        let bits = slab.copies().map(|copy| copy.map_or(0, Copy::to_bits));
        let step = self.count;
        let follows = self.state == slab.state()
            && self.first.checked_add(step) == Some(index)
            && self.copies.iter().zip(bits).all(|(first, bits)| follows(*first, step, bits))
            && slab.stale() == 0;
        if !follows {
            self.end_piece(out);
            (self.first, self.state, self.copies) = (index, slab.state(), bits);
        }
        self.count += 1;
        if slab.stale() != 0 {
            self.end(out);
            Change::Stale { file: self.file, index, mask: slab.stale() }.put(out);
        }
    }

    fn end_piece(&mut self, out: &mut Vec<u8>) {
        let Some(state) = self.state.take().filter(|_| self.count > 0) else { return };
        let (file, first, count, copies) = (self.file, self.first, self.count, self.copies);
        self.count = 0;
        if count >= EXTENT_SLABS_MIN {
            self.end_run(out);
            return Change::Extent { file, first, count, state, copies }.put(out);
        }
        let held = copies.iter().filter(|&&bits| bits != 0).count() as u8;
        for step in 0..count {
            let continues = self.run_first.checked_add(self.run_count) == Some(first + step);
            if !continues || self.run_copies != held || self.run_count == RUN_SLABS {
                self.end_run(out);
                (self.run_first, self.run_copies) = (first + step, held);
            }
            let copies = copies.iter().filter(|&&bits| bits != 0).filter_map(|&bits| Copy::from_bits(bits + step));
            SlabRun::put(&mut self.run, state, copies);
            self.run_count += 1;
        }
    }

    fn end_run(&mut self, out: &mut Vec<u8>) {
        if self.run_count > 0 {
            let slabs = SlabRun::new(self.run_copies, &self.run);
            Change::Slabs { file: self.file, first: self.run_first, slabs }.put(out);
        }
        self.run.clear();
        self.run_count = 0;
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        self.end_piece(out);
        self.end_run(out);
    }
}

/// Whether a copy is `step` slabs after the first one, on the same member. Both may be none.
fn follows(first: u32, step: u32, bits: u32) -> bool {
    if first == 0 || bits == 0 { first == bits } else { bits == first + step && bits >> 26 == first >> 26 }
}

const _: () = assert!(13 * RUN_SLABS as usize + 16 <= CHANGES_BYTES_MAX);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab_table::Entry;
    use proptest::prelude::*;

    /// Slabs by index: state, copies, stale.
    type Map = std::collections::BTreeMap<u32, (SlabState, [u32; COPIES_MAX], u8)>;

    fn written(map: &Map) -> Vec<u8> {
        let (mut out, mut writer) = (Vec::new(), MapWriter { file: 4, ..MapWriter::default() });
        for (&index, &(state, copies, stale)) in map {
            let entry = Entry::default();
            entry.map(state, copies);
            entry.set_stale(stale);
            writer.add(index, entry.load(), &mut out);
        }
        writer.end(&mut out);
        out
    }

    fn read(changes: &[u8]) -> Map {
        let mut map = Map::new();
        for change in Changes::new(changes) {
            match change.unwrap() {
                Change::Slabs { first, slabs, .. } => {
                    for (index, (state, copies)) in (first..).zip(slabs.iter()) {
                        assert!(map.insert(index, (state, copies, 0)).is_none());
                    }
                }
                Change::Extent { first, count, state, copies, .. } => {
                    for step in 0..count {
                        let copies = copies.map(|bits| if bits == 0 { 0 } else { bits + step });
                        assert!(map.insert(first + step, (state, copies, 0)).is_none());
                    }
                }
                Change::Stale { index, mask, .. } => map.get_mut(&index).unwrap().2 = mask,
                other => panic!("{other:?}"),
            }
        }
        map
    }

    proptest! {
        #[test]
        fn a_map_is_read_as_it_was_written(
            pieces in prop::collection::vec((0..3_u32, 1..40_u32, 0..3_u8, 1..=3_usize, 0..60_u32, 0..40_u8), 0..30),
        ) {
            let (mut map, mut index) = (Map::new(), 0);
            for (gap, count, state, copies, slab, stale) in pieces {
                index += gap;
                let state = [SlabState::Dirty, SlabState::Clean, SlabState::Sealed][usize::from(state)];
                for step in 0..count {
                    let copy = |place: usize| {
                        let member = place as u8 * 7;
                        if place < copies { Copy { member, slab: slab + step * (1 + u32::from(slab == 9)) }.to_bits() } else { 0 }
                    };
                    // Now and then a stale copy.
                    let stale = if stale < 8 && step % 16 == u32::from(stale) { stale } else { 0 };
                    map.insert(index, (state, std::array::from_fn(copy), stale));
                    index += 1;
                }
            }
            let changes = written(&map);
            prop_assert_eq!(read(&changes), map);
        }
    }

    #[test]
    fn a_map_takes_no_more_than_the_places_for_it() {
        // Eight slabs that follow one another, then one elsewhere, is the longest way to say it.
        let copy = |index: u32| Copy { member: 1, slab: if index % 9 == 8 { 1 << 25 | index } else { index } };
        let map: Map = (0..90_000).map(|index| (index, (SlabState::Clean, [copy(index).to_bits(), 0, 0], 0))).collect();
        assert!(written(&map).len() < 90_000 * 5);
        let map: Map = (0..1 << 20).map(|index| (index, (SlabState::Clean, [index + 1, 0, 0], 0))).collect();
        assert!(written(&map).len() < 64);
    }
}
