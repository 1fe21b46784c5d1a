//! COWD: the sparse extent in which ESX kept redo logs, `vmfsSparse` in descriptors. Integers are
//! 32 bits long, so an extent has less than 2 TiB.
//!
//! ```text
//!      0 magic "COWD"     4 version 1        8 flags (3)       12 capacity
//!     16 grain size      20 grain directory 24 its entries     28 the next free sector
//!     32 cylinders, heads, sectors of a disk without a parent; the former name of a parent
//!   1060 generation    1648 not closed cleanly
//!   2048 end of the header. Then the directory, tables of 4096 entries, and grains
//! ```
//!
//! There is one directory, and no entry says that a grain is zeros. ESX puts its next grain at the
//! next free sector. Grains of ESX have one sector, so that no data are copied from the parent.

use super::{SECTOR_BYTES, VmdkError, field};

/// Length of a header in bytes.
pub const COWD_HEADER_BYTES: usize = 2048;
/// Entries of a table.
pub const COWD_TABLE_ENTRIES: u64 = 4096;
/// Offset of the number of the next free sector.
pub const COWD_FREE_AT: u64 = 28;
/// Offset of the number that says whether the extent was closed.
pub const COWD_UNCLEAN_AT: u64 = 1648;

const MAGIC: &[u8; 4] = b"COWD";
const STRUCTURE: &str = "COWD header";
/// Flags of every extent that ESX makes.
const FLAGS: u32 = 3;
const CYLINDERS_AT: usize = 32;
const GENERATION_AT: usize = 1060;
/// The largest grain, in sectors: 64 MiB.
const GRAIN_MAX_SECTORS: u32 = 1 << 17;
/// Heads, and sectors of a track.
const GEOMETRY: [u32; 2] = [255, 63];

/// The header of a COWD extent. Its numbers are in sectors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CowdHeader {
    /// Length of the disk's part.
    pub capacity_sectors: u32,
    /// Length of a grain: a power of two.
    pub grain_sectors: u32,
    /// Place of the directory.
    pub directory_sector: u32,
    /// Entries of the directory.
    pub directory_entries: u32,
    /// Where the next grain goes.
    pub free_sector: u32,
    /// Whether the extent was open for writing when its program ended.
    pub is_unclean: bool,
}

impl CowdHeader {
    /// Whether a file with these first bytes is a COWD extent.
    pub fn has_magic(bytes: &[u8]) -> bool {
        bytes.starts_with(MAGIC)
    }

    /// Parses a header of at least 2048 bytes.
    ///
    /// # Errors
    /// For a wrong magic number or version, and for sizes that no file can have.
    pub fn parse(bytes: &[u8]) -> Result<Self, VmdkError> {
        let fail = |offset_bytes, found: String, expected: String| {
            Err(VmdkError { structure: STRUCTURE, offset_bytes, found, expected })
        };
        let Some(bytes) = bytes.get(..COWD_HEADER_BYTES) else {
            return fail(0, format!("{} bytes", bytes.len()), "2048 bytes".into());
        };
        let number = |at: usize| u32::from_le_bytes(field(bytes, at));
        if !Self::has_magic(bytes) {
            return fail(0, format!("{:02x?}", &bytes[..4]), "\"COWD\"".into());
        }
        if number(4) != 1 {
            return fail(4, format!("version {}", number(4)), "version 1".into());
        }
        let header = Self {
            capacity_sectors: number(12),
            grain_sectors: number(16),
            directory_sector: number(20),
            directory_entries: number(24),
            free_sector: number(COWD_FREE_AT as usize),
            is_unclean: number(COWD_UNCLEAN_AT as usize) != 0,
        };
        if !header.grain_sectors.is_power_of_two() || header.grain_sectors > GRAIN_MAX_SECTORS {
            let found = format!("grains of {} sectors", header.grain_sectors);
            return fail(16, found, "a power of two up to 131,072".into());
        }
        if u64::from(header.directory_entries) < header.tables() {
            let found = format!("a directory of {} entries", header.directory_entries);
            return fail(24, found, format!("at least {} for its capacity", header.tables()));
        }
        Ok(header)
    }

