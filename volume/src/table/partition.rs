//! Partitions, and the tables that they are in.

use crate::{read::Window, reason::LeftAlone};
use std::{fmt, ops::Range};

/// Where a volume lies.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// The whole disk: there is no partition table.
    Disk,
    /// A partition, by the number that Linux gives it (logical partitions from 5 on).
    Partition(u32),
    /// A logical volume of LVM2.
    Logical {
        /// Name of the volume group.
        group: String,
        /// Name of the logical volume.
        name: String,
    },
}

/// Kind of a partition table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TableKind {
    /// None: the disk is one volume.
    None,
    /// A master boot record.
    Mbr,
    /// A GUID partition table.
    Gpt,
}

impl fmt::Display for TableKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Mbr => "MBR",
            Self::Gpt => "GPT",
        })
    }
}

/// A partition of a table, or the whole disk.
#[derive(Debug)]
pub(crate) struct Partition {
    pub(crate) place: Place,
    /// Within the disk.
    pub(crate) range_bytes: Range<u64>,
    pub(crate) name: Option<String>,
    pub(crate) type_text: Option<String>,
    /// Why this partition is left alone.
    pub(crate) problem: Option<LeftAlone>,
}

/// A table and its partitions.
#[derive(Debug)]
pub(crate) struct PartitionTable {
    pub(crate) kind: TableKind,
    pub(crate) problem: Option<LeftAlone>,
    pub(crate) partitions: Vec<Partition>,
}

/// A partition from sectors `first` to before `end`, cut to the disk.
pub(super) fn partition(window: &Window<'_>, number: u32, first: u64, end: u64, type_text: String) -> Partition {
    let sector_bytes = u64::from(window.sector_bytes());
    let size_bytes = window.size_bytes();
    let whole = first.checked_mul(sector_bytes).zip(end.checked_mul(sector_bytes));
    let problem = match whole {
        Some((start, end)) if start < end && end <= size_bytes => None,
        _ => Some(LeftAlone::damaged(format!(
            "partition {number} (sectors {first} to {end}) is empty or reaches beyond the disk's {size_bytes} bytes"
        ))),
    };
    let (start, end) = whole.unwrap_or((size_bytes, size_bytes));
    let start = start.min(size_bytes);
    Partition {
        place: Place::Partition(number),
        range_bytes: start..end.clamp(start, size_bytes),
        name: None,
        type_text: Some(type_text),
        problem,
    }
}
