//! FAT12, FAT16 and FAT32: the file allocation table, whose zero entries are free clusters
//! (Microsoft FAT specification, and what Linux does where it is silent).
//!
//! ```text
//!   boot sector ─▶ geometry ─▶ kind of FAT (12, 16, 32 bits)
//!   FAT[1], boot sector: dirty bits
//!   FAT copies, by the piece: are all the same? ─▶ entries ─▶ sink
//! ```
//!
//! FAT has no checksums. The table is trusted if the volume is marked clean and all copies of the
//! table are the same.

use crate::{
    bytes::{le16, le32, text},
    identity::Identity,
    read::Window,
    reason::{LeftAlone, ReasonKind, Stop},
    sink::Sink,
};

/// Bytes of the table that are read at once: whole entries of 12, 16 and 32 bits.
const PIECE_BYTES: u64 = 96 << 10;

/// Width of the entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    Fat12,
    Fat16,
    Fat32,
}

/// Geometry of a volume that fits its place.
#[derive(Debug)]
struct Boot {
    width: Width,
    cluster_bytes: u64,
    clusters: u64,
    table_start_bytes: u64,
    table_bytes: u64,
    tables: u64,
    data_start_bytes: u64,
    root_cluster: u64,
    size_bytes: u64,
    /// The flags of Windows NT in the boot sector; bit 0 is "dirty".
    flags: u8,
}

/// Whether the boot sector is that of a FAT.
pub(crate) fn find(window: &Window<'_>) -> bool {
    let Some(raw) = window.array::<512>(0) else { return false };
    let named = raw[0x36..0x3b] == *b"FAT12"
        || raw[0x36..0x3b] == *b"FAT16"
        || raw[0x36..0x3e] == *b"FAT     "
        || raw[0x52..0x57] == *b"FAT32";
    named && raw[510..] == [0x55, 0xaa]
}

/// Label and serial number.
pub(crate) fn identify(window: &Window<'_>) -> Option<Identity> {
    let raw = window.bytes(0, 512).ok()?;
    let boot = Boot::parse(&raw, window.size_bytes()).ok();
    let (name, at) = match boot.as_ref().map(|boot| boot.width) {
        Some(Width::Fat32) => ("FAT32", 0x43),
        Some(Width::Fat16) => ("FAT16", 0x27),
        Some(Width::Fat12) => ("FAT12", 0x27),
        None => ("FAT", 0x27),
    };
    let label = text(&raw[at + 4..at + 15]).filter(|label| label != "NO NAME");
    let serial = le32(&raw, at);
    Some(Identity { name, label, uuid: Some(format!("{:04X}-{:04X}", serial >> 16, serial & 0xffff)) })
}

/// First byte after the file system.
pub(crate) fn end_bytes(window: &Window<'_>) -> Result<u64, LeftAlone> {
    Ok(Boot::parse(&window.bytes(0, 512)?, window.size_bytes())?.size_bytes)
}

/// Sends the free clusters to `sink`.
pub(crate) fn scan(window: &Window<'_>, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let raw = window.bytes(0, 512)?;
    let boot = Boot::parse(&raw, window.size_bytes())?;
    check_clean(window, &boot)?;
    let place = |cluster: u64| boot.data_start_bytes + (cluster - 2) * boot.cluster_bytes;
    if boot.width == Width::Fat32 {
        sink.reserve(place(boot.root_cluster)..place(boot.root_cluster + 1));
    }
    let (mut piece, mut other) = (vec![0; PIECE_BYTES as usize], vec![0; PIECE_BYTES as usize]);
    let needed_bytes = boot.width.table_bytes(boot.clusters + 2);
    let mut at_bytes = 0;
    let mut cluster = 0_u64;
    while at_bytes < needed_bytes {
        let take = (needed_bytes - at_bytes).min(PIECE_BYTES) as usize;
        window.read(boot.table_start_bytes + at_bytes, &mut piece[..take])?;
        for copy in 1..boot.tables {
            window.read(boot.table_start_bytes + copy * boot.table_bytes + at_bytes, &mut other[..take])?;
            if piece[..take] != other[..take] {
                return Err(LeftAlone::damaged("the copies of the FAT are not the same").into());
            }
        }
        let entries = boot.width.entries(take as u64).min(boot.clusters + 2 - cluster);
        for index in 0..entries {
            if cluster + index >= 2 && boot.width.entry(&piece[..take], index as usize) == 0 {
                sink.free(place(cluster + index)..place(cluster + index + 1))?;
            }
        }
        cluster += entries;
        at_bytes += take as u64;
    }
    Ok(())
}

/// Refuses a volume that was not unmounted, or had errors.
fn check_clean(window: &Window<'_>, boot: &Boot) -> Result<(), LeftAlone> {
    let head = window.bytes(boot.table_start_bytes, 8)?;
    // In entry 1 a set bit says: shut down properly, no error. FAT12 has no such bits.
    let marks = match boot.width {
        Width::Fat12 => 0xc000,
        Width::Fat16 => boot.width.entry(&head, 1) & 0xc000,
        Width::Fat32 => boot.width.entry(&head, 1) >> 12 & 0xc000,
    };
    if marks != 0xc000 || boot.flags & 3 != 0 {
        return Err(LeftAlone::new(ReasonKind::Dirty, "the FAT is marked dirty: check it with fsck.fat or chkdsk"));
    }
    Ok(())
}

