//! SESPARSE: the space-efficient sparse extent in which ESXi keeps redo logs, with grains of 4 KiB.
//! VMware has not published it; this is what QEMU's documentation of its reader tells. Integers are
//! 64 bits long.
//!
//! ```text
//!   header, one sector        magic, version, capacity, grain, table, flags, places of the rest
//!   volatile header           magic; whether a journal is to be replayed
//!   directory                 entry: 0, or tag 0x10000000 and the number of the table
//!   tables of 4096 entries    entry: 0 none │ tag 1, 2: zeros │ tag 3: number of the grain
//!   grains                    counted from their first
//!
//!   grain entry   │ 3 │ low 12 bits of the number │ the other 48 bits │
//!                 63  60                          48                  0
//! ```

use super::{SECTOR_BYTES, VmdkError, field};

/// Length of a grain, in sectors.
pub const SESPARSE_GRAIN_SECTORS: u64 = 8;
/// Entries of a table.
pub const SESPARSE_TABLE_ENTRIES: u64 = 4096;
/// Length of both headers, in bytes.
pub const SESPARSE_HEADER_BYTES: usize = 512;

const MAGIC: u64 = 0xcafe_babe;
const VOLATILE_MAGIC: u64 = 0xcafe_cafe;
const VERSION: u64 = 0x2_0000_0001;
const TABLE_SECTORS: u64 = 64;
const TABLE_TAG: u64 = 0x1000_0000;
/// Tag of a grain with data.
const DATA: u64 = 3;

/// The header of an SESPARSE extent. Places are in sectors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeSparseHeader {
    /// Length of the disk's part.
    pub capacity_sectors: u64,
    /// Flags; none is known.
    pub flags: u64,
    /// Place of the volatile header.
    pub volatile_sector: u64,
    /// Place and length of the directory.
    pub directory: (u64, u64),
    /// Place of table 0.
    pub tables_sector: u64,
    /// Place of grain 0.
    pub grains_sector: u64,
}

/// What an entry of a table says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeSparseGrain {
    /// No data in this extent.
    Absent,
    /// Zeros.
    Zero,
    /// The data are in the grain with this number.
    Number(u64),
}

impl SeSparseHeader {
    /// Parses the first sector of an extent.
    ///
    /// # Errors
    /// A field that contradicts the format.
    pub fn parse(bytes: &[u8]) -> Result<Self, VmdkError> {
        let number = |index: usize| u64::from_le_bytes(field(bytes, index * 8));
        let fail = |index: usize, found: String, expected: &str| {
            let offset_bytes = index as u64 * 8;
            Err(VmdkError { structure: "SESPARSE header", offset_bytes, found, expected: expected.into() })
        };
        if bytes.len() < SESPARSE_HEADER_BYTES || number(0) != MAGIC {
            return fail(0, format!("{} bytes that begin with {:#x}", bytes.len(), number(0)), "512, with 0xcafebabe");
        }
        if number(1) != VERSION {
            return fail(1, format!("version {:#x}", number(1)), "version 0x200000001");
        }
        if (number(3), number(4)) != (SESPARSE_GRAIN_SECTORS, TABLE_SECTORS) {
            let found = format!("grains of {} sectors and tables of {}", number(3), number(4));
            return fail(3, found, "grains of 8 sectors and tables of 64");
        }
        let header = Self {
            capacity_sectors: number(2),
            flags: number(5),
            volatile_sector: number(10),
            directory: (number(16), number(17)),
            tables_sector: number(18),
            grains_sector: number(24),
        };
        if header.capacity_sectors > u64::MAX / SECTOR_BYTES / 2 {
            return fail(2, format!("a capacity of {} sectors", header.capacity_sectors), "less than 2^54");
        }
        let (count, sectors) = (header.tables(), header.directory.1);
        if sectors.saturating_mul(SECTOR_BYTES / 8) < count {
            return fail(17, format!("a directory of {sectors} sectors"), &format!("room for {count} entries"));
        }
        Ok(header)
    }

    /// Number of tables that the capacity needs.
    pub fn tables(&self) -> u64 {
        self.capacity_sectors.div_ceil(SESPARSE_GRAIN_SECTORS).div_ceil(SESPARSE_TABLE_ENTRIES)
    }

