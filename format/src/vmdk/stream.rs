//! Writing a streamOptimized extent: everything but the compression, in one pass.
//!
//! ```text
//!   new() ──────▶ header │ descriptor │ padding to a grain
//!   grain(i, z) ▶ [the table of the grains before, once it is complete] marker │ z │ padding
//!   finish() ───▶ last table │ directory │ footer │ end of stream
//! ```
//!
//! The writer appends to a vector of the caller, which empties it into a file or a socket whenever
//! it likes: nothing that was emitted is changed later. The header says that the directory is found
//! through the footer. Grains come in ascending order, those of zeros are left out. A table follows
//! the last of its grains, and one without grains is left out (entry 0 of the directory).
//!
//! What must hold: each place that is recorded fits into its field of 32 bits, so an extent ends
//! before 2 TiB.

use super::{
    Descriptor, GTES_PER_TABLE, GrainMarker, Marker, MarkerKind, Placing, SECTOR_BYTES, SparseFlags, SparseHeader,
};

/// Length of a grain in bytes: the only one that all programs accept.
pub const STREAM_GRAIN_BYTES: u64 = 64 << 10;
/// The largest disk: 64 TiB. The directory is kept in memory, 8 MiB for such a disk.
pub const STREAM_SIZE_MAX_BYTES: u64 = 64 << 40;

const GRAIN_SECTORS: u64 = STREAM_GRAIN_BYTES / SECTOR_BYTES;
/// Space for the descriptor in the files of VMware.
const DESCRIPTOR_SECTORS: u64 = 20;

/// Why a grain was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The extent has reached the length that its fields can express.
    #[error("the extent would be longer than 2 TiB, which its tables cannot express")]
    TooLong,
    /// The grain lies beyond the disk, is empty, or does not follow the one before.
    #[error("grain {0} is out of place")]
    OutOfPlace(u64),
    /// The disk has no sectors, or more than [`STREAM_SIZE_MAX_BYTES`].
    #[error("a disk of {0} sectors")]
    Size(u64),
}

/// Lays out a streamOptimized extent; see the module documentation.
#[derive(Debug)]
pub struct StreamWriter {
    header: SparseHeader,
    /// Length of what was emitted, in sectors.
    end_sector: u64,
    directory: Vec<u32>,
    /// The table of the last grain, and its number.
    table: (u64, Vec<u32>),
    /// Whether `table` has a grain.
    has_grains: bool,
    next_grain: u64,
}

impl StreamWriter {
    /// Begins an extent for a disk of `capacity_sectors`, and emits all that stands before the
    /// first grain.
    ///
    /// # Errors
    /// [`StreamError::Size`].
    pub fn new(capacity_sectors: u64, descriptor: &Descriptor, out: &mut Vec<u8>) -> Result<Self, StreamError> {
        if capacity_sectors == 0 || capacity_sectors > STREAM_SIZE_MAX_BYTES / SECTOR_BYTES {
            return Err(StreamError::Size(capacity_sectors));
        }
        let text = descriptor.to_text();
        let descriptor_sectors = (text.len() as u64).div_ceil(SECTOR_BYTES).max(DESCRIPTOR_SECTORS);
        let header = SparseHeader {
            version: 3,
            flags: SparseFlags(SparseFlags::TEXT_CHECK | SparseFlags::COMPRESSED | SparseFlags::MARKERS),
            capacity_sectors,
            grain_sectors: GRAIN_SECTORS,
            descriptor_sector: 1,
            descriptor_sectors,
            table_entries: GTES_PER_TABLE,
            redundant_directory: None,
            directory: Placing::InFooter,
            overhead_sectors: (1 + descriptor_sectors).next_multiple_of(GRAIN_SECTORS),
            is_unclean: false,
            compression: 1,
        };
        let start = out.len();
        out.extend(header.to_bytes());
        out.extend(text.as_bytes());
        out.resize(start + (header.overhead_sectors * SECTOR_BYTES) as usize, 0);
        let directory = vec![0; header.tables() as usize];
        let table = (0, vec![0; GTES_PER_TABLE as usize]);
        let end_sector = header.overhead_sectors;
        Ok(Self { header, end_sector, directory, table, has_grains: false, next_grain: 0 })
    }

    /// Number of grains of the disk.
    pub fn grains(&self) -> u64 {
        self.header.grains()
    }

