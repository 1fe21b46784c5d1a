//! Log entries: a header, descriptors and data sectors, in sectors of 4 KiB (MS-VHDX 2.3).
//!
//! ```text
//!   sector 0: header (64 bytes) + 126 descriptors │ descriptor sectors, 128 each │ data sectors
//!                                                                   one for each data descriptor
//! ```
//!
//! To detect torn writes, the first 8 and last 4 bytes of a data sector hold a signature and the
//! sequence number; the bytes that belong there are in its descriptor. This module handles single
//! sectors. The image crate handles the position of an entry in the log and its wrap-around.

use super::{
    Invalid, Result,
    bytes::{array, crc_without, get_guid, get_u32, get_u64, put, signature},
};
use uuid::Uuid;

/// Sector size of the log in bytes.
pub const LOG_SECTOR_BYTES: usize = 4096;
/// Size of an entry's header in bytes.
pub const LOG_HEADER_BYTES: usize = 64;
/// Size of a descriptor in bytes.
pub const DESCRIPTOR_BYTES: usize = 32;
const STRUCTURE: &str = "log entry";
const CHECKSUM_FIELD: usize = 4;
const SECTOR: u64 = LOG_SECTOR_BYTES as u64;

/// The header of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEntryHeader {
    /// CRC-32C over the whole entry with this field as zero.
    pub checksum: u32,
    /// Length in bytes, a multiple of 4 KiB.
    pub entry_len_bytes: u32,
    /// Offset in the log of the oldest entry of the sequence that must be replayed with this one.
    pub tail_bytes: u32,
    /// The sequence number of the previous entry plus one; greater than 0.
    pub sequence_number: u64,
    /// Number of descriptors that follow.
    pub descriptors: u32,
    /// The header's log GUID when the entry was written.
    pub log_guid: Uuid,
    /// Durable length of the file when the entry was written: the file is at least this long.
    pub flushed_file_bytes: u64,
    /// All structures of the file end at or below this offset.
    pub last_file_bytes: u64,
}

/// A change of the file that an entry records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Descriptor {
    /// Zero a range.
    Zero {
        /// First byte in the file, a multiple of 4 KiB.
        offset_bytes: u64,
        /// Length in bytes, a multiple of 4 KiB.
        len_bytes: u64,
    },
    /// Replace a sector by the next data sector.
    Data {
        /// First byte in the file, a multiple of 4 KiB.
        offset_bytes: u64,
        /// The sector's first bytes, which the data sector does not hold.
        leading: [u8; 8],
        /// The sector's last bytes, which the data sector does not hold.
        trailing: [u8; 4],
    },
}

/// Number of sectors for the header and `descriptors` descriptors.
fn descriptor_sectors(descriptors: u32) -> u64 {
    (LOG_HEADER_BYTES as u64 + DESCRIPTOR_BYTES as u64 * u64::from(descriptors)).div_ceil(SECTOR)
}

/// Length in bytes of an entry with `data_sectors` data descriptors and no others.
pub fn data_entry_bytes(data_sectors: u32) -> u64 {
    (descriptor_sectors(data_sectors) + u64::from(data_sectors)) * SECTOR
}

impl LogEntryHeader {
    /// Parses a header from the first sector of an entry. Does not check the checksum, which needs
    /// the whole entry.
    ///
    /// # Errors
    /// If the signature is wrong, a length is not a multiple of 4 KiB, the descriptors do not fit,
    /// or the sequence number is 0.
    pub fn parse(sector: &[u8]) -> Result<Self> {
        if sector.len() < LOG_HEADER_BYTES {
            return Err(Invalid::short(STRUCTURE, sector.len(), LOG_HEADER_BYTES));
        }
        signature(STRUCTURE, sector, 0, b"loge")?;
        let header = Self {
            checksum: get_u32(sector, CHECKSUM_FIELD),
            entry_len_bytes: get_u32(sector, 8),
            tail_bytes: get_u32(sector, 12),
            sequence_number: get_u64(sector, 16),
            descriptors: get_u32(sector, 24),
            log_guid: get_guid(sector, 32),
            flushed_file_bytes: get_u64(sector, 48),
            last_file_bytes: get_u64(sector, 56),
        };
        let needed_bytes = descriptor_sectors(header.descriptors) * SECTOR;
        if !u64::from(header.entry_len_bytes).is_multiple_of(SECTOR) || u64::from(header.entry_len_bytes) < needed_bytes
        {
            let expected =
                format!("a multiple of 4096, at least {needed_bytes} for {} descriptors", header.descriptors);
            return Err(Invalid::new(STRUCTURE, 8, format!("length {}", header.entry_len_bytes), expected));
        }
        if !u64::from(header.tail_bytes).is_multiple_of(SECTOR) {
            return Err(Invalid::new(STRUCTURE, 12, format!("tail {}", header.tail_bytes), "a multiple of 4096"));
        }
        if header.sequence_number == 0 {
            return Err(Invalid::new(STRUCTURE, 16, "sequence number 0", "a number above 0"));
        }
        Ok(header)
    }

