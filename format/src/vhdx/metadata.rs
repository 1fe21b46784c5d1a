//! The metadata region: a table of items in its first 64 KiB, followed by the items (MS-VHDX 2.6).

use super::{
    Invalid, Result,
    bytes::{get_guid, get_u16, get_u32, get_u64, put, signature},
};
use uuid::{Uuid, uuid};

/// Size of the table in bytes. Items follow it.
pub const METADATA_TABLE_BYTES: usize = 64 << 10;
/// Bytes of the table before its first entry, which contain the number of entries.
pub const METADATA_HEADER_BYTES: usize = 32;
/// Size of an entry in bytes.
const METADATA_ENTRY_BYTES: usize = 32;
/// Maximum number of entries in a table.
const MAX_ENTRIES: u16 = 2047;
/// Maximum size of an item in bytes.
const MAX_ITEM_BYTES: u32 = 1 << 20;

/// Item: block size and flags.
pub const FILE_PARAMETERS: Uuid = uuid!("caa16737-fa36-4d43-b3b6-33f0aa44e76b");
/// Item: virtual size in bytes, 64 bits.
pub const VIRTUAL_DISK_SIZE: Uuid = uuid!("2fa54224-cd1b-4876-b211-5dbed83bf4b8");
/// Item: the disk's identity for the guest (SCSI page 83h), a GUID.
pub const VIRTUAL_DISK_ID: Uuid = uuid!("beca12ab-b2e6-4523-93ef-c309e000c746");
/// Item: logical sector size in bytes, 32 bits.
pub const LOGICAL_SECTOR_SIZE: Uuid = uuid!("8141bf1d-a96f-4709-ba47-f233a8faab5f");
/// Item: physical sector size in bytes, 32 bits.
pub const PHYSICAL_SECTOR_SIZE: Uuid = uuid!("cda348c7-445d-4471-9cc9-e9885251c556");
/// Item: the [parent locator](super::ParentLocator).
pub const PARENT_LOCATOR: Uuid = uuid!("a8d35f2d-b30b-454d-abf7-d3d84834ab0c");
const KNOWN: [Uuid; 6] =
    [FILE_PARAMETERS, VIRTUAL_DISK_SIZE, VIRTUAL_DISK_ID, LOGICAL_SECTOR_SIZE, PHYSICAL_SECTOR_SIZE, PARENT_LOCATOR];
const STRUCTURE: &str = "metadata table";

/// The table entry of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetadataEntry {
    /// The type of the item.
    pub id: Uuid,
    /// Offset from the beginning of the metadata region in bytes; 0 for an empty item.
    pub offset_bytes: u32,
    /// Length in bytes.
    pub len_bytes: u32,
    /// Whether the item belongs to a user of the disk, not to the format.
    pub is_user: bool,
    /// Whether the item describes the virtual disk, not the file.
    pub is_virtual_disk: bool,
    /// Whether a program that does not know the item must refuse to open the file.
    pub is_required: bool,
}

/// The table of items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataTable {
    /// The entries, in the order of the file.
    pub entries: Vec<MetadataEntry>,
}

impl MetadataTable {
    /// Number of bytes that [`MetadataTable::parse`] needs, from the first
    /// [`METADATA_HEADER_BYTES`] of the table.
    ///
    /// # Errors
    /// If the signature is wrong or there are more than [`MAX_ENTRIES`] entries.
    pub fn needed_bytes(header: &[u8]) -> Result<usize> {
        signature(STRUCTURE, header, 0, b"metadata")?;
        let count = get_u16(header, 10);
        if count > MAX_ENTRIES {
            return Err(Invalid::new(STRUCTURE, 10, format!("{count} entries"), format!("at most {MAX_ENTRIES}")));
        }
        Ok(METADATA_HEADER_BYTES + METADATA_ENTRY_BYTES * usize::from(count))
    }