    /// The header as the first sector of an extent.
    pub fn to_bytes(&self) -> [u8; SESPARSE_HEADER_BYTES] {
        let mut bytes = [0; SESPARSE_HEADER_BYTES];
        for (index, value) in [
            (0, MAGIC),
            (1, VERSION),
            (2, self.capacity_sectors),
            (3, SESPARSE_GRAIN_SECTORS),
            (4, TABLE_SECTORS),
            (5, self.flags),
            (10, self.volatile_sector),
            (11, 1),
            (16, self.directory.0),
            (17, self.directory.1),
            (18, self.tables_sector),
            (19, self.tables() * TABLE_SECTORS),
            (24, self.grains_sector),
            (25, self.capacity_sectors),
        ] {
            bytes[index * 8..][..8].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }
}

/// Whether the journal of an extent with this volatile header is to be replayed; `None` if it is no
/// volatile header.
pub fn sesparse_replays_journal(volatile: &[u8]) -> Option<bool> {
    let is_one = u64::from_le_bytes(field(volatile, 0)) == VOLATILE_MAGIC;
    is_one.then(|| u64::from_le_bytes(field(volatile, 24)) != 0)
}

/// The volatile header of an extent that was closed.
pub fn sesparse_volatile_header() -> [u8; SESPARSE_HEADER_BYTES] {
    let mut bytes = [0; SESPARSE_HEADER_BYTES];
    bytes[..8].copy_from_slice(&VOLATILE_MAGIC.to_le_bytes());
    bytes
}

/// The entry of a directory for this table.
pub fn sesparse_directory_entry(table: u32) -> u64 {
    TABLE_TAG << 32 | u64::from(table)
}

/// The table to which an entry of a directory leads; the inner `None` for no table, the outer one
/// for an invalid entry.
pub fn sesparse_table_of(entry: u64) -> Option<Option<u32>> {
    match (entry >> 32, entry as u32) {
        (0, 0) => Some(None),
        (TABLE_TAG, table) => Some(Some(table)),
        _ => None,
    }
}

impl SeSparseGrain {
    /// Decodes an entry of a table; `None` for an invalid one.
    pub fn decode(entry: u64) -> Option<Self> {
        match (entry >> 60, entry & !(0xf << 60)) {
            (0, 0) => Some(Self::Absent),
            (1 | 2, _) => Some(Self::Zero),
            (DATA, number) => Some(Self::Number(number >> 48 | (number & 0xffff_ffff_ffff) << 12)),
            _ => None,
        }
    }

    /// The entry of a table. A number has less than 60 bits.
    pub fn encode(self) -> u64 {
        match self {
            Self::Absent => 0,
            Self::Zero => 2 << 60,
            Self::Number(number) => DATA << 60 | (number & 0xfff) << 48 | (number >> 12) & 0xffff_ffff_ffff,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_header_is_read_as_it_was_written_and_wrong_ones_are_refused() {
        let header = SeSparseHeader {
            capacity_sectors: 1 << 21,
            flags: 0,
            volatile_sector: 1,
            directory: (2, 1),
            tables_sector: 8,
            grains_sector: 4096 + 8,
        };
        assert_eq!(header.tables(), 64);
        let bytes = header.to_bytes();
        assert_eq!(SeSparseHeader::parse(&bytes), Ok(header.clone()));
        for (index, value, told) in [
            (0, 1, "0xcafebabe"),
            (1, 1, "version 0x1"),
            (2, 1 << 60, "less than 2^54"),
            (2, 1 << 40, "room for"),
            (3, 16, "grains of 16 sectors"),
            (4, 1, "tables of 1"),
        ] {
            let mut wrong = bytes;
            wrong[index * 8..][..8].copy_from_slice(&u64::to_le_bytes(value));
            let error = SeSparseHeader::parse(&wrong).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        assert!(SeSparseHeader::parse(&bytes[..100]).is_err());
        let mut volatile = sesparse_volatile_header();
        assert_eq!(sesparse_replays_journal(&volatile), Some(false));
        volatile[24] = 1;
        assert_eq!(sesparse_replays_journal(&volatile), Some(true));
        assert_eq!(sesparse_replays_journal(&bytes), None);
    }

    proptest! {
        #[test]
        fn entries_are_read_as_they_were_written(number in 0..1_u64 << 60, table: u32, any: u64) {
            let grain = SeSparseGrain::Number(number);
            prop_assert_eq!(SeSparseGrain::decode(grain.encode()), Some(grain));
            prop_assert_eq!(sesparse_table_of(sesparse_directory_entry(table)), Some(Some(table)));
            if let Some(grain @ SeSparseGrain::Number(_)) = SeSparseGrain::decode(any) {
                prop_assert_eq!(grain.encode(), any);
            }
        }
    }
}