    fn to_bytes(self) -> [u8; LOG_HEADER_BYTES] {
        let mut bytes = [0; LOG_HEADER_BYTES];
        put(&mut bytes, 0, b"loge");
        put(&mut bytes, CHECKSUM_FIELD, &self.checksum.to_le_bytes());
        put(&mut bytes, 8, &self.entry_len_bytes.to_le_bytes());
        put(&mut bytes, 12, &self.tail_bytes.to_le_bytes());
        put(&mut bytes, 16, &self.sequence_number.to_le_bytes());
        put(&mut bytes, 24, &self.descriptors.to_le_bytes());
        put(&mut bytes, 32, &self.log_guid.to_bytes_le());
        put(&mut bytes, 48, &self.flushed_file_bytes.to_le_bytes());
        put(&mut bytes, 56, &self.last_file_bytes.to_le_bytes());
        bytes
    }
}

impl Descriptor {
    /// Parses a descriptor of an entry with `sequence_number`.
    ///
    /// # Errors
    /// If the signature or the sequence number is wrong, or an offset or length is not a multiple
    /// of 4 KiB.
    pub fn parse(bytes: &[u8], sequence_number: u64) -> Result<Self> {
        const WHAT: &str = "log descriptor";
        if bytes.len() < DESCRIPTOR_BYTES {
            return Err(Invalid::short(WHAT, bytes.len(), DESCRIPTOR_BYTES));
        }
        let found_number = get_u64(bytes, 24);
        if found_number != sequence_number {
            return Err(Invalid::new(WHAT, 24, format!("sequence number {found_number}"), sequence_number));
        }
        let offset_bytes = get_u64(bytes, 16);
        if !offset_bytes.is_multiple_of(SECTOR) {
            return Err(Invalid::new(WHAT, 16, format!("file offset {offset_bytes}"), "a multiple of 4096"));
        }
        match &array::<4>(bytes, 0) {
            b"zero" => {
                let len_bytes = get_u64(bytes, 8);
                if !len_bytes.is_multiple_of(SECTOR) || offset_bytes.checked_add(len_bytes).is_none() {
                    return Err(Invalid::new(
                        WHAT,
                        8,
                        format!("zero length {len_bytes}"),
                        "a multiple of 4096 that ends within 64 bits",
                    ));
                }
                Ok(Self::Zero { offset_bytes, len_bytes })
            }
            b"desc" => {
                if offset_bytes.checked_add(SECTOR).is_none() {
                    return Err(Invalid::new(
                        WHAT,
                        16,
                        format!("file offset {offset_bytes}"),
                        "an offset at least 4096 below 2^64",
                    ));
                }
                Ok(Self::Data { offset_bytes, leading: array(bytes, 8), trailing: array(bytes, 4) })
            }
            other => {
                Err(Invalid::new(WHAT, 0, format!("signature \"{}\"", other.escape_ascii()), "\"zero\" or \"desc\""))
            }
        }
    }

