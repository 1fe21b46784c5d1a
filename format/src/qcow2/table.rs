//! Entries of L1 and L2 tables, and the numbers by which they are found.
//!
//! ```text
//!   L1 entry   63 COPIED │ 62-56 zero │ 55-9 offset of the L2 table  │ 8-0 zero
//!   L2 entry   63 COPIED │ 62 0 │ 61-56 zero │ 55-9 offset of the cluster │ 8-1 zero │ 0 zeros
//!              63 0      │ 62 1 │ 61-x sectors - 1   │ x-1 - 0 offset of the compressed data
//!              x = 62 - (cluster bits - 8)
//!   extended: 64 bits more   63-32 subcluster reads as zeros │ 31-0 subcluster has data
//! ```
//!
//! A bit that must be zero and is set means that the entry was damaged: a later version of the
//! format that gives the bit a meaning also sets an incompatible feature bit.

use super::{Invalid, Result, SECTOR_BYTES, SUBCLUSTERS};

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// Numbers by which tables are addressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Cluster size as a power of two, 9 to 21.
    pub cluster_bits: u32,
    /// 2 or 3.
    pub version: u32,
    /// Whether L2 entries have 128 bits.
    pub is_extended: bool,
    /// Whether data clusters lie in another file, at the same offset as on the disk.
    pub has_data_file: bool,
}

impl Geometry {
    /// Size of a cluster in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Length of an L2 entry in bytes.
    pub fn l2_entry_bytes(&self) -> u64 {
        if self.is_extended { 16 } else { 8 }
    }

    /// Entries of an L2 table.
    pub fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / self.l2_entry_bytes()
    }

    /// L1 entries that a disk of `size_bytes` needs.
    pub fn l1_entries(&self, size_bytes: u64) -> u64 {
        size_bytes.div_ceil(self.cluster_bytes()).div_ceil(self.l2_entries())
    }

    /// Clusters in each unit whose data can be mapped separately: 1, or 32 subclusters.
    pub fn subclusters(&self) -> u64 {
        if self.is_extended { u64::from(SUBCLUSTERS) } else { 1 }
    }

    /// Size in bytes of the smallest range that is mapped by itself: a cluster or a subcluster.
    pub fn unit_bytes(&self) -> u64 {
        self.cluster_bytes() / self.subclusters()
    }
}

/// An entry of an L1 table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct L1Entry(pub u64);

impl L1Entry {
    /// An entry with the COPIED flag.
    pub fn copied(offset_bytes: u64) -> Self {
        Self(offset_bytes & OFFSET | COPIED)
    }

    /// Whether the refcount of the L2 table is said to be 1. Only true of the active L1 table.
    pub fn is_copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// Offset of the L2 table in the file; `None` if there is none.
    ///
    /// # Errors
    /// For bits that must be zero and are set, and for an offset that is not aligned to a cluster.
    pub fn l2_offset(self, geometry: &Geometry) -> Result<Option<u64>> {
        let offset_bytes = self.0 & OFFSET;
        let fail = |expected: String| Err(Invalid::new("L1 entry", 0, format!("{:#018x}", self.0), expected));
        if self.0 & L1_RESERVED != 0 {
            return fail("bits 0 to 8 and 56 to 62 clear".into());
        }
        if !offset_bytes.is_multiple_of(geometry.cluster_bytes()) {
            return fail(format!("an offset that is a multiple of the cluster size ({})", geometry.cluster_bytes()));
        }
        Ok((offset_bytes != 0).then_some(offset_bytes))
    }
}

/// Which subclusters of a cluster have data or read as zeros. Bit i stands for subcluster i.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Subclusters {
    /// Subclusters that have data in the cluster.
    pub allocated: u32,
    /// Subclusters that read as zeros.
    pub zero: u32,
}

/// A parsed entry of an L2 table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum L2Entry {
    /// The cluster has no data in this image.
    Unallocated,
    /// A standard cluster.
    Standard {
        /// Offset of the cluster in its file; `None` if the cluster has no space. A cluster of a
        /// data file may be at offset 0.
        offset_bytes: Option<u64>,
        /// What the cluster's parts read as. Without extended entries all bits of a mask are equal.
        parts: Subclusters,
        /// Whether the refcount of the cluster is said to be 1.
        is_copied: bool,
    },
    /// A compressed cluster.
    Compressed {
        /// Offset of the data in the file: any byte.
        offset_bytes: u64,
        /// Most bytes that the data have: to the end of their last sector.
        len_bytes: u64,
        /// The flag that a compressed cluster must not have. It changes nothing for a reader.
        is_copied: bool,
    },
}

