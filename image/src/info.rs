//! What is known of an open image: its format and type, its sizes and identities, its link to a
//! parent.
//!
//! The description is as of the open and never changes, so it is read without a lock. What changes
//! while the image is open (size, identity, link) is asked of the image: `Image::size_bytes`
//! and the like.

use crate::{devices::PHYSICAL_MAPPING, identity::LinkageId};
use diskwright_store::Files;
use std::{fmt, path::Path};
use uuid::Uuid;

/// The format of an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// The bytes of the disk, without any metadata.
    Raw,
    /// VHD, as in the Virtual Hard Disk Image Format Specification 1.0.
    Vhd,
    /// VHDX, as in MS-VHDX.
    Vhdx,
    /// qcow2, as in QEMU's specification.
    Qcow2,
    /// VDI, VirtualBox's format.
    Vdi,
    /// VMDK, as in VMware's Virtual Disk Format 5.0.
    Vmdk,
}

impl Format {
    /// All formats, in the order in which they are listed.
    pub const ALL: &'static [Self] = &[Self::Raw, Self::Vhd, Self::Vhdx, Self::Vmdk, Self::Qcow2, Self::Vdi];
}

/// How an image allocates space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskType {
    /// All blocks have space from the start.
    Fixed,
    /// A block gets space on its first write.
    Dynamic,
    /// A block gets space on its first write. Sectors that were never written read the parent's
    /// data.
    Differencing,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.driver().name)
    }
}

impl fmt::Display for DiskType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DiskType::Fixed => "fixed",
            DiskType::Dynamic => "dynamic",
            DiskType::Differencing => "differencing",
        })
    }
}

/// State of a VHDX log when the image was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogState {
    /// The format has no log.
    None,
    /// The log is empty.
    Clean,
    /// Entries were replayed: in memory for a read-only open, on disk for a writable one.
    Replayed {
        /// Number of log entries that were applied.
        entries: u32,
    },
}

/// How a child names its parent, as stored in the child. Paths are not converted: they contain the
/// backslashes that the file has. An empty path counts as no path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParentLink {
    /// Path relative to the child's folder (`relative_path`; W2ru).
    pub relative_path: Option<String>,
    /// Path with a volume GUID (`volume_path`).
    pub volume_path: Option<String>,
    /// Absolute path (`absolute_win32_path`; W2ku).
    pub absolute_path: Option<String>,
    /// File name of the parent (VHD header).
    pub name: Option<String>,
    /// VDI: the id of the parent's file (`uuidLinkage`), by which the parent is found. Other
    /// contents of that file ([`ParentLink::linkage`]) do not prove that it is not the parent:
    /// VirtualBox keeps the former id when it merges a snapshot.
    pub file_id: Option<Uuid>,
    /// The identity that the parent must have. VHDX: `parent_linkage`, the parent's DataWriteGuid.
    /// VHD: the parent's unique id. VMDK: `parentCID`. VDI: `uuidParentModify`. `None` where the
    /// format records only the parent's path: then any file at that path is the parent.
    pub linkage: Option<LinkageId>,
    /// A second identity that is accepted, which a merge records (VHDX `parent_linkage2`).
    pub linkage2: Option<LinkageId>,
    /// The format of the parent; `None` for the format of the child.
    pub format: Option<Format>,
    /// qcow2: the parent has all data of this image, which is only to be removed. Formats with
    /// identities record that by them.
    pub is_merged: bool,
    /// VHD: modification time of the parent, seconds since 2000-01-01 00:00 UTC.
    pub modified_seconds: Option<u32>,
    /// VHD: file offset of `modified_seconds` in the child. Set when read, ignored when creating.
    pub modified_offset_bytes: Option<u64>,
}

impl ParentLink {
    /// Whether a path that an image names is complete by itself: one of Unix or Windows from the
    /// root, one with a drive letter, or a name with a scheme (`s3://`).
    pub fn is_absolute(path: &str) -> bool {
        path.starts_with(['/', '\\']) || path.as_bytes().get(1) == Some(&b':') || Files::has_scheme(Path::new(path))
    }

    /// Whether an image with this identity is the parent.
    pub fn accepts(&self, found: Option<LinkageId>) -> bool {
        self.linkage.is_none() || found.is_some() && (found == self.linkage || found == self.linkage2)
    }

