//! What changes in a partition table, and which partition may be enlarged. Shared by MBR and GPT.

use super::{Partition, Place};
use crate::reason::{LeftAlone, ReasonKind};

/// A partition that is enlarged ends at a multiple of this, as tools of partition tables want.
const END_ALIGNMENT_BYTES: u64 = 1 << 20;

/// A write of whole sectors. It must be durable before the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// First byte on the disk.
    pub offset_bytes: u64,
    /// What is written there.
    pub bytes: Vec<u8>,
}

/// A partition that reaches the new end of its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Larger {
    pub(crate) start_bytes: u64,
    pub(crate) old_bytes: u64,
    pub(crate) new_bytes: u64,
}

/// What changes in a table.
#[derive(Debug, Default)]
pub(crate) struct Change {
    pub(crate) steps: Vec<Step>,
    pub(crate) larger: Option<Larger>,
}

/// Refuses a partition that is not there, or has another one behind it.
pub(super) fn check_last(partitions: &[Partition], number: u32) -> Result<&Partition, LeftAlone> {
    let numbered = |partition: &&Partition| partition.place == Place::Partition(number);
    let Some(wanted) = partitions.iter().find(numbered) else {
        return Err(LeftAlone::new(ReasonKind::Unknown, format!("there is no partition {number}")));
    };
    let behind = partitions.iter().find(|other| other.range_bytes.start >= wanted.range_bytes.end);
    if let Some(Partition { place: Place::Partition(other), .. }) = behind {
        return Err(LeftAlone::unsupported(format!(
            "partition {number} cannot be enlarged, because partition {other} follows it: moving a partition"
        )));
    }
    Ok(wanted)
}

/// Where a partition ends that may reach `limit_bytes`, and now ends at `old_bytes`.
pub(super) fn aligned_end(old_bytes: u64, limit_bytes: u64) -> u64 {
    (limit_bytes - limit_bytes % END_ALIGNMENT_BYTES).max(old_bytes)
}
