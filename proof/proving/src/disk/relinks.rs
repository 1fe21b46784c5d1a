//! Disks whose link to the parent changes while they are in use.
//!
//! All links lead to the same parent by their relative path. They differ in the parts that nobody
//! follows: the absolute path leads nowhere and has another length each time. A VHDX has the
//! link's number in that path. A VHD has it in the name, and every second link changes only the
//! name, which is a change of one sector. A VMDK records one path: it has more or fewer `./` in
//! front of the name, and the link's number as the second identity. A VDI has no paths: the number
//! is a second identity.

use super::{Changes, DiskCase, DiskTruth, changes::PARENT_MODIFIED_SECONDS, session::Session};
use crate::{
    mutation::Phase,
    stage::{Outcome, Stage},
};
use diskwright_disk::Disk;
use diskwright_image::{Format, LinkageId, ParentLink};
use uuid::Uuid;

impl DiskCase {
    /// The link with this number, which is not 0.
    fn link(&self, disk: &Disk, number: u32) -> Outcome<ParentLink> {
        let layers = disk.layers();
        let parent = layers.get(1).ok_or("the disk has no parent")?;
        if self.format == Format::Vdi {
            let info = parent.image.info();
            return Ok(ParentLink {
                file_id: info.disk_id,
                linkage: info.linkage_id,
                linkage2: Some(Uuid::from_u128(number.into()).into()),
                format: Some(Format::Vdi),
                ..ParentLink::default()
            });
        }
        let is_vhd = self.format == Format::Vhd;
        let place = if is_vhd { number / 2 } else { number };
        let link = ParentLink {
            relative_path: Some(format!(".\\parent.{}", self.format)),
            absolute_path: Some(format!("\\d\\{place}\\{}parent", "folder\\".repeat(place as usize % 4 * 90))),
            linkage: Some(parent.image.linkage_id().ok_or("the parent has no identity")?),
            ..ParentLink::default()
        };
        if self.format == Format::Vmdk {
            let hint = Some(format!("{}parent.vmdk", "./".repeat(number as usize % 4 * 40)));
            let linkage2 = Some(LinkageId::Cid(number));
            return Ok(ParentLink { relative_path: hint.clone(), name: hint, absolute_path: None, linkage2, ..link });
        }
        Ok(if is_vhd {
            ParentLink { name: Some(number.to_string()), modified_seconds: Some(PARENT_MODIFIED_SECONDS), ..link }
        } else {
            ParentLink { linkage2: Some(Uuid::from_u128(number.into()).into()), ..link }
        })
    }

    /// The number of the disk's link; 0 for the link that it was made with.
    pub(super) fn link_number(&self, disk: &Disk) -> u32 {
        if self.changes != Changes::Relinks {
            return 0;
        }
        let link = disk.layers()[0].image.parent_link().unwrap_or_default();
        let text = match self.format {
            Format::Vhd => link.name,
            Format::Vmdk => return link.linkage2.and_then(LinkageId::cid).unwrap_or(0),
            Format::Vdi => link.linkage2.and_then(LinkageId::guid).map(|number| number.as_u128().to_string()),
            _ => link.absolute_path.and_then(|path| path.split('\\').nth(2).map(str::to_owned)),
        };
        text.and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// Judges whether the disk has one of the links that it may have, whole.
    pub(super) fn judge_link(&self, disk: &Disk, truth: &DiskTruth) -> Outcome {
        let found = self.link_number(disk);
        if !(truth.changed.link..=truth.changed.next_link).contains(&found) {
            let (first, last) = (truth.changed.link, truth.changed.next_link);
            return Err(format!("the disk has link {found}, expected {first} to {last}"));
        }
        let image = &disk.layers()[0].image;
        if self.format == Format::Vmdk && image.info().disk_id.is_none() {
            return Err("lines of the disk database were lost".into());
        }
        let link = image.parent_link().unwrap_or_default();
        if found > 0 && (ParentLink { modified_offset_bytes: None, ..link.clone() }) != self.link(disk, found)? {
            return Err(format!("link {found} is not whole: {link:?}"));
        }
        Ok(())
    }

    /// Gives the disk the link with this number.
    ///
    /// # Errors
    /// What went wrong.
    pub fn relink(&self, disk: &Disk, number: u32) -> Outcome {
        let link = self.link(disk, number)?;
        let layers = disk.layers();
        let writer = layers[0].image.writer().ok_or("the disk is not writable")?;
        writer.set_parent_link(&link).map_err(|error| format!("set_parent_link failed: {error}"))
    }

    pub(super) fn play_relink(
        &self,
        stage: &Stage<DiskTruth>,
        session: &Session<'_>,
        truth: &mut DiskTruth,
    ) -> Outcome {
        truth.changed.next_link += 1;
        stage.record(truth.clone());
        stage.world.phase(Some(Phase::Relink));
        self.relink(&session.disk, truth.changed.next_link)?;
        stage.world.phase(None);
        truth.changed.link = truth.changed.next_link;
        stage.record(truth.clone());
        Ok(())
    }
}
