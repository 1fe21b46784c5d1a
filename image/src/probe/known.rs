//! The table of formats that are recognised: one row for each format.
//!
//! A row lists the signatures of the format and their offsets, the file extensions of the format,
//! and whether this program opens it. A new format is one more row. Formats that this program
//! cannot open are listed so that their files are refused by name: opened as a raw disk, such a
//! file would be destroyed by the first write.
//!
//! Raw has a row without signatures: a raw disk can contain anything.
//!
//! The table lists only disk containers and compressed files. A file system, a partition table or
//! LUKS at the start of a file is the content of a raw disk, not a format.

use crate::Format;
use diskwright_store::Files;
use std::path::Path;

/// Bytes at the start of a file that are searched for signatures.
pub(crate) const FRONT_BYTES: usize = 512;
/// Bytes at the end of a file that are searched for signatures.
pub(crate) const BACK_BYTES: usize = 512;

/// A format that is recognised.
#[derive(Debug, PartialEq, Eq)]
pub struct Known {
    /// Name as users write it: "qcow2".
    pub name: &'static str,
    /// The format to open; `None` if this program cannot open it.
    pub format: Option<Format>,
    /// File extensions of the format, in lower case.
    pub extensions: &'static [&'static str],
    /// Any one of these is enough. Empty for raw.
    signatures: &'static [Signature],
}

/// Bytes at a place of the file.
#[derive(Debug, PartialEq, Eq)]
struct Signature {
    place: Place,
    bytes: &'static [u8],
    /// Bytes at the same place that indicate another format.
    but_not: Option<&'static [u8]>,
}

/// Where a signature begins.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Bytes from the start of the file.
    Front(usize),
    /// Bytes before the end of the file.
    Back(usize),
}

const fn front(offset_bytes: usize, bytes: &'static [u8]) -> Signature {
    Signature { place: Place::Front(offset_bytes), bytes, but_not: None }
}

const fn front_but_not(bytes: &'static [u8], but_not: &'static [u8]) -> Signature {
    Signature { place: Place::Front(0), bytes, but_not: Some(but_not) }
}

const fn back(before_end_bytes: usize, bytes: &'static [u8]) -> Signature {
    Signature { place: Place::Back(before_end_bytes), bytes, but_not: None }
}

const fn ours(
    name: &'static str,
    format: Format,
    extensions: &'static [&'static str],
    signatures: &'static [Signature],
) -> Known {
    Known { name, format: Some(format), extensions, signatures }
}