    /// Parses the table of a region of `region_bytes`. Items must lie behind the table and within
    /// the region, must not overlap, and must be unique.
    ///
    /// # Errors
    /// If one of these conditions is violated.
    pub fn parse(bytes: &[u8], region_bytes: u32) -> Result<Self> {
        let needed_bytes = Self::needed_bytes(bytes)?;
        let bytes = bytes.get(..needed_bytes).ok_or_else(|| Invalid::short(STRUCTURE, bytes.len(), needed_bytes))?;
        let entries: Vec<MetadataEntry> = (METADATA_HEADER_BYTES..needed_bytes)
            .step_by(METADATA_ENTRY_BYTES)
            .map(|at| parse_entry(bytes, at, region_bytes))
            .collect::<Result<_>>()?;
        let mut sorted: Vec<&MetadataEntry> = entries.iter().filter(|entry| entry.len_bytes > 0).collect();
        sorted.sort_by_key(|entry| entry.offset_bytes);
        if let Some(pair) =
            sorted.windows(2).find(|pair| pair[1].offset_bytes - pair[0].offset_bytes < pair[0].len_bytes)
        {
            let found = format!("item {} at {}", pair[1].id, pair[1].offset_bytes);
            return Err(Invalid::new(STRUCTURE, 0, found, format!("an offset beyond item {}", pair[0].id)));
        }
        let mut ids: Vec<(Uuid, bool)> = entries.iter().map(|entry| (entry.id, entry.is_user)).collect();
        ids.sort();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Invalid::new(STRUCTURE, 0, format!("item {} twice", pair[0].0), "unique items"));
        }
        Ok(Self { entries })
    }

    /// The entry of the format's own item with this id.
    pub fn find(&self, id: Uuid) -> Option<&MetadataEntry> {
        self.entries.iter().find(|entry| entry.id == id && !entry.is_user)
    }

    /// Offset in the table of the fields offset and length (32 bits each) of the format's own item
    /// with this id. They lie within one sector of 512 bytes.
    pub fn place_field_bytes(&self, id: Uuid) -> Option<u64> {
        let index = self.entries.iter().position(|entry| entry.id == id && !entry.is_user)?;
        Some((METADATA_HEADER_BYTES + METADATA_ENTRY_BYTES * index + 16) as u64)
    }

    /// A required item that this crate does not know, if there is one.
    pub fn unknown_required(&self) -> Option<&MetadataEntry> {
        self.entries.iter().find(|entry| entry.is_required && (entry.is_user || !KNOWN.contains(&entry.id)))
    }

    /// The table as bytes. Entries beyond the 2,047th are left out.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; METADATA_TABLE_BYTES];
        put(&mut bytes, 0, b"metadata");
        let count = self.entries.len().min(usize::from(MAX_ENTRIES));
        put(&mut bytes, 10, &(count as u16).to_le_bytes());
        for (index, entry) in self.entries.iter().take(count).enumerate() {
            let at = METADATA_HEADER_BYTES + METADATA_ENTRY_BYTES * index;
            let flags =
                u32::from(entry.is_user) | u32::from(entry.is_virtual_disk) << 1 | u32::from(entry.is_required) << 2;
            put(&mut bytes, at, &entry.id.to_bytes_le());
            put(&mut bytes, at + 16, &entry.offset_bytes.to_le_bytes());
            put(&mut bytes, at + 20, &entry.len_bytes.to_le_bytes());
            put(&mut bytes, at + 24, &flags.to_le_bytes());
        }
        bytes
    }
}

fn parse_entry(bytes: &[u8], at: usize, region_bytes: u32) -> Result<MetadataEntry> {
    let flags = get_u32(bytes, at + 24);
    let entry = MetadataEntry {
        id: get_guid(bytes, at),
        offset_bytes: get_u32(bytes, at + 16),
        len_bytes: get_u32(bytes, at + 20),
        is_user: flags & 1 != 0,
        is_virtual_disk: flags & 2 != 0,
        is_required: flags & 4 != 0,
    };
    let inside = (entry.offset_bytes as usize) >= METADATA_TABLE_BYTES
        && entry.offset_bytes.checked_add(entry.len_bytes).is_some_and(|end| end <= region_bytes);
    if entry.len_bytes > MAX_ITEM_BYTES || (entry.len_bytes > 0 && !inside) {
        let found = format!("item {} of {} bytes at {}", entry.id, entry.len_bytes, entry.offset_bytes);
        let expected = format!("at most 1 MiB, between {METADATA_TABLE_BYTES} and the region's end at {region_bytes}");
        return Err(Invalid::new(STRUCTURE, at as u64 + 16, found, expected));
    }
    Ok(entry)
}

/// The file parameters (MS-VHDX 2.6.2.1). [`BatGeometry::new`](super::BatGeometry::new) checks the
/// block size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileParameters {
    /// Size of a payload block in bytes.
    pub block_bytes: u32,
    /// Whether the disk is fixed: blocks keep their space. Without meaning if there is a parent.
    pub leave_blocks_allocated: bool,
    /// Whether the disk is a differencing disk.
    pub has_parent: bool,
}

impl FileParameters {
    /// Size of the item in bytes.
    const BYTES: usize = 8;

    /// Parses the item.
    ///
    /// # Errors
    /// If there are too few bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() < Self::BYTES {
            return Err(Invalid::short("file parameters", bytes.len(), Self::BYTES));
        }
        let flags = get_u32(bytes, 4);
        Ok(Self { block_bytes: get_u32(bytes, 0), leave_blocks_allocated: flags & 1 != 0, has_parent: flags & 2 != 0 })
    }

    /// The item as bytes.
    pub fn to_bytes(self) -> Vec<u8> {
        let flags = u32::from(self.leave_blocks_allocated) | u32::from(self.has_parent) << 1;
        [self.block_bytes.to_le_bytes(), flags.to_le_bytes()].concat()
    }
}

/// Parses a 64-bit item (virtual disk size).
///
/// # Errors
/// If there are too few bytes.
pub fn parse_u64(structure: &'static str, bytes: &[u8]) -> Result<u64> {
    if bytes.len() < 8 { Err(Invalid::short(structure, bytes.len(), 8)) } else { Ok(get_u64(bytes, 0)) }
}

