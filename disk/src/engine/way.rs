//! Moves blocks of a disk in use that lie where longer tables of its image will be.
//!
//! ```text
//!   blocks in the way ─▶ held (excluded.rs) ─▶ reserve_away ─▶ copied ─▶ commit Moved ─▶ released
//!      again, until there is none ─▶ flush ─▶ grace period ─▶ the image may write there
//! ```
//!
//! A block is copied while it is held, so no write is lost; reads go on at the old place. The image
//! makes the copy durable before the mapping that leads to it, and hands out nothing more where the
//! tables will be. The flush makes the moves durable, and after the grace period no request is left
//! that has looked up an old place.

use super::{chain::Member, device::Disk};
use diskwright_image::{Commit, ImageWriter, MovePlace, MoveTo};
use diskwright_store::{Store, sync::MutexGuard};
use std::io;

/// Blocks that are held at once.
const HELD_MAX: usize = 64;
/// Rounds, each of which should find no block but those of requests that were in flight.
const ROUNDS_MAX: usize = 8;
/// Bytes that are copied at once.
const COPY_BYTES: u64 = 1 << 20;

impl Disk {
    /// Makes way for the tables of a disk of `size_bytes`. Waits for requests in flight.
    ///
    /// # Errors
    /// If the image cannot have that size, or its file cannot be read or written.
    pub(super) fn make_way(&self, turn: &MutexGuard<'_, ()>, size_bytes: u64) -> io::Result<()> {
        let shared = &self.shared;
        let top = shared.chain().top().clone();
        let writer = top.writer()?;
        for round in 0..ROUNDS_MAX {
            let blocks = writer.blocks_in_the_way(size_bytes)?;
            if blocks.is_empty() {
                return if round == 0 { Ok(()) } else { shared.wait_for_grace() };
            }
            for batch in blocks.chunks(HELD_MAX) {
                let held = shared.hold(turn, &top, batch.iter().copied())?;
                let moved = batch.iter().try_for_each(|&block| self.move_away(&top, writer, block));
                drop(held);
                moved?;
            }
            shared.flush_blocking()?;
        }
        Err(io::Error::other("blocks came back to where longer tables will be"))
    }

    /// Moves a block that is held.
    fn move_away(&self, top: &Member, writer: &dyn ImageWriter, block: u64) -> io::Result<()> {
        let to = loop {
            match writer.reserve_away(block)? {
                Some(to) => break to,
                None => writer.prepare(block..block + 1)?,
            }
        };
        let MoveTo::Place(place) = to else { return Ok(()) };
        let store = top.image.stores().get(usize::from(place.store)).unwrap_or(top.image.store());
        copy(&**store, &place)?;
        self.shared.commit_blocking(top, block, Commit::Moved)
    }
}

fn copy(store: &dyn Store, place: &MovePlace) -> io::Result<()> {
    let mut bytes = vec![0; place.len_bytes.min(COPY_BYTES) as usize];
    let mut done = 0;
    while done < place.len_bytes {
        let piece = &mut bytes[..(place.len_bytes - done).min(COPY_BYTES) as usize];
        store.read_at(piece, place.from_bytes + done)?;
        store.write_at(piece, place.to_bytes + done)?;
        done += piece.len() as u64;
    }
    Ok(())
}
