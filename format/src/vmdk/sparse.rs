//! The header of a sparse extent: capacity, grain size, and where directory and tables are.
//!
//! ```text
//!    0 magic "KDMV"        4 version 1, 2 or 3   8 flags            12 capacity
//!   20 grain size         28 descriptor offset  36 descriptor size  44 entries of a grain table
//!   48 redundant directory 56 grain directory   64 overhead: sectors before the first grain
//!   72 unclean shutdown   73 "\n \r\n"          77 compression      79 zeros
//! ```
//!
//! Version 2 adds the entry of a grain of zeros, version 3 adds images with change tracking and
//! those that are read only as a stream. Only the numbers of the header are checked here; whoever
//! reads the tables compares their places with the length of the file.

use super::{SECTOR_BYTES, VmdkError, field};

/// Length of a header in bytes.
pub const SPARSE_HEADER_BYTES: usize = 512;
/// Offset of the header's byte "unclean shutdown".
pub const SPARSE_UNCLEAN_AT: u64 = 72;
/// The usual number of entries of a grain table, and the only one that other programs accept.
pub const GTES_PER_TABLE: u32 = 512;
/// The bytes 73 to 76. A transfer in text mode changes them.
pub const TEXT_CHECK: [u8; 4] = *b"\n \r\n";
/// Entry of a grain without data in this extent.
pub const GRAIN_ABSENT: u32 = 0;
/// Entry of a grain that reads as zeros, if the header has [`SparseFlags::ZEROED_GRAINS`].
pub const GRAIN_ZERO: u32 = 1;

const MAGIC: [u8; 4] = *b"KDMV";
const STRUCTURE: &str = "sparse extent header";
/// A directory offset that says: the truth is in the footer.
const AT_END: u64 = u64::MAX;
/// The largest grain, in sectors: 64 MiB. Others write at most 64 KiB.
const GRAIN_MAX_SECTORS: u64 = 1 << 17;
/// The largest grain table, in entries.
const GTES_MAX: u32 = 1 << 16;

/// The flags of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseFlags(pub u32);

impl SparseFlags {
    /// The bytes 73 to 76 are [`TEXT_CHECK`].
    pub const TEXT_CHECK: u32 = 1;
    /// The redundant directory and its tables exist.
    pub const REDUNDANT: u32 = 1 << 1;
    /// An entry of [`GRAIN_ZERO`] is a grain of zeros.
    pub const ZEROED_GRAINS: u32 = 1 << 2;
    /// Grains are compressed.
    pub const COMPRESSED: u32 = 1 << 16;
    /// Markers stand before grains, tables and the directory.
    pub const MARKERS: u32 = 1 << 17;

    const KNOWN: u32 = Self::TEXT_CHECK | Self::REDUNDANT | Self::ZEROED_GRAINS | Self::COMPRESSED | Self::MARKERS;

    /// Whether all bits of `mask` are set.
    pub fn has(self, mask: u32) -> bool {
        self.0 & mask == mask
    }
}

/// Where the grain directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placing {
    /// At this sector of the file.
    Sector(u64),
    /// The footer at the end of the file says where.
    InFooter,
}

/// A header. Its numbers are in sectors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SparseHeader {
    /// 1, 2 or 3.
    pub version: u32,
    /// The flags.
    pub flags: SparseFlags,
    /// Length of the disk's part that this extent has: a multiple of the grain in files of VMware,
    /// not in those of all others.
    pub capacity_sectors: u64,
    /// Length of a grain: a power of two, more than 8.
    pub grain_sectors: u64,
    /// Place of the embedded descriptor; 0: none.
    pub descriptor_sector: u64,
    /// Space of the embedded descriptor; 0: none.
    pub descriptor_sectors: u64,
    /// Entries of a grain table: a power of two.
    pub table_entries: u32,
    /// Place of the redundant grain directory, if the flag says that it exists.
    pub redundant_directory: Option<u64>,
    /// Place of the grain directory.
    pub directory: Placing,
    /// Sectors before the first grain.
    pub overhead_sectors: u64,
    /// Whether the extent was open for writing when its program ended.
    pub is_unclean: bool,
    /// 0: none; 1: RFC 1950 (zlib).
    pub compression: u16,
}

