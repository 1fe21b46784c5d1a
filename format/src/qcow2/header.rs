//! The header: versions 2 (72 bytes) and 3 (at least 104 bytes).
//!
//! ```text
//!    0 magic            4 version          8 backing name: offset   16 its length
//!   20 cluster bits    24 disk size       32 encryption             36 L1 entries
//!   40 L1 table        48 refcount table  56 its clusters           60 snapshots
//!   64 snapshot table                                          version 2 ends here
//!   72 incompatible    80 compatible      88 autoclear bits         96 refcount order
//!  100 header length  104 compression type
//! ```

use super::{
    CLUSTER_BITS_MAX, CLUSTER_BITS_MIN, EXTENDED_CLUSTER_BITS_MIN, Invalid, L1_MAX_BYTES, MAGIC,
    REFCOUNT_TABLE_MAX_BYTES, RefcountWidth, Result, SNAPSHOTS_MAX,
    bytes::{get_u32, get_u64},
    features::{self, Features},
    table::Geometry,
};

/// Length of a header of version 2 in bytes.
pub const V2_BYTES: usize = 72;
/// Smallest length of a header of version 3 in bytes.
pub const V3_BYTES: usize = 104;
/// Longest name of a backing file in bytes.
pub const BACKING_NAME_MAX_BYTES: u32 = 1023;

const STRUCTURE: &str = "qcow2 header";

/// A place in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Offset in the file, in bytes.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// How compressed clusters are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate (RFC 1951), called "zlib" in options.
    Deflate,
    /// Zstandard (RFC 8878).
    Zstd,
    /// A type that the specification does not have.
    Unknown(u8),
}

/// How the image is encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encryption {
    /// Not at all.
    None,
    /// AES in CBC mode.
    Aes,
    /// LUKS.
    Luks,
    /// A method that the specification does not have.
    Unknown(u32),
}

/// A header. Offsets are aligned to clusters; whether they lie in the file was not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Place of the backing file's name, within the first cluster. `None` without a backing file.
    pub backing_name: Option<Place>,
    /// Cluster size as a power of two.
    pub cluster_bits: u32,
    /// Virtual size in bytes. Need not be a multiple of a sector.
    pub size_bytes: u64,
    /// The encryption.
    pub encryption: Encryption,
    /// The active L1 table.
    pub l1: Place,
    /// The refcount table.
    pub refcount_table: Place,
    /// Number of snapshots.
    pub snapshots: u32,
    /// Offset of the snapshot table; meaningless without snapshots.
    pub snapshots_offset_bytes: u64,
    /// The feature bits.
    pub features: Features,
    /// Width of a refcount.
    pub refcount_width: RefcountWidth,
    /// Length of the header. Extensions follow it.
    pub header_bytes: u32,
    /// How compressed clusters are compressed.
    pub compression: Compression,
}

