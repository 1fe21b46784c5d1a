//! A kind of disk as a value: its format, what it lies on, how it changes, and what its user may
//! rely on. The other files say what is done with it.

use crate::{
    contents::Contents,
    ledger::{Ledger, Version, Window},
    rule_breaker::BrokenRule,
};
use diskwright_image::{DiskType, Format};
use std::sync::Arc;
use uuid::Uuid;

/// Damage that exists before a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// A VHD's copy of the footer is overwritten.
    FooterCopy,
    /// The length of a raw file is not a multiple of a sector.
    PartialSector,
}

/// A kind of disk, and how it is tested.
#[derive(Debug, Clone)]
pub struct DiskCase {
    /// Name for messages.
    pub name: &'static str,
    /// Its format.
    pub format: Format,
    /// Its type.
    pub disk_type: DiskType,
    /// Size of a payload block; `None` if the format has no blocks.
    pub block_bytes: Option<u32>,
    /// The kind of image within the format; `None` for the default.
    pub subformat: Option<&'static str>,
    /// Logical sector size.
    pub sector_bytes: u32,
    /// Virtual size. A disk that grows is smaller at first.
    pub size_bytes: u64,
    /// The watched ranges. Whole blocks are best.
    pub windows: Vec<Window>,
    /// Use only writes in multiples of 8 sectors, which libvhdi reads correctly.
    pub libvhdi_safe: bool,
    /// Long sessions in which blocks are freed and reused.
    pub churns: bool,
    /// Damage that exists before a run.
    pub damage: Option<Damage>,
    /// What the disk lies on.
    pub backing: Backing,
    /// How the disk changes while it is in use.
    pub changes: Changes,
    /// Whether the whole disk is discarded now and then, which the disk does in stages.
    pub sweeps: bool,
    /// The interface for writing sessions: the disk's queue or a server.
    pub front: Front,
    /// Steps of a run.
    pub steps: u64,
    /// The rule that is broken between the disk and its image.
    pub broken_rule: Option<BrokenRule>,
}

/// State of the files when a session begins.
#[derive(Debug)]
pub struct SessionStart {
    /// Number of the top image, see [`DiskCase::path_of`].
    pub(super) top: u32,
    pub(super) file: Contents,
    pub(super) file_write_id: Option<Uuid>,
    pub(super) linkage_id: Option<diskwright_image::LinkageId>,
    pub(super) visible: Vec<Version>,
}

impl SessionStart {
    /// Without the identities: if not all visible data is durable, a cut may leave an earlier state
    /// whose identities are not known here.
    pub(super) fn without_identities(self) -> Self {
        Self { file_write_id: None, linkage_id: None, ..self }
    }
}

/// What the user of a disk may rely on.
#[derive(Debug, Clone)]
pub struct DiskTruth {
    pub(super) ledger: Ledger,
    pub(super) session: Arc<SessionStart>,
    pub(super) changed: Changed,
}

/// What a disk lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// One file, and perhaps a parent.
    File,
    /// A store that answers late. It needs io_uring.
    Late,
    /// Several files with these lengths in bytes.
    Parts(&'static [u64]),
    /// The made-up format.
    Packed,
    /// Files that qemu-img makes.
    ByQemu(ByQemu),
}

/// What qemu-img makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByQemu {
    /// An image with one internal snapshot, which has all data of the disk at first.
    Snapshot,
    /// An image whose clusters lie in an external data file.
    DataFile,
    /// An image with extended L2 entries: its blocks are the 32 subclusters of each cluster.
    Subclusters,
}

/// How a disk changes while it is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changes {
    /// The disk does not change.
    None,
    /// Images are added on top.
    Snapshots,
    /// The disk is frozen and goes on in a new child that has its name.
    FrozenInUse,
    /// As [`Changes::FrozenInUse`], and merged into its parent while it is in use.
    AbsorbedInUse,
    /// As [`Changes::FrozenInUse`], and frozen images are merged.
    MergedInUse,
    /// The disk grows from this size to its `size_bytes`.
    Grows {
        /// Virtual size at the start, in bytes.
        from_bytes: u64,
    },
    /// The link to the parent changes.
    Relinks,
    /// The disk is compacted.
    CompactedInUse,
}

impl Changes {
    /// Whether the disk is frozen while it is in use, and keeps its name.
    pub(crate) fn freezes_in_use(self) -> bool {
        matches!(self, Self::FrozenInUse | Self::AbsorbedInUse | Self::MergedInUse)
    }
}

/// The interface through which a disk is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Front {
    /// The disk's own queue.
    Queue,
    /// An NBD server with one worker, and our own client.
    Nbd,
    /// An NVMe/TCP target with one worker, and our own host, with both digests.
    Nvme,
    /// An iSCSI target with one worker, and our own initiator, with both digests.
    Iscsi,
    /// A vhost-user device with one virtqueue, and the test front-end.
    VhostUser,
}

/// How a disk has changed so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Changed {
    /// Number of the image that is certainly the top: the number of images that were added.
    pub top: u32,
    /// Number of an image that may exist already, without contents.
    pub next_top: u32,
    /// The durable size in bytes.
    pub size_bytes: u64,
    /// The size that the disk may have already, in bytes.
    pub next_size_bytes: u64,
    /// Number of the durable link to the parent: 0 for the first one.
    pub link: u32,
    /// Number of the link that the disk may have already.
    pub next_link: u32,
}
