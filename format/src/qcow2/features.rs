//! Feature bits, and their names.
//!
//! An image may carry a table of names, so that a program which does not know a bit can say what it
//! is called. The names of known bits come from the specification, as the table may be absent.

use super::bytes::text;

/// Bit of [`Features::incompatible`]: the refcounts may be wrong.
pub const DIRTY: u64 = 1;
/// Bit of [`Features::incompatible`]: any structure may be damaged; the image must not be written.
pub const CORRUPT: u64 = 1 << 1;
/// Bit of [`Features::incompatible`]: guest data lie in another file.
pub const EXTERNAL_DATA: u64 = 1 << 2;
/// Bit of [`Features::incompatible`]: compressed clusters are not deflate.
pub const COMPRESSION_TYPE: u64 = 1 << 3;
/// Bit of [`Features::incompatible`]: L2 entries have 128 bits.
pub const EXTENDED_L2: u64 = 1 << 4;
/// Bit of [`Features::compatible`]: refcounts may be written late, with the dirty bit set.
pub const LAZY_REFCOUNTS: u64 = 1;
/// Bit of [`Features::autoclear`]: the bitmaps are consistent with the disk.
pub const BITMAPS: u64 = 1;
/// Bit of [`Features::autoclear`]: the external data file is a raw image by itself.
pub const RAW_EXTERNAL_DATA: u64 = 1 << 1;

/// All incompatible bits of the specification.
const KNOWN_INCOMPATIBLE: u64 = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2;

/// Length of an entry of the feature name table in bytes.
const ENTRY_BYTES: usize = 48;

/// The three masks of feature bits. All are zero in version 2.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Features {
    /// A program that does not know one of these must not open the image.
    pub incompatible: u64,
    /// A program may ignore these.
    pub compatible: u64,
    /// A program that does not know one of these must clear it before it writes.
    pub autoclear: u64,
}

impl Features {
    /// Whether all incompatible bits of `mask` are set.
    pub fn has(self, mask: u64) -> bool {
        self.incompatible & mask == mask
    }

    /// The incompatible bits that the specification does not have.
    pub fn unknown_incompatible(self) -> u64 {
        self.incompatible & !KNOWN_INCOMPATIBLE
    }
}

/// Which mask a bit belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FeatureKind {
    /// [`Features::incompatible`].
    Incompatible,
    /// [`Features::compatible`].
    Compatible,
    /// [`Features::autoclear`].
    Autoclear,
}

/// An entry of the feature name table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureName {
    /// The mask.
    pub kind: FeatureKind,
    /// The bit in the mask, 0 to 63.
    pub bit: u8,
    /// The name.
    pub name: String,
}

/// Parses the data of the feature name table. Entries of an unknown kind or bit are left out, so
/// the result has at most one entry for each of the 192 bits: the first.
pub fn parse_names(data: &[u8]) -> Vec<FeatureName> {
    let mut names: Vec<FeatureName> = Vec::new();
    for entry in data.chunks_exact(ENTRY_BYTES) {
        let kind = match entry[0] {
            0 => FeatureKind::Incompatible,
            1 => FeatureKind::Compatible,
            2 => FeatureKind::Autoclear,
            _ => continue,
        };
        let bit = entry[1];
        if bit < 64 && !names.iter().any(|name| (name.kind, name.bit) == (kind, bit)) {
            let end = entry[2..].iter().position(|&byte| byte == 0).unwrap_or(ENTRY_BYTES - 2);
            names.push(FeatureName { kind, bit, name: text(&entry[2..2 + end]) });
        }
    }
    names
}

/// Names of the incompatible bits of `mask`, for messages: "bit 7 (subpixels)".
pub fn describe_incompatible(mask: u64, names: &[FeatureName]) -> String {
    let bits = (0..64).filter(|bit| mask >> bit & 1 == 1);
    let named = |bit: u8| {
        let entry = names.iter().find(|name| (name.kind, name.bit) == (FeatureKind::Incompatible, bit));
        match entry {
            Some(entry) => format!("bit {bit} ({})", entry.name.escape_debug()),
            None => format!("bit {bit} (the image has no name for it)"),
        }
    };
    bits.map(named).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: u8, bit: u8, name: &[u8]) -> Vec<u8> {
        let mut bytes = vec![kind, bit];
        bytes.extend(name);
        bytes.resize(ENTRY_BYTES, 0);
        bytes
    }

    #[test]
    fn unknown_bits_are_told_by_the_names_in_the_image() {
        let table =
            [entry(0, 7, b"subpixels"), entry(0, 7, b"other"), entry(9, 1, b"x"), entry(0, 64, b"x"), vec![0; 9]];
        let names = parse_names(&table.concat());
        assert_eq!(names.len(), 1);
        let features = Features { incompatible: DIRTY | 1 << 7 | 1 << 63, ..Features::default() };
        assert_eq!(
            describe_incompatible(features.unknown_incompatible(), &names),
            "bit 7 (subpixels), bit 63 (the image has no name for it)"
        );
    }

    #[test]
    fn a_name_may_fill_its_entry() {
        assert_eq!(parse_names(&entry(2, 0, &[b'a'; 46]))[0].name, "a".repeat(46));
    }
}
