//! Keeps blocks of the top image still while clients work, so that they can be copied or moved.
//!
//! ```text
//!   hold ─▶ exclude: new writes and discards of the blocks wait    (claims.rs)
//!        ─▶ hide: no lock-free look-up finds their bytes            (map/run_cache.rs)
//!        ─▶ grace period: all requests that found them have ended   (epoch.rs)
//!        ─▶ ExcludedBlocks: no request writes the blocks; reads continue
//!   drop ─▶ the words lead to the present owners; waiting requests are planned again
//! ```
//!
//! Why both: a write to a block that is fully mapped takes no lock and claims nothing, so the
//! exclusion alone does not stop it. Reads look the blocks up under the mutation lock meanwhile.
//!
//! The caller has the turn to change the chain, so only one thread holds several blocks at a time,
//! and no image joins meanwhile. It may commit changes of the held blocks: reads see them at once,
//! writes only when the hold ends.

use crate::engine::{chain::Member, claims::Key, shared::Shared};
use diskwright_store::sync::MutexGuard;
use std::{io, ops::Range, sync::Arc};

/// Blocks that no request writes. They are released on drop.
#[derive(Debug)]
pub(crate) struct ExcludedBlocks<'a> {
    shared: &'a Arc<Shared>,
    keys: Vec<Key>,
    /// The ranges of the disk that the blocks cover, in bytes.
    ranges: Vec<Range<u64>>,
}

impl Shared {
    /// Holds blocks of `top`, which is the top image, until the result is dropped. Waits for
    /// requests in flight, so a thread with requests in flight must not call it, nor a worker.
    ///
    /// # Errors
    /// If a request was lost, as it is unknown when it ends. Nothing is held then.
    pub(crate) fn hold<'a>(
        self: &'a Arc<Self>,
        _turn: &MutexGuard<'_, ()>,
        top: &Member,
        blocks: impl IntoIterator<Item = u64>,
    ) -> io::Result<ExcludedBlocks<'a>> {
        let size_bytes = self.chain().geometry.size_bytes;
        let mut held = ExcludedBlocks { shared: self, keys: Vec::new(), ranges: Vec::new() };
        for block in blocks {
            let (start, end) = top.block_range(block, size_bytes);
            let key = (top.id, block);
            while !self.lock().claims.close(key) {
                self.pause()?;
            }
            held.keys.push(key);
            match held.ranges.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = end,
                None => held.ranges.push(start..end),
            }
        }
        for &key in &held.keys {
            while self.lock().claims.is_shared(key) {
                self.pause()?;
            }
        }
        let grace = self.begin_grace(|mutation| mutation.hide(&held.ranges))?;
        self.wait_for(grace)?;
        Ok(held)
    }
}

impl Drop for ExcludedBlocks<'_> {
    fn drop(&mut self) {
        let mut mutation = self.shared.lock();
        mutation.show();
        for key in self.keys.drain(..) {
            mutation.claims.end_exclusion(key);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