impl Boot {
    fn parse(raw: &[u8], size_bytes: u64) -> Result<Self, LeftAlone> {
        let wrong = |what: String| LeftAlone::damaged(format!("boot sector of FAT: {what}"));
        let sector_bytes = u64::from(le16(raw, 0x0b));
        let (per_cluster, tables) = (u64::from(raw[0x0d]), u64::from(raw[0x10]));
        let reserved = u64::from(le16(raw, 0x0e));
        if !sector_bytes.is_power_of_two() || !(512..=4096).contains(&sector_bytes) {
            return Err(wrong(format!("sectors of {sector_bytes} bytes")));
        }
        if !per_cluster.is_power_of_two() || !(1..=2).contains(&tables) || reserved == 0 {
            return Err(wrong(format!(
                "{per_cluster} sectors in a cluster, {tables} tables, {reserved} reserved sectors"
            )));
        }
        let root_entries = u64::from(le16(raw, 0x11));
        let (short_sectors, long_sectors) = (u64::from(le16(raw, 0x13)), u64::from(le32(raw, 0x20)));
        let sectors = if short_sectors != 0 { short_sectors } else { long_sectors };
        let (short_table, long_table) = (u64::from(le16(raw, 0x16)), u64::from(le32(raw, 0x24)));
        let is_32 = short_table == 0;
        let table_sectors = if is_32 { long_table } else { short_table };
        let root_sectors = (root_entries * 32).div_ceil(sector_bytes);
        let before_data = reserved + tables * table_sectors + root_sectors;
        if sectors <= before_data || sectors * sector_bytes > size_bytes || table_sectors == 0 {
            return Err(wrong(format!("{sectors} sectors, {before_data} of them before the data")));
        }
        let clusters = (sectors - before_data) / per_cluster;
        let width = match clusters {
            _ if is_32 => Width::Fat32,
            0..4085 => Width::Fat12,
            4085..65_525 => Width::Fat16,
            _ => return Err(wrong(format!("{clusters} clusters in a FAT16"))),
        };
        let table_bytes = table_sectors * sector_bytes;
        if clusters == 0 || clusters > 0x0fff_fff5 || width.table_bytes(clusters + 2) > table_bytes {
            return Err(wrong(format!("a table of {table_bytes} bytes for {clusters} clusters")));
        }
        let root_cluster = u64::from(le32(raw, 0x2c));
        if is_32 {
            if root_entries != 0 || le16(raw, 0x2a) != 0 || !(2..clusters + 2).contains(&root_cluster) {
                return Err(wrong(format!("a FAT32 of unknown version, or its root in cluster {root_cluster}")));
            }
            // Bit 7: only one copy of the table is kept up to date.
            if le16(raw, 0x28) & 0x80 != 0 {
                return Err(LeftAlone::unsupported("a FAT32 without mirrored tables"));
            }
        }
        Ok(Self {
            width,
            cluster_bytes: per_cluster * sector_bytes,
            clusters,
            table_start_bytes: reserved * sector_bytes,
            table_bytes,
            tables,
            data_start_bytes: before_data * sector_bytes,
            root_cluster,
            size_bytes: sectors * sector_bytes,
            flags: raw[if is_32 { 0x41 } else { 0x25 }],
        })
    }
}

impl Width {
    /// Bytes that so many entries take.
    fn table_bytes(self, entries: u64) -> u64 {
        match self {
            Self::Fat12 => (entries * 3).div_ceil(2),
            Self::Fat16 => entries * 2,
            Self::Fat32 => entries * 4,
        }
    }

    /// Entries that lie completely in so many bytes.
    fn entries(self, bytes: u64) -> u64 {
        match self {
            Self::Fat12 => bytes * 2 / 3,
            Self::Fat16 => bytes / 2,
            Self::Fat32 => bytes / 4,
        }
    }

    /// An entry of a piece that begins with a whole entry.
    fn entry(self, piece: &[u8], index: usize) -> u32 {
        match self {
            Self::Fat12 => u32::from(le16(piece, index * 3 / 2) >> (4 * (index % 2)) & 0xfff),
            Self::Fat16 => u32::from(le16(piece, index * 2)),
            Self::Fat32 => le32(piece, index * 4) & 0x0fff_ffff,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_12_bits_share_bytes() {
        let piece = [0x34, 0x12, 0xab];
        assert_eq!((Width::Fat12.entry(&piece, 0), Width::Fat12.entry(&piece, 1)), (0x234, 0xab1));
        assert_eq!(Width::Fat12.table_bytes(3), 5);
        assert_eq!(Width::Fat12.entries(5), 3);
        assert_eq!(PIECE_BYTES % 3, 0);
    }
}
