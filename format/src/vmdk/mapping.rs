//! The mapping file of a raw device mapping: which device, and what makes it recognisable.
//!
//! ```text
//!   x.vmdk       RW 20971520 VMFSRDM "x-rdm.vmdk"
//!   x-rdm.vmdk   # Diskwright raw device mapping
//!                version=1
//!                id=5d1f...                             the identity of the mapping itself
//!                device="/dev/disk/by-id/wwn-0x5000c500a1b2c3d4"
//!                size=10737418240                       bytes
//!                serial="ZA1234"                        only where the device has one
//!                wwn="naa.5000c500a1b2c3d4"             only where the device has one
//! ```
//!
//! ESXi's mapping files are pointers inside VMFS, which no other system can resolve. So the
//! descriptor is VMware's, and the mapping file is ours. A descriptor of Workstation (`fullDevice`,
//! `partitionedDevice`) names the device itself; there the same facts are entries of the disk
//! database, `ddb.device.size` and so on, which other programs keep and do not read.

use super::{Descriptor, VmdkError};
use uuid::Uuid;

/// The longest mapping file that is read, in bytes.
pub const MAPPING_MAX_BYTES: u64 = 64 << 10;

const FIRST_LINE: &str = "# Diskwright raw device mapping";
const STRUCTURE: &str = "raw device mapping";
/// What comes before the keys in a disk database.
const IN_DATABASE: &str = "ddb.device.";

/// What makes a mapped device recognisable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MappedDevice {
    /// Length of the device in bytes.
    pub size_bytes: u64,
    /// Serial number of the device.
    pub serial: Option<String>,
    /// World wide name of the device.
    pub wwn: Option<String>,
}

/// A mapping file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// The identity of the mapping.
    pub id: Uuid,
    /// The path of the device.
    pub device: String,
    /// What the device must be.
    pub identity: MappedDevice,
}

impl MappedDevice {
    /// What a descriptor records of the device that it names; `None` if it records nothing.
    ///
    /// # Errors
    /// A size that is not a number.
    pub fn in_descriptor(descriptor: &Descriptor) -> Result<Option<Self>, VmdkError> {
        Self::read(|key| descriptor.get(&format!("{IN_DATABASE}{key}")))
    }

    /// The entries for the disk database of a descriptor: key and value.
    pub fn entries(&self) -> Vec<(String, String)> {
        let named = [("serial", &self.serial), ("wwn", &self.wwn)];
        let named = named.into_iter().filter_map(|(key, value)| Some((key, value.clone()?)));
        let all = std::iter::once(("size", self.size_bytes.to_string())).chain(named);
        all.map(|(key, value)| (format!("{IN_DATABASE}{key}"), value)).collect()
    }

    fn read<'a>(get: impl Fn(&str) -> Option<&'a str>) -> Result<Option<Self>, VmdkError> {
        let Some(size) = get("size") else { return Ok(None) };
        let size_bytes = size.parse().map_err(|_| wrong(format!("size={size:?}"), "the device's length in bytes"))?;
        let owned = |key| get(key).filter(|text| !text.is_empty()).map(str::to_owned);
        Ok(Some(Self { size_bytes, serial: owned("serial"), wwn: owned("wwn") }))
    }
}

impl Mapping {
    /// Whether a file that begins with these bytes is such a mapping file.
    pub fn is_at_start(bytes: &[u8]) -> bool {
        bytes.starts_with(FIRST_LINE.as_bytes())
    }

