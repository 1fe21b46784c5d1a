//! Commits: appended changes are written to the journals, made durable, and applied.
//!
//! ```text
//!   append (under `state`) ─▶ ticket ─▶ wait ─┬─ another thread commits: sleep
//!                                             └─ commit all that is pending, for everybody
//! ```

use super::{Pool, State, apply::Taking, lock};
use crate::log::{OpenArea, pack};
use diskwright_format::space::{
    BLOCK_BYTES,
    change::{Change, Changes, SlabRun, SlabState},
    journal::{CHANGES_BYTES_MAX, Checkpoint},
};
use std::{collections::BTreeSet, io, sync::PoisonError, sync::atomic::Ordering};

/// Number of a change, for [`Pool::wait`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

impl Ticket {
    /// The number; never 0.
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

/// Slabs in a change of a checkpoint. Each change then fits into a block, as in the journal.
const RUN_SLABS: u32 = 256;

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
        Ticket(log.appended)
    }

    /// Returns when a change is durable and in the map.
    pub(crate) fn wait(&self, ticket: Ticket) -> io::Result<()> {
        loop {
            let mut log = lock(&self.log);
            loop {
                if log.durable >= ticket.0 {
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
            let result = self.commit(&pending, &ends);
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
        let ticket = Ticket(lock(&self.log).appended);
        self.wait(ticket)
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
            Change::File { file: number, len_bytes, copies: file.copies, tier: file.tier, name }.put(&mut out);
            let mut run = Run { file: number, first: 0, copies: 0, count: 0, bytes: Vec::new() };
            for (index, entry) in file.table.mapped(0..1 << 32) {
                let slab = entry.load();
                let copies = slab.copies().into_iter().flatten().count() as u8;
                if run.first.checked_add(run.count) != Some(index) || run.copies != copies || run.count == RUN_SLABS {
                    run.put(&mut out);
                    (run.first, run.copies) = (index, copies);
                }
                SlabRun::put(
                    &mut run.bytes,
                    slab.state().unwrap_or(SlabState::Dirty),
                    slab.copies().into_iter().flatten(),
                );
                run.count += 1;
                if slab.stale() != 0 {
                    run.put(&mut out);
                    Change::Stale { file: number, index, mask: slab.stale() }.put(&mut out);
                    run.first = index.saturating_add(1);
                }
            }
            run.put(&mut out);
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

/// Slabs of a checkpoint that follow one another.
struct Run {
    file: u32,
    first: u32,
    copies: u8,
    count: u32,
    bytes: Vec<u8>,
}

impl Run {
    fn put(&mut self, out: &mut Vec<u8>) {
        if self.count > 0 {
            let slabs = SlabRun::new(self.copies, &self.bytes);
            Change::Slabs { file: self.file, first: self.first, slabs }.put(out);
        }
        self.bytes.clear();
        self.count = 0;
    }
}

const _: () = assert!(13 * RUN_SLABS as usize + 16 <= CHANGES_BYTES_MAX);
