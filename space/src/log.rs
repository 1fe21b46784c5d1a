//! The journal and the checkpoints, in memory and on the members that hold an area.
//!
//! ```text
//!   append ─▶ pending ─▶ commit: blocks ─▶ every area, each synced ─▶ apply ─▶ durable
//!                          one thread commits for all that wait (group commit)
//!   journal half full ─▶ checkpoint ─▶ every area: contents, sync, header, sync
//! ```
//!
//! A change takes effect in the map (`apply`) only when it is durable, and in the order of the
//! journal. So the map in memory is at any time what a replay of the journal would give, up to the
//! last commit; a checkpoint is the map at that moment.
//!
//! [`LogState`] is guarded by the pool's `log` lock, which is held for no I/O. Appending is done
//! under the pool's `state` lock too, so that the order of changes is the order of decisions.

use crate::member::Member;
use diskwright_format::space::{
    BLOCK_BYTES, SLABS_OFFSET_BYTES,
    change::{Change, Changes},
    journal::{CHANGES_BYTES_MAX, Checkpoint, Position, parse_block, put_block},
    superblock::Area,
};
use diskwright_store::{FileRange, Store};
use std::{io, ops::Range};
use uuid::Uuid;

/// Number of a change, for [`Pool::wait`](crate::Pool).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

impl Ticket {
    pub(crate) fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number; never 0.
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

/// What the journal's users share.
#[derive(Debug, Default)]
pub(crate) struct LogState {
    /// Changes that wait for the next commit.
    pub(crate) pending: Vec<u8>,
    /// Where each of them ends.
    pub(crate) ends: Vec<usize>,
    /// Number of changes that were appended, and of those that are durable.
    pub(crate) appended: u64,
    pub(crate) durable: u64,
    /// A thread is committing.
    pub(crate) is_committing: bool,
    /// Nothing can be made durable any more.
    pub(crate) failed: Option<String>,
}

/// Where the journal stands. Only the thread that commits changes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogPlace {
    /// The next block.
    pub(crate) position: Position,
    /// Sequence number of the newest checkpoint.
    pub(crate) checkpoint: u64,
    /// Which of the two places the next checkpoint goes to.
    pub(crate) next_place: u64,
}

/// The area of a member, in bytes of its store.
#[derive(Debug, Clone)]
pub(crate) struct OpenArea {
    journal: Range<u64>,
    checkpoints: [Range<u64>; 2],
}

impl OpenArea {
    pub(crate) fn new(area: &Area, slab_shift: u8) -> Self {
        let at = |slab: u32| SLABS_OFFSET_BYTES + (u64::from(slab) << slab_shift);
        let checkpoint = |number: u32| {
            let first = area.first_slab + area.journal_slabs + number * area.checkpoint_slabs;
            at(first)..at(first + area.checkpoint_slabs)
        };
        Self {
            journal: at(area.first_slab)..at(area.first_slab + area.journal_slabs),
            checkpoints: [checkpoint(0), checkpoint(1)],
        }
    }

    /// Allocates the space of the area, so that no later write of it can find the disk full.
    pub(crate) fn allocate(&self, store: &dyn Store) -> io::Result<()> {
        let (offset_bytes, end_bytes) = (self.journal.start, self.checkpoints[1].end);
        store.allocate(FileRange { offset_bytes, len_bytes: end_bytes - offset_bytes })
    }

    /// Number of blocks of the journal.
    pub(crate) fn blocks(&self) -> u64 {
        (self.journal.end - self.journal.start) / BLOCK_BYTES as u64
    }

    /// Bytes of changes that a checkpoint has room for.
    pub(crate) fn checkpoint_bytes(&self) -> u64 {
        self.checkpoints[0].end - self.checkpoints[0].start - BLOCK_BYTES as u64
    }

    /// Writes consecutive blocks of the journal, the first of which has the number `sequence`, and
    /// makes them durable.
    pub(crate) fn write_blocks(&self, member: &Member, sequence: u64, blocks: &[u8]) -> io::Result<()> {
        let first = sequence % self.blocks();
        let until_end = ((self.blocks() - first) as usize).saturating_mul(BLOCK_BYTES);
        let (front, rest) = blocks.split_at(until_end.min(blocks.len()));
        if !rest.is_empty() {
            member.write_at(rest, self.journal.start)?;
        }
        let at = self.journal.start + first * BLOCK_BYTES as u64;
        if !rest.is_empty() {
            member.write_at(front, at)?;
            return member.sync_all();
        }
        member.write_durable(front, at)
    }