    /// The descriptor as bytes, for an entry with `sequence_number`.
    pub fn to_bytes(&self, sequence_number: u64) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        match self {
            Self::Zero { offset_bytes, len_bytes } => {
                put(&mut bytes, 0, b"zero");
                put(&mut bytes, 8, &len_bytes.to_le_bytes());
                put(&mut bytes, 16, &offset_bytes.to_le_bytes());
            }
            Self::Data { offset_bytes, leading, trailing } => {
                put(&mut bytes, 0, b"desc");
                put(&mut bytes, 4, trailing);
                put(&mut bytes, 8, leading);
                put(&mut bytes, 16, &offset_bytes.to_le_bytes());
            }
        }
        put(&mut bytes, 24, &sequence_number.to_le_bytes());
        bytes
    }

    /// The data descriptor that replaces the sector at `offset_bytes` by `page`.
    fn of_page(offset_bytes: u64, page: &[u8]) -> Self {
        Self::Data { offset_bytes, leading: array(page, 0), trailing: array(page, LOG_SECTOR_BYTES - 4) }
    }
}

/// Restores the page that a data sector and its descriptor's bytes record.
///
/// # Errors
/// If there are too few bytes, or the signature or a half of the sequence number is wrong.
pub fn restore_page(sector: &[u8], leading: [u8; 8], trailing: [u8; 4], sequence_number: u64) -> Result<Box<[u8]>> {
    const WHAT: &str = "log data sector";
    let sector = sector.get(..LOG_SECTOR_BYTES).ok_or_else(|| Invalid::short(WHAT, sector.len(), LOG_SECTOR_BYTES))?;
    signature(WHAT, sector, 0, b"data")?;
    let found_number = u64::from(get_u32(sector, 4)) << 32 | u64::from(get_u32(sector, LOG_SECTOR_BYTES - 4));
    if found_number != sequence_number {
        return Err(Invalid::new(WHAT, 4, format!("sequence number {found_number}"), sequence_number));
    }
    let mut page: Box<[u8]> = sector.into();
    put(&mut page, 0, &leading);
    put(&mut page, LOG_SECTOR_BYTES - 4, &trailing);
    Ok(page)
}

/// Computes the checksum of an entry piece by piece, since an entry may wrap around the end of the
/// log.
#[derive(Debug, Default)]
pub struct EntryChecksum {
    crc: u32,
    started: bool,
}

impl EntryChecksum {
    /// Adds the next bytes. The first piece must hold at least the header.
    pub fn add(&mut self, bytes: &[u8]) {
        self.crc =
            if self.started { crc32c::crc32c_append(self.crc, bytes) } else { crc_without(bytes, CHECKSUM_FIELD) };
        self.started = true;
    }

    /// The checksum of everything added so far.
    pub fn value(&self) -> u32 {
        self.crc
    }
}

/// The bytes of an entry that replaces pages. Fills in length, descriptor count and checksum of
/// `header`. `pages` are pairs of file offset and 4 KiB page.
pub fn data_entry<'a>(mut header: LogEntryHeader, pages: impl ExactSizeIterator<Item = (u64, &'a [u8])>) -> Vec<u8> {
    let count = pages.len() as u32;
    header.descriptors = count;
    header.entry_len_bytes = data_entry_bytes(count) as u32;
    header.checksum = 0;
    let mut bytes = vec![0; header.entry_len_bytes as usize];
    let data_start = descriptor_sectors(count) as usize * LOG_SECTOR_BYTES;
    for (index, (offset_bytes, page)) in pages.enumerate() {
        let descriptor = Descriptor::of_page(offset_bytes, page);
        put(&mut bytes, LOG_HEADER_BYTES + DESCRIPTOR_BYTES * index, &descriptor.to_bytes(header.sequence_number));
        let at = data_start + LOG_SECTOR_BYTES * index;
        put(&mut bytes, at, page);
        put(&mut bytes, at, b"data");
        put(&mut bytes, at + 4, &((header.sequence_number >> 32) as u32).to_le_bytes());
        put(&mut bytes, at + LOG_SECTOR_BYTES - 4, &(header.sequence_number as u32).to_le_bytes());
    }
    put(&mut bytes, 0, &header.to_bytes());
    seal(&mut bytes);
    bytes
}