/// Parses a 32-bit item (sector sizes).
///
/// # Errors
/// If there are too few bytes.
pub fn parse_u32(structure: &'static str, bytes: &[u8]) -> Result<u32> {
    if bytes.len() < 4 { Err(Invalid::short(structure, bytes.len(), 4)) } else { Ok(get_u32(bytes, 0)) }
}

/// Parses a GUID item (virtual disk id).
///
/// # Errors
/// If there are too few bytes.
pub fn parse_guid(structure: &'static str, bytes: &[u8]) -> Result<Uuid> {
    if bytes.len() < 16 { Err(Invalid::short(structure, bytes.len(), 16)) } else { Ok(get_guid(bytes, 0)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(id: Uuid, offset_bytes: u32, len_bytes: u32) -> MetadataEntry {
        MetadataEntry { id, offset_bytes, len_bytes, is_user: false, is_virtual_disk: true, is_required: true }
    }

    fn parse(entries: Vec<MetadataEntry>) -> Result<MetadataTable> {
        MetadataTable::parse(&MetadataTable { entries }.to_bytes(), 1 << 20)
    }

    #[test]
    fn misplaced_and_overlapping_items_are_refused() {
        assert!(parse(vec![entry(VIRTUAL_DISK_SIZE, 65536, 8), entry(LOGICAL_SECTOR_SIZE, 65544, 4)]).is_ok());
        assert!(parse(vec![entry(VIRTUAL_DISK_SIZE, 65535, 8)]).is_err());
        assert!(parse(vec![entry(VIRTUAL_DISK_SIZE, (1 << 20) - 4, 8)]).is_err());
        assert!(parse(vec![entry(VIRTUAL_DISK_SIZE, u32::MAX, 8)]).is_err());
        assert!(parse(vec![entry(VIRTUAL_DISK_SIZE, 65540, 8), entry(LOGICAL_SECTOR_SIZE, 65536, 5)]).is_err());
        assert!(parse(vec![entry(VIRTUAL_DISK_SIZE, 65536, 8), entry(VIRTUAL_DISK_SIZE, 65544, 8)]).is_err());
        assert!(parse(vec![entry(VIRTUAL_DISK_SIZE, 0, 0)]).is_ok());
    }

    #[test]
    fn the_place_of_an_item_is_stored_where_the_table_says() {
        let table =
            MetadataTable { entries: vec![entry(VIRTUAL_DISK_SIZE, 65536, 8), entry(PARENT_LOCATOR, 69632, 0x1234)] };
        let at = table.place_field_bytes(PARENT_LOCATOR).unwrap() as usize;
        let bytes = table.to_bytes();
        assert_eq!((get_u32(&bytes, at), get_u32(&bytes, at + 4)), (69632, 0x1234));
        assert_eq!(table.place_field_bytes(VIRTUAL_DISK_ID), None);
    }

    #[test]
    fn unknown_required_items_are_found_and_user_items_ignored() {
        let stranger = entry(Uuid::from_u128(1), 65536, 8);
        assert_eq!(parse(vec![stranger]).unwrap().unknown_required(), Some(&stranger));
        let harmless = MetadataEntry { is_required: false, ..stranger };
        assert_eq!(parse(vec![harmless]).unwrap().unknown_required(), None);
        let users = MetadataEntry { is_user: true, is_required: false, ..entry(VIRTUAL_DISK_SIZE, 65536, 8) };
        assert_eq!(parse(vec![users]).unwrap().find(VIRTUAL_DISK_SIZE), None);
    }

    proptest! {
        #[test]
        fn roundtrip(lens in prop::collection::vec((1u32..5000, any::<[bool; 3]>()), 0..40)) {
            let mut offset_bytes = 65536;
            let entries = lens.iter().enumerate().map(|(index, &(len_bytes, [is_user, is_virtual_disk, is_required]))| {
                let made = MetadataEntry { id: Uuid::from_u128(index as u128), offset_bytes, len_bytes, is_user, is_virtual_disk, is_required };
                offset_bytes += len_bytes;
                made
            }).collect();
            let table = MetadataTable { entries };
            prop_assert_eq!(MetadataTable::parse(&table.to_bytes(), 1 << 20), Ok(table));
        }

        #[test]
        fn parameters_roundtrip(block_bytes: u32, leave_blocks_allocated: bool, has_parent: bool) {
            let parameters = FileParameters { block_bytes, leave_blocks_allocated, has_parent };
            prop_assert_eq!(FileParameters::parse(&parameters.to_bytes()), Ok(parameters));
        }

        #[test]
        fn hostile_bytes_do_not_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..4096), region_bytes: u32, count in 0u16..130) {
            let _ = MetadataTable::parse(&bytes, region_bytes);
            put(&mut bytes, 0, b"metadata");
            put(&mut bytes, 10, &count.to_le_bytes());
            let _ = MetadataTable::parse(&bytes, region_bytes);
            let _ = (FileParameters::parse(&bytes), parse_u64("x", &bytes), parse_u32("x", &bytes), parse_guid("x", &bytes));
        }
    }
}
