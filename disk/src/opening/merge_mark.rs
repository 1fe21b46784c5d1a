//! The marks that a merge leaves in the child's link to its parent.
//!
//! ```text
//!            VHDX, VMDK: linkage, linkage2        VHD: time of parent   qcow2: name of parent
//!   before   the parent's identity, none          of its last change    its path
//!   copying  the identity before, the coming one  0: unknown            the same
//!   merged   the present one, a mark              1                     a mark behind the path
//! ```
//!
//! While data is copied, the parent changes, and the child still reads right, since it keeps its
//! own data. So its link must lead to the parent before and after the change of identity. From the
//! mark on the parent has all data of the child, and the child is only to be removed.
//!
//! The mark of a VHDX or VMDK is made of both images' identities. A program that writes to the
//! child gives it another identity, and the mark is void then: what was written would be lost
//! otherwise. A VHD keeps its identity. Its mark is a time at which no parent was changed, so that
//! other programs refuse the child. A qcow2 records no identity, so any file at the path is the
//! parent, also while it changes. Other programs find no parent at the path with the mark.

use crate::{DiskError, Result};
use diskwright_image::{ImageInfo, LinkageId, ParentLink};
use std::path::Path;
use uuid::Uuid;

/// "Unknown", for the time stamp of a parent.
const UNKNOWN_SECONDS: u32 = 0;
/// One second after the beginning of the time that a VHD can record.
const MERGED_SECONDS: u32 = 1;
/// Makes the mark of two CIDs differ from what a difference export makes of them.
const MARK: u128 = 0x6d65_7267_6564;

/// The link of a child while its data is copied into the parent, whose identity will be `coming`.
/// Both identities are `None` for a format without any.
pub(crate) fn copying(link: ParentLink, present: Option<LinkageId>, coming: Option<LinkageId>) -> ParentLink {
    ParentLink {
        linkage: present,
        linkage2: coming,
        modified_seconds: link.modified_seconds.map(|_| UNKNOWN_SECONDS),
        ..link
    }
}

/// The link of a child that accepts any time of its parent's last change: the parent's own link is
/// about to be changed. A VHD that recorded a time could not be written afterwards.
pub(crate) fn of_any_time(link: ParentLink) -> ParentLink {
    ParentLink { modified_seconds: link.modified_seconds.map(|_| UNKNOWN_SECONDS), ..link }
}

/// Whether the link accepts any time of the parent's last change.
pub(crate) fn accepts_any_time(link: &ParentLink) -> bool {
    link.modified_seconds == Some(UNKNOWN_SECONDS)
}

/// Whether the link records when the parent was last changed.
pub(crate) fn has_time(link: &ParentLink) -> bool {
    link.modified_seconds.is_some_and(|seconds| seconds != UNKNOWN_SECONDS)
}

/// The link of a child whose parent has all of its data.
pub(crate) fn merged(link: ParentLink, child: &ImageInfo, parent: Option<LinkageId>) -> ParentLink {
    ParentLink {
        linkage: parent,
        linkage2: child.linkage_id.zip(parent).map(|(id, parent)| both(id, parent)),
        is_merged: parent.is_none(),
        modified_seconds: link.modified_seconds.map(|_| MERGED_SECONDS),
        ..link
    }
}

/// Whether the parent has all data of the child, by the child's link.
pub(crate) fn is_merged(child: &ImageInfo, link: &ParentLink) -> bool {
    match link.modified_seconds {
        _ if link.is_merged => true,
        Some(seconds) => seconds == MERGED_SECONDS,
        None => {
            link.linkage2.is_some()
                && link.linkage2 == child.linkage_id.zip(link.linkage).map(|(id, parent)| both(id, parent))
        }
    }
}

/// Refuses to write data to an image that is marked: the parent has all of its data, and the merge
/// that ends with its removal would lose what was written since.
pub(crate) fn refuse_merged(path: &Path, image: &ImageInfo, link: Option<&ParentLink>) -> Result<()> {
    if !link.is_some_and(|link| is_merged(image, link)) {
        return Ok(());
    }
    Err(DiskError::BadOptions {
        what: format!(
            "{}: nothing can be merged into it: its data is in its parent, as a merge of it was interrupted",
            path.display()
        ),
        hint: format!("finish that merge first: merge {} itself, which removes it", path.display()),
    })
}

/// Whether a merge may have begun to change the parent, by the child's link.
pub(crate) fn may_be_copying(link: &ParentLink) -> bool {
    match link.modified_seconds {
        Some(seconds) => seconds == UNKNOWN_SECONDS,
        None => link.linkage2.is_some() || link.linkage.is_none(),
    }
}

fn both(child: LinkageId, parent: LinkageId) -> LinkageId {
    match (child, parent) {
        (LinkageId::Guid(child), LinkageId::Guid(parent)) => Uuid::from_u128(child.as_u128() ^ parent.as_u128()).into(),
        _ => child.combined(parent, MARK),
    }
}