    /// Writes a checkpoint to one of the two places. Its header is written when its contents are
    /// durable.
    pub(crate) fn write_checkpoint(
        &self,
        member: &Member,
        pool: Uuid,
        place: u64,
        header: &Checkpoint,
        changes: &[u8],
    ) -> io::Result<()> {
        let at = self.checkpoints[(place % 2) as usize].start;
        member.write_at(changes, at + BLOCK_BYTES as u64)?;
        member.sync_all()?;
        member.write_durable(&header.to_block(pool), at)
    }

    /// Reads the newest valid checkpoint.
    fn read_checkpoint(&self, store: &dyn Store, pool: Uuid) -> Result<(Checkpoint, Vec<u8>, u64), String> {
        let mut found = Vec::new();
        let mut why = String::from("it has no checkpoint");
        for (place, range) in (0..).zip(&self.checkpoints) {
            let mut block = [0; BLOCK_BYTES];
            let read = store.read_at(&mut block, range.start).map_err(|error| error.to_string());
            match read.and_then(|()| Checkpoint::parse(&block, pool).map_err(|error| error.to_string())) {
                Ok(header) if header.changes_bytes > self.checkpoint_bytes() => {
                    why = format!("a checkpoint of {} bytes, which is longer than its place", header.changes_bytes);
                }
                Ok(header) => found.push((header, place)),
                Err(error) => why = error,
            }
        }
        found.sort_by_key(|(header, _)| std::cmp::Reverse(header.position.sequence));
        for (header, place) in found {
            let mut changes = vec![0; header.changes_bytes as usize];
            let at = self.checkpoints[place as usize].start + BLOCK_BYTES as u64;
            match store.read_at(&mut changes, at) {
                Ok(()) if crc32c::crc32c(&changes) == header.changes_checksum => {
                    return Ok((header, changes, place + 1));
                }
                Ok(()) => why = "the contents of a checkpoint do not have its checksum".into(),
                Err(error) => why = error.to_string(),
            }
        }
        Err(why)
    }

    /// Reads the checkpoint and the journal of a member.
    pub(crate) fn read(&self, store: &dyn Store, pool: Uuid) -> Result<History, String> {
        let (header, checkpoint, next_place) = self.read_checkpoint(store, pool)?;
        let (mut position, mut changes, mut blocks) = (header.position, Vec::new(), Vec::new());
        // A journal is read in pieces: most of it is usually old.
        let mut piece: (u64, Vec<u8>) = (u64::MAX, Vec::new());
        for _ in 0..self.blocks() {
            let at = position.sequence % self.blocks() * BLOCK_BYTES as u64;
            let start = at - at % PIECE_BYTES;
            if piece.0 != start {
                let len_bytes = PIECE_BYTES.min(self.journal.end - self.journal.start - start);
                piece = (start, vec![0; len_bytes as usize]);
                store.read_at(&mut piece.1, self.journal.start + start).map_err(|error| error.to_string())?;
            }
            let block = &piece.1[(at - start) as usize..][..BLOCK_BYTES];
            let Some((found, next)) = parse_block(block, pool, position) else { break };
            changes.extend_from_slice(found);
            blocks.extend_from_slice(block);
            position = next;
        }
        let place = LogPlace { position, checkpoint: header.position.sequence, next_place };
        Ok(History { header, checkpoint, changes, blocks, place })
    }

    /// Writes what was read once more, durably. If a sync failed before the pool was opened, the
    /// page cache may show blocks that are not on the disk, and a journal that is continued behind
    /// them would end at them after a power cut. Of a pool that was closed only the last commit may
    /// be such.
    pub(crate) fn rewrite(&self, member: &Member, pool: Uuid, history: &History) -> io::Result<()> {
        let used = (history.place.next_place + 1) % 2;
        member.write_at(&history.header.to_block(pool), self.checkpoints[used as usize].start)?;
        let all = (history.blocks.len() / BLOCK_BYTES) as u64;
        let again = if history.is_closed() { all.min(LAST_BLOCKS) } else { all };
        let from = (all - again) as usize * BLOCK_BYTES;
        if again > 0 {
            self.write_blocks(member, history.header.position.sequence + all - again, &history.blocks[from..])?;
        }
        member.sync_all()
    }
}

/// Blocks that the commit of a close has at most.
const LAST_BLOCKS: u64 = 16;

/// Length of a read of the journal.
const PIECE_BYTES: u64 = 256 << 10;

/// What an area holds.
#[derive(Debug)]
pub(crate) struct History {
    /// The header of the checkpoint.
    header: Checkpoint,
    /// The blocks of the journal that follow it.
    blocks: Vec<u8>,
    /// The changes of the checkpoint.
    pub(crate) checkpoint: Vec<u8>,
    /// The changes of the journal that follow.
    pub(crate) changes: Vec<u8>,
    /// Where the journal continues.
    pub(crate) place: LogPlace,
}

