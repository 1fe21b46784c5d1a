//! A cache is created, found when its pool is opened, and removed.
//!
//! ```text
//!   anchors, the newer one ─▶ header ─▶ header ─▶ ... ─▶ a block that does not continue them
//!   rows    ─▶ of two for the same block the newer one; none that is older than a row that forgets
//!   headers that were perhaps not durable ─▶ their blocks must have their checksums
//! ```
//!
//! The slabs of the log were made equal before, like all that were dirty. A block that a flush has
//! promised is on all copies then; of one that it has not, any contents will do.

use super::{
    ring::{Ring, SlabKey},
    state::{Cache, LOG},
};
use crate::{
    error::{Result, SpaceError, called},
    pool::{FileState, NewFile, Pool, lock},
    slab_table::Slab,
};
use diskwright_format::space::{
    BLOCK_BYTES,
    cache::{Anchor, CACHE_BYTES, Header, HeaderPlace, Row, RowKind},
    change::Tier,
    superblock::Class,
};
use std::{
    collections::{HashMap, HashSet},
    io,
    path::Path,
    sync::{Arc, atomic::Ordering},
};

/// Size of a cache if none is given.
pub const CACHE_BYTES_DEFAULT: u64 = 1 << 30;

/// How far [`Pool::remove_cache`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Emptied {
    /// Bytes that are on the slow members.
    pub done_bytes: u64,
    /// Bytes that were to go there when it began.
    pub total_bytes: u64,
}

/// Reads the log, a slab at a time.
struct Reader<'a> {
    pool: &'a Pool,
    file: &'a FileState,
    slab: Option<u32>,
    bytes: Vec<u8>,
}

