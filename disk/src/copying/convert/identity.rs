//! Which identities of a disk its copy keeps.
//!
//! ```text
//!   source        copy    disk id             identity for children
//!   VHDX          VHDX    virtual disk id     DataWriteGuid, if the contents are the same
//!   VHD           VHD     unique id           the same id
//!   VHDX          VHD     becomes unique id   none of the source's children fits
//!   VHD           VHDX    becomes disk id     new
//!   raw, export   any     refused: the source has none
//!   any           raw     refused: the copy can have none
//!   any           VDI     refused beside a child of the source: it would find two parents
//! ```
//!
//! A VHDX names its contents by the DataWriteGuid: two files may share it only if their contents
//! are the same (MS-VHDX 2.2.2.1). So a copy of another size, or with lost ranges, gets a new one.
//! The FileWriteGuid names the file, and is always new.

use crate::{
    DiskError, Opened, Result,
    error::file_error,
    opening::siblings::{Candidate, children_in},
};
use diskwright_image::{Format, Identities, ImageInfo, LinkageId};
use diskwright_store::Files;
use std::path::Path;
use uuid::Uuid;

/// What becomes of the identity of a disk in its copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Identity {
    /// The copy is another disk, with identities of its own.
    #[default]
    New,
    /// The copy takes the place of the disk: guests see the same disk, and where the contents are
    /// the same, the children of the disk accept the copy as their parent.
    Keep,
}

/// What a copy keeps.
#[derive(Debug, Default)]
pub(super) struct CopiedIdentity {
    /// The VHD unique id, or the virtual disk id of a VHDX.
    pub(super) disk_id: Option<Uuid>,
    /// The DataWriteGuid of a VHDX. To be set when the contents are durable.
    pub(super) contents_id: Option<LinkageId>,
    /// Whether the children of the source accept the copy.
    pub(super) is_for_children: bool,
    /// What the copy does not keep, or keeps although it should not; a sentence each.
    pub(super) notes: Vec<String>,
}

impl CopiedIdentity {
    /// What the copy `dest` of this format keeps. `differs` says why its contents are not those of
    /// the source; `None` if they are.
    ///
    /// # Errors
    /// If either side has no identity, or a child of the source beside the copy would no longer
    /// know its parent.
    pub(super) fn of(
        files: &Files,
        (source, source_path): (&Opened, &Path),
        (dest, format): (&Path, Format),
        differs: Option<&str>,
    ) -> Result<Self> {
        let identities = format.driver().identities;
        if identities == Identities::None {
            return Err(cannot_keep(dest, &format!("a {format} file records no identity")));
        }
        let layers = source.disk().map(|disk| disk.layers());
        let info = layers.as_ref().and_then(|layers| layers.first()).map(|layer| layer.image.info());
        let Some((info, disk_id)) = info.and_then(|info| Some((info, info.disk_id?))) else {
            let what = format!("{}: it has no identity that a copy could keep", source_path.display());
            return Err(DiskError::BadOptions { what, hint: "leave out `ConvertOptions::identity`".into() });
        };
        let (shown, of_source) = (dest.display(), source_path.display());
        let other_format = (info.format != format).then(|| format!("it is a {format} and not a {}", info.format));
        refuse_beside_child(files, (dest, format), info)?;
        let mut kept = Self { disk_id: Some(disk_id), ..Self::default() };
        match (identities, other_format, differs) {
            (Identities::DiskAndContents, None, None) => {
                kept.contents_id = info.linkage_id;
                kept.is_for_children = info.linkage_id.is_some();
            }
            (Identities::File, None, None) => kept.is_for_children = true,
            (Identities::File, None, Some(why)) => {
                kept.is_for_children = true;
                kept.notes.push(format!(
                    "{shown}: children of {of_source} accept it as their parent, because a {format} has one identity; do not connect them to it: {why}"
                ));
            }
            (_, Some(why), _) => kept.notes.push(not_for_children(dest, source_path, &why)),
            (_, None, Some(why)) => kept.notes.push(not_for_children(dest, source_path, why)),
            (Identities::None, None, None) => {}
        }
        Ok(kept)
    }

    /// Gives up the identity of the contents, because not all of them were copied.
    pub(super) fn give_up_contents(&mut self, source: &Path, dest: &Path) {
        if self.contents_id.take().is_some() {
            self.is_for_children = false;
            self.notes.push(not_for_children(dest, source, "ranges were lost"));
        }
    }
}

fn not_for_children(dest: &Path, source: &Path, why: &str) -> String {
    format!(
        "{}: it keeps the disk id, but children of {} do not accept it as their parent: {why}",
        dest.display(),
        source.display()
    )
}

/// Refuses a second image of this identity in the folder of a child that finds its parent by that
/// identity and by no path: with two of them it could be read no more.
fn refuse_beside_child(files: &Files, (dest, format): (&Path, Format), info: &ImageInfo) -> Result<()> {
    if !format.driver().child_names_file_id {
        return Ok(());
    }
    let dir = dest.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = |source| file_error("search for children in", dir, source);
    let real = files.canonical(dir).map_err(failed)?;
    let copy = Candidate::of(real.join(dest.file_name().unwrap_or_default()), info);
    let (children, _) = children_in(files, &real, format, &[copy]).map_err(failed)?;
    let Some((child, _)) = children.first() else { return Ok(()) };
    Err(DiskError::BadOptions {
        what: format!(
            "{}: cannot keep the identity: {} lies in this folder and finds its parent by that identity alone, so it could not be read beside two images that have it",
            dest.display(),
            child.display()
        ),
        hint: "name a destination in another folder, or leave out `ConvertOptions::identity`".into(),
    })
}

/// The refusal for a destination that has no identity.
pub(super) fn cannot_keep(dest: &Path, why: &str) -> DiskError {
    DiskError::Usage {
        what: format!("{}: cannot keep the identity: {why}", dest.display()),
        hint: format!(
            "leave out `ConvertOptions::identity`, or name the copy {}",
            Format::extensions_of(|driver| driver.identities != Identities::None)
        ),
    }
}
