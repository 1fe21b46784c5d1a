//! How small a disk can be, and what its partition table becomes when its size changes.
//!
//! ```text
//!   a table     the end of the last partition, and behind it the second copy of a GPT
//!   none        the end of the only file system, swap area or physical volume of LVM, by its own
//!               superblock
//!   the rest    not known, so the disk keeps its size
//! ```
//!
//! What must hold: **when in doubt, the disk is not made smaller.** The size that a file system on
//! the whole disk states is trusted only if its map of free space is trusted too. With a table it
//! does not matter what the partitions hold, because nothing of them is given up. A signature over
//! the whole disk beside a table (RAID, ZFS) makes the end uncertain. Space behind the last
//! partition holds no data.

use crate::{
    read::{ReadAt, Window, one_extent},
    reason::{LeftAlone, ReasonKind},
    signature::{self, Kind},
    table::{self, PartitionTable, Place, Step, TableKind},
    volume::{beside_the_table, count, one_signature},
};

/// Where a disk's contents end.
#[derive(Debug, Clone)]
pub struct ContentsEnd {
    /// Kind of the partition table.
    pub table: TableKind,
    /// The smallest size of the disk in bytes, a multiple of its sector; or why it keeps its size.
    pub min_bytes: Result<u64, LeftAlone>,
    /// What ends there: "partition 3 (ext4)", "XFS on the whole disk". Empty if nothing is known.
    pub last: String,
}

/// A partition that is to reach the new end of its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EnlargedPartition {
    /// Its number.
    pub number: u32,
    /// Its present size in bytes.
    pub old_bytes: u64,
    /// Its new size in bytes.
    pub new_bytes: u64,
    /// The file system, or what else it holds; `None` if nothing known.
    pub contents: Option<&'static str>,
    /// The command that lets the contents use the new size; `None` if none is known.
    pub tool: Option<&'static str>,
}

/// What a partition table becomes on a disk of another size.
#[derive(Debug, Clone)]
pub struct TableChange {
    /// Kind of the table.
    pub table: TableKind,
    /// The writes, in their order. Empty if nothing changes.
    pub steps: Vec<Step>,
    /// The partition that was to be enlarged.
    pub enlarged: Option<EnlargedPartition>,
}

/// Finds where the contents of a disk end.
pub fn ends(disk: &dyn ReadAt) -> ContentsEnd {
    let found = table::find(disk);
    let whole = one_extent(0..disk.size_bytes());
    let window = Window::new(disk, &whole);
    let sector_bytes = u64::from(disk.sector_bytes()).max(1);
    let ended = if found.kind == TableKind::None { bare(&window, &found) } else { with_table(disk, &found) };
    let fits = |(end, last): (u64, String)| match end.checked_next_multiple_of(sector_bytes) {
        Some(end) if end <= disk.size_bytes() => Ok((end, last)),
        _ => Err(LeftAlone::damaged(format!("{last} ends at byte {end}, beyond the disk"))),
    };
    let (min_bytes, last) = match ended.and_then(fits) {
        Ok((end, last)) => (Ok(end), last),
        Err(reason) => (Err(reason), String::new()),
    };
    ContentsEnd { table: found.kind, min_bytes, last }
}

/// What is written to the partition table when the disk gets `size_bytes`, a multiple of its
/// sector. If the disk grows, the steps are carried out after that; if it shrinks, before. Each
/// must be durable before the next (`table/gpt_change.rs`). With `enlarge` the last partition,
/// which must have that number, reaches the new end.
///
/// The second copy of a GPT always moves to the new end. Other tables, and disks without one,
/// change only with `enlarge`.
///
/// # Errors
/// If the table is in doubt or has no room, or the partition cannot be enlarged.
pub fn table_change(disk: &dyn ReadAt, size_bytes: u64, enlarge: Option<u32>) -> Result<TableChange, LeftAlone> {
    let found = table::find(disk);
    if found.kind != TableKind::None
        && let Some(reason) = beside_the_table(disk, found.kind)
    {
        return Err(reason);
    }
    let change = table::change(disk, &found, size_bytes, enlarge)?;
    let enlarged = change.larger.zip(enlarge).map(|(larger, number)| {
        let extents = one_extent(larger.start_bytes..larger.start_bytes + larger.old_bytes);
        let window = Window::new(disk, &extents);
        let kind = one_signature(&window).ok();
        EnlargedPartition {
            number,
            old_bytes: larger.old_bytes,
            new_bytes: larger.new_bytes,
            contents: kind.map(|kind| signature::identify(&window, kind).name),
            tool: kind.and_then(tool_of),
        }
    });
    Ok(TableChange { table: found.kind, steps: change.steps, enlarged })
}

/// The end of what lies on a disk without a table, and its name.
fn bare(window: &Window<'_>, found: &PartitionTable) -> Result<(u64, String), LeftAlone> {
    found.problem.clone().map_or(Ok(()), Err)?;
    let kind = one_signature(window)?;
    count(window, kind)?;
    let name = signature::identify(window, kind).name;
    Ok((signature::end_bytes(window, kind)?, format!("{name} on the whole disk")))
}

/// The end of the last partition with what the table needs behind it, and the partition's name.
fn with_table(disk: &dyn ReadAt, found: &PartitionTable) -> Result<(u64, String), LeftAlone> {
    if let Some(reason) = beside_the_table(disk, found.kind) {
        return Err(reason);
    }
    let end = table::end_of(disk, found)?;
    let last = found.partitions.iter().max_by_key(|partition| partition.range_bytes.end);
    let name = last.map(|partition| {
        let extents = one_extent(partition.range_bytes.clone());
        let window = Window::new(disk, &extents);
        let contents = one_signature(&window).map(|kind| signature::identify(&window, kind).name);
        let number = if let Place::Partition(number) = partition.place { number } else { 0 };
        contents.map_or(format!("partition {number}"), |contents| format!("partition {number} ({contents})"))
    });
    Ok((end, name.unwrap_or_else(|| format!("the empty {}", found.kind))))
}

/// The command that enlarges a file system.
fn tool_of(kind: Kind) -> Option<&'static str> {
    Some(match kind {
        Kind::Ext => "resize2fs",
        Kind::Ntfs => "ntfsresize, or \"extend filesystem\" of diskpart",
        Kind::Xfs => "xfs_growfs",
        Kind::Fat => "fatresize",
        Kind::Btrfs => "btrfs filesystem resize max",
        Kind::Lvm => "pvresize",
        Kind::Swap => "mkswap",
        Kind::Encrypted("LUKS") => "cryptsetup resize",
        _ => return None,
    })
}

impl ContentsEnd {
    /// Why the disk cannot have `size_bytes`; `None` if it can.
    pub fn refusal(&self, size_bytes: u64) -> Option<LeftAlone> {
        match &self.min_bytes {
            Ok(min_bytes) if size_bytes >= *min_bytes => None,
            Ok(min_bytes) => Some(LeftAlone::new(
                ReasonKind::Unknown,
                format!("{} lies there; the smallest size is {min_bytes} bytes", self.last),
            )),
            Err(reason) => Some(reason.clone()),
        }
    }
}
