//! What the log of the cache holds, in memory: which blocks are in it, and which of them are free.
//!
//! ```text
//!   tail ── groups: a header and the blocks that it names ── fresh blocks ── head ── free ── tail
//!
//!   reserve ─▶ transfer ─▶ ended: live, and fresh ─▶ take_rows: named by a header
//!   live ─ written again ─▶ dead          live ─ destaged ─▶ clean ─ the tail passes ─▶ dead
//!   oldest ─▶ their slabs are destaged ─▶ anchor, durable ─▶ advance: the tail moves
//! ```
//!
//! Positions only grow; see the format. Invariant: a block is used again only after the tail has
//! passed it, and the tail passes a group only when all slabs that it names were destaged by a
//! thread that had each of them for itself. So nobody reads a live block that is used again: who
//! reads holds the slab.
//!
//! A clean block is in its slab too. Reads still find it here, on a faster member, until the tail
//! passes it. It may be used again while it is read: it is forgotten before, so whoever has read it
//! asks for its checksum once more ([`Ring::sum_of`]), and reads the slab instead if there is none.
//!
//! A slab stays in the table until the tail has passed all of its rows. While it is there, a replay
//! would apply them, so nothing may be written to the slab past the log.

use diskwright_format::space::{
    BLOCK_BYTES,
    cache::{Anchor, HeaderPlace, RING_AT, ROWS_MAX, Row, RowKind, put_header},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::{Duration, Instant},
};
use uuid::Uuid;

/// A slab of a file: number of the file, index of the slab.
pub(crate) type SlabKey = (u32, u32);

/// Blocks that only headers take, so that a full log can still be flushed and forget slabs.
const MARGIN: u64 = 64;

/// A block of a slab that is in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) position: u64,
    pub(crate) sum: u32,
    /// Whether the slab has it too.
    is_clean: bool,
}

impl Live {
    fn new(position: u64, sum: u32) -> Self {
        Self { position, sum, is_clean: false }
    }
}

/// Blocks that are being written.
#[derive(Debug)]
struct Pending {
    key: SlabKey,
    block: u16,
    position: u64,
    sums: Vec<u32>,
    kind: RowKind,
    /// Transfers that have not ended.
    left: u8,
    ok: bool,
}

/// What is known about a slab that the log names.
#[derive(Debug, Default)]
struct Logged {
    live: BTreeMap<u16, Live>,
    /// Writes under way, and rows that no header names yet.
    open: u32,
    /// The last header that names it.
    last_sequence: u64,
}

/// A header, and what it names.
#[derive(Debug)]
struct Group {
    place: HeaderPlace,
    /// The lowest and the highest position of its blocks.
    lowest: u64,
    highest: u64,
    slabs: BTreeSet<SlabKey>,
    born: Instant,
}

impl Group {
    fn new(place: HeaderPlace, rows: &[Row], slabs: BTreeSet<SlabKey>) -> Self {
        let lowest = positions(rows).fold(place.position, u64::min);
        let highest = positions(rows).fold(place.position, u64::max);
        Self { place, lowest, highest, slabs, born: Instant::now() }
    }
}

/// A header that is to be written.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) position: u64,
    pub(crate) block: Box<[u8; BLOCK_BYTES]>,
    /// Number of its rows.
    pub(crate) rows: u64,
}

/// The oldest part of the log.
#[derive(Debug)]
pub(crate) struct Oldest {
    /// The slabs that it names.
    pub(crate) slabs: BTreeSet<SlabKey>,
    /// The first header after it.
    pub(crate) end: HeaderPlace,
    /// All its blocks lie before this position.
    pub(crate) limit: u64,
    /// Blocks that are free without it, and blocks that must be destaged before.
    pub(crate) blocks: u64,
    pub(crate) live: u64,
}

/// A transfer to the log has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Others have not.
    NotAll,
    /// It was the last one.
    All,
}

/// What a block of a slab is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// So many blocks that follow one another in the log.
    Logged { position: u64, blocks: u64 },
    /// So many blocks are not in the log.
    Not { blocks: u64 },
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Ring {
    /// Length of the ring, and blocks of a slab.
    blocks: u64,
    slab_blocks: u64,
    head: u64,
    tail: u64,
    pending: HashMap<u32, Pending>,
    next_ticket: u32,
    fresh: Vec<Row>,
    slabs: HashMap<SlabKey, Logged>,
    groups: VecDeque<Group>,
    /// The header that is written next; its block is reserved.
    next: HeaderPlace,
    anchor: u64,
    /// Blocks that may be reserved although the log is nearly full: as many as were destaged.
    credits: u64,
}