impl Reader<'_> {
    /// What `accept` makes of the block of the log's file with this number: of the copy that is
    /// read first, or of another one if it is not accepted.
    fn any_copy<T>(&mut self, number: u64, accept: impl Fn(&[u8]) -> Option<T>) -> io::Result<Option<T>> {
        let slab_blocks = self.pool.slab_bytes() / BLOCK_BYTES as u64;
        let (index, at) = ((number / slab_blocks) as u32, (number % slab_blocks) as usize * BLOCK_BYTES);
        let entry = self.file.table.get(index).and_then(|entry| entry.hold_for_read().map(|slab| (entry, slab)));
        let (entry, slab) = entry.ok_or_else(|| io::Error::other("a slab of the log is not mapped"))?;
        let found = self.accepted(slab, index, at, accept);
        entry.release(1);
        found
    }

    fn accepted<T>(
        &mut self,
        slab: Slab,
        index: u32,
        at: usize,
        accept: impl Fn(&[u8]) -> Option<T>,
    ) -> io::Result<Option<T>> {
        if self.slab != Some(index) {
            self.bytes.resize(self.pool.slab_bytes() as usize, 0);
            self.slab = None;
            self.pool.read_copies(self.file, slab, 0, &mut self.bytes)?;
            self.slab = Some(index);
        }
        let found = accept(&self.bytes[at..at + BLOCK_BYTES]);
        if found.is_some() {
            return Ok(found);
        }
        let mut block = [0; BLOCK_BYTES];
        for copy in slab.good_copies() {
            let Some(member) = self.pool.live_member(copy.member) else { continue };
            let offset_bytes = copy.offset_bytes(self.pool.slab_shift()) + at as u64;
            if member.read_at(&mut block, offset_bytes).is_ok()
                && let Some(found) = accept(&block)
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

/// The rows of headers that count, header by header. `has_block` says whether the log has the block
/// of a row.
pub(super) fn counted(
    headers: &[(HeaderPlace, Header)],
    mut has_block: impl FnMut(&HeaderPlace, &Row) -> io::Result<bool>,
) -> io::Result<Vec<Vec<Row>>> {
    let all_rows = || headers.iter().flat_map(|(_, header)| &header.rows);
    let mut forgotten: HashMap<SlabKey, u64> = HashMap::new();
    for row in all_rows().filter(|row| row.kind == RowKind::Forget) {
        let upto = forgotten.entry((row.file, row.index)).or_default();
        *upto = (*upto).max(row.position);
    }
    let void: HashSet<u64> = all_rows().filter(|row| row.kind == RowKind::Void).map(|row| row.position).collect();
    let mut counted = Vec::new();
    for (place, header) in headers {
        let mut rows = Vec::new();
        for row in &header.rows {
            let is_ended = forgotten.get(&(row.file, row.index)).is_some_and(|&upto| row.position < upto)
                || void.contains(&row.position);
            if !row.kind.has_block() || !is_ended && has_block(place, row)? {
                rows.push(*row);
            }
        }
        counted.push(rows);
    }
    Ok(counted)
}

impl Pool {
    /// Opens the cache of the pool, if it has one: reads what is in its log.
    pub(crate) fn open_cache(&self) -> Result<()> {
        let Some(file) = self.file_named(LOG) else { return Ok(()) };
        let failed = |error| SpaceError::io("read its write-back cache", Path::new(self.name()), error);
        let ring = self.read_log(&file).map_err(failed)?;
        let Some((ring, durable)) = ring else {
            let why = "neither place of the anchor of its write-back cache is valid";
            return Err(SpaceError::BadMap { pool: called(self.name(), self.id()), why: why.into() });
        };
        for (number, index) in ring.slabs() {
            if let Some(entry) = self.file(number).as_ref().and_then(|file| file.table.get(index)) {
                entry.set_logged(true);
            }
        }
        if self.is_writable() {
            // After a crash of the program they may be in the page cache only.
            self.live_members().for_each(|member| member.written());
        }
        let cache = Arc::new(Cache::new(file, self.slab_shift(), ring, durable));
        let has_more = self.is_writable() && cache.has_unwritten();
        let _ = self.cache_cell().set(cache);
        // What a replay must not apply is recorded before anything is written.
        if has_more { self.sync_all().map_err(failed) } else { Ok(()) }
    }

    /// What is in the log, and the sequence number before which all headers are durable. `None` if
    /// it has no anchor.
    fn read_log(&self, file: &FileState) -> io::Result<Option<(Ring, u64)>> {
        let mut reader = Reader { pool: self, file, slab: None, bytes: Vec::new() };
        let file_blocks = file.len_bytes.load(Ordering::Acquire) / BLOCK_BYTES as u64;
        let slab_blocks = self.slab_bytes() / BLOCK_BYTES as u64;
        if file_blocks < slab_blocks || file_blocks < 4 {
            return Ok(None);
        }
        let mut anchors = Vec::new();
        for number in 0..2 {
            anchors.extend(reader.any_copy(number, |block| Anchor::parse(block, self.id()))?);
        }
        let Some(anchor) = anchors.into_iter().max_by_key(|anchor| anchor.number) else { return Ok(None) };
        let mut ring = Ring::new(file_blocks, slab_blocks, anchor);
        let mut groups: Vec<(HeaderPlace, Header)> = Vec::new();
        let mut place = anchor.first;
        // Within one lap of the tail. A header that leads further is none.
        let end = anchor.tail.saturating_add(ring.len());
        while place.position < end
            && let Some(header) =
                reader.any_copy(ring.file_block(place.position), |block| Header::parse(block, self.id(), place))?
            && header.next.position < end
        {
            let next = header.next;
            groups.push((place, header));
            place = next;
        }
        let durable = groups.last().map_or(anchor.first.sequence, |(_, header)| header.durable);
        let mut torn = Vec::new();
        let counted = counted(&groups, |place, row| {
            let is_there = row.position >= anchor.tail && row.position < end && u64::from(row.block) < slab_blocks;
            if !is_there || place.sequence < durable || row.kind == RowKind::Lost {
                return Ok(is_there);
            }
            let has_sum = |block: &[u8]| (crc32c::crc32c(block) == row.sum).then_some(());
            let has_sum = reader.any_copy(ring.file_block(row.position), has_sum)?.is_some();
            if !has_sum {
                // The flush that would have made it durable was not answered.
                torn.push(*row);
            }
            Ok(has_sum)
        })?;
        for (rows, (_, header)) in counted.iter().zip(&groups) {
            ring.replay(rows, header.next);
        }
        let keys: Vec<SlabKey> = ring.slabs().collect();
        for key in keys {
            // Those of a removed file.
            let slab = self.file(key.0).and_then(|file| file.table.get(key.1)?.load().state());
            if slab.is_none() {
                ring.drop_slab(key);
            }
        }
        ring.void(torn);
        let all_rows = groups.iter().flat_map(|(_, header)| &header.rows);
        let highest_file = all_rows.map(|row| row.file).max().unwrap_or_default();
        // Rows of a removed file must not be taken for those of a later one.
        let mut state = lock(self.state());
        state.next_file = state.next_file.max(highest_file.saturating_add(1));
        Ok(Some((ring, durable)))
    }

    /// Whether the pool can have a write-back cache of `len_bytes`, apart from the one that it has.
    ///
    /// # Errors
    /// As [`Pool::create_cache`].
    pub fn check_cache(&self, len_bytes: u64) -> Result<()> {
        let usage = |what: String| Err(SpaceError::Usage { what: format!("pool {}: {what}", self.name()) });
        if !CACHE_BYTES.contains(&len_bytes) {
            return usage(format!("a write-back cache of {len_bytes} bytes: it must have 1 MiB to 64 GiB"));
        }
        let copies = self.default_copies();
        let fast = self.active_of(Class::Ssd);
        if !self.is_tiered() || fast.len() < usize::from(copies) {
            return usage(format!(
                "a write-back cache needs slow members, and {copies} fast ones for its copies; it has {} fast ones",
                fast.len()
            ));
        }
        let slabs = len_bytes.div_ceil(self.slab_bytes());
        // The present one goes first.
        let freed = self.cache().map_or(0, |cache| u64::from(cache.file.mapped.load(Ordering::Relaxed)));
        let free = |number: &u8| u64::from(lock(self.state()).free[usize::from(*number)].free()) + freed;
        let room: u64 = fast.iter().map(|number| free(number).min(slabs)).sum();
        if room < slabs * u64::from(copies) {
            return usage(format!("its fast members have no room for a write-back cache of {len_bytes} bytes"));
        }
        Ok(())
    }

    /// Gives the pool a write-back cache of about `len_bytes`, with as many copies as its disks
    /// have by default.
    ///
    /// # Errors
    /// [`SpaceError::Usage`] for another size than 1 MiB to 64 GiB, without fast and slow members,
    /// with fewer fast members than copies, or if the pool has a cache; [`SpaceError::Io`].
    pub fn create_cache(self: &Arc<Self>, len_bytes: u64) -> Result<()> {
        self.check_cache(len_bytes)?;
        let copies = self.default_copies();
        if self.file_named(LOG).is_some() {
            let what = format!("pool {}: it has a write-back cache; remove it first", self.name());
            return Err(SpaceError::Usage { what });
        }
        let len_bytes = len_bytes.next_multiple_of(self.slab_bytes());
        self.create_unchecked(LOG, NewFile { len_bytes, copies, columns: 1, tier: Tier::Fast })?;
        let made = self.fill_cache(len_bytes);
        if made.is_err() {
            let _ = self.remove_file(LOG);
        }
        made
    }

    /// The size of the cache that a new pool gets if nothing is said: [`CACHE_BYTES_DEFAULT`], or
    /// an eighth of its fast members. `None` if it can have none.
    pub fn usual_cache_bytes(&self) -> Option<u64> {
        let fast = self.active_of(Class::Ssd);
        let smallest = fast.iter().filter_map(|&number| self.member(number)).map(|member| member.size_bytes).min()?;
        let all_bytes = smallest.saturating_mul(fast.len() as u64) / u64::from(self.default_copies());
        let len_bytes = (all_bytes / 8).min(CACHE_BYTES_DEFAULT) / self.slab_bytes() * self.slab_bytes();
        let can_have = self.is_tiered() && fast.len() >= usize::from(self.default_copies());
        (can_have && CACHE_BYTES.contains(&len_bytes)).then_some(len_bytes)
    }

    fn fill_cache(self: &Arc<Self>, len_bytes: u64) -> Result<()> {
        let failed = |error| SpaceError::io("allocate its write-back cache", Path::new(self.name()), error);
        let store = self.open_file(LOG, true, diskwright_store::LockMode::None)?;
        store.allocate_slabs(0, len_bytes).map_err(failed)?;
        let anchor = Anchor { first: HeaderPlace { sequence: 1, ..HeaderPlace::default() }, number: 0, tail: 0 };
        let block = anchor.to_block(self.id());
        let written = (0..2).try_for_each(|at| store.write_slabs(&block, at * BLOCK_BYTES as u64));
        written.and_then(|()| self.sync_members()).map_err(failed)?;
        self.open_cache()
    }

    /// Empties the write-back cache and removes it. It is used no more, and a new one is used when
    /// the pool is opened again.
    ///
    /// `progress` is called after each round; it returns whether to go on.
    ///
    /// # Errors
    /// [`SpaceError::Usage`] if there is none; [`SpaceError::Stopped`], [`SpaceError::Io`]: it
    /// stays then, and nothing enters it until the pool is opened again.
    pub fn remove_cache(&self, progress: &mut dyn FnMut(Emptied) -> bool) -> Result<()> {
        let Some(cache) = self.cache().filter(|_| self.file_named(LOG).is_some()) else {
            let what = format!("pool {}: it has no write-back cache", self.name());
            return Err(SpaceError::Usage { what });
        };
        cache.is_closing.store(true, Ordering::SeqCst);
        let failed = |error| SpaceError::io("empty its write-back cache", Path::new(self.name()), error);
        let live_bytes = || cache.inner().ring.live() * BLOCK_BYTES as u64;
        let (total_bytes, head) = (live_bytes(), cache.inner().ring.head());
        while self.destage(cache.chunk()).map_err(failed)? {
            let left_bytes = live_bytes();
            if left_bytes > 0 && cache.inner().ring.tail() >= head {
                // Blocks that cannot be read were put at the head of the log.
                break;
            }
            let emptied = Emptied { done_bytes: total_bytes.saturating_sub(left_bytes), total_bytes };
            if !progress(emptied) {
                let (done, total) = (emptied.done_bytes, total_bytes);
                return Err(SpaceError::Stopped { pool: self.name().to_owned(), done, total });
            }
        }
        let left = cache.inner().ring.slabs().count();
        if left > 0 {
            let what = format!(
                "pool {}: {left} slabs still have blocks in the write-back cache. If it is run again and the number stays, \
                 they cannot be read: write them anew, or remove their disk",
                self.name()
            );
            return Err(SpaceError::Usage { what });
        }
        self.remove_file(LOG)
    }
}
