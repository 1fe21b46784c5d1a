//! Partition tables: which ranges of a disk are volumes.
//!
//! ```text
//!   sector 0    no table            the whole disk is one volume
//!               protective entry ─▶ gpt.rs   both copies must agree
//!               other entries    ─▶ mbr.rs   four entries; logical ones in a chain of tables
//! ```
//!
//! change.rs and gpt_change.rs say how a table changes with the size of its disk.
//!
//! A table in doubt is still shown as far as it can be read, with the reason why nothing of the
//! disk is given up. Partitions that overlap or leave the disk are left alone.

mod change;
mod gpt;
mod gpt_change;
mod mbr;
mod partition;
mod steps;

use crate::{
    read::{ReadAt, Window, one_extent},
    reason::{LeftAlone, ReasonKind},
};
pub(crate) use change::{change, end_of};
pub(crate) use partition::{Partition, PartitionTable};
pub use partition::{Place, TableKind};
pub use steps::Step;

/// Reads the partition table.
pub(crate) fn find(disk: &dyn ReadAt) -> PartitionTable {
    let whole = one_extent(0..disk.size_bytes());
    let window = Window::new(disk, &whole);
    let sector_bytes = window.sector_bytes();
    if !matches!(sector_bytes, 512 | 1024 | 2048 | 4096) {
        let problem = LeftAlone::unsupported(format!("a sector size of {sector_bytes} bytes"));
        return PartitionTable { kind: TableKind::None, problem: Some(problem), partitions: vec![bare(&window)] };
    }
    let mut found = match read(&window) {
        Ok(found) => found,
        Err(reason) => PartitionTable { kind: TableKind::None, problem: Some(reason), partitions: vec![bare(&window)] },
    };
    mark_overlaps(&mut found.partitions);
    found
}

/// Whether an MBR has a partition that is marked as active: the one that a BIOS starts from.
pub(crate) fn has_active(window: &Window<'_>) -> bool {
    window.array::<512>(0).is_some_and(|sector| mbr::has_active(&sector))
}

/// Whether the first sector of a volume is a partition table.
pub(crate) fn has_mbr(window: &Window<'_>) -> bool {
    window.array::<512>(0).is_some_and(|sector| mbr::primary_entries(&sector).is_some())
}

fn read(window: &Window<'_>) -> Result<PartitionTable, LeftAlone> {
    let sector_bytes = u64::from(window.sector_bytes());
    if window.size_bytes() < 2 * sector_bytes {
        return Ok(PartitionTable { kind: TableKind::None, problem: None, partitions: vec![bare(window)] });
    }
    let sector = window.bytes(0, 512)?;
    let entries = mbr::primary_entries(&sector);
    let protective = entries.iter().flatten().any(|entry| entry.is_protective());
    let at_the_end = window.size_bytes() / sector_bytes * sector_bytes - sector_bytes;
    let gpt_places = [512, 1024, 2048, 4096, at_the_end].into_iter().find(|at| gpt::is_header(window, *at));
    match (entries, gpt_places) {
        (_, Some(_)) if protective => gpt::read(window, entries),
        (None, Some(at)) => {
            let mut found = gpt::read(window, entries)?;
            found.problem = Some(LeftAlone::new(
                ReasonKind::Ambiguous,
                format!("a GPT header at byte {at} without a protective MBR: repair the table with gdisk"),
            ));
            Ok(found)
        }
        (Some(entries), Some(at)) => {
            let mut found = mbr::read(window, &entries)?;
            found.problem = Some(LeftAlone::new(
                ReasonKind::Ambiguous,
                format!("an MBR with partitions, and a GPT header at byte {at}: remove the wrong one with wipefs"),
            ));
            Ok(found)
        }
        (Some(_), None) if protective => {
            let problem = LeftAlone::damaged("a protective MBR without a GPT");
            Ok(PartitionTable { kind: TableKind::Gpt, problem: Some(problem), partitions: Vec::new() })
        }
        (Some(entries), None) => mbr::read(window, &entries),
        (None, None) => Ok(PartitionTable { kind: TableKind::None, problem: None, partitions: vec![bare(window)] }),
    }
}

fn bare(window: &Window<'_>) -> Partition {
    Partition { place: Place::Disk, range_bytes: 0..window.size_bytes(), name: None, type_text: None, problem: None }
}

/// Leaves alone all partitions that overlap another one.
fn mark_overlaps(partitions: &mut [Partition]) {
    let mut order: Vec<usize> = (0..partitions.len()).collect();
    order.sort_by_key(|index| partitions[*index].range_bytes.start);
    let mut reaching: Option<usize> = None;
    for index in order {
        if let Some(before) = reaching
            && partitions[index].range_bytes.start < partitions[before].range_bytes.end
        {
            for (one, other) in [(index, before), (before, index)] {
                let sentence = format!("overlaps {}", place_name(&partitions[other].place));
                partitions[one].problem.get_or_insert(LeftAlone::damaged(sentence));
            }
        }
        let farther =
            reaching.is_none_or(|before| partitions[index].range_bytes.end > partitions[before].range_bytes.end);
        if farther {
            reaching = Some(index);
        }
    }
}

fn place_name(place: &Place) -> String {
    match place {
        Place::Partition(number) => format!("partition {number}"),
        _ => "another volume".to_owned(),
    }
}