impl Ring {
    /// An empty ring of a file with `file_blocks`, whose first header will be at `next`.
    pub(crate) fn new(file_blocks: u64, slab_blocks: u64, anchor: Anchor) -> Self {
        Self {
            blocks: file_blocks - RING_AT,
            slab_blocks,
            head: anchor.first.position + 1,
            tail: anchor.tail,
            pending: HashMap::new(),
            next_ticket: 0,
            fresh: Vec::new(),
            slabs: HashMap::new(),
            groups: VecDeque::new(),
            next: anchor.first,
            anchor: anchor.number,
            credits: 0,
        }
    }

    /// Adds a header that was read: the one at [`Ring::next_place`].
    pub(crate) fn replay(&mut self, rows: &[Row], next: HeaderPlace) {
        let (place, mut slabs) = (self.next, BTreeSet::new());
        for row in rows {
            let key = (row.file, row.index);
            slabs.insert(key);
            let slab = self.slabs.entry(key).or_default();
            slab.last_sequence = place.sequence;
            if row.kind.has_block() {
                slab.put(row.block, Live::new(row.position, row.sum));
            }
        }
        self.groups.push_back(Group::new(place, rows, slabs));
        self.next = next;
        self.head = self.head.max(next.position + 1);
    }

    /// Forgets what was logged of a slab that does not exist any more.
    pub(crate) fn drop_slab(&mut self, key: SlabKey) {
        if let Some(slab) = self.slabs.get_mut(&key) {
            slab.live.clear();
        }
    }

    /// Makes rows that say that these rows do not count.
    pub(crate) fn void(&mut self, rows: impl IntoIterator<Item = Row>) {
        for row in rows {
            self.slabs.entry((row.file, row.index)).or_default().open += 1;
            self.fresh.push(Row { kind: RowKind::Void, ..row });
        }
    }

    pub(crate) fn next_place(&self) -> HeaderPlace {
        self.next
    }

    /// The slabs that the log names.
    pub(crate) fn slabs(&self) -> impl Iterator<Item = SlabKey> {
        self.slabs.keys().copied()
    }

    /// The block of the file at a position.
    pub(crate) fn file_block(&self, position: u64) -> u64 {
        RING_AT + position % self.blocks
    }

    /// How many blocks from a position on follow one another in one slab of the file.
    fn straight(&self, position: u64) -> u64 {
        let to_end = self.blocks - position % self.blocks;
        to_end.min(self.slab_blocks - self.file_block(position) % self.slab_blocks)
    }

    /// No block before this position counts.
    pub(crate) fn tail(&self) -> u64 {
        self.tail
    }

    /// Where the next block goes.
    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    /// Length in blocks.
    pub(crate) fn len(&self) -> u64 {
        self.blocks
    }

    /// Blocks that are not free.
    pub(crate) fn used(&self) -> u64 {
        self.head - self.tail
    }

    /// Blocks whose newest contents are only here.
    pub(crate) fn live(&self) -> u64 {
        self.slabs.values().map(|slab| slab.only_here().count() as u64).sum()
    }

    /// Rows that no header names.
    pub(crate) fn fresh(&self) -> usize {
        self.fresh.len()
    }

    /// How long ago the oldest header was written.
    pub(crate) fn age(&self) -> Duration {
        self.groups.front().map_or(Duration::ZERO, |group| group.born.elapsed())
    }

    fn free(&self) -> u64 {
        (self.tail + self.blocks).saturating_sub(self.head)
    }

    /// Whether there is no block left, not even for a header.
    pub(crate) fn is_full(&self) -> bool {
        self.free() == 0
    }

    /// Blocks that headers may still take for what is under way.
    fn owed(&self) -> u64 {
        (self.fresh.len() / ROWS_MAX) as u64 + 2 + 2 * self.pending.len() as u64
    }

    /// When writers have fewer free blocks than this, they get only as many as are destaged.
    fn low_water(&self) -> u64 {
        (self.blocks / 8).max(MARGIN)
    }

