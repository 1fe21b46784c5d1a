//! The region table: the places of the BAT and the metadata region (MS-VHDX 2.2.3). A file has two
//! identical copies.

use super::{
    Invalid, MIB, Result,
    bytes::{checksum, crc_without, get_guid, get_u32, get_u64, put, signature},
};
use uuid::{Uuid, uuid};

/// Size of a copy in bytes; the checksum covers all of it.
pub const REGION_TABLE_BYTES: usize = 64 << 10;
/// Offsets of the two copies in the file.
pub const REGION_TABLE_OFFSETS: [u64; 2] = [192 << 10, 256 << 10];
/// Maximum number of entries in a table.
const MAX_REGIONS: u32 = 2047;
/// Id of the BAT region.
pub const BAT_REGION: Uuid = uuid!("2dc27766-f623-4200-9d64-115e9bfd4a08");
/// Id of the metadata region.
pub const METADATA_REGION: Uuid = uuid!("8b7ca206-4790-4b9a-b8fe-575f050f886e");
const STRUCTURE: &str = "region table";

/// A table entry: one region of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The type of the region.
    pub id: Uuid,
    /// First byte in the file, a multiple of 1 MiB.
    pub offset_bytes: u64,
    /// Length in bytes, a multiple of 1 MiB.
    pub len_bytes: u32,
    /// Whether a program that does not know the region must refuse to open the file.
    pub required: bool,
}

impl Region {
    /// Offset of the first byte after the region. Cannot overflow in a region from
    /// [`RegionTable::parse`].
    pub fn end_bytes(&self) -> u64 {
        self.offset_bytes.saturating_add(u64::from(self.len_bytes))
    }
}

/// The table of regions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionTable {
    /// The regions, in the order of the file.
    pub regions: Vec<Region>,
}

impl RegionTable {
    /// Parses the first [`REGION_TABLE_BYTES`] of `bytes`. Regions must lie at multiples of 1 MiB
    /// outside the header section, must not overlap, and must be unique.
    ///
    /// # Errors
    /// If one of these conditions is violated.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let bytes = bytes
            .get(..REGION_TABLE_BYTES)
            .ok_or_else(|| Invalid::short(STRUCTURE, bytes.len(), REGION_TABLE_BYTES))?;
        signature(STRUCTURE, bytes, 0, b"regi")?;
        checksum(STRUCTURE, bytes, 4)?;
        let count = get_u32(bytes, 8);
        if count > MAX_REGIONS {
            return Err(Invalid::new(STRUCTURE, 8, format!("{count} entries"), format!("at most {MAX_REGIONS}")));
        }
        let regions: Vec<Region> =
            (0..count as usize).map(|index| parse_entry(bytes, 16 + 32 * index)).collect::<Result<_>>()?;
        let mut sorted: Vec<(usize, &Region)> = regions.iter().enumerate().collect();
        sorted.sort_by_key(|(_, region)| region.offset_bytes);
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].1.end_bytes() > pair[1].1.offset_bytes) {
            let found = format!("region {} at {}", pair[1].1.id, pair[1].1.offset_bytes);
            let expected = format!("an offset beyond region {}, which ends at {}", pair[0].1.id, pair[0].1.end_bytes());
            return Err(Invalid::new(STRUCTURE, 16 + 32 * pair[1].0 as u64 + 16, found, expected));
        }
        sorted.sort_by_key(|(_, region)| region.id);
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].1.id == pair[1].1.id) {
            let at = 16 + 32 * pair[1].0 as u64;
            return Err(Invalid::new(STRUCTURE, at, format!("region {} twice", pair[1].1.id), "unique regions"));
        }
        Ok(Self { regions })
    }

    /// The region with this id.
    pub fn find(&self, id: Uuid) -> Option<&Region> {
        self.regions.iter().find(|region| region.id == id)
    }

    /// A required region that this crate does not know, if there is one.
    pub fn unknown_required(&self) -> Option<&Region> {
        self.regions.iter().find(|region| region.required && region.id != BAT_REGION && region.id != METADATA_REGION)
    }

    /// One copy as bytes, with its checksum. Regions beyond the 2,047th are left out.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; REGION_TABLE_BYTES];
        put(&mut bytes, 0, b"regi");
        let count = self.regions.len().min(MAX_REGIONS as usize);
        put(&mut bytes, 8, &(count as u32).to_le_bytes());
        for (index, region) in self.regions.iter().take(count).enumerate() {
            let at = 16 + 32 * index;
            put(&mut bytes, at, &region.id.to_bytes_le());
            put(&mut bytes, at + 16, &region.offset_bytes.to_le_bytes());
            put(&mut bytes, at + 24, &region.len_bytes.to_le_bytes());
            put(&mut bytes, at + 28, &u32::from(region.required).to_le_bytes());
        }
        let crc = crc_without(&bytes, 4);
        put(&mut bytes, 4, &crc.to_le_bytes());
        bytes
    }
}

