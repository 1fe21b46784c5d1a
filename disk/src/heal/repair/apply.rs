//! Makes the changes of a repair in the file, phase by phase.

use super::draft::Phase;
use diskwright_store::{FileRange, Store, Zeroing};
use std::io;

/// Makes the changes of one phase, without a sync.
pub(super) fn apply_phase(store: &dyn Store, phase: &Phase) -> io::Result<()> {
    if let Some(len_bytes) = phase.grow_to_bytes {
        store.set_len(len_bytes)?;
    }
    for range in &phase.zeros {
        let range = FileRange { offset_bytes: range.start, len_bytes: range.end - range.start };
        // What lies beyond the end of the file is zeroed by the write that extends it.
        let len_bytes = store.len_bytes()?.saturating_sub(range.offset_bytes).min(range.len_bytes);
        if len_bytes > 0 {
            store.zero_range(FileRange { len_bytes, ..range }, Zeroing::Deallocate)?;
        }
    }
    for (offset_bytes, bytes) in &phase.writes {
        store.write_at(bytes, *offset_bytes)?;
    }
    if let Some(len_bytes) = phase.cut_to_bytes {
        store.set_len(len_bytes)?;
    }
    Ok(())
}