impl History {
    /// Whether the pool was closed after its last change.
    pub(crate) fn is_closed(&self) -> bool {
        Changes::new(&self.changes).last().is_none_or(|change| matches!(change, Ok(Change::Closed)))
    }

    /// All changes, in order.
    pub(crate) fn changes(&self) -> impl Iterator<Item = diskwright_format::space::Result<Change<'_>>> {
        Changes::new(&self.checkpoint).chain(Changes::new(&self.changes))
    }
}

/// Packs changes into blocks, without splitting one. `ends` says where each change ends.
pub(crate) fn pack(pool: Uuid, mut position: Position, pending: &[u8], ends: &[usize]) -> (Vec<u8>, Position) {
    let (mut blocks, mut start, mut end) = (Vec::new(), 0, 0);
    let mut close = |range: Range<usize>| {
        let mut block = [0; BLOCK_BYTES];
        position = put_block(&mut block, pool, position, &pending[range]);
        blocks.extend_from_slice(&block);
    };
    for &next in ends {
        if next - start > CHANGES_BYTES_MAX {
            close(start..end);
            start = end;
        }
        end = next;
    }
    if end > start {
        close(start..end);
    }
    (blocks, position)
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_format::space::{change::Change, superblock::Class};
    use diskwright_store::MemoryStore;
    use std::{path::Path, sync::Arc};

    const POOL: Uuid = Uuid::from_u128(4);

    fn pending(numbers: Range<u32>) -> (Vec<u8>, Vec<usize>) {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for number in numbers {
            let name = "n".repeat(200);
            Change::File { file: number, len_bytes: 0, copies: 1, columns: 1, tier: Default::default(), name: &name }
                .put(&mut bytes);
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    fn numbers(history: &History) -> Vec<u32> {
        let number = |change| match change {
            Ok(Change::File { file, .. }) => file,
            other => panic!("{other:?}"),
        };
        history.changes().map(number).collect()
    }

    #[test]
    fn a_journal_is_read_to_its_end_across_the_end_of_its_area() {
        let area = Area { member: 0, first_slab: 1, journal_slabs: 1, checkpoint_slabs: 1 };
        let open = OpenArea::new(&area, 18);
        assert_eq!((open.blocks(), open.checkpoint_bytes()), (64, (256 << 10) - 4096));
        let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("m", vec![0; 4 << 20]));
        let member = Member::new(0, Class::Ssd, 4 << 20, Path::new("m"), Arc::clone(&store));
        assert!(open.read(&*store, POOL).is_err(), "no checkpoint");
        let mut position = Position { sequence: 60, before: 0 };
        let (bytes, _) = pending(0..3);
        let checkpoint = |position| Checkpoint {
            position,
            changes_bytes: bytes.len() as u64,
            changes_checksum: crc32c::crc32c(&bytes),
        };
        open.write_checkpoint(&member, POOL, 0, &checkpoint(position), &bytes).unwrap();
        // 18 changes fit into a block, so these need 6 blocks: numbers 60 to 65.
        let (changes, ends) = pending(3..111);
        let (blocks, next) = pack(POOL, position, &changes, &ends);
        assert_eq!((blocks.len() / BLOCK_BYTES, next.sequence), (6, 66));
        open.write_blocks(&member, position.sequence, &blocks).unwrap();
        let history = open.read(&*store, POOL).unwrap();
        assert_eq!(numbers(&history), (0..111).collect::<Vec<_>>());
        assert_eq!((history.place.position, history.place.checkpoint, history.place.next_place), (next, 60, 1));
        // A newer checkpoint in the other place counts; when it is damaged, the older one does.
        position = next;
        open.write_checkpoint(&member, POOL, 1, &checkpoint(position), &bytes).unwrap();
        assert_eq!(numbers(&open.read(&*store, POOL).unwrap()), [0, 1, 2]);
        store.write_at(&[1], open.checkpoints[1].start + 4100).unwrap();
        assert_eq!(numbers(&open.read(&*store, POOL).unwrap()).len(), 111);
    }

    #[test]
    fn a_change_is_never_split() {
        let (changes, ends) = pending(0..40);
        let (blocks, _) = pack(POOL, Position { sequence: 0, before: 0 }, &changes, &ends);
        let mut position = Position { sequence: 0, before: 0 };
        let mut found = 0;
        for block in blocks.chunks_exact(BLOCK_BYTES) {
            let (changes, next) = parse_block(block, POOL, position).unwrap();
            found += Changes::new(changes).map(Result::unwrap).count();
            position = next;
        }
        assert_eq!(found, 40);
        assert!(pack(POOL, position, &[], &[]).0.is_empty());
    }
}
