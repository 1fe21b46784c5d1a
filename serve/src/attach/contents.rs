//! Detects what a disk or a partition holds, by the signatures that file systems have at fixed
//! offsets (as `blkid` does).
//!
//! Only the first [`PROBE_BYTES`] are read, and only the signature itself is used.

/// Bytes that are needed for the detection.
pub const PROBE_BYTES: usize = 68 << 10;

/// A detected file system or other content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Content {
    /// The type's name in `blkid`.
    pub name: &'static str,
    /// The kernel's name of the file system; `None` if it cannot be mounted.
    pub file_system: Option<&'static str>,
}

struct Mark {
    offset: usize,
    bytes: &'static [u8],
    name: &'static str,
    file_system: Option<&'static str>,
}

const fn mark(offset: usize, bytes: &'static [u8], name: &'static str, file_system: Option<&'static str>) -> Mark {
    Mark { offset, bytes, name, file_system }
}

/// Encrypted and composed volumes come first, because signatures of an older file system may still
/// be on the disk.
const MARKS: [Mark; 22] = [
    mark(0, b"LUKS\xba\xbe", "crypto_LUKS", None),
    mark(3, b"-FVE-FS-", "BitLocker", None),
    mark(0x218, b"LVM2 001", "LVM2_member", None),
    mark(0, b"XFSB", "xfs", Some("xfs")),
    mark(0x438, b"\x53\xef", "ext4", Some("ext4")),
    mark(0x10040, b"_BHRfS_M", "btrfs", Some("btrfs")),
    mark(3, b"NTFS    ", "ntfs", Some("ntfs3")),
    mark(3, b"EXFAT   ", "exfat", Some("exfat")),
    mark(0x52, b"FAT32   ", "vfat", Some("vfat")),
    mark(0x36, b"FAT16   ", "vfat", Some("vfat")),
    mark(0x36, b"FAT12   ", "vfat", Some("vfat")),
    mark(0, b"hsqs", "squashfs", Some("squashfs")),
    mark(0x400, b"\xe2\xe1\xf5\xe0", "erofs", Some("erofs")),
    mark(0x400, b"\x10\x20\xf5\xf2", "f2fs", Some("f2fs")),
    mark(0x400, b"H+\x00\x04", "hfsplus", Some("hfsplus")),
    mark(0x400, b"HX\x00\x05", "hfsplus", Some("hfsplus")),
    mark(0x10034, b"ReIsEr", "reiserfs", Some("reiserfs")),
    mark(0x8000, b"JFS1", "jfs", Some("jfs")),
    mark(0x8001, b"CD001", "iso9660", Some("iso9660")),
    mark(0x8801, b"NSR0", "udf", Some("udf")),
    mark(0xff6, b"SWAPSPACE2", "swap", None),
    mark(0x20, b"NXSB", "apfs", None),
];

/// Feature bits of the ext family: a journal means ext3; extents and similar features mean ext4.
const EXT_COMPATIBLE: usize = 0x45c;
const EXT_INCOMPATIBLE: usize = 0x460;
const EXT_HAS_JOURNAL: u8 = 0x04;
const EXT4_FEATURES: u8 = 0xc0;

/// Detects the content from the beginning of a disk or partition. Pass fewer than [`PROBE_BYTES`]
/// only if the device is smaller.
pub fn content(start: &[u8]) -> Option<Content> {
    let found = MARKS.iter().find(|mark| start.get(mark.offset..).is_some_and(|rest| rest.starts_with(mark.bytes)))?;
    let mut name = found.name;
    if name == "ext4"
        && let (Some(compatible), Some(incompatible)) = (start.get(EXT_COMPATIBLE), start.get(EXT_INCOMPATIBLE))
        && incompatible & EXT4_FEATURES == 0
    {
        name = if compatible & EXT_HAS_JOURNAL != 0 { "ext3" } else { "ext2" };
    }
    Some(Content { name, file_system: found.file_system })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_found_at_their_offsets() {
        for mark in &MARKS {
            let mut start = vec![0; PROBE_BYTES];
            start[mark.offset..][..mark.bytes.len()].copy_from_slice(mark.bytes);
            let found = content(&start).unwrap();
            assert_eq!(found.file_system, mark.file_system, "{}", mark.name);
            if mark.name != "ext4" {
                assert_eq!(found.name, mark.name);
            }
        }
        assert_eq!(content(&vec![0; PROBE_BYTES]), None);
        assert_eq!(content(b"XFS"), None);
    }

    #[test]
    fn the_ext_family() {
        let mut start = vec![0; 4096];
        start[0x438..0x43a].copy_from_slice(b"\x53\xef");
        assert_eq!(content(&start).unwrap().name, "ext2");
        start[EXT_COMPATIBLE] = EXT_HAS_JOURNAL;
        assert_eq!(content(&start).unwrap().name, "ext3");
        start[EXT_INCOMPATIBLE] = 0x40;
        assert_eq!(content(&start).unwrap().name, "ext4");
        assert_eq!(content(&start).unwrap().file_system, Some("ext4"));
    }
}
