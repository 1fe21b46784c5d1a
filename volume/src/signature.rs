//! What lies in a volume: the signatures that `wipefs` looks for, and which reader is asked.
//!
//! All signatures are looked for, and only one may be there. A file system that was made over
//! another one can leave the other's signature behind. Then it is unknown which map is valid. Kinds
//! without a reader are known by name only, so that the reason names them, and so that a second
//! signature beside a known one is noticed.

use crate::{
    btrfs, exfat, ext, fat,
    identity::{BTRFS, Identity, LVM, SWAP},
    lvm, ntfs,
    read::Window,
    reason::{LeftAlone, ReasonKind, Stop},
    sink::Sink,
    swap, table, xfs,
};

/// Kind of a volume's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Ext,
    Ntfs,
    Xfs,
    Fat,
    ExFat,
    Swap,
    Btrfs,
    Lvm,
    /// Known by name only.
    Named(&'static str),
    /// Encrypted, known by name only.
    Encrypted(&'static str),
}

impl Kind {
    /// Name of the family.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext => "ext2/3/4",
            Self::Ntfs => "NTFS",
            Self::Xfs => "XFS",
            Self::Fat => "FAT",
            Self::ExFat => "exFAT",
            Self::Swap => SWAP,
            Self::Btrfs => BTRFS,
            Self::Lvm => LVM,
            Self::Named(name) | Self::Encrypted(name) => name,
        }
    }
}

/// A signature: bytes at an offset from the volume's beginning that identify its contents.
struct Magic {
    kind: Kind,
    offset_bytes: u64,
    bytes: &'static [u8],
}

const fn magic(kind: Kind, offset_bytes: u64, bytes: &'static [u8]) -> Magic {
    Magic { kind, offset_bytes, bytes }
}

const INNER_GPT: Kind = Kind::Named("a GPT");
const INNER_MBR: Kind = Kind::Named("an MBR");
/// Partition tables, which a whole disk may have.
pub(crate) const INNER_TABLES: [Kind; 2] = [INNER_GPT, INNER_MBR];
const RAID: Kind = Kind::Named("Linux RAID member");