    /// Emits a grain: `packed` is its whole length, compressed by RFC 1950. The last grain of a
    /// disk is filled up with zeros.
    ///
    /// # Errors
    /// [`StreamError::OutOfPlace`], [`StreamError::TooLong`]. Nothing was emitted then.
    pub fn grain(&mut self, number: u64, packed: &[u8], out: &mut Vec<u8>) -> Result<(), StreamError> {
        let data_bytes = u32::try_from(packed.len()).ok().filter(|&bytes| bytes > 0);
        let (Some(data_bytes), true) = (data_bytes, (self.next_grain..self.grains()).contains(&number)) else {
            return Err(StreamError::OutOfPlace(number));
        };
        let marker = GrainMarker { first_sector: number * GRAIN_SECTORS, data_bytes };
        // The grain, and the tables that may still follow it.
        let grain_sectors = (packed.len() as u64 + 12).div_ceil(SECTOR_BYTES);
        let rest_sectors = 2 * (1 + self.header.table_sectors()) + self.header.directory_sectors() + 4;
        if self.end_sector + grain_sectors + rest_sectors > u64::from(u32::MAX) {
            return Err(StreamError::TooLong);
        }
        let entries = u64::from(GTES_PER_TABLE);
        if self.table.0 != number / entries {
            self.end_table(out);
            self.table.0 = number / entries;
        }
        self.table.1[(number % entries) as usize] = self.end_sector as u32;
        self.has_grains = true;
        self.next_grain = number + 1;
        out.extend(marker.to_bytes());
        self.emit(12, packed, out);
        Ok(())
    }

    /// Emits all that stands behind the last grain, and returns the length of the extent in bytes.
    pub fn finish(mut self, out: &mut Vec<u8>) -> u64 {
        self.end_table(out);
        self.sector(MarkerKind::GrainDirectory, self.header.directory_sectors(), out);
        self.header.directory = Placing::Sector(self.end_sector);
        let directory: Vec<u8> = self.directory.iter().flat_map(|sector| sector.to_le_bytes()).collect();
        self.emit(0, &directory, out);
        self.sector(MarkerKind::Footer, 1, out);
        let footer = self.header.to_bytes();
        self.emit(0, &footer, out);
        self.sector(MarkerKind::End, 0, out);
        self.end_sector * SECTOR_BYTES
    }

    /// Emits the present table if it has a grain, and begins an empty one.
    fn end_table(&mut self, out: &mut Vec<u8>) {
        if !std::mem::take(&mut self.has_grains) {
            return;
        }
        self.sector(MarkerKind::GrainTable, self.header.table_sectors(), out);
        self.directory[self.table.0 as usize] = self.end_sector as u32;
        let table: Vec<u8> = self.table.1.iter().flat_map(|sector| sector.to_le_bytes()).collect();
        self.emit(0, &table, out);
        self.table.1.fill(0);
    }

    fn sector(&mut self, kind: MarkerKind, sectors: u64, out: &mut Vec<u8>) {
        self.emit(0, &Marker::sector(kind, sectors), out);
    }

