//! What a conversion is asked for, and what it has done.

use super::identity::Identity;
use crate::{
    CreateRequest, NewSize, OpenOptions,
    copying::{compare::Damage, copy::LostRanges},
};
use diskwright_store::CacheMode;
use diskwright_volume::TableKind;

/// Options for [`convert`](crate::convert()).
#[derive(Debug, Clone, Default)]
pub struct ConvertOptions {
    /// How to open the source. The destination uses the same I/O engine. The cache mode given here
    /// is ignored; see `cache`.
    pub source: OpenOptions,
    /// Page cache or O_DIRECT for both disks. `None` selects the faster one: O_DIRECT, but the page
    /// cache for a source that is cached there.
    pub cache: Option<CacheMode>,
    /// Properties of the new image. A file with the extension .ova is an OVA: an archive with a
    /// streamOptimized VMDK and the description of a virtual machine. Its size is that of `size`,
    /// and its disk id that of `identity`.
    pub dest: CreateRequest,
    /// The size of the copy. A smaller one ends at or behind the end of the last partition or file
    /// system. The second copy of a GPT moves to the new end.
    pub size: NewSize,
    /// Which identities the copy has.
    pub identity: Identity,
    /// Make a disk that Azure accepts: a fixed VHD whose size is rounded up to whole MiB. What
    /// Azure refuses all the same is an error.
    pub azure: bool,
    /// Level of compression of a streamOptimized VMDK ([`CreateRequest::subformat`]) and of an OVA,
    /// 1 (fastest) to 12 (smallest), or of a qcow2 of the subformat "compressed", 1 to 9; `None`
    /// for 6.
    pub compress_level: Option<u8>,
    /// Read the copy back and compare it with the source.
    pub verify: bool,
    /// Always copy, never share by reflink.
    pub no_reflink: bool,
    /// Skip damaged ranges of the source. They read as zeros in the copy.
    pub skip_damaged: bool,
    /// Go on with a conversion that was interrupted: what the copy, or the export, holds already is
    /// read and compared, and not written again. If this conversion is interrupted, its partial
    /// file stays.
    pub resume: bool,
}

impl ConvertOptions {
    pub(super) fn damage(&self) -> Damage {
        if self.skip_damaged { Damage::SkippedInFirst } else { Damage::Fails }
    }

    /// How the copy is opened.
    pub(super) fn open_dest(&self) -> OpenOptions {
        let cache = self.cache.unwrap_or(CacheMode::Direct);
        let files = self.dest.files.clone();
        OpenOptions { cache, engine: self.source.engine, files, ..OpenOptions::default() }
    }
}

/// What a conversion would do: the result of [`plan_convert`](crate::plan_convert()).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConvertPlan {
    /// Virtual size of the source in bytes.
    pub size_bytes: u64,
    /// Virtual size of the copy in bytes.
    pub dest_bytes: u64,
    /// Kind of the partition table that would be changed for another size; `None` if none would.
    pub table: Option<TableKind>,
    /// Bytes of the source that hold data, which are copied or shared.
    pub data_bytes: u64,
    /// Space that the copy takes, in bytes, if nothing is shared or compressed. 0 for an export.
    pub needed_bytes: u64,
    /// Warnings for the user about the source and the copy, one sentence each.
    pub warnings: Vec<String>,
}

/// The result of a conversion.
#[derive(Debug, Clone, Default)]
pub struct ConvertOutcome {
    /// Virtual size of the source in bytes.
    pub size_bytes: u64,
    /// Virtual size of the copy in bytes.
    pub dest_bytes: u64,
    /// Kind of the partition table that was changed for another size; `None` if none was.
    pub table: Option<TableKind>,
    /// Whether the copy has the disk id of the source.
    pub kept_disk_id: bool,
    /// Whether the children of the source accept the copy as their parent.
    pub kept_linkage_id: bool,
    /// Bytes read and written.
    pub copied_bytes: u64,
    /// Bytes shared by reflink.
    pub cloned_bytes: u64,
    /// Bytes skipped because they read as zeros.
    pub zero_bytes: u64,
    /// Bytes that the copy held already ([`ConvertOptions::resume`]).
    pub held_bytes: u64,
    /// Length in bytes of a file with compressed blocks: a streamOptimized VMDK, an OVA,
    /// a compressed qcow2.
    pub stream_bytes: Option<u64>,
    /// Bytes that were read back and equal the source. Lost ranges do not count.
    pub verified_bytes: u64,
    /// Warnings for the user about the source and the copy, one sentence each.
    pub warnings: Vec<String>,
    /// Damaged ranges of the source, which are zero in the copy. Empty without
    /// [`ConvertOptions::skip_damaged`].
    pub lost: LostRanges,
}
