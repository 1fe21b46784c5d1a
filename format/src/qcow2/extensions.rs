//! Header extensions: formats and names of other files, feature names, bitmaps, encryption.
//!
//! ```text
//!   type (4 bytes)   length (4 bytes)   data, padded to a multiple of 8   ... until type 0
//! ```

use super::{
    Invalid, Place, Result,
    bytes::{get_u32, get_u64, text},
    features::{self, FeatureName},
};

const END: u32 = 0;
/// Type of the extension with the name of the backing file's format.
pub const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const BITMAPS: u32 = 0x2385_2875;
const ENCRYPTION: u32 = 0x0537_be77;
const DATA_FILE: u32 = 0x4441_5441;

const STRUCTURE: &str = "qcow2 header extension";

/// Most extensions of unknown types that are remembered.
const UNKNOWN_MAX: usize = 64;

/// The mark after the last extension.
pub(super) const END_MARK: [u8; 8] = [0; 8];

/// The extension that records the format of the backing file, and the end mark.
pub(super) fn with_backing_format(format: &str) -> Vec<u8> {
    let len = format.len() as u32;
    let mut bytes = [&BACKING_FORMAT.to_be_bytes()[..], &len.to_be_bytes(), format.as_bytes()].concat();
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes.extend(END_MARK);
    bytes
}

/// The bitmaps extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Number of bitmaps.
    pub count: u32,
    /// The bitmap directory.
    pub directory: Place,
    /// Offset of the extension's data in the file, in bytes.
    pub offset_bytes: u64,
}

/// All extensions of a header.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extensions {
    /// Name of the backing file's format: "raw", "qcow2", ...
    pub backing_format: Option<String>,
    /// Name of the external data file.
    pub data_file: Option<String>,
    /// Names of feature bits.
    pub feature_names: Vec<FeatureName>,
    /// The bitmaps.
    pub bitmaps: Option<BitmapsExtension>,
    /// The header of the encryption.
    pub encryption: Option<Place>,
    /// Types of extensions that the specification does not have, 64 at most.
    pub unknown: Vec<u32>,
    /// Bytes from the header's end to the end of the last extension, the end mark included if there
    /// is room for it.
    pub len_bytes: u64,
}

impl Extensions {
    /// Parses the extensions in `area`, which begins at `offset_bytes` of the file. If the area
    /// ends without an end mark, all its extensions count.
    ///
    /// # Errors
    /// For an extension that is longer than the rest of the area, an extension that occurs twice,
    /// and data shorter than their type needs.
    pub fn parse(area: &[u8], offset_bytes: u64) -> Result<Self> {
        let mut found = Self::default();
        let mut has_names = false;
        let mut at = 0;
        while let Some(head) = area.get(at..at + 8) {
            let (kind, len) = (get_u32(head, 0), get_u32(head, 4) as usize);
            if kind == END {
                at += 8;
                break;
            }
            let here = offset_bytes.saturating_add(at as u64);
            let Some(data) = (at + 8).checked_add(len).and_then(|end| area.get(at + 8..end)) else {
                let expected = format!("at most {}, the rest of the first cluster", area.len() - at - 8);
                return Err(Invalid::new(STRUCTURE, here, format!("type {kind:#010x} with {len} bytes"), expected));
            };
            let is_repeated = match kind {
                BACKING_FORMAT => found.backing_format.replace(text(data)).is_some(),
                DATA_FILE => found.data_file.replace(text(data)).is_some(),
                FEATURE_NAMES => {
                    found.feature_names = features::parse_names(data);
                    std::mem::replace(&mut has_names, true)
                }
                BITMAPS => {
                    long_enough(data, 24, "bitmaps extension", here)?;
                    let bitmaps = BitmapsExtension {
                        count: get_u32(data, 0),
                        directory: Place { offset_bytes: get_u64(data, 16), len_bytes: get_u64(data, 8) },
                        offset_bytes: here.saturating_add(8),
                    };
                    found.bitmaps.replace(bitmaps).is_some()
                }
                ENCRYPTION => {
                    long_enough(data, 16, "encryption header pointer", here)?;
                    let place = Place { offset_bytes: get_u64(data, 0), len_bytes: get_u64(data, 8) };
                    found.encryption.replace(place).is_some()
                }
                other => {
                    if found.unknown.len() < UNKNOWN_MAX {
                        found.unknown.push(other);
                    }
                    false
                }
            };
            if is_repeated {
                return Err(Invalid::new(STRUCTURE, here, format!("type {kind:#010x} a second time"), "one"));
            }
            at = (at + 8 + len).next_multiple_of(8);
        }
        found.len_bytes = at.min(area.len()) as u64;
        Ok(found)
    }
}

fn long_enough(data: &[u8], needed: usize, name: &'static str, offset_bytes: u64) -> Result<()> {
    if data.len() >= needed {
        return Ok(());
    }
    Err(Invalid::new(name, offset_bytes, format!("{} bytes", data.len()), format!("at least {needed}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extension(kind: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = [kind.to_be_bytes(), (data.len() as u32).to_be_bytes()].concat();
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0xee);
        bytes
    }

    #[test]
    fn every_known_extension_is_read_and_unknown_ones_are_skipped() {
        let mut bitmaps = vec![0; 24];
        bitmaps[3] = 2;
        bitmaps[15] = 64;
        bitmaps[21] = 1;
        let mut area = [
            extension(BACKING_FORMAT, b"raw"),
            extension(0x1234_5678, b"anything"),
            extension(DATA_FILE, b"disk.data"),
            extension(BITMAPS, &bitmaps),
        ]
        .concat();
        let len = area.len() as u64 + 8;
        area.extend([0; 8]);
        area.extend(extension(ENCRYPTION, &[0; 16]));
        let found = Extensions::parse(&area, 112).unwrap();
        assert_eq!((found.backing_format.as_deref(), found.data_file.as_deref()), (Some("raw"), Some("disk.data")));
        assert_eq!((found.unknown, found.encryption), (vec![0x1234_5678], None));
        let bitmaps = found.bitmaps.unwrap();
        assert_eq!((bitmaps.count, bitmaps.directory), (2, Place { offset_bytes: 65536, len_bytes: 64 }));
        assert_eq!(found.len_bytes, len);
    }

    #[test]
    fn bad_lengths_and_repetitions_are_refused() {
        let mut long = extension(BACKING_FORMAT, b"raw");
        long[7] = 9;
        assert_eq!(Extensions::parse(&long, 112).unwrap_err().offset_bytes, 112);
        long[4..8].fill(0xff);
        assert!(Extensions::parse(&long, u64::MAX).is_err());
        let twice = extension(DATA_FILE, b"a").repeat(2);
        assert_eq!(Extensions::parse(&twice, 72).unwrap_err().offset_bytes, 88);
        assert!(Extensions::parse(&extension(BITMAPS, &[0; 23]), 0).is_err());
        assert!(Extensions::parse(&extension(ENCRYPTION, &[0; 15]), 0).is_err());
        assert_eq!(Extensions::parse(&[0xff; 7], 0).unwrap(), Extensions::default());
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic(area in prop::collection::vec(any::<u8>(), 0..512), kind: usize, len in 0u32..300) {
            let _ = Extensions::parse(&area, u64::MAX);
            let kinds = [BACKING_FORMAT, FEATURE_NAMES, BITMAPS, ENCRYPTION, DATA_FILE, 7];
            let head = [kinds[kind % kinds.len()].to_be_bytes(), len.to_be_bytes()].concat();
            let _ = Extensions::parse(&[head, area].concat(), 0);
        }
    }
}