impl Header {
    /// Parses the start of a file. `bytes` should have 112 bytes or more; a shorter file of version
    /// 2 can be valid too.
    ///
    /// # Errors
    /// For a field that contradicts the specification, or a limit that all programs have. Unknown
    /// incompatible bits, encryption and unknown compression are no errors here.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let fail = |at: u64, found: String, expected: String| Err(Invalid::new(STRUCTURE, at, found, expected));
        if bytes.len() < V2_BYTES {
            return Err(Invalid::short(STRUCTURE, bytes.len(), V2_BYTES));
        }
        if !bytes.starts_with(&MAGIC) {
            return fail(0, format!("\"{}\"", bytes[..4].escape_ascii()), format!("\"{}\"", MAGIC.escape_ascii()));
        }
        let version = get_u32(bytes, 4);
        if !(2..=3).contains(&version) {
            return fail(4, format!("version {version}"), "version 2 or 3".into());
        }
        let has_v3 = version == 3;
        if has_v3 && bytes.len() < V3_BYTES {
            return Err(Invalid::short(STRUCTURE, bytes.len(), V3_BYTES));
        }
        let v3 = |value: u64| if has_v3 { value } else { 0 };
        let cluster_bits = get_u32(bytes, 20);
        if !(CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&cluster_bits) {
            let expected = format!("{CLUSTER_BITS_MIN} to {CLUSTER_BITS_MAX} (512 bytes to 2 MiB)");
            return fail(20, format!("{cluster_bits} cluster bits"), expected);
        }
        let cluster_bytes = 1u64 << cluster_bits;
        let features = Features {
            incompatible: v3(get_u64(bytes, 72)),
            compatible: v3(get_u64(bytes, 80)),
            autoclear: v3(get_u64(bytes, 88)),
        };
        if features.has(features::EXTENDED_L2) && cluster_bits < EXTENDED_CLUSTER_BITS_MIN {
            let expected = format!("at least {EXTENDED_CLUSTER_BITS_MIN}, as the image has extended L2 entries");
            return fail(20, format!("{cluster_bits} cluster bits"), expected);
        }
        if features.autoclear & features::RAW_EXTERNAL_DATA != 0 && !features.has(features::EXTERNAL_DATA) {
            let found = "the raw external data bit without the external data bit";
            return fail(88, found.into(), "both or neither".into());
        }
        let order = if has_v3 { get_u32(bytes, 96) } else { 4 };
        let Some(refcount_width) = RefcountWidth::of_order(order) else {
            return fail(96, format!("refcount order {order}"), "0 to 6 (1 to 64 bits)".into());
        };
        let header_bytes = if has_v3 { get_u32(bytes, 100) } else { V2_BYTES as u32 };
        if has_v3
            && (header_bytes < V3_BYTES as u32
                || !header_bytes.is_multiple_of(8)
                || u64::from(header_bytes) > cluster_bytes)
        {
            let expected = format!("a multiple of 8 from {V3_BYTES} to the cluster size");
            return fail(100, format!("a header of {header_bytes} bytes"), expected);
        }
        let compression_type =
            if header_bytes > V3_BYTES as u32 { bytes.get(V3_BYTES).copied().unwrap_or(0) } else { 0 };
        if features.has(features::COMPRESSION_TYPE) != (compression_type != 0) {
            let bit = if compression_type == 0 { "set" } else { "clear" };
            let found = format!("compression type {compression_type}, with the compression type bit {bit}");
            return fail(104, found, "the bit set for a type other than 0, and only then".into());
        }
        let backing_name = match (get_u64(bytes, 8), get_u32(bytes, 16)) {
            (0, _) | (_, 0) => None,
            (offset_bytes, len) => {
                if len > BACKING_NAME_MAX_BYTES {
                    return fail(
                        16,
                        format!("a backing file name of {len} bytes"),
                        format!("1 to {BACKING_NAME_MAX_BYTES}"),
                    );
                }
                let len_bytes = u64::from(len);
                if offset_bytes < u64::from(header_bytes)
                    || offset_bytes.checked_add(len_bytes).is_none_or(|end| end > cluster_bytes)
                {
                    let found = format!("a backing file name of {len} bytes at offset {offset_bytes}");
                    return fail(8, found, format!("a place between the header and offset {cluster_bytes}"));
                }
                Some(Place { offset_bytes, len_bytes })
            }
        };
        if backing_name.is_some() && features.autoclear & features::RAW_EXTERNAL_DATA != 0 {
            let found = "a backing file, and a data file that is a raw disk by itself";
            return fail(8, found.into(), "one of them: the data file would lack the backing file's data".into());
        }
        let aligned = |at: u64, name: &str, offset_bytes: u64| {
            if offset_bytes.is_multiple_of(cluster_bytes) {
                return Ok(());
            }
            let expected = format!("a multiple of the cluster size ({cluster_bytes})");
            Err(Invalid::new(STRUCTURE, at, format!("the {name} at offset {offset_bytes}"), expected))
        };
        let place = |at: u64, name: &str, offset_bytes: u64, len_bytes: u64| {
            aligned(at, name, offset_bytes)?;
            if offset_bytes.checked_add(len_bytes).is_none() {
                return Err(Invalid::new(
                    STRUCTURE,
                    at,
                    format!("the {name} at offset {offset_bytes}"),
                    "an offset in the file",
                ));
            }
            Ok(Place { offset_bytes, len_bytes })
        };
        let l1_entries = u64::from(get_u32(bytes, 36));
        if l1_entries * 8 > L1_MAX_BYTES {
            return fail(36, format!("{l1_entries} L1 entries"), format!("at most {}", L1_MAX_BYTES / 8));
        }
        let l1 = place(40, "L1 table", get_u64(bytes, 40), l1_entries * 8)?;
        let table_clusters = u64::from(get_u32(bytes, 56));
        if table_clusters > REFCOUNT_TABLE_MAX_BYTES.max(cluster_bytes) >> cluster_bits {
            return fail(56, format!("a refcount table of {table_clusters} clusters"), "at most 8 MiB".into());
        }
        let refcount_table = place(48, "refcount table", get_u64(bytes, 48), table_clusters << cluster_bits)?;
        let snapshots = get_u32(bytes, 60);
        if snapshots > SNAPSHOTS_MAX {
            return fail(60, format!("{snapshots} snapshots"), format!("at most {SNAPSHOTS_MAX}"));
        }
        let snapshots_offset_bytes = get_u64(bytes, 64);
        if snapshots > 0 {
            aligned(64, "snapshot table", snapshots_offset_bytes)?;
        }
        let header = Self {
            version,
            backing_name,
            cluster_bits,
            size_bytes: get_u64(bytes, 24),
            encryption: match get_u32(bytes, 32) {
                0 => Encryption::None,
                1 => Encryption::Aes,
                2 => Encryption::Luks,
                other => Encryption::Unknown(other),
            },
            l1,
            refcount_table,
            snapshots,
            snapshots_offset_bytes,
            features,
            refcount_width,
            header_bytes,
            compression: match compression_type {
                0 => Compression::Deflate,
                1 => Compression::Zstd,
                other => Compression::Unknown(other),
            },
        };
        let needed = header.geometry().l1_entries(header.size_bytes);
        if l1_entries < needed {
            return fail(
                36,
                format!("{l1_entries} L1 entries"),
                format!("at least {needed} for a disk of {} bytes", header.size_bytes),
            );
        }
        Ok(header)
    }

    /// The header as [`Header::parse`] reads it: 72 bytes for version 2, else as long as
    /// [`Header::header_bytes`] says, and at least 104 bytes. Fields that this program does not
    /// know are zeros. So do not overwrite the header of an existing image with it. Change single
    /// fields: [`Header::l1_field`], [`Header::refcount_table_field`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let is_v3 = self.version >= 3;
        let len = if is_v3 { (self.header_bytes as usize).clamp(V3_BYTES, 1 << CLUSTER_BITS_MAX) } else { V2_BYTES };
        let mut bytes = vec![0; len];
        let mut put = |at: usize, value: &[u8]| {
            if let Some(place) = bytes.get_mut(at..at + value.len()) {
                place.copy_from_slice(value);
            }
        };
        put(0, &MAGIC);
        put(4, &self.version.to_be_bytes());
        if let Some(name) = self.backing_name {
            put(8, &name.offset_bytes.to_be_bytes());
            put(16, &(name.len_bytes as u32).to_be_bytes());
        }
        put(20, &self.cluster_bits.to_be_bytes());
        put(24, &self.size_bytes.to_be_bytes());
        let method = match self.encryption {
            Encryption::None => 0,
            Encryption::Aes => 1,
            Encryption::Luks => 2,
            Encryption::Unknown(other) => other,
        };
        put(32, &method.to_be_bytes());
        for (at, field) in [Self::l1_field(self.l1), self.refcount_table_field(self.refcount_table)] {
            put(at, &field);
        }
        put(60, &self.snapshots.to_be_bytes());
        put(64, &self.snapshots_offset_bytes.to_be_bytes());
        if is_v3 {
            put(72, &self.features.incompatible.to_be_bytes());
            put(80, &self.features.compatible.to_be_bytes());
            put(88, &self.features.autoclear.to_be_bytes());
            put(96, &self.refcount_width.bits().trailing_zeros().to_be_bytes());
            put(100, &(len as u32).to_be_bytes());
            let kind = match self.compression {
                Compression::Deflate => 0,
                Compression::Zstd => 1,
                Compression::Unknown(other) => other,
            };
            put(V3_BYTES, &[kind]);
        }
        bytes
    }

    /// Offset and bytes of the fields that name the L1 table: length and place lie in one sector,
    /// so one write switches to another table.
    pub fn l1_field(l1: Place) -> (usize, [u8; 12]) {
        let mut field = [0; 12];
        field[..4].copy_from_slice(&((l1.len_bytes / 8) as u32).to_be_bytes());
        field[4..].copy_from_slice(&l1.offset_bytes.to_be_bytes());
        (36, field)
    }

    /// Offset and bytes of the fields that name the refcount table: place and length lie in one
    /// sector, so one write switches to another table.
    pub fn refcount_table_field(&self, table: Place) -> (usize, [u8; 12]) {
        let mut field = [0; 12];
        field[..8].copy_from_slice(&table.offset_bytes.to_be_bytes());
        field[8..].copy_from_slice(&((table.len_bytes >> self.cluster_bits) as u32).to_be_bytes());
        (48, field)
    }

    /// Numbers by which tables are addressed.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            cluster_bits: self.cluster_bits,
            version: self.version,
            is_extended: self.features.has(features::EXTENDED_L2),
            has_data_file: self.features.has(features::EXTERNAL_DATA),
        }
    }

    /// Size of a cluster in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Where the extensions are: from the header to the backing file's name, or to the end of the
    /// first cluster.
    pub fn extensions(&self) -> Place {
        let end = self.backing_name.map_or(self.cluster_bytes(), |name| name.offset_bytes);
        let offset_bytes = u64::from(self.header_bytes);
        Place { offset_bytes, len_bytes: end.saturating_sub(offset_bytes) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A header of version 3 for a disk of 1 GiB in clusters of 64 KiB.
    pub(crate) fn sample() -> Vec<u8> {
        let mut bytes = vec![0; 112];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &MAGIC);
        put(4, &3u32.to_be_bytes());
        put(20, &16u32.to_be_bytes());
        put(24, &(1u64 << 30).to_be_bytes());
        put(36, &2u32.to_be_bytes());
        put(40, &(3u64 << 16).to_be_bytes());
        put(48, &(1u64 << 16).to_be_bytes());
        put(56, &1u32.to_be_bytes());
        put(96, &4u32.to_be_bytes());
        put(100, &112u32.to_be_bytes());
        bytes
    }

    fn with(at: usize, value: &[u8]) -> Vec<u8> {
        let mut bytes = sample();
        bytes[at..at + value.len()].copy_from_slice(value);
        bytes
    }

    #[test]
    fn a_header_of_version_3_is_read() {
        let header = Header::parse(&sample()).unwrap();
        assert_eq!((header.version, header.cluster_bytes(), header.size_bytes), (3, 65536, 1 << 30));
        assert_eq!(header.l1, Place { offset_bytes: 3 << 16, len_bytes: 16 });
        assert_eq!(header.refcount_table, Place { offset_bytes: 1 << 16, len_bytes: 65536 });
        assert_eq!((header.refcount_width.bits(), header.compression), (16, Compression::Deflate));
        assert_eq!(header.extensions(), Place { offset_bytes: 112, len_bytes: 65536 - 112 });
    }

    #[test]
    fn version_2_ignores_what_follows_72_bytes() {
        let mut bytes = with(4, &2u32.to_be_bytes());
        bytes[72..].fill(0xff);
        let header = Header::parse(&bytes).unwrap();
        assert_eq!((header.features, header.refcount_width.bits(), header.header_bytes), (Features::default(), 16, 72));
        assert!(Header::parse(&bytes[..72]).is_ok());
    }

    #[test]
    fn every_bad_field_is_told_by_its_offset() {
        for (at, value) in [
            (0, 0u32.to_be_bytes().to_vec()),
            (4, 1u32.to_be_bytes().to_vec()),
            (4, 4u32.to_be_bytes().to_vec()),
            (20, 8u32.to_be_bytes().to_vec()),
            (20, 22u32.to_be_bytes().to_vec()),
            (36, 1u32.to_be_bytes().to_vec()),
            (36, u32::MAX.to_be_bytes().to_vec()),
            (40, 512u64.to_be_bytes().to_vec()),
            (48, 1u64.to_be_bytes().to_vec()),
            (56, 129u32.to_be_bytes().to_vec()),
            (60, u32::MAX.to_be_bytes().to_vec()),
            (88, 2u64.to_be_bytes().to_vec()),
            (96, 7u32.to_be_bytes().to_vec()),
            (100, 96u32.to_be_bytes().to_vec()),
            (100, 108u32.to_be_bytes().to_vec()),
            (104, vec![1]),
        ] {
            assert_eq!(Header::parse(&with(at, &value)).unwrap_err().offset_bytes, at as u64, "{at}");
        }
        // The size does not fit the L1 table.
        assert_eq!(Header::parse(&with(24, &u64::MAX.to_be_bytes())).unwrap_err().offset_bytes, 36);
        let name = |offset: u64, len: u32| {
            let mut bytes = with(8, &offset.to_be_bytes());
            bytes[16..20].copy_from_slice(&len.to_be_bytes());
            Header::parse(&bytes)
        };
        assert!(name(112, 1023).is_ok() && name(65535, 1).is_ok());
        assert!(
            name(112, 1024).is_err() && name(65535, 2).is_err() && name(8, 2).is_err() && name(u64::MAX, 2).is_err()
        );
    }

    #[test]
    fn the_compression_type_needs_its_bit() {
        let mut bytes = with(72, &features::COMPRESSION_TYPE.to_be_bytes());
        assert!(Header::parse(&bytes).is_err());
        bytes[104] = 1;
        assert_eq!(Header::parse(&bytes).unwrap().compression, Compression::Zstd);
        bytes[104] = 9;
        assert_eq!(Header::parse(&bytes).unwrap().compression, Compression::Unknown(9));
    }

    #[test]
    fn another_table_is_named_by_one_field_of_a_sector() {
        let mut bytes = sample();
        let before = Header::parse(&bytes).unwrap();
        let l1 = Place { offset_bytes: 9 << 16, len_bytes: 64 };
        let refcount_table = Place { offset_bytes: 5 << 16, len_bytes: 2 << 16 };
        for (at, field) in [Header::l1_field(l1), before.refcount_table_field(refcount_table)] {
            bytes[at..at + field.len()].copy_from_slice(&field);
        }
        assert_eq!(Header::parse(&bytes).unwrap(), Header { l1, refcount_table, ..before });
    }

    proptest! {
        #[test]
        fn a_header_becomes_the_same_bytes_again(at in 4usize..112, value: u64, version in 2u32..=3) {
            let mut bytes = with(4, &version.to_be_bytes());
            let end = (at + 8).min(112);
            bytes[at..end].copy_from_slice(&value.to_be_bytes()[..end - at]);
            for bytes in [bytes, with(4, &version.to_be_bytes())] {
                if let Ok(header) = Header::parse(&bytes) {
                    let again = header.to_bytes();
                    prop_assert_eq!(again.len(), header.header_bytes as usize);
                    prop_assert_eq!(Header::parse(&again).unwrap(), header);
                }
            }
        }

        #[test]
        fn no_bytes_cause_a_panic(at in 4usize..112, value: u64, len in 0usize..112) {
            let mut bytes = sample();
            let end = (at + 8).min(112);
            bytes[at..end].copy_from_slice(&value.to_be_bytes()[..end - at]);
            let _ = Header::parse(&bytes);
            let _ = Header::parse(&bytes[..len]);
        }
    }
}
