//! Partition tables: MBR with its chain of logical partitions, and GPT with its backup.
//!
//! The kernel looks for partitions by itself, if it was built to: many kernels of small virtual
//! machines were not, and a container may see no nodes for them. So the tables are read here too.
//! They are the guest's, and hostile: every number is checked, a chain ends after [`LOGICAL_MAX`]
//! steps, and a GPT is believed only with its checksums right.
//!
//! Pure but for the reader that is passed in. References: UEFI 2.10, chapter 5; the MBR is older
//! than its descriptions.

use std::{io, ops::Range};

/// A partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    /// As the kernel counts: MBR 1 to 4, logical ones from 5; GPT by entry.
    pub number: u32,
    /// First byte on the disk.
    pub start_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// Fills a buffer from an offset of the disk.
pub type Reader<'a> = dyn FnMut(u64, &mut [u8]) -> io::Result<()> + 'a;

const LOGICAL_MAX: u32 = 128;
const ENTRIES_MAX: u32 = 1024;
const ENTRY_BYTES_MAX: u32 = 4096;

const TYPE_PROTECTIVE: u8 = 0xee;
const TYPES_EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];

/// What sector 0 of a file system without partitions says, and where; such a sector ends like a
/// partition table.
const VOLUMES: [(usize, &[u8]); 5] =
    [(3, b"NTFS    "), (3, b"EXFAT   "), (3, b"-FVE-FS-"), (0x36, b"FAT1"), (0x52, b"FAT32")];

/// The partitions of a disk, in the order of their numbers; none where there is no table.
///
/// # Errors
/// What the reader says.
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
    /// A range of sectors in bytes, if it is one and lies on the disk.
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

/// The four records of an MBR, or of a link in the chain of logical partitions; `None` when it is
/// neither.
fn records(sector: &[u8; 512]) -> Option<[Record; 4]> {
    let is_volume = VOLUMES.iter().any(|&(at, name)| sector[at..].starts_with(name));
    if sector[510..] != [0x55, 0xaa] || is_volume {
        return None;
    }
    let mut records = [Record { kind: 0, start_sectors: 0, len_sectors: 0 }; 4];
    for (record, bytes) in records.iter_mut().zip(sector[446..510].chunks_exact(16)) {
        // Anything but "bootable" and "not" says that these bytes are something else.
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

/// Each link holds one partition, counted from the link itself, and the next link, counted from the
/// first.
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
            // Backwards would be a loop.
            Some(next) if first_sectors + next.start_sectors > link_sectors => {
                link_sectors = first_sectors + next.start_sectors;
            }
            _ => break,
        }
    }
    Ok(())
}

/// The partitions of the GPT whose header is at `place`, or `None` when none that is sound is
/// there.
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
    // The last sector is read whole, as a device wants it.
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