    /// Free blocks that writers may have.
    fn spare(&self) -> u64 {
        self.free().saturating_sub(self.owed() + MARGIN)
    }

    /// Whether writers must wait for blocks to be destaged.
    pub(crate) fn is_low(&self) -> bool {
        self.spare() < self.low_water()
    }

    /// Admits a write of `count` blocks, if the log is not low or as much was destaged.
    pub(crate) fn admit(&mut self, count: u64) -> bool {
        if !self.is_low() {
            return true;
        }
        let left = self.credits.checked_sub(count);
        self.credits = left.unwrap_or(self.credits);
        left.is_some()
    }

    /// Whether so little is free that writers may soon have to wait.
    pub(crate) fn is_nearly_low(&self) -> bool {
        self.spare() < 2 * self.low_water()
    }

    /// Reserves blocks of the log for a write, with `copies` transfers. Returns the ticket of the
    /// write and its position. `None` if the log is full; if the write was not `admitted`, also if
    /// it is low.
    pub(crate) fn reserve(
        &mut self,
        key: SlabKey,
        block: u16,
        count: u64,
        copies: u8,
        admitted: bool,
    ) -> Option<(u32, u64)> {
        let mut position = self.head;
        while self.straight(position) < count {
            position += self.straight(position);
        }
        let taken = position + count - self.head;
        let left = self.free().checked_sub(taken + self.owed() + MARGIN)?;
        if !admitted && left < self.low_water() {
            return None;
        }
        self.head = position + count;
        while self.pending.contains_key(&self.next_ticket) {
            self.next_ticket = (self.next_ticket + 1) % (1 << 30);
        }
        let ticket = self.next_ticket;
        self.next_ticket = (ticket + 1) % (1 << 30);
        let (sums, kind) = (Vec::new(), RowKind::Block);
        let pending = Pending { key, block, position, sums, kind, left: copies, ok: true };
        self.pending.insert(ticket, pending);
        self.slabs.entry(key).or_default().open += 1;
        Some((ticket, position))
    }

    /// Sets the number of transfers of a write, before the first one.
    pub(crate) fn expect(&mut self, ticket: u32, copies: u8) {
        if let Some(pending) = self.pending.get_mut(&ticket) {
            pending.left = copies;
        }
    }

    /// Notes the checksums of the blocks of a write.
    pub(crate) fn note(&mut self, ticket: u32, sums: Vec<u32>) {
        if let Some(pending) = self.pending.get_mut(&ticket) {
            pending.sums = sums;
        }
    }

    /// Notes that a write has contents without the checksums that were noted.
    pub(crate) fn note_lost(&mut self, ticket: u32) {
        if let Some(pending) = self.pending.get_mut(&ticket) {
            pending.kind = RowKind::Lost;
        }
    }

    /// The position of a write.
    pub(crate) fn position_of(&self, ticket: u32) -> Option<u64> {
        self.pending.get(&ticket).map(|pending| pending.position)
    }

    /// A transfer of a write has ended. With the last one its blocks are live, if all succeeded.
    pub(crate) fn ended(&mut self, ticket: u32, ok: bool) -> Ended {
        let Some(pending) = self.pending.get_mut(&ticket) else { return Ended::All };
        pending.ok &= ok;
        pending.left = pending.left.saturating_sub(1);
        if pending.left > 0 {
            return Ended::NotAll;
        }
        let Some(Pending { key, block, position, sums, kind, ok, .. }) = self.pending.remove(&ticket) else {
            return Ended::All;
        };
        let slab = self.slabs.entry(key).or_default();
        slab.open -= 1;
        if ok {
            for (step, sum) in (0..).zip(sums) {
                let (block, position) = (block + step as u16, position + step);
                slab.put(block, Live::new(position, sum));
                slab.open += 1;
                self.fresh.push(Row { file: key.0, index: key.1, block, kind, position, sum });
            }
        }
        Ended::All
    }

    /// What the log has of a slab from `block` on. It may be gone when it has been read.
    pub(crate) fn find(&self, key: SlabKey, block: u16) -> Found {
        self.find_those(key, block, |_| true)
    }

    /// What only the log has of a slab from `block` on.
    pub(crate) fn find_live(&self, key: SlabKey, block: u16) -> Found {
        self.find_those(key, block, |live| !live.is_clean)
    }

