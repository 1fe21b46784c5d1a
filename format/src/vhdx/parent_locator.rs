//! The parent locator: key and value strings with the paths of a differencing disk's parent and the
//! identity that the parent must have (MS-VHDX 2.6.2.6).

use super::{
    Invalid, Result,
    bytes::{get_guid, get_u16, get_u32, put},
};
use uuid::{Uuid, uuid};

/// The only locator type that MS-VHDX defines.
pub const VHDX_LOCATOR: Uuid = uuid!("b04aefb7-d19e-4a81-b789-25b8e9445913");
/// Key: the parent's DataWriteGuid, lower-case, in braces.
pub const PARENT_LINKAGE: &str = "parent_linkage";
/// Key: another DataWriteGuid that the parent may have.
pub const PARENT_LINKAGE2: &str = "parent_linkage2";
/// Key: path relative to the child's folder.
pub const RELATIVE_PATH: &str = "relative_path";
/// Key: path with a volume GUID.
pub const VOLUME_PATH: &str = "volume_path";
/// Key: absolute path.
pub const ABSOLUTE_WIN32_PATH: &str = "absolute_win32_path";
const HEADER_BYTES: usize = 20;
const ENTRY_BYTES: usize = 12;
const STRUCTURE: &str = "parent locator";

/// The parent locator item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentLocator {
    /// [`VHDX_LOCATOR`], or a vendor's extension.
    pub locator_type: Uuid,
    /// Keys and values, in the order of the file. Keys are unique.
    pub entries: Vec<(String, String)>,
}

impl ParentLocator {
    /// Parses the whole item.
    ///
    /// # Errors
    /// If a string lies outside the item, has an odd length or is not UTF-16, or if a key occurs
    /// twice.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() < HEADER_BYTES {
            return Err(Invalid::short(STRUCTURE, bytes.len(), HEADER_BYTES));
        }
        let count = usize::from(get_u16(bytes, 18));
        let table_end = HEADER_BYTES + ENTRY_BYTES * count;
        if table_end > bytes.len() {
            return Err(Invalid::new(
                STRUCTURE,
                18,
                format!("{count} entries"),
                format!("no more entries than fit into {} bytes", bytes.len()),
            ));
        }
        let mut entries: Vec<(String, String)> = Vec::new();
        // Entries may share bytes, so a small item could otherwise name very many long strings.
        let mut budget_bytes = bytes.len();
        for at in (HEADER_BYTES..table_end).step_by(ENTRY_BYTES) {
            let key = string(bytes, at, get_u32(bytes, at), get_u16(bytes, at + 8), &mut budget_bytes)?;
            let value = string(bytes, at, get_u32(bytes, at + 4), get_u16(bytes, at + 10), &mut budget_bytes)?;
            entries.push((key, value));
        }
        let mut keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
        keys.sort_unstable();
        if let Some(pair) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Invalid::new(
                STRUCTURE,
                HEADER_BYTES as u64,
                format!("the key \"{}\" twice", pair[0]),
                "unique keys",
            ));
        }
        Ok(Self { locator_type: get_guid(bytes, 0), entries })
    }

    /// The value of a key. Keys are case-sensitive.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.entries.iter().find(|(found, _)| found == key).map(|(_, value)| value.as_str())
    }

    /// The GUID stored under a key; `None` without the key. Braces are optional, upper and lower
    /// case are accepted.
    ///
    /// # Errors
    /// If the value is not a GUID.
    pub fn guid(&self, key: &str) -> Result<Option<Uuid>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value
            .trim()
            .parse()
            .map(Some)
            .map_err(|_| Invalid::new(STRUCTURE, 0, format!("{key} \"{value}\""), "a GUID in braces"))
    }

    /// The item as bytes.
    ///
    /// # Errors
    /// If a string is longer than 65,535 bytes in UTF-16, or there are more than 65,535 entries.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let count = u16::try_from(self.entries.len())
            .map_err(|_| Invalid::new(STRUCTURE, 18, format!("{} entries", self.entries.len()), "at most 65535"))?;
        let mut bytes = vec![0; HEADER_BYTES + ENTRY_BYTES * self.entries.len()];
        put(&mut bytes, 0, &self.locator_type.to_bytes_le());
        put(&mut bytes, 18, &count.to_le_bytes());
        for (index, (key, value)) in self.entries.iter().enumerate() {
            let at = HEADER_BYTES + ENTRY_BYTES * index;
            for (text, offset_field, len_field) in [(key, at, at + 8), (value, at + 4, at + 10)] {
                let encoded: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
                let too_long = |_| {
                    Invalid::new(STRUCTURE, at as u64, format!("a string of {} bytes", encoded.len()), "at most 65535")
                };
                let len_bytes = u16::try_from(encoded.len()).map_err(too_long)?;
                let offset_bytes = u32::try_from(bytes.len()).map_err(too_long)?;
                put(&mut bytes, offset_field, &offset_bytes.to_le_bytes());
                put(&mut bytes, len_field, &len_bytes.to_le_bytes());
                bytes.extend_from_slice(&encoded);
            }
        }
        Ok(bytes)
    }
}

