//! Writes to an image whose clusters lie in an external data file, each at its offset on the disk.
//!
//! ```text
//!   prepare   the cluster's range of the data file becomes zeros ─▶ reserved
//!   commit    the L2 entry names that range
//!   flush     sync of the data file ─▶ the passes of the image's own file
//! ```
//!
//! A cluster has one place, so it is never freed, moved or shared. Zeros and discards are written
//! to the data file, whose holes save the space. So a data file that programs read as a raw disk
//! (the autoclear bit, which is kept) has the disk's bytes. Only metadata have refcounts.
//!
//! Invariant: an entry is in the file only after its range and the new length of the data file are
//! durable. The state mutex guards the reservations; no call of a store happens under it.

use super::write::Writing;
use crate::Result;
use diskwright_store::{FileRange, Zeroing};

impl Writing {
    /// Reserves the range of a cluster in the data file, all zeros. The caller holds `preparing`.
    pub(super) fn reserve_in_data_file(&self, block: u64) -> Result<()> {
        let Some(data) = &self.data_file else { return Ok(()) };
        if self.lock().reserved.contains_key(&block) {
            return Ok(());
        }
        let cluster_bytes = self.cluster_bytes();
        let start = block * cluster_bytes;
        self.check_offset(start)?;
        let end = (start + cluster_bytes).min(self.layout.size_bytes());
        let store = &**data.store();
        let io = |doing| move |error| crate::ImageError::io(doing, store, start, error);
        let len_bytes = self.layout.data_file_bytes().unwrap_or(0);
        let held_end = end.min(len_bytes);
        if start < held_end {
            let stale = store.next_data(start).map_err(io("look for data in the data file"))?;
            if stale.is_some_and(|stale| stale.offset_bytes < held_end) {
                let range = FileRange { offset_bytes: start, len_bytes: held_end - start };
                store.zero_range(range, Zeroing::Deallocate).map_err(io("clear a cluster of the data file"))?;
            }
        }
        if end > len_bytes {
            store.set_len(end).map_err(io("grow the data file"))?;
            self.layout.set_data_file_bytes(end);
        }
        self.lock().reserved.insert(block, start);
        Ok(())
    }

    /// Extends a data file that ends within a cluster to the end of that cluster, before the first
    /// write.
    pub(super) fn settle_data_file(&self) -> Result<()> {
        let (Some(data), Some(len_bytes)) = (&self.data_file, self.layout.data_file_bytes()) else { return Ok(()) };
        let whole = len_bytes.checked_next_multiple_of(self.cluster_bytes()).unwrap_or(len_bytes);
        let end = whole.min(self.layout.size_bytes());
        if end > len_bytes {
            let store = &**data.store();
            let grown = store.set_len(end);
            grown.map_err(|error| crate::ImageError::io("grow the data file", store, len_bytes, error))?;
            self.layout.set_data_file_bytes(end);
        }
        Ok(())
    }

    /// Makes durable what was written to the data file.
    pub(super) fn sync_data_file(&self) -> Result<()> {
        match &self.data_file {
            Some(data) => Ok(data.sync("make the data file durable")?),
            None => Ok(()),
        }
    }

    /// Fails with `what` for an image with a data file, whose clusters have one place each.
    pub(super) fn refuse_with_data_file(&self, what: &str, hint: &str) -> Result<()> {
        match &self.data_file {
            Some(_) => Err(self.unsupported(format!("{what} a qcow2 image with an external data file"), hint)),
            None => Ok(()),
        }
    }
}