impl L2Entry {
    /// Parses an entry: its first word, and the second one of an extended entry (else 0).
    ///
    /// # Errors
    /// For bits that must be zero and are set, for an offset that is not aligned to a cluster, for
    /// a COPIED flag without space, for a subcluster that both has data and reads as zeros or has
    /// data without space, and for compressed clusters in an image with a data file.
    pub fn parse(word: u64, parts: u64, geometry: &Geometry) -> Result<Self> {
        let found = || match geometry.is_extended {
            true => format!("{word:#018x} {parts:#018x}"),
            false => format!("{word:#018x}"),
        };
        let fail = |expected: String| Err(Invalid::new("L2 entry", 0, found(), expected));
        if word & COMPRESSED != 0 {
            if geometry.has_data_file {
                return fail("no compressed cluster, as the image has an external data file".into());
            }
            if parts != 0 {
                return fail("no subclusters, as the cluster is compressed".into());
            }
            let offset_bits = 62 - (geometry.cluster_bits - 8);
            let offset_bytes = word & ((1 << offset_bits) - 1);
            if offset_bytes >> 56 != 0 {
                return fail("an offset below 64 PiB".into());
            }
            let sectors = ((word & !(COMPRESSED | COPIED)) >> offset_bits) + 1;
            let len_bytes = sectors * SECTOR_BYTES - offset_bytes % SECTOR_BYTES;
            return Ok(Self::Compressed { offset_bytes, len_bytes, is_copied: word & COPIED != 0 });
        }
        let is_zero = word & ZERO != 0;
        let reserved = L2_RESERVED | if geometry.is_extended { ZERO } else { 0 };
        if word & reserved != 0 {
            return fail(format!("the bits {reserved:#x} clear"));
        }
        if is_zero && geometry.version < 3 {
            return fail("no zero flag, as the image has version 2".into());
        }
        let (offset, is_copied) = (word & OFFSET, word & COPIED != 0);
        if !offset.is_multiple_of(geometry.cluster_bytes()) {
            return fail(format!("an offset that is a multiple of the cluster size ({})", geometry.cluster_bytes()));
        }
        // Offset 0 is the header, except in a data file.
        let has_space = offset != 0 || is_copied && geometry.has_data_file;
        if is_copied && !has_space {
            return fail("no COPIED flag, as the cluster has no space".into());
        }
        let offset_bytes = has_space.then_some(offset);
        let parts = if geometry.is_extended {
            Subclusters { allocated: parts as u32, zero: (parts >> 32) as u32 }
        } else if is_zero {
            Subclusters { allocated: 0, zero: u32::MAX }
        } else {
            Subclusters { allocated: if has_space { u32::MAX } else { 0 }, zero: 0 }
        };
        if parts.allocated & parts.zero != 0 {
            return fail("no subcluster that both has data and reads as zeros".into());
        }
        if parts.allocated != 0 && !has_space {
            return fail("no subcluster with data, as the cluster has no space".into());
        }
        if parts == Subclusters::default() && !has_space {
            return Ok(Self::Unallocated);
        }
        Ok(Self::Standard { offset_bytes, parts, is_copied })
    }

    /// The entry of a cluster with data that nothing else refers to.
    pub fn data(offset_bytes: u64) -> Self {
        let parts = Subclusters { allocated: u32::MAX, zero: 0 };
        Self::Standard { offset_bytes: Some(offset_bytes), parts, is_copied: true }
    }

    /// The entry of a cluster that reads as zeros and has no space. Not in version 2.
    pub fn zeros() -> Self {
        let parts = Subclusters { allocated: 0, zero: u32::MAX };
        Self::Standard { offset_bytes: None, parts, is_copied: false }
    }

