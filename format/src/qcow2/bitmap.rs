//! Entries of the bitmap directory, and of bitmap tables.
//!
//! ```text
//!   0 bitmap table   8 its entries   12 flags   16 type   17 granularity   18 length of name
//!  20 length of extra data           24 extra data, name, padding to a multiple of 8
//! ```

use super::{
    Invalid, Place, Result,
    bytes::{get_u16, get_u32, get_u64, text},
};

/// Length in bytes of the fixed part of a directory entry.
pub const HEAD_BYTES: usize = 24;
/// Type of a bitmap of written ranges.
const DIRTY_TRACKING: u8 = 1;
const FLAG_IN_USE: u32 = 1;
const FLAG_AUTO: u32 = 1 << 1;

const STRUCTURE: &str = "bitmap directory entry";

/// The fixed part of a directory entry, which says how long the entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BitmapHead {
    extra_bytes: u64,
    name_bytes: u64,
}

/// A bitmap of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BitmapEntry {
    /// The bitmap table. Neither alignment nor limits were checked.
    pub table: Place,
    /// The name.
    pub name: String,
    /// Bytes of the disk for each bit, as a power of two.
    pub granularity_bits: u8,
    /// Whether the bitmap was not saved when the image was closed.
    pub is_in_use: bool,
    /// Whether writes are recorded in it.
    pub is_auto: bool,
}

impl BitmapHead {
    /// Parses the first [`HEAD_BYTES`] of an entry.
    ///
    /// # Errors
    /// For a slice that is too short, an unknown type and an empty name.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() < HEAD_BYTES {
            return Err(Invalid::short(STRUCTURE, bytes.len(), HEAD_BYTES));
        }
        if bytes[16] != DIRTY_TRACKING {
            return Err(Invalid::new(STRUCTURE, 16, format!("type {}", bytes[16]), "1 (dirty tracking)"));
        }
        if bytes[17] > 63 {
            return Err(Invalid::new(STRUCTURE, 17, format!("{} granularity bits", bytes[17]), "at most 63"));
        }
        let name_bytes = u64::from(get_u16(bytes, 18));
        if name_bytes == 0 {
            return Err(Invalid::new(STRUCTURE, 18, "an empty name", "a name"));
        }
        Ok(Self { extra_bytes: get_u32(bytes, 20).into(), name_bytes })
    }

    /// Length of the entry in bytes, with padding.
    pub fn padded_bytes(&self) -> u64 {
        (HEAD_BYTES as u64 + self.extra_bytes + self.name_bytes).next_multiple_of(8)
    }
}

impl BitmapEntry {
    /// Parses an entry.
    ///
    /// # Errors
    /// As [`BitmapHead::parse`].
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let head = BitmapHead::parse(bytes)?;
        let name_at = HEAD_BYTES as u64 + head.extra_bytes;
        let end = name_at + head.name_bytes;
        let Some(name) = bytes.get(name_at as usize..end as usize) else {
            return Err(Invalid::short(STRUCTURE, bytes.len(), end as usize));
        };
        let flags = get_u32(bytes, 12);
        Ok(Self {
            table: Place { offset_bytes: get_u64(bytes, 0), len_bytes: u64::from(get_u32(bytes, 8)) * 8 },
            name: text(name),
            granularity_bits: bytes[17],
            is_in_use: flags & FLAG_IN_USE != 0,
            is_auto: flags & FLAG_AUTO != 0,
        })
    }
}

/// An entry of a bitmap table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BitmapTableEntry(pub u64);

impl BitmapTableEntry {
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

    /// Offset of the cluster with the bits; `None` if all bits are equal.
    pub fn offset_bytes(self) -> Option<u64> {
        Some(self.0 & Self::OFFSET).filter(|&offset| offset != 0)
    }

    /// Bits that must be zero.
    pub fn reserved(self) -> u64 {
        self.0 & !Self::OFFSET & if self.offset_bytes().is_some() { u64::MAX } else { !1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(extra: &[u8], name: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEAD_BYTES];
        bytes[5] = 4;
        bytes[11] = 1;
        bytes[15] = 3;
        bytes[16] = DIRTY_TRACKING;
        bytes[17] = 16;
        bytes[18..20].copy_from_slice(&(name.len() as u16).to_be_bytes());
        bytes[20..24].copy_from_slice(&(extra.len() as u32).to_be_bytes());
        [&bytes, extra, name].concat()
    }

    #[test]
    fn an_entry_is_read() {
        let bytes = entry(&[1; 5], b"daily");
        let found = BitmapEntry::parse(&bytes).unwrap();
        assert_eq!((found.name.as_str(), found.granularity_bits), ("daily", 16));
        assert_eq!((found.is_in_use, found.is_auto), (true, true));
        assert_eq!(found.table, Place { offset_bytes: 4 << 16, len_bytes: 8 });
        assert_eq!(BitmapHead::parse(&bytes).unwrap().padded_bytes(), 40);
        for len in 0..bytes.len() {
            assert!(BitmapEntry::parse(&bytes[..len]).is_err(), "{len}");
        }
        assert!(BitmapHead::parse(&entry(&[], b"")).is_err());
    }

    #[test]
    fn a_table_entry_without_space_may_be_all_ones() {
        assert_eq!((BitmapTableEntry(1).offset_bytes(), BitmapTableEntry(1).reserved()), (None, 0));
        assert_eq!(BitmapTableEntry(1 << 16 | 1).reserved(), 1);
        assert_eq!(BitmapTableEntry(2).reserved(), 2);
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = BitmapEntry::parse(&bytes);
            if let Some(kind) = bytes.get_mut(16) {
                *kind = DIRTY_TRACKING;
            }
            let _ = BitmapEntry::parse(&bytes);
        }
    }
}