fn string(bytes: &[u8], at: usize, offset_bytes: u32, len_bytes: u16, budget_bytes: &mut usize) -> Result<String> {
    let (start, len) = (offset_bytes as usize, usize::from(len_bytes));
    let invalid = |found: String, expected: &str| Invalid::new(STRUCTURE, at as u64, found, expected);
    let found = start.checked_add(len).and_then(|end| bytes.get(start..end));
    let raw =
        found.ok_or_else(|| invalid(format!("a string of {len} bytes at {start}"), "a string inside the item"))?;
    if len % 2 != 0 {
        return Err(invalid(format!("a string of {len} bytes"), "whole UTF-16 units"));
    }
    *budget_bytes =
        budget_bytes.checked_sub(len).ok_or_else(|| invalid("strings that share bytes".into(), "separate strings"))?;
    let units: Vec<u16> = raw.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
    // Some writers include a terminating NUL in the length.
    let units = units.strip_suffix(&[0]).unwrap_or(&units);
    String::from_utf16(units).map_err(|_| invalid("a string with an unpaired surrogate".into(), "UTF-16"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn locator(entries: &[(&str, &str)]) -> ParentLocator {
        ParentLocator {
            locator_type: VHDX_LOCATOR,
            entries: entries.iter().map(|&(k, v)| (k.into(), v.into())).collect(),
        }
    }

    #[test]
    fn guids_are_read_in_either_case() {
        let made =
            locator(&[(PARENT_LINKAGE, "{83ED0EC3-24C8-49a6-a959-5e4bf1288bfb}"), (PARENT_LINKAGE2, "nonsense")]);
        assert_eq!(made.guid(PARENT_LINKAGE).unwrap(), Some(uuid!("83ed0ec3-24c8-49a6-a959-5e4bf1288bfb")));
        assert!(made.guid(PARENT_LINKAGE2).is_err());
        assert_eq!(made.guid(RELATIVE_PATH).unwrap(), None);
    }

    #[test]
    fn strings_outside_the_item_and_duplicate_keys_are_refused() {
        assert!(ParentLocator::parse(&locator(&[("a", "1"), ("a", "2")]).to_bytes().unwrap()).is_err());
        let whole = locator(&[(RELATIVE_PATH, "..\\p.vhdx")]).to_bytes().unwrap();
        assert!(ParentLocator::parse(&whole[..whole.len() - 1]).is_err());
        let mut odd = whole.clone();
        odd[30] -= 1;
        assert!(ParentLocator::parse(&odd).is_err());
        assert!(locator(&[("k", &"x".repeat(40_000))]).to_bytes().is_err());
    }

    proptest! {
        #[test]
        fn roundtrip(pairs in prop::collection::btree_map("[a-z_2]{1,20}", "[^\0]{1,60}", 0..8), kind: u128) {
            let locator = ParentLocator { locator_type: Uuid::from_u128(kind), entries: pairs.into_iter().collect() };
            prop_assert_eq!(ParentLocator::parse(&locator.to_bytes().unwrap()), Ok(locator));
        }

        #[test]
        fn hostile_bytes_do_not_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400), count in 0u16..20) {
            let _ = ParentLocator::parse(&bytes);
            put(&mut bytes, 18, &count.to_le_bytes());
            let _ = ParentLocator::parse(&bytes);
        }
    }
}