    /// The words of the entry, as [`L2Entry::parse`] takes them. The second one is 0 unless the
    /// image has extended entries.
    pub fn to_words(self, geometry: &Geometry) -> (u64, u64) {
        let flag = |is_copied: bool| if is_copied { COPIED } else { 0 };
        match self {
            Self::Unallocated => (0, 0),
            Self::Compressed { offset_bytes, len_bytes, is_copied } => {
                let sectors = (offset_bytes % SECTOR_BYTES + len_bytes).div_ceil(SECTOR_BYTES).max(1);
                let offset_bits = 62 - (geometry.cluster_bits - 8);
                (COMPRESSED | flag(is_copied) | (sectors - 1) << offset_bits | offset_bytes, 0)
            }
            Self::Standard { offset_bytes, parts, is_copied } => {
                let word = offset_bytes.unwrap_or(0) & OFFSET | flag(is_copied);
                match geometry.is_extended {
                    true => (word, u64::from(parts.zero) << 32 | u64::from(parts.allocated)),
                    false => (word | u64::from(parts.zero != 0), 0),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NORMAL: Geometry = Geometry { cluster_bits: 16, version: 3, is_extended: false, has_data_file: false };
    const V2: Geometry = Geometry { version: 2, ..NORMAL };
    const EXTENDED: Geometry = Geometry { is_extended: true, ..NORMAL };
    const EXTERNAL: Geometry = Geometry { has_data_file: true, ..NORMAL };

    #[test]
    fn numbers_of_tables() {
        assert_eq!((NORMAL.l2_entries(), NORMAL.unit_bytes(), NORMAL.l1_entries(1 << 40)), (8192, 65536, 2048));
        assert_eq!((EXTENDED.l2_entries(), EXTENDED.unit_bytes(), EXTENDED.l1_entries(1)), (4096, 2048, 1));
        let small = Geometry { cluster_bits: 9, ..NORMAL };
        assert_eq!((small.l1_entries(0), small.l1_entries(u64::MAX)), (0, 1 << 49));
    }

    #[test]
    fn an_l1_entry_names_an_aligned_table() {
        assert_eq!(L1Entry(0).l2_offset(&NORMAL), Ok(None));
        assert_eq!(L1Entry::copied(5 << 16).l2_offset(&NORMAL), Ok(Some(5 << 16)));
        assert!(L1Entry::copied(5 << 16).is_copied() && !L1Entry(5 << 16).is_copied());
        for bad in [5 << 16 | 1, 5 << 15, 1 << 62, 1 << 56] {
            assert!(L1Entry(bad).l2_offset(&NORMAL).is_err(), "{bad:#x}");
        }
    }

    fn data(offset: u64, is_copied: bool) -> L2Entry {
        L2Entry::Standard { offset_bytes: Some(offset), parts: Subclusters { allocated: u32::MAX, zero: 0 }, is_copied }
    }

    #[test]
    fn standard_entries() {
        let parse = |word| L2Entry::parse(word, 0, &NORMAL);
        assert_eq!(parse(0), Ok(L2Entry::Unallocated));
        assert_eq!(parse(7 << 16 | COPIED), Ok(data(7 << 16, true)));
        assert_eq!(parse(7 << 16), Ok(data(7 << 16, false)));
        let zeros = Subclusters { allocated: 0, zero: u32::MAX };
        let zero = |offset_bytes, is_copied| L2Entry::Standard { offset_bytes, parts: zeros, is_copied };
        assert_eq!(parse(1), Ok(zero(None, false)));
        assert_eq!(parse(7 << 16 | COPIED | 1), Ok(zero(Some(7 << 16), true)));
        for bad in [COPIED, COPIED | 1, 7 << 16 | 2, 7 << 15, 1 << 56, 1 << 61] {
            assert!(parse(bad).is_err(), "{bad:#x}");
        }
        assert!(L2Entry::parse(1, 0, &V2).is_err());
        assert!(L2Entry::parse(1, 0, &EXTENDED).is_err());
        assert_eq!(L2Entry::parse(COPIED, 0, &EXTERNAL), Ok(data(0, true)));
    }

    #[test]
    fn compressed_entries_count_sectors_from_the_one_they_begin_in() {
        // Cluster bits 16: 54 bits of offset, 8 bits of sectors.
        let entry = COMPRESSED | 3 << 54 | 0x1_2345;
        let expected = L2Entry::Compressed { offset_bytes: 0x1_2345, len_bytes: 4 * 512 - 0x145, is_copied: false };
        assert_eq!(L2Entry::parse(entry, 0, &NORMAL), Ok(expected));
        let flagged = L2Entry::parse(entry | COPIED, 0, &NORMAL);
        assert!(matches!(flagged, Ok(L2Entry::Compressed { len_bytes: 1723, is_copied: true, .. })), "{flagged:?}");
        assert!(L2Entry::parse(entry, 1, &EXTENDED).is_err());
        assert!(L2Entry::parse(entry, 0, &EXTERNAL).is_err());
        // Clusters of 512 bytes: 61 bits of offset, of which the upper ones must be clear.
        let small = Geometry { cluster_bits: 9, ..NORMAL };
        let expected = L2Entry::Compressed { offset_bytes: 512, len_bytes: 1024, is_copied: false };
        assert_eq!(L2Entry::parse(COMPRESSED | 1 << 61 | 512, 0, &small), Ok(expected));
        assert!(L2Entry::parse(COMPRESSED | 1 << 56, 0, &small).is_err());
    }

    #[test]
    fn extended_entries_have_subclusters() {
        let parse = |word, parts| L2Entry::parse(word, parts, &EXTENDED);
        let parts = Subclusters { allocated: 5, zero: 2 };
        let expected = L2Entry::Standard { offset_bytes: Some(7 << 16), parts, is_copied: true };
        assert_eq!(parse(7 << 16 | COPIED, 2 << 32 | 5), Ok(expected));
        assert_eq!(parse(0, 0), Ok(L2Entry::Unallocated));
        let preallocated =
            L2Entry::Standard { offset_bytes: Some(7 << 16), parts: Subclusters::default(), is_copied: true };
        assert_eq!(parse(7 << 16 | COPIED, 0), Ok(preallocated));
        assert!(parse(7 << 16, 1 << 32 | 1).is_err(), "both");
        assert!(parse(0, 1).is_err(), "no space");
        assert!(parse(0, 1 << 32).is_ok());
    }

    #[test]
    fn entries_that_are_written() {
        assert_eq!(L2Entry::data(7 << 16).to_words(&NORMAL), (7 << 16 | COPIED, 0));
        assert_eq!(L2Entry::zeros().to_words(&NORMAL), (ZERO, 0));
        assert_eq!(L2Entry::zeros().to_words(&EXTENDED), (0, 0xffff_ffff << 32));
        assert_eq!(L2Entry::data(7 << 16).to_words(&EXTENDED), (7 << 16 | COPIED, 0xffff_ffff));
    }

    proptest! {
        #[test]
        fn an_entry_becomes_the_same_words_again(
            offset in 0u64..1 << 47, is_copied: bool, is_zero: bool, sectors in 0u64..4, parts: u64,
            cluster_bits in 9u32..=21, is_extended: bool, is_compressed: bool, has_data_file: bool
        ) {
            let geometry = Geometry { cluster_bits, version: 3, is_extended, has_data_file };
            let word = match is_compressed {
                true => COMPRESSED | sectors << (70 - cluster_bits) & !COPIED | offset,
                false => offset << 9 & OFFSET >> cluster_bits << cluster_bits | u64::from(is_zero),
            };
            let word = word | if is_copied { COPIED } else { 0 };
            let parts = if is_extended && !is_compressed { parts & !(parts >> 32) } else { 0 };
            if let Ok(entry) = L2Entry::parse(word, parts, &geometry) {
                prop_assert_eq!(entry.to_words(&geometry), (word, parts));
            }
        }

        #[test]
        fn no_entry_causes_a_panic(word: u64, parts: u64, cluster_bits in 9u32..=21, is_extended: bool, has_data_file: bool) {
            let geometry = Geometry { cluster_bits, version: 3, is_extended, has_data_file };
            if let Ok(L2Entry::Compressed { len_bytes, .. }) = L2Entry::parse(word, parts, &geometry) {
                prop_assert!(len_bytes > 0 && len_bytes <= 2 * geometry.cluster_bytes());
            }
            let _ = L1Entry(word).l2_offset(&geometry);
        }
    }
}