/// Sets the checksum of an otherwise complete entry.
pub fn seal(entry: &mut [u8]) {
    let crc = crc_without(entry, CHECKSUM_FIELD);
    put(entry, CHECKSUM_FIELD, &crc.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(sequence_number: u64) -> LogEntryHeader {
        LogEntryHeader {
            checksum: 0,
            entry_len_bytes: 0,
            tail_bytes: 8192,
            sequence_number,
            descriptors: 0,
            log_guid: Uuid::from_u128(77),
            flushed_file_bytes: 5 << 20,
            last_file_bytes: 6 << 20,
        }
    }

    #[test]
    fn descriptors_fill_sectors_as_specified() {
        assert_eq!([0, 126, 127, 254, 255].map(descriptor_sectors), [1, 1, 2, 2, 3]);
        assert_eq!([0, 1, 127].map(data_entry_bytes), [4096, 8192, 129 * 4096]);
    }

    #[test]
    fn an_empty_entry_is_one_sector() {
        let bytes = data_entry(header(9), std::iter::empty());
        assert_eq!(bytes.len(), 4096);
        let parsed = LogEntryHeader::parse(&bytes).unwrap();
        assert_eq!((parsed.descriptors, parsed.sequence_number, parsed.last_file_bytes), (0, 9, 6 << 20));
    }

    #[test]
    fn invalid_headers_are_refused() {
        let bytes = data_entry(header(9), std::iter::empty());
        for (at, value) in [(8, 100u32), (8, 0), (12, 5), (16, 0), (24, 200)] {
            let mut bad = bytes.clone();
            put(&mut bad, at, &value.to_le_bytes());
            assert!(LogEntryHeader::parse(&bad).is_err(), "field at {at}");
        }
        assert!(LogEntryHeader::parse(&bytes[..10]).is_err());
    }

    proptest! {
        #[test]
        fn logged_pages_are_restored(pages in prop::collection::vec((0u64..1 << 40, any::<u64>(), any::<u8>()), 0..140), number in 1u64.., split in 64usize..4096) {
            let pages: Vec<(u64, Vec<u8>)> = pages.into_iter().map(|(index, ends, fill)| {
                let mut page = vec![fill; 4096];
                put(&mut page, 0, &ends.to_le_bytes());
                put(&mut page, 4088, &ends.to_be_bytes());
                (index * 4096, page)
            }).collect();
            let bytes = data_entry(header(number), pages.iter().map(|(offset, page)| (*offset, &page[..])));
            let parsed = LogEntryHeader::parse(&bytes).unwrap();
            let mut sum = EntryChecksum::default();
            sum.add(&bytes[..split]);
            sum.add(&bytes[split..]);
            prop_assert_eq!(sum.value(), parsed.checksum);
            prop_assert_eq!(parsed.entry_len_bytes as usize, bytes.len());
            let data_start = descriptor_sectors(parsed.descriptors) as usize * 4096;
            for (index, (offset, page)) in pages.iter().enumerate() {
                let at = 64 + 32 * index;
                let descriptor = Descriptor::parse(&bytes[at..at + 32], number).unwrap();
                prop_assert!(Descriptor::parse(&bytes[at..at + 32], number.wrapping_add(1)).is_err());
                let Descriptor::Data { offset_bytes, leading, trailing } = descriptor else { panic!("a data descriptor") };
                let found = restore_page(&bytes[data_start + 4096 * index..], leading, trailing, number).unwrap();
                prop_assert_eq!((offset_bytes, &found[..]), (*offset, &page[..]));
                prop_assert!(restore_page(&bytes[data_start + 4096 * index..], leading, trailing, number ^ 1 << 40).is_err());
            }
        }

        #[test]
        fn zero_descriptors_roundtrip(first in 0u64..1 << 50, len in 0u64..1 << 50, number in 1u64..) {
            let made = Descriptor::Zero { offset_bytes: first * 4096, len_bytes: len * 4096 };
            prop_assert_eq!(Descriptor::parse(&made.to_bytes(number), number), Ok(made));
        }

        #[test]
        fn hostile_bytes_do_not_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..4200), number: u64) {
            let _ = LogEntryHeader::parse(&bytes);
            let _ = Descriptor::parse(&bytes, number);
            let _ = restore_page(&bytes, [0; 8], [0; 4], number);
            for signature in [b"loge", b"zero", b"desc", b"data"] {
                put(&mut bytes, 0, signature);
                put(&mut bytes, 24, &number.to_le_bytes());
                let _ = LogEntryHeader::parse(&bytes);
                let _ = Descriptor::parse(&bytes, number);
            }
            seal(&mut bytes);
        }
    }
}
