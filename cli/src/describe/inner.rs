//! Internal snapshots and bitmaps of an image (qcow2), and snapshots of its file that the storage
//! keeps (RBD), as text and as JSON.

use crate::{
    printable::printable,
    sizes::{Exact, Human},
    table::Fields,
    timestamp,
};
use diskwright_image::{InternalBitmap, InternalSnapshot};
use diskwright_store::StoreSnapshot;
use schemars::JsonSchema;
use serde::Serialize;
use std::time::Duration;

/// Most of each that are shown as text.
const SHOWN_MAX: usize = 100;

/// An internal snapshot, for JSON.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct SnapshotDescription {
    /// Unique in the image; `--snapshot` takes it, or the name.
    id: String,
    /// The name.
    name: String,
    /// Time of the snapshot, UTC.
    created: String,
    /// How long the guest had run, in nanoseconds.
    vm_clock_nanoseconds: u64,
    /// Length of the virtual machine's state in bytes; 0 if none is stored.
    vm_state_size: u64,
    /// Size of the disk, then.
    virtual_size: u64,
}

/// A snapshot of the file that its storage keeps, for JSON.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct StorageSnapshotDescription {
    /// Its number.
    id: u64,
    /// The name: the file's name, `@` and this name open it.
    name: String,
    /// Length of the file, then.
    file_size: u64,
}

impl From<&StoreSnapshot> for StorageSnapshotDescription {
    fn from(snapshot: &StoreSnapshot) -> Self {
        Self { id: snapshot.id, name: snapshot.name.clone(), file_size: snapshot.size_bytes }
    }
}

/// A bitmap, for JSON.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct BitmapDescription {
    /// The name.
    name: String,
    /// Bytes of the disk for each bit.
    granularity: u64,
    /// Whether it was not saved by the last program that used it, and counts for nothing.
    in_use: bool,
    /// Whether a program that runs the disk records its writes in it.
    auto: bool,
}

impl From<&InternalSnapshot> for SnapshotDescription {
    fn from(snapshot: &InternalSnapshot) -> Self {
        Self {
            id: snapshot.id.clone(),
            name: snapshot.name.clone(),
            created: timestamp::utc_from_1970(snapshot.seconds),
            vm_clock_nanoseconds: snapshot.guest_nanoseconds,
            vm_state_size: snapshot.vm_state_bytes,
            virtual_size: snapshot.size_bytes,
        }
    }
}

impl From<&InternalBitmap> for BitmapDescription {
    fn from(bitmap: &InternalBitmap) -> Self {
        Self {
            name: bitmap.name.clone(),
            granularity: bitmap.granularity_bytes,
            in_use: bitmap.is_in_use,
            auto: bitmap.is_auto,
        }
    }
}

impl SnapshotDescription {
    fn line(&self) -> String {
        let state = match self.vm_state_size {
            0 => "no VM state".to_owned(),
            bytes => format!("VM state {}, VM clock {}", Human(bytes), clock(self.vm_clock_nanoseconds)),
        };
        let (id, name) = (printable(&self.id), printable(&self.name));
        format!("{id}  {name}  {}  {}  {state}", self.created, Exact(self.virtual_size))
    }
}

impl BitmapDescription {
    fn line(&self) -> String {
        let flags = match (self.in_use, self.auto) {
            (true, true) => "in use (not saved), auto",
            (true, false) => "in use (not saved)",
            (false, true) => "auto",
            (false, false) => "saved, not recording",
        };
        format!("{}  granularity {}  {flags}", printable(&self.name), Human(self.granularity))
    }
}

/// Adds the snapshots and the bitmaps, one a line.
pub(super) fn add_to(
    fields: &mut Fields,
    of_storage: &[StorageSnapshotDescription],
    snapshots: &[SnapshotDescription],
    bitmaps: &[BitmapDescription],
) {
    let of_storage_line = |snapshot: &StorageSnapshotDescription| {
        format!("@{}  {}", printable(&snapshot.name), Exact(snapshot.file_size))
    };
    add_lines(fields, "storage snapshot", of_storage.len(), of_storage.iter().map(of_storage_line));
    add_lines(fields, "snapshot", snapshots.len(), snapshots.iter().map(SnapshotDescription::line));
    add_lines(fields, "bitmap", bitmaps.len(), bitmaps.iter().map(BitmapDescription::line));
}

fn add_lines(fields: &mut Fields, what: &str, count: usize, lines: impl Iterator<Item = String>) {
    let mut label = format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    for line in lines.take(SHOWN_MAX) {
        fields.add(&std::mem::take(&mut label), line);
    }
    if count > SHOWN_MAX {
        fields.add("", format!("and {} more, which --json lists", count - SHOWN_MAX));
    }
}

/// `01:02:03.045`, as QEMU shows the time that a guest has run.
fn clock(nanoseconds: u64) -> String {
    let time = Duration::from_nanos(nanoseconds);
    let seconds = time.as_secs();
    format!("{:02}:{:02}:{:02}.{:03}", seconds / 3600, seconds / 60 % 60, seconds % 60, time.subsec_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_all_of_a_snapshot_and_cannot_drive_the_terminal() {
        let snapshot = InternalSnapshot {
            id: "7".into(),
            name: "before\x1b[2J".into(),
            seconds: 86_400,
            guest_nanoseconds: 3_723_045_000_000,
            vm_state_bytes: 1 << 20,
            size_bytes: 1 << 30,
        };
        let line = SnapshotDescription::from(&snapshot).line();
        assert_eq!(
            line,
            "7  before\\u{1b}[2J  1970-01-02 00:00:00 UTC  1 GiB (1073741824 bytes)  VM state 1 MiB, VM clock 01:02:03.045"
        );
        let bitmap = InternalBitmap { name: "b".into(), granularity_bytes: 65536, is_in_use: true, is_auto: false };
        assert_eq!(BitmapDescription::from(&bitmap).line(), "b  granularity 64 KiB  in use (not saved)");
    }
}