    /// Whether the link means an image with these ids: that of its file (`disk_id`), which alone
    /// decides where the child records it, and that of its contents.
    pub fn names(&self, disk_id: Option<Uuid>, linkage: Option<LinkageId>) -> bool {
        if self.file_id.is_some() { self.file_id == disk_id } else { self.accepts(linkage) }
    }

    /// Whether a path or the name contains the character NUL, which ends a string for many readers.
    pub(crate) fn has_nul(&self) -> bool {
        let texts = [&self.relative_path, &self.volume_path, &self.absolute_path, &self.name];
        texts.into_iter().flatten().any(|text| text.contains('\0'))
    }
}

/// Description of an image. Does not change while the image is open.
#[derive(Debug, Clone)]
pub struct ImageInfo {
    /// The format that the file was opened as.
    pub format: Format,
    /// How the image allocates space.
    pub disk_type: DiskType,
    /// Virtual size in bytes when the image was opened. The current size is `Image::size_bytes`.
    pub size_bytes: u64,
    /// Size of a payload block in bytes. Raw disks and fixed VHDs have no blocks: there it is a
    /// power of two by which the disk's map is cut.
    pub block_bytes: u64,
    /// Whether `block_bytes` is stored in the file (false for raw and fixed VHD).
    pub has_blocks: bool,
    /// Logical sector of the virtual disk, in bytes.
    pub logical_sector_bytes: u32,
    /// Physical sector of the virtual disk, in bytes.
    pub physical_sector_bytes: u32,
    /// The program that created the file. Empty for raw and VMDK.
    pub creator: String,
    /// The kind of image within the format, as the file spells it (VMDK: `monolithicSparse`).
    pub subformat: Option<String>,
    /// VHD unique id; VHDX virtual disk id (page 83 data); VDI `uuidCreate`.
    pub disk_id: Option<Uuid>,
    /// The identity by which children refer to this image, as of the open: VHD unique id, VHDX
    /// DataWriteGuid, VMDK CID, VDI `uuidModify`. The current identity is `Image::linkage_id`.
    pub linkage_id: Option<LinkageId>,
    /// VHDX FileWriteGuid as of the open: it changes when the file is written.
    pub file_write_id: Option<Uuid>,
    /// VHD: creation time stamp of the footer, seconds since 2000-01-01.
    pub created_seconds: Option<u32>,
    /// Link to the parent as of the open; `None` unless the image is differencing. The current link
    /// is `Image::parent_link`.
    pub parent: Option<ParentLink>,
    /// State of the log when opened.
    pub log: LogState,
    /// Largest power of two, at most 1 MiB, that divides the file offset of all existing and future
    /// payload. O_DIRECT needs at least the device's alignment.
    pub payload_alignment_bytes: u32,
    /// Peculiarities that the user should know, one sentence each: a short footer, a damaged
    /// structure whose copy was used, a missing tail ...
    pub remarks: Vec<String>,
    /// Those of the remarks after which a read may return something else than the disk's data: the
    /// structures say two things about the size or the parent. Every open of a chain warns of them.
    pub doubts: Vec<String>,
    /// The internal snapshot that is opened in place of the image's disk, as it was asked for.
    pub snapshot: Option<String>,
}

impl ImageInfo {
    /// An image in blocks of `block_bytes`, with sectors of 512 bytes and payload at any of them,
    /// and without anything else: no creator, identity, parent, log, remark. A format adds what it
    /// knows: `ImageInfo { parent, ..ImageInfo::new(...) }`.
    pub fn new(format: Format, disk_type: DiskType, size_bytes: u64, block_bytes: u64) -> Self {
        Self {
            format,
            disk_type,
            size_bytes,
            block_bytes,
            has_blocks: true,
            logical_sector_bytes: 512,
            physical_sector_bytes: 512,
            creator: String::new(),
            subformat: None,
            disk_id: None,
            linkage_id: None,
            file_write_id: None,
            created_seconds: None,
            parent: None,
            log: LogState::None,
            payload_alignment_bytes: 512,
            remarks: Vec::new(),
            doubts: Vec::new(),
            snapshot: None,
        }
    }

    /// Why no image may have this one as its parent; `None` if it may.
    pub fn refusal_as_parent(&self) -> Option<&'static str> {
        let is_physical = self.subformat.as_ref().is_some_and(|kind| kind.eq_ignore_ascii_case(PHYSICAL_MAPPING));
        is_physical.then_some("it maps a device in physical compatibility, which excludes snapshots and children")
    }
}