const fn foreign(name: &'static str, extensions: &'static [&'static str], signatures: &'static [Signature]) -> Known {
    Known { name, format: None, extensions, signatures }
}

/// Magic and version 1. qcow2 has the same magic, but version 2 or 3.
const QCOW_1: &[u8] = b"QFI\xfb\0\0\0\x01";

/// All recognised formats. A file can match several rows; all matches count (see `probe`).
pub(crate) static KNOWN: &[Known] = &[
    ours("raw", Format::Raw, &["raw"], &[]),
    ours("vhdx", Format::Vhdx, &["vhdx", "avhdx"], &[front(0, b"vhdxfile")]),
    // A footer has 512 bytes, or 511 if Virtual PC before 2004 wrote it. All types but fixed also
    // have a copy of the footer at offset 0.
    ours(
        "vhd",
        Format::Vhd,
        &["vhd", "avhd"],
        &[front(0, b"conectix"), back(512, b"conectix"), back(511, b"conectix")],
    ),
    foreign("qcow", &["qcow"], &[front(0, QCOW_1)]),
    ours("qcow2", Format::Qcow2, &["qcow2"], &[front_but_not(b"QFI\xfb", QCOW_1)]),
    ours(
        "vmdk",
        Format::Vmdk,
        &["vmdk"],
        &[
            front(0, b"KDMV"),
            front(0, b"COWD"),
            front(0, b"# Disk DescriptorFile"),
            front(0, &[0xbe, 0xba, 0xfe, 0xca, 0, 0, 0, 0]),
        ],
    ),
    ours("vdi", Format::Vdi, &["vdi"], &[front(0x40, &[0x7f, 0x10, 0xda, 0xbe])]),
    foreign("qed", &["qed"], &[front(0, b"QED\0")]),
    foreign("parallels", &["hdd", "hds"], &[front(0, b"WithoutFreeSpace"), front(0, b"WithouFreSpacExt")]),
    foreign("bochs", &[], &[front(0, b"Bochs Virtual HD Image")]),
    foreign("cloop", &["cloop"], &[front(0, b"#!/bin/sh\n#V2.0 Format\n")]),
    foreign("dmg", &["dmg"], &[back(512, b"koly")]),
    foreign("ewf", &["e01", "ex01"], &[front(0, b"EVF\x09\x0d\x0a\xff\0"), front(0, b"EVF2\x0d\x0a\x81\0")]),
    foreign("android sparse", &["simg"], &[front(0, &[0x3a, 0xff, 0x26, 0xed])]),
    // An archive with disks inside: the disk crate opens those.
    foreign("ova", &["ova"], &[]),
    foreign("gzip", &["gz"], &[front(0, &[0x1f, 0x8b, 0x08])]),
    foreign("xz", &["xz"], &[front(0, b"\xfd7zXZ\0")]),
    foreign("zstd", &["zst", "zstd"], &[front(0, &[0x28, 0xb5, 0x2f, 0xfd])]),
    foreign("bzip2", &["bz2"], &[front(4, b"1AY&SY")]),
    foreign("lz4", &["lz4"], &[front(0, &[0x04, 0x22, 0x4d, 0x18])]),
    foreign("7z", &["7z"], &[front(0, b"7z\xbc\xaf\x27\x1c")]),
    foreign("zip", &["zip"], &[front(0, b"PK\x03\x04")]),
];

/// The format that the extension of a path indicates, in any case of letters. `None` for `.img`,
/// `.bin`, an unknown extension or none.
pub fn by_extension(path: &Path) -> Option<&'static Known> {
    let known = |path: &Path| {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        KNOWN.iter().find(|known| known.extensions.contains(&extension.as_str()))
    };
    known(path).or_else(|| known(Files::without_options(path)?))
}

/// The formats whose signatures are in a file. `front` and `back` are its first and last bytes, as
/// many as were read.
pub(crate) fn recognised(front: &[u8], back: &[u8]) -> Vec<&'static Known> {
    KNOWN.iter().filter(|known| known.signatures.iter().any(|signature| signature.is_in(front, back))).collect()
}

impl Signature {
    fn is_in(&self, front: &[u8], back: &[u8]) -> bool {
        let found = match self.place {
            Place::Front(offset_bytes) => front.get(offset_bytes..),
            Place::Back(before_end_bytes) => back.len().checked_sub(before_end_bytes).map(|start| &back[start..]),
        };
        found.is_some_and(|bytes| {
            bytes.starts_with(self.bytes) && !self.but_not.is_some_and(|other| bytes.starts_with(other))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_format_is_recognised_by_each_of_its_signatures_and_extensions() {
        let mut extensions = HashSet::new();
        for known in KNOWN {
            for &extension in known.extensions {
                assert_eq!(by_extension(Path::new(&format!("a.{}", extension.to_uppercase()))), Some(known));
                assert!(extensions.insert(extension), "{extension} belongs to two formats");
            }
            for signature in known.signatures {
                let (mut front, mut back) = ([0; FRONT_BYTES], [0; BACK_BYTES]);
                let place = match signature.place {
                    Place::Front(offset_bytes) => &mut front[offset_bytes..],
                    Place::Back(before_end_bytes) => &mut back[BACK_BYTES - before_end_bytes..],
                };
                place[..signature.bytes.len()].copy_from_slice(signature.bytes);
                assert_eq!(recognised(&front, &back), [known], "{}", known.name);
            }
        }
        for name in ["a.img", "a.bin", "a.dd", "a", "vhdx", ".vhd"] {
            assert_eq!(by_extension(Path::new(name)), None, "{name}");
        }
    }

    #[test]
    fn short_files_are_accepted() {
        for len in 0..FRONT_BYTES {
            assert!(recognised(&vec![0; len], &vec![0; len]).is_empty());
        }
        assert_eq!(recognised(b"conectix", b"conectix").len(), 1);
    }
}