/// Signatures at fixed offsets.
const MAGICS: &[Magic] = &[
    magic(Kind::Ext, 0x438, b"\x53\xef"),
    magic(Kind::Ntfs, 3, b"NTFS    "),
    magic(Kind::Xfs, 0, b"XFSB"),
    magic(Kind::ExFat, 3, b"EXFAT   "),
    magic(Kind::Btrfs, 0x10040, b"_BHRfS_M"),
    magic(Kind::Encrypted("LUKS"), 0, b"LUKS\xba\xbe"),
    magic(Kind::Encrypted("LUKS"), 0x4000, b"SKUL\xba\xbe"),
    magic(Kind::Encrypted("LUKS"), 0x8000, b"SKUL\xba\xbe"),
    magic(Kind::Encrypted("BitLocker"), 3, b"-FVE-FS-"),
    // BitLocker To Go: a boot sector of FAT32 with BitLocker's id in it.
    magic(Kind::Encrypted("BitLocker"), 424, b"\x3b\xd6\x67\x49\x29\x2e\xd8\x4a\x83\x99\xf6\xa3\x39\xe3\xd0\x01"),
    magic(Kind::Named("ReFS"), 3, b"ReFS\0\0\0\0"),
    magic(RAID, 0, b"\xfc\x4e\x2b\xa9"),
    magic(RAID, 4096, b"\xfc\x4e\x2b\xa9"),
    magic(Kind::Named("bcache"), 0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    magic(Kind::Named("bcachefs"), 0x1018, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    magic(Kind::Named("F2FS"), 0x400, b"\x10\x20\xf5\xf2"),
    magic(Kind::Named("EROFS"), 0x400, b"\xe2\xe1\xf5\xe0"),
    magic(Kind::Named("squashfs"), 0, b"hsqs"),
    magic(Kind::Named("HFS+"), 0x400, b"H+\0\x04"),
    magic(Kind::Named("HFS+"), 0x400, b"HX\0\x05"),
    magic(Kind::Named("APFS"), 32, b"NXSB"),
    magic(Kind::Named("ISO 9660"), 0x8001, b"CD001"),
    magic(Kind::Named("UDF"), 0x8001, b"BEA01"),
    magic(Kind::Named("UDF"), 0x8001, b"NSR0"),
    magic(Kind::Named("JFS"), 0x8000, b"JFS1"),
    magic(Kind::Named("ReiserFS"), 0x10034, b"ReIsEr"),
    magic(Kind::Named("NILFS2"), 0x400, b"\x02\0\0\0\0\0\x34\x34"),
    magic(Kind::Named("GFS2"), 0x10000, b"\x01\x16\x19\x70"),
    magic(Kind::Named("OCFS2"), 0x2000, b"OCFSV2"),
    magic(Kind::Named("VMFS"), 0x20_0000, b"\x5e\xf1\xab\x2f"),
    magic(Kind::Named("VMFS volume member"), 0x10_0000, b"\x0d\xd0\x01\xc0"),
    magic(Kind::Named("Ceph BlueStore"), 0, b"bluestore block device"),
    magic(Kind::Named("VDO"), 0, b"dmvdo001"),
    magic(Kind::Named("dm-integrity"), 0, b"integrt\0"),
    magic(Kind::Named("dm-verity"), 0, b"verity\0\0"),
    magic(Kind::Named("Stratis"), 512, b"!Stra0tis\x86\xff\x02^\x41rh"),
    magic(Kind::Named("Storage Spaces"), 0, b"SPACEDB "),
    magic(Kind::Named("Storage Spaces"), 4096, b"SPACEDB "),
    magic(INNER_GPT, 512, b"EFI PART"),
    magic(INNER_GPT, 4096, b"EFI PART"),
];

/// Offsets of the four labels of ZFS are two at each end; each holds uberblocks from 128 KiB on.
const ZFS_UBERBLOCK: [u8; 8] = [0x0c, 0xb1, 0xba, 0x00, 0, 0, 0, 0];

/// All kinds whose signature is in the volume, each once.
pub(crate) fn find(window: &Window<'_>) -> Vec<Kind> {
    let mut found = Vec::new();
    let mut add = |kind: Kind| {
        if !found.contains(&kind) {
            found.push(kind);
        }
    };
    for magic in MAGICS {
        let mut bytes = [0; 32];
        let bytes = &mut bytes[..magic.bytes.len()];
        if window.read(magic.offset_bytes, bytes).is_ok() && bytes == magic.bytes {
            add(magic.kind);
        }
    }
    for (is_there, kind) in [
        (fat::find(window), Kind::Fat),
        (swap::find(window), Kind::Swap),
        (lvm::find(window), Kind::Lvm),
        (table::has_mbr(window), INNER_MBR),
        (has_raid_at_the_end(window), RAID),
        (has_zfs_label(window), Kind::Named("ZFS member")),
    ] {
        if is_there {
            add(kind);
        }
    }
    found
}

/// Superblocks of MD RAID of the versions 0.90 and 1.0, which lie near the end.
fn has_raid_at_the_end(window: &Window<'_>) -> bool {
    let size_bytes = window.size_bytes();
    let old = (size_bytes & !0xffff).checked_sub(0x1_0000);
    let new = size_bytes.checked_sub(0x2000).map(|at| at & !0xfff);
    let is_magic = |at: Option<u64>| {
        at.and_then(|at| window.array(at)).is_some_and(|bytes: [u8; 4]| {
            bytes == 0xa92b_4efc_u32.to_le_bytes() || bytes == 0xa92b_4efc_u32.to_be_bytes()
        })
    };
    is_magic(old) || is_magic(new)
}

/// Any uberblock of the first two labels of ZFS.
fn has_zfs_label(window: &Window<'_>) -> bool {
    [0x2_0000_u64, 0x6_0000].iter().any(|label| {
        (0..128_u64).any(|slot| {
            window.array(label + slot * 1024).is_some_and(|bytes: [u8; 8]| {
                let mut swapped = bytes;
                swapped.reverse();
                bytes == ZFS_UBERBLOCK || swapped == ZFS_UBERBLOCK
            })
        })
    })
}

/// Name, label and UUID of the contents. Fields that cannot be read are left out.
pub(crate) fn identify(window: &Window<'_>, kind: Kind) -> Identity {
    let identity = match kind {
        Kind::Ext => ext::identify(window),
        Kind::Ntfs => ntfs::identify(window),
        Kind::Xfs => xfs::identify(window),
        Kind::Fat => fat::identify(window),
        Kind::ExFat => exfat::identify(window),
        Kind::Swap => swap::identify(window),
        Kind::Btrfs => btrfs::identify(window),
        Kind::Lvm => Some(Identity { name: LVM, label: None, uuid: lvm::uuid(window) }),
        Kind::Named(_) | Kind::Encrypted(_) => None,
    };
    identity.unwrap_or(Identity::named(kind.name()))
}

/// First byte after the contents of a volume of this kind. The volume's map was read and is
/// trusted.
pub(crate) fn end_bytes(window: &Window<'_>, kind: Kind) -> Result<u64, LeftAlone> {
    match kind {
        Kind::Ext => ext::end_bytes(window),
        Kind::Ntfs => ntfs::end_bytes(window),
        Kind::Xfs => xfs::end_bytes(window),
        Kind::Fat => fat::end_bytes(window),
        Kind::ExFat => exfat::end_bytes(window),
        Kind::Swap => swap::end_bytes(window),
        Kind::Btrfs => btrfs::end_bytes(window),
        Kind::Lvm => lvm::end_bytes(window),
        Kind::Named(name) | Kind::Encrypted(name) => {
            Err(LeftAlone::new(ReasonKind::Unknown, format!("{name}: where it ends is not known")))
        }
    }
}

/// Sends the free ranges of a volume of this kind to `sink`.
pub(crate) fn scan(window: &Window<'_>, kind: Kind, sink: &mut Sink<'_>) -> Result<(), Stop> {
    match kind {
        Kind::Ext => ext::scan(window, sink),
        Kind::Ntfs => ntfs::scan(window, sink),
        Kind::Xfs => xfs::scan(window, sink),
        Kind::Fat => fat::scan(window, sink),
        Kind::ExFat => exfat::scan(window, sink),
        Kind::Swap => swap::scan(window, sink),
        Kind::Btrfs => btrfs::scan(window, sink),
        // What is free in logical volumes is theirs; the rest counts as used.
        Kind::Lvm => Ok(()),
        Kind::Encrypted(name) => {
            Err(LeftAlone::new(ReasonKind::Encrypted, format!("{name}: encrypted, so its free space cannot be seen"))
                .into())
        }
        Kind::Named(name) => Err(LeftAlone::unsupported(name).into()),
    }
}
