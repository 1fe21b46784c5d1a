//! Partition tables: MBR with logical partitions, and GPT with its backup.
//!
//! The kernel scans for partitions only if it was built to. Kernels of small virtual machines often
//! were not, and containers may have no nodes for partitions. So the tables are parsed here too.
//! They are written by the guest and not trusted: every number is checked, a chain of logical
//! partitions ends after [`LOGICAL_MAX`] steps, and a GPT is used only if its checksums are right.
//!
//! Pure except for the reader that is passed in. Reference: UEFI 2.10, chapter 5.

use std::{io, ops::Range};

/// A partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    /// The kernel's number: MBR 1 to 4, logical partitions from 5, GPT by entry.
    pub number: u32,
    /// First byte on the disk.
    pub start_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// Reads from an offset of the disk until the buffer is full.
pub type Reader<'a> = dyn FnMut(u64, &mut [u8]) -> io::Result<()> + 'a;

const LOGICAL_MAX: u32 = 128;
const ENTRIES_MAX: u32 = 1024;
const ENTRY_BYTES_MAX: u32 = 4096;

const TYPE_PROTECTIVE: u8 = 0xee;
const TYPES_EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];

/// Signatures of file systems in sector 0, and their offsets. Their boot sector ends with the same
/// 55 AA as an MBR.
const VOLUMES: [(usize, &[u8]); 5] =
    [(3, b"NTFS    "), (3, b"EXFAT   "), (3, b"-FVE-FS-"), (0x36, b"FAT1"), (0x52, b"FAT32")];