    fn find_those(&self, key: SlabKey, block: u16, counts: impl Fn(&Live) -> bool) -> Found {
        let rest = self.slab_blocks - u64::from(block);
        let Some(slab) = self.slabs.get(&key) else { return Found::Not { blocks: rest } };
        let mut from = slab.live.range(block..).filter(|(_, live)| counts(live));
        match from.next() {
            Some((&first, live)) if first == block => {
                let position = live.position;
                let most = self.straight(position);
                let next = |(step, (&other, live)): (u64, (&u16, &Live))| {
                    u64::from(other) == u64::from(block) + step && live.position == position + step && step < most
                };
                let more = (1..).zip(from).take_while(|&(step, row)| next((step, row))).count() as u64;
                Found::Logged { position, blocks: 1 + more }
            }
            Some((&first, _)) => Found::Not { blocks: u64::from(first - block) },
            None => Found::Not { blocks: rest },
        }
    }

    /// The checksum of a block that is in the log.
    pub(crate) fn sum_of(&self, key: SlabKey, block: u16) -> Option<u32> {
        self.slabs.get(&key)?.live.get(&block).map(|live| live.sum)
    }

    /// The blocks of a slab that only the log has.
    pub(crate) fn live_of(&self, key: SlabKey) -> Vec<(u16, Live)> {
        self.slabs.get(&key).into_iter().flat_map(Logged::only_here).collect()
    }

    /// Blocks that slabs have too.
    #[cfg(test)]
    pub(crate) fn clean(&self) -> impl Iterator<Item = (SlabKey, u16, Live)> {
        let clean = |(&key, slab): (&SlabKey, &Logged)| {
            let clean: Vec<_> = slab.live.iter().filter(|(_, live)| live.is_clean).collect();
            clean.into_iter().map(|(&block, &live)| (key, block, live)).collect::<Vec<_>>()
        };
        self.slabs.iter().flat_map(clean)
    }

    /// Blocks of a slab were written to where they belong. The caller has the slab for itself.
    pub(crate) fn destaged(&mut self, key: SlabKey, blocks: &[(u16, Live)]) {
        if let Some(slab) = self.slabs.get_mut(&key) {
            for (block, written) in blocks {
                if let Some(live) = slab.live.get_mut(block).filter(|live| *live == written) {
                    live.is_clean = true;
                }
            }
        }
    }

    /// From now on as many more blocks may be reserved although the log is nearly full.
    pub(crate) fn grant(&mut self, blocks: u64) {
        self.credits = (self.credits + blocks).min(self.spare());
    }

    /// Makes rows that end everything that the log has of these slabs. `false` if there is no room
    /// for the header. The caller has the slabs for itself.
    pub(crate) fn forget(&mut self, keys: &[SlabKey]) -> bool {
        if self.free() < self.owed() + 2 + (keys.len() / ROWS_MAX) as u64 {
            return false;
        }
        for &(file, index) in keys {
            self.fresh.push(Row { file, index, block: 0, kind: RowKind::Forget, position: self.head, sum: 0 });
            self.slabs.entry((file, index)).or_default().open += 1;
        }
        true
    }

    /// Removes slabs whose end is durable. The caller has them for itself.
    pub(crate) fn remove(&mut self, key: SlabKey) {
        self.slabs.remove(&key);
    }

    /// Makes a header of rows that have none. `None` if all have one.
    pub(crate) fn take_rows(&mut self, pool: Uuid, durable: u64) -> Option<Taken> {
        if self.fresh.is_empty() {
            return None;
        }
        let rest = self.fresh.split_off(self.fresh.len().min(ROWS_MAX));
        let rows = std::mem::replace(&mut self.fresh, rest);
        let place = self.next;
        let next_position = self.head;
        self.head += 1;
        let (block, next) = put_header(pool, place, next_position, durable, &rows);
        self.next = next;
        let mut slabs = BTreeSet::new();
        for row in &rows {
            let key = (row.file, row.index);
            slabs.insert(key);
            // Not there if its file was removed.
            if let Some(slab) = self.slabs.get_mut(&key) {
                slab.open = slab.open.saturating_sub(1);
                slab.last_sequence = place.sequence;
            }
        }
        self.groups.push_back(Group::new(place, &rows, slabs));
        Some(Taken { position: place.position, block: Box::new(block), rows: rows.len() as u64 })
    }

