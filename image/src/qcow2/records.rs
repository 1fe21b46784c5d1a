//! The snapshot table and the bitmap directory, read by the record.
//!
//! Both are contiguous, and each record says how long it is. A window of the file is held, so the
//! numbers in the header bound neither memory nor time: what is kept was in the file.

use super::corrupt;
use crate::error::{ImageError, Result};
use diskwright_format::qcow2::{
    BITMAP_DIRECTORY_MAX_BYTES, BITMAPS_MAX, BitmapEntry, BitmapHead, Geometry, Header, Invalid, L1_MAX_BYTES, Place,
    SNAPSHOT_TABLE_MAX_BYTES, Snapshot, SnapshotHead, bitmap, extensions::BitmapsExtension, snapshot,
};
use diskwright_store::Store;

/// Smallest number of bytes that are read at once.
const WINDOW_BYTES: usize = 64 << 10;

/// Reads a range of the file in order.
struct Records<'a> {
    store: &'a dyn Store,
    doing: &'static str,
    structure: &'static str,
    /// Offset of the next record.
    at: u64,
    /// End of the range.
    end: u64,
    window: Vec<u8>,
    window_at: u64,
}

impl<'a> Records<'a> {
    fn new(store: &'a dyn Store, doing: &'static str, structure: &'static str, at: u64, end: u64) -> Self {
        Self { store, doing, structure, at, end, window: Vec::new(), window_at: at }
    }

    /// The next `len` bytes, without moving on.
    fn peek(&mut self, len: usize) -> Result<&[u8]> {
        let left = self.end.saturating_sub(self.at);
        if left < len as u64 {
            let invalid =
                Invalid::new(self.structure, 0, format!("{left} bytes to its end"), format!("at least {len}"));
            return Err(corrupt(self.store, self.at, invalid));
        }
        let held_end = self.window_at + self.window.len() as u64;
        if self.at < self.window_at || self.at + len as u64 > held_end {
            self.window.clear();
            self.window.resize((len.max(WINDOW_BYTES) as u64).min(left) as usize, 0);
            self.window_at = self.at;
            let read = self.store.read_at(&mut self.window, self.at);
            read.map_err(|error| ImageError::io(self.doing, self.store, self.at, error))?;
        }
        let start = (self.at - self.window_at) as usize;
        Ok(&self.window[start..start + len])
    }

    /// Moves on. Padding behind the last record need not be there.
    fn skip(&mut self, len: u64) {
        self.at = self.at.saturating_add(len);
    }
}

/// The snapshots of an image, and the length of their table in bytes.
///
/// # Errors
/// `Corrupt`, also for an L1 table that is too long for its file or not aligned; `Io`.
pub(super) fn snapshots(store: &dyn Store, header: &Header, file_bytes: u64) -> Result<(Vec<Snapshot>, u64)> {
    let start = header.snapshots_offset_bytes;
    let end = start.saturating_add(SNAPSHOT_TABLE_MAX_BYTES).min(file_bytes);
    let mut records = Records::new(store, "read the snapshot table", "snapshot table", start, end);
    let mut found = Vec::new();
    for _ in 0..header.snapshots {
        let at = records.at;
        let invalid = |invalid| corrupt(store, at, invalid);
        let head = SnapshotHead::parse(records.peek(snapshot::HEAD_BYTES)?).map_err(invalid)?;
        found.push(Snapshot::parse(records.peek(head.len_bytes())?).map_err(invalid)?);
        records.skip(head.padded_bytes() as u64);
    }
    let len_bytes = if found.is_empty() { 0 } else { records.at - start };
    Ok((found, len_bytes))
}

/// What is wrong with the L1 table of a snapshot; `None` if nothing.
pub(super) fn fault_of_snapshot(snapshot: &Snapshot, header: &Header, file_bytes: u64) -> Option<Invalid> {
    let l1 = snapshot.l1;
    let fail = |found: String, expected: String| Some(Invalid::new("snapshot table entry", 0, found, expected));
    if !l1.offset_bytes.is_multiple_of(header.cluster_bytes()) || l1.len_bytes > L1_MAX_BYTES {
        return fail(
            format!("an L1 table of {} bytes at offset {}", l1.len_bytes, l1.offset_bytes),
            format!("at most {L1_MAX_BYTES} bytes, at a multiple of the cluster size ({})", header.cluster_bytes()),
        );
    }
    if l1.offset_bytes.checked_add(l1.len_bytes).is_none_or(|end| end > file_bytes) {
        let found = format!("an L1 table of {} bytes at offset {}", l1.len_bytes, l1.offset_bytes);
        return fail(found, format!("a place in the file of {file_bytes} bytes"));
    }
    let size_bytes = snapshot.size_bytes.unwrap_or(header.size_bytes);
    let needed = header.geometry().l1_entries(size_bytes);
    (l1.len_bytes / 8 < needed).then(|| {
        let found = format!("{} L1 entries", l1.len_bytes / 8);
        Invalid::new("snapshot table entry", 8, found, format!("at least {needed} for a disk of {size_bytes} bytes"))
    })
}

/// The bitmaps in the directory of an image.
///
/// # Errors
/// `Corrupt`; `Io`.
pub(super) fn bitmaps(
    store: &dyn Store,
    extension: &BitmapsExtension,
    geometry: &Geometry,
    file_bytes: u64,
) -> Result<Vec<BitmapEntry>> {
    let fail = |found: String, expected: String| {
        Err(corrupt(store, extension.offset_bytes, Invalid::new("bitmaps extension", 0, found, expected)))
    };
    let Place { offset_bytes, len_bytes } = extension.directory;
    if extension.count == 0 || extension.count > BITMAPS_MAX {
        return fail(format!("{} bitmaps", extension.count), format!("1 to {BITMAPS_MAX}"));
    }
    let end = offset_bytes.checked_add(len_bytes).filter(|&end| end <= file_bytes);
    let Some(end) = end.filter(|_| len_bytes <= BITMAP_DIRECTORY_MAX_BYTES) else {
        let found = format!("a directory of {len_bytes} bytes at offset {offset_bytes}");
        return fail(found, format!("at most 64 MiB in the file of {file_bytes} bytes"));
    };
    if !offset_bytes.is_multiple_of(geometry.cluster_bytes()) {
        let expected = format!("a multiple of the cluster size ({})", geometry.cluster_bytes());
        return fail(format!("a directory at offset {offset_bytes}"), expected);
    }
    let mut records = Records::new(store, "read the bitmap directory", "bitmap directory", offset_bytes, end);
    let mut found = Vec::new();
    for _ in 0..extension.count {
        let at = records.at;
        let invalid = |invalid| corrupt(store, at, invalid);
        let head = BitmapHead::parse(records.peek(bitmap::HEAD_BYTES)?).map_err(invalid)?;
        let len = usize::try_from(head.padded_bytes()).unwrap_or(usize::MAX);
        found.push(BitmapEntry::parse(records.peek(len)?).map_err(invalid)?);
        records.skip(head.padded_bytes());
    }
    Ok(found)
}
