//! How a partition table changes when its disk gets another size, and how small the disk can be.
//!
//! ```text
//!   end_of()   where the last partition, and what the table needs behind it, end
//!   change()   the sectors to write, in an order that a power cut cannot break
//!      ├─ MBR  one entry, if its partition is enlarged
//!      └─ GPT  gpt_change.rs
//! ```
//!
//! A table in doubt is not changed.

use super::{
    PartitionTable, TableKind,
    gpt_change::Gpt,
    mbr::{self, Entry},
    steps::{Change, Larger, Step, aligned_end, check_last},
};
use crate::{
    read::{ReadAt, Window, one_extent},
    reason::{LeftAlone, ReasonKind},
};
use std::ops::Range;

/// Maximum number of sectors that an entry of an MBR can address.
const MBR_SECTORS_MAX: u64 = u32::MAX as u64;

/// First byte after everything that the table needs: the smallest size of the disk, a multiple of
/// the sector.
pub(crate) fn end_of(disk: &dyn ReadAt, found: &PartitionTable) -> Result<u64, LeftAlone> {
    let whole = one_extent(0..disk.size_bytes());
    let window = Window::new(disk, &whole);
    let sector_bytes = u64::from(window.sector_bytes());
    if found.kind == TableKind::Gpt {
        return Ok(Gpt::read(&window, &[], None)?.min_sectors() * sector_bytes);
    }
    check(found)?;
    let last = found.partitions.iter().map(|partition| partition.range_bytes.end).max().unwrap_or(0);
    let sectors = mbr::primary_entries(&window.bytes(0, 512)?).map_or(0, |entries| mbr::end_sector(&entries));
    let end = last.max(sectors * sector_bytes);
    if end > window.size_bytes() {
        return Err(LeftAlone::damaged(format!("a partition ends at byte {end}, beyond the disk")));
    }
    Ok(end)
}

/// What is written when the disk gets `size_bytes`. The partition with the number `enlarge` then
/// reaches the new end.
pub(crate) fn change(
    disk: &dyn ReadAt,
    found: &PartitionTable,
    size_bytes: u64,
    enlarge: Option<u32>,
) -> Result<Change, LeftAlone> {
    let whole = one_extent(0..disk.size_bytes());
    let window = Window::new(disk, &whole);
    let sectors = size_bytes / u64::from(window.sector_bytes());
    match (found.kind, enlarge) {
        (TableKind::Gpt, _) => Gpt::read(&window, &[sectors], enlarge)?.change(&window, sectors, enlarge),
        (_, None) => Ok(Change::default()),
        (TableKind::None, Some(_)) => Err(LeftAlone::new(ReasonKind::Unknown, "the disk has no partition table")),
        (TableKind::Mbr, Some(number)) => {
            check(found)?;
            enlarge_primary(&window, found, sectors, number)
        }
    }
}

/// Refuses a table in doubt.
fn check(found: &PartitionTable) -> Result<(), LeftAlone> {
    let problem =
        found.problem.iter().chain(found.partitions.iter().filter_map(|partition| partition.problem.as_ref()));
    problem.into_iter().next().map_or(Ok(()), |reason| Err(reason.clone()))
}

/// Enlarges a partition of the four entries.
fn enlarge_primary(
    window: &Window<'_>,
    found: &PartitionTable,
    sectors: u64,
    number: u32,
) -> Result<Change, LeftAlone> {
    let sector_bytes = u64::from(window.sector_bytes());
    let mut sector = window.bytes(0, sector_bytes as usize)?;
    let Some(entries) = mbr::primary_entries(&sector) else { return Err(LeftAlone::damaged("no MBR in sector 0")) };
    let index = number.wrapping_sub(1) as usize;
    let is_extended = entries.get(index).is_some_and(Entry::is_extended);
    if number > 4 || is_extended {
        return Err(LeftAlone::unsupported(format!(
            "partition {number} is {}, and enlarging it here (use parted)",
            if is_extended { "an extended partition" } else { "a logical partition" }
        )));
    }
    let wanted = check_last(&found.partitions, number)?;
    if mbr::end_sector(&entries) * sector_bytes > wanted.range_bytes.end {
        return Err(LeftAlone::unsupported(format!(
            "partition {number} cannot be enlarged, because an extended partition follows it: moving a partition"
        )));
    }
    let Range { start: start_bytes, end: old_end } = wanted.range_bytes;
    if sectors > MBR_SECTORS_MAX {
        return Err(LeftAlone::unsupported(format!(
            "a partition of an MBR beyond sector {MBR_SECTORS_MAX} (2 TiB with sectors of 512 bytes): convert the table to GPT"
        )));
    }
    if old_end > sectors * sector_bytes {
        return Err(LeftAlone::new(
            ReasonKind::Unknown,
            format!("partition {number} ends beyond the new end of the disk"),
        ));
    }
    let new_end = aligned_end(old_end, sectors * sector_bytes);
    let larger = Larger { start_bytes, old_bytes: old_end - start_bytes, new_bytes: new_end - start_bytes };
    let steps = if new_end == old_end {
        Vec::new()
    } else {
        let at = 446 + 16 * index;
        // The end in cylinders, heads and sectors: beyond what these can express.
        sector[at + 5..at + 8].copy_from_slice(&[0xfe, 0xff, 0xff]);
        sector[at + 12..at + 16].copy_from_slice(&((larger.new_bytes / sector_bytes) as u32).to_le_bytes());
        vec![Step { offset_bytes: 0, bytes: sector }]
    };
    Ok(Change { steps, larger: Some(larger) })
}
