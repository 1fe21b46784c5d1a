//! Identifies what a disk holds by signatures in its first bytes: file systems, partition tables,
//! images.
//!
//! Only the words of an error depend on this module, never whether a target may be overwritten: a
//! disk without a known signature may hold data too.

/// Number of first bytes that are examined.
pub const FRONT_BYTES: usize = 132 << 10;

/// Signatures: offset, bytes, meaning. The first match counts, so specific signatures come before
/// general ones.
const MARKS: &[(usize, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "a LUKS encrypted volume"),
    (0, b"XFSB", "an XFS file system"),
    (0x10040, b"_BHRfS_M", "a btrfs file system"),
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"ReFS", "a ReFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (82, b"FAT32   ", "a FAT32 file system"),
    (54, b"FAT16   ", "a FAT16 file system"),
    (54, b"FAT12   ", "a FAT12 file system"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (0x10034, b"ReIsEr", "a ReiserFS file system"),
    (32769, b"CD001", "an ISO 9660 file system"),
    (0, b"hsqs", "a SquashFS file system"),
    (32, b"NXSB", "an APFS container"),
    (1024, b"H+", "an HFS+ file system"),
    (4086, b"SWAPSPACE2", "swap space"),
    (512, b"LABELONE", "an LVM physical volume"),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of a Linux software RAID"),
    (0, b"\xfc\x4e\x2b\xa9", "a member of a Linux software RAID"),
    (0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "a bcache device"),
    (0x20000, b"\x0c\xb1\xba\x00", "a member of a ZFS pool"),
    (0, b"bluestore block device", "a Ceph BlueStore"),
    (0, b"QFI\xfb", "a qcow2 image"),
    (0, b"vhdxfile", "a VHDX image"),
    (0, b"conectix", "a VHD image"),
    (0, b"KDMV", "a VMDK image"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
];

/// Offset of the four entries of a master boot record, and their length.
const MBR_ENTRIES: (usize, usize) = (446, 16);

/// What a disk with these first bytes holds; `None` without a known signature.
pub fn identify(front: &[u8]) -> Option<&'static str> {
    let fits = |(at, mark, _): &&(usize, &[u8], &str)| front.get(*at..at + mark.len()) == Some(*mark);
    if let Some((_, _, what)) = MARKS.iter().find(fits) {
        return Some(what);
    }
    // All boot sectors have this signature. A partition table also has an entry with a type.
    let entries = front.get(MBR_ENTRIES.0..MBR_ENTRIES.0 + 4 * MBR_ENTRIES.1)?;
    let has_entry = entries.chunks(MBR_ENTRIES.1).any(|entry| entry[4] != 0);
    (front.get(510..512) == Some(b"\x55\xaa") && has_entry).then_some("a partition table (MBR)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_is_found_where_it_belongs_and_within_what_is_read() {
        for (at, mark, what) in MARKS {
            let mut front = vec![0; FRONT_BYTES];
            front[*at..at + mark.len()].copy_from_slice(mark);
            assert_eq!(identify(&front), Some(*what));
            front[*at] ^= 0xff;
            assert_eq!(identify(&front), None, "{what}");
            // A disk that ends within a signature.
            assert_eq!(identify(&front[..*at]), None, "{what}");
        }
    }

    #[test]
    fn a_boot_sector_without_partitions_is_no_table() {
        let mut front = vec![0; 512];
        (front[510], front[511]) = (0x55, 0xaa);
        assert_eq!(identify(&front), None);
        front[446 + 16 + 4] = 0x83;
        assert_eq!(identify(&front), Some("a partition table (MBR)"));
        assert_eq!(identify(&[]), None);
    }

    #[test]
    fn a_file_system_is_reported_rather_than_the_table_around_it() {
        // A FAT boot sector has the signature of an MBR too.
        let mut front = vec![0xff; 512];
        front[82..90].copy_from_slice(b"FAT32   ");
        (front[510], front[511]) = (0x55, 0xaa);
        assert_eq!(identify(&front), Some("a FAT32 file system"));
    }
}