/// The partitions of a disk, ordered by number. Empty if there is no valid table.
///
/// # Errors
/// The error of the reader.
pub fn partitions(size_bytes: u64, sector_bytes: u32, read: &mut Reader<'_>) -> io::Result<Vec<Partition>> {
    let sector_bytes = u64::from(sector_bytes);
    if size_bytes < 2 * sector_bytes {
        return Ok(Vec::new());
    }
    let mut first = [0; 512];
    read(0, &mut first)?;
    let Some(records) = records(&first) else { return Ok(Vec::new()) };
    let disk = Disk { size_bytes, sector_bytes };
    if records.iter().any(|record| record.kind == TYPE_PROTECTIVE) {
        for place in [sector_bytes, size_bytes - sector_bytes] {
            if let Some(found) = gpt(disk, place, read)? {
                return Ok(found);
            }
        }
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for (number, record) in (1..).zip(&records) {
        let Some(range) = disk.range(record.start_sectors, record.len_sectors) else { continue };
        if TYPES_EXTENDED.contains(&record.kind) {
            continue;
        }
        found.push(partition(number, range));
    }
    if let Some(extended) = records.iter().find(|record| TYPES_EXTENDED.contains(&record.kind)) {
        logical(disk, extended.start_sectors, read, &mut found)?;
    }
    Ok(found)
}

#[derive(Debug, Clone, Copy)]
struct Disk {
    size_bytes: u64,
    sector_bytes: u64,
}

impl Disk {
    /// Converts a range of sectors to bytes. `None` if it is empty, begins at 0, or ends beyond the
    /// disk.
    fn range(self, start_sectors: u64, len_sectors: u64) -> Option<Range<u64>> {
        let start = start_sectors.checked_mul(self.sector_bytes)?;
        let end = start.checked_add(len_sectors.checked_mul(self.sector_bytes)?)?;
        (start > 0 && start < end && end <= self.size_bytes).then_some(start..end)
    }
}

fn partition(number: u32, range: Range<u64>) -> Partition {
    Partition { number, start_bytes: range.start, len_bytes: range.end - range.start }
}

#[derive(Debug, Clone, Copy)]
struct Record {
    kind: u8,
    start_sectors: u64,
    len_sectors: u64,
}

/// The four records of an MBR, or of a link of the chain of logical partitions. `None` if the
/// sector is neither.
fn records(sector: &[u8; 512]) -> Option<[Record; 4]> {
    let is_volume = VOLUMES.iter().any(|&(at, name)| sector[at..].starts_with(name));
    if sector[510..] != [0x55, 0xaa] || is_volume {
        return None;
    }
    let mut records = [Record { kind: 0, start_sectors: 0, len_sectors: 0 }; 4];
    for (record, bytes) in records.iter_mut().zip(sector[446..510].chunks_exact(16)) {
        // Valid values are 0x80 (bootable) and 0x00. Any other means that this is not a partition
        // table.
        if bytes[0] & 0x7f != 0 {
            return None;
        }
        if bytes[4] != 0 {
            *record = Record {
                kind: bytes[4],
                start_sectors: u32_at(bytes, 8).into(),
                len_sectors: u32_at(bytes, 12).into(),
            };
        }
    }
    Some(records)
}

/// Follows the chain of logical partitions. A link holds one partition, whose start is relative to
/// the link, and the next link, whose start is relative to the first link.
fn logical(disk: Disk, first_sectors: u64, read: &mut Reader<'_>, found: &mut Vec<Partition>) -> io::Result<()> {
    let mut link_sectors = first_sectors;
    for number in 5..5 + LOGICAL_MAX {
        if disk.range(link_sectors, 1).is_none() {
            break;
        }
        let mut sector = [0; 512];
        read(link_sectors * disk.sector_bytes, &mut sector)?;
        let Some(records) = records(&sector) else { break };
        let data = records.iter().find(|record| record.kind != 0 && !TYPES_EXTENDED.contains(&record.kind));
        if let Some(range) = data.and_then(|record| disk.range(link_sectors + record.start_sectors, record.len_sectors))
        {
            found.push(partition(number, range));
        }
        match records.iter().find(|record| TYPES_EXTENDED.contains(&record.kind)) {
            // A link that points backwards would make a loop.
            Some(next) if first_sectors + next.start_sectors > link_sectors => {
                link_sectors = first_sectors + next.start_sectors;
            }
            _ => break,
        }
    }
    Ok(())
}

/// The partitions of the GPT whose header is at the byte offset `place`. `None` if there is no
/// valid header and table.
fn gpt(disk: Disk, place: u64, read: &mut Reader<'_>) -> io::Result<Option<Vec<Partition>>> {
    let mut header = [0; 512];
    read(place, &mut header)?;
    let header_bytes = u32_at(&header, 12) as usize;
    if !header.starts_with(b"EFI PART")
        || !(92..=header.len()).contains(&header_bytes)
        || u64_at(&header, 24) != place / disk.sector_bytes
    {
        return Ok(None);
    }
    let said = u32_at(&header, 16);
    header[16..20].fill(0);
    if crc32fast::hash(&header[..header_bytes]) != said {
        return Ok(None);
    }
    let (entries_sectors, entries, entry_bytes) = (u64_at(&header, 72), u32_at(&header, 80), u32_at(&header, 84));
    if entries > ENTRIES_MAX || !(128..=ENTRY_BYTES_MAX).contains(&entry_bytes) {
        return Ok(None);
    }
    let table_bytes = u64::from(entries) * u64::from(entry_bytes);
    let table_sectors = table_bytes.div_ceil(disk.sector_bytes);
    let Some(range) = disk.range(entries_sectors, table_sectors) else { return Ok(None) };
    // Reads whole sectors, as a block device requires.
    let mut table = vec![0; (range.end - range.start) as usize];
    read(range.start, &mut table)?;
    table.truncate(table_bytes as usize);
    if crc32fast::hash(&table) != u32_at(&header, 88) {
        return Ok(None);
    }
    let mut found = Vec::new();
    for (number, entry) in (1..).zip(table.chunks_exact(entry_bytes as usize)) {
        let (first, last) = (u64_at(entry, 32), u64_at(entry, 40));
        if entry[..16] == [0; 16] || last < first {
            continue;
        }
        if let Some(range) = (last - first).checked_add(1).and_then(|len| disk.range(first, len)) {
            found.push(partition(number, range));
        }
    }
    Ok(Some(found))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests;