    /// The header as bytes. `is_child`: the disk has a parent, so the extent records no geometry.
    pub fn to_bytes(&self, is_child: bool) -> [u8; COWD_HEADER_BYTES] {
        let mut bytes = [0; COWD_HEADER_BYTES];
        let mut put = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let fields = [
            self.capacity_sectors,
            self.grain_sectors,
            self.directory_sector,
            self.directory_entries,
            self.free_sector,
        ];
        put(4, 1);
        put(8, FLAGS);
        (12..).step_by(4).zip(fields).for_each(|(at, value)| put(at, value));
        if !is_child {
            let [heads, track] = GEOMETRY;
            let cylinders = (self.capacity_sectors / (heads * track)).max(1);
            (CYLINDERS_AT..).step_by(4).zip([cylinders, heads, track]).for_each(|(at, value)| put(at, value));
        }
        put(GENERATION_AT, 1);
        put(COWD_UNCLEAN_AT as usize, u32::from(self.is_unclean));
        bytes[..4].copy_from_slice(MAGIC);
        bytes
    }

    /// Changes capacity and directory in the first sector of a header. All other bytes stay.
    pub fn enlarge(sector: &mut [u8], capacity_sectors: u32, directory_sector: u32, directory_entries: u32) {
        for (at, value) in [(12, capacity_sectors), (20, directory_sector), (24, directory_entries)] {
            if let Some(place) = sector.get_mut(at..at + 4) {
                place.copy_from_slice(&value.to_le_bytes());
            }
        }
    }

    /// Number of grains, the last of which may be cut.
    pub fn grains(&self) -> u64 {
        u64::from(self.capacity_sectors).div_ceil(u64::from(self.grain_sectors))
    }

    /// Number of tables that the capacity needs.
    pub fn tables(&self) -> u64 {
        self.grains().div_ceil(COWD_TABLE_ENTRIES)
    }

    /// Sectors of a table.
    pub fn table_sectors() -> u64 {
        COWD_TABLE_ENTRIES * 4 / SECTOR_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> CowdHeader {
        CowdHeader {
            capacity_sectors: 9000,
            grain_sectors: 1,
            directory_sector: 4,
            directory_entries: 3,
            free_sector: 101,
            is_unclean: true,
        }
    }

    #[test]
    fn a_header_is_read_again() {
        for is_child in [false, true] {
            let mut bytes = header().to_bytes(is_child);
            assert_eq!(CowdHeader::parse(&bytes).unwrap(), header());
            assert_eq!(bytes[32..44].iter().any(|&byte| byte != 0), !is_child);
            bytes[100] = 7;
            CowdHeader::enlarge(&mut bytes[..512], 12_289, 200, 4);
            let expected =
                CowdHeader { capacity_sectors: 12_289, directory_sector: 200, directory_entries: 4, ..header() };
            assert_eq!((CowdHeader::parse(&bytes).unwrap(), bytes[100]), (expected, 7));
        }
        assert_eq!((header().grains(), header().tables(), CowdHeader::table_sectors()), (9000, 3, 32));
    }

    #[test]
    fn what_no_program_writes_is_refused() {
        let refused = |at: usize, value: u32, what: &str| {
            let mut bytes = header().to_bytes(true);
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let error = CowdHeader::parse(&bytes).unwrap_err();
            assert!(error.offset_bytes == at as u64 && error.to_string().contains(what), "{error}");
        };
        refused(0, 7, "\"COWD\"");
        refused(4, 2, "version 1");
        refused(16, 0, "a power of two");
        refused(16, 3, "a power of two");
        refused(16, 1 << 18, "a power of two");
        refused(24, 2, "at least 3");
        assert!(CowdHeader::parse(&header().to_bytes(true)[..2047]).is_err());
    }
}
