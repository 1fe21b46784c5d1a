//! Shares bytes of another file into a disk by reflink, as `convert` and `merge` do.

use crate::engine::{
    chain::Member,
    device::Disk,
    map::{Owner, Run, push_joined},
};
use diskwright_image::{BlockState, Commit};
use diskwright_store::{Store, store::FileRange};
use std::io;

/// Parts of a block are shared in multiples of this: 64 KiB.
const SHARED_PART_BYTES: u64 = 64 << 10;

impl Disk {
    /// Shares `len_bytes` at `file_offset_bytes` of `source` into this disk at `offset_bytes` by
    /// reflink. Only whole blocks are shared, and parts of blocks that have all their data already
    /// (whole sectors, if the image has no blocks). Returns the start and end of the shared range
    /// of the disk; it is empty if nothing can be shared. No other thread may write to the disk.
    ///
    /// # Errors
    /// `Unsupported` and the like if the file systems cannot share. The contents of the range are
    /// then undefined until it is written.
    pub fn clone_from(
        &self,
        source: &dyn Store,
        file_offset_bytes: u64,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> io::Result<(u64, u64)> {
        let shared = &self.shared;
        let chain = shared.chain();
        let top = chain.top();
        let end = offset_bytes + len_bytes;
        let (from, to) = match top.image.info().has_blocks {
            true => Self::shareable(top, offset_bytes, end)?,
            false => (offset_bytes, end),
        };
        if from == to {
            return Ok((from, to));
        }
        shared.mark_changed(from, to - from)?;
        shared.begin_writing()?;
        let mut places: Vec<Run> = Vec::new();
        let mut blocks = Vec::new();
        let mut at = from;
        while at < to {
            let block = at / top.block_bytes;
            let (block_start, block_end) = top.block_range(block, top.size_bytes);
            let stop = block_end.min(to);
            let reservation = top.writer()?.reserve_waiting(block)?;
            let store = top.image.stores().get(usize::from(reservation.store)).unwrap_or(top.image.store());
            if let Some((init_offset_bytes, bytes)) = reservation.init {
                store.write_at(&bytes, init_offset_bytes)?;
                top.writer()?.initialised(block);
            }
            blocks.push(block);
            let place = reservation.offset_bytes + (at - block_start);
            let owner = Owner::Data { source: top.source(reservation.store), offset_bytes: place };
            push_joined(&mut places, Run { start_bytes: at, len_bytes: stop - at, owner });
            at = stop;
        }
        let cloned = places.into_iter().try_for_each(|run| {
            let Owner::Data { source: place_source, offset_bytes: place } = run.owner else { return Ok(()) };
            let Some(store) = chain.source(place_source) else { return Ok(()) };
            let range = FileRange {
                offset_bytes: file_offset_bytes + (run.start_bytes - offset_bytes),
                len_bytes: run.len_bytes,
            };
            store.clone_range(source, range, place)
        });
        // Also after an error: the blocks have space, which reads as zeros, and it must not leak.
        for block in blocks {
            shared.commit_blocking(top, block, Commit::Whole)?;
        }
        cloned.map(|()| (from, to))
    }

    /// The part of a range of the top image into which bytes can be shared.
    fn shareable(top: &Member, start: u64, end: u64) -> io::Result<(u64, u64)> {
        let has_data = |at_bytes: u64| -> io::Result<bool> {
            let mut state = [BlockState::Absent];
            top.image.block_states(at_bytes / top.block_bytes, &mut state)?;
            Ok(matches!(state[0], BlockState::Data { .. }))
        };
        let mut from = start.next_multiple_of(top.block_bytes);
        let mut to = if end == top.size_bytes { end } else { end - end % top.block_bytes };
        // A part of a block costs a call of its own, which does not pay for a few sectors.
        let (first, last) = (start.next_multiple_of(SHARED_PART_BYTES), end - end % SHARED_PART_BYTES);
        if first < from.min(last) && has_data(first)? {
            from = first;
        }
        if last > to.max(first) && has_data(last - 1)? {
            to = last;
        }
        Ok((from, to.max(from)))
    }
}
