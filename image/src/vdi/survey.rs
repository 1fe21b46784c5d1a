//! The survey of a VDI before the first entry changes: what is used, and what is free.
//!
//! ```text
//!   entries of the map ─▶ numbers of spaces, sorted ─▶ twice the same: refused; gap: free
//!   sync ─▶ the file is cut, or filled, to the end of the last space; the header counts the spaces
//! ```
//!
//! An invalid entry is refused too: its block may lie in space that looks free. Space behind the
//! last block was made by a session that was not closed, and is cut off, so that a longer file
//! reads as zeros there. What looks free may be free only in the page cache, as a program may have
//! been killed during a flush. So the file is synced before its free space is used.
//!
//! The caller holds `preparing`. No entry changes before the survey has ended, so the map in the
//! file is read without the state mutex. Memory: 4 bytes for each space of the file. More entries
//! than spaces fit into the file share one, and end the survey.

use super::{corrupt, write::Writing};
use crate::{ImageError, Result, space::Space};
use diskwright_format::{vdi::VdiEntry, vhdx::Invalid};

/// The most free spaces between blocks that are recorded.
const MAX_HOLES: usize = 65_536;

impl Writing {
    /// Surveys the file, once in a session. The caller holds `preparing`.
    pub(super) fn survey(&self) -> Result<()> {
        if self.lock().space.is_some() {
            return Ok(());
        }
        let (file_bytes, entries) = {
            let state = self.lock();
            (state.file_bytes, state.entries)
        };
        let numbers = self.read_numbers(file_bytes, entries)?;
        let header = &self.layout.header;
        let (data, each) = (self.layout.data_bytes(), header.space_bytes());
        let offset_of = |number: u64| data + number * each;
        let used = numbers.last().map_or(0, |&last| u64::from(last) + 1);
        let end = offset_of(used);
        let mut space = Space::new(end, 1);
        let mut next = 0;
        let mut holes = 0;
        for &number in &numbers {
            let free = (next..u64::from(number)).take(MAX_HOLES - holes);
            holes += free.map(|hole| space.add_free(offset_of(hole), each)).count();
            next = u64::from(number) + 1;
        }
        self.barrier.sync("make the block map durable as it was found")?;
        if end != file_bytes {
            self.store.set_len(end).map_err(self.io("cut the file after its last block", end))?;
        }
        self.count_in_header(used)?;
        let mut state = self.lock();
        state.file_bytes = end;
        state.mapped = numbers.len() as u64;
        state.announced = used;
        state.space = Some(space);
        Ok(())
    }

    /// The numbers of all spaces that entries name, sorted.
    fn read_numbers(&self, file_bytes: u64, entries: u64) -> Result<Vec<u32>> {
        let (layout, store) = (&self.layout, &*self.store);
        let most = file_bytes / layout.header.space_bytes() + 1;
        let shared = |found: String| -> Result<ImageError> {
            let expected = "blocks with space of their own (run `diskwright check`)";
            Ok(corrupt(store, layout.entry_at(0), Invalid::new("block map", 0, found, expected)))
        };
        let mut numbers = Vec::new();
        layout.each_entry(store, 0, entries, &mut |block, entry| {
            if let VdiEntry::Space(space) = entry {
                if layout.payload_bytes(space) >= file_bytes {
                    return Err(self.damage_of(block, space, file_bytes));
                }
                if numbers.len() as u64 > most {
                    return Err(shared(format!("more than {most} blocks with space"))?);
                }
                numbers.push(space);
            }
            Ok(true)
        })?;
        numbers.sort_unstable();
        match numbers.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(shared(format!("two blocks with space {}", pair[0]))?),
            None => Ok(numbers),
        }
    }
}