    /// Parses a mapping file.
    ///
    /// # Errors
    /// Anything that contradicts the text above.
    pub fn parse(bytes: &[u8]) -> Result<Self, VmdkError> {
        if !Self::is_at_start(bytes) {
            let found = "another first line (that of ESXi leads into VMFS, which is not read here)";
            return Err(wrong(found.into(), "\"# Diskwright raw device mapping\""));
        }
        if bytes.len() as u64 > MAPPING_MAX_BYTES {
            return Err(wrong(format!("a text of {} bytes", bytes.len()), "at most 64 KiB"));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| wrong("bytes that are no UTF-8".into(), "UTF-8"))?;
        let get = |key: &str| {
            let value = text.lines().find_map(|line| line.split_once('=').filter(|(found, _)| *found == key))?.1;
            Some(value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value))
        };
        let needed = |key: &str| get(key).ok_or_else(|| wrong(format!("no {key}"), "version, id, device and size"));
        let version = needed("version")?;
        if version != "1" {
            return Err(wrong(format!("version={version:?}"), "version 1"));
        }
        let id = needed("id")?;
        let id = Uuid::try_parse(id).map_err(|_| wrong(format!("id={id:?}"), "a UUID"))?;
        let device = needed("device")?;
        if !device.starts_with('/') || device.contains('\0') {
            return Err(wrong(format!("device={device:?}"), "an absolute path"));
        }
        let identity = MappedDevice::read(get)?.ok_or_else(|| wrong("no size".into(), "the device's length"))?;
        Ok(Self { id, device: device.to_owned(), identity })
    }

    /// The text of the file.
    pub fn to_text(&self) -> String {
        let Self { id, device, identity: MappedDevice { size_bytes, serial, wwn } } = self;
        let mut text = format!("{FIRST_LINE}\nversion=1\nid={id}\ndevice=\"{device}\"\nsize={size_bytes}\n");
        for (key, value) in [("serial", serial), ("wwn", wwn)] {
            if let Some(value) = value {
                text += &format!("{key}=\"{value}\"\n");
            }
        }
        text
    }
}

fn wrong(found: String, expected: &str) -> VmdkError {
    VmdkError { structure: STRUCTURE, offset_bytes: 0, found, expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> Mapping {
        let identity = MappedDevice { size_bytes: 7 << 30, serial: Some("A = b".into()), wwn: Some("naa.5".into()) };
        Mapping { id: Uuid::from_u128(77), device: "/dev/disk/by-id/wwn-0x5".into(), identity }
    }

    #[test]
    fn what_is_written_is_read() {
        let full = example();
        assert_eq!(Mapping::parse(full.to_text().as_bytes()), Ok(full.clone()));
        let bare = Mapping { identity: MappedDevice { size_bytes: 1, ..MappedDevice::default() }, ..full.clone() };
        assert_eq!(Mapping::parse(bare.to_text().as_bytes()), Ok(bare));
        let text =
            full.identity.entries().iter().map(|(key, value)| format!("{key} = \"{value}\"\n")).collect::<String>();
        let descriptor = format!(
            "# Disk DescriptorFile\nversion=1\nCID=1\ncreateType=\"fullDevice\"\nRW 1 FLAT \"/dev/sda\" 0\n{text}"
        );
        let descriptor = Descriptor::parse(descriptor.as_bytes(), 0).unwrap();
        assert_eq!(MappedDevice::in_descriptor(&descriptor), Ok(Some(full.identity)));
    }

    #[test]
    fn wrong_mappings_are_refused_by_name() {
        let refused = |from: &str, to: &str, what: &str| {
            let error = Mapping::parse(example().to_text().replace(from, to).as_bytes()).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        refused("# Diskwright", "# Other", "leads into VMFS");
        refused("version=1", "version=2", "version 1");
        refused("size=7516192768", "size=-1", "length in bytes");
        refused("size=7516192768\n", "", "the device's length");
        refused("/dev/disk", "dev/disk", "an absolute path");
        refused("id=0", "id=x", "a UUID");
        refused("device=", "other=", "no device");
        let long = example().to_text() + &"#".repeat(MAPPING_MAX_BYTES as usize);
        assert!(Mapping::parse(long.as_bytes()).unwrap_err().to_string().contains("at most 64 KiB"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "# Diskwright raw device mapping\n((version|id|device|size|serial)=\"?[0-9a-f/-]{0,40}\"?\n){0,9}") {
            if let Ok(parsed) = Mapping::parse(text.as_bytes()) {
                prop_assert_eq!(Mapping::parse(parsed.to_text().as_bytes()).unwrap(), parsed);
            }
        }
    }
}
