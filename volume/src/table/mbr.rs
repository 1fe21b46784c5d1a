//! The master boot record: four entries, one of which may be an extended partition: a chain of
//! tables, each with one logical partition and the place of the next table.

use super::partition::{Partition, PartitionTable, TableKind, partition};
use crate::{
    bytes::le32,
    read::Window,
    reason::{LeftAlone, ReasonKind},
};

/// Maximum number of logical partitions. Windows and Linux stop earlier.
const LOGICAL_MAX: u32 = 256;

/// An entry of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    type_byte: u8,
    first_sector: u32,
    sectors: u32,
}

impl Entry {
    pub(super) fn is_protective(&self) -> bool {
        self.type_byte == 0xee
    }

    fn is_used(&self) -> bool {
        self.type_byte != 0
    }

    pub(super) fn is_extended(&self) -> bool {
        matches!(self.type_byte, 0x05 | 0x0f | 0x85)
    }

    fn end_sector(&self, base: u64) -> u64 {
        base + u64::from(self.first_sector) + u64::from(self.sectors)
    }
}

/// The four entries of a sector; `None` without the signature 55 AA.
fn entries(sector: &[u8]) -> Option<[(u8, Entry); 4]> {
    (sector.get(510..512) == Some(&[0x55, 0xaa])).then(|| {
        [446, 462, 478, 494].map(|at| {
            let entry =
                Entry { type_byte: sector[at + 4], first_sector: le32(sector, at + 8), sectors: le32(sector, at + 12) };
            (sector[at], entry)
        })
    })
}

/// The entries of sector 0, if it is a partition table. Boot sectors of file systems have the same
/// signature, and code or zeros where the table would be.
pub(super) fn primary_entries(sector: &[u8]) -> Option<[Entry; 4]> {
    let entries = entries(sector)?;
    let plausible = entries.iter().all(|(flag, entry)| {
        matches!(flag, 0 | 0x80) && (!entry.is_used() || (entry.first_sector > 0 && entry.sectors > 0))
    });
    let any = entries.iter().any(|(_, entry)| entry.is_used());
    (plausible && any).then(|| entries.map(|(_, entry)| entry))
}

/// Whether sector 0 is a partition table with an active partition.
pub(super) fn has_active(sector: &[u8]) -> bool {
    primary_entries(sector).is_some() && [446, 462, 478, 494].iter().any(|&at| sector[at] == 0x80)
}

/// First sector after all partitions, extended ones included.
pub(super) fn end_sector(primary: &[Entry; 4]) -> u64 {
    primary.iter().filter(|entry| entry.is_used()).map(|entry| entry.end_sector(0)).max().unwrap_or(0)
}

/// Whether an MBR beside a GPT has anything but the protective entry.
pub(super) fn is_hybrid(entries: &[Entry; 4]) -> bool {
    entries.iter().any(|entry| entry.is_used() && !entry.is_protective())
}

/// The partitions of an MBR.
pub(super) fn read(window: &Window<'_>, primary: &[Entry; 4]) -> Result<PartitionTable, LeftAlone> {
    let mut partitions = Vec::new();
    let mut problem = None;
    let mut extended = None;
    for (index, entry) in primary.iter().enumerate().filter(|(_, entry)| entry.is_used()) {
        let number = index as u32 + 1;
        if entry.type_byte == 0x42 {
            problem = Some(LeftAlone::unsupported("a dynamic disk of Windows (LDM)"));
        }
        if !entry.is_extended() {
            let made = partition(window, number, entry.first_sector.into(), entry.end_sector(0), type_text(entry));
            partitions.push(made);
        } else if extended.replace(*entry).is_some() {
            problem = Some(LeftAlone::damaged("two extended partitions"));
        }
    }
    if let Some(extended) = extended {
        for (index, entry) in primary.iter().enumerate() {
            let apart = entry.end_sector(0) <= u64::from(extended.first_sector)
                || u64::from(entry.first_sector) >= extended.end_sector(0);
            if entry.is_used() && *entry != extended && !apart {
                problem = Some(LeftAlone::damaged(format!("partition {} overlaps the extended partition", index + 1)));
            }
        }
        match logical(window, &extended) {
            Ok(logical) => partitions.extend(logical),
            Err(reason) => problem = Some(reason),
        }
    }
    Ok(PartitionTable { kind: TableKind::Mbr, problem, partitions })
}

/// The logical partitions. Each table has to lie behind the one before.
fn logical(window: &Window<'_>, extended: &Entry) -> Result<Vec<Partition>, LeftAlone> {
    let sector_bytes = u64::from(window.sector_bytes());
    let base = u64::from(extended.first_sector);
    let end = extended.end_sector(0);
    let mut partitions = Vec::new();
    let mut at = base;
    for number in 5..5 + LOGICAL_MAX {
        let sector = window.bytes(at * sector_bytes, 512)?;
        let Some(table) = entries(&sector) else {
            return Err(LeftAlone::damaged(format!("no table of logical partitions in sector {at}")));
        };
        let [(_, here), (_, next), (_, third), (_, fourth)] = table;
        if third.is_used() || fourth.is_used() || here.is_extended() {
            return Err(LeftAlone::new(
                ReasonKind::Unsupported,
                format!("the table of logical partitions in sector {at} has more than one partition"),
            ));
        }
        if here.is_used() {
            let first = at + u64::from(here.first_sector);
            let made = partition(window, number, first, here.end_sector(at), type_text(&here));
            if first <= at || here.end_sector(at) > end {
                return Err(LeftAlone::damaged(format!("partition {number} lies outside of the extended partition")));
            }
            partitions.push(made);
        }
        if !next.is_used() {
            return Ok(partitions);
        }
        let following = base + u64::from(next.first_sector);
        if !next.is_extended() || following <= at || following >= end {
            return Err(LeftAlone::damaged(format!("the chain of logical partitions breaks in sector {at}")));
        }
        at = following;
    }
    Err(LeftAlone::unsupported(format!("more than {LOGICAL_MAX} logical partitions")))
}

fn type_text(entry: &Entry) -> String {
    format!("{:02x}", entry.type_byte)
}