    /// The oldest groups, without which at least `blocks` are free if there are as many. `None` if
    /// there are no groups.
    pub(crate) fn oldest(&self, blocks: u64) -> Option<Oldest> {
        // Where the tail would be after each group: a later one may have an older block.
        let mut tails = vec![self.lowest_without_group().min(self.next.position)];
        for group in self.groups.iter().rev() {
            tails.push(tails.last().map_or(group.lowest, |&tail| tail.min(group.lowest)));
        }
        let (mut slabs, mut limit, mut found) = (BTreeSet::new(), 0, None);
        for (place, (group, tail)) in self.groups.iter().zip(tails.iter().rev().skip(1)).enumerate() {
            slabs.extend(group.slabs.iter().copied());
            limit = limit.max(group.highest + 1);
            found = Some((self.after(place), tail - self.tail));
            if tail - self.tail >= blocks {
                break;
            }
        }
        let (end, blocks) = found?;
        let live = slabs.iter().filter_map(|key| self.slabs.get(key)).flat_map(Logged::only_here);
        let live = live.filter(|(_, live)| live.position < limit).count() as u64;
        Some(Oldest { slabs, end, limit, blocks, live })
    }

    /// The lowest position of a block that no header names.
    fn lowest_without_group(&self) -> u64 {
        let pending = self.pending.values().map(|pending| pending.position);
        pending.chain(positions(&self.fresh)).min().unwrap_or(u64::MAX)
    }

    /// The header after the group at a place in the list.
    fn after(&self, place: usize) -> HeaderPlace {
        self.groups.get(place + 1).map_or(self.next, |group| group.place)
    }

    /// The first header after `end`, and before `begun`, that names other slabs than these, all of
    /// whose blocks were destaged.
    pub(crate) fn end_of(&self, slabs: &BTreeSet<SlabKey>, end: HeaderPlace, begun: HeaderPlace) -> HeaderPlace {
        let later = self.groups.iter().filter(|group| group.place.sequence >= end.sequence);
        let mut names_others = later.skip_while(|group| group.slabs.is_subset(slabs));
        let first = names_others.next().map_or(self.next, |group| group.place);
        if first.sequence < begun.sequence { first } else { begun }
    }

    /// The anchor of a log that begins at the header with sequence number `end`.
    pub(crate) fn anchor_at(&self, end: u64) -> Anchor {
        let left = || self.groups.iter().filter(|group| group.place.sequence >= end);
        let first = left().next().map_or(self.next, |group| group.place);
        let lowest = left().map(|group| group.lowest).chain([self.lowest_without_group()]).min();
        let tail = lowest.map_or(first.position, |lowest| lowest.min(first.position));
        Anchor { first, number: self.anchor + 1, tail }
    }

    /// The log begins at `anchor`, durably. `clear` is called for each slab that it does not name
    /// any more.
    pub(crate) fn advance(&mut self, anchor: &Anchor, mut clear: impl FnMut(SlabKey)) {
        self.anchor = anchor.number;
        self.tail = anchor.tail;
        let is_before = |group: &Group| group.place.sequence < anchor.first.sequence;
        while let Some(group) = self.groups.front().is_some_and(is_before).then(|| self.groups.pop_front()).flatten() {
            for key in group.slabs {
                let Some(slab) = self.slabs.get_mut(&key) else { continue };
                slab.live.retain(|_, live| !live.is_clean || live.position > group.highest);
                let has_more = slab.only_here().next().is_some() || slab.open > 0;
                if !has_more && slab.last_sequence < anchor.first.sequence {
                    self.slabs.remove(&key);
                    clear(key);
                }
            }
        }
        if !self.is_low() {
            self.credits = 0;
        }
    }
}

/// The positions of the blocks that rows name.
fn positions(rows: &[Row]) -> impl Iterator<Item = u64> {
    rows.iter().filter(|row| row.kind.has_block()).map(|row| row.position)
}

impl Logged {
    /// The blocks that only the log has.
    fn only_here(&self) -> impl Iterator<Item = (u16, Live)> {
        self.live.iter().filter(|(_, live)| !live.is_clean).map(|(&block, &live)| (block, live))
    }

    /// The block has new contents, unless newer ones are there.
    fn put(&mut self, block: u16, new: Live) {
        let live = self.live.entry(block).or_insert(new);
        if live.position < new.position {
            *live = new;
        }
    }
}