impl SparseHeader {
    /// Whether a file with these first bytes is a sparse extent.
    pub fn has_magic(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// Parses a header of at least 512 bytes that was found at `offset_bytes`.
    ///
    /// # Errors
    /// For a wrong magic number or text check, an unknown version, flag or compression, and for
    /// sizes that no file can have.
    pub fn parse(bytes: &[u8], offset_bytes: u64) -> Result<Self, VmdkError> {
        let fail = |at: u64, found: String, expected: &str| {
            let offset_bytes = offset_bytes.saturating_add(at);
            Err(VmdkError { structure: STRUCTURE, offset_bytes, found, expected: expected.into() })
        };
        let Some(bytes) = bytes.get(..SPARSE_HEADER_BYTES) else {
            return fail(0, format!("{} bytes", bytes.len()), "512 bytes");
        };
        let u32_at = |at| u32::from_le_bytes(field(bytes, at));
        let u64_at = |at| u64::from_le_bytes(field(bytes, at));
        if !Self::has_magic(bytes) {
            return fail(0, format!("{:02x?}", &bytes[..4]), "\"KDMV\"");
        }
        let (version, flags) = (u32_at(4), SparseFlags(u32_at(8)));
        if !(1..=3).contains(&version) {
            return fail(4, format!("version {version}"), "version 1, 2 or 3");
        }
        let text = field::<4>(bytes, 73);
        if flags.has(SparseFlags::TEXT_CHECK) && text != TEXT_CHECK {
            return fail(73, format!("{text:02x?}"), "0a 20 0d 0a: the file was changed by a transfer as text");
        }
        // The lower half holds what a reader may ignore, the upper half what it must know.
        let unknown = flags.0 & !SparseFlags::KNOWN & 0xffff_0000;
        if unknown != 0 {
            return fail(8, format!("flags {unknown:#x}"), "flags that this program knows");
        }
        let capacity_sectors = u64_at(12);
        if capacity_sectors > u64::MAX / SECTOR_BYTES / 2 {
            return fail(12, format!("a capacity of {capacity_sectors} sectors"), "less than 2^54");
        }
        let grain_sectors = u64_at(20);
        if !grain_sectors.is_power_of_two() || !(8..=GRAIN_MAX_SECTORS).contains(&grain_sectors) {
            return fail(20, format!("grains of {grain_sectors} sectors"), "a power of two from 8 to 131,072");
        }
        let table_entries = u32_at(44);
        if !table_entries.is_power_of_two() || table_entries > GTES_MAX {
            return fail(44, format!("grain tables of {table_entries} entries"), "a power of two up to 65,536");
        }
        let compression = u16::from_le_bytes(field(bytes, 77));
        if compression > 1 {
            return fail(77, format!("compression {compression}"), "0 (none) or 1 (zlib)");
        }
        if flags.has(SparseFlags::COMPRESSED) && compression == 0 {
            return fail(77, "compressed grains without a method".into(), "compression 1 (zlib)");
        }
        let directory = u64_at(56);
        Ok(Self {
            version,
            flags,
            capacity_sectors,
            grain_sectors,
            descriptor_sector: u64_at(28),
            descriptor_sectors: u64_at(36),
            table_entries,
            redundant_directory: flags.has(SparseFlags::REDUNDANT).then(|| u64_at(48)),
            directory: if directory == AT_END { Placing::InFooter } else { Placing::Sector(directory) },
            overhead_sectors: u64_at(64),
            is_unclean: bytes[72] != 0,
            compression,
        })
    }

    /// The header as bytes.
    pub fn to_bytes(&self) -> [u8; SPARSE_HEADER_BYTES] {
        let mut bytes = [0; SPARSE_HEADER_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let directory = match self.directory {
            Placing::Sector(sector) => sector,
            Placing::InFooter => AT_END,
        };
        put(0, &MAGIC);
        put(4, &self.version.to_le_bytes());
        put(8, &self.flags.0.to_le_bytes());
        put(12, &self.capacity_sectors.to_le_bytes());
        put(20, &self.grain_sectors.to_le_bytes());
        put(28, &self.descriptor_sector.to_le_bytes());
        put(36, &self.descriptor_sectors.to_le_bytes());
        put(44, &self.table_entries.to_le_bytes());
        put(48, &self.redundant_directory.unwrap_or(0).to_le_bytes());
        put(56, &directory.to_le_bytes());
        put(64, &self.overhead_sectors.to_le_bytes());
        put(72, &[u8::from(self.is_unclean)]);
        put(73, &TEXT_CHECK);
        put(77, &self.compression.to_le_bytes());
        bytes
    }

    /// Changes a header's capacity and the places of its directories, the redundant one last, in
    /// sectors. All other bytes stay.
    pub fn enlarge(header: &mut [u8; SPARSE_HEADER_BYTES], capacity_sectors: u64, directories: &[u64]) {
        let mut put = |at: usize, value: u64| header[at..at + 8].copy_from_slice(&value.to_le_bytes());
        put(12, capacity_sectors);
        directories.iter().zip([56, 48]).for_each(|(&sector, at)| put(at, sector));
    }

    /// Length of a grain in bytes.
    pub fn grain_bytes(&self) -> u64 {
        self.grain_sectors * SECTOR_BYTES
    }

    /// Number of grains, the last of which may be cut.
    pub fn grains(&self) -> u64 {
        self.capacity_sectors.div_ceil(self.grain_sectors)
    }

    /// Number of grain tables, which is the number of entries of the directory.
    pub fn tables(&self) -> u64 {
        self.grains().div_ceil(u64::from(self.table_entries))
    }

    /// Sectors of a grain table.
    pub fn table_sectors(&self) -> u64 {
        (u64::from(self.table_entries) * 4).div_ceil(SECTOR_BYTES)
    }

    /// Sectors of the directory.
    pub fn directory_sectors(&self) -> u64 {
        (self.tables() * 4).div_ceil(SECTOR_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> SparseHeader {
        SparseHeader {
            version: 1,
            flags: SparseFlags(SparseFlags::TEXT_CHECK | SparseFlags::REDUNDANT),
            capacity_sectors: 20480,
            grain_sectors: 128,
            descriptor_sector: 1,
            descriptor_sectors: 20,
            table_entries: 512,
            redundant_directory: Some(21),
            directory: Placing::Sector(26),
            overhead_sectors: 128,
            is_unclean: false,
            compression: 0,
        }
    }

    #[test]
    fn the_header_of_a_small_image_of_qemu_img() {
        // Made by `qemu-img create -f vmdk q.vmdk 10M` (7.2).
        let mut bytes = [0; SPARSE_HEADER_BYTES];
        bytes[..80].copy_from_slice(&[
            0x4b, 0x44, 0x4d, 0x56, 1, 0, 0, 0, 3, 0, 0, 0, 0, 0x50, 0, 0, //
            0, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, //
            0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, //
            0x15, 0, 0, 0, 0, 0, 0, 0, 0x1a, 0, 0, 0, 0, 0, 0, 0, //
            0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0x0a, 0x20, 0x0d, 0x0a, 0, 0, 0,
        ]);
        let parsed = SparseHeader::parse(&bytes, 0).unwrap();
        assert_eq!(parsed, header());
        assert_eq!(parsed.to_bytes(), bytes);
        assert_eq!((parsed.grain_bytes(), parsed.grains(), parsed.tables()), (65536, 160, 1));
        assert_eq!((parsed.table_sectors(), parsed.directory_sectors()), (4, 1));
    }

    #[test]
    fn a_header_is_enlarged() {
        let mut bytes = header().to_bytes();
        bytes[100] = 7;
        SparseHeader::enlarge(&mut bytes, 40960, &[300, 200]);
        let expected = SparseHeader {
            capacity_sectors: 40960,
            directory: Placing::Sector(300),
            redundant_directory: Some(200),
            ..header()
        };
        assert_eq!((SparseHeader::parse(&bytes, 0).unwrap(), bytes[100]), (expected, 7));
    }

    #[test]
    fn what_no_program_writes_is_refused() {
        let refused = |at: usize, value: &[u8], what: &str| {
            let mut bytes = header().to_bytes();
            bytes[at..at + value.len()].copy_from_slice(value);
            let error = SparseHeader::parse(&bytes, 1024).unwrap_err();
            assert_eq!(error.offset_bytes, 1024 + at as u64, "{error}");
            assert!(error.to_string().contains(what), "{error}");
        };
        refused(0, b"VMDK", "expected \"KDMV\"");
        refused(4, &[4], "version 4");
        refused(8, &[3, 0, 4, 0], "flags 0x40000");
        refused(12, &[0xff; 8], "capacity");
        refused(20, &[0x80, 0x0d], "grains of 3456 sectors");
        refused(20, &[4], "grains of 4 sectors");
        refused(44, &[0, 0, 2], "grain tables of 131072");
        refused(44, &[0, 0], "grain tables of 0");
        refused(73, b"\n \n\n", "transfer as text");
        refused(77, &[2], "compression 2");
        assert!(SparseHeader::parse(&header().to_bytes()[..511], 0).is_err());
    }

    #[test]
    fn compressed_grains_need_a_method() {
        let mut bytes = SparseHeader { flags: SparseFlags(SparseFlags::COMPRESSED), ..header() }.to_bytes();
        assert!(SparseHeader::parse(&bytes, 0).unwrap_err().to_string().contains("without a method"));
        bytes[77] = 1;
        assert_eq!(SparseHeader::parse(&bytes, 0).unwrap().redundant_directory, None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = SparseHeader::parse(&bytes, u64::MAX);
            let len = bytes.len().min(4);
            bytes[..len].copy_from_slice(&MAGIC[..len]);
            if let Ok(parsed) = SparseHeader::parse(&bytes, u64::MAX) {
                let _ = (parsed.tables(), parsed.directory_sectors(), parsed.grain_bytes());
            }
        }

        #[test]
        fn a_header_is_read_as_it_was_written(
            capacity_sectors in 0..u64::MAX / 1024, grain in 3..18_u32, entries in 0..17_u32,
            directory in proptest::option::of(0..u64::MAX), is_unclean: bool,
        ) {
            let written = SparseHeader {
                capacity_sectors,
                grain_sectors: 1 << grain,
                table_entries: 1 << entries,
                directory: directory.map_or(Placing::InFooter, Placing::Sector),
                is_unclean,
                ..header()
            };
            prop_assert_eq!(SparseHeader::parse(&written.to_bytes(), 0).unwrap(), written);
        }
    }
}