fn parse_entry(bytes: &[u8], at: usize) -> Result<Region> {
    let region = Region {
        id: get_guid(bytes, at),
        offset_bytes: get_u64(bytes, at + 16),
        len_bytes: get_u32(bytes, at + 24),
        required: get_u32(bytes, at + 28) & 1 == 1,
    };
    if region.offset_bytes < MIB
        || !region.offset_bytes.is_multiple_of(MIB)
        || region.offset_bytes.checked_add(u64::from(region.len_bytes)).is_none()
    {
        let found = format!("region {} at {}", region.id, region.offset_bytes);
        return Err(Invalid::new(STRUCTURE, at as u64 + 16, found, "a multiple of 1 MiB from 1 MiB on"));
    }
    if region.len_bytes == 0 || !u64::from(region.len_bytes).is_multiple_of(MIB) {
        let found = format!("region {} of {} bytes", region.id, region.len_bytes);
        return Err(Invalid::new(STRUCTURE, at as u64 + 24, found, "a multiple of 1 MiB above 0"));
    }
    Ok(region)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn region(id: Uuid, offset_mib: u64, len_mib: u32) -> Region {
        Region { id, offset_bytes: offset_mib << 20, len_bytes: len_mib << 20, required: true }
    }

    fn parse(regions: Vec<Region>) -> Result<RegionTable> {
        RegionTable::parse(&RegionTable { regions }.to_bytes())
    }

    #[test]
    fn overlapping_and_duplicate_regions_are_refused() {
        assert!(parse(vec![region(BAT_REGION, 3, 2), region(METADATA_REGION, 2, 1)]).is_ok());
        let error = parse(vec![region(BAT_REGION, 3, 2), region(METADATA_REGION, 4, 1)]).unwrap_err();
        assert_eq!(error.offset_bytes, 16 + 32 + 16);
        assert_eq!(parse(vec![region(BAT_REGION, 3, 1), region(BAT_REGION, 5, 1)]).unwrap_err().offset_bytes, 48);
        assert!(parse(vec![region(BAT_REGION, 0, 1)]).is_err());
        assert!(parse(vec![region(BAT_REGION, 3, 0)]).is_err());
        assert!(parse(vec![Region { offset_bytes: u64::MAX << 20, ..region(BAT_REGION, 3, 2) }]).is_err());
    }

    #[test]
    fn only_unknown_required_regions_are_reported() {
        let stranger = Region { required: false, ..region(Uuid::from_u128(5), 9, 1) };
        assert_eq!(parse(vec![stranger]).unwrap().unknown_required(), None);
        let required = Region { required: true, ..stranger };
        assert_eq!(parse(vec![required]).unwrap().unknown_required(), Some(&required));
    }

    proptest! {
        #[test]
        fn roundtrip(lens in prop::collection::vec((1u32..20, any::<bool>()), 0..40)) {
            let mut offset_mib = 1;
            let regions: Vec<Region> = lens.iter().enumerate().map(|(index, &(len_mib, required))| {
                let made = Region { required, ..region(Uuid::from_u128(index as u128), offset_mib, len_mib) };
                offset_mib += u64::from(len_mib);
                made
            }).collect();
            let table = RegionTable { regions };
            prop_assert_eq!(RegionTable::parse(&table.to_bytes()), Ok(table));
        }

        #[test]
        fn hostile_entries_do_not_panic(entries in prop::collection::vec(any::<u8>(), 0..4096), count: u32) {
            let mut bytes = vec![0; REGION_TABLE_BYTES];
            put(&mut bytes, 0, b"regi");
            put(&mut bytes, 16, &entries);
            put(&mut bytes, 8, &count.to_le_bytes());
            let crc = crc_without(&bytes, 4);
            put(&mut bytes, 4, &crc.to_le_bytes());
            let _ = RegionTable::parse(&bytes);
        }
    }
}