    /// Appends bytes, and zeros up to the end of the sector. `before` bytes of the same sector were
    /// appended already.
    fn emit(&mut self, before: usize, bytes: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(bytes);
        let padded = (before + bytes.len()).next_multiple_of(SECTOR_BYTES as usize);
        out.resize(out.len() + padded - before - bytes.len(), 0);
        self.end_sector += padded as u64 / SECTOR_BYTES;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmdk::{Access, Extent, ExtentKind, SPARSE_HEADER_BYTES};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn descriptor(sectors: u64) -> Descriptor {
        let extent = Extent {
            access: Access::ReadWrite,
            sectors,
            kind: ExtentKind::Sparse,
            file: Some("x.vmdk".into()),
            first_sector: 0,
        };
        Descriptor::new(1, "streamOptimized", vec![extent], &[])
    }

    fn write(sectors: u64, grains: &BTreeMap<u64, Vec<u8>>) -> Vec<u8> {
        let mut out = Vec::new();
        let mut writer = StreamWriter::new(sectors, &descriptor(sectors), &mut out).unwrap();
        for (number, packed) in grains {
            writer.grain(*number, packed, &mut out).unwrap();
        }
        assert_eq!(writer.finish(&mut out), out.len() as u64);
        out
    }

    fn u32_at(bytes: &[u8], sector: u64, index: u64) -> u32 {
        let at = (sector * 512 + index * 4) as usize;
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// The grains by the footer, the directory and the tables, and the kinds of the markers met in
    /// a walk from the front.
    fn read(bytes: &[u8]) -> (BTreeMap<u64, Vec<u8>>, Vec<MarkerKind>) {
        let len = bytes.len();
        let header = SparseHeader::parse(bytes, 0).unwrap();
        assert_eq!(header.directory, Placing::InFooter);
        let footer = SparseHeader::parse(&bytes[len - 1024..][..SPARSE_HEADER_BYTES], 0).unwrap();
        let Placing::Sector(directory) = footer.directory else { panic!("the footer has no directory") };
        assert_eq!(SparseHeader { directory: Placing::InFooter, ..footer.clone() }, header);
        let (mut grains, mut kinds) = (BTreeMap::new(), Vec::new());
        for number in 0..header.grains() {
            let table = u32_at(bytes, directory, number / 512);
            let place = if table == 0 { 0 } else { u32_at(bytes, table.into(), number % 512) };
            if place != 0 {
                let at = place as usize * 512;
                let Some(Marker::Grain(marker)) = Marker::parse(&bytes[at..]) else { panic!("no marker") };
                assert_eq!(marker.first_sector, number * header.grain_sectors);
                grains.insert(number, bytes[at + 12..at + 12 + marker.data_bytes as usize].to_vec());
            }
        }
        let mut at = (header.overhead_sectors * 512) as usize;
        let mut walked = 0;
        while at < len {
            at += match Marker::parse(&bytes[at..]).unwrap() {
                Marker::Grain(marker) => {
                    walked += 1;
                    (12 + marker.data_bytes as usize).next_multiple_of(512)
                }
                Marker::Other { kind, sectors } => {
                    kinds.push(kind);
                    512 + sectors as usize * 512
                }
            };
        }
        assert_eq!((at, walked), (len, grains.len()));
        (grains, kinds)
    }

    #[test]
    fn an_empty_disk_has_no_tables() {
        let bytes = write(20480, &BTreeMap::new());
        let (grains, kinds) = read(&bytes);
        assert!(grains.is_empty());
        assert_eq!(kinds, [MarkerKind::GrainDirectory, MarkerKind::Footer, MarkerKind::End]);
        assert_eq!(&bytes[512..512 + 21], b"# Disk DescriptorFile");
    }

    #[test]
    fn grains_out_of_place_are_refused_and_emit_nothing() {
        let mut out = Vec::new();
        let mut writer = StreamWriter::new(1000, &descriptor(1000), &mut out).unwrap();
        assert_eq!(writer.grains(), 8);
        writer.grain(3, &[1], &mut out).unwrap();
        let len = out.len();
        for (number, packed) in [(3, &[1][..]), (2, &[1]), (8, &[1]), (4, &[])] {
            assert_eq!(writer.grain(number, packed, &mut out), Err(StreamError::OutOfPlace(number)));
        }
        assert_eq!(out.len(), len);
        for sectors in [0, (64 << 31) + 1] {
            let refused = StreamWriter::new(sectors, &descriptor(sectors), &mut out).unwrap_err();
            assert_eq!(refused, StreamError::Size(sectors));
        }
    }

    #[test]
    fn no_place_beyond_32_bits_is_recorded() {
        let mut out = Vec::new();
        let mut writer = StreamWriter::new(1 << 30, &descriptor(1 << 30), &mut out).unwrap();
        out.clear();
        writer.end_sector = u64::from(u32::MAX) - 100;
        assert_eq!(writer.grain(0, &[1; 1024], &mut out), Err(StreamError::TooLong));
        writer.end_sector -= 64 * 1024;
        writer.grain(0, &[1; 1024], &mut out).unwrap();
        writer.grain(600, &[1; 1024], &mut out).unwrap();
        assert!(writer.finish(&mut out) < 2 << 40);
    }

    proptest! {
        #[test]
        fn the_grains_are_found_by_tables_and_by_markers(
            sectors in 1_u64..300_000,
            picked in proptest::collection::vec((any::<prop::sample::Index>(), 1_usize..2000), 0..20),
        ) {
            let count = sectors.div_ceil(GRAIN_SECTORS) as usize;
            let grains: BTreeMap<u64, Vec<u8>> = picked
                .into_iter()
                .map(|(index, len)| (index.index(count) as u64, vec![len as u8 | 1; len]))
                .collect();
            let tables: std::collections::BTreeSet<u64> = grains.keys().map(|number| number / 512).collect();
            let (found, kinds) = read(&write(sectors, &grains));
            prop_assert_eq!(found, grains);
            prop_assert_eq!(kinds.iter().filter(|kind| **kind == MarkerKind::GrainTable).count(), tables.len());
        }
    }
}
